//! Time, processor use and peak memory of a command with everything that it starts.

use std::io::Read as _;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};
use wait4::Wait4 as _;

use crate::process;

/// No single step takes longer on a machine that is of use.
const STEP_LIMIT: Duration = Duration::from_secs(40 * 60);

/// What a step cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::bench) struct Cost {
    /// Elapsed seconds.
    pub(in crate::bench) wall_s: f64,
    /// User and system seconds of the process and those that it waited for.
    pub(in crate::bench) cpu_s: f64,
    /// Largest resident size of one of them, in MiB.
    pub(in crate::bench) peak_mib: f64,
}

impl Cost {
    pub(super) fn json(&self) -> Value {
        let rounded = |value: f64| (value * 1000.0).round() / 1000.0;
        json!({
            "wall_s": rounded(self.wall_s), "cpu_s": rounded(self.cpu_s), "peak_mib": self.peak_mib.round(),
        })
    }

    /// The median of each figure; none of none.
    pub(super) fn median(costs: &[Self]) -> Option<Self> {
        let of = |figure: fn(&Self) -> f64| {
            let mut values: Vec<f64> = costs.iter().map(figure).collect();
            values.sort_by(f64::total_cmp);
            values.get(values.len() / 2).copied()
        };
        Some(Self {
            wall_s: of(|cost| cost.wall_s)?,
            cpu_s: of(|cost| cost.cpu_s)?,
            peak_mib: of(|cost| cost.peak_mib)?,
        })
    }
}

/// Runs a command to its end and returns what it cost and what it wrote to stdout.
pub(in crate::bench) fn run(command: &mut Command) -> anyhow::Result<(Cost, String)> {
    let shown = format!("{command:?}");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // What the step before has left to be written would be paid by this one.
    rustix::fs::sync();
    let start = Instant::now();
    let mut child = command.spawn().with_context(|| format!("{shown} does not start"))?;
    let pid = child.id();
    let (ended, end) = mpsc::channel::<()>();
    let watchdog = thread::spawn(move || {
        if end.recv_timeout(STEP_LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
            process::kill_tree(pid);
        }
    });
    let mut stdout = child.stdout.take().context("stdout is not a pipe")?;
    let mut stderr = child.stderr.take().context("stderr is not a pipe")?;
    let errors = thread::spawn(move || {
        let mut text = Vec::new();
        stderr.read_to_end(&mut text).map(|_| text)
    });
    let mut text = Vec::new();
    let read = stdout.read_to_end(&mut text);
    let used = child.wait4();
    let wall = start.elapsed();
    drop(ended);
    watchdog.join().ok();
    let errors = errors.join().ok().and_then(Result::ok).unwrap_or_default();
    let used = used.with_context(|| format!("waiting for {shown}"))?;
    read.with_context(|| format!("reading what {shown} wrote"))?;
    if !used.status.success() {
        bail!("{shown}: {}: {}", used.status, String::from_utf8_lossy(&errors).trim());
    }
    let cost = Cost {
        wall_s: wall.as_secs_f64(),
        cpu_s: (used.rusage.utime + used.rusage.stime).as_secs_f64(),
        peak_mib: used.rusage.maxrss as f64 / f64::from(1 << 20),
    };
    Ok((cost, String::from_utf8_lossy(&text).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_are_counted_and_a_failure_is_named() {
        let script = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
        let nested = format!("sh -c '{script}' | cat");
        let (cost, _) = run(Command::new("sh").args(["-c", &nested])).unwrap();
        assert!(cost.cpu_s > 0.01 && cost.peak_mib > 0.0, "{cost:?}");
        let error = run(Command::new("sh").args(["-c", "echo why >&2; exit 3"])).unwrap_err().to_string();
        assert!(error.contains("why") && error.contains('3'), "{error}");
    }

    #[test]
    fn the_median_is_taken_figure_by_figure() {
        let cost = |wall_s, cpu_s| Cost { wall_s, cpu_s, peak_mib: 1.0 };
        let median = Cost::median(&[cost(3.0, 1.0), cost(1.0, 2.0), cost(2.0, 3.0)]).unwrap();
        assert_eq!(median, cost(2.0, 2.0));
        assert_eq!(Cost::median(&[]), None);
    }
}
