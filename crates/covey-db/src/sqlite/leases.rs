//! SQLite has one server: the lock beside the file says so, and dies with the process.

use async_trait::async_trait;
use covey_types::{OrgId, SessionId};
use tokio::sync::watch;

use super::{Result, Sqlite, Store, homes};
use crate::leases::{Instance, Leases, Rest, ServerPlace, Standing, StandingEvent};
use crate::sessions::Session;

/// What others would be told, if there were any.
#[derive(Debug)]
pub(super) struct OneServer {
    standing: watch::Sender<Standing>,
    servers: watch::Sender<Vec<Instance>>,
    left_behind: watch::Sender<u64>,
}

impl Default for OneServer {
    fn default() -> Self {
        Self {
            standing: watch::Sender::new(Standing::Outside),
            servers: watch::Sender::new(Vec::new()),
            left_behind: watch::Sender::new(0),
        }
    }
}

impl OneServer {
    pub(super) fn took(&self) {
        self.standing.send_modify(|standing| *standing = standing.after(StandingEvent::TookAlone));
    }
}

#[async_trait]
impl Leases for Sqlite {
    async fn join(&self, _place: &ServerPlace) -> Result<OrgId> {
        self.take_over().await
    }

    fn standing(&self) -> watch::Receiver<Standing> {
        self.shared.leases.standing.subscribe()
    }

    fn servers(&self) -> watch::Receiver<Vec<Instance>> {
        self.shared.leases.servers.subscribe()
    }

    fn left_behind(&self) -> watch::Receiver<u64> {
        self.shared.leases.left_behind.subscribe()
    }

    async fn take_left_behind(&self) -> Result<Vec<(OrgId, Session)>> {
        // What the last server left is found by what needs a driver.
        Ok(Vec::new())
    }

    async fn release_session(&self, org: OrgId, id: SessionId, epoch: u64, _rest: Rest) -> Result<()> {
        self.write("release session", move |tx| homes::release_of(tx, org, id, epoch)).await?;
        self.shared.feed.free();
        Ok(())
    }

    fn offer_session(&self, id: SessionId) {
        tracing::debug!(session = %id, "there is no other server");
    }

    async fn drain(&self) -> Result<()> {
        Ok(())
    }

    async fn leave(&self) -> Result<()> {
        Ok(())
    }
}
