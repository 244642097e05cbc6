//! Whether the home store is the one that the database speaks of.
//!
//! What stays true: nothing is written into a store, and no server starts on one, that is not the store in which the
//! database's snapshots are; so a volume that is not mounted is noticed before its mount point fills with a new,
//! empty store.

use std::path::Path;

use anyhow::Context as _;
use covey_bucket::Access;
use covey_home::StoreIdentity;
use covey_home::backend::{Key, OpenStore as _};
use covey_server::db::Db;
use covey_server::db::stores::OrgStore;
use covey_types::Fault;

use crate::exit_code::Refusal;
use crate::store_location::{OpenedStore, StoreLocation, make_private};

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

/// Opens the store at `location`, a bucket tried, and refuses unless it is the one that the database knows; notes it at
/// the first use. `accept`: take whatever is there from now on.
pub(crate) async fn open(
    db: &Db,
    location: &StoreLocation,
    data_dir: &Path,
    accept: bool,
) -> anyhow::Result<OpenedStore> {
    db.ensure_default_org().await?;
    let known = db.org_stores().await?;
    let (location, data_dir, asked) = (location.clone(), data_dir.to_owned(), known.clone());
    // Every call on a store blocks.
    let opening = tokio::task::spawn_blocking(move || {
        let found = location.open(&data_dir, Access::Read, true)?;
        asked.iter().try_for_each(|known| examine(&found, &location, known, accept))?;
        if let StoreLocation::Directory(path) = &location {
            // Clients of this machine put homes into it before any runner does.
            make_private(path).context("the home store")?;
        }
        let store = location.open(&data_dir, Access::Write, true)?;
        let name = |known: &OrgStore| -> anyhow::Result<String> {
            let backend = store.open(&known.org.to_string())?;
            Ok(StoreIdentity::establish(&*backend).context("the home store")?.to_string())
        };
        let names = asked.iter().map(name).collect::<anyhow::Result<Vec<_>>>()?;
        anyhow::Ok((store, names))
    });
    let (store, names) = opening.await.context("opening the home store")??;
    for (known, identity) in known.into_iter().zip(names) {
        if known.identity.as_ref() != Some(&identity) {
            db.note_store(known.org, &identity).await?;
        }
    }
    Ok(store)
}

/// Looks at what is there, and writes nothing.
fn examine(
    store: &OpenedStore,
    location: &StoreLocation,
    known: &OrgStore,
    accept: bool,
) -> anyhow::Result<()> {
    let (found, has_packs) = match store.open_existing(&known.org.to_string())? {
        None => (None, false),
        Some(backend) => {
            let identity = StoreIdentity::read(&*backend).context("the store cannot be told from others")?;
            (identity, !backend.list(&Key::new(&["packs"])?)?.is_empty())
        }
    };
    let found = found.map(|found| found.to_string());
    let judged = judge(known.identity.as_deref(), known.snapshots, found.as_deref(), has_packs);
    if let Err(obstacle) = judged {
        if !accept {
            return Err(Refusal::new(Fault::Denied, refusal(&obstacle, location, known.snapshots)).into());
        }
        tracing::warn!(store = %location, ?obstacle, "another store is accepted");
    }
    Ok(())
}

fn refusal(obstacle: &Obstacle, location: &StoreLocation, snapshots: u64) -> String {
    let what = match obstacle {
        Obstacle::Absent { .. } => format!("the home store {location} is empty"),
        Obstacle::Other { known, found: None } => {
            format!("the home store {location} is not store {known}: it is empty")
        }
        Obstacle::Other { known, found: Some(found) } => {
            format!("the home store {location} is store {found}, and not store {known}")
        }
    };
    let remedy = match location {
        StoreLocation::Directory(_) => "Mount its volume, or set COVEY_BLOB_STORE to where it is",
        StoreLocation::Bucket(_) => "Set COVEY_BLOB_STORE and the endpoint to where it is",
    };
    format!(
        "{what}, but the database names {snapshots} snapshots that are in it. {remedy}. If it is lost, restore it from a \
         backup; start with --accept-store only if this store shall take its place"
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
        let (location, data_dir) = (StoreLocation::Directory(store.clone()), dir.path());
        let check = async |accept| open(&db, &location, data_dir, accept).await.map(drop);
        check(false).await.unwrap();
        check(false).await.unwrap();
        std::fs::rename(&store, &aside).unwrap();
        std::fs::create_dir(&store).unwrap();
        let refused = check(false).await.unwrap_err().to_string();
        assert!(refused.contains("--accept-store") && refused.contains("it is empty"), "{refused}");
        assert_eq!(std::fs::read_dir(&store).unwrap().count(), 0, "nothing is made in a mount point");
        std::fs::remove_dir(&store).unwrap();
        std::fs::rename(&aside, &store).unwrap();
        check(false).await.unwrap();
        std::fs::rename(&store, &aside).unwrap();
        check(true).await.unwrap();
        check(false).await.unwrap();
        std::fs::remove_dir_all(&store).unwrap();
        std::fs::rename(&aside, &store).unwrap();
        assert!(check(false).await.is_err(), "the first one is the other one now");
    }
}
