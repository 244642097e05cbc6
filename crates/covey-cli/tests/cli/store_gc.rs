//! `covey store gc`.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::json;

use super::covey::Place;
use super::real_server::RealServer;

const AT: [&str; 4] = ["--store", "store", "--org", "o"];

/// Bytes that do not compress.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}

fn secure(place: &Place, seed: u64) {
    let dir = place.path().join("dir");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("file"), noise(seed, 3 << 20)).unwrap();
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
        fs::write(dir.join("file"), noise(seed, 3 << 20)).unwrap();
        place.json(&["home", "import", agent, "dir", "--json"]);
    }
    // Also what a copy of the store holds is not for the pointers that it never had.
    let copied = place.run(&["store", "copy", "server-store", "copy"]);
    assert_eq!(copied.code, 0, "{copied:?}");
    let beside = ["store", "gc", "--store", "copy", "--org", &server.org];
    let refused = place.run(&beside);
    assert!(refused.code == 5 && refused.stderr.contains("the database of a server"), "{refused:?}");
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

#[test]
fn packs_that_no_home_of_the_store_needs_are_not_taken_for_garbage_all_at_once() {
    let place = Place::alone();
    secure(&place, 1);
    // As with the store of a server that has never said so.
    fs::remove_dir_all(place.path().join("store/orgs/o/homes")).unwrap();
    let refused = place.run(&[&["store", "gc"], &AT[..]].concat());
    assert!(refused.code == 5 && refused.stderr.contains("would be deleted"), "{refused:?}");
    assert!(size(&place, "store", "o") > 2 << 20);
}

/// A way to the server at `url` on which `act` happens before the first request to import arrives.
fn before_the_first_import(url: String, act: impl FnOnce() + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = format!("http://{}", listener.local_addr().unwrap());
    let act = Arc::new(Mutex::new(Some(act)));
    thread::spawn(move || {
        while let Ok((mut client, _)) = listener.accept() {
            let mut server = TcpStream::connect(url.trim_start_matches("http://")).unwrap();
            let (mut answers, mut back) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            thread::spawn(move || drop(io::copy(&mut answers, &mut back)));
            let act = Arc::clone(&act);
            thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(len @ 1..) = client.read(&mut bytes) {
                    let is_import = bytes[..len].windows(9).any(|window| window == b"/import H");
                    if let Some(act) = act.lock().unwrap().take_if(|_| is_import) {
                        act();
                    }
                    server.write_all(&bytes[..len]).unwrap();
                }
            });
        }
    });
    here
}

#[test]
fn an_import_during_which_a_collection_passed_is_made_again_by_itself() {
    let mut place = Place::alone();
    let server = RealServer::start(place.path());
    place.know(&server.url, &server.token, &server.store, &server.org);
    for (agent, seed) in [("one", 1), ("gone", 2)] {
        place.json(&["agent", "create", "--name", agent, "--model", "m", "--json"]);
        let dir = place.path().join(agent);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("file"), noise(seed, 3 << 20)).unwrap();
        place.json(&["home", "import", agent, agent, "--json"]);
    }
    place.json(&["agent", "delete", "gone", "--yes", "--json"]);
    // What the deleted agent had comes back in another home, and until it is imported nobody names it.
    fs::write(place.path().join("one/file"), noise(2, 3 << 20)).unwrap();
    let mut collect = place.command(&["store", "gc", "--json"]);
    let (before, collected) = std::sync::mpsc::channel();
    let url = before_the_first_import(server.url.clone(), move || {
        before.send(collect.output().unwrap()).unwrap();
    });
    place.know(&url, &server.token, &server.store, &server.org);
    let ended = place.run(&["home", "import", "one", "one", "--json"]);
    let done: serde_json::Value = serde_json::from_slice(&collected.recv().unwrap().stdout).unwrap();
    assert!(done["packs_removed"].as_u64().unwrap() > 0, "{done}");
    assert_eq!(ended.code, 0, "{ended:?}");
    assert!(ended.stderr.contains("a garbage collection has passed"), "{ended:?}");
    let verified = place.json(&["store", "verify", "--json"]);
    assert_eq!(verified["ok"], true, "{verified}");
}
