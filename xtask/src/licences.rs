//! `cargo xtask licences`: every dependency's licence is one that deny.toml allows.
//!
//! `deny.toml` is in cargo-deny's own format, so that tool reads it as well; building it here would take
//! longer than all other checks together.

use std::path::Path;

use anyhow::{Context as _, bail};
use serde::Deserialize;

use crate::metadata::{Metadata, Package};
use crate::spdx;

#[derive(Debug, Deserialize)]
struct Policy {
    licenses: LicencePolicy,
    bans: BanPolicy,
}

#[derive(Debug, Deserialize)]
struct LicencePolicy {
    allow: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct BanPolicy {
    deny: Vec<Ban>,
}

#[derive(Debug, Deserialize)]
struct Ban {
    #[serde(rename = "crate")]
    name: String,
    reason: String,
    /// Crates that may bring it all the same, because they are worth it; nobody else may.
    #[serde(default)]
    wrappers: Vec<String>,
}

pub(crate) fn check(root: &Path) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(root.join("deny.toml")).context("deny.toml cannot be read")?;
    let policy: Policy = toml::from_str(&text).context("deny.toml")?;
    let metadata = Metadata::read(root)?;
    let faults: Vec<String> =
        metadata.packages.iter().filter_map(|package| fault(package, &metadata, &policy)).collect();
    if !faults.is_empty() {
        bail!("{}", faults.join("\n"));
    }
    println!("{} packages, all under licences that deny.toml allows", metadata.packages.len());
    Ok(())
}

fn fault(package: &Package, metadata: &Metadata, policy: &Policy) -> Option<String> {
    let name = format!("{} {}", package.name, package.version);
    if let Some(ban) = policy.bans.deny.iter().find(|ban| ban.name == package.name) {
        let users = metadata.users_of(package);
        let unwelcome = users.iter().find(|user| !ban.wrappers.iter().any(|wrapper| wrapper == *user));
        if let (Some(user), false) = (unwelcome, ban.wrappers.is_empty()) {
            return Some(format!(
                "{name} is banned but for {}, and {user} uses it: {}",
                ban.wrappers.join(", "),
                ban.reason
            ));
        }
        if ban.wrappers.is_empty() {
            return Some(format!("{name} is banned: {}", ban.reason));
        }
    }
    if package.source.as_ref().is_some_and(|source| !source.starts_with("registry+")) {
        return Some(format!("{name} does not come from the package registry"));
    }
    let Some(licence) = &package.license else {
        return Some(format!("{name} names no licence"));
    };
    match spdx::is_allowed(licence, &policy.licenses.allow) {
        Ok(true) => None,
        Ok(false) => Some(format!("{name} is under `{licence}`, which deny.toml does not allow")),
        Err(why) => Some(format!("{name}: the licence `{licence}` cannot be read: {why}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(source: &str, licence: Option<&str>) -> Package {
        Package {
            id: "x".into(),
            name: "thing".into(),
            version: "1.0.0".into(),
            license: licence.map(Into::into),
            source: Some(source.into()),
            dependencies: Vec::new(),
        }
    }

    fn workspace(user: &str) -> Metadata {
        let text = format!(
            r#"{{"packages":[
                {{"id":"a","name":"{user}","version":"1.0.0","license":"MIT","source":"registry+x",
                  "dependencies":[{{"name":"clock","kind":null}}]}},
                {{"id":"b","name":"clock","version":"1.0.0","license":"MIT","source":"registry+x",
                  "dependencies":[]}}],
               "resolve":{{"nodes":[{{"id":"a","deps":[{{"pkg":"b","dep_kinds":[{{"kind":null}}]}}]}},
                                    {{"id":"b","deps":[]}}]}},
               "workspace_members":[],"target_directory":"t"}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn a_banned_crate_is_let_in_by_its_wrapper_and_by_nobody_else() {
        let policy: Policy = toml::from_str(
            "[licenses]\nallow = ['MIT']\n[bans]\ndeny = [{ crate = 'clock', wrappers = ['good'], reason = 'no' }]",
        )
        .unwrap();
        for (user, is_fault) in [("good", false), ("bad", true)] {
            let metadata = workspace(user);
            assert_eq!(fault(&metadata.packages[1], &metadata, &policy).is_some(), is_fault, "{user}");
        }
    }

    #[test]
    fn copyleft_other_sources_and_silence_are_refused() {
        let policy: Policy =
            toml::from_str("[licenses]\nallow = ['MIT']\n[bans]\ndeny = [{ crate = 'evil', reason = 'no' }]")
                .unwrap();
        let registry = "registry+somewhere";
        let metadata = workspace("anybody");
        assert_eq!(fault(&package(registry, Some("MIT")), &metadata, &policy), None);
        for (source, licence) in
            [(registry, Some("AGPL-3.0-only")), (registry, None), ("git+somewhere", Some("MIT"))]
        {
            assert!(fault(&package(source, licence), &metadata, &policy).is_some(), "{source} {licence:?}");
        }
    }
}
