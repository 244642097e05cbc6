//! The contract of backends on real servers that speak S3, alone and behind a proxy that breaks things; and `covey`
//! itself on them.

use std::time::Duration;

use super::{Ground, Outcome, installed, passed};
use crate::bucket_servers::{BucketServers, Wanted};
use crate::process;

/// The tests know it by this name.
const BUCKET: &str = "covey-test";
const TESTS_LIMIT: Duration = Duration::from_secs(40 * 60);

pub(super) fn run(ground: &Ground<'_>) -> anyhow::Result<Outcome> {
    installed::require("python3", "python3 python3-venv")?;
    let servers = BucketServers::start(ground.root, &ground.tools, Wanted::All)?;
    servers.make_bucket(BUCKET)?;
    let mut command = process::cargo(ground.root);
    command.args([
        "test",
        "--locked",
        "--no-fail-fast",
        "--workspace",
        "--features",
        "covey-bucket/servers,covey-cli/servers",
        "--test",
        "buckets",
    ]);
    command.env("COVEY_TEST_BUCKETS", servers.as_json().to_string());
    passed(process::run(&mut command, TESTS_LIMIT))
}
