//! Securing the home at step borders.
//!
//! The race: a call may arrive while a secure still reads. Then the sandbox thaws at once and the attempt is
//! dropped as a whole, because a snapshot is one moment (I12); its blocks are garbage, and whatever it reports
//! later is ignored by its attempt number. A fast model could starve the store that way, so an attempt that
//! follows [`DROPPED_IN_A_ROW_MAX`] dropped ones is waited for.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use covey_home::{NoProgress, SecureError, SecureReport, SecureRequest};
use covey_types::{ByteCount, Fault, FencingToken, SandboxState, SnapshotKind, StepId};
use covey_wire::runner::{PublishOutcome, RunnerToServer};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::{Home, HomeEvent};
use crate::mark::{Offer, Settled};

/// Secures that may be dropped for arriving calls before one must be let finish.
const DROPPED_IN_A_ROW_MAX: u32 = 2;

/// So often in a row a secure begins again at once because a collection has passed; then it waits like one that failed.
const COLLECTED_IN_A_ROW_MAX: u32 = 3;

/// The pause before a failed secure is tried again although no step ends; it doubles with each failure.
const SECURE_AGAIN_PAUSE: Duration = Duration::from_secs(5);
const SECURE_AGAIN_PAUSE_MAX: Duration = Duration::from_secs(300);

/// A secure that is under way.
#[derive(Debug)]
pub(super) struct Securing {
    attempt: u64,
    cancel: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

/// How a secure ended.
#[derive(Debug)]
pub(crate) struct SecureEnd {
    attempt: u64,
    kind: SnapshotKind,
    step: Option<StepId>,
    result: Result<SecureReport, SecureError>,
}

impl Home {
    /// Whether a call that arrives now has to wait for the secure under way.
    pub(super) fn must_wait_for_secure(&self) -> bool {
        self.securing.is_some() && self.dropped_in_a_row >= DROPPED_IN_A_ROW_MAX
    }

    /// Gives up the secure under way, if there is one.
    pub(super) fn drop_secure(&mut self) {
        if let Some(securing) = self.securing.take() {
            securing.cancel.store(true, Ordering::Relaxed);
            self.dropped_in_a_row += 1;
            self.last_task = Some(securing.task);
        }
    }

    pub(super) async fn secure_on_demand(&mut self, token: FencingToken) {
        if self.lease.is_some_and(|lease| token >= lease.token) && self.securing.is_none() {
            self.begin_secure().await;
        }
    }

    /// Starts to secure, unless a call runs (its end starts one) or nobody may publish.
    pub(super) async fn begin_secure(&mut self) {
        if !self.running.is_empty() || !self.asked.is_empty() {
            return;
        }
        // One offer at a time: the mark can name only one root whose answer may have been lost.
        if self.offered.is_some() {
            self.secure_after_answer = true;
            return;
        }
        let (Some(lease), Some(mark)) = (self.lease, self.mark.clone()) else { return };
        let store = match self.runner.store(lease.org) {
            Ok(Some(store)) => store,
            Ok(None) => return,
            Err(error) => return self.secure_failed(Fault::Retry, error.to_string()).await,
        };
        match self.unsettle() {
            Ok(true) => {}
            // It was evicted: whatever it held is published.
            Ok(false) => return,
            Err(error) => {
                let detail = format!("cannot write the mark in {}: {error}", self.dir.path().display());
                return self.secure_failed(Fault::Retry, detail).await;
            }
        }
        let kind = if self.live.is_some() { SnapshotKind::Frozen } else { SnapshotKind::Quiesced };
        if let Err(error) = self.freeze().await {
            let detail = format!("the sandbox does not freeze: {error}");
            return self.secure_failed(Fault::Retry, detail).await;
        }
        self.drop_secure();
        self.attempt += 1;
        let (attempt, step) = (self.attempt, mark.step);
        let cancel = Arc::new(AtomicBool::new(false));
        let (files, stat_cache) = (self.dir.files(), self.dir.stat_cache());
        let excludes = self.runner.config.excludes.clone();
        let (queue, flag, earlier) = (self.queue.clone(), Arc::clone(&cancel), self.last_task.take());
        let task = tokio::spawn(async move {
            // A dropped attempt may still be reading: two must not write one stat cache.
            if let Some(earlier) = earlier
                && let Err(error) = earlier.await
            {
                tracing::error!(%error, "an earlier secure panicked");
            }
            let secured = tokio::task::spawn_blocking(move || {
                covey_home::secure(&SecureRequest {
                    dir: &files,
                    store: store.as_ref(),
                    stat_cache: Some(&stat_cache),
                    excludes: &excludes,
                    previous: mark.root,
                    cancel: &flag,
                    progress: &NoProgress,
                    threads: 0,
                })
            })
            .await;
            match secured {
                Ok(result) => {
                    let end = SecureEnd { attempt, kind, step, result };
                    if queue.send(HomeEvent::Secured(end)).await.is_err() {
                        tracing::debug!("the runner is shutting down");
                    }
                }
                Err(error) => tracing::error!(%error, "a secure panicked"),
            }
        });
        self.securing = Some(Securing { attempt, cancel, task });
    }

    /// Keeps the copy from being evicted while it is read: what is missing then would be secured as deleted. False:
    /// it has been evicted already.
    fn unsettle(&mut self) -> io::Result<bool> {
        let Some(mark) = self.mark.as_mut().filter(|mark| mark.settled.is_some()) else { return Ok(true) };
        let _copies = self.runner.lock_copies();
        if !self.dir.files().try_exists()? {
            return Ok(false);
        }
        mark.settled = None;
        self.dir.write_mark(mark)?;
        Ok(true)
    }

    pub(super) async fn secured(&mut self, end: SecureEnd) {
        if self.securing.take_if(|securing| securing.attempt == end.attempt).is_none() {
            return;
        }
        match end.result {
            // What could not be read stands as it was before: such a state never replaces a whole one.
            Ok(report) if report.partial => {
                let detail =
                    report.warnings.first().cloned().unwrap_or_else(|| "not all could be read".into());
                self.secure_failed(Fault::Retry, detail).await;
            }
            Ok(report) => {
                self.dropped_in_a_row = 0;
                // The answer decides: a refusal makes the next pause longer, whatever the secure itself did.
                if let Some((at, _)) = &mut self.secure_again {
                    *at = Instant::now() + SECURE_AGAIN_PAUSE_MAX;
                }
                self.offer(report, end.kind, end.step).await;
            }
            Err(error) => self.secure_failed(error.fault(), error.to_string()).await,
        }
        if self.waiting.is_empty() {
            if self.live.as_ref().is_some_and(|live| live.keep_running)
                && let Err(error) = self.thaw().await
            {
                tracing::error!(home = %self.home, %error, "the sandbox does not thaw");
            }
        } else {
            self.hand_over_waiting().await;
        }
    }

    async fn offer(&mut self, report: SecureReport, kind: SnapshotKind, step: Option<StepId>) {
        let (Some(lease), Some(mark)) = (self.lease, &mut self.mark) else { return };
        // Recorded first: if the answer is lost, the copy is still known to be what the server then has.
        mark.offered = Some(Offer { root: report.root });
        let base = mark.generation;
        if let Err(error) = self.dir.write_mark(mark) {
            let detail = format!("cannot write the mark in {}: {error}", self.dir.path().display());
            return self.secure_failed(Fault::Retry, detail).await;
        }
        let publish = RunnerToServer::Publish {
            home: self.home,
            token: lease.token,
            base,
            root: report.root,
            kind,
            step,
            files: report.files,
            bytes: ByteCount(report.bytes),
            stored_bytes_new: ByteCount(report.stored_bytes_new),
            elapsed_ms: report.elapsed_ms,
            epoch: report.epoch,
        };
        self.offered = Some(publish.clone());
        self.send(publish).await;
    }

    pub(super) async fn publish_answered(&mut self, root: covey_types::RootHash, outcome: PublishOutcome) {
        let answers_offer =
            matches!(&self.offered, Some(RunnerToServer::Publish { root: offered, .. }) if *offered == root);
        if !answers_offer {
            return;
        }
        let bytes = match self.offered.take() {
            Some(RunnerToServer::Publish { bytes, .. }) => Some(bytes.0),
            _ => None,
        };
        match outcome {
            PublishOutcome::Published { generation } => {
                self.secure_again = None;
                self.collected_in_a_row = 0;
                let rests = self.live.is_none() && self.securing.is_none() && !self.secure_after_answer;
                if let Some(mark) = &mut self.mark {
                    mark.generation = generation;
                    mark.root = Some(root);
                    mark.offered = None;
                    mark.settled = bytes.filter(|_| rests).map(|bytes| Settled { bytes });
                    if let Err(error) = self.dir.write_mark(mark) {
                        // The old mark names this root as offered, which is as good.
                        tracing::warn!(home = %self.home, %error, "cannot write the mark");
                    }
                }
            }
            PublishOutcome::Refused { reason } => {
                // Somebody else has the home, or it moved on: nothing of ours may be laid over it. The copy
                // stays and is set aside by the next wake, whose generation it does not carry.
                tracing::warn!(home = %self.home, reason, "the server refuses the snapshot");
                self.secure_again = None;
                self.destroy().await;
            }
            PublishOutcome::OverQuota { reason } => {
                // The server has told the session. The copy stays as it is; what is deleted from it, or a raised limit,
                // lets a later attempt through.
                self.secure_later(&reason);
            }
            PublishOutcome::Collected { floor } => {
                // What the offer relied on may be gone; this time it is uploaded. The stat cache saves the reading.
                tracing::info!(home = %self.home, floor, "a garbage collection passed; the home is secured again");
                self.collected_in_a_row += 1;
                if self.collected_in_a_row <= COLLECTED_IN_A_ROW_MAX {
                    self.secure_after_answer = true;
                } else {
                    let why = "garbage collections pass faster than the home is secured, or the store is another one \
                               than the server's";
                    self.secure_later(why);
                    let (home, fault) = (self.home, Fault::Retry);
                    self.send(RunnerToServer::SecureFailed { home, fault, detail: why.to_owned() }).await;
                }
            }
        }
        if std::mem::take(&mut self.secure_after_answer) {
            self.begin_secure().await;
        }
        if self.live.is_none() && self.securing.is_none() {
            self.report_gone().await;
        }
        if self.mark.as_ref().is_some_and(|mark| mark.settled.is_some()) {
            let runner = Arc::clone(&self.runner);
            // Nobody waits for it, and it may take as long as deleting homes.
            std::thread::spawn(move || runner.keep_copies_within_limit());
        }
    }

    async fn report_gone(&mut self) {
        if let Some(sandbox) = self.ended.take() {
            self.report_state(sandbox, SandboxState::Gone, "stopped and secured").await;
        }
    }

    /// Tries a secure again that failed, while nothing else begins one.
    pub(super) async fn secure_once_more(&mut self) {
        if let Some((at, pause)) = &mut self.secure_again {
            // Until it ends: its end clears this or makes the pause longer.
            *at = Instant::now() + *pause;
        }
        // A call that runs ends in a secure by itself.
        if self.securing.is_none() {
            self.begin_secure().await;
        }
    }

    /// Lets the next attempt come by itself, a while after the last one.
    fn secure_later(&mut self, why: &str) {
        let pause = self
            .secure_again
            .map_or(SECURE_AGAIN_PAUSE, |(_, pause)| (pause * 2).min(SECURE_AGAIN_PAUSE_MAX));
        self.secure_again = Some((Instant::now() + pause, pause));
        tracing::warn!(home = %self.home, why, pause_s = pause.as_secs(), "the home is not secured; it is tried again");
    }

    async fn secure_failed(&mut self, fault: Fault, detail: String) {
        self.secure_later(&detail);
        self.send(RunnerToServer::SecureFailed { home: self.home, fault, detail }).await;
    }
}
