//! `/v1/covey/homes`: homes, their snapshots, and making another state the current one.

use axum::Json;
use axum::extract::State;
use covey_harness::record::step_event;
use covey_home::object::read_root;
use covey_home::restore_path;
use covey_types::{AgentId, Generation, HomeId, OrgId, RootHash};
use covey_wire::api::history::{GenerationName, Unsecured};
use covey_wire::api::{Home, HomeForked, HomeImported, Page, Snapshot};

use super::error::{ApiError, Result};
use super::extract::{Caller, IdInPath, JsonBody};
use super::fields::{Fields, Query};
use super::{Api, page};
use crate::db::snapshots::{ForkTarget, Origin, Replacement};
use crate::db::{self, Order, homes};
use crate::history::path_of;

/// Characters of the name of an agent that a fork makes.
const NAME_CHARS_MAX: usize = 256;
/// So often a path is put back again because a collection passed meanwhile.
const RESTORE_TRIES_MAX: usize = 3;

pub(super) async fn list(State(api): State<Api>, caller: Caller, query: Query) -> Result<Json<Page<Home>>> {
    let limit = page::limit(&query)?;
    let after = page::after::<HomeId>(&query)?;
    let wanted = db::Page { after, limit: limit + 1, order: page::order(&query, Order::Descending)? };
    let org = caller.org;
    let found = api.inner.db.list_homes(org, &wanted).await?;
    let found = found.into_iter().map(|home| shown(org, &home)).collect();
    Ok(Json(page::cut(found, limit, |home: &Home| home.id.clone())))
}

pub(super) async fn get(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<HomeId>,
) -> Result<Json<Home>> {
    let org = caller.org;
    let home = api.inner.db.home(org, id).await?;
    Ok(Json(shown(org, &home)))
}

pub(super) async fn snapshots(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<HomeId>,
    query: Query,
) -> Result<Json<Page<Snapshot>>> {
    let (org, limit) = (caller.org, page::limit(&query)?);
    let before = page::after::<u64>(&query)?.map(Generation);
    let found = api.inner.db.list_snapshots(org, id, before, limit + 1).await?;
    let kept = api.inner.db.kept_snapshots(org, id, db::now()).await?;
    let found = found
        .into_iter()
        .map(|row| Snapshot {
            generation: row.snapshot.generation.0,
            root: row.snapshot.root.to_string(),
            kind: row.snapshot.kind.as_str().to_owned(),
            step: row.snapshot.step.map(|step| step_event(step).to_string()),
            files: row.files,
            bytes: row.bytes,
            published_at: row.snapshot.published_at.to_string(),
            origin: row.origin.as_str().to_owned(),
            from_generation: row.from_generation.map(|generation| generation.0),
            from_home_id: row.from_home.map(|home| home.to_string()),
            session_id: row.session.map(|session| session.to_string()),
            kept_by: kept.get(&row.snapshot.generation).map(|why| why.as_str().to_owned()),
        })
        .collect();
    Ok(Json(page::cut(found, limit, |snapshot: &Snapshot| snapshot.generation)))
}

/// Makes a root that is already whole in the store the home's current snapshot. Whoever calls this has secured the
/// directory first (`covey home secure`); the next runner that materializes checks every hash.
pub(super) async fn import(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<HomeId>,
    JsonBody(body): JsonBody,
) -> Result<Json<HomeImported>> {
    let fields = Fields::body(&body);
    let root: RootHash = fields
        .required_text("root")?
        .parse()
        .map_err(|_| fields.wrong("root", "a root hash as `covey home secure` prints it"))?;
    let base = fields.number("base_generation")?.map(Generation);
    let epoch = fields.number("epoch")?.unwrap_or(0);
    let (mut files, mut bytes) = (fields.number("files")?.unwrap_or(0), fields.number("bytes")?.unwrap_or(0));
    let org = caller.org;
    if api.inner.stores.is_some() {
        // Somebody else's home is not looked into before it is known whose it is.
        api.inner.db.home(org, id).await?;
        let found = api.stores()?.with(org, move |store| read_root(store, &root)).await?;
        if found.is_err() {
            // It is not wrong, it was collected.
            api.inner.db.check_epoch(org, id, epoch).await?;
        }
        let top = found.map_err(|error| {
            let text = format!("`root`: there is no such state in the store of this org: {error}");
            if error.is_unavailable() {
                ApiError::of(covey_types::Fault::Retry, &error)
            } else {
                ApiError::invalid(text)
            }
        })?;
        (files, bytes) = (top.files, top.bytes);
    }
    let with = Replacement {
        base,
        root,
        files,
        bytes,
        epoch: Some(epoch),
        origin: Origin::Imported,
        from: None,
        over_unsecured: true,
    };
    let generation = api.inner.db.replace_home(org, id, &with).await?;
    Ok(Json(replaced(id, generation, root, files, bytes)))
}

/// Puts the whole home, or one path of it, back to what a snapshot says; the result is a new snapshot.
pub(super) async fn restore(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<HomeId>,
    JsonBody(body): JsonBody,
) -> Result<Json<HomeImported>> {
    let fields = Fields::body(&body);
    let name = required_generation(&fields)?;
    let base = fields.number("base_generation")?.map(Generation);
    let force = fields.flag("force")?.unwrap_or(false);
    let path = path_of(fields.text("path")?, fields.text("path_base64")?).map_err(ApiError::invalid)?;
    let is_whole = covey_home::view::components(&path)?.is_empty();
    let org = caller.org;
    if is_whole {
        let (generation, from) = api.inner.db.restore_home(org, id, name, base, force).await?;
        return Ok(Json(replaced(id, generation, from.snapshot.root, from.files, from.bytes)));
    }
    let mut tries = 0;
    loop {
        tries += 1;
        // The home first: when it moves between the two, the base is refused.
        let home = api.inner.db.home(org, id).await?;
        let from = api.inner.db.snapshot(org, id, name).await?;
        let (Some(current), source) = (home.root, from.snapshot.root) else {
            return Err(ApiError::not_found("a snapshot of", &id.to_string()));
        };
        let path = path.clone();
        let edited =
            api.stores()?.with(org, move |store| restore_path(store, &current, &source, &path)).await??;
        let with = Replacement {
            base: Some(base.unwrap_or(home.generation)),
            root: edited.root,
            files: edited.files,
            bytes: edited.bytes,
            epoch: Some(edited.epoch),
            origin: Origin::Restored,
            from: Some((None, from.snapshot.generation)),
            over_unsecured: force,
        };
        let written = api.inner.db.replace_edited_home(org, id, &with).await?;
        match written {
            Some(generation) => {
                return Ok(Json(replaced(id, generation, edited.root, edited.files, edited.bytes)));
            }
            None if tries < RESTORE_TRIES_MAX => {}
            None => {
                let text = "garbage collections pass faster than a path is put back; try again later";
                return Err(ApiError::new(covey_types::Fault::Retry, text));
            }
        }
    }
}

/// Gives a snapshot to a new agent, or to the home of another one: nothing is copied.
pub(super) async fn fork(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<HomeId>,
    JsonBody(body): JsonBody,
) -> Result<Json<HomeForked>> {
    let fields = Fields::body(&body);
    let name = match fields.value("generation") {
        None => GenerationName::Current,
        Some(_) => required_generation(&fields)?,
    };
    let force = fields.flag("force")?.unwrap_or(false);
    let new_agent = fields.name("name", NAME_CHARS_MAX)?.map(str::to_owned);
    let target = match fields.text("agent_id")? {
        None => None,
        Some(text) => {
            Some(text.parse::<AgentId>().map_err(|error| ApiError::invalid(format!("`agent_id`: {error}")))?)
        }
    };
    if new_agent.is_some() && target.is_some() {
        return Err(ApiError::invalid(
            "give `name` for a new agent, or `agent_id` for one that exists, not both",
        ));
    }
    let org = caller.org;
    let target = target.map_or(ForkTarget::New { name: new_agent }, ForkTarget::Agent);
    let forked = api.inner.db.fork_home(org, id, name, &target, force).await?;
    Ok(Json(HomeForked {
        id: forked.agent.home.to_string(),
        agent_id: forked.agent.id.to_string(),
        generation: forked.generation.0,
        root: forked.from.snapshot.root.to_string(),
    }))
}

fn required_generation(fields: &Fields<'_>) -> Result<GenerationName> {
    match fields.value("generation") {
        None => Err(ApiError::invalid("`generation` is missing")),
        Some(serde_json::Value::Number(_)) => generation_of(None, fields.number("generation")?),
        Some(_) => generation_of(fields.text("generation")?, None),
    }
}

/// The generation that a text or a number names; the current one when there is neither.
pub(super) fn generation_of(text: Option<&str>, number: Option<u64>) -> Result<GenerationName> {
    match (text, number) {
        (_, Some(number)) => Ok(GenerationName::Number(number)),
        (Some(text), None) => {
            text.parse().map_err(|error| ApiError::invalid(format!("`generation`: {error}")))
        }
        (None, None) => Ok(GenerationName::Current),
    }
}

pub(super) fn replaced(
    id: HomeId,
    generation: Generation,
    root: RootHash,
    files: u64,
    bytes: u64,
) -> HomeImported {
    HomeImported { id: id.to_string(), generation: generation.0, root: root.to_string(), files, bytes }
}

pub(super) fn unsecured(unsecured: &homes::Unsecured) -> Unsecured {
    Unsecured { since: unsecured.since.to_string(), reason: unsecured.reason.clone() }
}

fn shown(org: OrgId, home: &homes::Home) -> Home {
    Home {
        id: home.id.to_string(),
        org_id: org.to_string(),
        agent_id: home.agent.to_string(),
        generation: home.generation.0,
        root: home.root.map(|root| root.to_string()),
        session_id: home.lease_session.filter(|_| home.lease_held).map(|session| session.to_string()),
        unsecured: home.unsecured.as_ref().map(unsecured),
        created_at: home.created_at.to_string(),
    }
}
