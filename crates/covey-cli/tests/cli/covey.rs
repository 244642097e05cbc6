//! Running the binary.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// An empty place with an empty environment to run `covey` in.
pub(crate) struct Place {
    dir: TempDir,
    url: Option<String>,
    token: String,
}

/// What a run left.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Place {
    /// No server is known.
    pub(crate) fn alone() -> Self {
        Self { dir: TempDir::new().unwrap(), url: None, token: super::fake_server::TOKEN.to_owned() }
    }

    /// `COVEY_URL` and `COVEY_TOKEN` lead to `url`.
    pub(crate) fn with_server(url: &str) -> Self {
        Self { url: Some(url.to_owned()), ..Self::alone() }
    }

    /// What `covey up` would have written for its clients: the store is `server-store`, the org `o`.
    pub(crate) fn write_client_file(&self) {
        let store = self.path().join("server-store");
        std::fs::create_dir(&store).unwrap();
        let data = self.path().join(".local/share/covey");
        std::fs::create_dir_all(&data).unwrap();
        let file = serde_json::json!({
            "url": self.url, "token": super::fake_server::TOKEN, "store": store, "org": "o",
        });
        std::fs::write(data.join("client.json"), file.to_string()).unwrap();
    }

    /// What `covey up` at `url` would have written for its clients.
    pub(crate) fn know(&mut self, url: &str, token: &str, store: &Path, org: &str) {
        (self.url, self.token) = (Some(url.to_owned()), token.to_owned());
        std::fs::create_dir_all(store).unwrap();
        let data = self.path().join(".local/share/covey");
        std::fs::create_dir_all(&data).unwrap();
        let file = serde_json::json!({ "url": url, "token": token, "store": store, "org": org });
        std::fs::write(data.join("client.json"), file.to_string()).unwrap();
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_covey"));
        command.args(args).current_dir(self.path()).stdin(Stdio::null());
        command.env_clear().env("HOME", self.path()).env("PATH", "/usr/bin:/bin");
        if let Some(url) = &self.url {
            command.env("COVEY_URL", url).env("COVEY_TOKEN", &self.token);
        }
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Ended {
        self.command(args).output().unwrap().into()
    }

    /// Runs with success and parses the one line of stdout.
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let ended = self.run(args);
        assert_eq!(ended.code, 0, "{ended:?}");
        assert_eq!(ended.stdout.lines().count(), 1, "{ended:?}");
        serde_json::from_str(&ended.stdout).unwrap()
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
