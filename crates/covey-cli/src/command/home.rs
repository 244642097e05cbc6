//! `covey home`: what agents keep.
//!
//! `secure` and `materialize` work on a store without a server; [`local`] does what they share with
//! `import` and `covey run`.

pub(crate) mod local;
mod mounted;

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use covey_bucket::Access;
use covey_home::{Pointers, SecureReport};
use covey_types::{ByteCount, Fault, FencingToken, RootHash};
use serde_json::{Value, json};

use crate::client::{Client, id_path};
use crate::exit_code::{ExitCode, Refusal};
use crate::global::Global;
use crate::output::{self, card, field};
use crate::store_location::StoreLocation;
use local::LocalStore;

/// What to do with homes.
#[derive(Debug, Subcommand)]
pub(crate) enum HomeCommand {
    /// List the homes that the server knows.
    List,
    /// Show one home.
    Show {
        /// The home's id.
        home: String,
    },
    /// List the published states of a home.
    Snapshots {
        /// The home's id.
        home: String,
    },
    /// Put a directory into the store and make it the home's current snapshot; no server needed.
    Secure {
        /// The directory.
        dir: PathBuf,
        #[command(flatten)]
        place: StorePlace,
        /// Number that must not get smaller; refuses a publisher that was overtaken [default: the newest].
        #[arg(long, value_name = "NUMBER")]
        fencing_token: Option<u64>,
        /// Of a mounted home: look at everything instead of what changed.
        #[arg(long)]
        scan: bool,
        /// Of a mounted home: look at everything as well, and refuse when that shows another state.
        #[arg(long, conflicts_with = "scan")]
        cross_check: bool,
    },
    /// Make a directory exactly what a snapshot says: what is not in it is removed; no server needed.
    Materialize {
        /// The directory; made when it is missing.
        dir: PathBuf,
        #[command(flatten)]
        place: StorePlace,
        /// An earlier generation [default: the current one].
        #[arg(long, value_name = "NUMBER", conflicts_with = "root")]
        generation: Option<u64>,
        /// A state by its hash.
        #[arg(long, value_name = "HASH")]
        root: Option<RootHash>,
    },
    /// Show a snapshot as a directory at once, without copying it; as root, no server needed.
    Mount {
        /// The directory; made when it is missing, else empty.
        dir: PathBuf,
        #[command(flatten)]
        place: StorePlace,
        /// An earlier generation [default: the current one].
        #[arg(long, value_name = "NUMBER", conflicts_with = "root")]
        generation: Option<u64>,
        /// A state by its hash.
        #[arg(long, value_name = "HASH")]
        root: Option<RootHash>,
        #[command(flatten)]
        options: mounted::MountOptions,
    },
    /// Take a mounted home away; its changes are kept for the next mount.
    Umount {
        /// Where it is mounted.
        dir: PathBuf,
        /// Where its changes are kept, for a home that is not mounted any more.
        #[arg(long, value_name = "DIR")]
        state: Option<PathBuf>,
        /// Throw its changes away.
        #[arg(long)]
        discard: bool,
    },
    /// Make a directory the current state of an agent's home, on the server's own machine.
    Import {
        /// The home's id.
        home: String,
        /// The directory; only read.
        dir: PathBuf,
    },
}

/// Which home in which store.
#[derive(Debug, Args)]
pub(crate) struct StorePlace {
    /// The store's directory, or s3://BUCKET/PREFIX; `secure` makes a directory that is missing.
    #[arg(long, value_name = "STORE", value_parser = StoreLocation::parser())]
    store: StoreLocation,
    /// The org that owns the home.
    #[arg(long)]
    org: String,
    /// The home's name in the store.
    #[arg(long)]
    home: String,
}

impl StorePlace {
    fn open(&self, global: &Global, access: Access) -> anyhow::Result<LocalStore> {
        let store = self.store.open(&global.data_dir()?, access, false)?;
        LocalStore::open(&store, &self.org)
    }
}

pub(crate) async fn run(global: &Global, command: &HomeCommand) -> anyhow::Result<ExitCode> {
    match command {
        HomeCommand::List => list(global).await?,
        HomeCommand::Show { home } => show(global, home).await?,
        HomeCommand::Snapshots { home } => snapshots(global, home).await?,
        HomeCommand::Secure { dir, place, fencing_token, scan, cross_check } => {
            secure(global, dir, place, *fencing_token, *scan, *cross_check)?;
        }
        HomeCommand::Mount { dir, place, generation, root, options } => {
            let local = place.open(global, Access::Read)?;
            let root = root_to_use(&local.pointers(), place, *generation, *root)?;
            mounted::mount(global, dir, place, &local, root, options)?;
        }
        HomeCommand::Umount { dir, state, discard } => {
            mounted::umount(global, dir, state.as_deref(), *discard)?;
        }
        HomeCommand::Materialize { dir, place, generation, root } => {
            materialize(global, dir, place, *generation, *root)?;
        }
        HomeCommand::Import { home, dir } => {
            let client = Client::new(global)?;
            let current = client.get(&id_path("covey/homes", home)?).await?;
            let store = local::ServerStore::of(global, &client)?;
            let report = local::secured(&store.local()?, dir, home, None)?;
            let imported = local::import(&client, &current, &report).await?;
            output::value(global.json, &imported, |imported| {
                format!("{} files are generation {}", report.files, imported["generation"])
            })?;
        }
    }
    Ok(ExitCode::Success)
}

fn secure(
    global: &Global,
    dir: &std::path::Path,
    place: &StorePlace,
    fencing_token: Option<u64>,
    scan: bool,
    cross_check: bool,
) -> anyhow::Result<()> {
    let local = place.open(global, Access::Write)?;
    let pointers = local.pointers();
    let newest = pointers.current(&place.home)?.map_or(FencingToken(0), |current| current.token);
    let token = fencing_token.map_or(newest, FencingToken);
    let tracked = match scan {
        true => None,
        false => mounted::secure_and_publish(&local, dir, &place.home, &pointers, token, cross_check)?,
    };
    let report = match tracked {
        Some(report) => report,
        None => local.secure_and_publish(dir, &place.home, &pointers, token)?,
    };
    output::value(global.json, &serde_json::to_value(&report)?, |_| secured_text(&report))?;
    if report.generation.is_none() {
        let text = "not published: something in the home could not be read, see the warnings";
        return Err(Refusal::new(Fault::Denied, text).into());
    }
    Ok(())
}

fn secured_text(report: &SecureReport) -> String {
    let generation = report.generation.map_or_else(|| "-".to_owned(), |generation| generation.to_string());
    let new = format!("{} blocks, {}", report.blocks_new, ByteCount(report.bytes_new));
    card(&[
        ("root", report.root.to_string()),
        ("generation", generation),
        ("files", format!("{}, {}", report.files, ByteCount(report.bytes))),
        ("read", format!("{}, {}", report.files_read, ByteCount(report.bytes_read))),
        ("new", format!("{new} ({} stored)", ByteCount(report.stored_bytes_new))),
        ("time", format!("{} ms", report.elapsed_ms)),
    ])
}

/// The state that the arguments name.
fn root_to_use(
    pointers: &Pointers,
    place: &StorePlace,
    generation: Option<u64>,
    root: Option<RootHash>,
) -> anyhow::Result<RootHash> {
    match (root, generation) {
        (Some(root), _) => Ok(root),
        (None, Some(wanted)) => {
            let kept = pointers.snapshots(&place.home)?;
            let found = kept.into_iter().find(|pointer| pointer.generation.0 == wanted);
            let text = format!("generation {wanted} of `{}` is not kept", place.home);
            Ok(found.ok_or_else(|| Refusal::new(Fault::NotFound, text))?.root)
        }
        (None, None) => {
            let text = format!("the home `{}` has no snapshot in {}", place.home, place.store);
            Ok(pointers.current(&place.home)?.ok_or_else(|| Refusal::new(Fault::NotFound, text))?.root)
        }
    }
}

fn materialize(
    global: &Global,
    dir: &std::path::Path,
    place: &StorePlace,
    generation: Option<u64>,
    root: Option<RootHash>,
) -> anyhow::Result<()> {
    let local = place.open(global, Access::Read)?;
    let root = root_to_use(&local.pointers(), place, generation, root)?;
    let report = local.materialize(dir, &place.home, root).context("the directory is not complete")?;
    output::value(global.json, &serde_json::to_value(&report)?, |_| {
        card(&[
            ("root", report.root.to_string()),
            ("files", format!("{}, {}", report.files, ByteCount(report.bytes))),
            ("written", format!("{}, {}", report.files_written, ByteCount(report.bytes_written))),
            ("removed", report.removed.to_string()),
            ("time", format!("{} ms", report.elapsed_ms)),
        ])
    })?;
    Ok(())
}

async fn list(global: &Global) -> anyhow::Result<()> {
    let homes = Client::new(global)?.list("/v1/covey/homes", None).await?;
    output::value(global.json, &json!({ "data": homes }), |_| {
        let rows: Vec<_> = homes
            .iter()
            .map(|home| ["/id", "/agent_id", "/generation", "/session_id"].map(|at| field(home, at)))
            .collect();
        output::table(["ID", "AGENT", "GENERATION", "SESSION"], &rows)
    })?;
    Ok(())
}

async fn show(global: &Global, home: &str) -> anyhow::Result<()> {
    let home = Client::new(global)?.get(&id_path("covey/homes", home)?).await?;
    output::value(global.json, &home, |home| {
        card(&[
            ("id", field(home, "/id")),
            ("agent", field(home, "/agent_id")),
            ("generation", field(home, "/generation")),
            ("root", field(home, "/root")),
            ("session", field(home, "/session_id")),
            ("created", field(home, "/created_at")),
        ])
    })?;
    Ok(())
}

async fn snapshots(global: &Global, home: &str) -> anyhow::Result<()> {
    let path = format!("{}/snapshots", id_path("covey/homes", home)?);
    let snapshots = Client::new(global)?.list(&path, None).await?;
    output::value(global.json, &json!({ "data": snapshots }), |_| table(&snapshots))?;
    Ok(())
}

fn table(snapshots: &[Value]) -> String {
    let row = |snapshot: &Value| {
        ["/generation", "/kind", "/files", "/bytes", "/published_at", "/root"].map(|at| field(snapshot, at))
    };
    let rows: Vec<_> = snapshots.iter().map(row).collect();
    output::table(["GENERATION", "KIND", "FILES", "BYTES", "PUBLISHED", "ROOT"], &rows)
}
