//! `covey home log`, `ls`, `cat`, `diff` and `usage`: looking into snapshots.

use std::io::{self, IsTerminal as _, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use covey_types::ByteCount;
use covey_wire::api::history::GenerationName;
use serde_json::{Value, json};

use super::source::{Compare, Count, Source};
use crate::global::Global;
use crate::output::{self, card, field, one_line, printable};

pub(super) async fn log(global: &Global, source: &Source) -> anyhow::Result<()> {
    let snapshots = source.log().await?;
    output::value(global.json, &json!({ "data": snapshots }), |_| {
        let rows: Vec<_> = snapshots.iter().map(log_row).collect();
        output::table(["GENERATION", "FILES", "BYTES", "PUBLISHED", "ORIGIN", "KEPT BY", "ROOT"], &rows)
    })?;
    Ok(())
}

fn log_row(snapshot: &Value) -> [String; 7] {
    let origin = match (&snapshot["from_home_id"], &snapshot["from_generation"]) {
        (Value::String(home), from) if from.is_u64() => {
            format!("{} {from} of {home}", field(snapshot, "/origin"))
        }
        (_, from) if from.is_u64() => format!("{} {from}", field(snapshot, "/origin")),
        _ => field(snapshot, "/origin"),
    };
    [
        field(snapshot, "/generation"),
        field(snapshot, "/files"),
        bytes(snapshot, "/bytes"),
        field(snapshot, "/published_at"),
        origin,
        field(snapshot, "/kept_by"),
        field(snapshot, "/root"),
    ]
}

fn bytes(value: &Value, pointer: &str) -> String {
    value
        .pointer(pointer)
        .and_then(Value::as_u64)
        .map_or_else(|| "-".to_owned(), |n| ByteCount(n).to_string())
}

pub(super) async fn ls(
    global: &Global,
    source: &Source,
    generation: GenerationName,
    path: &Path,
    recursive: bool,
) -> anyhow::Result<()> {
    let mut all: Option<Value> = None;
    let path = path.as_os_str().as_bytes();
    source
        .tree(generation, path, recursive, &mut |page| {
            if global.json {
                return gather(&mut all, page);
            }
            // Of what is no directory, the one name that it is.
            let single = [page["entry"].clone()];
            let is_single = page["entry"]["kind"] != "directory";
            let names =
                if is_single { &single[..] } else { page["data"].as_array().map_or(&[][..], Vec::as_slice) };
            let text: String = names.iter().map(ls_line).collect();
            io::stdout().lock().write_all(text.as_bytes())?;
            Ok(())
        })
        .await?;
    if let Some(all) = all {
        output::line(&all.to_string())?;
    }
    Ok(())
}

/// Adds a page to those before it: one answer, as if there were no pages.
fn gather(all: &mut Option<Value>, mut page: Value) -> anyhow::Result<()> {
    match all {
        None => {
            page["next_page"] = Value::Null;
            *all = Some(page);
        }
        Some(all) => {
            if let (Some(all), Value::Array(more)) = (all["data"].as_array_mut(), page["data"].take()) {
                all.extend(more);
            }
        }
    }
    Ok(())
}

fn ls_line(entry: &Value) -> String {
    let kind = match entry["kind"].as_str() {
        Some("file") => '-',
        Some("directory") => 'd',
        Some("symlink") => 'l',
        Some("fifo") => 'p',
        Some("socket") => 's',
        Some("character_device") => 'c',
        Some("block_device") => 'b',
        _ => '?',
    };
    let size = entry["device"].as_str().map_or_else(|| field(entry, "/size"), str::to_owned);
    let time = field(entry, "/modified_at");
    let time = time.get(..19).unwrap_or(&time);
    let mut name = one_line(&field(entry, "/path"));
    if let Some(target) = entry["target"].as_str() {
        name = format!("{name} -> {}", one_line(target));
    }
    format!("{kind}{} {size:>12} {time} {name}\n", field(entry, "/mode"))
}

pub(super) async fn cat(source: &Source, generation: GenerationName, path: &Path) -> anyhow::Result<()> {
    let stdout = io::stdout();
    let path = path.as_os_str().as_bytes();
    if stdout.is_terminal() {
        // Also a picture, or a file that an agent has prepared for whoever looks at it.
        source.cat(generation, path, &mut Printable(stdout.lock())).await
    } else {
        let mut out = stdout.lock();
        source.cat(generation, path, &mut out).await?;
        Ok(out.flush()?)
    }
}

/// Lets through what cannot steer a terminal.
struct Printable<W>(W);

impl<W: Write> Write for Printable<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write_all(printable(&String::from_utf8_lossy(bytes)).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

pub(super) async fn diff(global: &Global, source: &Source, compare: &Compare) -> anyhow::Result<()> {
    let mut all: Option<Value> = None;
    source
        .diff(compare, &mut |page| {
            if global.json {
                return gather(&mut all, page);
            }
            let changes = page["data"].as_array().map_or(&[][..], Vec::as_slice);
            let text: String = changes.iter().map(diff_lines).collect();
            io::stdout().lock().write_all(text.as_bytes())?;
            Ok(())
        })
        .await?;
    if let Some(all) = all {
        output::line(&all.to_string())?;
    }
    Ok(())
}

/// `A` added, `D` removed, `M` modified, `m` only its mode, time or attributes.
fn diff_lines(change: &Value) -> String {
    let letter = match change["change"].as_str() {
        Some("added") => 'A',
        Some("removed") => 'D',
        Some("modified") => 'M',
        Some("metadata") => 'm',
        _ => '?',
    };
    let path = one_line(&field(change, "/path"));
    let path = if path.is_empty() { "." } else { &path };
    let why = change["without_text"]
        .as_str()
        .map_or_else(String::new, |why| format!(" ({})", why.replace('_', " ")));
    let text = change["text"].as_str().map_or_else(String::new, |text| {
        let text = printable(text);
        if text.is_empty() || text.ends_with('\n') { text } else { text + "\n" }
    });
    format!("{letter} {path}{why}\n{text}")
}

pub(super) async fn usage(global: &Global, source: &Source, count: &Count) -> anyhow::Result<()> {
    let usage = source.usage(count).await?;
    output::value(global.json, &usage, |usage| {
        let mut pairs = vec![
            ("generation", field(usage, "/generation")),
            ("entries", field(usage, "/entries")),
            ("files", format!("{}, {}", field(usage, "/files"), bytes(usage, "/bytes"))),
            ("directories", field(usage, "/directories")),
            ("snapshots kept", field(usage, "/snapshots")),
        ];
        if usage["exclusive_bytes"].is_u64() {
            pairs.push(("stored, of no other home", bytes(usage, "/exclusive_bytes")));
            pairs.push(("stored, of others as well", bytes(usage, "/shared_bytes")));
        }
        let mut text = card(&pairs);
        for (heading, name) in [("DIRECTORY", "largest_directories"), ("FILE", "largest_files")] {
            let parts = usage[name].as_array().map_or(&[][..], Vec::as_slice);
            let rows: Vec<_> = parts
                .iter()
                .map(|part| [bytes(part, "/bytes"), field(part, "/entries"), field(part, "/path")])
                .collect();
            if !rows.is_empty() {
                text.push('\n');
                text.push_str(&output::table(["BYTES", "NAMES", heading], &rows));
            }
        }
        text
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_an_agent_cannot_steer_the_terminal() {
        let entry = json!({"kind": "symlink", "mode": "0777", "path": "a\u{1b}[2J\nb", "target": "\u{7}",
            "modified_at": "2026-01-01T00:00:00.000000000Z"});
        let line = ls_line(&entry);
        assert!(
            !line.contains('\u{1b}') && !line.contains('\u{7}') && line.matches('\n').count() == 1,
            "{line}"
        );
        let mut shown = Printable(Vec::new());
        shown.write_all(b"a\x1b[2Jb\tc\nd").unwrap();
        assert_eq!(shown.0, "a\u{fffd}[2Jb\tc\nd".as_bytes());
        let change = json!({"change": "modified", "path": "x", "text": "-a\u{1b}\n+b"});
        assert_eq!(diff_lines(&change), "M x\n-a\u{fffd}\n+b\n");
    }
}
