//! What people are told when a bucket cannot be opened: against a server of ours that gives one answer to everything,
//! so that it needs nothing but a loopback port.

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use std::time::Duration;

    use covey_bucket::{Access, BucketStore, Key, OpenError, OpenOptions, Patience, Settings};

    /// Answers every request alike until the test ends; returns where.
    fn server(status: &'static str, headers: &'static str, code: &'static str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let mut head = Vec::new();
                let mut byte = [0];
                while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|read| read == 1) {
                    head.push(byte[0]);
                }
                let body = format!("<Error><Code>{code}</Code><Message>m</Message></Error>");
                let length = body.len();
                let answer = format!(
                    "HTTP/1.1 {status}\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
                );
                // A client that has gone needs no answer.
                drop(stream.write_all(answer.as_bytes()));
            }
        });
        url
    }

    fn opened(endpoint: &str, access: Access) -> Result<BucketStore, OpenError> {
        let (id, secret) = ("AKIATEST".to_owned(), "hidden-secret".to_owned());
        let settings = Settings::of(endpoint, "us-east-1", Key { id, secret, session_token: None });
        let patience = Patience {
            wait_first: Duration::from_millis(1),
            wait_max: Duration::from_millis(2),
            ..Patience::default()
        };
        let options =
            OpenOptions { settings: &settings, access, patience, local_dir: None, probe_again: true };
        BucketStore::open(&"s3://bkt/p".parse().unwrap(), &options)
    }

    #[test]
    fn each_wrong_setting_is_one_sentence_with_its_remedy() {
        let now = "Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n";
        for (status, headers, code, words) in [
            ("403 Forbidden", "", "InvalidAccessKeyId", "AKIATEST is not known"),
            ("403 Forbidden", "", "SignatureDoesNotMatch", "check AWS_SECRET_ACCESS_KEY"),
            ("403 Forbidden", now, "RequestTimeTooSkewed", "clock is"),
            ("403 Forbidden", "", "AccessDenied", "s3:ListBucket"),
            ("404 Not Found", "", "NoSuchBucket", "there is no bucket `bkt`"),
            (
                "301 Moved Permanently",
                "x-amz-bucket-region: eu-west-1\r\n",
                "PermanentRedirect",
                "set AWS_REGION=eu-west-1",
            ),
            ("400 Bad Request", "", "AuthorizationHeaderMalformed", "set AWS_REGION"),
            ("400 Bad Request", "", "ExpiredToken", "AWS_SESSION_TOKEN"),
        ] {
            for access in [Access::Read, Access::Write] {
                let error = opened(&server(status, headers, code), access).unwrap_err();
                assert!(matches!(error, OpenError::Refused { .. }), "{code}: {error:?}");
                let text = error.to_string();
                assert!(text.starts_with("s3://bkt/p cannot be used: ") && text.contains(words), "{text}");
                assert!(!text.contains("hidden-secret") && !text.contains('\n'), "{text}");
            }
        }
    }

    #[test]
    fn a_server_that_is_busy_or_not_there_is_tried_again_and_then_named() {
        let error = opened(&server("503 Slow Down", "", "SlowDown"), Access::Read).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, OpenError::Unavailable { .. }), "{text}");
        assert!(text.contains("503 SlowDown") && text.contains("tried 4 times"), "{text}");
        // A port that was free a moment ago.
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let error = opened(&format!("http://{closed}"), Access::Write).unwrap_err();
        assert!(matches!(error, OpenError::Unavailable { .. }), "{error}");
        assert!(error.to_string().contains(&closed.to_string()), "{error}");
    }
}
