//! Which works are measured, in which order, and going on where an earlier run has ended.
//!
//! What stays true: everything within one work is measured in one go, we and the others in turn; what was measured
//! is written down after each work, so that a run that was ended goes on with the next. What does not belong here:
//! how a work is measured.

mod first;
mod materialize;
mod mounted;
mod mutated;
mod objects;
mod reflink;
mod store;
mod unchanged;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use clap::ValueEnum;
use serde_json::Value;

use super::claim::Row;
use super::measure::Cost;
use super::peers::{Installed, Peer};
use super::place;
use super::us::Us;

const WALL: fn(&Cost) -> f64 = |cost| cost.wall_s;
const CPU: fn(&Cost) -> f64 = |cost| cost.cpu_s;
/// What was measured so far, one row per line.
const MEASURED: &str = "measured.jsonl";

type Costs = BTreeMap<&'static str, Vec<Cost>>;

/// A work; each gives one row or more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Work {
    /// First secure, plain.
    First,
    /// First secure with encryption.
    Encrypted,
    /// Unchanged secure, page cache warm.
    Unchanged,
    /// Unchanged secure, page cache cold.
    Cold,
    /// Materialize into an empty directory, from packs.
    Anew,
    /// The same from a warm local cache with shared extents.
    Reflink,
    /// Secure, and materialize over the previous state, after one more job.
    Mutated,
    /// Mounted homes: first `ls` and `cat`, and tracked secures.
    Mounted,
    /// A second home of the same kind.
    Second,
    /// Store size after the background recompression.
    Size,
    /// Requests to an object store for a first secure.
    Requests,
    /// Peak memory on generated trees, and with a large store.
    Memory,
}

impl Work {
    fn measure(self, bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
        match self {
            Self::First => first::plain(bench),
            Self::Encrypted => first::encrypted(bench),
            Self::Unchanged => unchanged::warm(bench),
            Self::Cold => unchanged::cold(bench),
            Self::Anew => materialize::anew(bench),
            Self::Reflink => reflink::measure(bench),
            Self::Mutated => mutated::measure(bench),
            Self::Mounted => mounted::measure(bench),
            Self::Second => store::second_home(bench),
            Self::Size => store::recompressed(bench),
            Self::Requests => objects::requests(bench),
            Self::Memory => super::scale::measure(bench.us, bench.work, &super::scale::SIZES),
        }
    }

    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// What to measure, and how often.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    pub(super) works: Vec<Work>,
    pub(super) runs: usize,
    pub(super) with_peers: bool,
    /// Works that an earlier run has written down are not measured again.
    pub(super) resume: bool,
    /// The project's directory.
    pub(super) root: &'a Path,
    pub(super) home: &'a Path,
    pub(super) work: &'a Path,
}

struct Bench<'a> {
    root: &'a Path,
    us: &'a Us,
    work: &'a Path,
    /// As it was given; only read.
    given: &'a Path,
    runs: usize,
    /// A copy of the given home, which may be changed.
    home: PathBuf,
    store: PathBuf,
    cache: PathBuf,
    peers: Vec<Installed>,
    absent: Vec<&'static str>,
    /// What the copy is, as long as nobody has changed it.
    original: Option<Value>,
}

/// Measures; gives the rows as JSON, those of an earlier run among them.
pub(super) fn measure(us: &Us, plan: &Plan<'_>) -> anyhow::Result<Vec<Value>> {
    let (installed, absent): (Vec<Peer>, Vec<Peer>) =
        Peer::ALL.into_iter().partition(|peer| plan.with_peers && peer.is_installed());
    let mut bench = Bench {
        root: plan.root,
        us,
        work: plan.work,
        given: plan.home,
        runs: plan.runs,
        home: plan.work.join("home"),
        store: plan.work.join("store"),
        cache: plan.work.join("stat-cache"),
        peers: installed.into_iter().map(|peer| Installed::new(peer, plan.work)).collect(),
        absent: absent.into_iter().map(Peer::name).collect(),
        original: None,
    };
    let written = plan.work.join(MEASURED);
    if !plan.resume {
        place::remove(&written)?;
    }
    let mut measured = read_measured(&written)?;
    for work in &plan.works {
        if measured.iter().any(|row| row["row"] == work.name()) {
            eprintln!("--- {}: measured by an earlier run", work.name());
            continue;
        }
        let rows = work.measure(&mut bench).with_context(|| format!("measuring `{}`", work.name()))?;
        for row in rows {
            eprintln!("{}", row.line());
            let mut json = row.json();
            json["row"] = Value::from(work.name());
            append(&written, &json)?;
            measured.push(json);
        }
    }
    for peer in &bench.peers {
        peer.end()?;
    }
    for path in [&bench.home, &bench.store, &bench.cache] {
        place::remove(path)?;
    }
    Ok(measured)
}

fn read_measured(file: &Path) -> anyhow::Result<Vec<Value>> {
    match std::fs::read_to_string(file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        read => {
            let text = read.with_context(|| format!("{}", file.display()))?;
            let rows = text.lines().map(serde_json::from_str).collect::<Result<_, _>>();
            rows.with_context(|| format!("{} is no list of rows; remove it", file.display()))
        }
    }
}

fn append(file: &Path, row: &Value) -> anyhow::Result<()> {
    use std::io::Write as _;
    let mut out = std::fs::OpenOptions::new().create(true).append(true).open(file)?;
    writeln!(out, "{row}").with_context(|| format!("{}", file.display()))
}

impl Bench<'_> {
    fn say(&self, what: &str) {
        eprintln!("--- {what}");
    }

    /// With a note of each tool that is not installed: it counts as not beaten.
    fn row(&self, work: impl Into<String>, us: &[Cost], peers: &Costs) -> Row {
        let mut row = Row::new(work, us);
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

    /// A copy of the given home that nobody has changed, and what it is.
    fn fresh_home(&mut self) -> anyhow::Result<Value> {
        if let Some(original) = &self.original {
            return Ok(original.clone());
        }
        self.say("a copy of the home");
        place::remove(&self.home)?;
        place::copy(self.given, &self.home)?;
        // Both are read once, so that the page cache is warm.
        let original = self.us.digest(self.given)?;
        let found = self.us.digest(&self.home)?;
        ensure!(found["digest"] == original["digest"], "the copy of the home differs from it");
        self.original = Some(original.clone());
        Ok(original)
    }

    /// The same, secured, so that a secure finds nothing to do; gives the root.
    fn secured_home(&mut self) -> anyhow::Result<Value> {
        self.fresh_home()?;
        self.say("the home is secured");
        self.secure()?;
        // Once more, so that what changed in the tick of the first is known; as in any home in use.
        Ok(self.secure()?.1["root"].clone())
    }

    /// The tools that are chosen have saved the home.
    fn saved_by(&mut self, chosen: impl Fn(Peer) -> bool) -> anyhow::Result<()> {
        self.fresh_home()?;
        for peer in self.peers.iter_mut().filter(|peer| chosen(peer.peer) && !peer.has_saved()) {
            eprintln!("--- {} saves the home", peer.peer.name());
            peer.begin()?;
            peer.save(&self.home)?;
        }
        Ok(())
    }

    /// The copy and everything that was saved of it is going to change.
    fn forget(&mut self) {
        self.original = None;
        self.peers.iter_mut().for_each(Installed::forget);
    }
}
