//! `covey backup verify`.

use std::sync::atomic::AtomicBool;

use clap::Args;
use covey_home::integrity::{NamedRoot, NamedRoots, StoreCheck, check_store};
use covey_types::OrgId;
use serde_json::json;

use super::place::Backups;
use crate::exit_code::ExitCode;
use crate::global::Global;
use crate::output::{self, one_line};
use crate::progress::Progress;
use crate::store_key;
use crate::store_location::StoreLocation;

/// Options of `covey backup verify`.
#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// Where backups are: a directory or s3://BUCKET/PREFIX.
    #[arg(value_name = "PLACE", value_parser = StoreLocation::parser())]
    place: StoreLocation,
}

pub(super) fn run(global: &Global, args: &VerifyArgs) -> anyhow::Result<ExitCode> {
    let backups = Backups::open(&args.place, &global.data_dir()?)?;
    let all = backups.all()?;
    let mut problems = Vec::new();
    let mut roots: std::collections::BTreeMap<OrgId, NamedRoots> = std::collections::BTreeMap::new();
    for record in &all {
        let states = match backups.states(record) {
            Ok(states) => states,
            Err(error) => {
                problems.push(format!("{error:#}"));
                continue;
            }
        };
        for state in states {
            let home = format!("{} of backup {}", state.home, record.name);
            let named = NamedRoot { home, generation: state.generation, root: state.root };
            roots.entry(state.org).or_default().roots.push(named);
        }
    }
    let mut blocks = 0;
    for (org, roots) in &roots {
        let Some(backend) = backups.store().open_existing(&org.to_string())? else {
            problems.push(format!("the blocks of org {org} are not there"));
            continue;
        };
        let store = store_key::open_on(backend, &org.to_string())?;
        let progress = Progress::start_counting("verifying", "blocks");
        let report = check_store(&StoreCheck {
            store: &store,
            roots,
            sample_percent: 100,
            record: None,
            cancel: &AtomicBool::new(false),
            progress: &progress,
        })?;
        blocks += report.blocks;
        problems.extend(report.problems);
        for lost in &report.lost {
            let needs = lost
                .needed_by
                .first()
                .map_or_else(String::new, |need| format!("{} `{}`", need.home, need.path));
            problems.push(format!("block {} is {}: {needs}", lost.hash, lost.state.as_str()));
        }
        let unnamed = report.lost_count.saturating_sub(report.lost.len() as u64);
        if unnamed > 0 {
            problems.push(format!("{unnamed} more blocks are lost"));
        }
        if report.damaged_copies > 0 && report.lost_count == 0 {
            problems
                .push(format!("{} copies of blocks are damaged, and none is needed", report.damaged_copies));
        }
    }
    if all.is_empty() {
        problems.push(format!("{} has no finished backup", args.place));
    }
    let ok = problems.is_empty();
    let value = json!({ "ok": ok, "backups": all.len(), "blocks": blocks, "problems": problems });
    output::value(global.json, &value, |_| match ok {
        true => format!("{} backups are whole, {blocks} blocks", all.len()),
        false => problems.iter().map(|line| format!("problem: {}\n", one_line(line))).collect(),
    })?;
    Ok(if ok { ExitCode::Success } else { ExitCode::Damaged })
}
