//! The servers that the stage has started, and fresh places on them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use covey_bucket::{Access, BucketPlace, BucketStore, Key, OpenError, OpenOptions, Patience, Settings};
use covey_home::backend::Backend;
use serde_json::Value;

const VARIABLE: &str = "COVEY_TEST_BUCKETS";
const BUCKET: &str = "covey-test";

/// A running server.
#[derive(Debug, Clone)]
pub(super) struct Server {
    pub(super) name: String,
    pub(super) address: SocketAddr,
    pub(super) key: Key,
    /// Whether a wrong key is refused.
    pub(super) checks_keys: bool,
    /// Whether a condition is checked and its put done in one step.
    pub(super) is_atomic: bool,
}

/// Every server of the stage; at least two, or the suite proves less than it says.
pub(super) fn all() -> Vec<Server> {
    let text = std::env::var(VARIABLE).unwrap_or_else(|_| {
        panic!("{VARIABLE} is not set: run `cargo xtask test --stage buckets`, which starts the servers")
    });
    let listed: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert!(listed.len() >= 2, "{text}");
    let field = |value: &Value, name: &str| value[name].as_str().unwrap().to_owned();
    let servers = listed.iter().map(|server| Server {
        name: field(server, "name"),
        address: field(server, "address").parse().unwrap(),
        key: Key { id: field(server, "id"), secret: field(server, "secret"), session_token: None },
        checks_keys: server["checks_keys"].as_bool().unwrap(),
        is_atomic: server["is_atomic"].as_bool().unwrap(),
    });
    servers.collect()
}

/// Enough for a server on this machine, and short where something hangs.
pub(super) fn patience() -> Patience {
    Patience {
        answer: Duration::from_secs(2),
        bytes_per_second_min: 16 * 1024 * 1024,
        deadline: Duration::from_secs(120),
        tries_max: 16,
        tries_to_open_max: 16,
        wait_first: Duration::from_millis(2),
        wait_max: Duration::from_millis(40),
    }
}

/// For tests that count requests and let none hang: a try that a busy machine makes slow is not a second one.
pub(super) fn calm() -> Patience {
    Patience { answer: Duration::from_secs(60), deadline: Duration::from_secs(300), ..patience() }
}

/// A place in the test bucket that nothing has been written to.
pub(super) fn fresh_place() -> BucketPlace {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::SeqCst);
    format!("s3://{BUCKET}/{}/{number}", covey_home::name::random_name()).parse().unwrap()
}

impl Server {
    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(super) fn settings(&self, endpoint: &str) -> Settings {
        Settings::of(endpoint, "us-east-1", self.key.clone())
    }

    /// Opens a place through `endpoint`, which may be a proxy before the server.
    pub(super) fn open(&self, endpoint: &str, place: &BucketPlace) -> Result<BucketStore, OpenError> {
        self.open_with(endpoint, place, patience())
    }

    /// The same for a test that counts requests.
    pub(super) fn open_calmly(&self, endpoint: &str, place: &BucketPlace) -> Result<BucketStore, OpenError> {
        self.open_with(endpoint, place, calm())
    }

    pub(super) fn open_with(
        &self,
        endpoint: &str,
        place: &BucketPlace,
        patience: Patience,
    ) -> Result<BucketStore, OpenError> {
        let settings = self.settings(endpoint);
        let options = OpenOptions {
            settings: &settings,
            access: Access::Write,
            patience,
            local_dir: None,
            probe_again: true,
        };
        BucketStore::open(place, &options)
    }

    /// An empty backend of a place of its own.
    pub(super) fn fresh(&self, endpoint: &str) -> Arc<dyn Backend> {
        self.open(endpoint, &fresh_place()).unwrap().backend("org").unwrap()
    }
}
