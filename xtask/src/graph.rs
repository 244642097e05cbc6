//! `cargo xtask check-graph`: who may know whom.
//!
//! The tables say the same as the code map in ARCHITECTURE.md and are changed together with it. A new edge
//! between crates is a decision, not a convenience.

use std::path::Path;

use anyhow::bail;

use crate::metadata::Metadata;

/// Every crate of the workspace and which others of the workspace it may depend on, tests included.
const MAY_KNOW: [(&str, &[&str]); 13] = [
    ("covey-types", &[]),
    ("covey-wire", &["covey-types"]),
    ("covey-home", &["covey-types"]),
    ("covey-mount", &["covey-types", "covey-home"]),
    ("covey-bucket", &["covey-types", "covey-home"]),
    ("covey-harness", &["covey-types"]),
    ("covey-db", &["covey-types", "covey-wire", "covey-harness"]),
    ("covey-models", &["covey-harness"]),
    (
        "covey-server",
        &["covey-types", "covey-wire", "covey-home", "covey-harness", "covey-models", "covey-db"],
    ),
    ("covey-runner", &["covey-types", "covey-wire", "covey-home", "covey-mount"]),
    ("covey-sandboxd", &["covey-types", "covey-wire"]),
    (
        "covey-cli",
        &[
            "covey-types",
            "covey-wire",
            "covey-home",
            "covey-mount",
            "covey-bucket",
            "covey-harness",
            "covey-server",
            "covey-runner",
        ],
    ),
    // Drives the built binary from outside; linking the product would make every task wait for its build.
    ("xtask", &[]),
];

const ASYNC: [&str; 3] = ["tokio", "async-std", "smol"];
const HTTP: [&str; 5] = ["hyper", "reqwest", "axum", "h2", "ureq"];
const SQL: [&str; 6] =
    ["rusqlite", "libsqlite3-sys", "sqlx", "tokio-postgres", "postgres-types", "deadpool-postgres"];
const SYSTEM: [&str; 3] = ["rustix", "libc", "nix"];

/// Crates and the third-party crates that must not be reachable from them, by any path.
const MUST_NOT_REACH: [(&str, &[&[&str]]); 11] = [
    ("covey-types", &[&ASYNC, &HTTP, &SQL]),
    ("covey-wire", &[&ASYNC, &HTTP, &SQL]),
    ("covey-home", &[&ASYNC, &HTTP, &SQL]),
    ("covey-mount", &[&ASYNC, &HTTP, &SQL]),
    ("covey-bucket", &[&SQL, &["axum"]]),
    ("covey-db", &[&["axum", "reqwest", "hyper"]]),
    ("covey-harness", &[&ASYNC, &HTTP, &SQL]),
    ("covey-models", &[&SQL]),
    // It has no address to dial (I2) and stays small.
    ("covey-sandboxd", &[&ASYNC, &HTTP, &SQL]),
    ("covey-runner", &[&SQL, &["reqwest", "axum"]]),
    // `ureq` is how the chaos run asks the server, as any client would.
    ("xtask", &[&ASYNC, &SQL, &["hyper", "reqwest", "axum", "h2"]]),
];

/// Pure crates must not name the system themselves (`blake3` and `uuid` carry `libc` for what we do not use), SQL
/// stands in `covey-db` only (I1), and no other part of the server speaks to a provider.
const MUST_NOT_NAME: [(&str, &[&str]); 6] = [
    ("covey-types", &SYSTEM),
    ("covey-harness", &SYSTEM),
    ("covey-server", &SQL),
    // Whoever answers for a model is spoken to in `covey-models` only: it holds the keys.
    ("covey-server", &["reqwest", "ureq"]),
    ("covey-models", &SQL),
    ("covey-cli", &SQL),
];

/// Direct dependencies at most; more is a reason to look whether the crate still has one job.
const DIRECT_MAX: [(&str, usize); 2] = [("covey-types", 6), ("covey-sandboxd", 12)];

pub(crate) fn check(root: &Path) -> anyhow::Result<()> {
    let metadata = Metadata::read(root)?;
    let faults = faults(&metadata);
    if !faults.is_empty() {
        bail!(
            "{}\nThe code map in ARCHITECTURE.md and xtask/src/graph.rs say who may know whom.",
            faults.join("\n")
        );
    }
    println!("{} crates depend only on what they may know", metadata.members().count());
    Ok(())
}

fn faults(metadata: &Metadata) -> Vec<String> {
    let mut faults = Vec::new();
    let names: Vec<&str> = metadata.members().map(|package| package.name.as_str()).collect();
    for package in metadata.members() {
        let name = package.name.as_str();
        let Some((_, may_know)) = MAY_KNOW.iter().find(|(known, _)| *known == name) else {
            faults.push(format!("{name}: a crate without a row in the table"));
            continue;
        };
        for dependency in &package.dependencies {
            let other = dependency.name.as_str();
            if names.contains(&other) && !may_know.contains(&other) {
                faults.push(format!("{name} may not depend on {other}"));
            }
        }
        let reached = metadata.linked_into(package);
        let banned = MUST_NOT_REACH.iter().filter(|(known, _)| *known == name).flat_map(|(_, lists)| *lists);
        for other in banned.copied().flatten().filter(|other| reached.contains(*other)) {
            faults.push(format!("{name} may not know {other}, not even through another crate"));
        }
        let direct = |other: &str| package.dependencies.iter().any(|d| d.name == other && !d.is_dev());
        let unnamed = MUST_NOT_NAME.iter().filter(|(known, _)| *known == name).flat_map(|(_, list)| *list);
        faults.extend(
            unnamed.filter(|other| direct(other)).map(|other| format!("{name} may not name {other}")),
        );
        let count = package.dependencies.iter().filter(|dependency| !dependency.is_dev()).count();
        if let Some((_, max)) = DIRECT_MAX.iter().find(|(known, max)| *known == name && count > *max) {
            faults.push(format!("{name} has {count} direct dependencies, more than {max}"));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workspace(package: &str, dependency: &str) -> Metadata {
        let text = format!(
            r#"{{"packages":[
                {{"id":"a","name":"{package}","version":"0.1.0","license":null,"source":null,
                  "dependencies":[{{"name":"{dependency}","kind":null}}]}},
                {{"id":"b","name":"{dependency}","version":"0.1.0","license":null,"source":null,
                  "dependencies":[]}}],
               "resolve":{{"nodes":[{{"id":"a","deps":[{{"pkg":"b","dep_kinds":[{{"kind":null}}]}}]}}]}},
               "workspace_members":["a","b"],"target_directory":"t"}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn an_edge_outside_the_table_is_a_fault() {
        let found = faults(&workspace("covey-home", "covey-wire"));
        assert_eq!(found, ["covey-home may not depend on covey-wire"]);
        assert_eq!(faults(&workspace("covey-home", "covey-types")), Vec::<String>::new());
    }

    #[test]
    fn a_crate_nobody_decided_about_is_a_fault() {
        assert_eq!(
            faults(&workspace("covey-extras", "covey-types")),
            ["covey-extras: a crate without a row in the table"]
        );
    }

    #[test]
    fn a_pure_crate_does_not_name_the_system() {
        let found = faults(&workspace("covey-harness", "libc"));
        assert!(found.contains(&"covey-harness may not name libc".to_owned()), "{found:?}");
    }

    #[test]
    fn the_loop_cannot_reach_a_runtime() {
        let found = faults(&workspace("covey-harness", "tokio"));
        assert!(found.iter().any(|fault| fault.contains("may not know tokio")), "{found:?}");
    }
}
