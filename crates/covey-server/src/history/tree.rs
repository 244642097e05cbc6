//! The names in a directory of a snapshot.

use std::ops::ControlFlow;

use covey_home::BlockStore;
use covey_home::manifest::{DeviceNumber, Entry, EntryBody, Time};
use covey_home::view::{Snapshot, ViewError, WalkOptions};
use covey_types::Timestamp;
use covey_wire::api::history::{Tree, TreeEntry};

use super::{At, PathCursor, PathText};

/// Which names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeRequest<'a> {
    /// Whose; from the home's root.
    pub path: &'a [u8],
    /// Those in directories below as well.
    pub recursive: bool,
    /// Only those behind this one.
    pub after: Option<&'a PathCursor>,
    /// So many.
    pub limit: usize,
}

/// Lists a directory; of anything else, only what it is itself.
///
/// # Errors
/// [`ViewError`].
pub fn tree(store: &dyn BlockStore, at: &At, request: &TreeRequest<'_>) -> Result<Tree, ViewError> {
    let snapshot = Snapshot::open(store, &at.root)?;
    let found = snapshot.find(request.path)?;
    let path = covey_home::view::components(request.path)?.join(&b'/');
    let entry = shown(&path, &found);
    let (mut data, mut last, mut more) = (Vec::new(), None, false);
    if matches!(found.body, EntryBody::Directory { .. }) {
        let after = request.after.map(|cursor| cursor.0.as_slice());
        let options = WalkOptions { after, recursive: request.recursive };
        snapshot.walk(&path, &options, &mut |path, entry| {
            more = data.len() >= request.limit;
            if more {
                return ControlFlow::Break(());
            }
            data.push(shown(path, entry));
            last = Some(path.to_vec());
            ControlFlow::Continue(())
        })?;
    }
    let next_page = last.filter(|_| more).map(|path| PathCursor(path).to_string());
    Ok(Tree { snapshot: at.name(), entry, data, next_page })
}

/// A name as answers show it.
pub(super) fn shown(path: &[u8], entry: &Entry) -> TreeEntry {
    let text = PathText::of(path);
    let number = |number: &DeviceNumber| Some(format!("{}:{}", number.major, number.minor));
    let (kind, size, target, device) = match &entry.body {
        EntryBody::File(content) => ("file", Some(content.size()), None, None),
        EntryBody::Directory { .. } => ("directory", None, None, None),
        EntryBody::Symlink { target } => {
            ("symlink", None, Some(String::from_utf8_lossy(target).into_owned()), None)
        }
        EntryBody::Fifo => ("fifo", None, None, None),
        EntryBody::Socket => ("socket", None, None, None),
        EntryBody::CharacterDevice(device) => ("character_device", None, None, number(device)),
        EntryBody::BlockDevice(device) => ("block_device", None, None, number(device)),
    };
    TreeEntry {
        path: text.text,
        path_base64: text.base64,
        kind: kind.to_owned(),
        mode: format!("{:04o}", entry.meta.mode),
        modified_at: time(entry.meta.mtime),
        size,
        target,
        device,
    }
}

/// RFC 3339 with nanoseconds.
fn time(time: Time) -> String {
    let whole = Timestamp::from_unix_ms(time.seconds.saturating_mul(1000)).to_string();
    let seconds = whole.split_once('.').map_or(whole.as_str(), |(seconds, _)| seconds);
    format!("{seconds}.{:09}Z", time.nanoseconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_keep_their_nanoseconds_also_before_1970() {
        let shown = |seconds, nanoseconds| time(Time { seconds, nanoseconds });
        assert_eq!(shown(951_782_400, 5), "2000-02-29T00:00:00.000000005Z");
        assert_eq!(shown(-1, 999_999_999), "1969-12-31T23:59:59.999999999Z");
        assert!(shown(i64::MAX, 0).ends_with(".000000000Z"));
    }
}
