//! Materializing from a warm local cache, on a file system whose files can share their blocks.

use super::super::claim::Row;
use super::super::peers::{Installed, Peer};
use super::super::place::FreshFs;
use super::{Bench, Costs};

const TIMES_FASTER_MIN: f64 = 2.0;

/// The cache is on the same xfs as the target. `cp -a` copies the home from where it is, as it does in any other
/// row; what it costs when it can share blocks itself is a figure beside it.
pub(super) fn measure(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let work = "materialize from a warm local cache on xfs, with shared extents";
    if !rustix::process::geteuid().is_root() {
        let mut row = bench.row(work, &[], &Costs::new());
        row.claim(format!("at least {TIMES_FASTER_MIN} x faster than cp -a"), None);
        return Ok(vec![row]);
    }
    let original = bench.fresh_home()?;
    let root = bench.secured_home()?;
    let (mut ours, mut theirs, mut shared) = (Vec::new(), Costs::new(), Vec::new());
    for run in 1..=bench.runs {
        bench.say(&format!("{work}, run {run}"));
        let place = FreshFs::xfs(bench.work, "xfs")?;
        let dir = place.target().with_file_name("cache");
        let cost = bench.us.share(&root, &bench.store, &dir, &place.target())?;
        ours.push(cost);
        if run == 1 {
            let found = bench.us.digest(&place.target())?;
            anyhow::ensure!(found["digest"] == original["digest"], "what was materialized differs");
        }
        drop(place);
        let place = FreshFs::xfs(bench.work, "xfs")?;
        let mut cp = Installed::new(Peer::Cp, bench.work);
        cp.begin()?;
        std::fs::create_dir(place.target())?;
        theirs.entry(Peer::Cp.name()).or_default().push(cp.restore(&bench.home, &place.target())?.0);
        let second = place.target().with_file_name("second");
        std::fs::create_dir(&second)?;
        shared.push(cp.restore(&place.target(), &second)?.0);
        cp.end()?;
        drop(place);
    }
    let mut row = bench.row(work, &ours, &theirs);
    row.floor("cp -a within the same xfs", &shared);
    row.at_most("wall", super::WALL, 1.0 / TIMES_FASTER_MIN, Peer::Cp.name());
    Ok(vec![row])
}
