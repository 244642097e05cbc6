//! Mounted homes, measured by the bench of the crate that mounts: a mount is a matter of milliseconds, and its
//! cost is not that of starting a process.

use serde_json::Value;

use super::super::claim::Row;
use super::super::measure::Cost;
use super::{Bench, Costs};

/// Sizes of generated homes, one ten times the other.
const SMALL: u64 = 20_000;
const LARGE: u64 = 200_000;
const READY_MS_MAX: f64 = 50.0;
const TIMES_LARGER_MAX: f64 = 1.2;
const TIMES_FASTER_MIN: f64 = 2.0;

pub(super) fn measure(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let (real, generated) = if rustix::process::geteuid().is_root() {
        bench.say("mounted homes");
        let real = bench.us.mounts(&["--home".as_ref(), bench.given.as_ref()], bench.work)?;
        let sizes = format!("{SMALL},{LARGE}");
        let generated = bench.us.mounts(&["--entries".as_ref(), sizes.as_ref()], bench.work)?;
        (real["homes"][0].clone(), generated["homes"].clone())
    } else {
        (Value::Null, Value::Null)
    };
    let of = |home: &Value, name: &str| home[name].as_f64();
    let cost = |wall: &str, cpu: &str| -> Vec<Cost> {
        let wall = of(&real, wall);
        wall.map(|ms| Cost {
            wall_s: ms / 1000.0,
            cpu_s: of(&real, cpu).unwrap_or(f64::NAN) / 1000.0,
            peak_mib: f64::NAN,
        })
        .into_iter()
        .collect()
    };
    let homes: Vec<&Value> =
        std::iter::once(&real).chain(generated.as_array().into_iter().flatten()).collect();
    let all = |name: &str| -> Option<Vec<f64>> { homes.iter().map(|home| of(home, name)).collect() };

    let mut mounted =
        bench.row("mounted home: first ls and cat", &cost("mount_ls_cat_ms", ""), &Costs::new());
    let ready = all("mount_ls_cat_ms");
    mounted.figure("ms of the home and of generated ones", ready.clone());
    let holds = ready.map(|ready| ready.iter().all(|ms| *ms <= READY_MS_MAX));
    mounted.claim(format!("at most {READY_MS_MAX} ms whatever the size"), holds);

    let secured = cost("tracked_secure_ms", "tracked_secure_cpu_ms");
    let mut tracked = bench.row("secure after one more job, tracked mode", &secured, &Costs::new());
    let pair = generated.get(0).zip(generated.get(1));
    let pair = pair
        .and_then(|(small, large)| Some((of(small, "tracked_secure_ms")?, of(large, "tracked_secure_ms")?)));
    tracked
        .figure("ms in a generated home and in one ten times as big", pair.map(|pair| vec![pair.0, pair.1]));
    let holds = pair.map(|(small, large)| large <= TIMES_LARGER_MAX * small);
    tracked.claim(format!("in a home 10 x as big at most {TIMES_LARGER_MAX} x"), holds);
    let faster = of(&real, "scan_by_tracked");
    tracked.figure("scan by tracked", faster);
    tracked.claim(
        format!("at least {TIMES_FASTER_MIN} x faster than scan mode"),
        faster.map(|faster| faster >= TIMES_FASTER_MIN),
    );
    let right: Option<Vec<bool>> = homes.iter().map(|home| home["tracked_is_right"].as_bool()).collect();
    tracked.claim("a scan finds the same root", right.map(|right| right.iter().all(|right| *right)));
    Ok(vec![mounted, tracked])
}
