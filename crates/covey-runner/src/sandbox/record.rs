//! What a runner leaves on disk about each sandbox, so that its successor finds every process and cgroup.
//!
//! One directory per sandbox, `<run_dir>/<sandbox id>/`, with `record.json` and `ctl.sock`. What stays true: the directory
//! appears with its record in it, before anything else of the sandbox exists, and goes last. A process is named by boot,
//! pid and start time, so that a reused pid is never taken for it. What does not belong here: what is done with processes.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use covey_types::{HomeId, SandboxId};
use serde::{Deserialize, Serialize};

use super::cgroup::Cgroups;

const RECORD: &str = "record.json";
/// Grows when a field changes its meaning; a record of another format is left alone and reported.
const FORMAT: u32 = 1;
/// No record is longer; a larger file is not one.
const RECORD_BYTES_MAX: u64 = 64 * 1024;

/// A process for good: pids are reused, this triple is not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ProcessName {
    pub(super) boot: String,
    pub(super) pid: i32,
    /// Clock ticks after boot.
    pub(super) start_ticks: u64,
}

impl ProcessName {
    /// Names the process that has this pid now.
    pub(super) fn of(pid: i32) -> io::Result<Self> {
        let stat = fs::read(format!("/proc/{pid}/stat"))?;
        let start_ticks = start_ticks(&stat).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { boot: boot_id()?, pid, start_ticks })
    }

    /// Whether the process that has the pid now is the named one.
    pub(super) fn is_current(&self) -> bool {
        Self::of(self.pid).is_ok_and(|now| now == *self)
    }
}

fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

fn start_ticks(stat: &[u8]) -> Option<u64> {
    // The name in parentheses may contain anything, the last closing one ends it; field 22 of the line.
    let end = stat.iter().rposition(|b| *b == b')')?;
    std::str::from_utf8(stat.get(end + 2..)?).ok()?.split(' ').nth(19)?.parse().ok()
}

/// The record itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    format: u32,
    pub(super) sandbox: SandboxId,
    pub(super) home: HomeId,
    /// Unknown until the process exists; until then it ends by itself when the runner does.
    pub(super) process: Option<ProcessName>,
    pub(super) cgroups: Cgroups,
    /// The Landlock ABI that holds inside; 0 where the kernel has none. Known to the runner that started it only.
    #[serde(skip)]
    pub(super) landlock_abi: i32,
}

impl Record {
    pub(super) fn new(sandbox: SandboxId, home: HomeId, cgroups: Cgroups) -> Self {
        Self { format: FORMAT, sandbox, home, process: None, cgroups, landlock_abi: 0 }
    }

    /// Makes the sandbox's directory, with the record in it from the first moment.
    pub(super) fn create(&self, run_dir: &Path) -> io::Result<PathBuf> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(run_dir)?;
        let dir = run_dir.join(self.sandbox.to_string());
        if dir.exists() {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the sandbox id was used before"));
        }
        let unfinished = run_dir.join(format!("{UNFINISHED}{}", self.sandbox));
        fs::DirBuilder::new().mode(0o700).create(&unfinished)?;
        fs::write(unfinished.join(RECORD), serde_json::to_vec(self)?)?;
        fs::rename(&unfinished, &dir)?;
        Ok(dir)
    }

    /// Replaces the record in its directory.
    pub(super) fn update(&self, dir: &Path) -> io::Result<()> {
        let unfinished = dir.join(format!("{UNFINISHED}{RECORD}"));
        fs::write(&unfinished, serde_json::to_vec(self)?)?;
        fs::rename(&unfinished, dir.join(RECORD))
    }

    fn read(dir: &Path) -> io::Result<Self> {
        let path = dir.join(RECORD);
        if fs::metadata(&path)?.len() > RECORD_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the record is too long"));
        }
        let record: Self = serde_json::from_slice(&fs::read(&path)?)?;
        if record.format != FORMAT {
            let why = format!("record format {} is not {FORMAT}", record.format);
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        Ok(record)
    }
}

/// Names that a killed runner may have left behind before anything existed.
const UNFINISHED: &str = ".unfinished-";

/// Every record in `run_dir`, with its directory. Leftovers from before a record existed are removed.
pub(super) fn all(run_dir: &Path) -> io::Result<Vec<(PathBuf, Record)>> {
    let entries = match fs::read_dir(run_dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut records = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(UNFINISHED) {
            fs::remove_dir_all(entry.path())?;
        } else if name.parse::<SandboxId>().is_ok() {
            match Record::read(&entry.path()) {
                Ok(record) => records.push((entry.path(), record)),
                // `destroy` removes the record before the directory; killed in between, it leaves an empty one.
                Err(error) if error.kind() == io::ErrorKind::NotFound => fs::remove_dir_all(entry.path())?,
                Err(error) => {
                    let dir = entry.path().display().to_string();
                    tracing::warn!(%error, dir, "a sandbox record cannot be read; remove its directory by hand");
                }
            }
        }
    }
    Ok(records)
}
