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

/// The least epoch that a publish may come from: everything that an earlier upload relied on may have been collected.
///
/// # Errors
/// [`super::DbError::NotFound`].
pub fn collect_floor(read: &Read<'_>, org: OrgId) -> Result<u64> {
    let floor: Option<i64> = read
        .conn
        .prepare_cached("SELECT collect_floor FROM org WHERE id = ?1")?
        .query_row([org.to_string()], |row| row.get(0))
        .optional()?;
    floor.map(|floor| floor as u64).ok_or_else(|| super::DbError::not_found("org", org))
}

/// Refuses publishes from epochs below `floor` from now on; a floor never falls.
///
/// # Errors
/// When the database refuses.
pub fn raise_collect_floor(tx: &Tx<'_>, org: OrgId, floor: u64) -> Result<()> {
    tx.conn
        .prepare_cached("UPDATE org SET collect_floor = max(collect_floor, ?2) WHERE id = ?1")?
        .execute((org.to_string(), i64::try_from(floor).unwrap_or(i64::MAX)))?;
    Ok(())
}
