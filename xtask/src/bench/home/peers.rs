//! The tools that people use instead, each with the commands of its own documentation.
//!
//! None of them is given an option that makes it slower; encryption is off where it can be.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::measure::{self, Cost};
use super::place;
use crate::process;

/// A tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    Tar,
    Rsync,
    Cp,
    Restic,
    Rustic,
    Borg,
    Bupstash,
}

impl Peer {
    pub(super) const ALL: [Self; 7] =
        [Self::Tar, Self::Rsync, Self::Cp, Self::Restic, Self::Rustic, Self::Borg, Self::Bupstash];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Tar => "tar|zstd",
            Self::Rsync => "rsync",
            Self::Cp => "cp -a",
            Self::Restic => "restic",
            Self::Rustic => "rustic",
            Self::Borg => "borg",
            Self::Bupstash => "bupstash",
        }
    }

    /// Its name as part of a file name.
    pub(super) fn word(self) -> String {
        self.name().chars().filter(char::is_ascii_alphanumeric).collect()
    }

    const fn programs(self) -> &'static [&'static str] {
        match self {
            Self::Tar => &["tar", "zstd"],
            Self::Rsync => &["rsync"],
            Self::Cp => &["cp"],
            Self::Restic => &["restic"],
            Self::Rustic => &["rustic"],
            Self::Borg => &["borg"],
            Self::Bupstash => &["bupstash"],
        }
    }

    pub(super) fn is_installed(self) -> bool {
        self.programs().iter().all(|program| process::exists(program))
    }

    /// Whether it finds out by itself what has changed since the last time.
    pub(super) const fn is_incremental(self) -> bool {
        !matches!(self, Self::Tar | Self::Cp)
    }

    /// Whether it keeps former states, compressed or encrypted, in a store.
    pub(super) const fn is_backup(self) -> bool {
        matches!(self, Self::Restic | Self::Rustic | Self::Borg | Self::Bupstash)
    }

    /// Whether it can make an older copy the new state; borg cannot delete, tar and cp neither.
    pub(super) const fn updates_in_place(self) -> bool {
        matches!(self, Self::Rsync | Self::Restic | Self::Rustic | Self::Bupstash)
    }
}

/// A tool with a store of its own below one directory.
#[derive(Debug)]
pub(super) struct Installed {
    pub(super) peer: Peer,
    dir: PathBuf,
    archives: u32,
}

impl Installed {
    pub(super) fn new(peer: Peer, work: &Path) -> Self {
        Self { peer, dir: work.join(peer.word()), archives: 0 }
    }

    /// Whether it has saved the home as it is.
    pub(super) const fn has_saved(&self) -> bool {
        self.archives > 0
    }

    /// What it has saved is not the home any more.
    pub(super) const fn forget(&mut self) {
        self.archives = 0;
    }

    fn repo(&self) -> PathBuf {
        self.dir.join("repo")
    }

    pub(super) fn store(&self) -> PathBuf {
        self.repo()
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        // Nothing of the user's own configuration, caches or locks.
        command.env("HOME", &self.dir).env("XDG_CACHE_HOME", self.dir.join("cache"));
        command.env("RESTIC_PASSWORD", "bench").env("RUSTIC_PASSWORD", "bench");
        command.env("RUSTIC_NO_PROGRESS", "true").env("BORG_BASE_DIR", self.dir.join("borg"));
        command.env("BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK", "yes");
        command.env("BORG_RELOCATED_REPO_ACCESS_IS_OK", "yes");
        command
    }

    fn bupstash(&self, verb: &str) -> Command {
        let mut command = self.command("bupstash");
        command.arg(verb).arg("-r").arg(self.repo()).arg("-k").arg(self.dir.join("key"));
        command
    }

    /// Begins with an empty store.
    pub(super) fn begin(&mut self) -> anyhow::Result<()> {
        place::empty_dir(&self.dir)?;
        let repo = self.repo();
        self.archives = 0;
        match self.peer {
            Peer::Tar => fs::create_dir(&repo)?,
            Peer::Rsync | Peer::Cp => fs::create_dir(&repo)?,
            Peer::Restic => {
                drop(measure::run(self.command("restic").arg("-q").arg("-r").arg(&repo).arg("init"))?)
            }
            Peer::Rustic => drop(measure::run(self.command("rustic").arg("-r").arg(&repo).arg("init"))?),
            Peer::Borg => {
                drop(measure::run(self.command("borg").args(["init", "-e", "none"]).arg(&repo))?);
            }
            Peer::Bupstash => {
                let key = self.dir.join("key");
                drop(measure::run(self.command("bupstash").arg("new-key").arg("-o").arg(key))?);
                drop(measure::run(self.command("bupstash").arg("init").arg("-r").arg(&repo))?);
            }
        }
        Ok(())
    }

    pub(super) fn end(&self) -> anyhow::Result<()> {
        place::remove(&self.dir)
    }

    fn tarball(&self) -> PathBuf {
        self.repo().join("home.tar.zst")
    }

    fn archive(&self, number: u32) -> String {
        format!("{}::{number}", self.repo().display())
    }

    /// Saves the home once more.
    pub(super) fn save(&mut self, home: &Path) -> anyhow::Result<Cost> {
        self.archives += 1;
        let repo = self.repo();
        let mut command = match self.peer {
            Peer::Tar => {
                let mut command = self.command("sh");
                let script = "tar -C \"$1\" -cf - . | zstd -q -f -1 -T2 -o \"$2\"";
                command.args(["-c", script, "sh"]).arg(home).arg(self.tarball());
                command
            }
            Peer::Rsync => {
                let mut command = self.command("rsync");
                command.args(["-aH", "--delete"]).arg(slashed(home)).arg(slashed(&repo));
                command
            }
            Peer::Cp => {
                let mut command = self.command("cp");
                command.arg("-a").arg(home.join(".")).arg(&repo);
                command
            }
            Peer::Restic => {
                let mut command = self.command("restic");
                command.arg("-q").arg("-r").arg(&repo).arg("backup").arg(home);
                command
            }
            Peer::Rustic => {
                let mut command = self.command("rustic");
                command.arg("-r").arg(&repo).arg("backup").arg(home);
                command
            }
            Peer::Borg => {
                let mut command = self.command("borg");
                command.arg("create").arg(self.archive(self.archives)).arg(home);
                command
            }
            Peer::Bupstash => {
                let mut command = self.bupstash("put");
                command.args(["-q", "--send-log"]).arg(self.dir.join("send-log"));
                command.arg(format!("n={}", self.archives)).arg(home);
                command
            }
        };
        Ok(measure::run(&mut command)?.0)
    }

    /// Puts the newest state below `target`, which exists; returns the cost and where the home's files are then.
    pub(super) fn restore(&self, home: &Path, target: &Path) -> anyhow::Result<(Cost, PathBuf)> {
        let repo = self.repo();
        // Some keep the whole path that they were given.
        let absolute = target.join(home.strip_prefix("/").unwrap_or(home));
        let (mut command, at) = match self.peer {
            Peer::Tar => {
                let mut command = self.command("sh");
                let script = "zstd -q -dc \"$1\" | tar -C \"$2\" -xpf -";
                command.args(["-c", script, "sh"]).arg(self.tarball()).arg(target);
                (command, target.to_owned())
            }
            Peer::Rsync => {
                let mut command = self.command("rsync");
                command.args(["-aH", "--delete"]).arg(slashed(home)).arg(slashed(target));
                (command, target.to_owned())
            }
            Peer::Cp => {
                let mut command = self.command("cp");
                command.arg("-a").arg(home.join(".")).arg(target);
                (command, target.to_owned())
            }
            Peer::Restic => {
                let mut command = self.command("restic");
                command.arg("-q").arg("-r").arg(&repo).args(["restore", "latest", "--target"]).arg(target);
                (command, absolute)
            }
            Peer::Rustic => {
                let mut command = self.command("rustic");
                let state = format!("latest:{}", home.display());
                command.arg("-r").arg(&repo).args(["restore", "--delete"]).arg(state).arg(target);
                (command, target.to_owned())
            }
            Peer::Borg => {
                let mut command = self.command("borg");
                command.arg("extract").arg(self.archive(self.archives)).current_dir(target);
                (command, absolute)
            }
            Peer::Bupstash => {
                let mut command = self.bupstash("restore");
                command.arg("-q").arg("--into").arg(target).arg(format!("n={}", self.archives));
                (command, target.to_owned())
            }
        };
        Ok((measure::run(&mut command)?.0, at))
    }
}

/// With a slash at its end rsync means what is in a directory.
fn slashed(dir: &Path) -> PathBuf {
    dir.join("")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tool_has_a_directory_of_its_own() {
        let dirs: std::collections::BTreeSet<PathBuf> =
            Peer::ALL.iter().map(|peer| Installed::new(*peer, Path::new("w")).dir).collect();
        assert_eq!(dirs.len(), Peer::ALL.len());
    }
}
