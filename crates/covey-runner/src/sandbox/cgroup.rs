//! Cgroups of sandboxes: version 2 for freezing and killing, either version for limits, each where the host lets us.
//!
//! What stays true: what a host can do is found out by doing it; a sandbox's cgroups are named in its record before they
//! are made, and removed only after its processes are gone. What does not belong here: which limits.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use covey_types::SandboxId;
use covey_wire::runner::SandboxLimits;
use rustix::event::{PollFd, PollFlags, Timespec};
use serde::{Deserialize, Serialize};

/// Processes that do not stop within this are in an uninterruptible wait.
const FREEZE_DEADLINE: Duration = Duration::from_secs(10);
/// A cgroup may stay busy for a moment after its last process ended.
const REMOVE_DEADLINE: Duration = Duration::from_secs(5);
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// Period of the processor limit, in microseconds; the kernel's default.
const CPU_PERIOD_US: u64 = 100_000;
/// All sandboxes of a host stand below this name.
const PARENT: &str = "covey";

/// What this host allows, found out once.
#[derive(Debug, Clone, Default)]
pub(super) struct Host {
    v2: Option<PathBuf>,
    v2_controllers: Vec<Controller>,
    v1: Vec<(Controller, PathBuf)>,
}

/// What a cgroup can limit or do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Controller {
    Memory,
    Pids,
    Cpu,
    Freezer,
}

impl Controller {
    fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Pids => "pids",
            Self::Cpu => "cpu",
            Self::Freezer => "freezer",
        }
    }
}

/// The cgroups of one sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Cgroups {
    pub(super) v2: Option<PathBuf>,
    pub(super) v2_controllers: Vec<Controller>,
    pub(super) v1: Vec<(Controller, PathBuf)>,
}

impl Host {
    /// Looks for hierarchies and tries each.
    pub(super) fn probe() -> io::Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let mut host = Self::default();
        let trial = format!("trial-{}", std::process::id());
        for (mount, kind, options) in mounts.lines().filter_map(parse_mount) {
            if kind == "cgroup2" && host.v2.is_none() {
                for parent in parents(&mount, own_path(&own, "")) {
                    let controllers = enable_controllers(&parent);
                    // Below our own cgroup controllers cannot be had while we are in it; as root the hierarchy's
                    // root may give them.
                    let is_better = host.v2.is_none() || controllers.len() > host.v2_controllers.len();
                    if is_better && is_usable(&parent, &trial, "cgroup.freeze") {
                        host.v2 = Some(parent);
                        host.v2_controllers = controllers;
                    }
                }
            } else if kind == "cgroup" {
                for controller in [Controller::Memory, Controller::Pids, Controller::Cpu, Controller::Freezer]
                {
                    let is_new = host.v1.iter().all(|(known, _)| *known != controller);
                    if is_new && options.split(',').any(|option| option == controller.name()) {
                        let parents = parents(&mount, own_path(&own, controller.name()));
                        let found =
                            parents.into_iter().find(|parent| is_usable(parent, &trial, "cgroup.procs"));
                        host.v1.extend(found.map(|parent| (controller, parent)));
                    }
                }
            }
        }
        Ok(host)
    }

    /// The cgroups that a sandbox with these limits will have; makes nothing.
    pub(super) fn plan(&self, sandbox: SandboxId, limits: &SandboxLimits) -> Cgroups {
        let wanted = |controller: Controller| match controller {
            Controller::Memory => limits.memory.0 > 0,
            Controller::Pids => limits.pids > 0,
            // Also without a quota: in a group of its own the whole sandbox weighs as much as one other group or
            // process of the host, however many processes it starts.
            Controller::Cpu => true,
            Controller::Freezer => self.v2.is_none(),
        };
        let name = sandbox.to_string();
        let v2_controllers: Vec<_> = self.v2_controllers.iter().copied().filter(|c| wanted(*c)).collect();
        let v1 = self.v1.iter().filter(|(c, _)| wanted(*c) && !v2_controllers.contains(c));
        Cgroups {
            v2: self.v2.as_ref().map(|parent| parent.join(&name)),
            v1: v1.map(|(controller, parent)| (*controller, parent.join(&name))).collect(),
            v2_controllers,
        }
    }

    /// In words, for `covey doctor`.
    pub(super) fn describe(&self) -> String {
        let names =
            |list: Vec<&'static str>| if list.is_empty() { "nothing".to_owned() } else { list.join(", ") };
        let freeze = match (&self.v2, self.v1.iter().any(|(c, _)| *c == Controller::Freezer)) {
            (Some(_), _) => "cgroup2",
            (None, true) => "cgroup v1",
            (None, false) => "stop signals by the sandbox's own daemon",
        };
        let limited = self.v2_controllers.iter().chain(self.v1.iter().map(|(c, _)| c));
        let limited = limited.filter(|c| **c != Controller::Freezer).map(|c| c.name()).collect();
        format!("freezing by {freeze}; limits on {}", names(limited))
    }

    /// Whether any process tree can be limited as a whole.
    pub(super) fn has_limits(&self) -> bool {
        let has = |controller| {
            self.v2_controllers.contains(&controller) || self.v1.iter().any(|(known, _)| *known == controller)
        };
        has(Controller::Memory) && has(Controller::Pids)
    }
}

/// Mount point, file system type and super options of a line of `mountinfo`.
fn parse_mount(line: &str) -> Option<(PathBuf, &str, &str)> {
    let (front, back) = line.split_once(" - ")?;
    let mount = front.split(' ').nth(4)?;
    let mut back = back.split(' ');
    let kind = back.next()?;
    Some((PathBuf::from(mount), kind, back.nth(1)?))
}

/// Our own cgroup in the hierarchy of `controller`; the empty name is version 2.
fn own_path<'a>(own: &'a str, controller: &str) -> Option<&'a str> {
    own.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, names, path) = (parts.next()?, parts.next()?, parts.next()?);
        let is_it =
            if controller.is_empty() { names.is_empty() } else { names.split(',').any(|n| n == controller) };
        is_it.then_some(path)
    })
}

/// Where sandboxes could stand: below our own cgroup, else below the hierarchy's root.
fn parents(mount: &Path, own: Option<&str>) -> Vec<PathBuf> {
    let mut parents = Vec::new();
    if let Some(own) = own {
        parents.push(mount.join(own.trim_start_matches('/')).join(PARENT));
    }
    let root = mount.join(PARENT);
    if !parents.contains(&root) {
        parents.push(root);
    }
    parents
}

/// Whether a cgroup can be made there, used and removed.
fn is_usable(parent: &Path, trial: &str, needed: &str) -> bool {
    let dir = parent.join(trial);
    let attempt = || -> io::Result<()> {
        fs::create_dir_all(&dir)?;
        let outcome = fs::OpenOptions::new().write(true).open(dir.join(needed)).map(drop);
        // Moving a process in needs the right over the nearest common ancestor as well.
        let above = parent.parent().unwrap_or(parent).join("cgroup.procs");
        let outcome = outcome.and_then(|()| fs::OpenOptions::new().write(true).open(above).map(drop));
        fs::remove_dir(&dir)?;
        outcome
    };
    attempt().is_ok()
}

/// Turns controllers on for the children of `parent`; each by itself, because one that is missing would refuse all.
fn enable_controllers(parent: &Path) -> Vec<Controller> {
    let above = parent.parent().unwrap_or(parent);
    let enable = |controller: &Controller| -> io::Result<()> {
        let word = format!("+{}", controller.name());
        fs::create_dir_all(parent)?;
        fs::write(above.join("cgroup.subtree_control"), &word)?;
        fs::write(parent.join("cgroup.subtree_control"), &word)
    };
    [Controller::Memory, Controller::Pids, Controller::Cpu]
        .into_iter()
        .filter(|c| enable(c).is_ok())
        .collect()
}

impl Cgroups {
    /// Makes them and sets the limits.
    pub(super) fn create(&self, limits: &SandboxLimits) -> io::Result<()> {
        let cpu_quota = u64::from(limits.cpu_percent) * CPU_PERIOD_US / 100;
        if let Some(dir) = &self.v2 {
            make(dir)?;
            for controller in &self.v2_controllers {
                match controller {
                    Controller::Memory => {
                        set(dir, "memory.max", limits.memory.0)?;
                        // Swap would only turn a clear end into a slow one; kernels without swap have no such file.
                        set_if_there(dir, "memory.swap.max", 0)?;
                    }
                    Controller::Pids => set(dir, "pids.max", limits.pids)?,
                    Controller::Cpu if cpu_quota == 0 => {}
                    Controller::Cpu => set(dir, "cpu.max", format!("{cpu_quota} {CPU_PERIOD_US}"))?,
                    Controller::Freezer => {}
                }
            }
        }
        for (controller, dir) in &self.v1 {
            make(dir)?;
            match controller {
                Controller::Memory => {
                    set(dir, "memory.limit_in_bytes", limits.memory.0)?;
                    set_if_there(dir, "memory.memsw.limit_in_bytes", limits.memory.0)?;
                }
                Controller::Pids => set(dir, "pids.max", limits.pids)?,
                Controller::Cpu if cpu_quota == 0 => {}
                Controller::Cpu => {
                    set(dir, "cpu.cfs_period_us", CPU_PERIOD_US)?;
                    set(dir, "cpu.cfs_quota_us", cpu_quota)?;
                }
                Controller::Freezer => {}
            }
        }
        Ok(())
    }

    /// Whether a controller of either version holds.
    pub(super) fn has(&self, controller: Controller) -> bool {
        self.v2_controllers.contains(&controller) || self.v1(controller).is_some()
    }

    fn v1(&self, controller: Controller) -> Option<&Path> {
        self.v1.iter().find(|(known, _)| *known == controller).map(|(_, dir)| dir.as_path())
    }

    /// Puts a process with one thread and no children into the version 1 groups.
    pub(super) fn join_v1(&self, pid: i32) -> io::Result<()> {
        self.v1.iter().try_for_each(|(_, dir)| fs::write(dir.join("cgroup.procs"), pid.to_string()))
    }

    /// Whether every process, the daemon among them, is stopped; false where no freezer is ours.
    pub(super) fn is_frozen(&self) -> io::Result<bool> {
        if let Some(dir) = &self.v2 {
            let events = fs::read_to_string(dir.join("cgroup.events"))?;
            return Ok(events.lines().any(|line| line == "frozen 1"));
        }
        match self.v1(Controller::Freezer) {
            Some(dir) => Ok(fs::read_to_string(dir.join("freezer.state"))?.trim() == "FROZEN"),
            None => Ok(false),
        }
    }

    /// Stops every process and waits until all have; `None` where no freezer is ours.
    pub(super) fn freeze(&self) -> Option<io::Result<()>> {
        if let Some(dir) = &self.v2 {
            return Some(freeze_v2(dir));
        }
        self.v1(Controller::Freezer).map(|dir| {
            set(dir, "freezer.state", "FROZEN")?;
            let started = Instant::now();
            while fs::read_to_string(dir.join("freezer.state"))?.trim() != "FROZEN" {
                if started.elapsed() > FREEZE_DEADLINE {
                    return Err(not_frozen());
                }
                std::thread::sleep(LOOK_INTERVAL);
            }
            Ok(())
        })
    }

    /// Lets them go on; `None` where no freezer is ours.
    pub(super) fn thaw(&self) -> Option<io::Result<()>> {
        match (&self.v2, self.v1(Controller::Freezer)) {
            (Some(dir), _) => Some(set(dir, "cgroup.freeze", 0)),
            (None, Some(dir)) => Some(set(dir, "freezer.state", "THAWED")),
            (None, None) => None,
        }
    }

    /// Kills every process at once where the kernel offers it (Linux 5.14); the caller kills pid 1 as well.
    pub(super) fn kill(&self) -> io::Result<()> {
        match &self.v2 {
            Some(dir) => match fs::OpenOptions::new().write(true).open(dir.join("cgroup.kill")) {
                Ok(_) => set(dir, "cgroup.kill", 1),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                Err(error) => Err(error),
            },
            None => Ok(()),
        }
    }

    /// Removes them; those that are gone already are as good.
    pub(super) fn remove(&self) -> io::Result<()> {
        let started = Instant::now();
        for dir in self.v2.iter().chain(self.v1.iter().map(|(_, dir)| dir)) {
            loop {
                match fs::remove_dir(dir) {
                    Ok(()) => break,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                    Err(error) if started.elapsed() > REMOVE_DEADLINE => return Err(error),
                    Err(_) => std::thread::sleep(LOOK_INTERVAL),
                }
            }
        }
        Ok(())
    }
}

fn make(dir: &Path) -> io::Result<()> {
    match fs::create_dir(dir) {
        // The shared parent is nobody's to keep: make it again if it was cleaned up.
        Err(error) if error.kind() == io::ErrorKind::NotFound => fs::create_dir_all(dir),
        outcome => outcome,
    }
}

fn set(dir: &Path, file: &str, value: impl std::fmt::Display) -> io::Result<()> {
    let path = dir.join(file);
    fs::write(&path, value.to_string())
        .map_err(|error| io::Error::new(error.kind(), format!("write {}: {error}", path.display())))
}

fn set_if_there(dir: &Path, file: &str, value: u64) -> io::Result<()> {
    if dir.join(file).exists() { set(dir, file, value) } else { Ok(()) }
}

fn freeze_v2(dir: &Path) -> io::Result<()> {
    let events = fs::File::open(dir.join("cgroup.events"))?;
    set(dir, "cgroup.freeze", 1)?;
    let started = Instant::now();
    loop {
        let mut text = [0; 256];
        let length = rustix::io::pread(&events, &mut text, 0)?;
        if String::from_utf8_lossy(&text[..length]).lines().any(|line| line == "frozen 1") {
            return Ok(());
        }
        let left = FREEZE_DEADLINE.checked_sub(started.elapsed()).ok_or_else(not_frozen)?;
        let wait = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        // The kernel notifies readers of this file of each change.
        let mut fds = [PollFd::from_borrowed_fd(events.as_fd(), PollFlags::PRI)];
        match rustix::event::poll(&mut fds, Some(&wait)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn not_frozen() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the sandbox's processes did not stop in time")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_and_own_cgroups_are_found_in_both_versions() {
        let line = "30 25 0:26 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate";
        assert_eq!(parse_mount(line), Some(("/sys/fs/cgroup/unified".into(), "cgroup2", "rw,nsdelegate")));
        let line = "31 25 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory";
        assert_eq!(parse_mount(line), Some(("/sys/fs/cgroup/memory".into(), "cgroup", "rw,memory")));
        let own = "4:memory:/a/b\n3:cpu,cpuacct:/c\n0::/user.slice\n";
        assert_eq!(own_path(own, "memory"), Some("/a/b"));
        assert_eq!(own_path(own, "cpu"), Some("/c"));
        assert_eq!(own_path(own, ""), Some("/user.slice"));
        assert_eq!(own_path(own, "pids"), None);
    }
}
