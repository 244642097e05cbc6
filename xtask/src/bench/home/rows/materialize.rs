//! Materializing into an empty directory.

use std::collections::BTreeMap;

use anyhow::ensure;

use super::super::claim::Row;
use super::super::peers::Peer;
use super::super::place::{self, FreshFs};
use super::first::peak;
use super::{Bench, Costs, WALL};

pub(super) fn anew(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    bench.saved_by(|_| true)?;
    let original = bench.fresh_home()?;
    let root = bench.secured_home()?;
    let (mut ours, mut theirs) = (Vec::new(), Costs::new());
    let mut wrong: BTreeMap<&str, &str> = BTreeMap::new();
    let mut fresh = true;
    for run in 1..=bench.runs {
        bench.say(&format!("materialize into an empty directory, run {run}"));
        let place = FreshFs::ext4(bench.work, "fresh")?;
        fresh &= place.is_fresh();
        let cache = bench.work.join("fresh-cache");
        let (cost, said) = bench.us.materialize(&root, &place.target(), &bench.store, &cache)?;
        ours.push(cost);
        if run == 1 {
            let found = bench.us.digest(&place.target())?;
            ensure!(found["digest"] == original["digest"], "what was materialized differs: {said}");
        }
        drop(place);
        place::remove(&cache)?;
        for peer in &bench.peers {
            let place = FreshFs::ext4(bench.work, "fresh")?;
            std::fs::create_dir(place.target())?;
            let (cost, at) = peer.restore(&bench.home, &place.target())?;
            theirs.entry(peer.peer.name()).or_default().push(cost);
            if run == 1 && bench.us.digest(&at)?["digest"] != original["digest"] {
                wrong.insert(peer.peer.name(), "what it restored is not what it was given");
            }
        }
    }
    let mut row = bench.row("materialize into an empty directory, from packs", &ours, &theirs);
    row.figure("on a fresh file system", fresh);
    for (name, what) in wrong {
        row.figure(name, what);
    }
    row.at_most("wall", WALL, 0.85, Peer::Tar.name());
    let not_backup: Vec<&str> =
        Peer::ALL.into_iter().filter(|peer| !peer.is_backup()).map(Peer::name).collect();
    row.faster_than_all(1.7, &not_backup);
    peak(&mut row);
    Ok(vec![row])
}
