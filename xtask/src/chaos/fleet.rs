//! Servers that share a database, or one alone, with a runner that dials them: processes of their own, each restartable.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::cluster::{announced, built, kill, kill_recorded, log};
use super::relay::Relay;
use crate::postgres_server::PostgresServer;

/// The term of a server's lease in these runs: short, so that many can end.
pub(crate) const LEASE_SECONDS: u64 = 2;
/// A server that does not answer within this time is asked no further; it may be stopped or cut off.
const ANSWER_MAX: Duration = Duration::from_secs(4);
/// How often a server is started before the run has failed.
const STARTS_MAX: u32 = 20;
const START_PAUSE: Duration = Duration::from_millis(300);

/// Where the state is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Backend {
    /// A file of one server.
    Sqlite,
    /// A database of any number of servers.
    Postgres,
}

/// One server.
#[derive(Debug)]
struct Member {
    data_dir: PathBuf,
    listen: SocketAddr,
    process: Child,
    relay: Option<Relay>,
}

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Fleet {
    dir: tempfile::TempDir,
    covey: PathBuf,
    script: PathBuf,
    members: Vec<Member>,
    runner: Option<Child>,
    token: String,
    /// Last, so that it ends after the servers.
    database: Option<PostgresServer>,
}

impl Fleet {
    /// Starts servers and, unless none is wanted, a runner. `covey`: the program, none for the release binary, which is
    /// built. `script`: what the model says.
    pub(crate) fn start(
        root: &Path,
        covey: Option<&Path>,
        backend: Backend,
        servers: u32,
        script: &Value,
        with_runner: bool,
    ) -> Result<Self> {
        let covey = match covey {
            Some(covey) => covey.canonicalize().with_context(|| format!("{}", covey.display()))?,
            None => built(root)?,
        };
        let dir = tempfile::Builder::new().prefix("covey-chaos-").tempdir()?;
        let script_file = dir.path().join("script.json");
        std::fs::write(&script_file, script.to_string())?;
        let database = match backend {
            Backend::Sqlite => None,
            Backend::Postgres => {
                let is_root = rustix::process::geteuid().is_root();
                Some(PostgresServer::start(root, &root.join(".test-env"), is_root)?)
            }
        };
        let mut fleet = Self {
            dir,
            covey,
            script: script_file,
            members: Vec::new(),
            runner: None,
            token: String::new(),
            database,
        };
        for number in 0..servers {
            let relay =
                fleet.database.as_ref().map(|database| Relay::start(database.address())).transpose()?;
            // The port stays the server's over its restarts: it is what the others know it by.
            let listen = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
            let data_dir = fleet.dir.path().join(format!("server{number}"));
            std::fs::create_dir(&data_dir)?;
            let (process, token) = fleet.spawn_server(&data_dir, listen, relay.as_ref())?;
            if number == 0 {
                fleet.token = token;
            }
            fleet.members.push(Member { data_dir, listen, process, relay });
        }
        if with_runner {
            fleet.start_runner()?;
        }
        Ok(fleet)
    }

    fn spawn_server(
        &self,
        data_dir: &Path,
        listen: SocketAddr,
        relay: Option<&Relay>,
    ) -> Result<(Child, String)> {
        let mut command = Command::new(&self.covey);
        command.args(["server", "--json", "--listen", &listen.to_string(), "--data-dir"]).arg(data_dir);
        command.arg("--model-script").arg(&self.script);
        command.env("COVEY_BLOB_STORE", format!("file://{}", self.dir.path().join("store").display()));
        if let (Some(database), Some(relay)) = (&self.database, relay) {
            let url = format!("{}?lease_seconds={LEASE_SECONDS}", database.url_at(relay.address));
            command.env("COVEY_DATABASE_URL", url).arg("--shared-store");
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log(data_dir, "server.log")?);
        let (child, _, token) = announced(command, data_dir)?;
        Ok((child, token))
    }

    pub(crate) fn servers(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn has_database(&self) -> bool {
        self.database.is_some()
    }

    pub(crate) fn start_runner(&mut self) -> Result<()> {
        let data_dir = self.dir.path().join("runner");
        std::fs::create_dir_all(&data_dir)?;
        let mut command = Command::new(&self.covey);
        command.args(["runner", "serve", "--data-dir"]).arg(&data_dir);
        for member in &self.members {
            command.args(["--server", &format!("http://{}", member.listen)]);
        }
        command.env("COVEY_BLOB_STORE", format!("file://{}", self.dir.path().join("store").display()));
        command.env("COVEY_TOKEN", &self.token);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log(&data_dir, "runner.log")?);
        self.runner = Some(command.spawn().context("cannot start `covey runner serve`")?);
        Ok(())
    }

    pub(crate) fn kill_server(&mut self, number: usize) -> Result<()> {
        kill(&mut self.members[number].process)
    }

    pub(crate) fn restart_server(&mut self, number: usize) -> Result<()> {
        let member = &self.members[number];
        let mut tries = 0;
        // As whoever supervises a server does: the database may still be recovering.
        let process = loop {
            tries += 1;
            match self.spawn_server(&member.data_dir, member.listen, member.relay.as_ref()) {
                Ok((process, _)) => break process,
                Err(error) if tries >= STARTS_MAX => return Err(error),
                Err(_) => std::thread::sleep(START_PAUSE),
            }
        };
        self.members[number].process = process;
        Ok(())
    }

    pub(crate) fn signal_server(&self, number: usize, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.members[number].process.id() as i32).context("a process id")?;
        kill_process(pid, signal).context("cannot signal a server")
    }

    /// What a server has in memory.
    pub(crate) fn resident_bytes(&self, number: usize) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.members[number].process.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().context("VmRSS")?;
        Ok(kib * 1024)
    }

    pub(crate) fn relay(&self, number: usize) -> Option<&Relay> {
        self.members[number].relay.as_ref()
    }

    pub(crate) fn restart_database(&mut self) -> Result<()> {
        self.database.as_mut().map_or(Ok(()), PostgresServer::restart)
    }

    pub(crate) fn kill_runner(&mut self) -> Result<()> {
        self.runner.as_mut().map_or(Ok(()), kill)
    }

    pub(crate) fn kill_sandboxes(&self) -> Result<bool> {
        kill_recorded(&self.dir.path().join("runner/runner/sandboxes"))
    }

    /// The witness file in a home's working copy; empty before the first call.
    pub(crate) fn witness(&self, home: &str) -> Vec<String> {
        let path = self.dir.path().join("runner/runner/homes").join(home).join("files/witness");
        std::fs::read_to_string(path).unwrap_or_default().lines().map(str::to_owned).collect()
    }

    /// How to ask the servers, from any thread.
    pub(crate) fn client(&self) -> Client {
        let config = ureq::Agent::config_builder().timeout_global(Some(ANSWER_MAX)).build();
        let urls = self.members.iter().map(|member| format!("http://{}", member.listen)).collect();
        Client { agent: config.into(), urls, token: self.token.clone(), next: 0 }
    }

    /// Keeps the directory, for looking into it.
    pub(crate) fn keep(&mut self) -> PathBuf {
        self.dir.disable_cleanup(true);
        self.dir.path().to_owned()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        if let Err(error) = self.kill_sandboxes() {
            eprintln!("cannot end a sandbox of the chaos run: {error:#}");
        }
        for child in self.runner.iter_mut().chain(self.members.iter_mut().map(|member| &mut member.process)) {
            if let Ok(None) = child.try_wait()
                && let Err(error) = kill(child)
            {
                eprintln!("cannot end a process of the chaos run: {error:#}");
            }
        }
        if let Err(error) = self.kill_sandboxes() {
            eprintln!("cannot end a sandbox of the chaos run: {error:#}");
        }
    }
}

/// Asks any of the servers, another one each time.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    agent: ureq::Agent,
    urls: Vec<String>,
    token: String,
    next: usize,
}

impl Client {
    fn url(&mut self, path: &str) -> String {
        self.next = self.next.wrapping_add(1);
        format!("{}{path}", self.urls[self.next % self.urls.len()])
    }

    pub(crate) fn get(&mut self, path: &str) -> Result<Value> {
        let url = self.url(path);
        let mut answer = self.agent.get(url).header("x-api-key", &self.token).call()?;
        Ok(answer.body_mut().read_json()?)
    }

    /// `key`: the same again does nothing again.
    pub(crate) fn post(&mut self, path: &str, body: &Value, key: Option<&str>) -> Result<Value> {
        let url = self.url(path);
        let mut request = self.agent.post(url).header("x-api-key", &self.token);
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        Ok(request.send_json(body)?.body_mut().read_json()?)
    }

    /// Every item of a list that comes in pages.
    pub(crate) fn all(&mut self, path: &str) -> Result<Vec<Value>> {
        let mut found = Vec::new();
        let mut page = String::new();
        loop {
            let mark = if path.contains('?') { '&' } else { '?' };
            let answer = self.get(&format!("{path}{mark}limit=1000{page}"))?;
            found.extend(answer["data"].as_array().cloned().unwrap_or_default());
            match answer["next_page"].as_str() {
                Some(next) => page = format!("&page={next}"),
                None => return Ok(found),
            }
        }
    }
}
