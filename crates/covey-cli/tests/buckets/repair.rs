//! `covey store verify`, `repair` and `key` on buckets.

use serde_json::json;

use super::machine::{Machine, fresh_place, noise, servers};

const LEN: usize = 600_000;

#[test]
fn damage_in_a_bucket_is_named_and_mended_from_a_directory_and_from_another_bucket() {
    for server in servers() {
        let machine = Machine::with_key_of(&server);
        // Long enough for a frame of its own, which comes first.
        machine.write("dir/first", noise(LEN));
        for copy in [fresh_place(), "directory".to_owned()] {
            let place = fresh_place();
            let home = ["--store", &place, "--org", "o", "--home", "h"];
            machine.json(&[&["home", "secure", "dir"], &home[..]].concat());
            machine.json(&["store", "copy", &place, &copy]);
            let whole = machine.json(&["store", "verify", "--store", &place]);
            assert_eq!((&whole["ok"], &whole["orgs"][0]["roots"]), (&json!(true), &json!(1)), "{whole}");
            server.packs(&place, "o").iter().for_each(|pack| server.flip(&place, "o", pack, 1000));
            let verify = machine.run(&["store", "verify", "--store", &place]);
            assert_eq!(verify.code, 7, "{}: {verify:?}", server.name);
            assert!(verify.stdout.contains("h generation 1: first"), "{verify:?}");
            let alone = machine.run(&["store", "repair", "--store", &place]);
            assert_eq!(alone.code, 7, "{alone:?}");
            let mended = machine.json(&["store", "repair", "--store", &place, "--from", &copy]);
            assert_eq!(mended["ok"], json!(true), "{mended}");
            let back = machine.run(&[&["home", "materialize", "back"], &home[..]].concat());
            assert_eq!((back.code, machine.read("back/first")), (0, noise(LEN)), "{}", back.stderr);
            std::fs::remove_dir_all(machine.path("back")).unwrap();
            let other_org = machine.run(&["store", "verify", "--store", &place, "--org", "other"]);
            assert_eq!(other_org.code, 3, "{other_org:?}");
        }
        let nowhere = machine.run(&["store", "verify", "--store", &fresh_place()]);
        assert_eq!(nowhere.code, 3, "{nowhere:?}");
        assert!(nowhere.stderr.contains("are prefix and endpoint right?"), "{nowhere:?}");
    }
}

#[test]
fn keys_of_a_bucket_are_shown_and_changed() {
    for server in servers() {
        let machine = Machine::with_key_of(&server);
        let place = fresh_place();
        machine.write("dir/a", "a");
        machine.json(&["store", "key", "create", "key"]);
        let home = ["--store", &place, "--org", "o", "--home", "h", "--key-file", "key"];
        machine.json(&[&["home", "secure", "dir"], &home[..]].concat());
        let at = ["--store", &place, "--org", "o"];
        let before = machine.json(&[&["store", "key", "show"], &at[..]].concat());
        machine.json(&[&["store", "key", "rotate", "--key-file", "key"], &at[..]].concat());
        let after = machine.json(&[&["store", "key", "show"], &at[..]].concat());
        let count = |shown: &serde_json::Value| shown["keyring"]["keys"].as_array().unwrap().len();
        assert_eq!((count(&before), count(&after)), (1, 2), "{after}");
        let without = machine.run(&["store", "verify", "--store", &place]);
        assert_eq!(without.code, 4, "{without:?}");
        let mut command = machine.command(&["store", "verify", "--store", &place, "--json"]);
        let with = super::machine::Ended::from(command.env("COVEY_STORE_KEY_FILE", "key").output().unwrap());
        assert_eq!(with.json(&["verify"])["ok"], json!(true));
    }
}
