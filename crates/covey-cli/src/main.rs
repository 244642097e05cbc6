//! The `covey` command: parses, calls one command, turns its error into a sentence and an exit code.
//!
//! Data goes to stdout, talk to stderr. What does not belong here: anything that a command does.

mod client;
mod command;
mod database;
mod exit_code;
mod global;
mod heap;
mod host;
mod model_choice;
mod output;
mod progress;
mod remote_dial;
mod sharing;
mod store_identity;
mod store_key;
mod store_link;
mod store_location;
mod units;
mod view;

use clap::Parser as _;

use crate::exit_code::ExitCode;

fn main() -> std::process::ExitCode {
    heap::set_up();
    let cli = command::Cli::parse();
    // Once, before anything can open a connection; a second provider in one process is a bug of ours.
    if rustls::crypto::ring::default_provider().install_default().is_err() {
        eprintln!("error: the TLS provider is set twice; this is a fault of covey");
        return ExitCode::Failure.into();
    }
    match command::run(&cli) {
        Ok(code) => code.into(),
        Err(error) if output::is_closed_pipe(&error) => ExitCode::Success.into(),
        Err(error) => {
            let code = ExitCode::of(&error);
            if cli.wants_json() {
                let text = format!("{error:#}");
                eprintln!("{}", serde_json::json!({"error": {"message": text, "exit_code": code as u8}}));
            } else {
                eprintln!("error: {}", output::printable(&format!("{error:#}")));
            }
            code.into()
        }
    }
}
