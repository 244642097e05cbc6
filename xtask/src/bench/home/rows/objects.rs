//! Requests to an object store.

use super::super::super::bucket;
use super::super::claim::Row;
use super::{Bench, Costs};

pub(super) fn requests(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    bench.fresh_home()?;
    bench.say("a first secure into a bucket");
    let counted = bucket::count(bench.root, &bench.home)?;
    let mut row = bench.row("requests to S3 for a first secure", &[counted.first], &Costs::new());
    row.figure("requests", counted.requests);
    let most = bucket::FIRST_MUST;
    row.claim(format!("at most {most}"), Some(counted.requests <= most));
    Ok(vec![row])
}
