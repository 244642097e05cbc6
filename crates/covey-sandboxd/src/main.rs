//! The in-sandbox daemon. Stage 0 is a plain host process that makes the namespaces; stage 1 is pid 1 inside.
//!
//! The runner starts this program from a sealed memory file with an empty environment and the setup link as
//! standard input. What stays true: no address to dial, no credential (I2), nothing of the runner's memory.
//! What does not belong here: anything that knows orgs, servers, stores or leases beyond their token.

mod daemon;
mod isolate;
mod ledger;
mod link;
mod processes;
mod setup;
mod shell;
mod stage0;
mod stage1;
mod sys;
mod text;
mod tools;

use std::process::ExitCode;

fn main() -> ExitCode {
    match stage0::run() {
        Ok(()) => ExitCode::SUCCESS,
        // The runner has been told over the setup link where there was one; standard error is for people who
        // start the program by hand.
        Err(error) => {
            eprintln!("sandboxd: {error}; it is started by a covey runner, not by hand");
            ExitCode::FAILURE
        }
    }
}
