//! `covey backup` from a bucket, into a bucket, and back into a bucket and a directory.

use serde_json::json;

use super::machine::{Machine, Process, Server, fresh_place, home_of_new_agent, servers};

#[test]
fn a_bucket_is_backed_up_into_a_bucket_and_comes_back_as_it_was() {
    servers().iter().for_each(|server| back_and_forth(server, false));
}

#[test]
fn so_is_an_encrypted_one_and_its_database_is_sealed_too() {
    servers().iter().for_each(|server| back_and_forth(server, true));
}

fn back_and_forth(server: &Server, is_encrypted: bool) {
    let mut machine = Machine::with_key_of(server);
    let (place, backups) = (fresh_place(), fresh_place());
    if is_encrypted {
        machine.json(&["store", "key", "create", "key"]);
        let key = machine.path("key");
        machine.set("COVEY_STORE_KEY_FILE", key.to_str().unwrap());
    }
    machine.set("COVEY_BLOB_STORE", &place);
    machine.write("dir/a", "as it was");
    let up = Process::server(&machine, "data", &[]);
    let home = home_of_new_agent(&machine, "data");
    machine.json(&["home", "import", &home, "dir", "--data-dir", "data"]);
    let create = ["backup", "create", &backups, "--data-dir", "data"];
    let first = machine.json(&create);
    assert_eq!(first["states"], json!(1), "{first}");
    assert!(first["blocks_new"].as_u64().unwrap() >= 3, "{first}");
    let second = machine.json(&create);
    assert_eq!(second["blocks_new"], json!(0), "what is there is not copied again: {second}");
    machine.write("dir/a", "newer");
    machine.json(&["home", "import", &home, "dir", "--data-dir", "data"]);
    drop(up);
    let into_itself = machine.run(&["backup", "create", &place, "--data-dir", "data"]);
    assert_eq!(into_itself.code, 2, "{into_itself:?}");
    let verified = machine.json(&["backup", "verify", &backups]);
    assert_eq!((&verified["ok"], &verified["backups"]), (&json!(true), &json!(2)), "{verified}");
    let sealed = server.packs(&backups, "backups").iter().all(|pack| {
        let header = server.files(&backups, "backups").read(pack, 0, 16).unwrap();
        header[12] == 1
    });
    assert_eq!(sealed, is_encrypted, "copies of databases lie as the blocks do");

    let elsewhere = fresh_place();
    let name = first["name"].as_str().unwrap();
    let restore = ["backup", "restore", &backups, "--backup", name];
    let to_bucket = ["--into", "again", "--store", &elsewhere];
    let restored = machine.json(&[&restore[..], &to_bucket[..]].concat());
    assert_eq!((&restored["states"], &restored["store"]), (&json!(1), &json!(elsewhere)), "{restored}");
    machine.json(&[&restore[..], &["--into", "third"]].concat());
    let third = format!("file://{}", machine.path("third/store").display());
    for (data, store) in [("again", elsewhere.as_str()), ("third", &third)] {
        machine.set("COVEY_BLOB_STORE", store);
        let up = Process::server(&machine, data, &[]);
        let shown = machine.json(&["home", "show", &home, "--data-dir", data]);
        assert_eq!(shown["generation"], json!(2), "a copy of generation 1 is not current: {shown}");
        let shown = machine.run(&["home", "cat", &home, "a", "--data-dir", data]);
        assert_eq!(shown.stdout, "as it was", "{}, {data}: {shown:?}", server.name);
        let report = machine.json(&["store", "verify", "--data-dir", data]);
        assert_eq!(report["ok"], json!(true), "{report}");
        drop(up);
    }
    let kept = machine.json(&["backup", "create", &backups, "--data-dir", "third", "--keep", "1"]);
    assert_eq!(kept["backups_removed"], json!(2), "{kept}");
    let verified = machine.json(&["backup", "verify", &backups]);
    assert_eq!((&verified["ok"], &verified["backups"]), (&json!(true), &json!(1)), "{verified}");
}

#[test]
fn a_damaged_backup_in_a_bucket_is_named_and_nothing_is_restored_from_it() {
    for server in servers() {
        let mut machine = Machine::with_key_of(&server);
        let (place, backups) = (fresh_place(), fresh_place());
        machine.set("COVEY_BLOB_STORE", &place);
        machine.write("dir/a", "as it was");
        let up = Process::server(&machine, "data", &[]);
        let home = home_of_new_agent(&machine, "data");
        machine.json(&["home", "import", &home, "dir", "--data-dir", "data"]);
        drop(up);
        assert_eq!(machine.run(&["backup", "verify", &backups]).code, 3, "there is none yet");
        machine.json(&["backup", "create", &backups, "--data-dir", "data"]);
        let client = String::from_utf8(machine.read("data/client.json")).unwrap();
        let client: serde_json::Value = serde_json::from_str(&client).unwrap();
        for org in ["backups", client["org"].as_str().unwrap()] {
            let packs = server.packs(&backups, org);
            assert!(!packs.is_empty(), "{org}");
            packs.iter().for_each(|pack| server.flip(&backups, org, pack, 60));
            let verified = machine.run(&["backup", "verify", &backups]);
            assert_eq!(verified.code, 7, "{}, {org}: {verified:?}", server.name);
            let restored = machine.run(&["backup", "restore", &backups, "--into", "again"]);
            assert_eq!(restored.code, 7, "{}, {org}: {restored:?}", server.name);
            assert!(!machine.path("again/covey.db").exists(), "half of it is not there");
            packs.iter().for_each(|pack| server.flip(&backups, org, pack, 60));
        }
        machine.json(&["backup", "restore", &backups, "--into", "again"]);
    }
}
