//! What a list has shown of an org's names a moment ago: the second witness for "not there".
//!
//! What stays true: what this process has written since is never taken for absent; a name that the list has shown is
//! asked for anew. So the one thing that a second-old list can get wrong is an object that somebody else has made within
//! that second, and only if the server says of that very object that it is not there; pointers are not asked about here.
//! What does not belong here: making lists.

use std::collections::HashSet;
use std::time::Duration;

use object_store::path::Path;
use tokio::time::Instant;

/// Names in one list. A store has its small files before its packs, and few of them.
pub(crate) const NAMES_MAX: usize = 500;
/// A list is a witness for so long: for the handful of marks that a secure looks for one after another.
const AGE_MAX: Duration = Duration::from_secs(2);

/// A list of the names of one org's files, or the beginning of it.
#[derive(Debug)]
pub(crate) struct NamesShown {
    taken: Instant,
    /// What all its names begin with, with a slash at its end.
    prefix: String,
    names: HashSet<String>,
    /// It shows all names up to this one; none: all.
    end: Option<String>,
}

impl NamesShown {
    /// Of a list that was begun at `taken`; `is_cut`: there were more names behind the last.
    pub(crate) fn new(taken: Instant, prefix: String, names: Vec<String>, is_cut: bool) -> Self {
        let end = if is_cut { Some(names.iter().max().cloned().unwrap_or_default()) } else { None };
        Self { taken, prefix, names: names.into_iter().collect(), end }
    }

    /// Whether it shows an object; none where it could not have.
    pub(crate) fn shows(&self, path: &Path) -> Option<bool> {
        let name = path.as_ref();
        let could =
            name.starts_with(&self.prefix) && self.end.as_ref().is_none_or(|end| name <= end.as_str());
        could.then(|| self.names.contains(name))
    }
}

/// See the module's first lines.
#[derive(Debug, Default)]
pub(crate) struct Witness {
    shown: Option<NamesShown>,
    /// Puts of this process so far.
    writes: u64,
}

impl Witness {
    /// This process is about to write an object.
    pub(crate) fn note_written(&mut self, path: &Path) {
        self.writes += 1;
        if let Some(shown) = &mut self.shown {
            shown.names.insert(path.to_string());
        }
    }

    /// How many have been noted; to be asked before a list is begun.
    pub(crate) const fn writes(&self) -> u64 {
        self.writes
    }

    /// Keeps a list, unless something was written since it was begun that it may not show.
    pub(crate) fn keep(&mut self, shown: NamesShown, writes_before: u64) {
        if self.writes == writes_before {
            self.shown = Some(shown);
        }
    }

    /// Whether it is sure that the object was not there.
    pub(crate) fn lacks(&self, path: &Path) -> bool {
        let fresh = self.shown.as_ref().filter(|shown| shown.taken.elapsed() <= AGE_MAX);
        fresh.and_then(|shown| shown.shows(path)) == Some(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn witness(taken: Instant, is_cut: bool) -> Witness {
        let names = vec!["p/b".to_owned(), "p/d".to_owned()];
        let mut witness = Witness::default();
        witness.keep(NamesShown::new(taken, "p/".to_owned(), names, is_cut), 0);
        witness
    }

    fn lacks(witness: &Witness, name: &str) -> bool {
        witness.lacks(&Path::from(name))
    }

    #[test]
    fn only_what_a_fresh_list_could_have_shown_is_lacking() {
        let whole = witness(Instant::now(), false);
        assert!(lacks(&whole, "p/a") && lacks(&whole, "p/z"));
        assert!(!lacks(&whole, "p/b") && !lacks(&whole, "q/a") && !lacks(&whole, "p"));
        let cut = witness(Instant::now(), true);
        assert!(lacks(&cut, "p/c") && !lacks(&cut, "p/e"));
        let Some(long_ago) = Instant::now().checked_sub(AGE_MAX * 2) else {
            panic!("a clock that has just begun")
        };
        assert!(!lacks(&witness(long_ago, false), "p/a"));
    }

    #[test]
    fn what_is_written_after_or_during_a_list_is_not_lacking() {
        let mut kept = witness(Instant::now(), false);
        kept.note_written(&Path::from("p/a"));
        assert!(!lacks(&kept, "p/a") && lacks(&kept, "p/c"));
        let mut begun = Witness::default();
        let before = begun.writes();
        begun.note_written(&Path::from("p/a"));
        begun.keep(NamesShown::new(Instant::now(), "p/".to_owned(), Vec::new(), false), before);
        assert!(!lacks(&begun, "p/a"));
    }
}
