//! One step of `cargo xtask fidelity`: `build DIR` makes the tree of odd inodes, `ours DIR TARGET` secures and
//! materializes it twice, `compare WANTED FOUND` says what the second tree lacks of the first. Each prints one JSON
//! object. The comparison is that of the tests and knows nothing of the code under test.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use covey_home::{Excludes, MaterializeRequest, NoProgress, PackStore, SecureRequest, materialize, secure};
use serde_json::{Value, json};

#[path = "../tests/home/odd_tree.rs"]
mod odd_tree;
#[path = "../tests/home/support.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod support;

use support::Dumped;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn ours(dir: &Path, target: &Path) -> Outcome<Value> {
    let scratch = tempfile::tempdir()?;
    let store = PackStore::open_directory(scratch.path(), "fidelity")?;
    let (excludes, cancel) = (Excludes::none(), AtomicBool::new(false));
    let secured = secure(&SecureRequest {
        dir,
        store: &store,
        stat_cache: None,
        excludes: &excludes,
        previous: None,
        cancel: &cancel,
        progress: &NoProgress,
        threads: 0,
    })?;
    let mut warnings = secured.warnings;
    for _ in 0..2 {
        let put = materialize(&MaterializeRequest {
            root: secured.root,
            dir: target,
            store: &store,
            stat_cache: None,
            excludes: &excludes,
            owner: None,
            cancel: &cancel,
            progress: &NoProgress,
            threads: 0,
        })?;
        warnings.extend(put.warnings);
    }
    Ok(json!({ "warnings": warnings }))
}

/// What a missing name is an example of.
fn of_missing(path: &[u8], wanted: &Dumped) -> &'static str {
    match (wanted.kind, path) {
        ('s', _) => "sockets",
        ('p', _) => "FIFOs",
        ('c', b"wh") => "character device 0:0 (whiteout)",
        ('c' | 'b', _) => "device nodes",
        _ if path.len() > 4096 => "paths above PATH_MAX",
        _ => "names of any bytes, up to 255",
    }
}

fn lacking(path: &[u8], wanted: &Dumped, found: Option<&Dumped>) -> Vec<&'static str> {
    let Some(found) = found.filter(|found| found.kind == wanted.kind) else {
        return vec![of_missing(path, wanted)];
    };
    let mut lacking = Vec::new();
    let is_link = wanted.kind == 'l';
    if (&wanted.content, wanted.size) != (&found.content, found.size) && wanted.holes == found.holes {
        lacking.push(if is_link { "targets of symbolic links" } else { "contents" });
    }
    if wanted.holes != found.holes {
        lacking.push("holes of sparse files");
    }
    if wanted.mode != found.mode {
        lacking.push("modes, setuid, sticky, 0000");
    }
    if wanted.mtime != found.mtime {
        lacking.push("mtime in ns, before 1970, after 2100, of every kind");
    }
    if wanted.names != found.names {
        lacking.push(if is_link { "hard-linked symbolic links" } else { "hard links" });
    }
    for (name, value) in &wanted.xattrs {
        if found.xattrs.get(name) != Some(value) {
            lacking.push(match name.as_slice() {
                b"security.capability" => "file capabilities",
                name if name.starts_with(b"system.") => "ACLs",
                _ => "user attributes",
            });
        }
    }
    lacking
}

const ASPECTS: [&str; 18] = [
    "contents",
    "names of any bytes, up to 255",
    "paths above PATH_MAX",
    "holes of sparse files",
    "targets of symbolic links",
    "hard links",
    "hard-linked symbolic links",
    "modes, setuid, sticky, 0000",
    "mtime in ns, before 1970, after 2100, of every kind",
    "user attributes",
    "ACLs",
    "file capabilities",
    "FIFOs",
    "sockets",
    "device nodes",
    "character device 0:0 (whiteout)",
    "owner and group",
    "all inodes",
];

fn compare(wanted: &Path, found: &Path) -> Value {
    let owner = |root: &Path| std::fs::symlink_metadata(root.join("owner")).map(|m| (m.uid(), m.gid())).ok();
    let same_owner = owner(wanted) == owner(found);
    let (wanted, found) = (support::dump(wanted), support::dump(found));
    let mut lost: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    let (mut inodes, mut whole) = (BTreeSet::new(), BTreeSet::new());
    for (path, dumped) in &wanted {
        let lacking = lacking(path, dumped, found.get(path));
        inodes.insert(&dumped.names);
        if lacking.is_empty() {
            whole.insert(&dumped.names);
        }
        for aspect in lacking {
            let mut shown: String = path.escape_ascii().to_string();
            if shown.len() > 40 {
                shown = format!("{}…", &shown[..40]);
            }
            lost.entry(aspect).or_default().insert(shown);
        }
    }
    if !same_owner {
        lost.entry("owner and group").or_default().insert("owner".to_owned());
    }
    let broken = inodes.len() - whole.len();
    let aspects: Vec<Value> = ASPECTS
        .iter()
        .map(|aspect| {
            let paths: Vec<_> = lost.get(aspect).into_iter().flatten().collect();
            json!({ "aspect": aspect, "lost": paths })
        })
        .collect();
    json!({ "inodes": inodes.len(), "broken": broken, "aspects": aspects })
}

fn main() -> Outcome<()> {
    let args: Vec<std::path::PathBuf> = std::env::args_os().skip(1).map(Into::into).collect();
    let args: Vec<&Path> = args.iter().map(std::path::PathBuf::as_path).collect();
    let said = match args.as_slice() {
        [what, dir] if *what == Path::new("build") => json!({ "left_out": odd_tree::build(dir) }),
        [what, dir, target] if *what == Path::new("ours") => ours(dir, target)?,
        [what, wanted, found] if *what == Path::new("compare") => compare(wanted, found),
        _ => return Err("build DIR | ours DIR TARGET | compare WANTED FOUND".into()),
    };
    println!("{said}");
    Ok(())
}
