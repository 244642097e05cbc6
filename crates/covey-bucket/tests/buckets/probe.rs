//! What opening a bucket finds out.

use covey_bucket::{BucketPlace, OpenError};

use super::proxy::{Fault, Proxy, Schedule, without_header};
use super::servers;

fn refusal(opened: Result<covey_bucket::BucketStore, OpenError>) -> String {
    match opened {
        Err(error @ OpenError::Refused { .. }) => error.to_string(),
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn a_bucket_that_is_not_there_is_named() {
    for server in servers::all() {
        let place: BucketPlace = "s3://covey-no-such-bucket/x".parse().unwrap();
        let text = refusal(server.open(&server.url(), &place));
        assert!(text.contains("there is no bucket `covey-no-such-bucket`"), "{}: {text}", server.name);
    }
}

#[test]
fn a_wrong_key_is_told_from_a_wrong_secret() {
    let mut checked = 0;
    for server in servers::all().into_iter().filter(|server| server.checks_keys) {
        checked += 1;
        let mut wrong = server.clone();
        wrong.key.secret = "not-the-secret".to_owned();
        let text = refusal(wrong.open(&server.url(), &servers::fresh_place()));
        assert!(text.contains("check AWS_SECRET_ACCESS_KEY") && !text.contains("not-the"), "{text}");
        wrong.key.id = "NOBODY".to_owned();
        let text = refusal(wrong.open(&server.url(), &servers::fresh_place()));
        assert!(text.contains("NOBODY is not known"), "{text}");
    }
    assert!(checked > 0, "no server of the stage checks keys");
}

#[test]
fn a_server_that_ignores_conditions_is_refused() {
    // One that checks keys notices that a signed header is gone.
    let unchecked: Vec<_> = servers::all().into_iter().filter(|server| !server.checks_keys).collect();
    assert!(!unchecked.is_empty(), "every server of the stage checks keys");
    for server in unchecked {
        for name in ["if-match", "if-none-match"] {
            let proxy = Proxy::before(&server);
            match name {
                "if-match" => proxy.rewrite_requests(|head| without_header(head, "if-match")),
                _ => proxy.rewrite_requests(|head| without_header(head, "if-none-match")),
            }
            let text = refusal(server.open(&proxy.url(), &servers::fresh_place()));
            assert!(text.contains("conditional puts"), "{} without {name}: {text}", server.name);
        }
    }
}

#[test]
fn a_probe_succeeds_through_any_fault_and_leaves_a_mark_once() {
    for server in servers::all() {
        for fault in Fault::ALL {
            let proxy = Proxy::before(&server);
            proxy.break_things(Schedule::Every(2, fault), |_| true);
            let place = servers::fresh_place();
            server
                .open(&proxy.url(), &place)
                .unwrap_or_else(|error| panic!("{}, {fault:?}: {error}", server.name));
            proxy.be_good();
            let before = proxy.requests();
            server.open_calmly(&proxy.url(), &place).unwrap();
            assert_eq!(proxy.requests() - before, 3, "the mark is read, and each condition tried");
        }
    }
}

#[test]
fn entity_tags_that_are_no_checksums_are_found_out_and_bytes_are_read_back() {
    for server in servers::all() {
        let proxy = Proxy::before(&server);
        // As a server does that encrypts with keys of its own.
        proxy.rewrite_answers(|head| {
            let text = String::from_utf8_lossy(head).into_owned();
            let lines = text.split_inclusive("\r\n").map(|line| {
                let is_tag = line.to_ascii_lowercase().starts_with("etag:");
                if is_tag {
                    line.replace(['1', '2', '3', '4', '5', '6', '7', '8', '9'], "0")
                } else {
                    line.into()
                }
            });
            *head = lines.collect::<String>().into_bytes();
        });
        let store = server.open(&proxy.url(), &servers::fresh_place()).unwrap();
        let backend = store.backend("org").unwrap();
        let key = covey_home::backend::Key::new(&["packs", "one"]).unwrap();
        let mut file = backend.create().unwrap();
        file.append(&[7; 1000]).unwrap();
        file.publish(&key).unwrap();
        assert!(proxy.log().iter().any(|line| line.starts_with("GET") && line.contains("packs/one")));
    }
}
