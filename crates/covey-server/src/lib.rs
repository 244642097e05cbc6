//! The control plane: API, journal, loop driver, model clients.
