//! `/v1/covey/homes/{id}/rules` and `/v1/covey/rules`: what is kept of homes, and how large they may be.

use axum::Json;
use axum::extract::State;
use covey_types::HomeId;
use covey_wire::api::history::{HomeRules, HomeRulesShown, OrgRules};
use serde_json::{Map, Value};

use super::Api;
use super::error::{ApiError, Result};
use super::extract::{Caller, IdInPath, JsonBody};
use super::fields::Fields;
use crate::db::rules::{HomeRulesEdit, OrgRulesEdit};

/// Rules of a home; the org's rules have one more.
const NAMES: [&str; 4] = ["keep_newest", "keep_for_s", "bytes_max", "files_max"];
/// Bytes in all homes of an org.
const ORG_BYTES_MAX: &str = "org_bytes_max";

pub(super) async fn of_home(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<HomeId>,
) -> Result<Json<HomeRulesShown>> {
    let org = caller.org;
    let (own, effective) = api.inner.db.home_rules(org, id).await?;
    Ok(Json(HomeRulesShown { own, effective }))
}

/// Fields that are absent stay, null gives a rule back to the org.
pub(super) async fn set_home(
    State(api): State<Api>,
    caller: Caller,
    IdInPath(id): IdInPath<HomeId>,
    JsonBody(body): JsonBody,
) -> Result<Json<HomeRulesShown>> {
    let change = Change::of(&body, &[])?;
    let org = caller.org;
    let edit = HomeRulesEdit(Box::new(move |own| change.over(own)));
    let (own, effective) = api.inner.db.edit_home_rules(org, id, edit).await?;
    Ok(Json(HomeRulesShown { own, effective }))
}

pub(super) async fn of_org(State(api): State<Api>, caller: Caller) -> Result<Json<OrgRules>> {
    let org = caller.org;
    Ok(Json(api.inner.db.org_rules(org).await?))
}

/// Fields that are absent stay, null takes a rule away.
pub(super) async fn set_org(
    State(api): State<Api>,
    caller: Caller,
    JsonBody(body): JsonBody,
) -> Result<Json<OrgRules>> {
    let change = Change::of(&body, &[ORG_BYTES_MAX])?;
    let org = caller.org;
    let edit = OrgRulesEdit(Box::new(move |now| {
        let org_bytes_max = change.number(ORG_BYTES_MAX, now.org_bytes_max);
        (change.over(now.homes), org_bytes_max)
    }));
    Ok(Json(api.inner.db.edit_org_rules(org, edit).await?))
}

/// Which rules a request sets, and to what.
struct Change(Vec<(&'static str, Option<u64>)>);

impl Change {
    /// An unknown name is refused: a limit with a slip of the pen in its name would limit nothing.
    fn of(body: &Map<String, Value>, more: &[&'static str]) -> Result<Self> {
        let fields = Fields::body(body);
        let known = || NAMES.iter().chain(more).copied();
        if let Some(unknown) = body.keys().find(|key| !known().any(|name| name == key.as_str())) {
            let names = known().collect::<Vec<_>>().join(", ");
            let unknown: String = unknown.chars().take(80).collect();
            return Err(ApiError::invalid(format!("`{unknown}` is no rule; there are {names}")));
        }
        let given = known().filter(|name| fields.has(name));
        Ok(Self(given.map(|name| Ok((name, fields.number(name)?))).collect::<Result<_>>()?))
    }

    fn number(&self, name: &str, now: Option<u64>) -> Option<u64> {
        self.0.iter().find(|(given, _)| *given == name).map_or(now, |(_, number)| *number)
    }

    fn over(&self, now: HomeRules) -> HomeRules {
        HomeRules {
            keep_newest: self.number("keep_newest", now.keep_newest),
            keep_for_s: self.number("keep_for_s", now.keep_for_s),
            bytes_max: self.number("bytes_max", now.bytes_max),
            files_max: self.number("files_max", now.files_max),
        }
    }
}
