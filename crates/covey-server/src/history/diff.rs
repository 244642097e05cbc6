//! What differs between two snapshots: paths, and texts line by line.

use std::io::Read as _;
use std::ops::ControlFlow;
use std::time::Duration;

use covey_home::manifest::{Entry, EntryBody};
use covey_home::view::{self, Change as Found, ChangeKind, Snapshot, ViewError, is_behind};
use covey_home::{BlockStore, StoreError};
use covey_wire::api::history::{Change, DIFF_FILE_BYTES_MAX, DIFF_TEXT_BYTES_MAX, Diff};
use similar::TextDiff;

use super::tree::shown;
use super::{At, PathCursor, PathText};

/// After this long the comparison of two texts becomes coarser: still right, but not the shortest.
const TEXT_TIME_MAX: Duration = Duration::from_millis(300);
/// Unchanged lines that are shown around what differs.
const CONTEXT_LINES: usize = 3;

/// Which differences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiffRequest<'a> {
    /// At and below this path only.
    pub path: &'a [u8],
    /// Texts line by line as well.
    pub texts: bool,
    /// Only those behind this one.
    pub after: Option<&'a PathCursor>,
    /// So many.
    pub limit: usize,
}

/// Compares two snapshots; `from` none is the empty home before the first.
///
/// # Errors
/// [`ViewError`]: also when a text that differs cannot be read.
pub fn diff(
    store: &dyn BlockStore,
    from: Option<&At>,
    to: &At,
    request: &DiffRequest<'_>,
) -> Result<Diff, ViewError> {
    let top = view::components(request.path)?.join(&b'/');
    let mut comparison = Comparison {
        old: from.map(|from| Snapshot::open(store, &from.root)).transpose()?,
        new: Snapshot::open(store, &to.root)?,
        texts: request.texts,
        text_bytes_left: DIFF_TEXT_BYTES_MAX,
    };
    let (mut data, mut last, mut more, mut failed) = (Vec::new(), None, false, None);
    let mut each = |change: Found| {
        let is_inside = top.is_empty()
            || change
                .path
                .strip_prefix(top.as_slice())
                .is_some_and(|rest| rest.is_empty() || rest[0] == b'/');
        let is_passed = request.after.is_some_and(|after| !is_behind(&change.path, &after.0));
        if !is_inside || is_passed {
            return ControlFlow::Continue(());
        }
        if data.len() >= request.limit {
            more = true;
            return ControlFlow::Break(());
        }
        match comparison.change(&change) {
            Ok(change) => data.push(change),
            Err(error) => {
                failed = Some(error);
                return ControlFlow::Break(());
            }
        }
        last = Some(change.path);
        ControlFlow::Continue(())
    };
    match from {
        Some(from) => view::diff(store, &from.root, &to.root, &mut each)?,
        None => view::diff_from_nothing(store, &to.root, &mut each)?,
    }
    if let Some(error) = failed {
        return Err(error);
    }
    let next_page = last.filter(|_| more).map(|path| PathCursor(path).to_string());
    Ok(Diff { from: from.map(At::name), to: to.name(), data, next_page })
}

struct Comparison<'a> {
    old: Option<Snapshot<'a>>,
    new: Snapshot<'a>,
    texts: bool,
    text_bytes_left: usize,
}

/// What of a path can be compared line by line.
enum Text {
    /// This.
    Lines(String),
    /// It is no regular file, so it has no lines on this side.
    Nothing,
    /// Not UTF-8, or with NUL in it.
    Binary,
    /// Beyond [`DIFF_FILE_BYTES_MAX`].
    Large,
}

impl Comparison<'_> {
    fn change(&mut self, found: &Found) -> Result<Change, ViewError> {
        let path = PathText::of(&found.path);
        let mut change = Change {
            path: path.text,
            path_base64: path.base64,
            change: match found.kind {
                ChangeKind::Added => "added",
                ChangeKind::Removed => "removed",
                ChangeKind::Modified => "modified",
                ChangeKind::Metadata => "metadata",
            }
            .to_owned(),
            old: found.old.as_ref().map(|entry| shown(&found.path, entry)),
            new: found.new.as_ref().map(|entry| shown(&found.path, entry)),
            text: None,
            without_text: None,
        };
        if self.texts && found.kind != ChangeKind::Metadata {
            match self.text(found)? {
                Some(Ok(text)) => change.text = Some(text),
                Some(Err(why)) => change.without_text = Some(why.to_owned()),
                None => {}
            }
        }
        Ok(change)
    }

    /// None when neither side is a regular file.
    fn text(&mut self, found: &Found) -> Result<Option<Result<String, &'static str>>, ViewError> {
        let old = side(self.old.as_ref(), &found.path, found.old.as_ref())?;
        let new = side(Some(&self.new), &found.path, found.new.as_ref())?;
        let (old, new) = match (old, new) {
            (Text::Nothing, Text::Nothing) => return Ok(None),
            (Text::Large, _) | (_, Text::Large) => return Ok(Some(Err("large"))),
            (Text::Binary, _) | (_, Text::Binary) => return Ok(Some(Err("binary"))),
            (old, new) => (lines(old), lines(new)),
        };
        // Two texts of one megabyte differ by two at most, so the answer stays near its limit.
        if self.text_bytes_left == 0 {
            return Ok(Some(Err("answer_full")));
        }
        let shown = PathText::of(&found.path).text;
        let header = |side: &str, is_there: bool| match is_there {
            true => format!("{side}/{shown}"),
            false => "/dev/null".to_owned(),
        };
        let difference = TextDiff::configure().timeout(TEXT_TIME_MAX).diff_lines(&old, &new);
        let text = difference
            .unified_diff()
            .context_radius(CONTEXT_LINES)
            .header(&header("a", found.old.is_some()), &header("b", found.new.is_some()))
            .to_string();
        self.text_bytes_left = self.text_bytes_left.saturating_sub(text.len());
        Ok(Some(Ok(text)))
    }
}

fn lines(text: Text) -> String {
    match text {
        Text::Lines(text) => text,
        Text::Nothing | Text::Binary | Text::Large => String::new(),
    }
}

fn side(snapshot: Option<&Snapshot<'_>>, path: &[u8], entry: Option<&Entry>) -> Result<Text, ViewError> {
    let (Some(snapshot), Some(Entry { body: EntryBody::File(content), .. })) = (snapshot, entry) else {
        return Ok(Text::Nothing);
    };
    if content.size() > DIFF_FILE_BYTES_MAX {
        return Ok(Text::Large);
    }
    let mut bytes = Vec::new();
    if let Err(error) = snapshot.read(path)?.read_to_end(&mut bytes) {
        let what = format!("`{}`", String::from_utf8_lossy(path));
        // The reader has the store's own words for what is the matter.
        let source = error
            .downcast::<StoreError>()
            .unwrap_or_else(|error| StoreError::Damaged { what, detail: error.to_string() });
        return Err(ViewError::Object {
            path: String::from_utf8_lossy(path).into_owned(),
            source: source.into(),
        });
    }
    match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(Text::Lines(text)),
        _ => Ok(Text::Binary),
    }
}
