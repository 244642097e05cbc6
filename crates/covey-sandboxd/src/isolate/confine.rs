//! Limits, capabilities, no new privileges, Landlock.
//!
//! What stays true: after [`drop_privileges`] no program started inside can have a capability, ever.
//! What does not belong here: the file system and the system call filter.

use std::io;
use std::os::fd::OwnedFd;

use covey_wire::setup::{SetupPlace, SetupSpec};
use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr, RulesetCreatedAttr,
    Scope,
};
use rustix::fs::{Mode, OFlags};
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::setup::{SetupError, Tried};

/// Open files of one process: enough for the largest build tools, far below what exhausts a kernel.
const OPEN_FILES_MAX: u64 = 65_536;
/// Where the agent may write; everything else of its root is read-only by mount as well.
const WRITABLE: [&str; 6] = ["/home/agent", "/outputs", "/tmp", "/run", "/dev", "/proc"];
/// The newest Landlock version whose rights are named here; older kernels enforce the part they know.
const LANDLOCK_ABI: ABI = ABI::V7;

/// Sets the limits that processes carry themselves.
pub(crate) fn apply_limits(spec: &SetupSpec) -> Result<(), SetupError> {
    let set = |resource, value: u64, name: &str| {
        let hard = rustix::process::getrlimit(resource).maximum;
        let value = hard.map_or(value, |hard| hard.min(value));
        rustix::process::setrlimit(resource, Rlimit { current: Some(value), maximum: Some(value) })
            .tried(SetupPlace::Confine, format!("limit {name}"))
    };
    set(Resource::Core, 0, "core dumps")?;
    set(Resource::Nofile, OPEN_FILES_MAX, "open files")?;
    set(Resource::Memlock, 8 << 20, "locked memory")?;
    // Per user namespace since Linux 5.14; before that per host uid, which still stops a fork bomb.
    if spec.limits.pids > 0 && !spec.pids_in_cgroup {
        set(Resource::Nproc, u64::from(spec.limits.pids), "processes")?;
    }
    // Address space is no measure (runtimes reserve far more than they use), private writable memory is.
    if spec.limits.memory.0 > 0 && !spec.memory_in_cgroup {
        set(Resource::Data, spec.limits.memory.0, "memory of a process")?;
    }
    Ok(())
}

/// Gives up every capability for good, forbids new ones, and hides this process's memory from its own uid.
pub(crate) fn drop_privileges() -> Result<(), SetupError> {
    let place = SetupPlace::Confine;
    rustix::thread::clear_ambient_capability_set().tried(place, "clear ambient capabilities")?;
    for capability in 0..u64::BITS {
        // One past the kernel's last capability is the end of the list.
        match rustix::thread::remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(
            1 << capability,
        )) {
            Err(rustix::io::Errno::INVAL) => break,
            outcome => outcome.tried(place, format!("drop capability {capability}"))?,
        }
    }
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, sets).tried(place, "drop capabilities")?;
    rustix::thread::set_no_new_privs(true).tried(place, "forbid new privileges")?;
    // The agent has our uid: without this it could trace us, read our memory and open our descriptors.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).tried(place, "hide memory")
}

/// Confines writes and, where the kernel can, signals and abstract sockets. Returns the enforced ABI, 0 for none:
/// the mounts hold without Landlock, it is the second wall.
pub(crate) fn apply_landlock() -> Result<i32, SetupError> {
    let abi = supported_abi();
    if abi == 0 {
        return Ok(0);
    }
    let place = SetupPlace::Confine;
    let mut writable = Vec::new();
    for path in WRITABLE {
        writable.push((path, open(path)?));
    }
    restrict(&open("/")?, &writable).map_err(io::Error::other).tried(place, "restrict by Landlock")?;
    Ok(abi)
}

fn restrict(root: &OwnedFd, writable: &[(&str, OwnedFd)]) -> Result<(), landlock::RulesetError> {
    let all = AccessFs::from_all(LANDLOCK_ABI);
    let devices = AccessFs::MakeChar | AccessFs::MakeBlock;
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all)?
        .scope(Scope::from_all(LANDLOCK_ABI))?
        .create()?
        .add_rule(PathBeneath::new(root, AccessFs::from_read(LANDLOCK_ABI)))?;
    for (path, fd) in writable {
        let mut access = all & !devices;
        if *path != "/dev" {
            access &= !AccessFs::IoctlDev;
        }
        ruleset = ruleset.add_rule(PathBeneath::new(fd, access))?;
    }
    ruleset.restrict_self()?;
    Ok(())
}

fn open(path: &str) -> Result<OwnedFd, SetupError> {
    rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .tried(SetupPlace::Confine, format!("open {path} for Landlock"))
}

/// Asks the kernel; a flag instead of a ruleset makes the call answer with the version.
fn supported_abi() -> i32 {
    landlock_version().unwrap_or(0)
}

#[expect(unsafe_code, reason = "the version query has no safe wrapper")]
fn landlock_version() -> io::Result<i32> {
    const LANDLOCK_CREATE_RULESET_VERSION: u32 = 1;
    // SAFETY: with the version flag the kernel reads no memory: the attribute pointer must be null.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<u8>(),
            0_usize,
            LANDLOCK_CREATE_RULESET_VERSION,
        )
    };
    if version < 0 { Err(io::Error::last_os_error()) } else { Ok(version as i32) }
}
