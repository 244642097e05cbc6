//! Several providers: when the next one is asked, who is told, and what comes after.

use super::*;
use crate::retry::{FAILURES_BEFORE_FAILOVER, WAIT_FIRST_MS};

impl World {
    /// The provider that is asked now does not answer.
    fn fails(&mut self, provider: &str, next: &str) {
        let step = self.settle_to_model();
        let facts = ModelFailureFacts {
            provider: Some(provider.into()),
            next_provider: Some(next.into()),
            retry_after_ms: Some(60_000),
            ..failure(FailureKind::Transient)
        };
        let bodies = self.session.failed(step, facts, 1000);
        self.append(bodies);
    }

    /// How long the session wants to wait, and what follows.
    fn waits(&mut self) -> u64 {
        let effects = self.settle();
        let [Effect::Wait { until, then }] = effects.as_slice() else { panic!("{effects:?}") };
        let failed_at = self.journal.iter().rfind(|r| matches!(r.body, Body::ModelFailed { .. })).unwrap().at;
        let wait = until.unix_ms() - failed_at.unix_ms();
        self.append(then.clone());
        wait as u64
    }

    fn failed_over(&self) -> Vec<(Option<String>, String, u32)> {
        let bodies = self.journal.iter().filter_map(|record| match &record.body {
            Body::ModelFailedOver { from, to, failures, .. } => Some((from.clone(), to.clone(), *failures)),
            _ => None,
        });
        bodies.collect()
    }
}

#[test]
fn the_next_provider_is_asked_after_so_many_failures_and_without_the_first_ones_wait() {
    let mut world = World::new();
    world.say("Hello.");
    for n in 1..FAILURES_BEFORE_FAILOVER {
        world.fails("a", "b");
        assert_eq!(world.session.provider(), None, "{n}");
        assert_eq!(world.waits(), 60_000);
    }
    world.fails("a", "b");
    assert_eq!(world.waits(), WAIT_FIRST_MS);
    assert_eq!(world.session.provider(), Some("b"));
    assert_eq!(world.failed_over(), [(Some("a".into()), "b".into(), FAILURES_BEFORE_FAILOVER)]);
    // The same again, round to the first one.
    for _ in 0..FAILURES_BEFORE_FAILOVER {
        world.fails("b", "a");
        world.waits();
    }
    assert_eq!(world.session.provider(), Some("a"));
    assert_eq!(world.failed_over().len(), 2);
}

#[test]
fn the_turn_stays_with_who_answered_and_the_next_one_begins_with_the_first_again() {
    let mut world = World::new();
    world.say("Hello.");
    for _ in 0..FAILURES_BEFORE_FAILOVER {
        world.fails("a", "b");
        world.waits();
    }
    let step = world.settle_to_model();
    let thinking = json!({"type": "thinking", "thinking": "t", "signature": "s"});
    let content = [vec![thinking], calls(&["x"])].concat();
    let facts = ModelAnswerFacts { provider: Some("b".into()), ..answer(content, "tool_use") };
    let bodies = world.session.answered(step, facts);
    world.append(bodies);
    world.wakes(1);
    world.settle();
    let call = world.calls()[0];
    world.finishes(call, "done");
    world.settle_to_model();
    assert_eq!(world.session.provider(), Some("b"));
    // A failure of the next step counts from one again.
    world.fails("b", "a");
    assert_eq!(world.session.provider(), Some("b"));
    world.waits();
    let to =
        |provider| Value::Object(world.session.request_to(Addressee { provider, wire: "w" })).to_string();
    assert!(to(Some("b")).contains("thinking") && !to(Some("a")).contains("thinking"));
    let again = {
        let mut session = fresh();
        world.journal.iter().for_each(|record| session.apply(record));
        session
    };
    assert_eq!(again.provider(), Some("b"), "the journal alone says it");
    world.answers(text_blocks("Done."), "end_turn");
    world.settle();
    world.say("More.");
    world.settle_to_model();
    assert_eq!(world.session.provider(), None);
}

#[test]
fn a_conversation_that_is_too_long_is_shortened_and_not_asked_again() {
    let mut world = forgetful();
    world.say("Count the ducks.");
    for number in 0..5 {
        world.round(number, 10);
    }
    let step = world.settle_to_model();
    let too_long = ModelFailureFacts { status: Some(400), too_long: true, ..failure(FailureKind::Rejected) };
    let bodies = world.session.failed(step, too_long.clone(), 0);
    world.append(bodies);
    let step = world.settle_to_model();
    let text = world.request_text();
    assert!(text.contains("Count the ducks.") && !text.contains("result 0"), "{text}");
    // Nothing is left to leave out: the turn ends, and says what to do.
    let mut error = String::new();
    let mut next = Some(step);
    for _ in 0..3 {
        let Some(step) = next.take() else { break };
        let bodies = world.session.failed(step, too_long.clone(), 0);
        world.append(bodies);
        let effects = world.settle();
        next = effects.iter().find_map(|effect| match effect {
            Effect::CallModel { step, .. } => Some(*step),
            _ => None,
        });
    }
    for record in &world.journal {
        if let Body::Error { error: told } = &record.body {
            error.clone_from(&told.message);
        }
    }
    assert!(next.is_none() && error.contains("context_tokens"), "{error}");
}
