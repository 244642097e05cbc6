//! `covey store repair`.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use clap::Args;
use covey_bucket::Access;
use covey_home::Excludes;
use covey_home::integrity::{RepairReport, RepairRequest, RepairSource, repair_store};
use covey_types::{ByteCount, Fault};
use serde_json::json;

use super::place::StoreArgs;
use super::verify::{lost_text, with_org};
use crate::exit_code::{ExitCode, Refusal};
use crate::global::Global;
use crate::output::{self, card, one_line};
use crate::progress::Progress;
use crate::store_key;
use crate::store_location::StoreLocation;

/// Options of `covey store repair`.
#[derive(Debug, Args)]
pub(crate) struct RepairArgs {
    #[command(flatten)]
    place: StoreArgs,
    /// Another store that may have the right bytes, such as a backup: a directory or s3://BUCKET/PREFIX; may be given
    /// several times.
    #[arg(long, value_name = "PLACE", value_parser = StoreLocation::parser())]
    from: Vec<StoreLocation>,
    /// A directory that may have them, such as a working copy or a home that was moved aside; may be given several
    /// times.
    #[arg(long, value_name = "DIR")]
    from_home: Vec<PathBuf>,
}

pub(super) async fn run(global: &Global, args: &RepairArgs) -> anyhow::Result<ExitCode> {
    let directories = args.from.iter().filter_map(|place| match place {
        StoreLocation::Directory(dir) => Some(dir),
        StoreLocation::Bucket(_) => None,
    });
    for dir in directories.chain(&args.from_home) {
        if !dir.is_dir() {
            let text = format!("{} is not a directory", dir.display());
            return Err(Refusal::new(Fault::NotFound, text).into());
        }
    }
    let data_dir = global.data_dir()?;
    let mut from = Vec::new();
    for place in &args.from {
        let opened = place.open(&data_dir, Access::Read, false);
        from.push((place, opened.with_context(|| format!("opening the store {place}"))?));
    }
    let setting = std::env::var("COVEY_HOME_EXCLUDES").ok();
    let excludes = Excludes::from_setting(setting.as_deref());
    let mut reports = Vec::new();
    for store in args.place.open(global, Access::Write).await? {
        let mut others = Vec::new();
        for (place, opened) in &from {
            // Opening makes what is missing: a store without the org has nothing to give.
            if let Some(backend) = opened.open_existing(&store.org)? {
                let opened = store_key::open_on(backend, &store.org);
                let opened = opened.with_context(|| format!("opening the store {place}"))?;
                others.push((place.to_string(), opened));
            }
        }
        let stores = others.iter().map(|(name, store)| RepairSource::Store { name, store });
        let homes = args.from_home.iter().map(|dir| RepairSource::Home { dir, excludes: &excludes });
        let sources: Vec<_> = stores.chain(homes).collect();
        let progress = Progress::start_counting("repairing", "blocks");
        let report = repair_store(&RepairRequest {
            store: &store.store,
            roots: &store.roots,
            pointers: store.roots.pointers(),
            sources: &sources,
            cancel: &AtomicBool::new(false),
            progress: &progress,
        })?;
        drop(progress);
        reports.push((store.org, report));
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

fn text(org: &str, report: &RepairReport) -> String {
    let mended = format!(
        "{} from this store, {} from other stores, {} from directories, {}",
        report.mended_here,
        report.mended_from_stores,
        report.mended_from_homes,
        ByteCount(report.mended_bytes)
    );
    let packs = format!(
        "{} damaged, {} of them no longer needed, {} found right again",
        report.suspect_packs, report.replaced_packs, report.cleared_packs
    );
    let mut text = card(&[
        ("org", org.to_owned()),
        ("mended blocks", mended),
        ("packs", packs),
        ("lost blocks", report.lost_count.to_string()),
        ("time", format!("{} ms", report.elapsed_ms)),
    ]);
    for line in &report.rewritten {
        text.push_str(&format!("written anew: {}\n", one_line(line)));
    }
    text.push_str(&lost_text(&report.lost, report.lost_count));
    for problem in &report.problems {
        text.push_str(&format!("problem: {}\n", one_line(problem)));
    }
    if report.lost_count > 0 {
        text.push_str(
            "what is lost comes back with the next secure of a home that still has the file, or with --from and \
             --from-home\n",
        );
    }
    text
}
