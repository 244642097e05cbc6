//! What runs on this machine: a server, a runner, or both in one process, assembled from configuration.
//!
//! What stays true: the runner reaches the server only over the link protocol, in one process over an
//! in-memory stream and otherwise over a unix socket in the data directory, so one machine exercises what many
//! would. What does not belong here: arguments, and anything that is printed.

use std::io::{self, IsTerminal as _};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use covey_home::backend::{DirectoryStore, OpenStore};
use covey_home::{Excludes, MasterKey};
use covey_runner::sandbox::native::NativeBackend;
use covey_runner::{Dial, DialFuture, LinkStream, Runner, RunnerConfig, StoreLink};

use covey_server::collect::CollectConfig;
use covey_server::config::Config;
use covey_server::db::{DataLock, DatabaseUrl, Db};
use covey_server::link::Trust;
use covey_server::store_link::LinkedStores;
use covey_server::stores::Stores;
use covey_server::{Homes, Server};
use covey_types::HomeId;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;

use crate::global::{CLIENT_FILE, ClientFile};
use crate::model_choice::ModelChoice;
use crate::remote_dial::RemoteDial;
use crate::sharing::Sharing;
use crate::store_identity;
use crate::store_key;
use crate::store_link;
use crate::store_location::{OpenedStore, StoreLocation};
use crate::units::{self, Amount};

/// Bytes in flight on the in-memory link, each way.
const LINK_BYTES: usize = 256 * 1024;
/// The name that the local token has in lists.
const LOCAL_TOKEN: &str = "local";

/// Where things are kept on this machine.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    data_dir: PathBuf,
}

impl Layout {
    /// Makes the data directory, for this user only.
    pub(crate) fn prepare(data_dir: PathBuf) -> Result<Self> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&data_dir)
            .with_context(|| format!("the data directory {} cannot be made", data_dir.display()))?;
        Ok(Self { data_dir })
    }

    /// The layout of a data directory that exists, or is not touched.
    pub(crate) const fn at(data_dir: PathBuf) -> Self {
        Self { data_dir }
    }

    /// The database.
    pub(crate) fn database(&self) -> PathBuf {
        Config { data_dir: self.data_dir.clone(), ..Config::default() }.database_path()
    }

    /// Removes the working copies of these homes from this machine; tells how many there were.
    pub(crate) fn remove_working_copies(&self, homes: &[HomeId]) -> Result<u64> {
        let mut removed = 0;
        for home in homes {
            let dir = self.runner_dir().join("homes").join(home.to_string());
            removed += u64::from(remove(&dir)?);
        }
        Ok(removed)
    }

    fn client_file(&self) -> PathBuf {
        self.data_dir.join(CLIENT_FILE)
    }

    fn runner_dir(&self) -> PathBuf {
        self.data_dir.join("runner")
    }

    /// Where the server of this data directory lets others use its bucket.
    pub(crate) fn store_socket(&self) -> PathBuf {
        store_socket(&self.data_dir)
    }

    /// The home store for a runner in a process of its own: a directory, or a way through the server, which needs no key.
    pub(crate) fn store_for_runner(&self) -> Result<RunnerStore> {
        Ok(match self.store_location()? {
            None => RunnerStore::default(),
            Some(StoreLocation::Directory(path)) => {
                RunnerStore { store: Some(Arc::new(DirectoryStore(path))), key: store_key::from_setting()? }
            }
            Some(StoreLocation::Bucket(_)) => {
                let cache_dir = self.runner_dir().join("store-cache");
                RunnerStore {
                    store: Some(Arc::new(StoreLink::new(self.store_socket(), cache_dir))),
                    key: None,
                }
            }
        })
    }

    fn runner_socket(&self) -> PathBuf {
        self.data_dir.join("runner.sock")
    }

    /// Where the home store is, or none when it is turned off. `COVEY_BLOB_STORE` moves it.
    pub(crate) fn store_location(&self) -> Result<Option<StoreLocation>> {
        match setting("COVEY_HOME_STORE").as_deref() {
            None | Some("true" | "1") => {}
            Some("false" | "0") => return Ok(None),
            Some(other) => bail!("COVEY_HOME_STORE is `{other}`; set it to true or false"),
        }
        match setting("COVEY_BLOB_STORE") {
            None => Ok(Some(StoreLocation::Directory(self.data_dir.join("store")))),
            Some(url) => Ok(Some(StoreLocation::from_setting(url.trim()).context("COVEY_BLOB_STORE")?)),
        }
    }
}

/// See [`Layout::store_socket`].
pub(crate) fn store_socket(data_dir: &std::path::Path) -> PathBuf {
    data_dir.join("store.sock")
}

/// Removes a directory with everything in it; tells whether it was there.
pub(crate) fn remove(dir: &Path) -> Result<bool> {
    match std::fs::remove_dir_all(dir) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| format!("{} cannot be removed", dir.display())),
    }
}

pub(crate) fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.trim().is_empty())
}

/// When and how hard garbage is collected: `COVEY_GC_INTERVAL`, `COVEY_GC_RATE` and
/// `COVEY_GC_RECOMPRESS`.
fn collect_config() -> Result<CollectConfig> {
    let amount = |name: &str, parse: fn(&str) -> Result<Amount, String>| -> Result<Option<u64>> {
        let Some(text) = setting(name) else { return Ok(None) };
        match parse(text.trim()) {
            _ if text.trim() == "0" => Ok(Some(0)),
            Ok(amount) => Ok(Some(amount.or(0))),
            Err(expected) => bail!("{name} is `{text}`: {expected}"),
        }
    };
    let mut config = CollectConfig::default();
    if let Some(seconds) = amount("COVEY_GC_INTERVAL", units::seconds)? {
        config.interval = Duration::from_secs(seconds);
    }
    if let Some(rate) = amount("COVEY_GC_RATE", units::bytes)? {
        config.bytes_per_second = rate;
    }
    if let Some(bytes) = amount("COVEY_GC_RECOMPRESS", units::bytes)? {
        config.recompress_bytes = bytes;
    }
    Ok(config)
}

/// A server that listens.
#[derive(Debug)]
pub(crate) struct RunningServer {
    server: Server,
    /// Where it is, and a token for it.
    pub(crate) client: ClientFile,
    store: Option<OpenedStore>,
    _lock: Option<DataLock>,
    serving: tokio::task::JoinHandle<io::Result<()>>,
}

impl RunningServer {
    /// Opens the database, takes over what was left, listens, and leaves word in `client.json`.
    pub(crate) async fn start(
        layout: &Layout,
        listen: SocketAddr,
        database: &DatabaseUrl,
        model: &ModelChoice,
        accept_store: bool,
        sharing: &Sharing,
    ) -> Result<Self> {
        let mut config = Config { data_dir: layout.data_dir.clone(), listen, ..Config::default() };
        let model = model.open(&mut config)?;
        let location = layout.store_location()?;
        // With its state elsewhere, a server still has this directory for itself.
        let lock = match database {
            DatabaseUrl::Sqlite(_) => None,
            DatabaseUrl::Postgres(_) => Some(DataLock::beside(&config.database_path())?),
        };
        let listener = TcpListener::bind(listen)
            .await
            .with_context(|| format!("cannot listen on {listen}; choose another address with --listen"))?;
        let address = listener.local_addr().context("the address that was bound")?;
        let place = sharing.place(database, location.as_ref(), address)?;
        let db = Db::connect(database).await?;
        // Before anything is written: another server may be at work.
        match &place {
            Some(place) => db.join(place).await?,
            None => db.take_over().await?,
        };
        // Now, so that a wrong key of a bucket is said at the start and not at the first secure.
        let store = match &location {
            Some(location) => {
                Some(store_identity::open(&db, location, &layout.data_dir, accept_store).await?)
            }
            None => None,
        };
        if !address.ip().is_loopback() {
            tracing::warn!(
                %address,
                "listening beyond this machine without encryption: tokens and sessions can be read on the way; put a \
                 TLS proxy before it, or listen on 127.0.0.1"
            );
        }
        let homes = match &store {
            Some(store) => {
                let stores = Stores::new(Arc::new(store.clone()), store_key::from_setting()?);
                Some(Homes { stores, collect: collect_config()? })
            }
            None => None,
        };
        let server = match &place {
            Some(place) => Server::start_among(db, model, homes, place).await?,
            None => Server::start(db, model, homes).await?,
        };
        let token = local_token(layout, &server).await?;
        let client = ClientFile {
            url: format!("http://{address}"),
            token,
            store: location,
            org: Some(server.default_org().to_string()),
            excludes: setting("COVEY_HOME_EXCLUDES"),
            database: match database {
                DatabaseUrl::Sqlite(_) => None,
                DatabaseUrl::Postgres(location) => Some(location.to_string()),
            },
        };
        write_client_file(layout, &client)?;
        let api = server.api().clone();
        let serving =
            tokio::spawn(async move { covey_server::http::serve(listener, api.router(), &api).await });
        Ok(Self { server, client, store, _lock: lock, serving })
    }

    /// Lets runners of the same user dial in through the data directory.
    pub(crate) fn listen_for_runners(&self, layout: &Layout) -> Result<()> {
        let path = layout.runner_socket();
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let listener = UnixListener::bind(&path).with_context(|| format!("{}", path.display()))?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        let gate = self.server.runner_gate(Trust::InProcess(self.server.default_org()));
        let stop = self.server.stopping().clone();
        tokio::spawn(async move {
            loop {
                let accepted = tokio::select! {
                    accepted = listener.accept() => accepted,
                    () = stop.cancelled() => return,
                };
                match accepted {
                    Ok((stream, _)) => gate.accept(stream),
                    Err(error) => tracing::warn!(%error, "a runner could not dial in"),
                }
            }
        });
        Ok(())
    }

    /// Lets others of the same user use the store through the data directory, if they could not without its key.
    pub(crate) fn listen_for_store_links(&self, layout: &Layout) -> Result<()> {
        let Some(store @ OpenedStore::Bucket(_)) = &self.store else { return Ok(()) };
        let org = self.server.default_org().to_string();
        let stores = LinkedStores::new(Arc::new(store.clone()), store_key::from_setting()?);
        store_link::listen(&layout.store_socket(), Arc::new(stores), org)
    }

    /// The home store, for a runner in this process.
    pub(crate) fn store(&self) -> Result<RunnerStore> {
        let store = self.store.clone().map(|store| Arc::new(store) as Arc<dyn OpenStore>);
        Ok(RunnerStore { store, key: store_key::from_setting()? })
    }

    /// A way for a runner in this process to reach the server.
    pub(crate) fn in_process_dial(&self) -> Arc<dyn Dial> {
        let gate = self.server.runner_gate(Trust::InProcess(self.server.default_org()));
        Arc::new(InProcess { gate, others: RemoteDial::new(vec![], Some(self.client.token.clone())) })
    }

    /// Resolves when the server stops by itself.
    pub(crate) async fn stopped(&self) {
        self.server.stopping().cancelled().await;
    }

    /// Ends it; what is under way is driven on by the next start.
    pub(crate) async fn shutdown(self) -> Result<()> {
        self.server.shutdown().await;
        self.serving.await.context("the API's task")?.context("the API")?;
        Ok(())
    }
}

/// The token of earlier starts, or a new one: the database knows hashes only, so the text is kept for this
/// user's own clients in a file that nobody else can read.
async fn local_token(layout: &Layout, server: &Server) -> Result<String> {
    if let Ok(text) = std::fs::read_to_string(layout.client_file())
        && let Ok(known) = serde_json::from_str::<ClientFile>(&text)
    {
        let secret = known.token.clone();
        let verified = server.db().verify_token(&secret).await?;
        if verified.is_some() {
            return Ok(known.token);
        }
    }
    let org = server.default_org();
    let (_, secret) = server.db().create_token(org, LOCAL_TOKEN).await?;
    Ok(secret)
}

fn write_client_file(layout: &Layout, client: &ClientFile) -> Result<()> {
    let path = layout.client_file();
    let unfinished = path.with_extension("json.new");
    match std::fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let write = || -> io::Result<()> {
        let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
        serde_json::to_writer_pretty(&file, client).map_err(io::Error::from)?;
        file.sync_all()?;
        std::fs::rename(&unfinished, &path)
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

/// What a runner keeps homes in.
#[derive(Debug, Default)]
pub(crate) struct RunnerStore {
    /// None: the store is turned off.
    store: Option<Arc<dyn OpenStore>>,
    /// What opens it, where the runner does that itself.
    key: Option<MasterKey>,
}

/// Runs a runner until `stop`.
pub(crate) async fn run_runner(
    layout: &Layout,
    store: RunnerStore,
    dial: Arc<dyn Dial>,
    stop: CancellationToken,
) -> Result<()> {
    let excludes = Excludes::from_setting(setting("COVEY_HOME_EXCLUDES").as_deref());
    for pattern in excludes.unreadable() {
        tracing::warn!(pattern, "this pattern of COVEY_HOME_EXCLUDES cannot be read and excludes nothing");
    }
    let mut config = RunnerConfig::new(layout.runner_dir(), None);
    config.store = store.store;
    config.excludes = excludes;
    config.store_key = store.key;
    if let Some(limit) = setting("COVEY_WORKING_COPIES_MAX_BYTES") {
        config.copies_limit = limit.parse().with_context(|| {
            format!("COVEY_WORKING_COPIES_MAX_BYTES is `{limit}`; set it to a number of bytes")
        })?;
    }
    config.name = host_name();
    let runner = Runner::new(config, Arc::new(NativeBackend::new()))?;
    runner.run(dial, stop).await.context("the runner")
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Reaches a server in this process.
#[derive(Debug)]
struct InProcess {
    gate: covey_server::RunnerGate,
    /// Servers that share its database.
    others: RemoteDial,
}

impl Dial for InProcess {
    fn dial(&self) -> DialFuture<'_> {
        let (ours, theirs) = tokio::io::duplex(LINK_BYTES);
        self.gate.accept(theirs);
        Box::pin(std::future::ready(Ok(Box::new(ours) as Box<dyn LinkStream>)))
    }

    fn dial_at<'a>(&'a self, url: &'a str) -> DialFuture<'a> {
        self.others.dial_at(url)
    }
}

/// Reaches the server of the same user through its data directory.
#[derive(Debug)]
pub(crate) struct Socket {
    path: PathBuf,
    client_file: PathBuf,
}

impl Socket {
    pub(crate) fn of(layout: &Layout) -> Self {
        Self { path: layout.runner_socket(), client_file: layout.client_file() }
    }
}

impl Dial for Socket {
    fn dial(&self) -> DialFuture<'_> {
        Box::pin(async {
            let stream = UnixStream::connect(&self.path).await?;
            Ok(Box::new(stream) as Box<dyn LinkStream>)
        })
    }

    fn dial_at<'a>(&'a self, url: &'a str) -> DialFuture<'a> {
        Box::pin(async {
            // Read each time: the server writes it at every start, and its database may be another one by then.
            let text = tokio::fs::read_to_string(&self.client_file).await?;
            let file: ClientFile = serde_json::from_str(&text)?;
            RemoteDial::new(vec![], Some(file.token)).reach(url).await
        })
    }
}

/// Resolves when somebody asks this process to end.
pub(crate) async fn asked_to_end() -> io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// Sends log lines to stderr, filtered by `COVEY_LOG` (for example `debug` or `covey_runner=trace`).
pub(crate) fn log_to_stderr() -> Result<()> {
    use tracing_subscriber::EnvFilter;
    let filter = match setting("COVEY_LOG") {
        Some(text) => EnvFilter::try_new(&text).with_context(|| format!("COVEY_LOG is `{text}`"))?,
        None => EnvFilter::new("info"),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        // It would be told on stderr, too, and a full disk or a closed pipe there must not end the server.
        .log_internal_errors(false)
        .try_init()
        .map_err(|error| anyhow::anyhow!("cannot log: {error}"))
}
