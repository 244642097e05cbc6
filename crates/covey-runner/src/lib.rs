//! The data plane: sandboxes, working copies, block cache.
