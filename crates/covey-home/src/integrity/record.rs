//! Which packs a verification has read whole, so that one that is stopped goes on, and sampled ones take turns.
//!
//! Text, appended as packs are done; a line that is cut at the end counts as not written. A record of another store
//! or of another format begins anew. It is only of use to who verifies: nothing in the store depends on it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use covey_types::BlockHash;

use crate::pack_store::PackName;

/// What was found in a pack.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PackFound {
    pub(super) damaged: Vec<(BlockHash, String)>,
    pub(super) problems: Vec<String>,
}

impl PackFound {
    pub(super) const fn is_right(&self) -> bool {
        self.damaged.is_empty() && self.problems.is_empty()
    }
}

/// See the module's first lines.
#[derive(Debug)]
pub(super) struct Record {
    path: PathBuf,
    file: File,
    pub(super) done: BTreeMap<PackName, PackFound>,
}

fn head(store: &str) -> String {
    format!("covey-verify 1 {}", one_line(store))
}

fn one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

impl Record {
    /// Takes up the record at `path` for the store of this name; begins one where there is none, and where every
    /// one of `packs` is in it.
    pub(super) fn open(path: &Path, store: &str, packs: &BTreeSet<PackName>) -> io::Result<Self> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(error),
        };
        let done = parse(&text, store).filter(|done| !packs.iter().all(|pack| done.contains_key(pack)));
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        let done = match done {
            Some(done) => {
                if !text.ends_with('\n') {
                    file.write_all(b"\n")?;
                }
                done
            }
            None => {
                file.set_len(0)?;
                file.write_all(format!("{}\n", head(store)).as_bytes())?;
                BTreeMap::new()
            }
        };
        Ok(Self { path: path.to_owned(), file, done })
    }

    /// Notes a pack.
    pub(super) fn add(&mut self, pack: PackName, found: &PackFound) -> io::Result<()> {
        let mut lines = String::new();
        for (hash, detail) in &found.damaged {
            lines.push_str(&format!("damaged {pack} {hash} {}\n", one_line(detail)));
        }
        for problem in &found.problems {
            lines.push_str(&format!("problem {pack} {}\n", one_line(problem)));
        }
        // Last: a pack whose lines are cut off is read again.
        lines.push_str(&format!("done {pack}\n"));
        self.file.write_all(lines.as_bytes())
    }

    /// Every pack was read: the next verification begins anew.
    pub(super) fn complete(self) -> io::Result<()> {
        std::fs::remove_file(&self.path)
    }
}

fn parse(text: &str, store: &str) -> Option<BTreeMap<PackName, PackFound>> {
    // What stands behind the last line end was cut.
    let whole = &text[..text.rfind('\n')? + 1];
    let mut lines = whole.lines();
    if lines.next()? != head(store) {
        return None;
    }
    let mut open: BTreeMap<PackName, PackFound> = BTreeMap::new();
    let mut done = BTreeMap::new();
    for line in lines {
        // A line that cannot be understood costs one pack's reading.
        let mut words = line.splitn(3, ' ');
        let (Some(kind), Some(Ok(pack))) = (words.next(), words.next().map(str::parse::<PackName>)) else {
            continue;
        };
        let rest = words.next().unwrap_or_default();
        match kind {
            "damaged" => {
                if let Some((hash, detail)) = rest.split_once(' ')
                    && let Ok(hash) = hash.parse()
                {
                    open.entry(pack).or_default().damaged.push((hash, detail.to_owned()));
                }
            }
            "problem" => open.entry(pack).or_default().problems.push(rest.to_owned()),
            "done" => {
                done.insert(pack, open.remove(&pack).unwrap_or_default());
            }
            _ => {}
        }
    }
    Some(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_goes_on_where_it_was_cut_and_begins_anew_when_all_is_done() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record");
        let (one, two) = (PackName::random(), PackName::random());
        let packs = BTreeSet::from([one, two]);
        let found = PackFound {
            damaged: vec![(BlockHash::of(b"a"), "the hash\ndiffers".to_owned())],
            problems: vec!["the index".to_owned()],
        };
        let mut record = Record::open(&path, "here", &packs).unwrap();
        record.add(one, &found).unwrap();
        drop(record);
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, [&whole[..], format!("done {two}").as_bytes()].concat()).unwrap();
        let mut record = Record::open(&path, "here", &packs).unwrap();
        let again = &record.done[&one];
        assert_eq!((record.done.len(), &again.problems), (1, &found.problems));
        assert_eq!(again.damaged[0], (found.damaged[0].0, "the hash differs".to_owned()));
        record.add(two, &PackFound::default()).unwrap();
        drop(record);
        assert!(Record::open(&path, "here", &packs).unwrap().done.is_empty(), "a new round");
        assert!(Record::open(&path, "elsewhere", &packs).unwrap().done.is_empty());
    }
}
