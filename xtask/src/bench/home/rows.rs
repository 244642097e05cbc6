//! The works that are measured, in an order in which each finds what it needs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::claim::Row;
use super::measure::Cost;
use super::peers::{Installed, Peer};
use super::place::{self, FreshFs};
use super::us::Us;

const WALL: fn(&Cost) -> f64 = |cost| cost.wall_s;
const CPU: fn(&Cost) -> f64 = |cost| cost.cpu_s;
/// What a home of some 200,000 entries may take of memory in MiB, whatever is done with it.
const PEAK_MIB_MAX: f64 = 128.0;

type Costs = BTreeMap<&'static str, Vec<Cost>>;

struct Bench<'a> {
    us: &'a Us,
    work: &'a Path,
    runs: usize,
    /// A copy of the given home, which may be changed.
    home: PathBuf,
    store: PathBuf,
    cache: PathBuf,
    peers: Vec<Installed>,
    absent: Vec<&'static str>,
    peak: f64,
    rows: Vec<Row>,
}

/// Measures everything on a copy of `home`.
pub(super) fn measure(
    us: &Us,
    home: &Path,
    work: &Path,
    runs: usize,
    with_peers: bool,
) -> anyhow::Result<Vec<Row>> {
    let (installed, absent): (Vec<Peer>, Vec<Peer>) =
        Peer::ALL.into_iter().partition(|peer| with_peers && peer.is_installed());
    let mut bench = Bench {
        us,
        work,
        runs,
        home: work.join("home"),
        store: work.join("store"),
        cache: work.join("stat-cache"),
        peers: installed.into_iter().map(|peer| Installed::new(peer, work)).collect(),
        absent: absent.into_iter().map(Peer::name).collect(),
        peak: 0.0,
        rows: Vec::new(),
    };
    place::remove(&bench.home)?;
    place::copy(home, &bench.home)?;
    // Read once, so that the page cache is warm.
    let original = us.digest(home)?;
    ensure!(us.digest(&bench.home)?["digest"] == original["digest"], "the copy of the home differs from it");
    bench.first()?;
    bench.unchanged()?;
    bench.cold()?;
    bench.materialized_anew(&original)?;
    bench.mutated()?;
    bench.second_home(home)?;
    bench.memory();
    for peer in &bench.peers {
        peer.end()?;
    }
    for path in [&bench.home, &bench.store, &bench.cache] {
        place::remove(path)?;
    }
    Ok(bench.rows)
}

impl Bench<'_> {
    fn say(&self, what: &str) {
        eprintln!("--- {what}");
    }

    fn row(&mut self, work: impl Into<String>, us: &[Cost], peers: &Costs) -> Row {
        let mut row = Row::new(work, us);
        self.peak = us.iter().map(|cost| cost.peak_mib).fold(self.peak, f64::max);
        for (name, costs) in peers {
            row.peer(name, costs);
        }
        for name in &self.absent {
            row.left_out(name, "absent");
        }
        row
    }

    fn secure(&self) -> anyhow::Result<(Cost, Value)> {
        self.us.secure(&self.home, &self.store, &self.cache)
    }

    fn first(&mut self) -> anyhow::Result<()> {
        let (mut ours, mut theirs) = (Vec::new(), Costs::new());
        let mut stored = 0;
        for run in 1..=self.runs {
            self.say(&format!("first secure, run {run}"));
            place::remove(&self.store)?;
            place::remove(&self.cache)?;
            let (cost, said) = self.secure()?;
            ensure!(said["partial"] == false, "the home could not be read whole: {said}");
            ours.push(cost);
            stored = place::size_of(&self.store)?;
            for peer in &mut self.peers {
                // These copy into a directory, which the rows of materializing measure on a fresh file system.
                if matches!(peer.peer, Peer::Cp) || (peer.peer == Peer::Rsync && run > 1) {
                    continue;
                }
                peer.begin()?;
                theirs.entry(peer.peer.name()).or_default().push(peer.save(&self.home)?);
            }
        }
        // A second time, so that what changed in the tick of the first is known; as in any home in use.
        self.secure()?;
        let mut row = self.row("first secure", &ours, &theirs);
        row.at_most("wall", WALL, 0.9, Peer::Tar.name());
        row.at_most("cpu", CPU, 0.9, Peer::Tar.name());
        row.at_most("wall", WALL, 1.0 / 2.0, Peer::Bupstash.name());
        row.at_most("cpu", CPU, 1.0 / 2.0, Peer::Bupstash.name());
        row.at_most("wall", WALL, 1.0 / 4.0, Peer::Restic.name());
        row.at_most("cpu", CPU, 1.0 / 4.0, Peer::Restic.name());
        self.rows.push(row);
        let mut row = self.row("store size after the first secure, in bytes", &[], &Costs::new());
        row.figure("us", stored);
        for peer in self.peers.iter().filter(|peer| peer.peer.is_backup() || peer.peer == Peer::Tar) {
            row.figure(peer.peer.name(), place::size_of(&peer.store())?);
        }
        self.rows.push(row);
        Ok(())
    }

    fn unchanged(&mut self) -> anyhow::Result<()> {
        let (mut ours, mut theirs, mut floor) = (Vec::new(), Costs::new(), Vec::new());
        for run in 1..=self.runs {
            self.say(&format!("unchanged secure, warm, run {run}"));
            for peer in self.peers.iter_mut().filter(|peer| peer.peer.is_incremental()) {
                theirs.entry(peer.peer.name()).or_default().push(peer.save(&self.home)?);
            }
            // The tools have read other things meanwhile; both of us begin on the same.
            self.us.walk(&self.home, "2")?;
            for _ in 0..self.runs {
                floor.push(self.us.walk(&self.home, "2")?.0);
                let (cost, said) = self.secure()?;
                ensure!(said["bytes_read"] == 0 && said["blocks_new"] == 0, "not unchanged: {said}");
                ours.push(cost);
            }
        }
        let mut row = self.row("unchanged secure, warm", &ours, &theirs);
        let floor = row.floor("walk with statx, 2 threads", &floor);
        let holds = row.us().zip(floor).map(|(us, floor)| us.wall_s <= 1.6 * floor.wall_s);
        row.claim("wall at most 1.6 x the walk", holds);
        row.faster_than_all(6.0, &[]);
        self.rows.push(row);
        Ok(())
    }

    fn cold(&mut self) -> anyhow::Result<()> {
        let (mut ours, mut floor) = (Vec::new(), Vec::new());
        for run in 1..=self.runs {
            self.say(&format!("unchanged secure, cold, run {run}"));
            if !place::drop_caches()? {
                break;
            }
            floor.push(self.us.walk(&self.home, "16")?.0);
            place::drop_caches()?;
            ours.push(self.secure()?.0);
        }
        let mut row = self.row("unchanged secure, cold cache", &ours, &Costs::new());
        let floor = row.floor("walk with statx, 16 threads, cold", &floor);
        let holds = row.us().zip(floor).map(|(us, floor)| us.wall_s <= 1.4 * floor.wall_s);
        row.claim("wall at most 1.4 x the walk", holds);
        self.rows.push(row);
        self.us.digest(&self.home)?;
        Ok(())
    }

    fn materialized_anew(&mut self, original: &Value) -> anyhow::Result<()> {
        let (mut ours, mut theirs) = (Vec::new(), Costs::new());
        let root = self.secure()?.1["root"].clone();
        let mut wrong: BTreeMap<&str, &str> = BTreeMap::new();
        let mut fresh = true;
        for run in 1..=self.runs {
            self.say(&format!("materialize into an empty directory, run {run}"));
            let place = FreshFs::make(self.work, "fresh")?;
            fresh &= place.is_fresh();
            let cache = self.work.join("fresh-cache");
            let (cost, said) = self.us.materialize(&root, &place.target(), &self.store, &cache)?;
            ours.push(cost);
            if run == 1 {
                let found = self.us.digest(&place.target())?;
                ensure!(found["digest"] == original["digest"], "what was materialized differs: {said}");
            }
            drop(place);
            place::remove(&cache)?;
            for peer in &self.peers {
                let place = FreshFs::make(self.work, "fresh")?;
                std::fs::create_dir(place.target())?;
                let (cost, at) = peer.restore(&self.home, &place.target())?;
                theirs.entry(peer.peer.name()).or_default().push(cost);
                if run == 1 && self.us.digest(&at)?["digest"] != original["digest"] {
                    wrong.insert(peer.peer.name(), "what it restored is not what it was given");
                }
            }
        }
        let mut row = self.row("materialize into an empty directory, from packs", &ours, &theirs);
        row.figure("on a fresh file system", fresh);
        for (name, what) in wrong {
            row.figure(name, what);
        }
        row.at_most("wall", WALL, 0.85, Peer::Tar.name());
        let not_backup: Vec<&str> =
            Peer::ALL.into_iter().filter(|peer| !peer.is_backup()).map(Peer::name).collect();
        row.faster_than_all(1.7, &not_backup);
        self.rows.push(row);
        Ok(())
    }

    /// One more job several times: each is secured, and put over a copy of the state before.
    fn mutated(&mut self) -> anyhow::Result<()> {
        let root = self.secure()?.1["root"].clone();
        let mine = FreshFs::make(self.work, "mine")?;
        let (target, cache) = (mine.target(), self.work.join("mine-cache"));
        place::remove(&cache)?;
        self.us.materialize(&root, &target, &self.store, &cache)?;
        let mut copies = Vec::new();
        for peer in self.peers.iter().filter(|peer| peer.peer.updates_in_place()) {
            let name: String = peer.peer.name().chars().filter(char::is_ascii_alphanumeric).collect();
            let place = FreshFs::make(self.work, &format!("copy-{name}"))?;
            std::fs::create_dir(place.target())?;
            peer.restore(&self.home, &place.target())?;
            copies.push((peer.peer, place));
        }
        let (mut secured, mut saved, mut changed) = (Vec::new(), Costs::new(), Value::Null);
        let (mut updated, mut restored, mut floor, mut writes) =
            (Vec::new(), Costs::new(), Vec::new(), Vec::new());
        let (mut fetched, mut new_bytes) = (0, 0);
        for seed in 1..=self.runs as u64 {
            self.say(&format!("one more job, {seed}"));
            changed = self.us.mutate(&self.home, seed)?;
            let (cost, said) = self.secure()?;
            secured.push(cost);
            new_bytes = said["bytes_new"].as_u64().context("a secure did not say what is new")?;
            for peer in self.peers.iter_mut().filter(|peer| peer.peer.is_incremental()) {
                saved.entry(peer.peer.name()).or_default().push(peer.save(&self.home)?);
            }
            floor.push(self.us.walk(&target, "2")?.0);
            let (cost, put) = self.us.materialize(&said["root"], &target, &self.store, &cache)?;
            updated.push(cost);
            fetched = put["bytes_fetched"].as_u64().context("a materialize did not say what it fetched")?;
            let written = put["bytes_written"].as_u64().context("a materialize did not say what it wrote")?;
            writes.push(self.us.write(&target.with_file_name("floor"), written)?);
            place::remove(&target.with_file_name("floor"))?;
            let (wanted, found) = (self.us.digest(&self.home)?, self.us.digest(&target)?);
            ensure!(wanted["digest"] == found["digest"], "what was put over the older state differs: {put}");
            for (peer, place) in &copies {
                let Some(installed) = self.peers.iter().find(|installed| installed.peer == *peer) else {
                    continue;
                };
                let cost = installed.restore(&self.home, &place.target())?.0;
                restored.entry(peer.name()).or_default().push(cost);
            }
        }
        place::remove(&cache)?;
        let mut row = self.row("secure after one more job, scan mode", &secured, &saved);
        row.figure("changed", changed);
        for peer in [Peer::Restic, Peer::Rustic, Peer::Bupstash, Peer::Borg] {
            row.at_most("wall", WALL, 1.0 / 15.0, peer.name());
        }
        self.rows.push(row);
        let mut row = self.row("materialize over the previous state after one more job", &updated, &restored);
        for peer in self.peers.iter().filter(|peer| !peer.peer.updates_in_place()) {
            row.left_out(peer.peer.name(), "cannot make an older copy the new state");
        }
        let walk = row.floor("walk with statx, 2 threads", &floor);
        let write = row.floor("writing so many bytes", &writes);
        let limit = walk.zip(write).map(|(walk, write)| 3.0 * walk.wall_s + write.wall_s);
        row.claim(
            "wall at most 3 x the walk and the changed bytes",
            row.us().zip(limit).map(|(us, limit)| us.wall_s <= limit),
        );
        row.figure("bytes of contents fetched", fetched);
        row.figure("bytes new in the store", new_bytes);
        // Objects of the manifest are among the new bytes and not among those that are fetched for contents.
        row.claim("nothing is fetched that is there", Some(fetched <= new_bytes));
        row.faster_than_all(8.0, &[]);
        self.rows.push(row);
        Ok(())
    }

    /// Another agent's home of the same kind, in the same org.
    fn second_home(&mut self, home: &Path) -> anyhow::Result<()> {
        self.say("a second home of the same kind");
        let second = self.work.join("second");
        place::remove(&second)?;
        place::copy(home, &second)?;
        self.us.mutate(&second, 77)?;
        let cache = self.work.join("second-cache");
        place::remove(&cache)?;
        let before = place::size_of(&self.store)?;
        let (cost, said) = self.us.secure(&second, &self.store, &cache)?;
        let grown = place::size_of(&self.store)?.saturating_sub(before);
        let unique = said["bytes_new"].as_u64().context("a secure did not say what is new")?;
        let mut row = self.row("second home of the same kind, same org", &[cost], &Costs::new());
        row.figure("store before", before);
        row.figure("store grew by", grown);
        row.figure("unique bytes of the home", unique);
        row.claim(
            "the store grows by less than 1 % and the unique bytes",
            Some(grown as f64 <= before as f64 / 100.0 + unique as f64),
        );
        self.rows.push(row);
        place::remove(&second)?;
        place::remove(&cache)
    }

    fn memory(&mut self) {
        let mut row = Row::new("peak memory, whatever is done with this home", &[]);
        row.figure("peak_mib", self.peak.round());
        row.claim(format!("at most {PEAK_MIB_MAX} MiB"), Some(self.peak <= PEAK_MIB_MAX));
        self.rows.push(row);
    }
}
