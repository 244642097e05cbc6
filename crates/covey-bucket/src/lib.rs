//! The home store's files in a bucket that speaks S3.
//!
//! Reason for a crate: **artifact**. It carries an HTTP client, TLS and a runtime, which `covey-home` must not know
//! and a runner's process must not hold together with a bucket's key. It knows files under keys and nothing of what
//! is in them. Everything here blocks; requests run on threads of its own.
//!
//! ```no_run
//! use covey_bucket::{Access, BucketStore, OpenOptions, Patience, Settings};
//! use covey_home::PackStore;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let settings = Settings::from_environment(&|name| std::env::var(name).ok())?;
//! let options = OpenOptions {
//!     settings: &settings,
//!     access: Access::Write,
//!     patience: Patience::default(),
//!     local_dir: None,
//!     probe_again: true,
//! };
//! let bucket = BucketStore::open(&"s3://homes/covey".parse()?, &options)?;
//! let blocks = PackStore::open(bucket.backend("org")?)?;
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod backend;
mod client;
mod failure;
mod patience;
mod place;
mod probe;
mod profile;
mod runtime;
mod settings;
mod small;
mod store;
mod upload;
mod wire;
mod witness;

pub use patience::Patience;
pub use place::{BucketPlace, InvalidPlace};
pub use profile::ProfileError;
pub use settings::{Key, Settings, SettingsError};
pub use store::{Access, BucketStore, OpenError, OpenOptions};
pub use upload::{FILE_BYTES_MAX, PART_BYTES, WHOLE_BYTES_MAX};
pub use wire::Requests;
