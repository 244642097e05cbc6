//! `covey home`.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;

use serde_json::{Value, json};

use super::covey::Place;
use super::fake_server::FakeServer;

#[test]
fn homes_and_their_snapshots_are_shown() {
    let server = FakeServer::start();
    let place = Place::with_server(&server.url);
    place.json(&["agent", "create", "--name", "one", "--model", "m", "--json"]);
    server.state().snapshots =
        vec![json!({ "generation": 1, "root": "ab", "kind": "quiesced", "files": 3, "bytes": 9 })];
    let home = format!("home_{:032x}", 1);
    assert!(place.run(&["home", "list"]).stdout.contains(&home));
    assert_eq!(place.json(&["home", "show", &home, "--json"])["generation"], 0);
    let snapshots = place.run(&["home", "snapshots", &home]);
    assert!(snapshots.stdout.contains("quiesced"), "{snapshots:?}");
    assert_eq!(place.run(&["home", "snapshots", "home_ff"]).code, 3);
}

/// A small home with what is easily lost: a mode, a symlink, a hard link, an empty directory.
fn small_home(dir: &Path) {
    fs::create_dir_all(dir.join("src/empty")).unwrap();
    fs::write(dir.join("src/main.rs"), "fn main() {}\n").unwrap();
    fs::write(dir.join("run"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(dir.join("run"), fs::Permissions::from_mode(0o750)).unwrap();
    fs::hard_link(dir.join("run"), dir.join("again")).unwrap();
    symlink("src/main.rs", dir.join("link")).unwrap();
}

const PLACE: [&str; 6] = ["--store", "store", "--org", "o", "--home", "h"];

fn secure(place: &Place, more: &[&str]) -> Value {
    place.json(&[&["home", "secure", "dir", "--json"], &PLACE[..], more].concat())
}

#[test]
fn a_second_secure_of_an_unchanged_directory_reads_and_stores_nothing() {
    let place = Place::alone();
    small_home(&place.path().join("dir"));
    let first = secure(&place, &[]);
    for field in [
        "root",
        "generation",
        "files",
        "bytes",
        "files_read",
        "bytes_read",
        "blocks_new",
        "bytes_new",
        "stored_bytes_new",
        "elapsed_ms",
    ] {
        assert!(!first[field].is_null(), "{field}: {first}");
    }
    assert_eq!((&first["generation"], &first["files"]), (&json!(1), &json!(3)));
    // The racy rule reads once more what changed in the same tick as the cache was written.
    secure(&place, &[]);
    let third = secure(&place, &[]);
    assert_eq!(third["root"], first["root"]);
    assert_eq!((&third["generation"], &third["blocks_new"]), (&json!(1), &json!(0)));
}

#[test]
fn a_materialized_directory_is_what_was_secured_and_nothing_else() {
    let place = Place::alone();
    small_home(&place.path().join("dir"));
    let secured = secure(&place, &[]);
    let copy = place.path().join("copy");
    fs::create_dir(&copy).unwrap();
    fs::write(copy.join("left over"), "x").unwrap();
    let refused = place.run(&[&["home", "materialize", "copy"], &PLACE[..]].concat());
    assert!(refused.code == 5 && refused.stderr.contains("--replace"), "{refused:?}");
    assert!(copy.join("left over").exists(), "what nobody asked for is not removed");
    let report = place.json(&[&["home", "materialize", "copy", "--replace", "--json"], &PLACE[..]].concat());
    assert_eq!(report["root"], secured["root"]);
    assert!(!copy.join("left over").exists());
    assert_eq!(fs::read_link(copy.join("link")).unwrap(), Path::new("src/main.rs"));
    let (run, again) = (fs::metadata(copy.join("run")).unwrap(), fs::metadata(copy.join("again")).unwrap());
    assert_eq!((run.mode() & 0o7777, run.ino()), (0o750, again.ino()));
    assert!(copy.join("src/empty").is_dir());
    let args = ["home", "secure", "copy", "--json", "--store", "store", "--org", "o", "--home", "other"];
    assert_eq!(place.json(&args)["root"], secured["root"]);
}

#[test]
fn only_a_working_copy_of_the_home_is_materialized_over_without_asking() {
    let place = Place::alone();
    small_home(&place.path().join("dir"));
    secure(&place, &[]);
    let materialize = |dir: &str| place.run(&[&["home", "materialize", dir], &PLACE[..]].concat());
    let copy = place.path().join("copy");
    assert_eq!(materialize("copy").code, 0, "it is not there yet");
    fs::write(copy.join("run"), "changed").unwrap();
    assert_eq!(materialize("copy").code, 0, "an earlier materialize has left it");
    assert_eq!(fs::read_to_string(copy.join("run")).unwrap(), "#!/bin/sh\n");
    assert_eq!(materialize("dir").code, 0, "a secure has looked at it");
    // Another directory under the same name.
    fs::rename(&copy, place.path().join("moved")).unwrap();
    fs::create_dir(&copy).unwrap();
    assert_eq!(materialize("copy").code, 0, "it is empty");
    fs::rename(&copy, place.path().join("moved again")).unwrap();
    fs::create_dir(&copy).unwrap();
    fs::write(copy.join("mine"), "x").unwrap();
    assert_eq!(materialize("copy").code, 5);
    // Of another home it is no working copy.
    let other = ["home", "secure", "dir", "--json", "--store", "store", "--org", "o", "--home", "other"];
    place.json(&other);
    let over =
        place.run(&["home", "materialize", "moved", "--store", "store", "--org", "o", "--home", "other"]);
    assert_eq!(over.code, 5, "{over:?}");
    assert!(copy.join("mine").exists() && place.path().join("moved/run").exists());
}

#[test]
fn earlier_generations_are_found_by_number_and_by_root() {
    let place = Place::alone();
    small_home(&place.path().join("dir"));
    let first = secure(&place, &[]);
    fs::write(place.path().join("dir/new"), "x").unwrap();
    assert_eq!(secure(&place, &[])["generation"], 2);
    let by_number = [&["home", "materialize", "one", "--json", "--generation", "1"], &PLACE[..]].concat();
    assert_eq!(place.json(&by_number)["root"], first["root"]);
    let root = first["root"].as_str().unwrap();
    let by_root = [&["home", "materialize", "two", "--json", "--root", root], &PLACE[..]].concat();
    assert_eq!(place.json(&by_root)["root"], first["root"]);
    assert!(!place.path().join("two/new").exists());
    let never = place.run(&[&["home", "materialize", "three", "--generation", "9"], &PLACE[..]].concat());
    assert_eq!(never.code, 3, "{never:?}");
}

#[test]
fn excludes_of_the_environment_replace_the_default_ones() {
    let place = Place::alone();
    let dir = place.path().join("dir");
    fs::create_dir_all(dir.join("__pycache__")).unwrap();
    fs::write(dir.join("__pycache__/x"), "x").unwrap();
    fs::write(dir.join("notes.log"), "x").unwrap();
    let files = |setting: Option<&str>, home: &str| {
        let args = ["home", "secure", "dir", "--json", "--store", "store", "--org", "o", "--home", home];
        let mut command = place.command(&args);
        command.envs(setting.map(|setting| ("COVEY_HOME_EXCLUDES", setting)));
        let output = command.output().unwrap();
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["files"].clone()
    };
    assert_eq!(files(None, "a"), 1);
    assert_eq!(files(Some("none"), "b"), 2);
    assert_eq!(files(Some("*.log,__pycache__"), "c"), 0);
}

#[test]
fn each_way_to_fail_has_its_exit_code() {
    let place = Place::alone();
    small_home(&place.path().join("dir"));
    let missing = place.run(&[&["home", "secure", "nowhere"], &PLACE[..]].concat());
    assert_eq!(missing.code, 3, "{missing:?}");
    let unknown = place.run(&[&["home", "materialize", "copy"], &PLACE[..]].concat());
    assert_eq!(unknown.code, 3, "{unknown:?}");
    let bad_name = place.run(&["home", "secure", "dir", "--store", "store", "--org", "../o", "--home", "h"]);
    assert_eq!(bad_name.code, 2, "{bad_name:?}");
    let inside = place.run(&["home", "secure", ".", "--store", "store", "--org", "o", "--home", "h"]);
    assert_eq!(inside.code, 2, "{inside:?}");
    assert!(inside.stderr.contains("lies inside"), "{inside:?}");
    secure(&place, &["--fencing-token", "7"]);
    fs::write(place.path().join("dir/new"), "x").unwrap();
    let late = place.run(&[&["home", "secure", "dir", "--fencing-token", "6"], &PLACE[..]].concat());
    assert_eq!(late.code, 5, "{late:?}");
}

#[test]
fn a_directory_is_imported_into_an_agents_home_on_the_servers_own_machine() {
    let server = FakeServer::start();
    let place = Place::with_server(&server.url);
    place.json(&["agent", "create", "--name", "one", "--model", "m", "--json"]);
    small_home(&place.path().join("dir"));
    let home = format!("home_{:032x}", 1);
    let elsewhere = place.run(&["home", "import", &home, "dir"]);
    assert_eq!(elsewhere.code, 2, "{elsewhere:?}");
    assert!(elsewhere.stderr.contains("not on this machine"), "{elsewhere:?}");

    place.write_client_file();
    let imported = place.json(&["home", "import", &home, "dir", "--json"]);
    assert_eq!(imported["generation"], 1);
    let sent = &server.asked("POST", &format!("/v1/covey/homes/{home}/import"))[0];
    assert_eq!((&sent["base_generation"], &sent["files"]), (&json!(0), &json!(3)));
    assert_eq!(sent["root"], imported["root"]);
}

#[test]
fn a_home_is_mounted_only_where_that_works_and_said_so_elsewhere() {
    let place = Place::alone();
    small_home(&place.path().join("dir"));
    let secured = secure(&place, &[]);
    let nothing = place.run(&["home", "umount", "mounted"]);
    assert_eq!(nothing.code, 3, "{nothing:?}");
    let args = [&["home", "mount", "mounted", "--json"], &PLACE[..]].concat();
    if covey_mount::probe(place.path()).is_err() {
        let refused = place.run(&args);
        assert_eq!(refused.code, 4, "{refused:?}");
        return;
    }
    let report = place.json(&args);
    assert_eq!(
        (&report["root"], &report["files"], &report["fetched"]),
        (&secured["root"], &json!(3), &json!(2))
    );
    for field in ["elapsed_ms", "image_bytes", "fetched_bytes"] {
        assert!(report[field].is_u64(), "{field}: {report}");
    }
    let mounted = place.path().join("mounted");
    assert_eq!(fs::read_link(mounted.join("link")).unwrap(), Path::new("src/main.rs"));
    fs::rename(mounted.join("src"), mounted.join("moved")).unwrap();
    let secure_args = [&["home", "secure", "mounted", "--json", "--cross-check"], &PLACE[..]].concat();
    let second = place.json(&secure_args);
    assert_eq!((&second["generation"], &second["files"]), (&json!(2), &json!(3)));
    let scanned = place.json(&[&["home", "secure", "mounted", "--json", "--scan"], &PLACE[..]].concat());
    assert_eq!(scanned["root"], second["root"]);
    assert_eq!(place.json(&["home", "umount", "mounted", "--json"])["was_mounted"], true);
    assert!(!mounted.join("moved").exists());
    let again = place.json(&args);
    assert_eq!((&again["root"], &again["continued"]), (&second["root"], &json!(true)));
    assert!(mounted.join("moved/main.rs").exists());
    assert_eq!(place.json(&["home", "umount", "mounted", "--discard", "--json"])["discarded"], true);
}
