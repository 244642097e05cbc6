//! Making a home ready: the working copy, then the sandbox, then a real round trip with its daemon.

use std::sync::Arc;

use covey_types::{Fault, FencingToken, Generation, RootHash, SandboxEvent, SandboxId, SandboxState};
use covey_wire::runner::{GAPS_NAMED_MAX, HomeGap, HomeGaps, HomeSource, RunnerToServer};
use tokio::time::Instant;
use uuid::Uuid;

use super::{Home, HomeEvent, Lease};
use crate::link::blocking;
use crate::sandbox::{AdoptError, SandboxSpec, StartError};
use crate::tool_link::ToolLink;
use crate::working_copy::{self, Prepared};

/// Why a home is not ready.
struct WakeError {
    fault: Fault,
    detail: String,
}

impl Home {
    pub(super) async fn wake(&mut self, lease: Lease, generation: Generation, root: Option<RootHash>) {
        let began = Instant::now();
        if self.newest_token().is_some_and(|seen| lease.token < seen) {
            let detail = "another lease on this home is newer; claim it again".to_owned();
            return self.wake_failed(lease.token, WakeError { fault: Fault::Denied, detail }).await;
        }
        self.lease = Some(lease);
        self.active_at = began;
        match self.make_ready(lease, generation, root).await {
            Ok((sandbox, source, set_aside, gaps)) => {
                let ready = RunnerToServer::HomeReady {
                    home: self.home,
                    token: lease.token,
                    sandbox,
                    generation: self.mark.as_ref().map_or(Generation(0), |mark| mark.generation),
                    source,
                    set_aside,
                    gaps,
                    elapsed_ms: began.elapsed().as_millis() as u64,
                };
                self.send(ready).await;
                // Results that an adopted daemon gave before there was a lease could not be secured then.
                if source == HomeSource::Adopted && !self.results.is_empty() {
                    self.begin_secure().await;
                }
            }
            Err(error) => self.wake_failed(lease.token, error).await,
        }
    }

    async fn wake_failed(&self, token: FencingToken, error: WakeError) {
        tracing::warn!(home = %self.home, detail = error.detail, "the home is not ready");
        let (home, fault, detail) = (self.home, error.fault, error.detail);
        self.send(RunnerToServer::HomeFailed { home, token, fault, detail }).await;
    }

    async fn make_ready(
        &mut self,
        lease: Lease,
        generation: Generation,
        root: Option<RootHash>,
    ) -> Result<(SandboxId, HomeSource, Option<String>, HomeGaps), WakeError> {
        if let Some(sandbox) = self.reuse_living(lease, generation, root).await {
            return Ok((sandbox, HomeSource::Adopted, None, HomeGaps::default()));
        }
        let prepared = self.prepare_copy(lease, generation, root).await?;
        let sandbox = self.start_sandbox(lease).await?;
        self.open_link(lease.token).await.map_err(|error| WakeError {
            fault: Fault::Retry,
            detail: format!("the new sandbox does not answer: {error}"),
        })?;
        self.sandbox_event(SandboxEvent::Handshake, "the daemon answered").await;
        let aside = prepared.set_aside.map(|path| path.display().to_string());
        let named = prepared.gaps.iter().take(GAPS_NAMED_MAX);
        let named = named.map(|gap| HomeGap { path: gap.path.clone(), reason: gap.reason.clone() });
        let gaps = HomeGaps { count: prepared.gaps.len() as u64, first: named.collect() };
        Ok((sandbox, prepared.source, aside, gaps))
    }

    /// The living sandbox, when its copy is the current state and its daemon answers; else it is ended.
    async fn reuse_living(
        &mut self,
        lease: Lease,
        generation: Generation,
        root: Option<RootHash>,
    ) -> Option<SandboxId> {
        let sandbox = self.live.as_ref()?.sandbox.id();
        let stopping = self.live.as_ref()?.kill_at.is_some();
        let current = self.mark.as_mut().is_some_and(|mark| working_copy::is_current(mark, generation, root));
        if current && !stopping {
            match self.open_link(lease.token).await {
                Ok(()) => {
                    self.remember_token(lease.token);
                    return Some(sandbox);
                }
                Err(error) => {
                    tracing::warn!(home = %self.home, %sandbox, %error, "a living sandbox cannot be used; ending it");
                }
            }
        }
        self.drop_secure();
        self.destroy().await;
        self.live = None;
        self.lose_calls("its sandbox had to be replaced").await;
        self.report_state(sandbox, SandboxState::Lost, "replaced").await;
        None
    }

    /// A restarted runner can open the tool link again only with the newest token.
    fn remember_token(&mut self, token: FencingToken) {
        let Some(mark) = self.mark.as_mut().filter(|mark| mark.token != token) else { return };
        mark.token = token;
        if let Err(error) = self.dir.write_mark(mark) {
            tracing::warn!(home = %self.home, %error, "cannot write the mark; a restarted runner has to wait for a wake");
        }
    }

    async fn prepare_copy(
        &mut self,
        lease: Lease,
        generation: Generation,
        root: Option<RootHash>,
    ) -> Result<Prepared, WakeError> {
        self.drop_secure();
        if let Some(earlier) = self.last_task.take()
            && let Err(error) = earlier.await
        {
            tracing::error!(%error, "an earlier secure panicked");
        }
        let (runner, dir, mark) = (Arc::clone(&self.runner), self.dir.clone(), self.mark.take());
        let prepared = blocking(move || {
            working_copy::prepare(&runner, &dir, mark, lease.org, lease.token, generation, root)
        })
        .await
        .map_err(|e| WakeError { fault: Fault::Bug, detail: e.to_string() })?;
        let prepared = prepared.map_err(|e| WakeError { fault: e.fault(), detail: e.to_string() })?;
        self.mark = Some(prepared.mark.clone());
        Ok(prepared)
    }

    async fn start_sandbox(&mut self, lease: Lease) -> Result<SandboxId, WakeError> {
        let Some(mark) = &self.mark else {
            return Err(WakeError { fault: Fault::Bug, detail: "a home without a mark".to_owned() });
        };
        let sandbox = SandboxId::from_uuid(Uuid::now_v7());
        let host_gid = if self.runner.is_root { mark.host_uid } else { rustix::process::getegid().as_raw() };
        let spec = SandboxSpec {
            sandbox,
            home: self.home,
            home_dir: self.dir.files(),
            outputs_dir: self.dir.outputs(),
            run_dir: self.runner.run_dir(),
            host_uid: mark.host_uid,
            host_gid,
            limits: lease.limits,
            orphan_term: self.runner.config.orphan_term,
        };
        let backend = Arc::clone(&self.runner.backend);
        let started = blocking(move || backend.start(&spec))
            .await
            .map_err(|e| WakeError { fault: Fault::Bug, detail: e.to_string() })?;
        let started = started.map_err(|error| {
            let fault = match &error {
                StartError::Isolation { .. } => Fault::Denied,
                StartError::Failed(_) => Fault::Retry,
            };
            WakeError { fault, detail: error.to_string() }
        })?;
        self.take_up(started, SandboxState::Starting, false);
        Ok(sandbox)
    }

    /// Opens the tool link unless one is open under this token.
    pub(super) async fn open_link(&mut self, token: FencingToken) -> Result<(), AdoptError> {
        let Some(live) = &self.live else { return Err(AdoptError::Gone) };
        if live.link.as_ref().is_some_and(|(opened_with, _)| *opened_with >= token) {
            return Ok(());
        }
        self.thaw().await.map_err(|e| AdoptError::Unresponsive(e.to_string()))?;
        let Some(live) = &mut self.live else { return Err(AdoptError::Gone) };
        let sandbox = Arc::clone(&live.sandbox);
        let id = sandbox.id();
        let stream = blocking(move || sandbox.connect(token))
            .await
            .map_err(|e| AdoptError::Unresponsive(e.to_string()))??;
        let link = ToolLink::open(stream, id, self.queue.clone(), HomeEvent::Tool)
            .map_err(|e| AdoptError::Unresponsive(e.to_string()))?;
        live.link = Some((token, link));
        Ok(())
    }
}
