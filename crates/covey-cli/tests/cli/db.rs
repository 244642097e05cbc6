//! `covey db`, and where the state is.

use super::covey::Place;

#[test]
fn a_database_is_migrated_once_and_shown() {
    let place = Place::alone();
    let made = place.json(&["db", "migrate", "--json"]);
    assert_eq!(made["from"], 0);
    let to = made["to"].as_u64().unwrap();
    assert!(to > 0 && made["database"].as_str().unwrap().ends_with("covey.db"), "{made}");
    let again = place.json(&["db", "migrate", "--json"]);
    assert_eq!((again["from"].as_u64(), again["to"].as_u64()), (Some(to), Some(to)));
    let shown = place.run(&["db", "migrate"]);
    assert!(shown.code == 0 && shown.stdout.contains("nothing to do"), "{shown:?}");
    let elsewhere = place.json(&["db", "migrate", "--database-url", "sqlite:here.db", "--json"]);
    assert_eq!(elsewhere["database"], "sqlite:here.db");
    assert!(place.path().join("here.db").is_file());
}

#[test]
fn a_url_that_cannot_be_used_is_refused_without_its_password() {
    let place = Place::alone();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let nobody = format!("postgres://u:s3cret@127.0.0.1:{free}/d");
    for (url, code, told) in [
        ("mysql://u:s3cret@h/d", 2, "postgres://USER:PASSWORD@HOST:PORT/DATABASE"),
        ("postgres://u:s3cret@h", 2, "names no database"),
        (nobody.as_str(), 6, "whether the server runs"),
    ] {
        for command in [&["db", "migrate"][..], &["server", "--listen", "127.0.0.1:0"]] {
            let ended = place.command(command).env("COVEY_DATABASE_URL", url).output().unwrap();
            let text = String::from_utf8(ended.stderr).unwrap();
            assert_eq!(ended.status.code(), Some(code), "{text}");
            assert!(text.contains(told) && !text.contains("s3cret"), "{text}");
        }
    }
}

#[test]
fn a_backup_of_a_database_server_is_refused_with_the_next_step() {
    let place = Place::alone();
    let url = "postgres://u:s3cret@db.example/d";
    let ended = place.run(&["backup", "create", "there", "--database-url", url]);
    assert!(ended.code == 2 && ended.stderr.contains("pg_dump"), "{ended:?}");
    assert!(!ended.stderr.contains("s3cret"), "{ended:?}");
    // The server said where its state is; the option is not needed.
    let data = place.path().join(".local/share/covey");
    std::fs::create_dir_all(&data).unwrap();
    place.json(&["db", "migrate", "--json"]);
    let file =
        serde_json::json!({ "url": "http://127.0.0.1:1", "token": "t", "database": "postgres://u@h:5432/d" });
    std::fs::write(data.join("client.json"), file.to_string()).unwrap();
    let ended = place.run(&["backup", "create", "there"]);
    assert!(ended.code == 2 && ended.stderr.contains("postgres://u@h:5432/d"), "{ended:?}");
    assert!(!place.path().join("there").exists());
}
