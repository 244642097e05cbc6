//! The manifest: a home's tree as content-addressed objects, described byte for byte in
//! `docs/formats/home-store.md`, section 3.
//!
//! What stays true: one tree has one encoding, so equal trees have equal roots whatever the scan order;
//! decoders take arbitrary bytes and answer with a typed error, never with a panic or a large allocation
//! (I13). What does not belong here: file systems, and where objects are stored (they are blocks).

mod content;
mod cursor;
mod entry;
mod links;
mod listing;
mod root;

pub use content::{Blob, Content, ContentMap, Extent, window_bytes};
pub use cursor::MalformedObject;
pub use entry::{DeviceNumber, Entry, EntryBody, EntryKind, Meta, NAME_BYTES_MAX, Time, Xattr, Xattrs};
pub use links::{LinkGroup, LinkTable};
pub use listing::{ListingBuilder, ListingPart, ListingPiece, decode_listing_object};
pub use root::Root;

pub(crate) use content::for_each_window;
pub(crate) use cursor::{Cursor, put_varint};
pub(crate) use entry::{EntryView, is_kept_xattr};

/// Directories below each other at most; deeper trees are refused with the path. Far above what tools build,
/// low enough that neither stack nor descriptors run out.
pub const DEPTH_MAX: usize = 16_384;

/// Longest path from a home's root, in bytes (longer than `PATH_MAX`, which does not bind us).
pub const PATH_BYTES_MAX: usize = 4 * 1024 * 1024;
