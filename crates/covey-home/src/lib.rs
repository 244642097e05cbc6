//! The home store: a directory becomes blocks, a manifest and a snapshot, and back.
//!
//! Reason for a crate: **purity** of subject. It knows directories, blocks and roots, and no agents, sessions
//! or sandboxes; orgs and homes are opaque names. Every call blocks; async callers use a blocking thread. The
//! bytes that it writes are described in `docs/formats/home-store.md`.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod anchor;
pub mod archive;
pub mod backend;
pub mod block;
mod carry;
mod collect;
pub mod contract;
mod copy;
mod edit;
mod excludes;
mod gaps;
mod identity;
pub mod integrity;
mod keys;
pub mod manifest;
mod materialize;
mod memory;
pub mod name;
pub mod object;
mod owner;
mod pack_store;
mod path;
mod pointer;
mod progress;
mod read_file;
mod secure;
mod stat_cache;
mod sys;
pub mod tracked;
pub mod usage;
mod verify;
pub mod view;
mod work;

pub use block::{BLOCK_BYTES_MAX, Block, BlockHasher, BlockStore, StoreError, Upload, UploadReport};
pub use carry::{CarryError, carry_states};
pub use collect::{
    CONDEMNED_MAX, CollectError, CollectOptions, CollectReport, MarkError, Roots, THOROUGH_LEVEL, collect,
    fence_uploads, meet_floor,
};
pub use copy::{CopyError, CopyReport, DamagedPack, Sealing, check_pack, copy};
pub use edit::{EditError, Edited, restore_path};
pub use excludes::{DEFAULT_EXCLUDES, Excludes};
pub use identity::StoreIdentity;
pub use keys::{KeyError, KeyId, KeyringReport, MasterKey, NameKeys, OrgKeys};
pub use materialize::{
    Contents, Gap, MaterializeError, MaterializeReport, MaterializeRequest, materialize, materialize_sharing,
};
pub use memory::MemoryStore;
pub use owner::{Destroyed, claim, destroy, owner};
pub use pack_store::{
    Existing, PackContents, PackName, PackReport, PackStore, PackUpload, PackedBlock, Packing, SUSPECTS_MAX,
    SuspectState, Suspects, Unsealed,
};
pub use pointer::{
    Pointer, PointerError, Pointers, SNAPSHOTS_KEPT_MAX, SecureAndPublishError, secure_and_publish,
};
pub use progress::{Counters, NoProgress, Progress};
pub use secure::{PrepareReport, SecureError, SecureReport, SecureRequest, prepare, secure};
pub use verify::{VerifyReport, verify};
