//! `covey store`, and stores in buckets as far as no server is needed.

use super::covey::{Ended, Place};

fn secured(place: &Place, store: &str, text: &str) -> String {
    let home = place.path().join("home");
    std::fs::create_dir_all(&home).unwrap();
    std::fs::write(home.join("file"), text).unwrap();
    let args =
        ["home", "secure", home.to_str().unwrap(), "--store", store, "--org", "org", "--home", "h", "--json"];
    place.json(&args)["root"].as_str().unwrap().to_owned()
}

#[test]
fn a_store_is_copied_and_a_second_copy_brings_what_has_come_since() {
    let place = Place::alone();
    let (from, to) = (place.path().join("from"), place.path().join("to"));
    let (from, to) = (from.to_str().unwrap(), to.to_str().unwrap());
    secured(&place, from, "one");
    let copied = place.json(&["store", "copy", from, to, "--json"]);
    assert_eq!(
        (&copied["data"][0]["org"], &copied["data"][0]["packs_copied"], &copied["data"][0]["homes"]),
        (&"org".into(), &1.into(), &1.into())
    );
    let root = secured(&place, from, "two");
    let copied = place.json(&["store", "copy", from, &format!("file://{to}"), "--org", "org", "--json"]);
    assert_eq!((&copied["data"][0]["packs"], &copied["data"][0]["packs_copied"]), (&2.into(), &1.into()));
    let target = place.path().join("target");
    let target = target.to_str().unwrap();
    let args = ["home", "materialize", target, "--store", to, "--org", "org", "--home", "h", "--json"];
    assert_eq!(place.json(&args)["root"], root);
    let shown = place.run(&["store", "copy", from, to]);
    assert!(shown.code == 0 && shown.stdout.contains("2, 0 of them copied now"), "{shown:?}");
}

#[test]
fn what_is_no_store_is_refused_with_what_to_write() {
    let place = Place::alone();
    let nothing = place.path().join("nothing");
    let none = place.run(&["store", "copy", nothing.to_str().unwrap(), "elsewhere"]);
    assert_eq!(none.code, 3, "{none:?}");
    let same = place.run(&["store", "copy", "a", "a"]);
    assert_eq!(same.code, 2, "{same:?}");
    for odd in ["s3://", "s3://UPPER/x", "http://x/y", "file://relative"] {
        let refused = place.run(&["store", "copy", odd, "b"]);
        assert!(refused.code == 2 && refused.stderr.contains("s3://BUCKET"), "{odd}: {refused:?}");
    }
}

#[test]
fn a_bucket_that_does_not_answer_or_may_not_be_asked_is_named() {
    let place = Place::alone();
    // A port that was free a moment ago.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let args = ["home", "materialize", "d", "--store", "s3://bkt/p", "--org", "o", "--home", "h"];
    let ask = |endpoint: &str| -> Ended {
        let mut command = place.command(&args);
        command.env("COVEY_S3_ENDPOINT", endpoint);
        command.env("AWS_ACCESS_KEY_ID", "id").env("AWS_SECRET_ACCESS_KEY", "hidden-secret");
        command.output().unwrap().into()
    };
    let silent = ask(&format!("http://{closed}"));
    assert_eq!(silent.code, 6, "{silent:?}");
    assert!(
        silent.stderr.contains("s3://bkt/p") && silent.stderr.contains(&closed.to_string()),
        "{silent:?}"
    );
    assert!(!silent.stderr.contains("hidden-secret"));
    let open = ask("http://bucket.example:9000");
    assert!(open.code == 2 && open.stderr.contains("not encrypted"), "{open:?}");
}
