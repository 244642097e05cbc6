//! `covey store gc`: deleting what no kept snapshot needs.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use covey_bucket::Access;
use covey_home::backend::OpenStore as _;
use covey_home::{CollectOptions, Pointers, collect, owner};
use covey_server::collect::CollectConfig;
use covey_types::{ByteCount, Fault};
use serde_json::{Value, json};

use crate::client::Client;
use crate::exit_code::{ExitCode, Refusal};
use crate::global::Global;
use crate::output::{self, card, field, one_line};
use crate::progress::Progress;
use crate::store_key;
use crate::store_location::StoreLocation;
use crate::units::{self, Amount};

/// Options of `covey store gc`.
#[derive(Debug, Args)]
pub(crate) struct GcArgs {
    /// This store, which no server uses: a directory or s3://BUCKET/PREFIX [default: the server's].
    #[arg(long, value_name = "STORE", requires = "org", value_parser = StoreLocation::parser())]
    store: Option<StoreLocation>,
    /// The org whose blocks are meant.
    #[arg(long, requires = "store")]
    org: Option<String>,
    /// Delete nothing, and say exactly what would be freed.
    #[arg(long)]
    dry_run: bool,
    /// Bytes that are read and written in a second at most, such as 64MiB; `none`: as fast as it goes [default: what the
    /// server does, and 64MiB with --store].
    #[arg(long, value_name = "BYTES", value_parser = units::bytes)]
    rate: Option<Amount>,
    /// Compress what secures have written in haste harder, too, up to so many stored bytes; `none`: all of it.
    #[arg(long, value_name = "BYTES", value_parser = units::bytes, conflicts_with = "dry_run")]
    recompress: Option<Amount>,
}

impl GcArgs {
    fn rate(&self) -> Option<u64> {
        self.rate.map(|rate| rate.or(0))
    }

    fn recompress_bytes(&self) -> u64 {
        self.recompress.map_or(0, |bytes| bytes.or(u64::MAX))
    }
}

pub(super) async fn run(global: &Global, args: &GcArgs) -> anyhow::Result<ExitCode> {
    let report = match (&args.store, &args.org) {
        (Some(store), Some(org)) => gc_local(global, store, org, args)?,
        _ => gc_served(global, args).await?,
    };
    output::value(global.json, &report, collected_text)?;
    Ok(ExitCode::Success)
}

fn gc_local(global: &Global, store: &StoreLocation, org: &str, args: &GcArgs) -> anyhow::Result<Value> {
    let dry_run = args.dry_run;
    let access = if dry_run { Access::Read } else { Access::Write };
    let opened = store.open(&global.data_dir()?, access, false)?;
    if !opened.orgs()?.iter().any(|known| known == org) {
        let text = format!("there is no org `{}` in a store at {store}", one_line(org));
        return Err(Refusal::new(Fault::NotFound, text).into());
    }
    let packs = store_key::open_on(opened.open(org)?, org)?;
    if let Some(owner) = owner(packs.backend().as_ref())? {
        let text = format!(
            "what is needed in {store} is known to {}: it is collected there, by `covey store gc` without --store or by \
             `covey backup create --keep`",
            one_line(&owner)
        );
        return Err(Refusal::new(Fault::Conflict, text).into());
    }
    let pointers = Pointers::on(Arc::clone(packs.backend()));
    if pointers.homes()?.is_empty() && !packs.packs()?.is_empty() {
        // Nobody would ask for that; somebody whose server is from before it said whose the store is would.
        let text = format!(
            "no home in {store} names anything, so everything of {} would be deleted: if that is meant, remove it with \
             `covey org delete` or by hand; if a server uses this store, start it once, then collect there",
            one_line(org)
        );
        return Err(Refusal::new(Fault::Conflict, text).into());
    }
    let options = CollectOptions {
        dry_run,
        bytes_per_second: args.rate().unwrap_or(CollectConfig::default().bytes_per_second),
        recompress_bytes: args.recompress_bytes(),
        ..CollectOptions::default()
    };
    let progress = Progress::start("collecting");
    let report = collect(&packs, &pointers, &options, &AtomicBool::new(false), &progress)?;
    Ok(serde_json::to_value(report)?)
}

async fn gc_served(global: &Global, args: &GcArgs) -> anyhow::Result<Value> {
    let client = Client::new(global)?;
    let mut body = json!({ "dry_run": args.dry_run, "recompress_bytes": args.recompress_bytes() });
    if let (Some(body), Some(rate)) = (body.as_object_mut(), args.rate()) {
        body.insert("bytes_per_second".to_owned(), rate.into());
    }
    let mut answer = client.post_for_lines("/v1/covey/store/collect", &body).await?;
    let progress = Progress::start("collecting");
    while let Some(mut line) = answer.next().await? {
        match line["type"].as_str() {
            Some("progress") => progress.say(&format!("collecting: {} copied", bytes(&line, "/bytes"))),
            Some("done") => {
                if let Some(line) = line.as_object_mut() {
                    line.shift_remove("type");
                }
                return Ok(line);
            }
            Some("error") => {
                let fault = serde_json::from_value(line["fault"].clone()).unwrap_or(Fault::Bug);
                return Err(Refusal::new(fault, field(&line, "/message")).into());
            }
            _ => {}
        }
    }
    let text = "the server ended before the collection did; nothing is lost, run it again";
    Err(Refusal::new(Fault::Retry, text).into())
}

fn bytes(value: &Value, at: &str) -> String {
    value.pointer(at).and_then(Value::as_u64).map_or_else(|| "-".to_owned(), |n| ByteCount(n).to_string())
}

fn collected_text(report: &Value) -> String {
    let is_dry = report["dry_run"] == true;
    let freed = match report["freed_bytes"].as_i64() {
        Some(freed) if freed < 0 => format!("-{}", ByteCount(freed.unsigned_abs())),
        _ => bytes(report, "/freed_bytes"),
    };
    let mut pairs = vec![
        (if is_dry { "would be freed" } else { "freed" }, freed),
        ("states kept", field(report, "/roots")),
        ("packs looked at", format!("{}, {}", field(report, "/packs"), bytes(report, "/packs_bytes"))),
        (
            "packs removed",
            format!("{}, {}", field(report, "/packs_removed"), bytes(report, "/removed_bytes")),
        ),
        (
            "written anew",
            format!("{}, {}", field(report, "/packs_rewritten"), bytes(report, "/written_bytes")),
        ),
        ("left for the next", field(report, "/packs_left")),
    ];
    if report["snapshots_forgotten"].is_u64() {
        pairs.insert(1, ("snapshots forgotten", field(report, "/snapshots_forgotten")));
    }
    card(&pairs)
}
