//! `covey store verify`.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use clap::Args;
use covey_bucket::Access;
use covey_home::integrity::{LostBlock, StoreCheck, StoreReport, check_store};
use covey_types::ByteCount;
use serde_json::{Value, json};

use super::place::StoreArgs;
use crate::exit_code::ExitCode;
use crate::global::Global;
use crate::output::{self, card, one_line};
use crate::progress::Progress;

/// Options of `covey store verify`.
#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    place: StoreArgs,
    /// Read only this share of the packs, such as 5%; that each needed block is in some pack is still checked.
    #[arg(long, value_name = "PERCENT", value_parser = parse_percent, default_value = "100%")]
    sample: u8,
    /// Remember in this file which packs were read: a run that was stopped goes on, and sampled runs take turns until
    /// all were read; then the file is removed. With several orgs, one file each, with the org behind its name.
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
}

fn parse_percent(text: &str) -> Result<u8, String> {
    let number: u8 = text.trim_end_matches('%').parse().map_err(|_| "a number from 1 to 100".to_owned())?;
    if (1..=100).contains(&number) { Ok(number) } else { Err("a number from 1 to 100".to_owned()) }
}

pub(super) async fn run(global: &Global, args: &VerifyArgs) -> anyhow::Result<ExitCode> {
    let stores = args.place.open(global, Access::Read).await?;
    let several = stores.len() > 1;
    let mut reports = Vec::new();
    for store in &stores {
        let record = args.resume.as_ref().map(|path| match several {
            true => path.with_added_extension(&store.org),
            false => path.clone(),
        });
        let progress = Progress::start_counting("verifying", "blocks");
        let report = check_store(&StoreCheck {
            store: &store.store,
            roots: &store.roots,
            sample_percent: args.sample,
            record: record.as_deref(),
            cancel: &AtomicBool::new(false),
            progress: &progress,
        })?;
        drop(progress);
        reports.push((store.org.as_str(), report));
    }
    let ok = reports.iter().all(|(_, report)| report.ok);
    let value = json!({
        "ok": ok,
        "orgs": reports.iter().map(|(org, report)| with_org(org, json!(report))).collect::<Vec<_>>(),
    });
    output::value(global.json, &value, |_| {
        reports.iter().map(|(org, report)| text(org, report)).collect::<Vec<_>>().join("\n")
    })?;
    Ok(if ok { ExitCode::Success } else { ExitCode::Damaged })
}

pub(super) fn with_org(org: &str, mut report: Value) -> Value {
    report["org"] = json!(org);
    report
}

fn text(org: &str, report: &StoreReport) -> String {
    let packs = match report.packs_resumed {
        0 => format!("{} of {} read, {}", report.packs_checked, report.packs, ByteCount(report.bytes)),
        resumed => format!(
            "{} of {} read, {}; {resumed} by earlier runs",
            report.packs_checked,
            report.packs,
            ByteCount(report.bytes)
        ),
    };
    let mut text = card(&[
        ("org", org.to_owned()),
        ("packs", packs),
        ("blocks", report.blocks.to_string()),
        ("states", format!("{} of {} homes", report.roots, report.homes)),
        ("damaged copies", report.damaged_copies.to_string()),
        ("lost blocks", report.lost_count.to_string()),
        ("other problems", report.problem_count.to_string()),
        ("time", format!("{} ms", report.elapsed_ms)),
    ]);
    text.push_str(&lost_text(&report.lost, report.lost_count));
    for problem in &report.problems {
        text.push_str(&format!("problem: {}\n", one_line(problem)));
    }
    if report.ok {
        text.push_str("everything that was looked at is right\n");
    } else {
        text.push_str(
            "mend it with `covey store repair`; damaged packs that it has replaced go with the next garbage collection\n",
        );
    }
    text
}

/// One line for each place that needs a lost block.
pub(super) fn lost_text(lost: &[LostBlock], count: u64) -> String {
    let mut text = String::new();
    for block in lost {
        text.push_str(&format!(
            "lost: {} is {}: {}\n",
            block.hash,
            block.state.as_str(),
            one_line(&block.detail)
        ));
        for need in &block.needed_by {
            let path = if need.path.is_empty() { "the whole home" } else { need.path.as_str() };
            text.push_str(&format!("  {} generation {}: {}\n", need.home, need.generation, one_line(path)));
        }
        let more = block.needed_count.saturating_sub(block.needed_by.len() as u64);
        if more > 0 {
            text.push_str(&format!("  and {more} more places\n"));
        }
    }
    let more = count.saturating_sub(lost.len() as u64);
    if more > 0 {
        text.push_str(&format!("and {more} more lost blocks\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_a_percentage() {
        assert_eq!(parse_percent("5%"), Ok(5));
        assert_eq!(parse_percent("100"), Ok(100));
        for bad in ["0%", "101", "x", "-1", "2.5%"] {
            assert!(parse_percent(bad).is_err(), "{bad}");
        }
    }
}
