//! Securing a home in which nothing has changed.

use anyhow::ensure;

use super::super::claim::Row;
use super::super::place;
use super::first::peak;
use super::{Bench, Costs};

pub(super) fn warm(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    bench.saved_by(super::super::peers::Peer::is_incremental)?;
    bench.secured_home()?;
    let (mut ours, mut theirs, mut floor) = (Vec::new(), Costs::new(), Vec::new());
    for run in 1..=bench.runs {
        bench.say(&format!("unchanged secure, warm, run {run}"));
        for peer in bench.peers.iter_mut().filter(|peer| peer.peer.is_incremental()) {
            theirs.entry(peer.peer.name()).or_default().push(peer.save(&bench.home)?);
        }
        // The tools have read other things meanwhile; both of us begin on the same.
        bench.us.walk(&bench.home, "2")?;
        for _ in 0..bench.runs {
            floor.push(bench.us.walk(&bench.home, "2")?.0);
            let (cost, said) = bench.secure()?;
            ensure!(said["bytes_read"] == 0 && said["blocks_new"] == 0, "not unchanged: {said}");
            ours.push(cost);
        }
    }
    let mut row = bench.row("unchanged secure, warm", &ours, &theirs);
    let floor = row.floor("walk with statx, 2 threads", &floor);
    let holds = row.us().zip(floor).map(|(us, floor)| us.wall_s <= 1.6 * floor.wall_s);
    row.claim("wall at most 1.6 x the walk", holds);
    row.faster_than_all(6.0, &[]);
    peak(&mut row);
    Ok(vec![row])
}

pub(super) fn cold(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    bench.secured_home()?;
    let (mut ours, mut floor) = (Vec::new(), Vec::new());
    for run in 1..=bench.runs {
        bench.say(&format!("unchanged secure, cold, run {run}"));
        if !place::drop_caches()? {
            break;
        }
        floor.push(bench.us.walk(&bench.home, "16")?.0);
        place::drop_caches()?;
        ours.push(bench.secure()?.0);
    }
    let mut row = bench.row("unchanged secure, cold cache", &ours, &Costs::new());
    let floor = row.floor("walk with statx, 16 threads, cold", &floor);
    let holds = row.us().zip(floor).map(|(us, floor)| us.wall_s <= 1.4 * floor.wall_s);
    row.claim("wall at most 1.4 x the walk", holds);
    peak(&mut row);
    // Warm again for those who come later.
    bench.us.digest(&bench.home)?;
    Ok(vec![row])
}
