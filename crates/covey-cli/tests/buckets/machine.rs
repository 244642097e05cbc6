//! A machine that has `covey`, and buckets that it may or may not use.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;

use covey_bucket::{Access, BucketStore, OpenOptions, Patience, Settings};
use covey_home::backend::{Backend, Key};
use serde_json::Value;
use tempfile::TempDir;

const VARIABLE: &str = "COVEY_TEST_BUCKETS";
const BUCKET: &str = "covey-test";

/// A running server that speaks S3.
#[derive(Debug, Clone)]
pub(crate) struct Server {
    pub(crate) name: String,
    endpoint: String,
    id: String,
    secret: String,
}

/// Every server of the stage.
pub(crate) fn servers() -> Vec<Server> {
    let text = std::env::var(VARIABLE).unwrap_or_else(|_| {
        panic!("{VARIABLE} is not set: run `cargo xtask test --stage buckets`, which starts the servers")
    });
    let listed: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert!(listed.len() >= 2, "{text}");
    let field = |value: &Value, name: &str| value[name].as_str().unwrap().to_owned();
    let one = |server: &Value| Server {
        name: field(server, "name"),
        endpoint: format!("http://{}", field(server, "address")),
        id: field(server, "id"),
        secret: field(server, "secret"),
    };
    listed.iter().map(one).collect()
}

/// A place in the test bucket that nothing has been written to.
pub(crate) fn fresh_place() -> String {
    format!("s3://{BUCKET}/{}", covey_home::name::random_name())
}

impl Server {
    /// The files of an org, for doing to them what no command does.
    pub(crate) fn files(&self, place: &str, org: &str) -> Arc<dyn Backend> {
        let key = covey_bucket::Key { id: self.id.clone(), secret: self.secret.clone(), session_token: None };
        let settings = Settings::of(&self.endpoint, "us-east-1", key);
        let options = OpenOptions {
            settings: &settings,
            access: Access::Read,
            patience: Patience::default(),
            local_dir: None,
            probe_again: true,
        };
        BucketStore::open(&place.parse().unwrap(), &options).unwrap().backend(org).unwrap()
    }

    /// Packs of an org.
    pub(crate) fn packs(&self, place: &str, org: &str) -> Vec<Key> {
        let names = self.files(place, org).list(&Key::new(&["packs"]).unwrap()).unwrap();
        names.iter().map(|name| Key::new(&["packs", name]).unwrap()).collect()
    }

    /// Flips a bit in a stored file.
    pub(crate) fn flip(&self, place: &str, org: &str, key: &Key, at: usize) {
        let files = self.files(place, org);
        let len = files.file_len(key).unwrap() as usize;
        let mut bytes = files.read(key, 0, len).unwrap();
        bytes[at] ^= 1;
        let mut file = files.create().unwrap();
        file.append(&bytes).unwrap();
        file.publish(key).unwrap();
    }
}

/// An empty directory, and an environment.
pub(crate) struct Machine {
    dir: TempDir,
    environment: Vec<(String, String)>,
}

/// What a run left.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Machine {
    /// One that has the key of the server's buckets.
    pub(crate) fn with_key_of(server: &Server) -> Self {
        let environment = [
            ("COVEY_S3_ENDPOINT", server.endpoint.as_str()),
            ("AWS_ACCESS_KEY_ID", &server.id),
            ("AWS_SECRET_ACCESS_KEY", &server.secret),
            ("AWS_REGION", "us-east-1"),
        ];
        let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned()));
        Self { dir: TempDir::new().unwrap(), environment: environment.into() }
    }

    pub(crate) fn set(&mut self, name: &str, value: &str) {
        self.environment.push((name.to_owned(), value.to_owned()));
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_covey"));
        command.args(args).current_dir(self.dir.path()).stdin(Stdio::null());
        command.env_clear().env("HOME", self.dir.path()).env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin");
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Without the keys of the bucket and of the store.
    pub(crate) fn command_without_keys(&self, args: &[&str]) -> Command {
        let mut command = self.command(args);
        command.env_remove("AWS_ACCESS_KEY_ID").env_remove("AWS_SECRET_ACCESS_KEY");
        command.env_remove("COVEY_STORE_KEY_FILE");
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Ended {
        self.command(args).output().unwrap().into()
    }

    /// Runs with success and parses the one line of stdout.
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let ended = self.run(&[args, &["--json"]].concat());
        ended.json(args)
    }
}

impl Ended {
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        assert_eq!(self.code, 0, "{args:?}: {self:?}");
        serde_json::from_str(self.stdout.lines().last().unwrap_or_default()).unwrap()
    }
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// A process that ends with the value.
pub(crate) struct Process(Child);

impl Process {
    /// `covey server` on a data directory, once it listens.
    pub(crate) fn server(machine: &Machine, data: &str, more: &[&str]) -> Self {
        let args = ["server", "--data-dir", data, "--listen", "127.0.0.1:0", "--json"];
        let mut command = machine.command(&[&args[..], more].concat());
        let log = machine.path("server.log");
        command.stdout(Stdio::piped()).stderr(fs::File::create(&log).unwrap());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("\"url\""), "`{line}`: {}", fs::read_to_string(&log).unwrap());
        Self(child)
    }

    pub(crate) fn start(mut command: Command, log: &Path) -> Self {
        let log = fs::File::create(log).unwrap();
        Self(command.stdout(Stdio::null()).stderr(log).spawn().unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Makes an agent; gives its home's id.
pub(crate) fn home_of_new_agent(machine: &Machine, data: &str) -> String {
    let agent = machine.json(&["agent", "create", "--name", "one", "--model", "m", "--data-dir", data]);
    let homes = machine.json(&["home", "list", "--data-dir", data]);
    let homes = homes["data"].as_array().unwrap().clone();
    let home = homes.into_iter().find(|home| home["agent_id"] == agent["id"]).unwrap();
    home["id"].as_str().unwrap().to_owned()
}

/// Bytes that do not compress.
pub(crate) fn noise(len: usize) -> Vec<u8> {
    let mut state = 88_172_645_463_325_252_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}
