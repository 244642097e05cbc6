//! `cargo xtask tidy`: the rules of CONTRIBUTING.md that no compiler checks.
//!
//! Each rule is a function from one file to a fault, so that it can be tested on a few lines of text. The
//! rules about single files stand in [`rules`]; those about the repository as a whole stand here.

mod rules;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail};

use crate::process;

const GIT_LIMIT: Duration = Duration::from_secs(60);
const README_LINES_MAX: usize = 150;
const ARCHITECTURE_LINES_MAX: usize = 400;
const ADR_LINES_MAX: usize = 80;
const LONGEST_SHOWN: usize = 10;

/// The two commands that a newcomer types; README must show them exactly so.
const README_COMMANDS: [&str; 2] = ["cargo run --release -- demo", "cargo xtask test"];
const ADR_SECTIONS: [&str; 5] = ["Status:", "## Context", "## Decision", "## Consequences", "## Rejected"];

struct Text {
    path: String,
    text: String,
}

pub(crate) fn check(root: &Path) -> anyhow::Result<()> {
    let files = read(root)?;
    let mut faults: Vec<String> =
        files.iter().flat_map(|file| rules::faults(&file.path, &file.text)).collect();
    faults.extend(documents(&files));
    print_longest(&files);
    if !faults.is_empty() {
        bail!("{}", faults.join("\n"));
    }
    println!("{} text files keep the rules", files.len());
    Ok(())
}

/// Text files of the repository: what git tracks or would track, or in an unpacked archive, everything.
fn read(root: &Path) -> anyhow::Result<Vec<Text>> {
    let mut files = Vec::new();
    for path in paths(root)? {
        let full = root.join(&path);
        if !full.is_file() || full.is_symlink() {
            continue;
        }
        let bytes = std::fs::read(&full).with_context(|| format!("{} cannot be read", full.display()))?;
        if let Ok(text) = String::from_utf8(bytes) {
            files.push(Text { path: path.to_string_lossy().into_owned(), text });
        }
    }
    if files.is_empty() {
        bail!("no file found to check in {}", root.display());
    }
    Ok(files)
}

fn paths(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if !root.join(".git").exists() || !process::exists("git") {
        return walk(root, Path::new(""));
    }
    let mut git = Command::new("git");
    // A checkout of another user (root in a container, say) is only listed here, never executed from.
    git.current_dir(root).args(["-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others"]);
    git.arg("--exclude-standard");
    let listed = process::output_of_success(&mut git, GIT_LIMIT)?;
    Ok(listed.split('\0').filter(|path| !path.is_empty()).map(PathBuf::from).collect())
}

fn walk(root: &Path, below: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(root.join(below))? {
        let entry = entry?;
        let path = below.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            let name = entry.file_name();
            if !["target", ".git", ".test-env", "node_modules"].iter().any(|skip| name == *skip) {
                found.extend(walk(root, &path)?);
            }
        } else {
            found.push(path);
        }
    }
    Ok(found)
}

fn documents(files: &[Text]) -> Vec<String> {
    let find = |path: &str| files.iter().find(|file| file.path == path);
    let mut faults = Vec::new();
    for (path, max) in [("README.md", README_LINES_MAX), ("ARCHITECTURE.md", ARCHITECTURE_LINES_MAX)] {
        match find(path) {
            None => faults.push(format!("{path} is missing")),
            Some(file) if file.text.lines().count() > max => {
                faults.push(format!("{path}: {} lines, more than {max}", file.text.lines().count()));
            }
            Some(_) => {}
        }
    }
    for path in ["CONTRIBUTING.md", "GLOSSARY.md", "CHANGELOG.md", "LICENSE", "deny.toml"] {
        if find(path).is_none() {
            faults.push(format!("{path} is missing"));
        }
    }
    for command in README_COMMANDS {
        if !find("README.md").is_some_and(|file| file.text.lines().any(|line| line.starts_with(command))) {
            faults.push(format!("README.md: no line begins with `{command}`"));
        }
    }
    if !find(".ci/run").is_some_and(|file| file.text.contains(README_COMMANDS[1])) {
        faults.push(format!(".ci/run does not call README's test command `{}`", README_COMMANDS[1]));
    }
    for file in files.iter().filter(|file| file.path.starts_with("docs/adr/") && file.path.ends_with(".md")) {
        for section in ADR_SECTIONS.iter().filter(|section| !file.text.contains(*section)) {
            faults.push(format!("{}: no `{section}`", file.path));
        }
        if file.text.lines().count() > ADR_LINES_MAX {
            faults.push(format!("{}: more than one page ({ADR_LINES_MAX} lines)", file.path));
        }
    }
    faults
}

fn print_longest(files: &[Text]) {
    let rust = files.iter().filter(|file| file.path.ends_with(".rs"));
    let mut lengths: Vec<(usize, &str)> =
        rust.map(|file| (file.text.lines().count(), file.path.as_str())).collect();
    lengths.sort_unstable();
    if let Some((median, _)) = lengths.get(lengths.len() / 2) {
        println!("{} Rust files, median {median} lines; the longest:", lengths.len());
    }
    for (lines, path) in lengths.iter().rev().take(LONGEST_SHOWN) {
        println!("{lines:6}  {path}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(path: &str, text: &str) -> Text {
        Text { path: path.into(), text: text.into() }
    }

    #[test]
    fn a_readme_without_the_two_commands_or_too_long_is_a_fault() {
        let found = documents(&[text("README.md", &"line\n".repeat(151))]).join("\n");
        assert!(found.contains("README.md: 151 lines"), "{found}");
        assert!(found.contains("no line begins with `cargo xtask test`"), "{found}");
        assert!(found.contains("no line begins with `cargo run --release -- demo`"), "{found}");
    }

    #[test]
    fn an_adr_says_what_was_rejected() {
        let adr = text("docs/adr/0001-x.md", "Status: accepted\n## Context\n## Decision\n## Consequences\n");
        let found = documents(&[adr]).join("\n");
        assert!(found.contains("docs/adr/0001-x.md: no `## Rejected`"), "{found}");
    }
}
