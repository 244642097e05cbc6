//! The `covey` binary from outside: text, JSON, exit codes; one file per command.
//!
//! Hermetic: every command runs with an empty environment, in an empty directory, against a fake server in
//! this process that keeps state and speaks HTTP on a loopback port, or where no agent has to run, the real one.

#[cfg(test)]
mod agent;
#[cfg(test)]
mod backup;
#[cfg(test)]
mod collect_kill;
#[cfg(test)]
mod collect_live;
#[cfg(test)]
mod completions;
#[cfg(test)]
mod covey;
#[cfg(test)]
mod db;
#[cfg(test)]
mod demo;
#[cfg(test)]
mod doctor;
#[cfg(test)]
mod environment;
#[cfg(test)]
mod fake_server;
#[cfg(test)]
mod home;
#[cfg(test)]
mod home_history;
#[cfg(test)]
mod org;
#[cfg(test)]
mod real_server;
#[cfg(test)]
mod run;
#[cfg(test)]
mod runner;
#[cfg(test)]
mod session;
#[cfg(test)]
mod store;
#[cfg(test)]
mod store_gc;
#[cfg(test)]
mod store_places;
#[cfg(test)]
mod token;
#[cfg(test)]
mod up;
#[cfg(test)]
mod version;

/// A command without a test file is a command that nobody has run.
#[test]
fn every_command_has_a_test_file_that_is_compiled() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let this = include_str!("main.rs");
    let mut commands = Vec::new();
    for entry in std::fs::read_dir(root.join("src/command")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            commands.push(path.file_stem().unwrap().to_str().unwrap().to_owned());
        }
    }
    assert!(commands.len() >= 8, "{commands:?}");
    for command in commands {
        assert!(
            this.contains(&format!("mod {command};")),
            "`mod {command};` is missing in tests/cli/main.rs"
        );
        let tests = std::fs::read_to_string(root.join(format!("tests/cli/{command}.rs"))).unwrap();
        assert!(tests.contains("#[test]"), "tests/cli/{command}.rs has no test");
    }
}
