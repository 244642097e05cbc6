//! What `cargo metadata` says about the workspace, as far as the checks need it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use serde::Deserialize;

use crate::process;

/// Long enough to fetch the index and every source on a fresh machine.
const METADATA_LIMIT: Duration = Duration::from_secs(15 * 60);

#[derive(Debug, Deserialize)]
pub(crate) struct Metadata {
    pub(crate) packages: Vec<Package>,
    pub(crate) resolve: Resolve,
    pub(crate) workspace_members: Vec<String>,
    pub(crate) target_directory: PathBuf,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) license: Option<String>,
    /// Absent for packages of this workspace.
    pub(crate) source: Option<String>,
    pub(crate) dependencies: Vec<Dependency>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// Absent for normal dependencies; `dev` or `build` else.
    pub(crate) kind: Option<String>,
}

impl Dependency {
    pub(crate) fn is_dev(&self) -> bool {
        self.kind.as_deref() == Some("dev")
    }
}

#[derive(Debug, Deserialize)]
pub(crate) struct Resolve {
    pub(crate) nodes: Vec<Node>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Node {
    pub(crate) id: String,
    pub(crate) deps: Vec<NodeDependency>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct NodeDependency {
    pub(crate) pkg: String,
    pub(crate) dep_kinds: Vec<NodeDependencyKind>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct NodeDependencyKind {
    pub(crate) kind: Option<String>,
}

impl Metadata {
    pub(crate) fn read(root: &Path) -> anyhow::Result<Self> {
        let mut command = process::cargo(root);
        // Only what is built here: other systems' packages are neither fetched nor judged.
        let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        command.args(["metadata", "--format-version", "1", "--locked", "--filter-platform", &platform]);
        let text = process::output_of_success(&mut command, METADATA_LIMIT)?;
        serde_json::from_str(&text).context("`cargo metadata` printed something unexpected")
    }

    pub(crate) fn members(&self) -> impl Iterator<Item = &Package> {
        self.packages.iter().filter(|package| self.workspace_members.contains(&package.id))
    }

    /// Names of the packages that depend on `package` directly.
    pub(crate) fn users_of(&self, package: &Package) -> Vec<&str> {
        let uses = |node: &&Node| node.deps.iter().any(|dep| dep.pkg == package.id);
        let users = self.resolve.nodes.iter().filter(uses);
        users
            .filter_map(|node| self.packages.iter().find(|p| p.id == node.id))
            .map(|p| p.name.as_str())
            .collect()
    }

    /// Names of everything that ends up in `package`'s own code: normal dependencies, transitively.
    pub(crate) fn linked_into(&self, package: &Package) -> Vec<&str> {
        let mut ids = vec![package.id.as_str()];
        let mut next = 0;
        while next < ids.len() {
            let id = ids[next];
            next += 1;
            let node = self.resolve.nodes.iter().find(|node| node.id == id);
            for dep in node.into_iter().flat_map(|node| &node.deps) {
                let normal = dep.dep_kinds.iter().any(|kind| kind.kind.is_none());
                if normal && !ids.contains(&dep.pkg.as_str()) {
                    ids.push(&dep.pkg);
                }
            }
        }
        let named = |id: &&str| self.packages.iter().find(|p| p.id == *id).map(|p| p.name.as_str());
        ids[1..].iter().filter_map(named).collect()
    }
}
