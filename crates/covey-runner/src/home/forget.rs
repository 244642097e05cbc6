//! Giving up a home that was deleted: its sandbox, its working copy, what was set aside.
//!
//! What stays true: only the server's word that the home was deleted leads here, and never that it does not know one: a
//! database that was put back from a backup knows less than its runners have.

use std::sync::Arc;

use covey_types::SandboxState;

use super::Home;
use crate::link::blocking;

impl Home {
    /// Removes everything of the home from this host. May come again: then there is nothing left.
    pub(super) async fn forget(&mut self) {
        self.drop_secure();
        self.destroy().await;
        if let Some(live) = self.live.take() {
            self.report_state(live.sandbox.id(), SandboxState::Gone, "the home was deleted").await;
        }
        // A dropped secure may still read, and would write its stat cache anew.
        if let Some(task) = self.last_task.take()
            && let Err(error) = task.await
        {
            tracing::error!(%error, "an earlier secure panicked");
        }
        (self.lease, self.mark, self.offered, self.secure_again) = (None, None, None, None);
        self.secure_after_answer = false;
        self.results.clear();
        self.waiting.clear();
        self.running.clear();
        self.asked.clear();
        let (runner, dir) = (Arc::clone(&self.runner), self.dir.clone());
        let removed = blocking(move || {
            {
                let _copies = runner.lock_copies();
                dir.give_up()?;
            }
            crate::evict::delete_evicted(&runner.homes_dir())
        });
        match removed.await.and_then(|removed| removed) {
            Ok(()) => tracing::info!(home = %self.home, "the home was deleted; its working copy is removed"),
            Err(error) => {
                tracing::warn!(home = %self.home, %error, "the working copy of a deleted home cannot be removed; it is tried again when the link is up again");
            }
        }
    }
}
