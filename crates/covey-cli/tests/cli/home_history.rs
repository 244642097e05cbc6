//! `covey home log`, `ls`, `cat`, `diff`, `restore`, `fork`, `export`, `import`, `usage`, `rules`: each on a store
//! directory and against a server, with the same answers.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::covey::{Ended, Place};
use super::real_server::RealServer;

/// A place with a home of two generations, and how to name it.
struct World {
    place: Place,
    /// Behind the name of the command: the home, and where it is.
    args: Vec<String>,
    _server: Option<RealServer>,
}

fn first_files(dir: &Path) {
    fs::create_dir_all(dir.join("src")).unwrap();
    fs::write(dir.join("src/main.rs"), "one\ntwo\nthree\n").unwrap();
    fs::write(dir.join("src/old.rs"), "old\n").unwrap();
    std::os::unix::fs::symlink("src/main.rs", dir.join("link")).unwrap();
}

fn second_files(dir: &Path) {
    fs::write(dir.join("src/main.rs"), "one\n2\nthree\n").unwrap();
    fs::remove_file(dir.join("src/old.rs")).unwrap();
    fs::write(dir.join("notes.txt"), "done\n").unwrap();
}

impl World {
    /// On a store directory.
    fn local() -> Self {
        let place = Place::alone();
        let dir = place.path().join("dir");
        let secure = ["home", "secure", "dir", "--json", "--store", "store", "--org", "o", "--home", "h"];
        first_files(&dir);
        assert_eq!(place.json(&secure)["generation"], 1);
        second_files(&dir);
        assert_eq!(place.json(&secure)["generation"], 2);
        let args = ["h", "--store", "store", "--org", "o"].map(str::to_owned).to_vec();
        Self { place, args, _server: None }
    }

    /// Of an agent called `one`.
    fn served() -> Self {
        let mut place = Place::alone();
        let server = RealServer::start(place.path());
        place.know(&server.url, &server.token, &server.store, &server.org);
        place.json(&["agent", "create", "--name", "one", "--model", "m", "--json"]);
        let dir = place.path().join("dir");
        first_files(&dir);
        assert_eq!(place.json(&["home", "import", "one", "dir", "--json"])["generation"], 1);
        second_files(&dir);
        assert_eq!(place.json(&["home", "import", "one", "dir", "--json"])["generation"], 2);
        Self { place, args: vec!["one".to_owned()], _server: Some(server) }
    }

    fn args<'a>(&'a self, command: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        let mut args = vec!["home", command];
        // The home first, then what the command is about, then where the home is.
        args.push(&self.args[0]);
        args.extend(more);
        args.extend(self.args[1..].iter().map(String::as_str));
        args
    }

    fn run(&self, command: &str, more: &[&str]) -> Ended {
        self.place.run(&self.args(command, more))
    }

    fn said(&self, command: &str, more: &[&str]) -> String {
        let ended = self.run(command, more);
        assert_eq!(ended.code, 0, "{command} {more:?}: {ended:?}");
        ended.stdout
    }

    fn json(&self, command: &str, more: &[&str]) -> Value {
        let mut args = self.args(command, more);
        args.push("--json");
        self.place.json(&args)
    }

    fn refused(&self, command: &str, more: &[&str], code: i32, said: &str) {
        let ended = self.run(command, more);
        assert_eq!(ended.code, code, "{command} {more:?}: {ended:?}");
        assert!(ended.stderr.contains(said), "{command} {more:?}: {ended:?}");
    }
}

fn paths(answer: &Value) -> Vec<&str> {
    answer["data"].as_array().unwrap().iter().map(|entry| entry["path"].as_str().unwrap()).collect()
}

fn both() -> [World; 2] {
    [World::local(), World::served()]
}

#[test]
fn snapshots_are_listed_looked_into_and_compared() {
    for world in both() {
        let log = world.json("log", &[]);
        let numbers: Vec<_> =
            log["data"].as_array().unwrap().iter().map(|row| row["generation"].clone()).collect();
        assert_eq!(numbers, [json!(2), json!(1)]);
        assert!(world.said("log", &[]).contains("KEPT BY"));

        assert_eq!(paths(&world.json("ls", &[])), ["link", "notes.txt", "src"]);
        let listed = world.said("ls", &["src", "-g", "1"]);
        let names: Vec<_> = listed.lines().map(|line| line.rsplit(' ').next().unwrap()).collect();
        assert_eq!(names, ["src/main.rs", "src/old.rs"], "{listed}");
        assert_eq!(paths(&world.json("ls", &["-R"])), ["link", "notes.txt", "src", "src/main.rs"]);
        assert!(world.said("ls", &["link"]).contains("link -> src/main.rs"));
        world.refused("ls", &["nothing"], 3, "`nothing` is not in the snapshot");
        world.refused("ls", &["-g", "7"], 3, "7");
        world.refused("ls", &["-g", "x"], 2, "names no generation");

        assert_eq!(world.said("cat", &["src/main.rs"]), "one\n2\nthree\n");
        assert_eq!(world.said("cat", &["src/main.rs", "-g", "-1"]), "one\ntwo\nthree\n");
        world.refused("cat", &["link"], 2, "a symbolic link to `src/main.rs`");
        world.refused("cat", &["src"], 2, "is a directory");

        let changes = world.said("diff", &[]);
        for line in ["A notes.txt", "M src/main.rs", "D src/old.rs"] {
            assert!(changes.lines().any(|found| found == line), "{changes}");
        }
        let texts = world.said("diff", &["1", "2", "-t", "--path", "src/main.rs"]);
        assert!(texts.contains("-two\n+2\n") && !texts.contains("notes"), "{texts}");
        let nothing = world.said("diff", &["current", "current"]);
        assert_eq!(nothing, "");
        assert!(paths(&world.json("diff", &["0", "1"])).contains(&"src/old.rs"));
    }
}

#[test]
fn one_path_or_all_of_a_home_is_put_back() {
    for world in both() {
        assert_eq!(world.json("restore", &["1", "src/old.rs"])["generation"], 3);
        assert_eq!(world.said("cat", &["src/old.rs"]), "old\n");
        assert_eq!(world.said("cat", &["src/main.rs"]), "one\n2\nthree\n");
        let whole = world.json("restore", &["1"]);
        assert_eq!((&whole["generation"], &whole["files"]), (&json!(4), &json!(2)));
        let log = world.json("log", &[]);
        assert_eq!(log["data"][0]["root"], log["data"][3]["root"]);
        world.refused("restore", &["9"], 3, "9");
        world.refused("restore", &["1", "nothing"], 3, "`nothing`");
        world.refused("restore", &["1", "../x"], 2, "no path in a home");
    }
}

#[test]
fn an_archive_leaves_and_enters_with_all_that_is_kept() {
    for world in both() {
        let root = world.json("log", &[])["data"][1]["root"].clone();
        let exported = world.json("export", &["one.tar", "-g", "1"]);
        let archive = world.place.path().join("one.tar");
        assert_eq!(exported["bytes"], fs::metadata(&archive).unwrap().len());
        world.refused("export", &["one.tar"], 5, "exists");
        let output = world.place.command(&world.args("export", &["-g", "1"])).output().unwrap();
        assert!(output.stdout == fs::read(&archive).unwrap(), "to stdout it is the same");
        let imported = world.json("import", &["one.tar"]);
        assert_eq!((&imported["generation"], &imported["root"]), (&json!(3), &root));
        let mut from_stdin = world.place.command(&world.args("import", &["-", "--json"]));
        from_stdin.stdin(fs::File::open(&archive).unwrap());
        let again: Value = serde_json::from_slice(&from_stdin.output().unwrap().stdout).unwrap();
        assert_eq!(again["generation"], 3, "the same state is no new generation");
        fs::write(world.place.path().join("noise"), [7; 4096]).unwrap();
        world.refused("import", &["noise"], 2, "archive");
        world.refused("import", &["missing.tar"], 1, "missing.tar");
        let left: Vec<_> =
            fs::read_dir(world.place.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert!(left.iter().all(|name| !name.to_string_lossy().starts_with(".tmp")), "{left:?}");
    }
}

#[test]
fn usage_tells_the_largest_and_what_no_other_home_needs() {
    for world in both() {
        let usage = world.json("usage", &["--shares"]);
        assert_eq!(
            (&usage["files"], &usage["directories"], &usage["bytes"]),
            (&json!(2), &json!(1), &json!(17))
        );
        assert_eq!(usage["largest_files"][0]["path"], "src/main.rs");
        assert!(usage["exclusive_bytes"].as_u64().unwrap() > 0 && usage["shared_bytes"] == 0, "{usage}");
        let text = world.said("usage", &["src", "-g", "1"]);
        assert!(text.contains("src/old.rs") && text.contains("FILE"), "{text}");
        world.refused("usage", &["link"], 2, "not a directory");
    }
}

#[test]
fn a_fork_is_a_home_of_its_own() {
    let local = World::local();
    assert_eq!(local.json("fork", &["--to", "twin", "-g", "1"])["generation"], 1);
    let twin = ["home", "ls", "twin", "-R", "--json", "--store", "store", "--org", "o"];
    assert_eq!(paths(&local.place.json(&twin)), ["link", "src", "src/main.rs", "src/old.rs"]);
    local.refused("fork", &[], 2, "--to");

    let served = World::served();
    let forked = served.json("fork", &["-g", "1", "--name", "twin"]);
    assert_eq!(forked["generation"], 1);
    assert_eq!(paths(&served.place.json(&["home", "ls", "twin", "-R", "--json"])).len(), 4);
    assert_eq!(served.json("fork", &["--to", "twin"])["generation"], 2);
    let log = served.place.run(&["home", "log", "twin"]);
    assert!(log.stdout.contains("forked 2 of home_"), "{log:?}");
}

#[test]
fn rules_are_shown_with_where_they_come_from_and_hold() {
    let world = World::served();
    assert!(world.said("rules", &[]).contains("no limit"));
    let org = world.place.json(&["home", "rules", "--org", "--files-max", "3", "--json"]);
    assert_eq!(org["files_max"], 3);
    let set = world.json("rules", &["--bytes-max", "1KiB", "--keep-for", "7d"]);
    assert_eq!((&set["bytes_max"], &set["keep_for_s"]), (&json!(1024), &json!(604_800)));
    let text = world.said("rules", &[]);
    assert!(text.contains("1.0 KiB") && text.contains("3, from the org") && text.contains("1w"), "{text}");
    fs::write(world.place.path().join("dir/large"), vec![7; 2000]).unwrap();
    let refused = world.place.run(&["home", "import", "one", "dir"]);
    assert_eq!(refused.code, 2, "{refused:?}");
    assert!(refused.stderr.contains("of at most 1.0 KiB"), "{refused:?}");
    world.json("rules", &["--bytes-max", "none"]);
    assert_eq!(world.place.json(&["home", "import", "one", "dir", "--json"])["generation"], 3);
    world.refused("rules", &["--keep-for", "7"], 2, "expected a number with s, m, h");
    let local = World::local();
    local.refused("diff", &["--session", "sesn_1"], 2, "--store");
}

#[test]
fn a_home_that_does_not_exist_is_named() {
    let [local, served] = both();
    let other = local.place.run(&["home", "log", "x", "--store", "nowhere", "--org", "o"]);
    assert!(other.code == 3 && other.stderr.contains("nowhere"), "{other:?}");
    let empty = local.place.run(&["home", "ls", "x", "--store", "store", "--org", "o"]);
    assert!(empty.code == 3 && empty.stderr.contains("`x` has no snapshot"), "{empty:?}");
    let unknown = served.place.run(&["home", "log", "nobody"]);
    assert!(unknown.code == 3 && unknown.stderr.contains("nobody"), "{unknown:?}");
}
