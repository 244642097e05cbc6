//! Keeping working copies within a limit: copies that hold nothing unpublished go, the one used longest ago first.
//!
//! What stays true: only a copy whose mark says `settled` goes, which is written when its last state was published and
//! nothing ran any more, and taken back before anything can run again; both happen under one lock of the runner. What
//! was set aside is never touched. What does not belong here: the block cache of mounted homes, which trims itself
//! (`covey_mount::Cache::trim`).

use std::fs;
use std::io;
use std::path::Path;
use std::time::SystemTime;

use covey_types::HomeId;

use crate::mark::{self, HomeDir, Settled};

/// What a pass did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Evicted {
    /// Homes whose copy is gone.
    pub(crate) homes: Vec<HomeId>,
    /// Bytes of their files.
    pub(crate) bytes: u64,
}

/// Takes copies out of the way until those that are settled take at most `limit_bytes`; what it gives is to be
/// deleted with [`delete_evicted`], which may take long. Under the runner's lock for copies.
///
/// # Errors
/// When the directory of homes cannot be read.
pub(crate) fn evict(homes_dir: &Path, limit_bytes: u64) -> io::Result<Evicted> {
    let mut settled: Vec<(SystemTime, HomeId, u64)> = Vec::new();
    for (home, mark) in mark::all(homes_dir)? {
        let dir = HomeDir::new(homes_dir, home);
        if let Some(Settled { bytes }) = mark.settled
            && mark.offered.is_none()
            && !mark.materializing
            && dir.files().symlink_metadata().is_ok()
        {
            settled.push((dir.used_at()?, home, bytes));
        }
    }
    settled.sort_unstable();
    let mut bytes: u64 = settled.iter().map(|(_, _, bytes)| bytes).sum();
    let mut evicted = Evicted::default();
    for (_, home, of_home) in settled {
        if bytes <= limit_bytes {
            break;
        }
        if let Err(error) = HomeDir::new(homes_dir, home).give_up_files() {
            tracing::warn!(%home, %error, "a working copy beyond the limit cannot be removed");
            continue;
        }
        bytes -= of_home;
        evicted.bytes += of_home;
        evicted.homes.push(home);
    }
    Ok(evicted)
}

/// Deletes what [`evict`] and the deletion of homes have taken out of the way, also in an earlier life of the runner.
///
/// # Errors
/// When something of it stays.
pub(crate) fn delete_evicted(homes_dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(homes_dir)? {
        let entry = entry?;
        let is_deleted =
            entry.file_name().to_str().is_some_and(|name| name.starts_with(mark::DELETED_PREFIX));
        let given_up = if is_deleted { entry.path() } else { entry.path().join(mark::GIVEN_UP) };
        match fs::remove_dir_all(&given_up) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use covey_types::{FencingToken, Generation, OrgId};
    use uuid::Uuid;

    use super::*;
    use crate::mark::Mark;

    fn home(number: u128) -> HomeId {
        HomeId::from_uuid(Uuid::from_u128(number))
    }

    /// A copy that was used so many seconds after all time began.
    fn copy(homes_dir: &Path, number: u128, settled: Option<u64>, used_s: u64) {
        let dir = HomeDir::new(homes_dir, home(number));
        fs::create_dir_all(dir.files().join("deep")).unwrap();
        fs::write(dir.files().join("deep/file"), b"x").unwrap();
        let mark = Mark {
            org: OrgId::from_uuid(Uuid::nil()),
            generation: Generation(1),
            root: None,
            offered: None,
            materializing: false,
            host_uid: 0,
            token: FencingToken(1),
            step: None,
            parked: false,
            settled: settled.map(|bytes| Settled { bytes }),
        };
        dir.write_mark(&mark).unwrap();
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(used_s);
        fs::File::options()
            .write(true)
            .open(dir.path().join("state.json"))
            .unwrap()
            .set_modified(time)
            .unwrap();
    }

    #[test]
    fn the_settled_copies_used_longest_ago_go_and_nothing_else() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path();
        copy(dir, 1, Some(400), 30);
        copy(dir, 2, Some(500), 10);
        copy(dir, 3, None, 5);
        copy(dir, 4, Some(600), 20);
        fs::create_dir(HomeDir::new(dir, home(2)).path().join("aside-1")).unwrap();
        assert_eq!(evict(dir, 1500).unwrap(), Evicted::default(), "within the limit");
        assert_eq!(evict(dir, 1000).unwrap(), Evicted { homes: vec![home(2)], bytes: 500 });
        delete_evicted(dir).unwrap();
        let is_there = |number| HomeDir::new(dir, home(number)).files().exists();
        assert_eq!([1, 2, 3, 4].map(is_there), [true, false, true, true]);
        assert!(HomeDir::new(dir, home(2)).path().join("aside-1").exists(), "what was set aside stays");
        assert!(!HomeDir::new(dir, home(2)).path().join(mark::GIVEN_UP).exists());
        assert_eq!(
            evict(dir, 0).unwrap().homes,
            [home(4), home(1)],
            "what is not settled stays at any limit"
        );
        assert!(is_there(3));
    }
}
