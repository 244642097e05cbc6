//! Whether the home store is the one that the database speaks of.
//!
//! What stays true: nothing is written into a store, and no server starts on one, that is not the store in which the
//! database's snapshots are; so a volume that is not mounted is noticed before its mount point fills with a new,
//! empty store.

use std::path::Path;

use anyhow::Context as _;
use covey_home::StoreIdentity;
use covey_home::backend::{Backend as _, DirectoryBackend, Key};
use covey_server::db::Db;
use covey_types::Fault;

use crate::exit_code::Refusal;

/// What stands in the way.
#[derive(Debug, PartialEq, Eq)]
enum Obstacle {
    /// The database names snapshots, and there is no store.
    Absent { snapshots: u64 },
    /// It is another store.
    Other { known: String, found: Option<String> },
}

/// `found`: the name of the store that is there; `has_packs`: whether it holds anything.
fn judge(known: Option<&str>, snapshots: u64, found: Option<&str>, has_packs: bool) -> Result<(), Obstacle> {
    match (known, found) {
        (Some(known), Some(found)) if known == found => Ok(()),
        (Some(known), found) => {
            Err(Obstacle::Other { known: known.to_owned(), found: found.map(str::to_owned) })
        }
        // A store from before stores had names.
        (None, _) if snapshots == 0 || has_packs => Ok(()),
        (None, _) => Err(Obstacle::Absent { snapshots }),
    }
}

/// Refuses unless the store in `store_dir` is the one that the database knows; notes it at the first use.
/// `accept`: take whatever is there from now on.
pub(crate) async fn check(db: &Db, store_dir: &Path, accept: bool) -> anyhow::Result<()> {
    db.ensure_default_org().await?;
    for known in db.org_stores().await? {
        let org = known.org.to_string();
        let existing = DirectoryBackend::open_existing(store_dir, &org)?;
        let (found, has_packs) = match &existing {
            None => (None, false),
            Some(backend) => {
                let identity =
                    StoreIdentity::read(backend).context("the store cannot be told from others")?;
                (identity, !backend.list(&Key::new(&["packs"])?)?.is_empty())
            }
        };
        let found = found.map(|found| found.to_string());
        let judged = judge(known.identity.as_deref(), known.snapshots, found.as_deref(), has_packs);
        if let Err(obstacle) = judged {
            if !accept {
                let text = refusal(&obstacle, store_dir, known.snapshots);
                return Err(Refusal::new(Fault::Denied, text).into());
            }
            tracing::warn!(store = %store_dir.display(), ?obstacle, "another store is accepted");
        }
        let backend = match existing {
            Some(backend) => backend,
            None => DirectoryBackend::open(store_dir, &org)?,
        };
        let identity = StoreIdentity::establish(&backend)?.to_string();
        if known.identity.as_ref() != Some(&identity) {
            db.note_store(known.org, &identity).await?;
        }
    }
    Ok(())
}

fn refusal(obstacle: &Obstacle, dir: &Path, snapshots: u64) -> String {
    let dir = dir.display();
    let what = match obstacle {
        Obstacle::Absent { .. } => format!("the home store {dir} is empty"),
        Obstacle::Other { known, found: None } => {
            format!("the home store {dir} is not store {known}: it is empty")
        }
        Obstacle::Other { known, found: Some(found) } => {
            format!("the home store {dir} is store {found}, and not store {known}")
        }
    };
    format!(
        "{what}, but the database names {snapshots} snapshots that are in it. Mount its volume, or set \
         COVEY_BLOB_STORE to where it is. If it is lost, restore it from a backup; start with --accept-store only if \
         this store shall take its place"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_known_store_or_a_first_one_is_taken() {
        let other = |known: &str, found: Option<&str>| {
            Err(Obstacle::Other { known: known.to_owned(), found: found.map(str::to_owned) })
        };
        let table = [
            (judge(Some("a"), 3, Some("a"), true), Ok(())),
            (judge(Some("a"), 3, Some("b"), true), other("a", Some("b"))),
            (judge(Some("a"), 3, None, false), other("a", None)),
            (judge(Some("a"), 0, None, false), other("a", None)),
            (judge(None, 0, None, false), Ok(())),
            (judge(None, 0, Some("a"), false), Ok(())),
            (judge(None, 3, None, true), Ok(())),
            (judge(None, 3, None, false), Err(Obstacle::Absent { snapshots: 3 })),
            (judge(None, 3, Some("a"), false), Err(Obstacle::Absent { snapshots: 3 })),
        ];
        for (number, (found, wanted)) in table.into_iter().enumerate() {
            assert_eq!(found, wanted, "row {number}");
        }
    }

    #[tokio::test]
    async fn a_store_that_went_away_or_was_exchanged_is_refused_until_it_is_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let (store, aside) = (dir.path().join("store"), dir.path().join("aside"));
        let db = Db::open(&dir.path().join("covey.db")).unwrap();
        check(&db, &store, false).await.unwrap();
        check(&db, &store, false).await.unwrap();
        std::fs::rename(&store, &aside).unwrap();
        std::fs::create_dir(&store).unwrap();
        let refused = check(&db, &store, false).await.unwrap_err().to_string();
        assert!(refused.contains("--accept-store") && refused.contains("it is empty"), "{refused}");
        assert_eq!(std::fs::read_dir(&store).unwrap().count(), 0, "nothing is made in a mount point");
        std::fs::remove_dir(&store).unwrap();
        std::fs::rename(&aside, &store).unwrap();
        check(&db, &store, false).await.unwrap();
        std::fs::rename(&store, &aside).unwrap();
        check(&db, &store, true).await.unwrap();
        check(&db, &store, false).await.unwrap();
        std::fs::remove_dir_all(&store).unwrap();
        std::fs::rename(&aside, &store).unwrap();
        assert!(check(&db, &store, false).await.is_err(), "the first one is the other one now");
    }
}
