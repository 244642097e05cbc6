//! Environments: what a session's sandbox is made from. The configuration is the API's JSON document.

use async_trait::async_trait;
use covey_types::{EnvironmentId, OrgId, Timestamp};
use serde_json::Value;

use crate::{DbError, Page, Result};

/// An environment.
#[derive(Debug, Clone, PartialEq)]
pub struct Environment {
    /// Its id.
    pub id: EnvironmentId,
    /// For people.
    pub name: String,
    /// `config`, `description`, `metadata`, … as the API takes and gives them.
    pub config: Value,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it was last changed.
    pub updated_at: Timestamp,
    /// When it was archived.
    pub archived_at: Option<Timestamp>,
}

/// What is stored of environments.
#[async_trait]
pub trait Environments: Send + Sync {
    /// Creates an environment.
    ///
    /// # Errors
    /// When the database refuses.
    async fn create_environment(&self, org: OrgId, name: &str, config: &Value) -> Result<Environment>;

    /// Reads one environment, archived or not.
    ///
    /// # Errors
    /// [`DbError::NotFound`].
    async fn environment(&self, org: OrgId, id: EnvironmentId) -> Result<Environment>;

    /// Lists environments.
    ///
    /// # Errors
    /// When the database refuses.
    async fn list_environments(
        &self,
        org: OrgId,
        page: &Page<EnvironmentId>,
        include_archived: bool,
    ) -> Result<Vec<Environment>>;

    /// Changes an environment; running sessions see it at their next sandbox.
    ///
    /// # Errors
    /// [`DbError::NotFound`]; [`DbError::Conflict`] when it is archived.
    async fn update_environment(
        &self,
        org: OrgId,
        id: EnvironmentId,
        name: &str,
        config: &Value,
    ) -> Result<Environment>;

    /// Archives an environment: no new sessions; again is no error.
    ///
    /// # Errors
    /// [`DbError::NotFound`].
    async fn archive_environment(&self, org: OrgId, id: EnvironmentId) -> Result<Environment>;

    /// Deletes an environment that no session names.
    ///
    /// # Errors
    /// [`DbError::NotFound`]; [`DbError::Conflict`] when sessions name it.
    async fn delete_environment(&self, org: OrgId, id: EnvironmentId) -> Result<()>;
}

/// Why an environment that sessions name is not deleted.
pub(crate) fn in_use(id: EnvironmentId, sessions: i64) -> DbError {
    DbError::Conflict(format!(
        "environment {id} is named by {sessions} sessions; archive it, or delete them first"
    ))
}

/// Why an archived environment is not changed.
pub(crate) fn archived(id: EnvironmentId) -> DbError {
    DbError::Conflict(format!("environment {id} is archived"))
}
