//! Servers that speak S3, from packages, for tests and benches: SeaweedFS as a real store, moto as another opinion.
//!
//! What stays true: they listen on loopback only, keep their data in a temporary directory, and end when dropped.

use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use crate::{process, python};

/// Which versions; the environment is made anew when the file changes.
const REQUIREMENTS: &str = "tests/buckets/requirements.txt";
/// SeaweedFS elects a leader among one, which takes some seconds.
const START_LIMIT: Duration = Duration::from_secs(120);
const STOP_LIMIT: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(100);
const KEY_ID: &str = "covey-test-key";
/// Of servers that hold nothing and listen to this machine only.
const SECRET: &str = "covey-test-secret";

/// Running servers.
#[derive(Debug)]
pub(crate) struct BucketServers {
    running: Vec<Running>,
    /// Those that SeaweedFS takes by itself.
    second_ports: Vec<u16>,
    data: tempfile::TempDir,
}

#[derive(Debug)]
struct Running {
    name: &'static str,
    child: Child,
    address: SocketAddr,
    /// It checks keys, and it checks a condition and writes in one step.
    is_real: bool,
    log: PathBuf,
}

/// Which of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Both, for tests.
    All,
    /// The real store alone, for measuring.
    SeaweedFs,
}

impl BucketServers {
    /// Installs what is missing below `tools`, starts the servers and waits until they answer.
    pub(crate) fn start(root: &Path, tools: &Path, wanted: Wanted) -> anyhow::Result<Self> {
        let place = python::environment(root, tools, "buckets", REQUIREMENTS)?;
        let data = tempfile::Builder::new().prefix("covey-buckets-").tempdir()?;
        let mut servers = Self { running: Vec::new(), second_ports: Vec::new(), data };
        servers.seaweedfs(&place)?;
        if wanted == Wanted::All {
            servers.moto(&place)?;
        }
        for server in &mut servers.running {
            server.wait_until_it_answers()?;
        }
        Ok(servers)
    }

    /// What the tests read from `COVEY_TEST_BUCKETS`.
    pub(crate) fn as_json(&self) -> Value {
        let one = |server: &Running| {
            json!({
                "name": server.name, "address": server.address.to_string(), "id": KEY_ID, "secret": SECRET,
                "checks_keys": server.is_real, "is_atomic": server.is_real,
            })
        };
        self.running.iter().map(one).collect()
    }

    /// Lets a command find the first of them as a client of S3 does.
    pub(crate) fn tell(&self, command: &mut Command) -> anyhow::Result<()> {
        let first = self.running.first().context("no server runs")?;
        command.env("COVEY_S3_ENDPOINT", format!("http://{}", first.address));
        command.env("AWS_ACCESS_KEY_ID", KEY_ID).env("AWS_SECRET_ACCESS_KEY", SECRET);
        command.env("AWS_REGION", "us-east-1").env_remove("AWS_SESSION_TOKEN").env_remove("AWS_PROFILE");
        Ok(())
    }

    /// Makes a bucket on every server.
    pub(crate) fn make_bucket(&self, name: &str) -> anyhow::Result<()> {
        for server in &self.running {
            let url = format!("http://{}/{name}", server.address);
            let made = ureq::put(&url).send_empty();
            made.with_context(|| {
                format!("{}: no bucket `{name}`; its last words: {}", server.name, server.last_words())
            })?;
        }
        Ok(())
    }

    fn seaweedfs(&mut self, place: &Path) -> anyhow::Result<()> {
        let dir = self.data.path().join("seaweedfs");
        fs::create_dir(&dir)?;
        let identities = self.data.path().join("identities.json");
        let credentials = json!([{ "accessKey": KEY_ID, "secretKey": SECRET }]);
        let actions = ["Admin", "Read", "Write", "List", "Tagging"];
        let identity = json!({ "name": "tests", "credentials": credentials, "actions": actions });
        // Who has no key may make buckets, so that we need not sign.
        let anybody = json!({ "name": "anonymous", "actions": ["Admin"] });
        fs::write(&identities, json!({ "identities": [identity, anybody] }).to_string())?;
        // Each of its parts has a second port, 10000 above the first.
        let ports = free_ports(4)?;
        self.second_ports = ports.iter().map(|port| port + 10_000).collect();
        let mut command = Command::new(place.join("bin/weed"));
        command.arg(format!("-logdir={}", self.data.path().display()));
        command.args(["server", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]);
        for part in ["filer", "s3"] {
            command.arg(format!("-{part}.localSocket={}", dir.join(part).display()));
        }
        command.arg(format!("-dir={}", dir.display()));
        command.arg(format!("-s3.config={}", identities.display()));
        for (name, port) in ["s3.port", "master.port", "volume.port", "filer.port"].iter().zip(&ports) {
            command.arg(format!("-{name}={port}"));
        }
        // They would listen at ports that a second server on this machine has, and end it.
        command.args(["-s3.port.iceberg=0", "-s3.port.lance=0"]);
        // It would tell its makers that it runs.
        command.arg("-master.telemetry=false");
        // Else the first buckets take all volumes that a default server allows itself.
        command.args(["-volume.max=200", "-master.volumeSizeLimitMB=256"]);
        self.spawn("seaweedfs", command, ports[0], true)
    }

    fn moto(&mut self, place: &Path) -> anyhow::Result<()> {
        let port = free_ports(1)?[0];
        let mut command = Command::new(place.join("bin/moto_server"));
        command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
        self.spawn("moto", command, port, false)
    }

    fn spawn(
        &mut self,
        name: &'static str,
        mut command: Command,
        port: u16,
        is_real: bool,
    ) -> anyhow::Result<()> {
        let log = self.data.path().join(format!("{name}.log"));
        let file = fs::File::create(&log)?;
        command.current_dir(self.data.path()).env("HOME", self.data.path()).env("TMPDIR", self.data.path());
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().with_context(|| format!("{name} does not start"))?;
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        self.running.push(Running { name, child, address, is_real, log });
        Ok(())
    }
}

impl Running {
    fn wait_until_it_answers(&mut self) -> anyhow::Result<()> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended with {status}: {}", self.name, self.last_words());
            }
            if self.answers() {
                return Ok(());
            }
            if started.elapsed() > START_LIMIT {
                let limit = START_LIMIT.as_secs();
                bail!("{} does not answer within {limit} s: {}", self.name, self.last_words());
            }
            std::thread::sleep(POLL);
        }
    }

    /// Whether it takes requests and its parts have found each other; a request without a key is enough of a question.
    fn answers(&self) -> bool {
        let url = format!("http://{}/covey-not-there", self.address);
        TcpStream::connect(self.address).is_ok()
            && match ureq::get(&url).call() {
                Ok(_) => true,
                Err(ureq::Error::StatusCode(status)) => status < 500,
                Err(_) => false,
            }
    }

    fn last_words(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().rev().take(20).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }
}

impl Drop for BucketServers {
    fn drop(&mut self) {
        for server in &mut self.running {
            // They hold nothing that is worth an orderly end, and must not outlive us.
            if let Err(error) = process::stop(&mut server.child, STOP_LIMIT) {
                eprintln!("{}: {error:#}", server.name);
            }
        }
        // Its parts talk over these, and it leaves them behind; they have no option.
        for port in &self.second_ports {
            for part in ["master", "volume", "filer", "s3"] {
                let socket = Path::new("/tmp").join(format!("seaweedfs-{part}-grpc-{port}.sock"));
                match fs::remove_file(&socket) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        eprintln!("{}: {error}", socket.display());
                    }
                    _ => {}
                }
            }
        }
    }
}

/// Ports that are free now, and free 10000 higher, too.
fn free_ports(count: usize) -> anyhow::Result<Vec<u16>> {
    let mut held = Vec::new();
    let mut ports = Vec::new();
    for _ in 0..count * 100 {
        let one = TcpListener::bind("127.0.0.1:0")?;
        let port = one.local_addr()?.port();
        let second = port.checked_add(10_000).map(|port| TcpListener::bind(("127.0.0.1", port)));
        if let Some(Ok(other)) = second {
            // Held until all are chosen, so that none is chosen twice.
            held.push((one, other));
            ports.push(port);
        }
        if ports.len() == count {
            return Ok(ports);
        }
    }
    bail!("no {count} free ports on 127.0.0.1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_different_and_free() {
        let ports = free_ports(4).unwrap();
        let different: std::collections::BTreeSet<u16> = ports.iter().copied().collect();
        assert_eq!(different.len(), 4);
        assert!(ports.iter().all(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()));
    }
}
