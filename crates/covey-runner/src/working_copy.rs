//! The working copy of a home: trusted, completed, put back, or moved aside. Never overwritten.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use covey_home::{Gap, MaterializeError, MaterializeRequest, NoProgress, StoreError};
use covey_types::{Fault, FencingToken, Generation, OrgId, RootHash};
use covey_wire::runner::HomeSource;

use crate::mark::{HomeDir, Mark};
use crate::{Runner, make_private_dir};

/// A working copy that a sandbox can be started on.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) mark: Mark,
    pub(crate) source: HomeSource,
    /// Where a copy that did not match was moved.
    pub(crate) set_aside: Option<PathBuf>,
    /// What the store has lost of it.
    pub(crate) gaps: Vec<Gap>,
}

/// Why there is no working copy.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PrepareError {
    #[error("cannot {action} in {}", dir.display())]
    Local {
        action: &'static str,
        dir: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the home store cannot be opened")]
    Store(#[source] StoreError),
    #[error("the home has generation {0}, but this runner has no home store; set COVEY_HOME_STORE=true")]
    NoStore(Generation),
    #[error("the home's files cannot be put back: {0}")]
    Materialize(MaterializeError),
}

impl PrepareError {
    pub(crate) fn fault(&self) -> Fault {
        match self {
            Self::Local { .. } | Self::Store(_) => Fault::Retry,
            Self::NoStore(_) => Fault::Invalid,
            Self::Materialize(error) => error.fault(),
        }
    }
}

/// Whether a copy with this mark is at least as new as the published state; takes a lost answer into account.
pub(crate) fn is_current(mark: &mut Mark, generation: Generation, root: Option<RootHash>) -> bool {
    if mark.materializing {
        return false;
    }
    if mark.generation == generation && mark.root == root {
        return true;
    }
    // The publish went through and its answer was lost: the server is exactly one ahead, with our root.
    let answered = mark.offered.is_some_and(|offer| Some(offer.root) == root) && generation > mark.generation;
    if answered {
        mark.generation = generation;
        mark.root = root;
        mark.offered = None;
    }
    answered
}

/// Makes the working copy ready. Blocks; may take as long as fetching the whole home.
pub(crate) fn prepare(
    runner: &Runner,
    dir: &HomeDir,
    mark: Option<Mark>,
    org: OrgId,
    token: FencingToken,
    generation: Generation,
    root: Option<RootHash>,
) -> Result<Prepared, PrepareError> {
    let local = |action| {
        let dir = dir.path().to_owned();
        move |source| PrepareError::Local { action, dir, source }
    };
    make_private_dir(dir.path()).map_err(local("make a directory"))?;
    let owner = runner.host_owner(mark.as_ref().map(|m| m.host_uid));
    // Until the new mark says that the copy is in use, it must not be evicted.
    let copies = runner.lock_copies();
    let exists = dir.files().symlink_metadata().is_ok();
    let mut mark = mark.filter(|_| exists);
    let current = mark.as_mut().is_some_and(|mark| is_current(mark, generation, root));
    let interrupted = mark.as_ref().is_some_and(|mark| mark.materializing);
    let step = mark.as_ref().filter(|_| current).and_then(|m| m.step);
    let mut fresh = Mark {
        org,
        generation,
        root,
        offered: None,
        materializing: false,
        host_uid: owner,
        token,
        step,
        parked: false,
        settled: None,
    };
    make_outputs(dir, runner.is_root.then_some(owner)).map_err(local("make the outputs directory"))?;
    if current {
        dir.write_mark(&fresh).map_err(local("write the mark"))?;
        return Ok(Prepared { mark: fresh, source: HomeSource::Kept, set_aside: None, gaps: Vec::new() });
    }
    let set_aside = match exists && !interrupted {
        true => Some(dir.set_aside().map_err(local("move the old working copy aside"))?),
        false => None,
    };
    fresh.materializing = true;
    dir.write_mark(&fresh).map_err(local("write the mark"))?;
    drop(copies);
    let mut gaps = Vec::new();
    let source = match root {
        Some(root) => {
            gaps = put_back(runner, dir, org, generation, root, owner)?;
            HomeSource::Materialized
        }
        None => {
            make_private_dir(&dir.files()).map_err(local("make the home"))?;
            if runner.is_root {
                chown(dir.files(), Some(owner), Some(owner)).map_err(local("give the home to the agent"))?;
            }
            HomeSource::Empty
        }
    };
    fresh.materializing = false;
    dir.write_mark(&fresh).map_err(local("write the mark"))?;
    Ok(Prepared { mark: fresh, source, set_aside, gaps })
}

/// Puts the state back; gives what the store has lost of it. The rest comes up: an agent that is told what is
/// missing can work, and the secures that follow keep what the state has in these places.
fn put_back(
    runner: &Runner,
    dir: &HomeDir,
    org: OrgId,
    generation: Generation,
    root: RootHash,
    owner: u32,
) -> Result<Vec<Gap>, PrepareError> {
    let store = runner.store(org).map_err(PrepareError::Store)?.ok_or(PrepareError::NoStore(generation))?;
    let done = covey_home::materialize(&MaterializeRequest {
        root,
        dir: &dir.files(),
        store: store.as_ref(),
        stat_cache: Some(&dir.stat_cache()),
        excludes: &runner.config.excludes,
        owner: runner.is_root.then_some((owner, owner)),
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
        threads: 0,
    });
    match done {
        Ok(_) => Ok(Vec::new()),
        Err(MaterializeError::Incomplete { report }) => Ok(report.gaps),
        Err(error) => Err(PrepareError::Materialize(error)),
    }
}

fn make_outputs(dir: &HomeDir, owner: Option<u32>) -> io::Result<()> {
    let outputs = dir.outputs();
    make_private_dir(&outputs)?;
    fs::set_permissions(&outputs, fs::Permissions::from_mode(0o700))?;
    if let Some(owner) = owner {
        chown(&outputs, Some(owner), Some(owner))?;
    }
    Ok(())
}
