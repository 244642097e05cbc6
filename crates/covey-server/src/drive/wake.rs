//! Getting a home's sandbox ready: the lease, the runner, the request. Whatever is missing is said in the
//! journal once and waited for.

use std::time::Duration;

use covey_types::{FencingToken, HomeId, OrgId, RunnerId, SessionId};
use covey_wire::runner::{RunnerToServer, SandboxLimits, ServerToRunner};
use tokio::sync::{mpsc, watch};

use super::Context;
use crate::db::{self, homes};
use crate::link::{Outbox, RouteGuard};

/// How long the runner that had a home last is waited for, when it is known to be at another server.
const DIAL_WAIT_MAX: Duration = Duration::from_secs(5);
/// How often it is looked whether a home that another session has became free, although nobody said so.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// A home that the driver acts on.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) token: FencingToken,
    runner: RunnerId,
    pub(super) mail: mpsc::Receiver<RunnerToServer>,
    pub(super) outbox: Option<Outbox>,
    route: RouteGuard,
}

/// What came of trying.
#[derive(Debug)]
pub(super) enum Woken {
    /// The request is on its way; `HomeReady` or `HomeFailed` comes as mail.
    Asked,
    /// Something is missing: note this reason, then try again when runners or leases change.
    Waiting(String),
}

/// Takes the lease if it is not held yet, chooses a runner and asks it.
pub(super) async fn ask(
    context: &Context,
    org: OrgId,
    (session, epoch): (SessionId, u64),
    home: HomeId,
    held: &mut Option<Held>,
) -> db::Result<Woken> {
    let waiting = || {
        let reason = "no runner is connected; the call is kept and runs when one is";
        Woken::Waiting(reason.into())
    };
    // The runner first: a token belongs to it, and another runner needs a new one, which fences this one out.
    let last = context.db.home(org, home).await?.lease_runner;
    wait_for_link(context, org, last).await?;
    let Some(outbox) = context.links.place(org, home, last) else { return Ok(waiting()) };
    let runner = outbox.runner();
    if held.as_ref().is_none_or(|held| held.runner != runner) {
        let claimed = context.db.claim_home(org, home, session, Some(epoch), runner).await?;
        let token = match claimed {
            homes::Claim::HeldBy(other) => {
                let reason = format!("session {other} acts on the home; this one waits its turn");
                return Ok(Woken::Waiting(reason));
            }
            homes::Claim::Granted(token) => token,
        };
        match held {
            Some(held) => (held.token, held.runner) = (token, runner),
            None => {
                let (route, mail) = context.links.route(home);
                *held = Some(Held { token, runner, mail, outbox: None, route });
            }
        }
    }
    let Some(held) = held else { return Ok(waiting()) };
    let current = context.db.home(org, home).await?;
    let wake = ServerToRunner::WakeHome {
        org,
        home,
        session,
        token: held.token,
        generation: current.generation,
        root: current.root,
        limits: SandboxLimits::default(),
    };
    if outbox.send(wake).is_err() {
        return Ok(waiting());
    }
    held.outbox = Some(outbox);
    Ok(Woken::Asked)
}

/// The runner that has the home may be at other servers and about to dial this one, which has just started. What it has in
/// no snapshot yet is worth a moment; a runner that only others reach is not worth more.
async fn wait_for_link(context: &Context, org: OrgId, last: Option<RunnerId>) -> db::Result<()> {
    let Some(last) = last.filter(|_| context.db.standing().borrow().instance().is_some()) else {
        return Ok(());
    };
    let mut changed = context.links.watch();
    if context.links.is_connected(last) {
        return Ok(());
    }
    let runners = context.db.list_runners(org).await?;
    if !runners.iter().any(|runner| runner.id == last && runner.connected) {
        return Ok(());
    }
    let dialled = async { while !context.links.is_connected(last) && changed.changed().await.is_ok() {} };
    if tokio::time::timeout(DIAL_WAIT_MAX, dialled).await.is_err() {
        tracing::warn!(runner = %last, "the runner that has the home is at other servers only");
    }
    Ok(())
}

impl Held {
    /// Stops listening. What was in the mailbox is answered like mail that comes without a driver.
    pub(super) async fn stop_listening(self, context: &Context, home: HomeId) -> db::Result<()> {
        let Self { mut mail, outbox, route, .. } = self;
        drop(route);
        while let Ok(message) = mail.try_recv() {
            if let Some(outbox) = &outbox {
                crate::link::answer_undriven(&context.links, outbox, home, message).await?;
            }
        }
        Ok(())
    }
}

/// What can change whether a wake succeeds.
#[derive(Debug)]
pub(super) struct Changes {
    pub(super) runners: watch::Receiver<u64>,
    pub(super) leases: watch::Receiver<u64>,
}

impl Changes {
    pub(super) fn new(context: &Context) -> Self {
        Self { runners: context.links.watch(), leases: context.db.feed().freed() }
    }

    /// Waits for the next change since the last look.
    pub(super) async fn next(&mut self) {
        let closed = tokio::select! {
            changed = self.runners.changed() => changed.is_err(),
            changed = self.leases.changed() => changed.is_err(),
            // What another server gave back is told beside its commit, and may not be told at all.
            () = tokio::time::sleep(LOOK_AGAIN) => false,
        };
        if closed {
            // Both senders live as long as the context; a closed one means the server is being taken apart.
            std::future::pending::<()>().await;
        }
    }
}
