//! The cross-check: a scan of the mounted directory, compared with what a tracked secure found.

use covey_types::{BlockHash, RootHash};

use crate::block::BlockStore;
use crate::manifest::{Entry, EntryBody, Meta};
use crate::object::{self, ObjectError};
use crate::path::join;
use crate::secure::{SecureError, SecureReport, SecureRequest, secure};

/// Paths that a check names; the first are enough to look for the reason.
const DIFFERENCES_MAX: usize = 100;

/// What a cross-check found.
#[derive(Debug)]
pub struct CrossCheck {
    /// The scan. Its root is the right one where they differ.
    pub scanned: SecureReport,
    /// Paths that differ, lossily as text, with how; none when the roots are equal.
    pub differences: Vec<String>,
}

/// Scans the mounted directory (`scan.dir`) and compares with the root that [`super::secure_tracked`] came to.
/// Without a stat cache everything is read; nobody may write meanwhile, nor since the tracked secure.
///
/// # Errors
/// When the scan fails, or a differing object cannot be read back.
pub fn cross_check(scan: &SecureRequest<'_>, tracked: RootHash) -> Result<CrossCheck, SecureError> {
    let scanned = secure(scan)?;
    let mut differences = Vec::new();
    if scanned.root != tracked
        && let Err(error) = roots(scan.store, &tracked, &scanned.root, &mut differences)
    {
        match error {
            ObjectError::Store(error) => return Err(error.into()),
            ObjectError::Malformed(error) => differences.push(error.to_string()),
        }
    }
    Ok(CrossCheck { scanned, differences })
}

fn roots(
    store: &dyn BlockStore,
    tracked: &RootHash,
    scanned: &RootHash,
    out: &mut Vec<String>,
) -> Result<(), ObjectError> {
    let (a, b) = (object::read_root(store, tracked)?, object::read_root(store, scanned)?);
    let mut note = |what: &str, a: String, b: String| {
        if a != b {
            out.push(format!("{what}: tracked {a}, scanned {b}"));
        }
    };
    note("metadata of the home", brief(&a.meta), brief(&b.meta));
    note("number of files", a.files.to_string(), b.files.to_string());
    note("bytes of files", a.bytes.to_string(), b.bytes.to_string());
    let (a_links, b_links) = (object::read_links(store, &a)?, object::read_links(store, &b)?);
    let only = |of: &crate::manifest::LinkTable, other: &crate::manifest::LinkTable| {
        let groups = of.groups.iter().filter(|group| !other.groups.contains(group)).take(3);
        let text = |group: &Vec<Vec<u8>>| {
            group.iter().map(|path| path.escape_ascii().to_string()).collect::<Vec<_>>().join(" = ")
        };
        groups.map(text).collect::<Vec<_>>().join("; ")
    };
    note("names of one inode", only(&a_links, &b_links), only(&b_links, &a_links));
    let mut dirs = vec![(Vec::new(), a.listing, b.listing)];
    while let Some((path, a, b)) = dirs.pop() {
        if out.len() >= DIFFERENCES_MAX {
            break;
        }
        listings(store, &path, &a, &b, &mut dirs, out)?;
    }
    Ok(())
}

fn listings(
    store: &dyn BlockStore,
    path: &[u8],
    tracked: &BlockHash,
    scanned: &BlockHash,
    dirs: &mut Vec<(Vec<u8>, BlockHash, BlockHash)>,
    out: &mut Vec<String>,
) -> Result<(), ObjectError> {
    if tracked == scanned {
        return Ok(());
    }
    let (a, b) = (object::read_listing(store, tracked)?, object::read_listing(store, scanned)?);
    let mut names: Vec<&Vec<u8>> = a.entries.iter().chain(&b.entries).map(|(name, _)| name).collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        let (a, b) = (super::lower::find(&a, name), super::lower::find(&b, name));
        if a == b {
            continue;
        }
        let path = join(path, name);
        if let (Some(a), Some(b)) = (a, b)
            && let (EntryBody::Directory { listing: a_list }, EntryBody::Directory { listing: b_list }) =
                (&a.body, &b.body)
        {
            dirs.push((path.clone(), *a_list, *b_list));
            if a.meta == b.meta {
                continue;
            }
        }
        let side = |entry: Option<&Entry>| {
            entry.map_or("nothing".to_owned(), |entry| format!("{} {:?}", brief(&entry.meta), entry.body))
        };
        out.push(format!("`{}`: tracked {}, scanned {}", path.escape_ascii(), side(a), side(b)));
    }
    Ok(())
}

fn brief(meta: &Meta) -> String {
    let mtime = meta.mtime;
    format!("mode {:o} mtime {}.{:09} {:?}", meta.mode, mtime.seconds, mtime.nanoseconds, meta.xattrs)
}
