//! Snapshots beyond the current one: what is kept, what may become current, and who is told.

use covey_types::{Fault, HomeId, StepId};
use covey_wire::api::history::{GenerationName, HomeRules};

use super::super::retention::KeptBy;
use super::*;

impl Fixture {
    async fn write<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Tx<'_>, OrgId, HomeId) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (org, home) = (self.org, self.session.home);
        self.db.write("test", move |tx| work(tx, org, home)).await
    }

    async fn release(&self) {
        let session = self.session.id;
        self.write(move |tx, org, home| homes::release(tx, org, home, session)).await.unwrap();
    }

    async fn home(&self) -> homes::Home {
        self.write(|tx, org, home| homes::get(tx, org, home)).await.unwrap()
    }

    async fn rules(&self, rules: HomeRules) {
        self.write(move |tx, org, home| rules::set_home(tx, org, home, &rules)).await.unwrap();
    }

    async fn kept(&self) -> Vec<(u64, KeptBy)> {
        let kept = self.write(|tx, org, home| retention::kept(tx, org, home, tx.now())).await.unwrap();
        kept.into_iter().map(|(generation, why)| (generation.0, why)).collect()
    }

    /// Publishes so many states that differ; the last generation.
    async fn publish_many(&self, count: u64) -> u64 {
        let token = self.token(1).await;
        let mut generation = self.home().await.generation.0;
        for _ in 0..count {
            generation = self.publish(offer(token, generation, &generation.to_le_bytes())).await.unwrap().0;
        }
        generation
    }

    async fn kinds(&self) -> Vec<&'static str> {
        self.all().await.iter().map(|record| record.body.kind()).collect()
    }
}

fn sized(token: FencingToken, base: u64, files: u64, bytes: u64) -> Publish {
    Publish { files, bytes, ..offer(token, base, &[files.to_le_bytes(), bytes.to_le_bytes()].concat()) }
}

#[tokio::test]
async fn a_generation_is_found_by_number_by_current_and_by_how_far_back() {
    let f = fixture().await;
    let find = async |name: GenerationName| {
        f.write(move |tx, org, home| snapshots::named(tx, org, home, name))
            .await
            .map(|row| row.snapshot.generation.0)
            .map_err(|error| error.to_string())
    };
    assert!(find(GenerationName::Current).await.unwrap_err().contains("snapshot"));
    f.publish_many(5).await;
    f.write(|tx, org, home| {
        let sql = "DELETE FROM snapshot WHERE org = ?1 AND home = ?2 AND generation = 4";
        Ok(tx.conn.execute(sql, (org.to_string(), home.to_string()))?)
    })
    .await
    .unwrap();
    assert_eq!(find(GenerationName::Current).await, Ok(5));
    assert_eq!(find(GenerationName::Before(1)).await, Ok(3), "4 is not kept");
    assert_eq!(find(GenerationName::Before(3)).await, Ok(1));
    assert_eq!(find(GenerationName::Number(2)).await, Ok(2));
    for gone in [GenerationName::Number(4), GenerationName::Number(0), GenerationName::Number(6)] {
        assert!(find(gone).await.unwrap_err().contains(&gone.to_string()), "{gone}");
    }
    assert!(find(GenerationName::Before(4)).await.is_err());
}

#[tokio::test]
async fn a_session_keeps_where_it_began_and_what_it_left_and_rules_keep_more() {
    let f = fixture().await;
    f.write(|tx, org, home| {
        let with = Replacement {
            base: Generation(0),
            root: RootHash::of(b"imported"),
            files: 0,
            bytes: 0,
            epoch: Some(0),
            origin: Origin::Imported,
            from: None,
            over_unsecured: false,
        };
        snapshots::replace(tx, org, home, &with)
    })
    .await
    .unwrap();
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
    let session = f.session.id;
    f.write(move |tx, org, _| sessions::archive(tx, org, session)).await.unwrap();
    assert_eq!(f.kept().await, [(6, Current)]);
    assert_eq!(f.write(retention::forget).await.unwrap(), 5);
    assert_eq!(f.write(|tx, org, home| snapshots::count(tx, org, home)).await.unwrap(), 1);
    assert_eq!(f.kept().await, [(6, Current)]);
}

#[tokio::test]
async fn a_home_that_grows_too_large_is_warned_then_not_published_and_said_to_be_unsecured() {
    let f = fixture().await;
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
    let (org, id) = (f.org, f.session.id);
    let session = f.db.read("session", move |read| sessions::get(read, org, id)).await.unwrap();
    assert_eq!(session.unsecured, Some(unsecured));
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

#[tokio::test]
async fn an_org_has_one_limit_for_all_its_homes() {
    let f = fixture().await;
    f.write(|tx, org, _| {
        let homes = HomeRules { files_max: Some(5), ..HomeRules::default() };
        rules::set_org(tx, org, &homes, Some(1000))
    })
    .await
    .unwrap();
    let token = f.token(1).await;
    f.publish(sized(token, 0, 1, 700)).await.unwrap();
    f.release().await;
    let other = f.write(|tx, org, _| new_session(tx, org)).await.unwrap();
    let (id, home) = (other.id, other.home);
    let runner = RunnerId::from_uuid(Uuid::from_u128(1));
    let published = f
        .write(move |tx, org, _| {
            let Claim::Granted(token) = homes::claim(tx, org, home, id, runner)? else { panic!("held") };
            Ok((
                snapshots::publish(tx, org, home, &sized(token, 0, 1, 301))?,
                snapshots::publish(tx, org, home, &sized(token, 0, 6, 1))?,
                snapshots::publish(tx, org, home, &sized(token, 0, 1, 300))?,
            ))
        })
        .await
        .unwrap();
    assert!(
        matches!(&published.0, Published::OverQuota(why) if why.contains("homes of this org")),
        "{published:?}"
    );
    assert!(matches!(&published.1, Published::OverQuota(why) if why.contains("6 files")), "{published:?}");
    assert_eq!(published.2, Published::Current(Generation(1)));
    let rules = f.write(|tx, org, _| rules::of_org(tx, org)).await.unwrap();
    assert_eq!((rules.org_bytes, rules.org_bytes_max), (1000, Some(1000)));
}

#[tokio::test]
async fn what_was_uploaded_before_a_collection_is_refused_whoever_offers_it() {
    let f = fixture().await;
    let token = f.token(1).await;
    f.publish(offer(token, 0, b"1")).await.unwrap();
    f.write(|tx, org, _| orgs::raise_collect_floor(tx, org, 3)).await.unwrap();
    f.write(|tx, org, _| orgs::raise_collect_floor(tx, org, 2)).await.unwrap();
    let late = Publish { epoch: 2, ..offer(token, 1, b"2") };
    assert_eq!(f.offer(late.clone()).await.unwrap(), Published::Collected { floor: 3 });
    // What is current already relies on nothing new: the answer to the first publish was lost.
    assert_eq!(f.publish(offer(token, 0, b"1")).await.unwrap(), Generation(1));
    assert_eq!(f.publish(Publish { epoch: 3, ..late }).await.unwrap(), Generation(2));
    f.release().await;
    let refused = f.import(2).await.unwrap_err().to_string();
    assert!(refused.contains("garbage collection"), "{refused}");
    // A snapshot that is kept is needed all the time, so nobody can have collected it.
    let restored = f
        .write(|tx, org, home| snapshots::restore(tx, org, home, GenerationName::Number(1), None, false))
        .await
        .unwrap();
    assert_eq!(restored.0, Generation(3));
}

#[tokio::test]
async fn a_restore_is_a_new_generation_that_the_sessions_are_told_of() {
    let f = fixture().await;
    f.publish_many(3).await;
    let restore = |name| f.write(move |tx, org, home| snapshots::restore(tx, org, home, name, None, false));
    let held = restore(GenerationName::Number(1)).await.unwrap_err().to_string();
    assert!(held.contains("acts on home") && held.contains(&f.session.id.to_string()), "{held}");
    f.release().await;
    let (generation, from) = restore(GenerationName::Before(2)).await.unwrap();
    assert_eq!((generation, from.snapshot.generation), (Generation(4), Generation(1)));
    let (org, home) = (f.org, f.session.home);
    let rows = f.db.read("s", move |read| snapshots::list(read, org, home, None, 1)).await.unwrap();
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
    let archived = f.session.id;
    f.write(move |tx, org, _| sessions::archive(tx, org, archived)).await.unwrap();
    let before = f.all().await.len();
    restore(GenerationName::Number(2)).await.unwrap();
    assert_eq!(f.all().await.len(), before, "who has ended need not know");
}

#[tokio::test]
async fn a_step_that_is_not_secured_is_in_the_way_unless_forced() {
    let f = fixture().await;
    f.publish_many(2).await;
    let epoch = f.claim().await;
    let step = StepId::from_uuid(Uuid::now_v7());
    let result = |substitute| Body::ToolResult {
        step: StepId::from_uuid(Uuid::now_v7()),
        tool_use_id: covey_harness::record::step_event(step),
        content: vec![],
        is_error: false,
        substitute,
    };
    f.append(epoch, vec![result(true)]).await.unwrap();
    f.release().await;
    let restore = |number, force| {
        f.write(move |tx, org, home| {
            snapshots::restore(tx, org, home, GenerationName::Number(number), None, force)
        })
    };
    assert_eq!(restore(1, false).await.unwrap().0, Generation(3), "a call that never ran changed nothing");
    // The lease was taken again, a call ran, and nothing was secured since.
    f.token(1).await;
    f.append(epoch, vec![result(false)]).await.unwrap();
    f.release().await;
    let refused = restore(2, false).await.unwrap_err().to_string();
    assert!(refused.contains("not secured yet") && refused.contains("force"), "{refused}");
    assert_eq!(restore(2, true).await.unwrap().0, Generation(4));
}

#[tokio::test]
async fn a_fork_shares_the_root_and_the_homes_part_from_there() {
    let f = fixture().await;
    f.publish_many(3).await;
    let (source, target) = (f.session.home, f.write(|tx, org, _| new_session(tx, org)).await.unwrap());
    let home = target.home;
    // Also while a session acts on the source: nothing of it is touched.
    let (generation, from) = f
        .write(move |tx, org, _| snapshots::fork(tx, org, source, GenerationName::Number(2), home, false))
        .await
        .unwrap();
    assert_eq!(generation, Generation(1));
    let org = f.org;
    let rows = f.db.read("s", move |read| snapshots::list(read, org, home, None, 9)).await.unwrap();
    assert_eq!(rows.len(), 1);
    assert_eq!((rows[0].origin, rows[0].from_home), (Origin::Forked, Some(source)));
    assert_eq!(rows[0].snapshot.root, from.snapshot.root);
    assert_eq!(f.home().await.generation, Generation(3));
    let roots = f.write(move |tx, org, _| retention::roots(tx, org, None, None)).await.unwrap();
    assert_eq!(roots.len(), 3, "the shared root is one");
    let others = f.write(move |tx, org, _| retention::roots(tx, org, None, Some(source))).await.unwrap();
    assert_eq!(others, [from.snapshot.root]);
    let strangers = OrgId::from_uuid(Uuid::now_v7());
    let foreign = f
        .db
        .write("fork", move |tx| snapshots::fork(tx, strangers, source, GenerationName::Current, home, false))
        .await;
    assert!(matches!(foreign, Err(DbError::NotFound { .. })));
}
