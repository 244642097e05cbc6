//! Securing a home for the first time.

use anyhow::ensure;

use super::super::claim::Row;
use super::super::measure::Cost;
use super::super::peers::Peer;
use super::super::place;
use super::{Bench, CPU, Costs, WALL};

/// Peak memory in MiB for a home of some 200,000 entries.
const PEAK_MIB_MAX: f64 = 128.0;

pub(super) fn plain(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    bench.fresh_home()?;
    let (mut ours, mut theirs) = (Vec::new(), Costs::new());
    let mut stored = 0;
    for run in 1..=bench.runs {
        bench.say(&format!("first secure, run {run}"));
        ours.push(once(bench, None)?);
        stored = place::size_of(&bench.store)?;
        for peer in &mut bench.peers {
            // These copy into a directory, which the rows of materializing measure on a fresh file system.
            if matches!(peer.peer, Peer::Cp) || (peer.peer == Peer::Rsync && run > 1) {
                continue;
            }
            peer.begin()?;
            bench.us.digest(&bench.home)?;
            theirs.entry(peer.peer.name()).or_default().push(peer.save(&bench.home)?);
        }
    }
    let mut row = bench.row("first secure", &ours, &theirs);
    row.at_most("wall", WALL, 0.9, Peer::Tar.name());
    row.at_most("cpu", CPU, 0.9, Peer::Tar.name());
    row.at_most("wall", WALL, 1.0 / 2.0, Peer::Bupstash.name());
    row.at_most("cpu", CPU, 1.0 / 2.0, Peer::Bupstash.name());
    row.at_most("wall", WALL, 1.0 / 4.0, Peer::Restic.name());
    row.at_most("cpu", CPU, 1.0 / 4.0, Peer::Restic.name());
    peak(&mut row);
    row.figure("store bytes", stored);
    for peer in bench.peers.iter().filter(|peer| peer.peer.is_backup() || peer.peer == Peer::Tar) {
        row.figure(&format!("store bytes of {}", peer.peer.name()), place::size_of(&peer.store())?);
    }
    Ok(vec![row])
}

pub(super) fn encrypted(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    bench.fresh_home()?;
    let key = bench.work.join("master-key");
    place::remove(&key)?;
    bench.us.make_key(&key)?;
    let (mut ours, mut theirs) = (Vec::new(), Costs::new());
    for run in 1..=bench.runs {
        bench.say(&format!("first secure with encryption, run {run}"));
        ours.push(once(bench, Some(&key))?);
        for peer in bench.peers.iter_mut().filter(|peer| peer.peer == Peer::Tar) {
            peer.begin()?;
            bench.us.digest(&bench.home)?;
            theirs.entry(peer.peer.name()).or_default().push(peer.save(&bench.home)?);
        }
    }
    // Without the key nothing of it opens.
    let refused = bench.us.secure(&bench.home, &bench.store, &bench.cache).is_err();
    for path in [&bench.store, &bench.cache, &key] {
        place::remove(path)?;
    }
    let mut row = bench.row("first secure with encryption", &ours, &theirs);
    row.at_most("wall", WALL, 1.0, Peer::Tar.name());
    row.at_most("cpu", CPU, 1.0, Peer::Tar.name());
    row.claim("the store does not open without the key", Some(refused));
    peak(&mut row);
    Ok(vec![row])
}

fn once(bench: &Bench<'_>, key: Option<&std::path::Path>) -> anyhow::Result<Cost> {
    place::remove(&bench.store)?;
    place::remove(&bench.cache)?;
    // Read once more, for us as for the others: what was not asked for during a minute may have left the page cache.
    bench.us.digest(&bench.home)?;
    let (cost, said) = bench.us.secure_with(&bench.home, &bench.store, &bench.cache, key)?;
    ensure!(said["partial"] == false, "the home could not be read whole: {said}");
    Ok(cost)
}

pub(super) fn peak(row: &mut Row) {
    let holds = row.us().map(|us| us.peak_mib <= PEAK_MIB_MAX);
    row.claim(format!("peak memory at most {PEAK_MIB_MAX} MiB"), holds);
}
