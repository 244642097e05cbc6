//! `covey store gc`.

use std::fs;

use serde_json::json;

use super::covey::Place;
use super::real_server::RealServer;

const AT: [&str; 4] = ["--store", "store", "--org", "o"];

/// Three megabytes that do not compress.
fn noise(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..3 << 20).map(|_| next()).collect()
}

fn secure(place: &Place, seed: u64) {
    let dir = place.path().join("dir");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("file"), noise(seed)).unwrap();
    let args = ["home", "secure", "dir", "--json", "--store", "store", "--org", "o", "--home", "h"];
    place.json(&args);
}

fn size(place: &Place, store: &str, org: &str) -> i64 {
    let packs = place.path().join(store).join("orgs").join(org).join("packs");
    fs::read_dir(packs).unwrap().map(|pack| pack.unwrap().metadata().unwrap().len() as i64).sum()
}

#[test]
fn a_dry_run_says_what_the_run_frees_and_the_store_verifies_after() {
    let place = Place::alone();
    secure(&place, 1);
    secure(&place, 2);
    let planned = place.json(&[&["store", "gc", "--dry-run", "--json"], &AT[..]].concat());
    assert_eq!(planned["freed_bytes"], 0, "64 earlier snapshots are kept in a store without a server");
    // The pointer of the first generation goes, as it would after 64 more.
    let kept = place.path().join("store/orgs/o/homes/h/snapshots");
    let first =
        fs::read_dir(&kept).unwrap().map(|e| e.unwrap().path()).find(|p| p.ends_with(format!("{:020}", 1)));
    fs::remove_file(first.unwrap()).unwrap();
    let before = size(&place, "store", "o");
    let planned = place.json(&[&["store", "gc", "--dry-run", "--json"], &AT[..]].concat());
    assert_eq!(size(&place, "store", "o"), before);
    let text = place.run(&[&["store", "gc", "--rate", "none"], &AT[..]].concat());
    assert!(text.code == 0 && text.stdout.contains("freed"), "{text:?}");
    assert_eq!(before - size(&place, "store", "o"), planned["freed_bytes"].as_i64().unwrap());
    assert!(planned["freed_bytes"].as_i64().unwrap() > 2 << 20, "{planned}");
    let verified = place.json(&[&["store", "verify", "--json"], &AT[..]].concat());
    assert_eq!((&verified["orgs"][0]["roots"], &verified["ok"]), (&json!(1), &json!(true)));
    let missing = place.run(&["store", "gc", "--store", "nowhere", "--org", "o"]);
    assert_eq!(missing.code, 3, "{missing:?}");
}

#[test]
fn a_servers_store_is_collected_by_the_server_and_by_nobody_else() {
    let mut place = Place::alone();
    let server = RealServer::start(place.path());
    place.know(&server.url, &server.token, &server.store, &server.org);
    place.json(&["agent", "create", "--name", "one", "--model", "m", "--json"]);
    place.json(&["agent", "create", "--name", "two", "--model", "m", "--json"]);
    for (agent, seed) in [("one", 1), ("two", 2)] {
        let dir = place.path().join("dir");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("file"), noise(seed)).unwrap();
        place.json(&["home", "import", agent, "dir", "--json"]);
    }
    let beside = ["store", "gc", "--store", "server-store", "--org", &server.org];
    let refused = place.run(&beside);
    assert!(refused.code == 5 && refused.stderr.contains("the database of a server"), "{refused:?}");
    assert_eq!(place.json(&["store", "gc", "--dry-run", "--json"])["freed_bytes"], 0);
    let asked = place.run(&["agent", "delete", "one"]);
    assert!(asked.code == 5 && asked.stderr.contains("--yes"), "{asked:?}");
    assert_eq!(place.json(&["agent", "delete", "one", "--yes", "--json"])["covey_snapshots"], 1);
    let before = size(&place, "server-store", &server.org);
    let planned = place.json(&["store", "gc", "--dry-run", "--json"]);
    let done = place.json(&["store", "gc", "--json"]);
    assert_eq!(planned["freed_bytes"], done["freed_bytes"]);
    assert_eq!(before - size(&place, "server-store", &server.org), done["freed_bytes"].as_i64().unwrap());
    assert!(done["freed_bytes"].as_i64().unwrap() > 2 << 20, "{done}");
    let verified = place.json(&["store", "verify", "--json"]);
    assert_eq!((&verified["orgs"][0]["roots"], &verified["ok"]), (&json!(1), &json!(true)));
}
