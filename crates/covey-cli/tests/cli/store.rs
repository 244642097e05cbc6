//! `covey store`.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::covey::Place;

const PLACE: [&str; 6] = ["--store", "store", "--org", "o", "--home", "h"];

fn secure(place: &Place) {
    place.json(&[&["home", "secure", "dir", "--json"], &PLACE[..]].concat());
}

fn packs(place: &Place) -> Vec<PathBuf> {
    let dir = place.path().join("store/orgs/o/packs");
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 1;
    fs::write(path, bytes).unwrap();
}

const LEN: usize = 600_000;

/// Bytes that do not compress.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// A store with one home, and copies of both.
fn damaged() -> Place {
    let place = Place::alone();
    fs::create_dir(place.path().join("dir")).unwrap();
    // Long enough for a frame of its own, which comes first.
    fs::write(place.path().join("dir/first"), noise(LEN)).unwrap();
    secure(&place);
    for args in [["-a", "store", "backup"], ["-a", "dir", "copy"]] {
        assert!(
            std::process::Command::new("cp").args(args).current_dir(place.path()).status().unwrap().success()
        );
    }
    let packs = packs(&place);
    assert_eq!(packs.len(), 1);
    flip(&packs[0], 1000);
    place
}

#[test]
fn a_whole_store_verifies_and_a_directory_that_is_none_is_refused() {
    let place = Place::alone();
    fs::create_dir(place.path().join("dir")).unwrap();
    fs::write(place.path().join("dir/a"), "a").unwrap();
    secure(&place);
    let report = place.json(&["store", "verify", "--store", "store", "--json"]);
    assert_eq!(report["ok"], json!(true), "{report}");
    let org = &report["orgs"][0];
    assert_eq!((&org["org"], &org["roots"], &org["homes"]), (&json!("o"), &json!(1), &json!(1)));
    fs::create_dir(place.path().join("empty")).unwrap();
    let refused = place.run(&["store", "verify", "--store", "empty"]);
    assert_eq!(refused.code, 3, "{refused:?}");
    assert!(refused.stderr.contains("mounted"), "{refused:?}");
    assert_eq!(fs::read_dir(place.path().join("empty")).unwrap().count(), 0, "nothing is made");
    assert_eq!(place.run(&["store", "verify", "--store", "store", "--org", "other"]).code, 3);
    assert!(!place.path().join("store/orgs/other").exists());
}

#[test]
fn damage_is_named_with_who_needs_it_and_mended_from_a_backup() {
    let place = damaged();
    let verify = place.run(&["store", "verify", "--store", "store"]);
    assert_eq!(verify.code, 7, "{verify:?}");
    assert!(verify.stdout.contains("lost: ") && verify.stdout.contains("h generation 1"), "{verify:?}");
    let alone = place.run(&["store", "repair", "--store", "store"]);
    assert_eq!(alone.code, 7, "{alone:?}");
    assert!(alone.stdout.contains("--from-home"), "{alone:?}");
    let mended = place.json(&["store", "repair", "--store", "store", "--from", "backup", "--json"]);
    assert_eq!(mended["ok"], json!(true), "{mended}");
    let back = place.run(&[&["home", "materialize", "back"], &PLACE[..]].concat());
    assert_eq!(back.code, 0, "{back:?}");
    assert_eq!(fs::read(place.path().join("back/first")).unwrap(), noise(LEN));
}

#[test]
fn what_is_lost_is_mended_from_a_directory_and_never_secured_as_deleted() {
    let place = damaged();
    // The agent's host is lost, too: the home comes up with a gap.
    fs::remove_dir_all(place.path().join("dir")).unwrap();
    let back = place.run(&[&["home", "materialize", "dir", "--json"], &PLACE[..]].concat());
    assert_eq!(back.code, 7, "{back:?}");
    let report: serde_json::Value = serde_json::from_str(&back.stdout).unwrap();
    assert_eq!(report["gaps"][0]["path"], json!("first"), "{report}");
    // Work goes on and is secured; the gap stays what it was.
    fs::write(place.path().join("dir/second"), "new").unwrap();
    secure(&place);
    fs::write(place.path().join("dir/third"), "newer").unwrap();
    secure(&place);
    let repaired = place.json(&["store", "repair", "--store", "store", "--from-home", "copy", "--json"]);
    assert_eq!(repaired["ok"], json!(true), "{repaired}");
    let whole = place.run(&[&["home", "materialize", "whole"], &PLACE[..]].concat());
    assert_eq!(whole.code, 0, "{whole:?}");
    let read = |name: &str| fs::read(place.path().join("whole").join(name)).unwrap();
    assert_eq!(
        (read("first").len(), read("second"), read("third")),
        (LEN, b"new".to_vec(), b"newer".to_vec())
    );
}

#[test]
fn a_verification_that_was_stopped_goes_on_and_samples_take_turns() {
    let place = Place::alone();
    fs::create_dir(place.path().join("dir")).unwrap();
    for number in 0..4 {
        fs::write(place.path().join("dir/a"), number.to_string()).unwrap();
        secure(&place);
    }
    let args = ["store", "verify", "--store", "store", "--sample", "25%", "--resume", "record", "--json"];
    for round in 0..4 {
        let report = place.json(&args);
        let org = &report["orgs"][0];
        assert_eq!((&org["packs_checked"], &org["packs_resumed"]), (&json!(1), &json!(round)), "{report}");
    }
    assert!(!place.path().join("record").exists(), "all were read");
    assert_eq!(place.run(&["store", "verify", "--store", "store", "--sample", "0%"]).code, 2);
}
