//! The home store: a directory becomes blocks, a manifest and a snapshot, and back.
