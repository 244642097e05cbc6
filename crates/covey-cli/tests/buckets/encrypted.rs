//! An encrypted bucket, and a runner and clients in processes of their own that hold no key of it.

use serde_json::json;

use super::machine::{Ended, Machine, Process, fresh_place, servers};

#[test]
fn a_runner_without_any_key_secures_into_an_encrypted_bucket() {
    for server in servers() {
        let mut machine = Machine::with_key_of(&server);
        let place = fresh_place();
        machine.json(&["store", "key", "create", "key"]);
        let key = machine.path("key");
        machine.set("COVEY_STORE_KEY_FILE", key.to_str().unwrap());
        machine.set("COVEY_BLOB_STORE", &place);
        machine.write("dir/a", "as it was");
        let turns = json!([
            { "calls": [{ "name": "bash", "input": { "command": "cat ~/a; echo made > ~/b" } }] },
            { "text": "Done." }
        ]);
        let script = json!({ "scripts": [{ "when": "", "turns": turns }] });
        machine.write("script.json", script.to_string());
        let up = Process::server(&machine, "data", &["--model-script", "script.json"]);
        let serve = machine.command_without_keys(&["runner", "serve", "--data-dir", "data"]);
        let runner = Process::start(serve, &machine.path("runner.log"));
        let args = ["run", "make b", "--home", "dir", "--data-dir", "data", "--json"];
        let ended = Ended::from(machine.command_without_keys(&args).output().unwrap());
        let log = || String::from_utf8_lossy(&machine.read("runner.log")).into_owned();
        assert_eq!(ended.code, 0, "{}: {ended:?}\n{}", server.name, log());
        assert_eq!(machine.read("dir/b"), b"made\n", "{ended:?}");
        let client = String::from_utf8(machine.read("data/client.json")).unwrap();
        let client: serde_json::Value = serde_json::from_str(&client).unwrap();
        let org = client["org"].as_str().unwrap();
        // What came over the link lies sealed, and only under names that say nothing.
        let files = server.files(&place, org);
        let packs = server.packs(&place, org);
        assert!(!packs.is_empty());
        for pack in packs {
            assert_eq!(files.read(&pack, 0, 16).unwrap()[12], 1, "{pack} is not sealed");
        }
        let verify = ["store", "verify", "--data-dir", "data", "--json"];
        let behind = Ended::from(machine.command_without_keys(&verify).output().unwrap());
        assert_eq!(behind.json(&verify)["ok"], json!(true), "through the server, without a key");
        drop(runner);
        drop(up);
        let root = machine.run(&["store", "verify", "--store", &place, "--json"]);
        assert_eq!(root.json(&verify)["ok"], json!(true), "with the keys");
    }
}
