//! One more job several times: each is secured, and put over a copy of the state before.

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::super::claim::Row;
use super::super::peers::Peer;
use super::super::place::{self, FreshFs};
use super::first::peak;
use super::{Bench, Costs, WALL};

pub(super) fn measure(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    bench.saved_by(|peer| peer.is_incremental() || peer.updates_in_place())?;
    let root = bench.secured_home()?;
    let mine = FreshFs::ext4(bench.work, "mine")?;
    let (target, cache) = (mine.target(), bench.work.join("mine-cache"));
    place::remove(&cache)?;
    bench.us.materialize(&root, &target, &bench.store, &cache)?;
    let mut copies = Vec::new();
    for peer in bench.peers.iter().filter(|peer| peer.peer.updates_in_place()) {
        let place = FreshFs::ext4(bench.work, &format!("copy-{}", peer.peer.word()))?;
        std::fs::create_dir(place.target())?;
        peer.restore(&bench.home, &place.target())?;
        // Whether its version really can is found out by trying: restic before 0.17 stops at symlinks that exist.
        match peer.restore(&bench.home, &place.target()) {
            Ok(_) => copies.push((peer.peer, place)),
            Err(error) => {
                let text = format!("{error:#}");
                let why = text.lines().next().unwrap_or_default();
                bench.say(&format!("{} is left out: {why}", peer.peer.name()));
            }
        }
    }
    let (mut secured, mut saved, mut changed) = (Vec::new(), Costs::new(), Value::Null);
    let (mut updated, mut restored, mut floor, mut writes) =
        (Vec::new(), Costs::new(), Vec::new(), Vec::new());
    let (mut fetched, mut new_bytes) = (0, 0);
    for seed in 1..=bench.runs as u64 {
        bench.say(&format!("one more job, {seed}"));
        changed = bench.us.mutate(&bench.home, seed)?;
        let (cost, said) = bench.secure()?;
        secured.push(cost);
        new_bytes = said["bytes_new"].as_u64().context("a secure did not say what is new")?;
        for peer in bench.peers.iter_mut().filter(|peer| peer.peer.is_incremental()) {
            saved.entry(peer.peer.name()).or_default().push(peer.save(&bench.home)?);
        }
        floor.push(bench.us.walk(&target, "2")?.0);
        let (cost, put) = bench.us.materialize(&said["root"], &target, &bench.store, &cache)?;
        updated.push(cost);
        fetched = put["bytes_fetched"].as_u64().context("a materialize did not say what it fetched")?;
        let written = put["bytes_written"].as_u64().context("a materialize did not say what it wrote")?;
        writes.push(bench.us.write(&target.with_file_name("floor"), written)?);
        place::remove(&target.with_file_name("floor"))?;
        let (wanted, found) = (bench.us.digest(&bench.home)?, bench.us.digest(&target)?);
        ensure!(wanted["digest"] == found["digest"], "what was put over the older state differs: {put}");
        for (peer, place) in &copies {
            let Some(installed) = bench.peers.iter().find(|installed| installed.peer == *peer) else {
                continue;
            };
            let cost = installed.restore(&bench.home, &place.target())?.0;
            restored.entry(peer.name()).or_default().push(cost);
        }
    }
    place::remove(&cache)?;
    bench.forget();
    let mut secure = bench.row("secure after one more job, scan mode", &secured, &saved);
    secure.figure("changed", changed);
    for peer in [Peer::Restic, Peer::Rustic, Peer::Bupstash, Peer::Borg] {
        secure.at_most("wall", WALL, 1.0 / 15.0, peer.name());
    }
    peak(&mut secure);
    let mut over = bench.row("materialize over the previous state after one more job", &updated, &restored);
    for peer in bench.peers.iter().filter(|peer| !copies.iter().any(|(other, _)| *other == peer.peer)) {
        over.left_out(peer.peer.name(), "cannot make an older copy the new state");
    }
    let walk = over.floor("walk with statx, 2 threads", &floor);
    let write = over.floor("writing so many bytes", &writes);
    let limit = walk.zip(write).map(|(walk, write)| 3.0 * walk.wall_s + write.wall_s);
    let holds = over.us().zip(limit).map(|(us, limit)| us.wall_s <= limit);
    over.claim("wall at most 3 x the walk and the changed bytes", holds);
    over.figure("bytes of contents fetched", fetched);
    over.figure("bytes new in the store", new_bytes);
    // Objects of the manifest are among the new bytes and not among those that are fetched for contents.
    over.claim("nothing is fetched that is there", Some(fetched <= new_bytes));
    over.faster_than_all(8.0, &[]);
    peak(&mut over);
    Ok(vec![secure, over])
}
