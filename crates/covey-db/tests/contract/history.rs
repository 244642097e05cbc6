//! Snapshots beyond the current one: what is kept, what may become current, and who is told.

use covey_db::DbError;
use covey_db::homes::{Claim, Home};
use covey_db::retention::KeptBy;
use covey_db::rules::{HomeRulesEdit, OrgRulesEdit};
use covey_db::snapshots::{ForkTarget, Forked, Origin, Publish, Published, Replacement, SnapshotRow};
use covey_harness::record::Body;
use covey_types::{Fault, FencingToken, Generation};
use covey_wire::api::history::{GenerationName, HomeRules};
use tokio::task::JoinSet;

use super::homes::{offer, runner};
use super::{World, fresh_step, new_session, no_such_org, result_of};

impl World {
    async fn home(&self) -> Home {
        self.other.home(self.org, self.session.home).await.unwrap()
    }

    async fn rules(&self, rules: HomeRules) {
        let edit = HomeRulesEdit(Box::new(move |_| rules));
        self.db.edit_home_rules(self.org, self.session.home, edit).await.unwrap();
    }

    async fn kept(&self) -> Vec<(u64, KeptBy)> {
        let kept = self.other.kept_snapshots(self.org, self.session.home, covey_db::now()).await.unwrap();
        kept.into_iter().map(|(generation, why)| (generation.0, why)).collect()
    }

    /// Publishes so many states that differ; the last generation.
    pub(crate) async fn publish_many(&self, count: u64) -> u64 {
        let token = self.token(1).await;
        let mut generation = self.home().await.generation.0;
        for _ in 0..count {
            generation = self.publish(offer(token, generation, &generation.to_le_bytes())).await.unwrap().0;
        }
        generation
    }

    async fn restore(
        &self,
        name: GenerationName,
        force: bool,
    ) -> covey_db::Result<(Generation, SnapshotRow)> {
        self.db.restore_home(self.org, self.session.home, name, None, force).await
    }

    async fn fork(&self, target: &ForkTarget) -> covey_db::Result<Forked> {
        self.db.fork_home(self.org, self.session.home, GenerationName::Number(2), target, false).await
    }
}

fn sized(token: FencingToken, base: u64, files: u64, bytes: u64) -> Publish {
    Publish { files, bytes, ..offer(token, base, &[files.to_le_bytes(), bytes.to_le_bytes()].concat()) }
}

pub(crate) async fn a_generation_is_found_by_number_by_current_and_by_how_far_back(f: &World) {
    let find = async |name: GenerationName| {
        let found = f.db.snapshot(f.org, f.session.home, name).await;
        found.map(|row| row.snapshot.generation.0).map_err(|error| error.to_string())
    };
    assert!(find(GenerationName::Current).await.unwrap_err().contains("snapshot"));
    f.publish_many(3).await;
    f.release().await;
    // A second session begins at 3 and leaves 5: 4 is nobody's.
    let second = new_session(&f.db, f.org).await.unwrap().id;
    let Claim::Granted(token) = f.claim_home(second, 1).await else { panic!("held") };
    f.publish(offer(token, 3, b"four")).await.unwrap();
    f.publish(offer(token, 4, b"five")).await.unwrap();
    assert_eq!(f.db.forgettable_snapshots(f.org, covey_db::now()).await.unwrap(), 3);
    assert_eq!(f.forget_all().await.unwrap(), 3);
    assert_eq!(find(GenerationName::Current).await, Ok(5));
    assert_eq!(find(GenerationName::Before(1)).await, Ok(3), "4 is not kept");
    assert_eq!(find(GenerationName::Number(3)).await, Ok(3));
    for gone in [4, 0, 6, 1].map(GenerationName::Number) {
        assert!(find(gone).await.unwrap_err().contains(&gone.to_string()), "{gone}");
    }
    assert!(find(GenerationName::Before(2)).await.is_err());
    assert!(find(GenerationName::Before(u64::MAX)).await.is_err());
}

pub(crate) async fn a_session_keeps_where_it_began_and_what_it_left_and_rules_keep_more(f: &World) {
    f.import(0).await.unwrap();
    assert_eq!(f.publish_many(4).await, 5);
    f.release().await;
    f.import(5).await.unwrap();
    use KeptBy::{Age, Current, Newest, Session};
    assert_eq!(f.kept().await, [(1, Session), (5, Session), (6, Current)]);
    f.rules(HomeRules { keep_newest: Some(3), ..HomeRules::default() }).await;
    assert_eq!(f.kept().await, [(1, Session), (4, Newest), (5, Session), (6, Current)]);
    f.rules(HomeRules { keep_for_s: Some(3600), ..HomeRules::default() }).await;
    assert_eq!(f.kept().await, [(1, Session), (2, Age), (3, Age), (4, Age), (5, Session), (6, Current)]);
    f.rules(HomeRules::default()).await;
    let kept = f.db.kept_roots(f.org, covey_db::now()).await.unwrap();
    assert_eq!(kept.len(), 2, "the first and the last root are the same");
    f.db.archive_session(f.org, f.session.id).await.unwrap();
    assert_eq!(f.kept().await, [(6, Current)]);
    assert_eq!(f.forget_all().await.unwrap(), 5);
    assert_eq!(f.db.count_snapshots(f.org, f.session.home).await.unwrap(), 1);
    assert_eq!(f.kept().await, [(6, Current)]);
}

pub(crate) async fn a_home_that_grows_too_large_is_warned_then_not_published_and_said_to_be_unsecured(
    f: &World,
) {
    f.rules(HomeRules { bytes_max: Some(1000), files_max: Some(10), ..HomeRules::default() }).await;
    let token = f.token(1).await;
    let current = async |publish: Publish| match f.offer(publish).await.unwrap() {
        Published::Current(generation) => Ok(generation.0),
        Published::OverQuota(reason) => Err(reason),
        other @ Published::Collected { .. } => panic!("{other:?}"),
    };
    assert_eq!(current(sized(token, 0, 1, 899)).await, Ok(1));
    assert_eq!(f.kinds().await, ["home.secured"]);
    assert_eq!(current(sized(token, 1, 2, 950)).await, Ok(2));
    assert_eq!(f.kinds().await[1..], ["home.near_limit", "home.secured"]);
    assert_eq!(current(sized(token, 2, 2, 960)).await, Ok(3), "warned once");
    let refused = current(sized(token, 3, 3, 1001)).await.unwrap_err();
    assert!(
        refused.contains("1001 B of at most 1000 B") && refused.contains("covey home rules"),
        "{refused}"
    );
    let again = current(sized(token, 3, 3, 1002)).await.unwrap_err();
    assert!(again.contains("1002 B"), "{again}");
    let kinds = f.kinds().await;
    assert_eq!(kinds[3..], ["home.secured", "home.secure_failed"], "told once: {kinds:?}");
    let told = f.all().await.pop().unwrap().body;
    assert!(matches!(told, Body::HomeSecureFailed { fault: Fault::TooLarge, .. }));
    let unsecured = f.home().await.unsecured.unwrap();
    assert!(unsecured.reason.contains("1002 B"));
    assert_eq!(f.other.session(f.org, f.session.id).await.unwrap().unsecured, Some(unsecured));
    assert_eq!(f.home().await.generation, Generation(3), "the pointer has not moved");
    let files = current(sized(token, 3, 11, 10)).await.unwrap_err();
    assert!(files.contains("11 files of at most 10"), "{files}");
    assert_eq!(current(sized(token, 3, 3, 1000)).await, Ok(4));
    assert_eq!(f.home().await.unsecured, None);
    // A limit below what is there lets the home become smaller, and not larger.
    f.rules(HomeRules { bytes_max: Some(100), ..HomeRules::default() }).await;
    assert_eq!(current(sized(token, 4, 3, 900)).await, Ok(5));
    assert!(current(sized(token, 5, 3, 901)).await.is_err());
}

async fn limit_org(f: &World, org_bytes_max: u64) {
    let edit = OrgRulesEdit(Box::new(move |_| {
        (HomeRules { files_max: Some(5), ..HomeRules::default() }, Some(org_bytes_max))
    }));
    f.db.edit_org_rules(f.org, edit).await.unwrap();
}

pub(crate) async fn an_org_has_one_limit_for_all_its_homes(f: &World) {
    limit_org(f, 1000).await;
    let token = f.token(1).await;
    f.publish(sized(token, 0, 1, 700)).await.unwrap();
    f.release().await;
    let other = new_session(&f.db, f.org).await.unwrap();
    let claimed = f.db.claim_home(f.org, other.home, other.id, None, runner(1)).await.unwrap();
    let Claim::Granted(token) = claimed else { panic!("held") };
    let publish = async |publish| f.other.publish(other.home, &publish).await.unwrap();
    let bytes = publish(sized(token, 0, 1, 301)).await;
    assert!(matches!(&bytes, Published::OverQuota(why) if why.contains("homes of this org")), "{bytes:?}");
    let files = publish(sized(token, 0, 6, 1)).await;
    assert!(matches!(&files, Published::OverQuota(why) if why.contains("6 files")), "{files:?}");
    assert_eq!(publish(sized(token, 0, 1, 300)).await, Published::Current(Generation(1)));
    let rules = f.db.org_rules(f.org).await.unwrap();
    assert_eq!((rules.org_bytes, rules.org_bytes_max), (1000, Some(1000)));
}

pub(crate) async fn publishes_at_once_do_not_pass_the_limit_of_their_org_together(f: &World) {
    limit_org(f, 1000).await;
    let mut tasks = JoinSet::new();
    for n in 0..6 {
        let db = if n % 2 == 0 { f.db.clone() } else { f.other.clone() };
        let session = new_session(&db, f.org).await.unwrap();
        let claimed = db.claim_home(f.org, session.home, session.id, None, runner(1)).await.unwrap();
        let Claim::Granted(token) = claimed else { panic!("held") };
        tasks.spawn(async move { db.publish(session.home, &sized(token, 0, 1, 300)).await.unwrap() });
    }
    let taken = tasks.join_all().await.into_iter().filter(|p| matches!(p, Published::Current(_))).count();
    assert_eq!(taken, 3);
    assert_eq!(f.db.org_rules(f.org).await.unwrap().org_bytes, 900);
}

pub(crate) async fn what_was_uploaded_before_a_collection_is_refused_whoever_offers_it(f: &World) {
    let token = f.token(1).await;
    f.publish(offer(token, 0, b"1")).await.unwrap();
    f.other.raise_collect_floor(f.org, 3).await.unwrap();
    f.other.raise_collect_floor(f.org, 2).await.unwrap();
    assert_eq!(f.db.collect_floor(f.org).await.unwrap(), 3);
    let late = Publish { epoch: 2, ..offer(token, 1, b"2") };
    assert_eq!(f.offer(late.clone()).await.unwrap(), Published::Collected { floor: 3 });
    // What is current already relies on nothing new: the answer to the first publish was lost.
    assert_eq!(f.publish(offer(token, 0, b"1")).await.unwrap(), Generation(1));
    assert_eq!(f.publish(Publish { epoch: 3, ..late }).await.unwrap(), Generation(2));
    f.release().await;
    let refused = f.import(2).await.unwrap_err().to_string();
    assert!(refused.contains("garbage collection"), "{refused}");
    let with = Replacement {
        base: None,
        root: covey_types::RootHash::of(b"edited"),
        files: 1,
        bytes: 1,
        epoch: Some(4),
        origin: Origin::Restored,
        from: None,
        over_unsecured: false,
    };
    let edited = async |epoch, from| {
        let with = Replacement { epoch: Some(epoch), from: Some((None, Generation(from))), ..with.clone() };
        f.db.replace_edited_home(f.org, f.session.home, &with).await
    };
    assert_eq!(edited(2, 1).await.unwrap(), None);
    let gone = edited(4, 9).await;
    assert!(matches!(gone, Err(DbError::NotFound { .. })), "{gone:?}");
    assert_eq!(edited(4, 1).await.unwrap(), Some(Generation(3)));
    // A snapshot that is kept is needed all the time, so nobody can have collected it.
    let restored = f.restore(GenerationName::Number(1), false).await.unwrap();
    assert_eq!(restored.0, Generation(4));
}

pub(crate) async fn a_publish_and_a_raised_floor_never_pass_each_other(f: &World) {
    let token = f.token(1).await;
    let mut published = 0;
    for floor in 1..=20_u64 {
        // Whoever publishes with the epoch before the floor has its root among those that are read after the raise.
        let offered = Publish { epoch: floor - 1, ..offer(token, published, &floor.to_le_bytes()) };
        let marked = async {
            f.other.raise_collect_floor(f.org, floor).await.unwrap();
            f.other.snapshot_roots(f.org, None, None).await.unwrap()
        };
        let (outcome, marked) = tokio::join!(f.db.publish(f.session.home, &offered), marked);
        match outcome.unwrap() {
            Published::Current(generation) => {
                published = generation.0;
                assert!(marked.contains(&offered.root), "published under floor {floor}, but not marked");
            }
            Published::Collected { floor: told } => assert_eq!(told, floor),
            other => panic!("{other:?}"),
        }
    }
}

pub(crate) async fn a_restore_is_a_new_generation_that_the_sessions_are_told_of(f: &World) {
    f.publish_many(3).await;
    let held = f.restore(GenerationName::Number(1), false).await.unwrap_err().to_string();
    assert!(held.contains("acts on home") && held.contains(&f.session.id.to_string()), "{held}");
    f.release().await;
    let (generation, from) = f.restore(GenerationName::Before(2), false).await.unwrap();
    assert_eq!((generation, from.snapshot.generation), (Generation(4), Generation(1)));
    let rows = f.db.list_snapshots(f.org, f.session.home, None, 1).await.unwrap();
    assert_eq!((rows[0].origin, rows[0].from_generation), (Origin::Restored, Some(Generation(1))));
    assert_eq!(rows[0].snapshot.root, from.snapshot.root);
    let told = f.all().await.pop().unwrap().body;
    assert!(
        matches!(
            told,
            Body::HomeReplaced { generation: Generation(4), from_generation: Some(Generation(1)), .. }
        ),
        "{told:?}"
    );
    // What the runner still had is refused: it does not descend from what is there now.
    let token = f.home().await.lease_token;
    assert!(matches!(f.publish(offer(FencingToken(1), 3, b"late")).await, Err(DbError::Fenced { .. })));
    assert!(token > FencingToken(1));
    f.db.archive_session(f.org, f.session.id).await.unwrap();
    let before = f.all().await.len();
    f.restore(GenerationName::Number(2), false).await.unwrap();
    assert_eq!(f.all().await.len(), before, "who has ended need not know");
}

pub(crate) async fn a_step_that_is_not_secured_is_in_the_way_unless_forced(f: &World) {
    f.publish_many(2).await;
    let epoch = f.claim().await;
    let substitute = match result_of(fresh_step()) {
        Body::ToolResult { step, tool_use_id, content, is_error, .. } => {
            Body::ToolResult { step, tool_use_id, content, is_error, substitute: true }
        }
        other => panic!("{other:?}"),
    };
    f.append(epoch, vec![substitute]).await.unwrap();
    f.release().await;
    let unforced = f.restore(GenerationName::Number(1), false).await.unwrap();
    assert_eq!(unforced.0, Generation(3), "a call that never ran changed nothing");
    // The lease was taken again, a call ran, and nothing was secured since.
    f.token(1).await;
    f.append(epoch, vec![result_of(fresh_step())]).await.unwrap();
    f.release().await;
    let refused = f.restore(GenerationName::Number(2), false).await.unwrap_err().to_string();
    assert!(refused.contains("not secured yet") && refused.contains("force"), "{refused}");
    assert_eq!(f.restore(GenerationName::Number(2), true).await.unwrap().0, Generation(4));
}

pub(crate) async fn a_fork_shares_the_root_and_the_homes_part_from_there(f: &World) {
    f.publish_many(3).await;
    let (source, target) = (f.session.home, new_session(&f.db, f.org).await.unwrap());
    // Also while a session acts on the source: nothing of it is touched.
    let forked = f.fork(&ForkTarget::Agent(target.agent)).await.unwrap();
    assert_eq!((forked.generation, forked.agent.home), (Generation(1), target.home));
    let rows = f.other.list_snapshots(f.org, target.home, None, 9).await.unwrap();
    assert_eq!(rows.len(), 1);
    assert_eq!((rows[0].origin, rows[0].from_home), (Origin::Forked, Some(source)));
    assert_eq!(rows[0].snapshot.root, forked.from.snapshot.root);
    assert_eq!(f.home().await.generation, Generation(3));
    let roots = f.db.snapshot_roots(f.org, None, None).await.unwrap();
    assert_eq!(roots.len(), 3, "the shared root is one");
    let others = f.db.snapshot_roots(f.org, None, Some(source)).await.unwrap();
    assert_eq!(others, [forked.from.snapshot.root]);
    assert_eq!(f.db.snapshot_roots(f.org, Some(source), None).await.unwrap().len(), 3);
    let unnamed = f.fork(&ForkTarget::New { name: None }).await.unwrap();
    assert_eq!(unnamed.agent.name, "a (fork)");
    let named = f.fork(&ForkTarget::New { name: Some("b".into()) }).await.unwrap();
    assert_eq!((named.agent.name.as_str(), named.generation), ("b", Generation(1)));
    assert_eq!(f.other.agent(f.org, named.agent.id).await.unwrap(), named.agent);
    let target = ForkTarget::New { name: None };
    let foreign = f.db.fork_home(no_such_org(), source, GenerationName::Current, &target, false).await;
    assert!(matches!(foreign, Err(DbError::NotFound { .. })));
}

pub(crate) async fn a_restore_and_a_forgetting_never_lose_the_state_that_becomes_current(f: &World) {
    f.publish_many(1).await;
    f.release().await;
    f.db.archive_session(f.org, f.session.id).await.unwrap();
    for round in 0..10_u64 {
        let before = f.home().await.generation;
        f.import_into(f.session.home, before.0).await.unwrap();
        let name = GenerationName::Number(before.0);
        let forgetting = async {
            f.other.forget_snapshots(f.org, &[f.session.home]).await.unwrap();
            f.other.snapshot_roots(f.org, None, None).await.unwrap()
        };
        let (restored, marked) = tokio::join!(f.restore(name, false), forgetting);
        match restored {
            // Whatever order the database chose: the root that is current now was named when the marks were read.
            Ok((_, from)) => assert!(
                marked.contains(&from.snapshot.root)
                    || f.db.snapshot(f.org, f.session.home, name).await.is_ok(),
                "round {round}"
            ),
            Err(DbError::NotFound { .. }) => {
                let token = f.home().await;
                assert_eq!(token.generation, before.next());
                // A fresh state, so that the next round has two again.
                let session = new_session(&f.db, f.org).await.unwrap();
                assert_ne!(session.home, f.session.home);
                f.db.claim_home(f.org, f.session.home, f.session.id, None, runner(1)).await.unwrap();
                let token = f.home().await.lease_token;
                f.publish(offer(token, before.0 + 1, &round.to_le_bytes())).await.unwrap();
                f.release().await;
            }
            Err(other) => panic!("{other:?}"),
        }
    }
}
