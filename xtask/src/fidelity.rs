//! `cargo xtask fidelity`: measures what is kept of a tree of odd inodes by us and by the tools that are installed,
//! and prints (or, with `--write`, puts into `docs/fidelity.md`) the table.
//!
//! What stays true: every cell is measured in this run; a tool that is not installed has no column.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use serde_json::Value;

use crate::process;

const BUILD_LIMIT: Duration = Duration::from_secs(30 * 60);
const TOOL_LIMIT: Duration = Duration::from_secs(10 * 60);
const DOCUMENT: &str = "docs/fidelity.md";
/// Everything behind this line is measured.
const MARK: &str = "<!-- below: cargo xtask fidelity --write -->";

/// Where the table goes.
#[derive(Debug, Args)]
pub(crate) struct FidelityArgs {
    /// Put the table into docs/fidelity.md instead of printing it.
    #[arg(long)]
    write: bool,
}

struct Tool {
    name: &'static str,
    programs: &'static [&'static str],
    /// With `$1` the tree, `$2` the empty target, `$3` an empty directory for a store. Prints where the tree is then.
    script: &'static str,
    version: &'static str,
}

const TOOLS: [Tool; 5] = [
    Tool {
        name: "restic",
        programs: &["restic"],
        script: "export RESTIC_PASSWORD=x HOME=\"$3\"; restic -q -r \"$3/r\" init >&2; \
                 restic -q -r \"$3/r\" backup \"$1\" >&2; \
                 restic -q -r \"$3/r\" restore latest --target \"$2\" >&2; echo \"$2$1\"",
        version: "restic version | cut -d' ' -f2",
    },
    Tool {
        name: "borg",
        programs: &["borg"],
        script: "export BORG_BASE_DIR=\"$3/b\" BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK=yes; \
                 borg init -e none \"$3/r\" >&2; borg create \"$3/r::a\" \"$1\" >&2; \
                 cd \"$2\" && borg extract --sparse \"$3/r::a\" >&2; echo \"$2$1\"",
        version: "borg --version | cut -d' ' -f2",
    },
    Tool {
        name: "tar",
        programs: &["tar"],
        script: "tar --format=posix --xattrs --xattrs-include='*' --acls --sparse -C \"$1\" -cf \"$3/t\" . >&2; \
                 tar --xattrs --xattrs-include='*' --acls -C \"$2\" -xpf \"$3/t\" >&2; echo \"$2\"",
        version: "tar --version | head -n1 | grep -o '[0-9.]*$'",
    },
    Tool {
        name: "rsync",
        programs: &["rsync"],
        script: "rsync -aHAXS \"$1/\" \"$2/\" >&2; echo \"$2\"",
        version: "rsync --version | head -n1 | awk '{print $3}'",
    },
    Tool {
        name: "cp -a",
        programs: &["cp"],
        script: "cp -a \"$1/.\" \"$2\" >&2; echo \"$2\"",
        version: "cp --version | head -n1 | grep -o '[0-9.]*$'",
    },
];

struct Column {
    title: String,
    found: Value,
}

pub(crate) fn run(root: &Path, args: &FidelityArgs) -> anyhow::Result<()> {
    ensure!(rustix::process::geteuid().is_root(), "only root can make and restore every kind of inode");
    let example = built(root)?;
    let scratch = tempfile::tempdir()?;
    let tree = scratch.path().join("tree");
    let left_out = step(&example, &["build".as_ref(), tree.as_ref()])?["left_out"].clone();
    ensure!(left_out.as_array().is_some_and(Vec::is_empty), "the file system cannot hold {left_out}");
    let target = scratch.path().join("ours");
    let said = step(&example, &["ours".as_ref(), tree.as_ref(), target.as_ref()])?;
    ensure!(said["warnings"].as_array().is_some_and(Vec::is_empty), "warnings: {said}");
    let compared = |found: &Path| step(&example, &["compare".as_ref(), tree.as_ref(), found.as_ref()]);
    let mut columns = vec![Column { title: "Covey".to_owned(), found: compared(&target)? }];
    for (number, tool) in TOOLS.iter().enumerate() {
        if !tool.programs.iter().all(|program| process::exists(program)) {
            eprintln!("{} is not installed and gets no column", tool.name);
            continue;
        }
        let dir = |what: &str| -> anyhow::Result<PathBuf> {
            let dir = scratch.path().join(format!("{number}-{what}"));
            fs::create_dir(&dir)?;
            Ok(dir)
        };
        let (target, store) = (dir("target")?, dir("store")?);
        let mut command = Command::new("sh");
        // A failure is expected of some, with a line of several KiB for each path that they cannot name: what they
        // left is compared all the same.
        let script = format!("exec 2>/dev/null; {}", tool.script);
        command.args(["-c", &script, "sh"]).arg(&tree).arg(&target).arg(&store);
        let (_, at) = process::output(&mut command, TOOL_LIMIT)?;
        let at = at.lines().last().context("the script did not say where the tree is")?.to_owned();
        let version = process::output_of_success(Command::new("sh").args(["-c", tool.version]), TOOL_LIMIT)?;
        let title = format!("{} {}", tool.name, version.trim());
        columns.push(Column { title, found: compared(Path::new(&at))? });
    }
    let table = table(&columns)?;
    if !args.write {
        println!("{table}");
        return Ok(());
    }
    let path = root.join(DOCUMENT);
    let text = fs::read_to_string(&path).with_context(|| format!("{} cannot be read", path.display()))?;
    let (kept, _) = text.split_once(MARK).with_context(|| format!("{DOCUMENT} has no line `{MARK}`"))?;
    fs::write(&path, format!("{kept}{MARK}\n\n{table}")).with_context(|| format!("{}", path.display()))
}

fn built(root: &Path) -> anyhow::Result<PathBuf> {
    let mut command = process::cargo(root);
    command.args(["build", "--quiet", "--package", "covey-home", "--example", "fidelity"]);
    command.arg("--message-format=json-render-diagnostics");
    let messages = process::output_of_success(&mut command, BUILD_LIMIT)?;
    let built = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let program = built
        .filter(|message| message["target"]["name"] == "fidelity")
        .find_map(|message| message["executable"].as_str().map(PathBuf::from));
    program.context("cargo did not say where the example is")
}

fn step(example: &Path, args: &[&std::ffi::OsStr]) -> anyhow::Result<Value> {
    let said = process::output_of_success(Command::new(example).args(args), TOOL_LIMIT)?;
    serde_json::from_str(said.trim()).with_context(|| format!("the example said `{said}`"))
}

/// One row per aspect; a cell is empty of losses, or names the first.
fn table(columns: &[Column]) -> anyhow::Result<String> {
    let aspects = columns.first().and_then(|column| column.found["aspects"].as_array());
    let aspects = aspects.context("nothing was compared")?;
    let mut text = String::from("| |");
    for column in columns {
        text.push_str(&format!(" {} |", column.title));
    }
    text.push_str(&format!("\n|---|{}\n", "---|".repeat(columns.len())));
    for (row, aspect) in aspects.iter().enumerate() {
        let name = aspect["aspect"].as_str().context("an aspect without a name")?;
        text.push_str(&format!("| {name} |"));
        for (number, column) in columns.iter().enumerate() {
            let found = &column.found;
            let lost = found["aspects"][row]["lost"].as_array().map_or(0, Vec::len);
            let cell = match (name, lost) {
                ("all inodes", _) => {
                    let all = found["inodes"].as_u64().context("no number of inodes")?;
                    let broken = found["broken"].as_u64().context("no number of inodes")?;
                    format!("{} of {all}", all - broken)
                }
                ("owner and group", 1..) if number == 0 => "mapped".to_owned(),
                (_, 0) => "kept".to_owned(),
                (_, 1) => "**lost**".to_owned(),
                (_, lost) => format!("**lost** ({lost} names)"),
            };
            text.push_str(&format!(" {cell} |"));
        }
        text.push('\n');
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_says_what_was_lost_and_the_owner_is_mapped_by_us() {
        let column = |title: &str, lost: &[&str]| Column {
            title: title.to_owned(),
            found: serde_json::json!({
                "inodes": 10, "broken": lost.len(),
                "aspects": [{"aspect": "holes", "lost": lost}, {"aspect": "owner and group", "lost": ["owner"]},
                    {"aspect": "all inodes", "lost": []}],
            }),
        };
        let table = table(&[column("we", &[]), column("they", &["a", "b"])]).unwrap();
        assert!(table.contains("| holes | kept | **lost** (2 names) |"), "{table}");
        assert!(table.contains("| owner and group | mapped | **lost** |"), "{table}");
        assert!(table.contains("| all inodes | 10 of 10 | 8 of 10 |"), "{table}");
    }
}
