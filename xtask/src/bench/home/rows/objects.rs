//! Requests to an object store.

use super::super::claim::Row;
use super::{Bench, Costs};

/// Requests at most for a first secure.
const REQUESTS_MAX: u64 = 60;

/// Counted by a program that is named in this variable: it is started with the home's directory, secures it into an
/// empty bucket, and prints a JSON object with the number of `requests` as its last line.
const COUNTER_VARIABLE: &str = "COVEY_BENCH_S3_REQUESTS";

pub(super) fn requests(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    bench.fresh_home()?;
    let counted = match std::env::var_os(COUNTER_VARIABLE) {
        None => None,
        Some(program) => {
            let mut command = std::process::Command::new(program);
            Some(super::super::us::said(command.arg(&bench.home))?)
        }
    };
    let cost: Vec<_> = counted.iter().map(|(cost, _)| *cost).collect();
    let mut row = bench.row("requests to S3 for a first secure", &cost, &Costs::new());
    let requests = counted.as_ref().and_then(|(_, said)| said["requests"].as_u64());
    row.figure("requests", requests);
    if requests.is_none() {
        row.figure("why", format!("no program that counts them is named in {COUNTER_VARIABLE}"));
    }
    row.claim(format!("at most {REQUESTS_MAX}"), requests.map(|requests| requests <= REQUESTS_MAX));
    Ok(vec![row])
}
