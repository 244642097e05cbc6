//! What is shown while it happens: pieces of text and output. Lossy by intention and never in the journal.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use covey_types::{SessionId, StepId};
use tokio::sync::broadcast;

/// Pieces that a slow watcher may lag behind; it then misses some, and the finished event has the whole.
pub const LIVE_DELTAS_MAX: usize = 1024;

/// One piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    /// Text of an answer that is not finished; dropped when the attempt fails.
    Text {
        /// The model step.
        step: StepId,
        /// The piece.
        text: String,
    },
    /// Thinking of an answer that is not finished.
    Thinking {
        /// The model step.
        step: StepId,
        /// The piece.
        text: String,
    },
    /// Output of a running call.
    Output {
        /// The tool step.
        step: StepId,
        /// The piece.
        text: String,
    },
}

/// Who watches which session.
#[derive(Debug, Clone, Default)]
pub struct Live {
    watched: Arc<Mutex<HashMap<SessionId, broadcast::Sender<Delta>>>>,
}

impl Live {
    /// Watches a session from now on.
    pub fn watch(&self, session: SessionId) -> broadcast::Receiver<Delta> {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.retain(|_, sender| sender.receiver_count() > 0);
        watched.entry(session).or_insert_with(|| broadcast::channel(LIVE_DELTAS_MAX).0).subscribe()
    }

    pub(super) fn show(&self, session: SessionId, delta: Delta) {
        let watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = watched.get(&session)
            && sender.send(delta).is_err()
        {
            tracing::trace!("nobody watches any more");
        }
    }
}
