//! `covey home`: what agents keep.
//!
//! `secure` and `materialize` work on a store without a server; [`local`] does what they share with
//! `import` and `covey run`. Whatever looks into snapshots asks a [`source`].

mod change;
mod history;
pub(crate) mod local;
mod mounted;
mod rules;
mod source;

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use covey_bucket::Access;
use covey_home::{MaterializeError, MaterializeReport, Pointers, SecureReport};
use covey_types::{ByteCount, Fault, FencingToken, RootHash};
use covey_wire::api::history::{GenerationName, USAGE_DEPTH_MAX, USAGE_PARTS_DEFAULT, USAGE_PARTS_MAX};
use serde_json::{Value, json};

use self::change::ForkTarget;
use self::rules::RulesArgs;
use self::source::{Compare, Count, Place, Source};

use crate::client::{Client, id_path};
use crate::exit_code::{ExitCode, Refusal};
use crate::global::Global;
use crate::output::{self, card, field};
use crate::store_key::StoreKey;
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
        /// Also over a directory that holds something else than an earlier state of this home: it is removed.
        #[arg(long)]
        replace: bool,
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
    /// Show a home's kept snapshots, newest first, and what keeps them.
    Log {
        #[command(flatten)]
        place: Place,
    },
    /// List what is in a directory of a snapshot.
    Ls {
        #[command(flatten)]
        place: Place,
        /// From the home's root [default: the home itself].
        #[arg(default_value = "/", hide_default_value = true)]
        path: PathBuf,
        /// What is in the directories below as well.
        #[arg(long, short = 'R')]
        recursive: bool,
        #[command(flatten)]
        at: AtGeneration,
    },
    /// Print a file of a snapshot.
    Cat {
        #[command(flatten)]
        place: Place,
        /// From the home's root.
        path: PathBuf,
        #[command(flatten)]
        at: AtGeneration,
    },
    /// Show what differs between two snapshots: what did this run change?
    Diff {
        #[command(flatten)]
        place: Place,
        /// The older one; 0 is the empty home before the first.
        #[arg(default_value = "-1", allow_hyphen_values = true)]
        from: GenerationName,
        /// The newer one.
        #[arg(default_value = "current", allow_hyphen_values = true)]
        to: GenerationName,
        /// What this session changed, from when it began to the last that it left.
        #[arg(long, value_name = "ID", conflicts_with_all = ["from", "to"])]
        session: Option<String>,
        /// At and below this path only.
        #[arg(long, default_value = "/", hide_default_value = true)]
        path: PathBuf,
        /// Texts line by line as well.
        #[arg(long, short = 't')]
        text: bool,
    },
    /// Put one path or the whole home back to what a snapshot says; makes a new snapshot.
    Restore {
        #[command(flatten)]
        place: Place,
        /// Which snapshot: a number, or -1 for the one before the current one.
        #[arg(allow_hyphen_values = true)]
        generation: GenerationName,
        /// From the home's root [default: the home itself].
        #[arg(default_value = "/", hide_default_value = true)]
        path: PathBuf,
        /// Also when the agent's last step is not secured: what it changed then stays only on the runner's host.
        #[arg(long)]
        force: bool,
    },
    /// Give a snapshot to another agent, at once whatever its size: both share every byte.
    Fork {
        #[command(flatten)]
        place: Place,
        /// Name of the new agent, made like the home's own [default: its name with "(fork)"].
        #[arg(long)]
        name: Option<String>,
        /// An agent that exists (id or name) gets it instead; with --store, a home of this name.
        #[arg(long, value_name = "AGENT", conflicts_with = "name")]
        to: Option<String>,
        #[command(flatten)]
        at: AtGeneration,
        /// Also when the other agent's last step is not secured.
        #[arg(long)]
        force: bool,
    },
    /// Write a snapshot as a tar archive with everything that is kept.
    Export {
        #[command(flatten)]
        place: Place,
        /// A new file, or - for stdout.
        #[arg(default_value = "-")]
        file: PathBuf,
        #[command(flatten)]
        at: AtGeneration,
    },
    /// Make a tar archive, or a directory of the server's own machine, the current state of a home.
    Import {
        #[command(flatten)]
        place: Place,
        /// The archive (not compressed), - for stdin, or the directory; only read.
        from: PathBuf,
        /// Also when the agent's last step is not secured.
        #[arg(long)]
        force: bool,
    },
    /// Show where the bytes of a home are.
    Usage {
        #[command(flatten)]
        place: Place,
        /// Count at and below this directory [default: the home itself].
        #[arg(default_value = "/", hide_default_value = true)]
        path: PathBuf,
        /// Tell of directories so far down.
        #[arg(long, default_value_t = 1)]
        depth: usize,
        /// Tell of so many of the largest directories and files.
        #[arg(long, default_value_t = USAGE_PARTS_DEFAULT)]
        parts: usize,
        /// Also which stored bytes no other home needs; looks into all of them.
        #[arg(long)]
        shares: bool,
        #[command(flatten)]
        at: AtGeneration,
    },
    /// Show or set what is kept of a home and how large it may be.
    Rules {
        #[command(flatten)]
        args: RulesArgs,
    },
}

/// Which snapshot to look into.
#[derive(Debug, Args)]
pub(crate) struct AtGeneration {
    /// Which snapshot: a number, `current`, or -1 for the one before.
    #[arg(
        long,
        short = 'g',
        value_name = "GENERATION",
        default_value = "current",
        allow_hyphen_values = true
    )]
    generation: GenerationName,
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
    #[command(flatten)]
    key: StoreKey,
}

impl StorePlace {
    fn open(&self, global: &Global, access: Access) -> anyhow::Result<LocalStore> {
        let store = self.store.open(&global.data_dir()?, access, false)?;
        LocalStore::open(&store, &self.org, &self.key)
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
        HomeCommand::Materialize { dir, place, generation, root, replace } => {
            return materialize(global, dir, place, (*generation, *root), *replace);
        }
        HomeCommand::Log { place } => history::log(global, &Source::open(global, place).await?).await?,
        HomeCommand::Ls { place, path, recursive, at } => {
            let source = Source::open(global, place).await?;
            history::ls(global, &source, at.generation, path, *recursive).await?;
        }
        HomeCommand::Cat { place, path, at } => {
            history::cat(&Source::open(global, place).await?, at.generation, path).await?;
        }
        HomeCommand::Diff { place, from, to, session, path, text } => {
            let path = path.as_os_str().as_bytes().to_vec();
            let compare = Compare { from: *from, to: *to, session: session.clone(), path, texts: *text };
            history::diff(global, &Source::open(global, place).await?, &compare).await?;
        }
        HomeCommand::Restore { place, generation, path, force } => {
            change::restore(global, &Source::open(global, place).await?, *generation, path, *force).await?;
        }
        HomeCommand::Fork { place, name, to, at, force } => {
            let target = ForkTarget { name: name.as_deref(), to: to.as_deref(), force: *force };
            change::fork(global, &Source::open(global, place).await?, at.generation, &target).await?;
        }
        HomeCommand::Export { place, file, at } => {
            change::export(global, &Source::open(global, place).await?, at.generation, file).await?;
        }
        HomeCommand::Import { place, from, force } => {
            change::import(global, &Source::open(global, place).await?, from, *force).await?;
        }
        HomeCommand::Usage { place, path, depth, parts, shares, at } => {
            let count = Count {
                generation: at.generation,
                path: path.as_os_str().as_bytes().to_vec(),
                depth: (*depth).clamp(1, USAGE_DEPTH_MAX),
                parts: (*parts).min(USAGE_PARTS_MAX),
                shares: *shares,
            };
            history::usage(global, &Source::open(global, place).await?, &count).await?;
        }
        HomeCommand::Rules { args } => rules::rules(global, args).await?,
    }
    Ok(ExitCode::Success)
}

fn secure(
    global: &Global,
    dir: &Path,
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
    dir: &Path,
    place: &StorePlace,
    (generation, root): (Option<u64>, Option<RootHash>),
    replace: bool,
) -> anyhow::Result<ExitCode> {
    let local = place.open(global, Access::Read)?;
    let root = root_to_use(&local.pointers(), place, generation, root)?;
    if !replace {
        local.refuse_unknown(dir, &place.home)?;
    }
    let (report, is_whole) = match local.materialize(dir, &place.home, root) {
        Ok(report) => (report, true),
        Err(error) => match incomplete(&error) {
            // All but the gaps is there: they are shown, and a program sees it by the exit code.
            Some(report) => (report, false),
            None => return Err(error.context("the directory is not complete")),
        },
    };
    output::value(global.json, &serde_json::to_value(&report)?, |_| {
        card(&[
            ("root", report.root.to_string()),
            ("files", format!("{}, {}", report.files, ByteCount(report.bytes))),
            ("written", format!("{}, {}", report.files_written, ByteCount(report.bytes_written))),
            ("removed", report.removed.to_string()),
            ("missing", report.gaps.len().to_string()),
            ("time", format!("{} ms", report.elapsed_ms)),
        ])
    })?;
    if is_whole {
        return Ok(ExitCode::Success);
    }
    for gap in report.gaps.iter().take(GAPS_SHOWN_MAX) {
        eprintln!("missing: {}: {}", output::one_line(&gap.path), output::one_line(&gap.reason));
    }
    eprintln!(
        "the store has lost these; the directory's next secure keeps them as they were: `covey store repair`"
    );
    Ok(ExitCode::Damaged)
}

/// Gaps that are shown one by one.
const GAPS_SHOWN_MAX: usize = 20;

/// What came up, when all but some names did.
fn incomplete(error: &anyhow::Error) -> Option<MaterializeReport> {
    error.chain().find_map(|cause| match cause.downcast_ref() {
        Some(MaterializeError::Incomplete { report }) => Some(MaterializeReport::clone(report)),
        _ => None,
    })
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
