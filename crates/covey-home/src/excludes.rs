//! What of a home is not kept: the patterns of `COVEY_HOME_EXCLUDES`.
//!
//! What stays true: a pattern that cannot be read excludes nothing and is reported. What does not belong here:
//! package caches; that they are kept is on purpose.

use covey_types::BlockHash;
use globset::{GlobBuilder, GlobMatcher};

/// What the tool that reads it restores by itself.
pub const DEFAULT_EXCLUDES: &str = "__pycache__,*.pyc,.dartServer,*.tmp,.cache/pip,.cache/ms-playwright";

/// A list of patterns. Three kinds: with `/` a path from the home's root, with everything below it; without,
/// and without any of `*?[{`, a name at any depth, with everything below it; else a glob over the names of
/// files (not of directories).
#[derive(Debug, Clone, Default)]
pub struct Excludes {
    paths: Vec<Vec<u8>>,
    names: Vec<Vec<u8>>,
    globs: Vec<GlobMatcher>,
    unreadable: Vec<String>,
}

impl Excludes {
    /// Keeps everything.
    pub fn none() -> Self {
        Self::default()
    }

    /// The list of the environment variable: its text replaces the defaults, `none` empties them, not set
    /// (`None`) or blank means the defaults.
    pub fn from_setting(setting: Option<&str>) -> Self {
        match setting.map(str::trim) {
            None | Some("") => Self::parse(DEFAULT_EXCLUDES),
            Some("none") => Self::none(),
            Some(text) => Self::parse(text),
        }
    }

    /// Reads patterns that are separated by commas or line ends.
    pub fn parse(text: &str) -> Self {
        let mut excludes = Self::default();
        for pattern in text.split([',', '\n']).map(str::trim).filter(|pattern| !pattern.is_empty()) {
            if !excludes.add(pattern) {
                excludes.unreadable.push(pattern.to_owned());
            }
        }
        excludes
    }

    fn add(&mut self, pattern: &str) -> bool {
        let is_glob = pattern.contains(['*', '?', '[', '{']);
        if pattern.contains('/') {
            let path = pattern.trim_matches('/');
            let components_allowed = path.split('/').all(|part| !matches!(part, "" | "." | ".."));
            if is_glob || !components_allowed || path.contains('\0') {
                return false;
            }
            self.paths.push(path.as_bytes().to_vec());
        } else if is_glob {
            let Ok(glob) = GlobBuilder::new(pattern).literal_separator(true).build() else { return false };
            self.globs.push(glob.compile_matcher());
        } else if matches!(pattern, "." | "..") || pattern.contains('\0') {
            return false;
        } else {
            self.names.push(pattern.as_bytes().to_vec());
        }
        true
    }

    /// Patterns that exclude nothing because they cannot be read.
    pub fn unreadable(&self) -> &[String] {
        &self.unreadable
    }

    /// Whether the name is not kept, in whatever directory it stands.
    pub(crate) fn excludes_anywhere(&self, name: &[u8], is_dir: bool) -> bool {
        use std::os::unix::ffi::OsStrExt;
        self.names.iter().any(|excluded| excluded == name)
            || (!is_dir && self.globs.iter().any(|glob| glob.is_match(std::ffi::OsStr::from_bytes(name))))
    }

    /// Whether the name in the directory at `dir` (a path from the root, empty for the root) is not kept.
    pub fn excludes(&self, dir: &[u8], name: &[u8], is_dir: bool) -> bool {
        let is_path = |excluded: &Vec<u8>| {
            excluded.strip_suffix(name).is_some_and(|rest| match rest.strip_suffix(b"/") {
                Some(parent) => parent == dir,
                None => rest.is_empty() && dir.is_empty(),
            })
        };
        self.excludes_anywhere(name, is_dir) || self.paths.iter().any(is_path)
    }

    /// Whether a path from the root that is no directory is not kept, by itself or by a directory above it.
    pub fn excludes_path(&self, path: &[u8]) -> bool {
        let mut dir_len = 0;
        path.split(|byte| *byte == b'/').any(|name| {
            let start = if dir_len == 0 { 0 } else { dir_len + 1 };
            let dir = &path[..dir_len];
            dir_len = start + name.len();
            self.excludes(dir, name, dir_len < path.len())
        })
    }

    /// Names the list: equal for lists that exclude the same for the same reasons.
    pub fn fingerprint(&self) -> BlockHash {
        let globs = self.globs.iter().map(|glob| glob.glob().glob().as_bytes());
        let kinds: [Vec<&[u8]>; 3] = [
            self.paths.iter().map(Vec::as_slice).collect(),
            self.names.iter().map(Vec::as_slice).collect(),
            globs.collect(),
        ];
        let mut text = Vec::new();
        for mut kind in kinds {
            kind.sort_unstable();
            kind.dedup();
            for pattern in kind {
                text.extend_from_slice(pattern);
                text.push(0);
            }
            text.push(0);
        }
        BlockHash::of(&text)
    }

    /// The patterns that are paths from the root.
    pub(crate) fn paths(&self) -> &[Vec<u8>] {
        &self.paths
    }

    /// Whether paths from the root matter, so that the caller has to know where it is.
    pub(crate) fn needs_path(&self) -> bool {
        !self.paths.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_kinds_of_patterns_match_what_they_should() {
        let excludes = Excludes::from_setting(None);
        assert!(excludes.unreadable().is_empty());
        assert!(excludes.excludes(b"a/b", b"__pycache__", true));
        assert!(excludes.excludes(b"a", b"x.pyc", false));
        assert!(!excludes.excludes(b"a", b"x.tmp", true), "a glob matches names of files");
        assert!(excludes.excludes(b".cache", b"pip", true));
        assert!(!excludes.excludes(b"a/.cache", b"pip", true), "a path begins at the root");
        assert!(!excludes.excludes(b"", b"pip", true));
        assert!(!excludes.excludes(b"", b".npm", true));
        assert!(excludes.excludes(b"", b"\xff.tmp", false), "names are bytes");
        let one = Excludes::parse("/only");
        assert!(one.excludes(b"", b"only", false));
        assert!(!one.excludes(b"x", b"only", false));
        assert!(!one.excludes(b"", b"y-only", false));
    }

    #[test]
    fn a_path_is_excluded_by_any_directory_above_it() {
        let excludes = Excludes::from_setting(None);
        assert!(excludes.excludes_path(b"a/__pycache__/b/c"));
        assert!(excludes.excludes_path(b".cache/pip/x"));
        assert!(!excludes.excludes_path(b"a/.cache/pip/x"));
        assert!(!excludes.excludes_path(b"x.tmp/y"), "a glob matches names of files");
        assert!(excludes.excludes_path(b"x/y.tmp"));
        assert!(!excludes.excludes_path(b"y"));
    }

    #[test]
    fn a_fingerprint_is_of_what_is_excluded() {
        let of = |text| Excludes::parse(text).fingerprint();
        assert_eq!(of("a,b,*.c"), of("*.c\nb,a,a"));
        assert_ne!(of("a"), of("/a"));
        assert_ne!(of("a"), of("b"));
        assert_ne!(of("a"), Excludes::none().fingerprint());
    }

    #[test]
    fn an_unreadable_pattern_excludes_nothing_and_is_reported() {
        let excludes = Excludes::parse("[a, ../x ,..,ok,a/*.o");
        assert_eq!(excludes.unreadable(), ["[a", "../x", "..", "a/*.o"]);
        assert!(excludes.excludes(b"", b"ok", true));
        assert!(!excludes.excludes(b"", b"a", true));
        assert!(!Excludes::from_setting(Some("none")).excludes(b"", b"x.tmp", false));
    }
}
