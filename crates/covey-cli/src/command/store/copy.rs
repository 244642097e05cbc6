//! `covey store copy`: moving between backends.
//!
//! Works on the stores themselves, without a server, and while one uses the source: a last run after the server has
//! stopped copies the rest.

use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use clap::Args;
use covey_bucket::Access;
use covey_home::backend::OpenStore as _;
use covey_home::{CopyReport, Sealing};
use covey_types::{ByteCount, Fault};
use serde_json::{Value, json};

use crate::exit_code::{ExitCode, Refusal};
use crate::global::Global;
use crate::output::{self, card, one_line};
use crate::progress::Progress;
use crate::store_key::StoreKey;
use crate::store_location::StoreLocation;

/// Options of `covey store copy`.
#[derive(Debug, Args)]
pub(crate) struct CopyArgs {
    /// The store to copy: a directory or s3://BUCKET/PREFIX; only read.
    #[arg(value_name = "FROM", value_parser = StoreLocation::parser())]
    from: StoreLocation,
    /// Where to: a directory or s3://BUCKET/PREFIX; made when it is missing.
    #[arg(value_name = "TO", value_parser = StoreLocation::parser())]
    to: StoreLocation,
    /// Copy only this org [default: all].
    #[arg(long)]
    org: Option<String>,
    #[command(flatten)]
    key: StoreKey,
}

pub(super) fn run(global: &Global, args: &CopyArgs) -> anyhow::Result<ExitCode> {
    if args.from == args.to {
        return Err(Refusal::new(Fault::Invalid, "FROM and TO are the same store").into());
    }
    let data_dir = global.data_dir()?;
    let from = args.from.open(&data_dir, Access::Read, false)?;
    let orgs = match &args.org {
        Some(org) => vec![org.clone()],
        None => from.orgs()?,
    };
    if orgs.is_empty() {
        return Err(Refusal::new(Fault::NotFound, format!("there is no store at {}", args.from)).into());
    }
    let to = args.to.open(&data_dir, Access::Write, false)?;
    let key = args.key.read()?;
    let mut reports = Vec::new();
    for org in orgs {
        let progress = Progress::start(&format!("copying {org}"));
        let sealing = key.as_ref().map(|master| Sealing { org: &org, master });
        let never = AtomicBool::new(false);
        let report = covey_home::copy(&from.open(&org)?, &to.open(&org)?, sealing, &never, &progress)
            .with_context(|| {
                format!("{org} is not copied whole; run it again, and it goes on from where it stopped")
            })?;
        drop(progress);
        for problem in &report.problems {
            eprintln!("damaged: {}", one_line(problem));
        }
        reports.push((org, report));
    }
    output::value(global.json, &as_json(&reports)?, |_| text(&reports))?;
    let damaged: usize = reports.iter().map(|(_, report)| report.problems.len()).sum();
    if damaged > 0 {
        let text = format!(
            "copied, but {damaged} things are damaged in {}; the copy has them as they are",
            args.from
        );
        return Err(Refusal::new(Fault::Corrupt, text).into());
    }
    Ok(ExitCode::Success)
}

fn as_json(reports: &[(String, CopyReport)]) -> anyhow::Result<Value> {
    let mut data = Vec::new();
    for (org, report) in reports {
        let mut one = json!({ "org": org });
        if let (Some(one), Value::Object(report)) = (one.as_object_mut(), serde_json::to_value(report)?) {
            one.extend(report);
        }
        data.push(one);
    }
    Ok(json!({ "data": data }))
}

fn text(reports: &[(String, CopyReport)]) -> String {
    let one = |(org, report): &(String, CopyReport)| {
        card(&[
            ("org", org.clone()),
            ("packs", format!("{}, {} of them copied now", report.packs, report.packs_copied)),
            ("bytes", format!("{} copied", ByteCount(report.bytes_copied))),
            ("blocks", format!("{} checked", report.blocks_checked)),
            ("homes", report.homes.to_string()),
            ("time", format!("{} ms", report.elapsed_ms)),
        ])
    };
    reports.iter().map(one).collect::<Vec<_>>().join("\n")
}
