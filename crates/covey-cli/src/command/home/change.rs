//! `covey home restore`, `fork`, `export` and `import`: other states in a home's place, and archives of them.

use std::io::{self, IsTerminal as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use anyhow::Context as _;
use covey_types::Fault;
use covey_wire::api::history::GenerationName;
use futures_util::stream;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _};

use super::local;
use super::source::{Server, Source};
use crate::client::id_path;
use crate::command::agent;
use crate::exit_code::Refusal;
use crate::global::Global;
use crate::output::{self, field, one_line};
use crate::progress::Progress;

/// Bytes of an archive that are sent at once.
const PIECE_BYTES: usize = 256 * 1024;
/// What stands for stdin or stdout.
const STREAM: &str = "-";

pub(super) async fn restore(
    global: &Global,
    source: &Source,
    generation: GenerationName,
    path: &Path,
    force: bool,
) -> anyhow::Result<()> {
    let bytes = path.as_os_str().as_bytes();
    let restored = match source {
        Source::Server(server) => {
            let body = json!({
                "generation": generation.to_string(), "force": force,
                "path_base64": covey_server::history::base64_of(bytes),
            });
            server.client.post(&format!("{}/restore", server.path), &body).await?
        }
        Source::Store(store) => store.restore(generation, bytes)?,
    };
    output::value(global.json, &restored, |restored| {
        let is_whole = bytes.iter().all(|byte| *byte == b'/');
        let what = if is_whole { "the home".to_owned() } else { one_line(&path.display().to_string()) };
        format!("{what} is as it was at {generation}; this is generation {}", field(restored, "/generation"))
    })?;
    Ok(())
}

/// Whose the fork shall be.
#[derive(Debug, Default)]
pub(super) struct ForkTarget<'a> {
    /// A new agent with this name.
    pub(super) name: Option<&'a str>,
    /// An agent that exists; in a store, the name of a home.
    pub(super) to: Option<&'a str>,
    pub(super) force: bool,
}

pub(super) async fn fork(
    global: &Global,
    source: &Source,
    generation: GenerationName,
    target: &ForkTarget<'_>,
) -> anyhow::Result<()> {
    let forked = match source {
        Source::Server(server) => {
            let mut body = json!({ "generation": generation.to_string(), "force": target.force });
            if let Some(name) = target.name {
                body["name"] = name.into();
            }
            if let Some(to) = target.to {
                body["agent_id"] = agent::find(&server.client, to).await?["id"].clone();
            }
            server.client.post(&format!("{}/fork", server.path), &body).await?
        }
        Source::Store(store) => {
            let text = "say with --to which home of the store gets the snapshot";
            store.fork(generation, target.to.ok_or_else(|| Refusal::new(Fault::Invalid, text))?)?
        }
    };
    output::value(global.json, &forked, |forked| {
        let agent = forked["agent_id"].as_str().map_or_else(String::new, |id| format!(" of agent {id}"));
        format!("generation {} of {}{agent}", field(forked, "/generation"), field(forked, "/id"))
    })?;
    Ok(())
}

pub(super) async fn export(
    global: &Global,
    source: &Source,
    generation: GenerationName,
    file: &Path,
) -> anyhow::Result<()> {
    if file == Path::new(STREAM) {
        let stdout = io::stdout();
        if stdout.is_terminal() {
            let text = "an archive is not for a terminal; name a file, or send it on: `covey home export … - | tar tv`";
            return Err(Refusal::new(Fault::Invalid, text).into());
        }
        let mut out = stdout.lock();
        source.export(generation, &mut out).await?;
        return Ok(out.flush()?);
    }
    // Beside the place, so that a broken export leaves nothing that looks whole.
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let shown = file.display();
    let mut unfinished =
        tempfile::NamedTempFile::new_in(dir).with_context(|| format!("{shown} cannot be written"))?;
    source.export(generation, unfinished.as_file_mut()).await?;
    let bytes = unfinished.as_file().metadata().with_context(|| format!("{shown}"))?.len();
    unfinished.persist_noclobber(file).map_err(|error| match error.error.kind() {
        io::ErrorKind::AlreadyExists => {
            let text = format!("{shown} exists; remove it, or choose another name");
            anyhow::Error::new(Refusal::new(Fault::Conflict, text))
        }
        _ => anyhow::Error::new(error.error).context(format!("{shown} cannot be written")),
    })?;
    output::value(global.json, &json!({ "file": file, "bytes": bytes }), |_| {
        format!("{shown}: {}", covey_types::ByteCount(bytes))
    })?;
    Ok(())
}

pub(super) async fn import(global: &Global, source: &Source, from: &Path, force: bool) -> anyhow::Result<()> {
    let imported = match source {
        Source::Server(server) if from.is_dir() => import_dir(global, server, from).await?,
        Source::Server(server) => import_archive(server, from, force).await?,
        Source::Store(_) if from.is_dir() => {
            let text =
                format!("{} is a directory: put it into the store with `covey home secure`", from.display());
            return Err(Refusal::new(Fault::Invalid, text).into());
        }
        Source::Store(store) if from == Path::new(STREAM) => store.import(&mut io::stdin().lock())?,
        Source::Store(store) => {
            let file = std::fs::File::open(from).with_context(|| format!("{}", from.display()))?;
            store.import(&mut io::BufReader::with_capacity(PIECE_BYTES, file))?
        }
    };
    if let Some(paths) = imported["skipped_paths"].as_array().filter(|paths| !paths.is_empty()) {
        let paths: Vec<_> = paths.iter().filter_map(Value::as_str).collect();
        let paths = one_line(&paths.join(", "));
        eprintln!("warning: {} names are of a kind that is not kept: {paths}", imported["skipped"]);
    }
    output::value(global.json, &imported, |imported| {
        format!("{} files are generation {}", field(imported, "/files"), field(imported, "/generation"))
    })?;
    Ok(())
}

async fn import_dir(global: &Global, server: &Server, dir: &Path) -> anyhow::Result<Value> {
    let current = server.client.get(&id_path("covey/homes", &server.id)?).await?;
    let store = local::ServerStore::of(global, &server.client)?;
    let store = store.local()?;
    let secure = || local::secured(&store, dir, &server.id, None);
    let (mut imported, report) = local::import(&server.client, &current, secure()?, &secure).await?;
    imported["files"] = report.files.into();
    Ok(imported)
}

async fn import_archive(server: &Server, from: &Path, force: bool) -> anyhow::Result<Value> {
    let query = [("force", force.to_string())];
    let path = format!("{}/archive", server.path);
    let _progress = Progress::start("importing");
    if from == Path::new(STREAM) {
        let stdin = io::stdin().as_fd().try_clone_to_owned().context("stdin")?;
        let body = body_of(tokio::fs::File::from_std(stdin.into()));
        return Ok(server.client.upload(&path, &query, body).await?);
    }
    let file = tokio::fs::File::open(from).await.with_context(|| format!("{}", from.display()))?;
    Ok(server.client.upload(&path, &query, body_of(file)).await?)
}

/// What is read, piece by piece, as the body of a request.
fn body_of(from: impl AsyncRead + Send + Unpin + 'static) -> reqwest::Body {
    reqwest::Body::wrap_stream(stream::try_unfold(from, |mut from| async move {
        let mut piece = vec![0; PIECE_BYTES];
        let len = from.read(&mut piece).await?;
        piece.truncate(len);
        Ok::<_, io::Error>((len > 0).then_some((piece, from)))
    }))
}
