//! `covey backup`, with a real server for a moment.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};

use serde_json::{Value, json};

use super::covey::Place;

/// `covey up` in the data directory `name`; ended when dropped.
struct Up {
    child: Child,
}

impl Up {
    fn start(place: &Place, name: &str, more: &[&str]) -> Self {
        let args = ["server", "--data-dir", name, "--listen", "127.0.0.1:0", "--json"];
        let mut child = place
            .command(&[&args[..], more].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("\"url\""), "it listens: `{line}`");
        Self { child }
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// An agent whose home is `dir`; gives the home's id.
fn import(place: &Place, data: &str, dir: &Path) -> String {
    let agent =
        place.json(&["agent", "create", "--name", "one", "--model", "m", "--json", "--data-dir", data]);
    let homes = place.json(&["home", "list", "--json", "--data-dir", data]);
    let of_agent = |home: &&Value| home["agent_id"] == agent["id"];
    let home =
        homes["data"].as_array().unwrap().iter().find(of_agent).unwrap()["id"].as_str().unwrap().to_owned();
    place.json(&["home", "import", &home, dir.to_str().unwrap(), "--json", "--data-dir", data]);
    home
}

fn files(place: &Place, data: &str, home: &str) -> String {
    let shown = place.json(&["home", "show", home, "--json", "--data-dir", data]);
    let client: Value =
        serde_json::from_str(&fs::read_to_string(place.path().join(data).join("client.json")).unwrap())
            .unwrap();
    let (store, org) = (client["store"].as_str().unwrap(), client["org"].as_str().unwrap());
    let root = shown["root"].as_str().unwrap();
    let args = [
        "home",
        "materialize",
        "shown",
        "--store",
        store,
        "--org",
        org,
        "--home",
        home,
        "--root",
        root,
        "--json",
    ];
    place.json(&args);
    fs::read_to_string(place.path().join("shown/a")).unwrap()
}

#[test]
fn a_running_server_is_backed_up_changes_only_and_comes_back_as_it_was() {
    let place = Place::alone();
    let dir = place.path().join("dir");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("a"), "as it was").unwrap();
    let up = Up::start(&place, "data", &[]);
    let home = import(&place, "data", &dir);
    let create = ["backup", "create", "backups", "--data-dir", "data", "--json"];
    let first = place.json(&create);
    assert_eq!(first["states"], json!(1), "{first}");
    assert!(first["blocks_new"].as_u64().unwrap() >= 3, "{first}");
    let second = place.json(&create);
    assert_eq!(second["blocks_new"], json!(0), "what is there is not copied again: {second}");
    fs::write(dir.join("a"), "newer").unwrap();
    place.json(&["home", "import", &home, "dir", "--json", "--data-dir", "data"]);
    drop(up);
    let verified = place.json(&["backup", "verify", "backups", "--json"]);
    assert_eq!((&verified["ok"], &verified["backups"]), (&json!(true), &json!(2)), "{verified}");

    let refused = place.run(&["backup", "restore", "backups", "--into", "data"]);
    assert_eq!(refused.code, 5, "{refused:?}");
    let restored = place.json(&["backup", "restore", "backups", "--into", "again", "--json"]);
    assert_eq!(restored["states"], json!(1), "{restored}");
    let up = Up::start(&place, "again", &[]);
    assert_eq!(files(&place, "again", &home), "as it was");
    let shown = place.json(&["home", "show", &home, "--json", "--data-dir", "again"]);
    assert_eq!(
        shown["generation"],
        json!(2),
        "a working copy of generation 1 is not taken for current: {shown}"
    );
    let report = place.json(&["store", "verify", "--json", "--data-dir", "again"]);
    assert_eq!(report["ok"], json!(true), "{report}");
    drop(up);
    let kept = place.json(&["backup", "create", "backups", "--data-dir", "again", "--keep", "1", "--json"]);
    assert_eq!(kept["backups_removed"], json!(2), "{kept}");
    assert_eq!(place.json(&["backup", "verify", "backups", "--json"])["backups"], json!(1));
}

#[test]
fn a_damaged_backup_is_named_and_nothing_is_restored_from_it() {
    let place = Place::alone();
    let dir = place.path().join("dir");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("a"), "as it was").unwrap();
    let up = Up::start(&place, "data", &[]);
    import(&place, "data", &dir);
    drop(up);
    place.json(&["backup", "create", "backups", "--data-dir", "data", "--json"]);
    let database = || {
        let mut found = fs::read_dir(place.path().join("backups/backups")).unwrap();
        found.next().unwrap().unwrap().path().join("covey.db")
    };
    let packs = || {
        let orgs = fs::read_dir(place.path().join("backups/store/orgs")).unwrap();
        let dir = orgs.map(|org| org.unwrap().path().join("packs")).next().unwrap();
        fs::read_dir(dir).unwrap().next().unwrap().unwrap().path()
    };
    for (path, at) in [(database(), 5000), (packs(), 60)] {
        let good = fs::read(&path).unwrap();
        let mut bad = good.clone();
        bad[at] ^= 1;
        fs::write(&path, bad).unwrap();
        let verified = place.run(&["backup", "verify", "backups"]);
        assert_eq!(verified.code, 7, "{verified:?}");
        let restored = place.run(&["backup", "restore", "backups", "--into", "again"]);
        assert_eq!(restored.code, 7, "{restored:?}");
        assert!(!place.path().join("again/covey.db").exists(), "half of it is not there");
        fs::write(&path, good).unwrap();
    }
    place.json(&["backup", "restore", "backups", "--into", "again", "--json"]);
    assert_eq!(place.run(&["backup", "verify", "dir"]).code, 3);
    assert_eq!(place.run(&["backup", "create", "more", "--data-dir", "dir"]).code, 3);
}

#[test]
fn a_server_does_not_start_on_another_store() {
    let place = Place::alone();
    let dir = place.path().join("dir");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("a"), "as it was").unwrap();
    let up = Up::start(&place, "data", &[]);
    import(&place, "data", &dir);
    drop(up);
    let (store, aside) = (place.path().join("data/store"), place.path().join("aside"));
    fs::rename(&store, &aside).unwrap();
    let refused = place.run(&["server", "--data-dir", "data", "--listen", "127.0.0.1:0"]);
    assert_eq!(refused.code, 4, "{refused:?}");
    assert!(refused.stderr.contains("--accept-store"), "{refused:?}");
    drop(Up::start(&place, "data", &["--accept-store"]));
    fs::remove_dir_all(&store).unwrap();
    fs::rename(&aside, &store).unwrap();
    assert_eq!(place.run(&["server", "--data-dir", "data", "--listen", "127.0.0.1:0"]).code, 4);
}
