//! Mounted homes: a snapshot is mounted instead of copied, and a secure costs what changed.
//!
//! Reason for a crate: **purity** of what lies beside it. It writes file-system images and calls `mount`, which
//! needs root; `covey-home` stays a library that any user can run, and whoever only copies homes does not link
//! this. No agents, sessions or sandboxes here. Every call blocks.
//!
//! A mounted home is an overlay: at the bottom the block [`Cache`], one plain file per content; above it an
//! [`Image`], the whole tree without bytes; on top the upper directory, which holds what changed since, and
//! which [`covey_home::tracked`] secures. The files are described in `docs/formats/mounted-home.md`.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod cache;
mod content;
mod erofs;
mod home;
mod image;
mod overlay;
mod probe;

pub use cache::{Cache, CacheError, CacheReport, FillReport, FillRequest, Missing};
pub use content::ContentId;
pub use home::{MountError, MountReport, MountRequest, MountedHome, SecureMounted, UnmountReport};
pub use image::{Image, ImageError, ImageFacts, ImageRequest, Needs, ObjectsFirst};
pub use probe::{Unsupported, probe};
