//! `covey up` with its state in PostgreSQL, from outside. `cargo xtask test --stage postgres` starts the server and says in
//! `COVEY_TEST_POSTGRES` where it is; this test has the database of that name for itself.

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Read as _};
    use std::path::Path;
    use std::process::{Child, Command, Output, Stdio};

    use serde_json::{Value, json};

    struct Up {
        child: Child,
    }

    impl Up {
        fn start(data: &Path, url: &str) -> Self {
            let script = data.join("../script.json");
            let mut command =
                covey(data, url, &["up", "--listen", "127.0.0.1:0", "--json", "--model-script"]);
            let mut child = command.arg(&script).stdout(Stdio::piped()).spawn().unwrap();
            let mut line = String::new();
            BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
            let up = Self { child };
            assert!(line.contains("\"url\""), "it did not start; its log says why");
            up
        }
    }

    impl Drop for Up {
        fn drop(&mut self) {
            // SIGKILL: nothing is told to anybody.
            self.child.kill().unwrap();
            self.child.wait().unwrap();
        }
    }

    fn covey(data: &Path, url: &str, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_covey"));
        command.args(args).current_dir(data).stdin(Stdio::null());
        command.env_clear().env("HOME", data).env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin");
        command.env("COVEY_DATA_DIR", data).env("COVEY_DATABASE_URL", url);
        command
    }

    fn said(output: &Output) -> String {
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    }

    fn json(data: &Path, url: &str, args: &[&str]) -> Value {
        let output = covey(data, url, args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", said(&output));
        let text = String::from_utf8(output.stdout).unwrap();
        serde_json::from_str(text.lines().last().unwrap()).unwrap()
    }

    #[test]
    fn a_turn_with_a_tool_call_survives_the_kill_of_its_server() {
        let url = std::env::var("COVEY_TEST_POSTGRES");
        let url = url.expect("COVEY_TEST_POSTGRES is not set: run `cargo xtask test --stage postgres`");
        let place = tempfile::tempdir().unwrap();
        let (data, other) = (place.path().join("data"), place.path().join("other"));
        for dir in [&data, &other] {
            std::fs::create_dir(dir).unwrap();
        }
        let write = |text: &str| json!({"name": "write", "input": {"file_path": "/home/agent/note", "content": text}});
        let turns =
            |text: &str| json!([{"text": "I write.", "calls": [write(text)]}, {"text": "It is written."}]);
        let script = json!({"scripts": [
            {"when": "first", "seed": 1, "turns": turns("one")}, {"when": "second", "seed": 2, "turns": turns("two")},
        ]});
        std::fs::write(place.path().join("script.json"), script.to_string()).unwrap();
        let home = place.path().join("home");
        std::fs::create_dir(&home).unwrap();
        let home_arg = home.to_str().unwrap();

        let migrated = json(&data, &url, &["db", "migrate", "--json"]);
        assert_eq!(migrated["from"], 0, "{migrated}");
        let up = Up::start(&data, &url);
        let ran = covey(&data, &url, &["run", "first", "--home", home_arg]).output().unwrap();
        assert!(ran.status.success(), "{}", said(&ran));
        assert_eq!(std::fs::read_to_string(home.join("note")).unwrap(), "one");
        assert!(!data.join("covey.db").exists(), "nothing is kept in SQLite");

        let second = covey(&other, &url, &["server", "--listen", "127.0.0.1:0"]).output().unwrap();
        let text = said(&second);
        assert!(second.status.code() == Some(4) && text.contains("another covey server"), "{text}");
        let same_place = covey(&data, &url, &["server", "--listen", "127.0.0.1:0"]).output().unwrap();
        assert!(said(&same_place).contains("in use"), "{}", said(&same_place));
        let deleted = covey(&other, &url, &["org", "delete", "default", "--yes"]).output().unwrap();
        assert!(said(&deleted).contains("another covey server"), "{}", said(&deleted));
        let backup = covey(&data, &url, &["backup", "create", "there"]).output().unwrap();
        assert!(said(&backup).contains("pg_dump"), "{}", said(&backup));

        drop(up);
        let up = Up::start(&data, &url);
        let sessions = json(&data, &url, &["session", "list", "--archived", "--json"]);
        assert!(sessions.to_string().contains("sesn_"), "{sessions}");
        let ran = covey(&data, &url, &["run", "second", "--home", home_arg]).output().unwrap();
        assert!(ran.status.success(), "{}", said(&ran));
        assert_eq!(std::fs::read_to_string(home.join("note")).unwrap(), "two");
        let mut client = String::new();
        std::fs::File::open(data.join("client.json")).unwrap().read_to_string(&mut client).unwrap();
        let password = url.split(':').nth(2).unwrap().split('@').next().unwrap();
        assert!(client.contains("postgres://") && !client.contains(password), "{client}");
        drop(up);
        several_servers(place.path(), &url, &data, &other, home_arg);
    }

    /// With blocks in one place they share the database, a runner is at both, and one goes without a loss.
    fn several_servers(place: &Path, url: &str, data: &Path, other: &Path, home: &str) {
        let store = format!("file://{}", data.join("store").display());
        let script = place.join("script.json");
        let server = |dir: &Path| {
            let mut command =
                covey(dir, url, &["server", "--listen", "127.0.0.1:0", "--json", "--shared-store"]);
            command.env("COVEY_BLOB_STORE", &store).arg("--model-script").arg(&script);
            let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
            let mut line = String::new();
            BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
            let ready: Value = serde_json::from_str(&line).expect("it did not start; its log says why");
            (
                Up { child },
                ready["url"].as_str().unwrap().to_owned(),
                ready["token"].as_str().unwrap().to_owned(),
            )
        };
        let (one, first_url, token) = server(data);
        let (two, ..) = server(other);
        let lonely = place.join("lonely");
        std::fs::create_dir(&lonely).unwrap();
        let refused = covey(&lonely, url, &["server", "--listen", "127.0.0.1:0"]).output().unwrap();
        assert!(said(&refused).contains("do not share it"), "{}", said(&refused));

        let runner_dir = place.join("runner");
        std::fs::create_dir(&runner_dir).unwrap();
        let mut runner = covey(&runner_dir, url, &["runner", "serve", "--server", &first_url]);
        let child = runner.env("COVEY_BLOB_STORE", &store).env("COVEY_TOKEN", &token).spawn().unwrap();
        let runner = Up { child };
        let ran = covey(data, url, &["run", "second", "--home", home]).output().unwrap();
        assert!(ran.status.success(), "{}", said(&ran));
        // Asked to end, it does, in good order; the runner was told of the other one and is there already.
        let mut one = one;
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(one.child.id() as i32).unwrap(),
            rustix::process::Signal::TERM,
        )
        .unwrap();
        assert!(one.child.wait().unwrap().success());
        std::mem::forget(one);
        // A sandbox of another home state has read nothing, and does not let a file be overwritten that is there.
        std::fs::remove_file(Path::new(home).join("note")).unwrap();
        let ran = covey(other, url, &["run", "second", "--home", home]).output().unwrap();
        assert!(ran.status.success(), "{}", said(&ran));
        assert_eq!(std::fs::read_to_string(Path::new(home).join("note")).unwrap(), "two", "{}", said(&ran));
        drop((runner, two));
    }
}
