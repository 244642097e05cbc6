//! The state on a real PostgreSQL: what every store fulfils, what becomes of lost connections and lost
//! servers, and `covey` itself.

use std::time::Duration;

use super::{Ground, Outcome, installed, passed};
use crate::postgres_server::PostgresServer;
use crate::process;

const TESTS_LIMIT: Duration = Duration::from_secs(40 * 60);
/// Building the release binary is part of it.
const CHAOS_LIMIT: Duration = Duration::from_secs(40 * 60);

pub(super) fn run(ground: &Ground<'_>) -> anyhow::Result<Outcome> {
    installed::require("python3", "python3 python3-venv")?;
    if ground.is_root {
        installed::require("setpriv", "util-linux")?;
    }
    let server = PostgresServer::start(ground.root, &ground.tools, ground.is_root)?;
    let mut command = process::cargo(ground.root);
    // The same features of everything else as in the other stages, so that no dependency is built once more.
    command.args(["test", "--locked", "--workspace", "--no-fail-fast", "--test", "postgres"]);
    command.args(["--features", "covey-db/postgres-server,covey-cli/postgres-server"]);
    command.env("COVEY_TEST_POSTGRES", server.url());
    process::run(&mut command, TESTS_LIMIT)?;
    drop(server);
    // Three servers share a database, and everything fails now and then.
    let mut chaos = process::cargo(ground.root);
    chaos.args([
        "xtask",
        "chaos",
        "--backend",
        "postgres",
        "--servers",
        "3",
        "--sessions",
        "8",
        "--kills",
        "10",
    ]);
    passed(process::run(chaos.args(["--seed", "1", "--json"]), CHAOS_LIMIT))
}
