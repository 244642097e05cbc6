//! Serves a model script over the Messages wire on a free loopback port, for checks with other people's clients.
//!
//! `cargo run -p covey-models --example scripted_model -- SCRIPT.json` prints one JSON line `{"base_url": …}` and
//! serves until its standard input ends.

use std::process::ExitCode;

use covey_models::scripted::{Chunking, ScriptFile, ServeOptions, serve};

#[tokio::main]
async fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("usage: scripted_model SCRIPT.json");
        return ExitCode::from(2);
    };
    match run(path.as_ref()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("scripted_model: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(path: &std::path::Path) -> Result<(), Box<dyn std::error::Error>> {
    let scripts = ScriptFile::read(path)?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let options = ServeOptions { chunking: Chunking::Seeded, ..ServeOptions::default() };
    let server = serve(scripts, listener, options)?;
    println!("{}", serde_json::json!({"base_url": server.base_url()}));
    // Whoever started us holds the other end, so we do not outlive them.
    tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink())).await??;
    server.shutdown().await?;
    Ok(())
}
