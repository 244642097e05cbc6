//! Orgs: the tenants.

use covey_types::OrgId;
use rusqlite::OptionalExtension;

use super::{Read, Result, Tx, parsed};

/// Name of the org that a fresh installation has.
pub const DEFAULT_ORG_NAME: &str = "default";

/// Returns the org named [`DEFAULT_ORG_NAME`], created when it does not exist.
///
/// # Errors
/// When the database refuses.
pub fn ensure_default(tx: &Tx<'_>) -> Result<OrgId> {
    if let Some(org) = by_name(tx, DEFAULT_ORG_NAME)? {
        return Ok(org);
    }
    insert(tx, DEFAULT_ORG_NAME)
}

/// Creates an org.
///
/// # Errors
/// When the name is taken, or the database refuses.
pub fn insert(tx: &Tx<'_>, name: &str) -> Result<OrgId> {
    let org = OrgId::from_uuid(tx.fresh_uuid());
    tx.conn.prepare_cached("INSERT INTO org (id, name, created_at) VALUES (?1, ?2, ?3)")?.execute((
        org.to_string(),
        name,
        tx.now().unix_ms(),
    ))?;
    Ok(org)
}

/// Finds an org by its name.
///
/// # Errors
/// When the database refuses.
pub fn by_name(read: &Read<'_>, name: &str) -> Result<Option<OrgId>> {
    let id: Option<String> = read
        .conn
        .prepare_cached("SELECT id FROM org WHERE name = ?1")?
        .query_row([name], |row| row.get(0))
        .optional()?;
    id.map(|id| parsed("org", &id)).transpose()
}
