//! Where snapshots come from: a server, or a store directory without one. Both answer alike.

use std::io::{Read, Write};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use covey_bucket::Access;
use covey_home::archive::{self, ArchiveReport};
use covey_home::object::read_root;
use covey_home::usage::shares;
use covey_home::{Pointer, Pointers, restore_path};
use covey_server::history::{self, At, DiffRequest, PathCursor, TreeRequest, UsageRequest};
use covey_types::{Fault, FencingToken, Generation, RootHash};
use covey_wire::api::PAGE_LIMIT_MAX;
use covey_wire::api::history::GenerationName;
use serde_json::{Value, json};

use super::local::LocalStore;
use crate::client::{Client, id_path};
use crate::command::agent;
use crate::exit_code::Refusal;
use crate::global::Global;
use crate::progress::Progress;
use crate::store_key::StoreKey;
use crate::store_location::StoreLocation;

/// For answers that read every directory of every home.
const LONG_LIMIT: Duration = Duration::from_secs(3600);
/// For all others: a directory of a hundred thousand names is read in seconds.
const LIMIT: Duration = Duration::from_secs(300);

/// Which home, and where.
#[derive(Debug, Args)]
pub(crate) struct Place {
    /// The home: its id, or its agent's id or name; with --store, its name in the store.
    pub(super) home: String,
    /// Look into this store, a directory or s3://BUCKET/PREFIX, instead of asking a server.
    #[arg(long, value_name = "STORE", requires = "org", value_parser = StoreLocation::parser())]
    store: Option<StoreLocation>,
    /// The org that owns the home in the store.
    #[arg(long, requires = "store")]
    org: Option<String>,
    #[command(flatten)]
    key: StoreKey,
}

impl Place {
    /// A home of the server.
    pub(super) fn of_server(home: &str) -> Self {
        Self { home: home.to_owned(), store: None, org: None, key: StoreKey::default() }
    }
}

/// What to compare.
#[derive(Debug)]
pub(super) struct Compare {
    pub(super) from: GenerationName,
    pub(super) to: GenerationName,
    /// What this session did, instead.
    pub(super) session: Option<String>,
    pub(super) path: Vec<u8>,
    pub(super) texts: bool,
}

/// What to count.
#[derive(Debug)]
pub(super) struct Count {
    pub(super) generation: GenerationName,
    pub(super) path: Vec<u8>,
    pub(super) depth: usize,
    pub(super) parts: usize,
    pub(super) shares: bool,
}

/// Where snapshots come from.
pub(super) enum Source {
    Server(Box<Server>),
    Store(Box<Store>),
}

/// A home of a server.
pub(super) struct Server {
    pub(super) client: Client,
    /// `/v1/covey/homes/<id>`.
    pub(super) path: String,
    pub(super) id: String,
}

/// A home in a store directory.
pub(super) struct Store {
    local: LocalStore,
    pointers: Pointers,
    home: String,
}

impl Source {
    pub(super) async fn open(global: &Global, place: &Place) -> anyhow::Result<Self> {
        if let (Some(location), Some(org)) = (&place.store, &place.org) {
            if matches!(location, StoreLocation::Directory(path) if !path.is_dir()) {
                let text = format!("there is no store at {location}");
                return Err(Refusal::new(Fault::NotFound, text).into());
            }
            let opened = location.open(&global.data_dir()?, Access::Write, false)?;
            let local = LocalStore::open(&opened, org, &place.key)?;
            let pointers = local.pointers();
            covey_home::name::check_name(&place.home)?;
            return Ok(Self::Store(Box::new(Store { local, pointers, home: place.home.clone() })));
        }
        let client = Client::new(global)?;
        let id = home_id(&client, &place.home).await?;
        Ok(Self::Server(Box::new(Server { path: id_path("covey/homes", &id)?, client, id })))
    }

    /// What it is, for refusals of what only one of them can do.
    pub(super) fn server(&self, what: &str) -> anyhow::Result<&Server> {
        match self {
            Self::Server(server) => Ok(server),
            Self::Store(_) => {
                let text = format!("{what} is something that a server knows; leave out --store and --org");
                Err(Refusal::new(Fault::Invalid, text).into())
            }
        }
    }

    /// The kept snapshots, newest first.
    pub(super) async fn log(&self) -> anyhow::Result<Vec<Value>> {
        match self {
            Self::Server(server) => {
                Ok(server.client.list(&format!("{}/snapshots", server.path), None).await?)
            }
            Self::Store(store) => store.log(),
        }
    }

    /// Every page of a directory's names, one after the other.
    pub(super) async fn tree(
        &self,
        generation: GenerationName,
        path: &[u8],
        recursive: bool,
        each: &mut dyn FnMut(Value) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        match self {
            Self::Server(server) => {
                let query = [
                    ("generation", generation.to_string()),
                    ("path_base64", base64(path)),
                    ("recursive", recursive.to_string()),
                ];
                server.pages("tree", &query, each).await
            }
            Self::Store(store) => {
                let at = store.at(generation)?;
                pages(each, |after| {
                    let request = TreeRequest { path, recursive, after, limit: PAGE_LIMIT_MAX };
                    Ok(serde_json::to_value(history::tree(store.local.blocks(), &at, &request)?)?)
                })
            }
        }
    }

    /// Every page of what differs, one after the other.
    pub(super) async fn diff(
        &self,
        compare: &Compare,
        each: &mut dyn FnMut(Value) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        match self {
            Self::Server(server) => {
                let mut query =
                    vec![("path_base64", base64(&compare.path)), ("texts", compare.texts.to_string())];
                match &compare.session {
                    Some(session) => query.push(("session", session.clone())),
                    None => {
                        query.extend([("from", compare.from.to_string()), ("to", compare.to.to_string())])
                    }
                }
                server.pages("diff", &query, each).await
            }
            Self::Store(store) => {
                if compare.session.is_some() {
                    self.server("a session")?;
                }
                let from = match compare.from {
                    GenerationName::Number(0) => None,
                    from => Some(store.at(from)?),
                };
                let to = store.at(compare.to)?;
                pages(each, |after| {
                    let (path, texts) = (compare.path.as_slice(), compare.texts);
                    let request = DiffRequest { path, texts, after, limit: PAGE_LIMIT_MAX };
                    Ok(serde_json::to_value(history::diff(
                        store.local.blocks(),
                        from.as_ref(),
                        &to,
                        &request,
                    )?)?)
                })
            }
        }
    }

    /// Writes the bytes of a file.
    pub(super) async fn cat(
        &self,
        generation: GenerationName,
        path: &[u8],
        out: &mut dyn Write,
    ) -> anyhow::Result<()> {
        match self {
            Self::Server(server) => {
                let query = [("generation", generation.to_string()), ("path_base64", base64(path))];
                server.download("file", &query, out).await
            }
            Self::Store(store) => {
                let mut reader = history::open_file(store.local.blocks(), &store.at(generation)?, path)?;
                std::io::copy(&mut reader, out)?;
                Ok(())
            }
        }
    }

    /// Counts what a directory holds.
    pub(super) async fn usage(&self, count: &Count) -> anyhow::Result<Value> {
        match self {
            Self::Server(server) => {
                let query = [
                    ("generation", count.generation.to_string()),
                    ("path_base64", base64(&count.path)),
                    ("depth", count.depth.to_string()),
                    ("parts", count.parts.to_string()),
                    ("shares", count.shares.to_string()),
                ];
                Ok(server.client.ask(&format!("{}/usage", server.path), &query, LONG_LIMIT).await?)
            }
            Self::Store(store) => store.usage(count),
        }
    }

    /// Writes a snapshot as a tar archive.
    pub(super) async fn export(&self, generation: GenerationName, out: &mut dyn Write) -> anyhow::Result<()> {
        match self {
            Self::Server(server) => {
                server.download("archive", &[("generation", generation.to_string())], out).await
            }
            Self::Store(store) => {
                let root = store.at(generation)?.root;
                let progress = Progress::start("exporting");
                let report = archive::export(store.local.blocks(), &root, out, &progress)?;
                drop(progress);
                say_skipped(&report);
                Ok(())
            }
        }
    }
}

fn say_skipped(report: &ArchiveReport) {
    if report.skipped > 0 {
        let paths = crate::output::one_line(&report.skipped_paths.join(", "));
        eprintln!(
            "warning: {} names are of a kind that an archive has no place for: {paths}",
            report.skipped
        );
    }
}

/// The id of the home that is meant.
async fn home_id(client: &Client, text: &str) -> anyhow::Result<String> {
    if text.starts_with("home_") {
        return Ok(text.to_owned());
    }
    let agent = agent::find(client, text).await?;
    Ok(agent["covey_home_id"].as_str().context("the server sent an agent without a home")?.to_owned())
}

fn base64(path: &[u8]) -> String {
    history::base64_of(path)
}

/// Asks for pages until the last one.
fn pages(
    each: &mut dyn FnMut(Value) -> anyhow::Result<()>,
    mut page: impl FnMut(Option<&PathCursor>) -> anyhow::Result<Value>,
) -> anyhow::Result<()> {
    let mut after: Option<PathCursor> = None;
    loop {
        let answer = page(after.as_ref())?;
        let next = answer["next_page"].as_str().map(str::parse).transpose().context("a page's end")?;
        each(answer)?;
        match next {
            Some(next) => after = Some(next),
            None => return Ok(()),
        }
    }
}

impl Server {
    async fn pages(
        &self,
        what: &str,
        query: &[(&str, String)],
        each: &mut dyn FnMut(Value) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let path = format!("{}/{what}", self.path);
        let mut query = query.to_vec();
        query.push(("limit", PAGE_LIMIT_MAX.to_string()));
        let asked = query.len();
        loop {
            let answer = self.client.ask(&path, &query, LIMIT).await?;
            let next = answer["next_page"].as_str().map(str::to_owned);
            each(answer)?;
            query.truncate(asked);
            match next {
                Some(next) => query.push(("page", next)),
                None => return Ok(()),
            }
        }
    }

    async fn download(
        &self,
        what: &str,
        query: &[(&str, String)],
        out: &mut dyn Write,
    ) -> anyhow::Result<()> {
        let mut bytes = self.client.download(&format!("{}/{what}", self.path), query).await?;
        while let Some(piece) = bytes.next().await? {
            out.write_all(&piece)?;
        }
        Ok(())
    }
}

impl Store {
    fn kept(&self) -> anyhow::Result<Vec<Pointer>> {
        Ok(self.pointers.snapshots(&self.home)?)
    }

    fn pointer(&self, name: GenerationName) -> anyhow::Result<Pointer> {
        let kept = self.kept()?;
        let found = match name {
            GenerationName::Current => kept.last(),
            GenerationName::Number(number) => kept.iter().find(|pointer| pointer.generation.0 == number),
            GenerationName::Before(before) => {
                let before = usize::try_from(before).unwrap_or(usize::MAX);
                kept.iter().rev().nth(before)
            }
        };
        let text = match kept.is_empty() {
            true => format!("the home `{}` has no snapshot in this store", self.home),
            false => {
                format!("generation {name} of `{}` is not kept; `covey home log` shows which are", self.home)
            }
        };
        Ok(*found.ok_or_else(|| Refusal::new(Fault::NotFound, text))?)
    }

    fn at(&self, name: GenerationName) -> anyhow::Result<At> {
        let Pointer { generation, root, .. } = self.pointer(name)?;
        Ok(At { generation, root })
    }

    fn log(&self) -> anyhow::Result<Vec<Value>> {
        let kept = self.kept()?;
        let current = kept.last().map(|current| current.generation);
        let row = |pointer: &Pointer| -> anyhow::Result<Value> {
            let top = read_root(self.local.blocks(), &pointer.root)
                .with_context(|| format!("generation {}", pointer.generation))?;
            let kept_by = if Some(pointer.generation) == current { "current" } else { "newest" };
            Ok(json!({
                "generation": pointer.generation, "root": pointer.root, "files": top.files, "bytes": top.bytes,
                "token": pointer.token, "kept_by": kept_by,
            }))
        };
        kept.iter().rev().map(row).collect()
    }

    fn usage(&self, count: &Count) -> anyhow::Result<Value> {
        let at = self.at(count.generation)?;
        let own: Vec<RootHash> = self.kept()?.iter().map(|pointer| pointer.root).collect();
        let mut counted = None;
        if count.shares {
            let _progress = Progress::start("comparing with the other homes");
            let mut others = Vec::new();
            for home in self.pointers.homes()?.iter().filter(|home| **home != self.home) {
                others.extend(self.pointers.snapshots(home)?.iter().map(|pointer| pointer.root));
            }
            counted = Some(shares(self.local.packs(), &own, &others)?);
        }
        let request = UsageRequest {
            path: &count.path,
            depth: count.depth,
            parts: count.parts,
            snapshots: own.len() as u64,
            shares: counted,
        };
        Ok(serde_json::to_value(history::usage(self.local.blocks(), &at, &request)?)?)
    }

    /// Makes another state current.
    pub(super) fn restore(&self, name: GenerationName, path: &[u8]) -> anyhow::Result<Value> {
        // Before it is looked which snapshots are kept: a collection that passes from here on is noticed.
        let epoch = self.epoch()?;
        let (current, from) = (self.pointer(GenerationName::Current)?, self.pointer(name)?);
        if covey_home::view::components(path)?.is_empty() {
            let top = read_root(self.local.blocks(), &from.root)?;
            return self.publish(&self.home, Some(current), from.root, (top.files, top.bytes), epoch);
        }
        let edited = restore_path(self.local.blocks(), &current.root, &from.root, path)?;
        let size = (edited.files, edited.bytes);
        self.publish(&self.home, Some(current), edited.root, size, edited.epoch)
    }

    /// Gives a snapshot to another home.
    pub(super) fn fork(&self, name: GenerationName, target: &str) -> anyhow::Result<Value> {
        let epoch = self.epoch()?;
        let from = self.pointer(name)?;
        let top = read_root(self.local.blocks(), &from.root)?;
        let current = self.pointers.current(target)?;
        self.publish(target, current, from.root, (top.files, top.bytes), epoch)
    }

    /// Makes what a tar archive holds current.
    pub(super) fn import(&self, archive: &mut dyn Read) -> anyhow::Result<Value> {
        let current = self.pointers.current(&self.home)?;
        let progress = Progress::start("importing");
        let cancel = std::sync::atomic::AtomicBool::new(false);
        let imported = archive::import(self.local.blocks(), archive, &cancel, &progress)?;
        drop(progress);
        say_skipped(&imported.report);
        let size = (imported.report.files, imported.report.bytes);
        self.publish(&self.home, current, imported.root, size, imported.epoch)
    }

    fn epoch(&self) -> anyhow::Result<u64> {
        Ok(self.local.blocks().upload()?.epoch())
    }

    fn publish(
        &self,
        home: &str,
        current: Option<Pointer>,
        root: RootHash,
        (files, bytes): (u64, u64),
        epoch: u64,
    ) -> anyhow::Result<Value> {
        let base = current.map_or(Generation(0), |current| current.generation);
        let token = current.map_or(FencingToken(0), |current| current.token);
        let published = match current.filter(|current| current.root == root) {
            Some(current) => current,
            None => self.pointers.publish(home, root, base, token, epoch)?,
        };
        Ok(json!({
            "id": home, "generation": published.generation, "root": root, "files": files, "bytes": bytes,
        }))
    }
}
