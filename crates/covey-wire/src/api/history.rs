//! Looking into a home's snapshots, comparing them, what they take, and the rules by which they are kept.
//!
//! A path is any bytes, JSON text is not: `path` shows it, and where it is not UTF-8, `path_base64` (URL-safe, without
//! padding) has its bytes. Wherever a request takes `path`, it takes `path_base64` instead.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Bytes of a file that is compared line by line; larger ones are only said to differ.
pub const DIFF_FILE_BYTES_MAX: u64 = 1024 * 1024;
/// Bytes of line-by-line differences in one answer; what comes behind is only said to differ.
pub const DIFF_TEXT_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Largest parts that a usage names at most.
pub const USAGE_PARTS_MAX: usize = 500;
/// Largest parts that a usage names when nothing is said.
pub const USAGE_PARTS_DEFAULT: usize = 20;
/// Directories so far down are told of at most in a usage.
pub const USAGE_DEPTH_MAX: usize = 64;

/// Which snapshot of a home is meant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum GenerationName {
    /// The current one: `current`.
    #[default]
    Current,
    /// The one with this number: `7`.
    Number(u64),
    /// So many kept ones before the current one: `-1`.
    Before(u64),
}

/// A text that names no generation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` names no generation; give its number, `current`, or `-1` for the one before the current one")]
pub struct InvalidGenerationName(String);

impl FromStr for GenerationName {
    type Err = InvalidGenerationName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || InvalidGenerationName(text.chars().take(40).collect());
        // `+7` is a number to the standard library and none to us.
        let number = |digits: &str| match digits.bytes().all(|byte| byte.is_ascii_digit()) {
            true => digits.parse().map_err(|_| bad()),
            false => Err(bad()),
        };
        match text.strip_prefix('-') {
            _ if text == "current" => Ok(Self::Current),
            Some(before) => match number(before)? {
                0 => Err(bad()),
                before => Ok(Self::Before(before)),
            },
            None => Ok(Self::Number(number(text)?)),
        }
    }
}

impl fmt::Display for GenerationName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Current => f.write_str("current"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Before(before) => write!(f, "-{before}"),
        }
    }
}

/// A snapshot that an answer is about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotName {
    /// Number within the home.
    pub generation: u64,
    /// Root hash.
    pub root: String,
}

/// A name in a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeEntry {
    /// From the home's root; bytes that are not UTF-8 are replaced.
    pub path: String,
    /// The path's bytes, where they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_base64: Option<String>,
    /// `file`, `directory`, `symlink`, `fifo`, `socket`, `character_device` or `block_device`.
    pub kind: String,
    /// Permission bits in octal, four digits.
    pub mode: String,
    /// Last modification, RFC 3339 with nanoseconds.
    pub modified_at: String,
    /// Bytes of a regular file, holes included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Where a symbolic link points to; bytes that are not UTF-8 are replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Number of a device node, `major:minor`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

/// Answer to `GET /v1/covey/homes/{id}/tree`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tree {
    /// Which snapshot was looked into.
    #[serde(flatten)]
    pub snapshot: SnapshotName,
    /// What the path names: the directory whose names follow, or the one name that it is.
    pub entry: TreeEntry,
    /// What is in it: a directory before what is in that, names by their bytes.
    pub data: Vec<TreeEntry>,
    /// What to send as `page` for the next page; none on the last one.
    pub next_page: Option<String>,
}

/// A path that differs between two snapshots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// From the home's root, empty for the home's own directory; bytes that are not UTF-8 are replaced.
    pub path: String,
    /// The path's bytes, where they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_base64: Option<String>,
    /// `added`, `removed`, `modified` (content, link target or kind) or `metadata` (mode, time or attributes).
    pub change: String,
    /// As it was.
    pub old: Option<TreeEntry>,
    /// As it is.
    pub new: Option<TreeEntry>,
    /// When texts were asked for and this is one: the difference line by line, unified with three lines of context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// When texts were asked for and this has none: why: `binary`, `large`, or `answer_full`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub without_text: Option<String>,
}

/// Answer to `GET /v1/covey/homes/{id}/diff`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diff {
    /// The older state; none for the empty home before the first snapshot.
    pub from: Option<SnapshotName>,
    /// The newer one.
    pub to: SnapshotName,
    /// In the order of a tree.
    pub data: Vec<Change>,
    /// What to send as `page` for the next page; none on the last one.
    pub next_page: Option<String>,
}

/// A path and what it holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsagePart {
    /// From the home's root; bytes that are not UTF-8 are replaced.
    pub path: String,
    /// The path's bytes, where they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_base64: Option<String>,
    /// Sum of the sizes of the files at and below it.
    pub bytes: u64,
    /// Names at and below it.
    pub entries: u64,
}

/// Answer to `GET /v1/covey/homes/{id}/usage`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Which snapshot was counted.
    #[serde(flatten)]
    pub snapshot: SnapshotName,
    /// The directory that was counted.
    pub path: String,
    /// Names below it.
    pub entries: u64,
    /// Regular files among them, each name counted.
    pub files: u64,
    /// Directories among them.
    pub directories: u64,
    /// Sum of the files' sizes, holes included.
    pub bytes: u64,
    /// Largest first.
    pub largest_directories: Vec<UsagePart>,
    /// Largest first.
    pub largest_files: Vec<UsagePart>,
    /// Snapshots of the home that are kept.
    pub snapshots: u64,
    /// When it was asked for: stored bytes of all these snapshots that no other home needs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exclusive_bytes: Option<u64>,
    /// When it was asked for: stored bytes of all these snapshots that other homes need as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_bytes: Option<u64>,
}

/// Which snapshots are kept and how large a home may be. A rule that is none is the org's, and without one there, the
/// default: no limit, and of earlier snapshots only those that sessions began from or left.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HomeRules {
    /// So many of the newest snapshots are kept.
    pub keep_newest: Option<u64>,
    /// Snapshots that were published within so many seconds are kept.
    pub keep_for_s: Option<u64>,
    /// Bytes of the files in a home.
    pub bytes_max: Option<u64>,
    /// Regular files in a home, each name counted.
    pub files_max: Option<u64>,
}

/// Answer to `GET` and `PUT /v1/covey/homes/{id}/rules`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HomeRulesShown {
    /// What was set for this home.
    #[serde(flatten)]
    pub own: HomeRules,
    /// What holds, with the org's rules filled in.
    pub effective: HomeRules,
}

/// Answer to `GET` and `PUT /v1/covey/rules`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrgRules {
    /// What holds for homes that have no rule of their own.
    #[serde(flatten)]
    pub homes: HomeRules,
    /// Bytes of the files in all homes of the org together, by their current snapshots.
    pub org_bytes_max: Option<u64>,
    /// What they are now.
    pub org_bytes: u64,
}

/// Answer to `PUT /v1/covey/homes/{id}/archive`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArchiveImported {
    /// The new snapshot.
    #[serde(flatten)]
    pub home: super::HomeImported,
    /// Names in the archive.
    pub entries: u64,
    /// Names in it that a home does not keep.
    pub skipped: u64,
    /// The first of them.
    pub skipped_paths: Vec<String>,
}

/// Why what an agent did last is not in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unsecured {
    /// RFC 3339.
    pub since: String,
    /// For people: what is in the way, and what to do.
    pub reason: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generation_is_named_in_three_ways_and_in_no_other() {
        for (text, name) in [
            ("current", GenerationName::Current),
            ("0", GenerationName::Number(0)),
            ("17", GenerationName::Number(17)),
            ("-1", GenerationName::Before(1)),
        ] {
            assert_eq!(text.parse(), Ok(name));
            assert_eq!(name.to_string(), text);
        }
        for bad in ["", "-", "-0", "+1", "1.5", "Current", "99999999999999999999999", " 1", "--1"] {
            assert!(bad.parse::<GenerationName>().is_err(), "{bad}");
        }
    }
}
