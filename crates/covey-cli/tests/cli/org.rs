//! `covey org`.

use std::fs;

use super::covey::Place;
use super::real_server::RealServer;

#[test]
fn an_org_is_deleted_with_every_block_while_no_server_runs() {
    let mut place = Place::alone();
    let data = place.path().join(".local/share/covey");
    fs::create_dir_all(&data).unwrap();
    let nothing = place.run(&["org", "delete", "default", "--yes"]);
    assert!(nothing.code == 3 && nothing.stderr.contains("--data-dir"), "{nothing:?}");
    let server = RealServer::start(&data);
    let (org, store) = (server.org.clone(), data.join("store"));
    place.know(&server.url, &server.token, &server.store, &org);
    place.json(&["agent", "create", "--name", "one", "--model", "m", "--json"]);
    let dir = place.path().join("dir");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("file"), vec![7; 100_000]).unwrap();
    place.json(&["home", "import", "one", "dir", "--json"]);
    let agent = place.json(&["agent", "show", "one", "--json"]);
    let home = agent["covey_home_id"].as_str().unwrap().to_owned();
    let copy = data.join("runner/homes").join(&home);
    fs::create_dir_all(copy.join("files")).unwrap();
    let running = place.run(&["org", "delete", &org, "--yes"]);
    assert!(running.code != 0 && running.stderr.contains("in use"), "{running:?}");
    drop(server);
    fs::rename(data.join("server-store"), &store).unwrap();
    let asked = place.run(&["org", "delete", "default"]);
    assert!(asked.code == 5 && asked.stderr.contains("--yes"), "{asked:?}");
    let unknown = place.run(&["org", "delete", "nobody", "--yes"]);
    assert_eq!(unknown.code, 3, "{unknown:?}");
    let deleted = place.json(&["org", "delete", "default", "--yes", "--json"]);
    assert!(deleted["freed_bytes"].as_u64().unwrap() > 0 && deleted["packs_left"] == 0, "{deleted}");
    assert_eq!((&deleted["homes"], &deleted["working_copies"]), (&1.into(), &1.into()));
    assert!(!store.join("orgs").join(&org).exists() && !copy.exists());
    let again = place.run(&["org", "delete", &org, "--yes"]);
    assert_eq!(again.code, 3, "{again:?}");
}

#[test]
fn with_an_encrypted_org_its_keys_go_and_another_org_stays() {
    let place = Place::alone();
    let data = place.path().join(".local/share/covey");
    fs::create_dir_all(&data).unwrap();
    let server = RealServer::start(&data);
    let (org, store) = (server.org.clone(), data.join("store"));
    drop(server);
    place.run(&["store", "key", "create", "key"]);
    let dir = place.path().join("dir");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("file"), vec![7; 100_000]).unwrap();
    let at = store.to_str().unwrap().to_owned();
    for of in [org.as_str(), "other"] {
        let home = ["--store", &at, "--org", of, "--home", "h", "--key-file", "key"];
        place.json(&[&["home", "secure", "dir", "--json"], &home[..]].concat());
        assert!(store.join("orgs").join(of).join("keys/ring").exists());
    }
    let deleted = place.json(&["org", "delete", "default", "--yes", "--json"]);
    assert_eq!((&deleted["key_rings"], &deleted["packs_left"]), (&1.into(), &0.into()), "{deleted}");
    assert!(deleted["freed_bytes"].as_u64().unwrap() > 0, "{deleted}");
    assert!(!store.join("orgs").join(&org).exists());
    let other = ["home", "log", "h", "--store", &at, "--org", "other", "--key-file", "key", "--json"];
    assert_eq!(place.json(&other)["data"][0]["generation"], 1);
}
