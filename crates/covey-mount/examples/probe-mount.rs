//! Says in one JSON object whether this host can mount homes below a directory (default: the directory for
//! temporary files), for programs that decide by it: `{"ok":…,"missing":…,"remedy":…}`.

use std::path::PathBuf;

fn main() {
    let dir = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let report = match covey_mount::probe(&dir) {
        Ok(()) => serde_json::json!({"ok": true}),
        Err(error) => serde_json::json!({"ok": false, "missing": error.missing, "remedy": error.remedy}),
    };
    println!("{report}");
}
