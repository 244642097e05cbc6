//! Peak memory and time on generated trees of very many small and empty files.

use std::path::Path;

use anyhow::ensure;

use super::claim::Row;
use super::measure::Cost;
use super::place::{self, FreshFs};
use super::us::Us;

/// Numbers of entries that are measured as part of the whole.
pub(super) const SIZES: [u64; 2] = [200_000, 2_000_000];
/// Blocks of other homes in the store, when it is shown that memory does not grow with it.
const FOREIGN_BLOCKS: u64 = 1_000_000;
/// Peak memory in MiB that a store of so many blocks may add.
const FOREIGN_MIB_MAX: f64 = 16.0;

/// MiB that may be used up to so many entries; more entries are measured without a limit.
const LIMITS: [(u64, f64); 2] = [(200_000, 128.0), (2_000_000, 200.0)];

pub(super) fn measure(us: &Us, work: &Path, sizes: &[u64]) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for entries in sizes {
        eprintln!("--- a tree of {entries} entries");
        let home = work.join("scale");
        place::empty_dir(&home)?;
        let made = us.generate(&home, *entries)?;
        let (store, cache) = (work.join("scale-store"), work.join("scale-cache"));
        place::remove(&store)?;
        place::remove(&cache)?;
        let (first, said) = us.secure(&home, &store, &cache)?;
        if *entries == SIZES[0] {
            rows.push(large_store(us, work, &home, first)?);
        }
        let (unchanged, again) = us.secure(&home, &store, &cache)?;
        ensure!(again["root"] == said["root"] && again["bytes_read"] == 0, "not unchanged: {again}");
        let place = FreshFs::ext4(work, "scale-target")?;
        let target_cache = work.join("scale-target-cache");
        place::remove(&target_cache)?;
        let (empty, _) = us.materialize(&said["root"], &place.target(), &store, &target_cache)?;
        let (over, put) = us.materialize(&said["root"], &place.target(), &store, &target_cache)?;
        ensure!(put["files_written"] == 0, "something was written where nothing had changed: {put}");
        let (restored, after) = us.secure(&place.target(), &store, &target_cache)?;
        ensure!(after["root"] == said["root"] && after["bytes_read"] == 0, "the copy differs: {after}");
        let limit = LIMITS.iter().find(|(up_to, _)| entries <= up_to).map(|(_, limit)| *limit);
        for (work, cost) in [
            ("first secure", first),
            ("unchanged secure", unchanged),
            ("materialize into an empty directory", empty),
            ("materialize over the same state", over),
            ("secure after materialize", restored),
        ] {
            let mut row = Row::new(format!("{work}, {entries} small and empty files"), &[cost]);
            row.figure("tree", made.clone());
            row.figure("store bytes", place::size_of(&store)?);
            if let Some(limit) = limit {
                row.claim(format!("peak memory at most {limit} MiB"), Some(cost.peak_mib <= limit));
            }
            rows.push(row);
        }
        drop(place);
        for path in [&home, &store, &cache, &target_cache] {
            place::remove(path)?;
        }
    }
    Ok(rows)
}

/// The same first secure into a store that holds very many blocks already.
fn large_store(us: &Us, work: &Path, home: &Path, empty: Cost) -> anyhow::Result<Row> {
    let (store, cache) = (work.join("scale-large-store"), work.join("scale-large-cache"));
    place::remove(&store)?;
    place::remove(&cache)?;
    let made = us.fill(&store, FOREIGN_BLOCKS)?;
    let (first, _) = us.secure(home, &store, &cache)?;
    let (unchanged, _) = us.secure(home, &store, &cache)?;
    place::remove(&store)?;
    place::remove(&cache)?;
    let mut row = Row::new(format!("first secure into a store of {FOREIGN_BLOCKS} blocks"), &[first]);
    row.figure("store", made);
    row.figure("peak_mib into an empty store", empty.peak_mib.round());
    row.figure("peak_mib of an unchanged secure", unchanged.peak_mib.round());
    let holds = first.peak_mib <= empty.peak_mib + FOREIGN_MIB_MAX && first.peak_mib <= LIMITS[0].1;
    row.claim(
        format!("peak memory at most {FOREIGN_MIB_MAX} MiB more than into an empty store"),
        Some(holds),
    );
    Ok(row)
}
