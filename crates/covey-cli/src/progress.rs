//! A line on the terminal for work that takes long; nothing when stderr is not a terminal.

use std::time::Duration;

use covey_home::Counters;
use covey_types::ByteCount;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Redrawn this often; only so that a person sees that it lives.
const TICK: Duration = Duration::from_millis(120);

/// The message changes after so many files; each change takes a lock.
const FILES_PER_MESSAGE: u64 = 64;

/// Shows `what` until dropped.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    what: String,
    /// What is counted.
    noun: &'static str,
    counters: Counters,
}

impl Progress {
    pub(crate) fn start(what: &str) -> Self {
        Self::start_counting(what, "files")
    }

    pub(crate) fn start_counting(what: &str, noun: &'static str) -> Self {
        // `stderr` hides itself where it is not a terminal.
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
            bar.set_style(style);
        }
        bar.set_message(what.to_owned());
        bar.enable_steady_tick(TICK);
        Self { bar, what: what.to_owned(), noun, counters: Counters::default() }
    }
}

impl Progress {
    /// Shows this instead.
    pub(crate) fn say(&self, what: &str) {
        self.bar.set_message(what.to_owned());
    }
}

impl covey_home::Progress for Progress {
    fn files_done(&self, files: u64) {
        let before = self.counters.files();
        self.counters.files_done(files);
        // Several threads count; only some of them write the message.
        if before / FILES_PER_MESSAGE != (before + files) / FILES_PER_MESSAGE {
            let (files, bytes) = (self.counters.files(), ByteCount(self.counters.bytes()));
            self.bar.set_message(format!("{}: {files} {}, {bytes}", self.what, self.noun));
        }
    }

    fn bytes_done(&self, bytes: u64) {
        self.counters.bytes_done(bytes);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
