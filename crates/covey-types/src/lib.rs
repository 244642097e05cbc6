//! Covey's vocabulary: ids, hashes, sizes, times, leases, and the state machines with their transitions.
//!
//! Reason for a crate: **purity**. From here no clock, socket, disk, SQL or randomness is reachable, so a
//! rule written here means the same in the server, the runner and the sandbox daemon.
//! What does not belong here: anything that is only *transported* (see `covey-wire`) or only *stored*.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod digest;
pub mod fault;
pub mod home_path;
pub mod id;
pub mod lease;
pub mod sandbox;
pub mod session;
pub mod size;
pub mod snapshot;
pub mod step;
pub mod time;

pub use digest::{BlockHash, RootHash};
pub use fault::Fault;
pub use home_path::HomePath;
pub use id::{
    AgentId, EnvironmentId, EventId, HomeId, OrgId, RunnerId, SandboxId, SessionId, StepId, TokenId,
};
pub use lease::{FencingToken, Generation};
pub use sandbox::{SandboxEvent, SandboxState};
pub use session::{SessionStatus, TurnState};
pub use size::ByteCount;
pub use snapshot::{Snapshot, SnapshotKind};
pub use step::{StepKind, StepState};
pub use time::Timestamp;
