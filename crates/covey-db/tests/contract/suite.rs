//! What every store fulfils, written against the trait; run on each database by a file beside this folder.
//!
//! [`World`] has two handles: on PostgreSQL two servers on one database, on SQLite the same one twice.

pub(crate) mod fencing;
pub(crate) mod history;
pub(crate) mod homes;
pub(crate) mod journal;
pub(crate) mod leases;
pub(crate) mod nouns;
pub(crate) mod tenants;

use covey_db::journal::UserEvent;
use covey_db::sessions::{NewSession, Session};
use covey_db::{Db, Result};
use covey_harness::Record;
use covey_harness::record::Body;
use covey_types::{OrgId, SessionId, StepId};
use serde_json::json;
use uuid::Uuid;

/// A fresh database with an org and a session.
pub(crate) struct World {
    pub(crate) db: Db,
    /// Another server's handle, where the database has several.
    pub(crate) other: Db,
    pub(crate) org: OrgId,
    pub(crate) session: Session,
}

impl World {
    pub(crate) async fn new(db: Db, other: Db) -> Self {
        let org = db.ensure_default_org().await.unwrap();
        let session = new_session(&db, org).await.unwrap();
        Self { db, other, org, session }
    }

    pub(crate) async fn claim(&self) -> u64 {
        self.db.claim_session(self.org, self.session.id).await.unwrap().epoch
    }

    pub(crate) async fn append(&self, epoch: u64, bodies: Vec<Body>) -> Result<Vec<Record>> {
        self.db.append(self.org, self.session.id, epoch, bodies).await
    }

    pub(crate) async fn say(&self, events: Vec<UserEvent>) -> Result<Vec<Record>> {
        self.db.append_user_events(self.org, self.session.id, events).await
    }

    pub(crate) async fn forget_all(&self) -> Result<u64> {
        let homes = self.db.homes_of_org(self.org).await?;
        self.db.forget_snapshots(self.org, &homes).await
    }

    pub(crate) async fn all(&self) -> Vec<Record> {
        self.db.records(self.org, self.session.id, 0, 100_000).await.unwrap()
    }

    pub(crate) async fn kinds(&self) -> Vec<&'static str> {
        self.all().await.iter().map(|record| record.body.kind()).collect()
    }
}

pub(crate) async fn new_session(db: &Db, org: OrgId) -> Result<Session> {
    let agent = db.create_agent(org, "a", &json!({"model": "m"})).await?;
    let environment = db.create_environment(org, "e", &json!({})).await?;
    let new = NewSession {
        agent: agent.id,
        agent_version: None,
        agent_snapshot: None,
        environment: environment.id,
        title: None,
        metadata: json!({}),
        extra: json!({}),
    };
    db.create_session(org, &new, vec![]).await
}

pub(crate) fn message(text: &str) -> UserEvent {
    let content = vec![json!({"type": "text", "text": text})];
    UserEvent { body: Body::UserMessage { content }, dedup: None }
}

pub(crate) fn fresh_step() -> StepId {
    StepId::from_uuid(Uuid::now_v7())
}

pub(crate) fn result_of(step: StepId) -> Body {
    Body::ToolResult {
        step,
        tool_use_id: covey_harness::record::step_event(step),
        content: vec![],
        is_error: false,
        substitute: false,
    }
}

pub(crate) fn no_such_org() -> OrgId {
    OrgId::from_uuid(Uuid::now_v7())
}

pub(crate) fn no_such_session() -> SessionId {
    SessionId::from_uuid(Uuid::now_v7())
}

/// Makes one test of each promise; `$world` is an expression that makes a fresh [`World`].
macro_rules! contract {
    ($world:expr; $($module:ident: $($name:ident),+ $(,)?);+ $(;)?) => {
        $($(
            #[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                let world = $world;
                crate::suite::$module::$name(&world).await;
            }
        )+)+
    };
}
pub(crate) use contract;

/// All promises, so that no database can leave one out.
macro_rules! whole_contract {
    ($world:expr) => {
        crate::suite::contract! { $world;
            fencing:
                a_driver_that_was_overtaken_appends_nothing,
                two_racing_drivers_never_interleave_and_the_numbers_have_no_gap,
                a_step_has_one_intention_and_one_result_whoever_appends,
                a_group_of_records_is_appended_whole_or_not_at_all,
                a_session_that_is_gone_fences_its_driver;
            journal:
                the_same_dedup_key_appends_once,
                the_same_dedup_key_from_two_servers_at_once_appends_once,
                a_message_is_processed_when_a_request_takes_account_of_it,
                a_call_that_waits_takes_one_answer_and_a_session_that_waits_needs_no_driver,
                a_follower_sees_every_public_event_once_and_in_order,
                a_follower_learns_of_the_end,
                events_from_many_writers_are_all_there_and_numbered_without_a_gap,
                events_come_in_pages_in_both_directions,
                what_clients_may_not_append_is_refused_and_changes_nothing,
                usage_and_status_move_with_the_append,
                large_and_strange_texts_come_back_as_they_went;
            homes:
                publish_checks_token_and_base_and_moves_the_pointer_with_the_journal,
                a_runner_may_publish_late_for_as_long_as_the_home_has_not_gone_to_another_one,
                of_two_sessions_that_claim_one_home_at_once_one_gets_it,
                two_publishes_at_once_never_share_a_generation,
                a_secure_that_failed_is_told_and_remembered,
                a_result_is_known_once_it_is_in_the_journal;
            history:
                a_generation_is_found_by_number_by_current_and_by_how_far_back,
                a_session_keeps_where_it_began_and_what_it_left_and_rules_keep_more,
                a_home_that_grows_too_large_is_warned_then_not_published_and_said_to_be_unsecured,
                an_org_has_one_limit_for_all_its_homes,
                publishes_at_once_do_not_pass_the_limit_of_their_org_together,
                what_was_uploaded_before_a_collection_is_refused_whoever_offers_it,
                a_publish_and_a_raised_floor_never_pass_each_other,
                a_restore_is_a_new_generation_that_the_sessions_are_told_of,
                a_step_that_is_not_secured_is_in_the_way_unless_forced,
                a_fork_shares_the_root_and_the_homes_part_from_there,
                a_restore_and_a_forgetting_never_lose_the_state_that_becomes_current;
            nouns:
                an_agent_has_versions_and_an_update_names_the_one_it_was_made_on,
                of_two_updates_of_one_version_one_is_refused,
                an_agent_goes_with_all_that_it_has_but_not_while_it_is_at_work,
                an_environment_that_sessions_name_is_not_deleted,
                lists_come_in_pages_and_filters_hold,
                a_session_is_edited_archived_and_deleted,
                edits_of_one_session_at_once_are_all_kept,
                rules_are_edited_and_a_home_inherits,
                a_token_opens_its_org_until_it_is_revoked,
                one_name_is_one_runner_and_one_org,
                an_org_is_due_for_collection_and_remembers_the_last_one,
                the_store_of_an_org_is_noted,
                what_the_last_server_held_is_given_back;
            leases:
                a_session_and_its_home_are_given_back_by_the_current_driver_alone,
                who_waits_for_a_home_hears_that_it_was_given_back,
                a_session_that_was_claimed_again_needs_its_driver_until_it_rests,
                each_record_bears_the_epoch_that_it_was_written_under;
            tenants:
                nothing_crosses_the_border_of_an_org,
                an_org_goes_with_all_that_it_has_and_nothing_else;
        }
    };
}
pub(crate) use whole_contract;
