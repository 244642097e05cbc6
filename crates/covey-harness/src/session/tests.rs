//! The machine against a world that does anything: golden turns, and random worlds.

use covey_types::{Fault, Generation, RootHash, SandboxId, SnapshotKind};
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::effect::Effect;
use crate::record::{Confirmation, StopReason};
use crate::verify::{check_answer_kept, check_prefix, check_request};

mod providers;

/// A journal with its fold, as a driver would keep them.
struct World {
    session: Session,
    journal: Vec<Record>,
}

fn config() -> AgentConfig {
    let document =
        json!({"model": "m", "system": "Be brief.", "tools": [{"type": "agent_toolset_20260401"}]});
    AgentConfig::from_document(&document).unwrap()
}

/// An agent whose `bash` asks, and that has a tool that a client runs.
fn asking() -> World {
    let document = json!({"model": "m", "tools": [
        {"type": "agent_toolset_20260401", "configs": [
            {"name": "bash", "permission_policy": {"type": "always_ask"}}]},
        {"type": "custom", "name": "deploy", "description": "d", "input_schema": {"type": "object"}},
    ]});
    let config = AgentConfig::from_document(&document).unwrap();
    let id = SessionId::from_uuid(uuid::Uuid::from_u128(1));
    World { session: Session::new(id, config), journal: Vec::new() }
}

fn call(id: &str, name: &str, input: Value) -> Value {
    json!({"type": "tool_use", "id": id, "name": name, "input": input})
}

fn fresh() -> Session {
    Session::new(SessionId::from_uuid(uuid::Uuid::from_u128(1)), config())
}

fn sandbox(n: u128) -> SandboxId {
    SandboxId::from_uuid(uuid::Uuid::from_u128(n))
}

fn text_blocks(text: &str) -> Vec<Value> {
    vec![json!({"type": "text", "text": text})]
}

fn calls(ids: &[&str]) -> Vec<Value> {
    ids.iter()
        .map(|id| json!({"type": "tool_use", "id": id, "name": "bash", "input": {"command": id}}))
        .collect()
}

fn answer(content: Vec<Value>, stop_reason: &str) -> ModelAnswerFacts {
    let usage = json!({"input_tokens": 1, "output_tokens": 2});
    ModelAnswerFacts {
        content,
        stop_reason: stop_reason.into(),
        usage,
        model: "m".into(),
        request_id: None,
        provider: None,
    }
}

fn failure(kind: FailureKind) -> ModelFailureFacts {
    let detail = "on purpose".into();
    ModelFailureFacts {
        failure: kind,
        status: Some(529),
        retry_after_ms: None,
        detail,
        request_id: None,
        provider: None,
        next_provider: None,
        too_long: false,
    }
}

fn ready(n: u128, put_back: bool) -> HomeReadyFacts {
    HomeReadyFacts {
        sandbox: sandbox(n),
        generation: Generation(1),
        source: if put_back { "materialized" } else { "kept" }.into(),
        put_back,
        set_aside: None,
        gap_count: 0,
        gap_paths: vec![],
        gap_reason: String::new(),
        elapsed_ms: 1,
    }
}

impl World {
    fn new() -> Self {
        Self { session: fresh(), journal: Vec::new() }
    }

    fn append(&mut self, bodies: Vec<Body>) {
        for body in bodies {
            let seq = self.journal.len() as u64 + 1;
            let at = Timestamp::from_unix_ms(seq as i64);
            let record = Record { seq, event: body.own_event(), at, processed_at: None, body };
            self.session.apply(&record);
            self.journal.push(record);
        }
    }

    fn say(&mut self, text: &str) {
        self.append(vec![Body::UserMessage { content: text_blocks(text) }]);
    }

    /// Appends for as long as the session wants to, and returns what it wants then.
    fn settle(&mut self) -> Vec<Effect> {
        for _ in 0..20 {
            match self.session.next().as_slice() {
                [Effect::Append(bodies)] => {
                    assert!(!bodies.is_empty(), "an empty append would loop");
                    self.append(bodies.clone());
                }
                effects => return effects.to_vec(),
            }
        }
        panic!("the session appends for ever: {:?}", self.kinds());
    }

    fn settle_to_model(&mut self) -> StepId {
        let effects = self.settle();
        match effects.last() {
            Some(Effect::CallModel { step, .. }) => *step,
            other => panic!("{other:?}"),
        }
    }

    fn answers(&mut self, content: Vec<Value>, stop_reason: &str) {
        let step = self.settle_to_model();
        let bodies = self.session.answered(step, answer(content, stop_reason));
        self.append(bodies);
    }

    fn wakes(&mut self, n: u128) {
        assert!(self.settle().contains(&Effect::WakeHome));
        let bodies = self.session.home_ready(ready(n, false));
        self.append(bodies);
    }

    fn finishes(&mut self, step: StepId, text: &str) {
        let bodies = self.session.tool_done(step, text_blocks(text), false);
        self.append(bodies);
    }

    fn kinds(&self) -> Vec<&'static str> {
        self.journal.iter().map(|r| r.body.kind()).collect()
    }

    fn dispatched(&mut self) -> Vec<StepId> {
        self.settle()
            .iter()
            .filter_map(|e| if let Effect::DispatchTool { step, .. } = e { Some(*step) } else { None })
            .collect()
    }

    fn last_stop(&self) -> Option<StopReason> {
        self.journal.iter().rev().find_map(|r| match &r.body {
            Body::StatusIdle { stop_reason } => Some(stop_reason.clone()),
            _ => None,
        })
    }
}

#[test]
fn a_whole_turn_is_recorded_in_this_order() {
    let mut w = World::new();
    w.say("do it");
    w.answers([text_blocks("on it"), calls(&["a", "b"])].concat(), "tool_use");
    w.wakes(7);
    let steps = w.dispatched();
    assert_eq!(steps.len(), 2, "parallel calls go out together");
    w.finishes(steps[1], "second");
    w.finishes(steps[0], "first");
    w.answers(text_blocks("done"), "end_turn");
    let left = w.settle();
    assert!(left.iter().all(|e| matches!(e, Effect::AcknowledgeTool { .. })), "{left:?}");
    assert_eq!(
        w.kinds(),
        [
            "user.message",
            "session.status_running",
            "model.intended",
            "span.model_request_start",
            "model.done",
            "span.model_request_end",
            "agent.message",
            "agent.tool_use",
            "agent.tool_use",
            "sandbox.ready",
            "tool.dispatched",
            "tool.dispatched",
            "agent.tool_result",
            "agent.tool_result",
            "model.intended",
            "span.model_request_start",
            "model.done",
            "span.model_request_end",
            "agent.message",
            "session.status_idle",
        ]
    );
    let body = w.session.request();
    assert_eq!(
        body["messages"][2]["content"][0]["content"][0]["text"], "first",
        "ordered by call, not by end"
    );
}

#[test]
fn a_message_that_arrives_while_tools_run_comes_after_their_results() {
    let mut w = World::new();
    w.say("do it");
    w.answers(calls(&["a"]), "tool_use");
    w.wakes(7);
    let step = w.dispatched()[0];
    w.say("and hurry");
    w.finishes(step, "ok");
    w.settle_to_model();
    let last = &w.session.request()["messages"][2]["content"];
    assert_eq!(last[0]["type"], "tool_result");
    assert_eq!(last[1]["text"], "and hurry");
}

#[test]
fn a_message_that_arrives_while_the_model_ends_its_turn_is_answered_in_the_same_turn() {
    let mut w = World::new();
    w.say("one");
    let step = w.settle_to_model();
    w.say("two");
    let bodies = w.session.answered(step, answer(text_blocks("first"), "end_turn"));
    w.append(bodies);
    w.settle_to_model();
    assert!(!w.kinds().contains(&"session.status_idle"));
    assert_eq!(w.session.request()["messages"][2]["content"][0]["text"], "two");
}

#[test]
fn an_interrupt_answers_every_open_call_and_the_next_message_begins_a_new_turn() {
    let mut w = World::new();
    w.say("do it");
    w.answers(calls(&["a", "b"]), "tool_use");
    w.wakes(7);
    let steps = w.dispatched();
    w.finishes(steps[0], "ok");
    w.append(vec![Body::UserInterrupt {}]);
    let left = w.settle();
    assert_eq!(w.session.status(), SessionStatus::Idle);
    assert!(left.contains(&Effect::InterruptTool { step: steps[1] }), "{left:?}");
    // Its real end arrives late: it is noted, and it is no second result.
    w.finishes(steps[1], "killed");
    assert_eq!(w.kinds().last(), Some(&"tool.ended"));
    assert!(!w.settle().iter().any(|e| matches!(e, Effect::InterruptTool { .. })));
    w.say("something else");
    w.settle_to_model();
    let request = w.session.request();
    assert_eq!(check_request(&request), Ok(()));
    assert_eq!(request["messages"][2]["content"][1]["is_error"], true);
}

#[test]
fn an_interrupt_of_the_model_drops_its_answer() {
    let mut w = World::new();
    w.say("do it");
    let step = w.settle_to_model();
    w.append(vec![Body::UserInterrupt {}]);
    assert_eq!(w.settle(), []);
    assert_eq!(w.session.answered(step, answer(text_blocks("late"), "end_turn")), []);
    assert_eq!(w.last_stop(), Some(StopReason::EndTurn));
    w.say("again");
    w.settle_to_model();
    assert_eq!(check_request(&w.session.request()), Ok(()));
}

#[test]
fn an_interrupt_with_nothing_to_interrupt_is_taken_and_shown_nowhere() {
    let mut w = World::new();
    w.append(vec![Body::UserInterrupt {}]);
    assert_eq!(w.settle(), []);
    assert_eq!(w.kinds(), ["user.interrupt", "interrupt.handled"]);
}

/// The recovery table of ARCHITECTURE.md, line by line: after a new driver claimed the session.
#[test]
fn recovery_asks_for_what_may_have_been_sent_and_for_nothing_else() {
    let mut w = World::new();
    w.say("do it");
    let step = w.settle_to_model();
    w.append(vec![Body::DriverClaimed { epoch: 2 }]);
    assert_eq!(w.settle(), [Effect::CallModel { step, attempt: 1 }], "the call is made again");
    w.answers(calls(&["a"]), "tool_use");
    w.append(vec![Body::DriverClaimed { epoch: 3 }]);
    w.wakes(7);
    let step = w.dispatched()[0];
    for (epoch, n) in [(4, 7), (5, 8)] {
        w.append(vec![Body::DriverClaimed { epoch }]);
        w.wakes(n);
        let wishes = w.settle();
        assert_eq!(wishes, [Effect::QueryTool { step, sandbox: sandbox(7) }]);
    }
    // Same step id when it is proven that it never started.
    let bodies = w.session.tool_never_started(step, "never arrived".into());
    w.append(bodies);
    w.wakes(8);
    assert_eq!(w.dispatched(), [step]);
    w.append(vec![Body::RunnerLost { reason: "gone".into() }]);
    w.wakes(9);
    let bodies = w.session.tool_interrupted(step, "the sandbox is gone");
    w.append(bodies);
    w.settle_to_model();
    let result = &w.session.request()["messages"][2]["content"][0];
    assert!(result["content"][0]["text"].as_str().unwrap().starts_with("interrupted, may have had effects"));
}

#[test]
fn each_stop_reason_ends_the_turn_in_its_own_way() {
    let cases: [(&str, Vec<Value>, Option<StopReason>); 6] = [
        ("end_turn", text_blocks("x"), Some(StopReason::EndTurn)),
        ("stop_sequence", text_blocks("x"), Some(StopReason::EndTurn)),
        ("max_tokens", text_blocks("x"), Some(StopReason::EndTurn)),
        ("refusal", vec![], Some(StopReason::Refusal)),
        ("model_context_window_exceeded", text_blocks("x"), Some(StopReason::RetriesExhausted)),
        ("pause_turn", vec![json!({"type": "server_tool_use", "id": "s", "name": "w", "input": {}})], None),
    ];
    for (stop_reason, content, expected) in cases {
        let mut w = World::new();
        w.say("x");
        w.answers(content, stop_reason);
        w.settle();
        assert_eq!(w.last_stop(), expected, "{stop_reason}");
        assert_eq!(w.session.status() == SessionStatus::Running, expected.is_none());
        assert_eq!(check_request(&w.session.request()), Ok(()), "{stop_reason}");
    }
}

#[test]
fn a_cut_unknown_or_malformed_call_is_answered_and_never_run() {
    let mut w = World::new();
    w.say("x");
    let content = vec![
        json!({"type": "tool_use", "id": "a", "name": "sh", "input": {}}),
        json!({"type": "tool_use", "id": "b", "name": "read", "input": "no object"}),
        json!({"type": "tool_use", "id": "c", "name": "bash", "input": {"command": "half"}}),
    ];
    w.answers(content, "max_tokens");
    w.settle_to_model();
    let request = w.session.request();
    assert_eq!(check_request(&request), Ok(()));
    let texts: Vec<&str> = request["messages"][2]["content"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r["content"][0]["text"].as_str().unwrap())
        .collect();
    assert!(texts[0].contains("no tool `sh`") && texts[1].contains("object") && texts[2].contains("cut"));
    assert!(!w.kinds().contains(&"tool.dispatched"));
}

#[test]
fn a_transient_failure_is_waited_out_visibly_and_then_given_up() {
    let mut w = World::new();
    w.say("x");
    for attempt in 1..=retry::MODEL_ATTEMPTS_MAX {
        let step = w.settle_to_model();
        let bodies = w.session.failed(step, failure(FailureKind::Transient), 500);
        w.append(bodies);
        if attempt == retry::MODEL_ATTEMPTS_MAX {
            break;
        }
        assert_eq!(w.session.status(), SessionStatus::Rescheduling);
        let Effect::Wait { until, then } = w.settle().remove(0) else { panic!("no wait") };
        let failed_at = w.journal.iter().rev().find(|r| r.body.kind() == "model.failed").unwrap().at;
        assert_eq!(until.unix_ms() - failed_at.unix_ms(), retry::wait_ms(attempt, 500, None) as i64);
        w.append(then);
        assert_eq!(w.session.status(), SessionStatus::Running);
    }
    assert_eq!(w.settle(), []);
    assert_eq!(w.last_stop(), Some(StopReason::RetriesExhausted));
    let steps: BTreeSet<StepId> = w.journal.iter().filter_map(|r| r.body.step()).collect();
    assert_eq!(steps.len(), 1, "every attempt is the same step");
}

#[test]
fn a_refused_key_ends_the_turn_at_once_and_the_next_message_tries_again() {
    let mut w = World::new();
    w.say("x");
    let step = w.settle_to_model();
    let bodies = w.session.failed(step, failure(FailureKind::Unauthorized), 0);
    w.append(bodies);
    assert_eq!(w.settle(), []);
    assert_eq!(w.last_stop(), Some(StopReason::RetriesExhausted));
    w.say("now?");
    w.settle_to_model();
    assert_eq!(check_request(&w.session.request()), Ok(()));
}

#[test]
fn a_sandbox_that_does_not_start_is_tried_again_and_then_said() {
    let mut w = World::new();
    w.say("x");
    w.answers(calls(&["a"]), "tool_use");
    let mut waits = 0;
    loop {
        assert!(w.settle().contains(&Effect::WakeHome));
        let bodies = w.session.home_failed(Fault::Retry, "store away".into(), 0);
        w.append(bodies);
        match w.settle().first() {
            Some(Effect::Wait { then, .. }) => w.append(then.clone()),
            _ => break,
        }
        waits += 1;
    }
    assert_eq!(waits + 1, retry::WAKE_ATTEMPTS_MAX);
    assert_eq!(w.last_stop(), Some(StopReason::RetriesExhausted));
    w.say("again");
    w.settle_to_model();
    assert_eq!(check_request(&w.session.request()), Ok(()));
}

#[test]
fn a_home_that_was_replaced_is_told_to_the_model_with_the_next_message_and_opens_no_turn() {
    let mut w = World::new();
    w.say("x");
    w.answers(calls(&["a"]), "tool_use");
    w.wakes(7);
    let step = w.dispatched()[0];
    w.finishes(step, "ok");
    w.answers(vec![json!({"type": "text", "text": "done"})], "end_turn");
    w.settle();
    assert_eq!(w.session.status(), SessionStatus::Idle);
    w.append(vec![Body::HomeReplaced {
        generation: Generation(5),
        root: RootHash::of(b"1"),
        origin: HomeOrigin::Restored,
        from_generation: Some(Generation(2)),
    }]);
    w.settle();
    assert_eq!(w.session.status(), SessionStatus::Idle, "nobody asked the agent to do anything");
    assert_eq!(w.session.unsecured().count(), 0);
    w.say("go on");
    w.settle_to_model();
    let request = serde_json::to_string(&w.session.request()).unwrap();
    assert!(
        request.contains("put back") && request.contains("generation 2") && request.contains("generation 5")
    );
    assert!(request.find("put back").unwrap() < request.find("go on").unwrap(), "in the order of events");
}

#[test]
fn a_home_that_went_back_names_the_calls_whose_files_it_lacks() {
    let mut w = World::new();
    w.say("x");
    w.answers(calls(&["a", "b"]), "tool_use");
    w.wakes(7);
    let steps = w.dispatched();
    w.finishes(steps[0], "ok");
    let secured = |step| Body::HomeSecured {
        generation: Generation(1),
        root: RootHash::of(b"1"),
        kind: SnapshotKind::Frozen,
        step: Some(step),
        changed: true,
        files: 0,
        bytes: 0,
    };
    w.append(vec![secured(steps[0])]);
    w.finishes(steps[1], "ok");
    w.answers(calls(&["c"]), "tool_use");
    w.append(vec![Body::RunnerLost { reason: "host gone".into() }]);
    w.settle();
    let bodies = w.session.home_ready(ready(8, true));
    assert!(
        matches!(&bodies[0], Body::HomeRolledBack { steps: lost, .. } if *lost == [step_event(steps[1])])
    );
    w.append(bodies);
    let step = w.dispatched()[0];
    w.finishes(step, "ok");
    w.settle_to_model();
    let request = w.session.request();
    let said = request["messages"][4]["content"].to_string();
    assert!(
        said.contains("rolled back to generation 1") && said.contains(r#"{\"command\":\"b\"}"#),
        "{said}"
    );
    // A snapshot that names a step before its result is here counts all the same.
    w.answers(calls(&["d"]), "tool_use");
    let step = w.dispatched()[0];
    w.append(vec![secured(step)]);
    w.finishes(step, "ok");
    assert!(!w.session.unsecured().any(|s| s == step));
}

#[test]
fn a_model_that_never_ends_its_turn_is_stopped() {
    let mut w = World::new();
    w.say("x");
    for n in 0..STEPS_PER_TURN_MAX {
        let content = vec![json!({"type": "tool_use", "id": format!("c{n}"), "name": "none", "input": {}})];
        w.answers(content, "tool_use");
    }
    assert_eq!(w.settle(), []);
    assert_eq!(w.last_stop(), Some(StopReason::RetriesExhausted));
}

/// What the random world does next.
#[derive(Debug, Clone)]
enum Move {
    Settle,
    Say,
    Interrupt,
    Claim,
    LoseRunner,
    LoseSandbox,
    Answer(u8, u8),
    Fail(u8),
    Ready(u8, bool),
    WakeFails,
    EndCall(u8, u8),
    Waited,
    Secured(u8),
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        8 => Just(Move::Settle),
        3 => Just(Move::Say),
        1 => Just(Move::Interrupt),
        1 => Just(Move::Claim),
        1 => Just(Move::LoseRunner),
        1 => Just(Move::LoseSandbox),
        6 => (0..8_u8, 0..8_u8).prop_map(|(a, b)| Move::Answer(a, b)),
        1 => (0..3_u8).prop_map(Move::Fail),
        4 => (0..3_u8, any::<bool>()).prop_map(|(n, b)| Move::Ready(n, b)),
        1 => Just(Move::WakeFails),
        6 => (0..4_u8, 0..4_u8).prop_map(|(a, b)| Move::EndCall(a, b)),
        2 => Just(Move::Waited),
        2 => (0..4_u8).prop_map(Move::Secured),
    ];
    prop::collection::vec(one, 0..80)
}

fn random_answer(what: u8, stop: u8, unique: usize) -> ModelAnswerFacts {
    let thinking = json!({"type": "thinking", "thinking": "t", "signature": "s"});
    let call = |n: usize| json!({"type": "tool_use", "id": format!("t{unique}_{n}"), "name": "bash", "input": {"command": "x"}});
    let odd = json!({"type": "tool_use", "id": "same", "name": "?", "input": 3});
    let content = match what {
        0 => vec![],
        1 => text_blocks("x"),
        2 => text_blocks("  "),
        3 => vec![thinking, call(0)],
        4 => vec![call(0), call(1), call(2)],
        5 => vec![odd.clone(), call(1), odd],
        6 => vec![thinking],
        _ => vec![json!({"type": "server_tool_use", "id": "s", "name": "w", "input": {}})],
    };
    let reasons =
        ["end_turn", "tool_use", "tool_use", "max_tokens", "pause_turn", "refusal", "new", "tool_use"];
    answer(content, reasons[usize::from(stop)])
}

impl World {
    fn steps(&self) -> Vec<StepId> {
        let steps = self.journal.iter().filter(|r| r.body.kind() == "agent.tool_use");
        steps.filter_map(|r| r.body.step()).collect()
    }

    fn perform(&mut self, what: &Move) {
        let wishes = self.session.next();
        let model = wishes
            .iter()
            .find_map(|e| if let Effect::CallModel { step, .. } = e { Some(*step) } else { None });
        let unique = self.journal.len();
        let bodies = match (what, model) {
            (Move::Settle, _) => match wishes.as_slice() {
                [Effect::Append(bodies)] => bodies.clone(),
                _ => vec![],
            },
            (Move::Say, _) => vec![Body::UserMessage { content: text_blocks("hello") }],
            (Move::Interrupt, _) => vec![Body::UserInterrupt {}],
            (Move::Claim, _) => vec![Body::DriverClaimed { epoch: unique as u64 }],
            (Move::LoseRunner, _) => vec![Body::RunnerLost { reason: "r".into() }],
            (Move::LoseSandbox, _) => self
                .session
                .sandbox
                .map(|sandbox| Body::SandboxLost { sandbox, reason: "r".into() })
                .into_iter()
                .collect(),
            (Move::Answer(what, stop), Some(step)) => {
                self.session.answered(step, random_answer(*what, *stop, unique))
            }
            (Move::Fail(kind), Some(step)) => {
                let kinds = [FailureKind::Transient, FailureKind::Rejected, FailureKind::Unauthorized];
                self.session.failed(step, failure(kinds[usize::from(*kind)]), 3)
            }
            (Move::Ready(n, put_back), _) if wishes.contains(&Effect::WakeHome) => {
                self.session.home_ready(ready(u128::from(*n), *put_back))
            }
            (Move::WakeFails, _) if wishes.contains(&Effect::WakeHome) => {
                self.session.home_failed(Fault::Corrupt, "d".into(), 3)
            }
            // Any step, also one that is over: late and repeated answers are part of the world.
            (Move::EndCall(which, how), _) => match self.steps().iter().rev().nth(usize::from(*which)) {
                None => vec![],
                Some(step) => match how {
                    0 => self.session.tool_never_started(*step, "r".into()),
                    1 => self.session.tool_interrupted(*step, "r"),
                    2 => self.session.tool_done(*step, vec![], true),
                    _ => self.session.tool_done(*step, text_blocks("ok"), false),
                },
            },
            (Move::Waited, _) => match wishes.as_slice() {
                [Effect::Wait { then, .. }] => then.clone(),
                _ => vec![],
            },
            (Move::Secured(which), _) => vec![Body::HomeSecured {
                generation: Generation(1),
                root: RootHash::of(b"1"),
                kind: SnapshotKind::Frozen,
                step: self.steps().iter().rev().nth(usize::from(*which)).copied(),
                changed: true,
                files: 0,
                bytes: 0,
            }],
            _ => vec![],
        };
        self.append(bodies);
    }
}

/// Drives to the end as a faultless world would; fails when the session is stuck.
fn drive_home(w: &mut World) {
    for _ in 0..200 {
        let effects = w.settle();
        let Some(effect) = effects.iter().find(|e| {
            !matches!(e, Effect::AcknowledgeTool { .. } | Effect::InterruptTool { .. } | Effect::SecureHome)
        }) else {
            assert_eq!(w.session.status(), SessionStatus::Idle, "{:?}", w.kinds());
            return;
        };
        let bodies = match effect {
            Effect::CallModel { step, .. } => {
                w.session.answered(*step, answer(text_blocks("bye"), "end_turn"))
            }
            Effect::WakeHome => w.session.home_ready(ready(9, false)),
            Effect::DispatchTool { step, .. } | Effect::QueryTool { step, .. } => {
                w.session.tool_done(*step, text_blocks("ok"), false)
            }
            Effect::Wait { then, .. } => then.clone(),
            other => panic!("{other:?}"),
        };
        assert!(!bodies.is_empty(), "{effect:?} leads nowhere");
        w.append(bodies);
    }
    panic!("stuck: {:?}", w.kinds());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn in_any_world_prefixes_fold_requests_are_sound_and_the_session_comes_to_rest(moves in moves()) {
        let mut w = World::new();
        let mut previous: Option<Map<String, Value>> = None;
        let mut last_answer: Option<Vec<Value>> = None;
        w.say("begin");
        for what in &moves {
            let folded = w.journal.len();
            w.perform(what);
            for record in &w.journal[folded..] {
                if let Body::ModelDone { content, .. } = &record.body {
                    last_answer = Some(content.clone());
                }
            }
            if w.session.next().iter().any(|e| matches!(e, Effect::CallModel { .. })) {
                let request = w.session.request();
                prop_assert_eq!(check_request(&request), Ok(()), "{}", Value::Object(request.clone()));
                if let Some(previous) = &previous {
                    prop_assert_eq!(check_prefix(previous, &request), Ok(()));
                }
                let odd = |b: &Value| b["id"] == "same";
                if let Some(answer) = last_answer.as_ref().filter(|a| !a.iter().any(odd)) {
                    prop_assert_eq!(check_answer_kept(answer, &request), Ok(()));
                }
                previous = Some(request);
            }
        }
        // The same prefix gives the same session, at every length.
        let mut replayed = fresh();
        for (n, record) in w.journal.iter().enumerate() {
            replayed.apply(record);
            let mut again = fresh();
            if n % 7 == 0 {
                w.journal[..=n].iter().for_each(|r| again.apply(r));
                prop_assert_eq!(&again, &replayed);
                // A record that comes twice changes nothing.
                again.apply(record);
                prop_assert_eq!(&again, &replayed);
            }
        }
        prop_assert_eq!(&replayed, &w.session);
        // One result per call, never two.
        let results: Vec<StepId> = w.journal.iter().filter(|r| r.body.kind() == "agent.tool_result").filter_map(|r| r.body.step()).collect();
        prop_assert_eq!(results.iter().collect::<BTreeSet<_>>().len(), results.len());
        drive_home(&mut w);
    }

    #[test]
    fn an_interrupt_at_any_point_leaves_a_history_that_the_verifier_accepts(moves in moves()) {
        let mut w = World::new();
        w.say("begin");
        moves.iter().for_each(|m| w.perform(m));
        w.append(vec![Body::UserInterrupt {}]);
        w.settle();
        prop_assert_eq!(w.session.status(), SessionStatus::Idle);
        w.say("go on");
        w.settle_to_model();
        prop_assert_eq!(check_request(&w.session.request()), Ok(()));
    }
}

impl World {
    /// The steps of the last answer's calls.
    fn calls(&self) -> Vec<StepId> {
        self.session.calls.iter().map(|call| call.step).collect()
    }

    fn confirms(&mut self, call: StepId, result: Confirmation, message: Option<&str>) {
        let deny_message = message.map(str::to_owned);
        self.append(vec![Body::UserToolConfirmation { tool_use_id: step_event(call), result, deny_message }]);
    }

    /// What the clients are asked for, when the session rests.
    fn asked(&mut self) -> Vec<EventId> {
        let effects = self.settle();
        assert!(self.session.is_paused(), "{effects:?}");
        assert_eq!(self.session.status(), SessionStatus::Idle);
        let is_leftover = |e: &&Effect| matches!(e, Effect::Wait { .. } | Effect::AcknowledgeTool { .. });
        let unperformed: Vec<_> = effects.iter().filter(|e| !is_leftover(e)).collect();
        assert!(unperformed.is_empty(), "{unperformed:?}");
        match &self.journal.last().unwrap().body {
            Body::StatusIdle { stop_reason: StopReason::RequiresAction { event_ids } } => event_ids.clone(),
            other => panic!("{other:?}"),
        }
    }

    fn results(&self) -> Vec<(String, bool)> {
        let result = |record: &Record| match &record.body {
            Body::ToolResult { content, is_error, .. } => {
                Some((content[0]["text"].as_str().unwrap().to_owned(), *is_error))
            }
            _ => None,
        };
        self.journal.iter().filter_map(result).collect()
    }
}

#[test]
fn a_call_that_asks_runs_only_after_a_clients_word_and_then_once() {
    let mut world = asking();
    world.say("Do it.");
    world.answers(vec![call("a", "bash", json!({"command": "ls"}))], "tool_use");
    let step = world.calls()[0];
    assert_eq!(world.asked(), [step_event(step)]);
    let rests = world.session.next();
    assert!(
        matches!(rests.as_slice(), [Effect::Wait { until, .. }]
        if until.unix_ms() > i64::try_from(ANSWER_WAIT_MAX_MS).unwrap()),
        "{rests:?}"
    );
    // Another driver, days later, folds the same.
    world.append(vec![Body::DriverClaimed { epoch: 2 }]);
    assert_eq!(world.session.next(), rests);
    world.confirms(step, Confirmation::Allow, None);
    world.wakes(1);
    assert_eq!(world.session.status(), SessionStatus::Running);
    let effects = world.settle();
    assert!(
        matches!(effects.as_slice(), [Effect::DispatchTool { step: sent, .. }] if *sent == step),
        "{effects:?}"
    );
    // Said twice: it runs, or has run, and is not started again.
    world.confirms(step, Confirmation::Allow, None);
    assert_eq!(world.settle(), effects);
    world.finishes(step, "done");
    world.confirms(step, Confirmation::Deny, None);
    world.settle_to_model();
    assert_eq!(world.results(), [("done".to_owned(), false)]);
    check_request(&world.session.request()).unwrap();
}

#[test]
fn a_denied_call_is_answered_with_the_reason_and_the_others_go_on() {
    let mut world = asking();
    world.say("Do it.");
    let calls = vec![
        call("a", "bash", json!({"command": "rm -r /"})),
        call("b", "read", json!({"file_path": "x"})),
        call("c", "bash", json!({"command": "ls"})),
    ];
    world.answers(calls, "tool_use");
    let steps = world.calls();
    // What asks for nothing does not wait for what does.
    world.wakes(1);
    let effects = world.settle();
    assert!(
        matches!(effects.as_slice(), [Effect::DispatchTool { step, .. }] if *step == steps[1]),
        "{effects:?}"
    );
    assert_eq!(world.session.status(), SessionStatus::Running);
    world.finishes(steps[1], "text");
    assert_eq!(world.asked(), [step_event(steps[0]), step_event(steps[2])]);
    world.confirms(steps[0], Confirmation::Deny, Some("too much"));
    assert_eq!(world.asked(), [step_event(steps[2])], "the rest is asked for again");
    assert_eq!(
        world.results().last().unwrap(),
        &("not run: the user denied the call: too much".to_owned(), true)
    );
    world.confirms(steps[2], Confirmation::Deny, None);
    world.settle_to_model();
    assert_eq!(world.results().len(), 3);
    check_request(&world.session.request()).unwrap();
}

#[test]
fn a_clients_tool_is_run_by_the_client_and_never_dispatched() {
    let mut world = asking();
    world.say("Ship.");
    world.answers(vec![call("a", "deploy", json!({"to": "production"}))], "tool_use");
    let step = world.calls()[0];
    assert_eq!(world.asked(), [step_event(step)]);
    // A word that is not a result changes nothing, and a result of another call neither.
    world.confirms(step, Confirmation::Allow, None);
    world.append(vec![Body::UserCustomToolResult {
        custom_tool_use_id: EventId::from_uuid(uuid::Uuid::from_u128(99)),
        content: text_blocks("forged"),
        is_error: false,
    }]);
    assert_eq!(world.asked(), [step_event(step)]);
    world.append(vec![Body::UserCustomToolResult {
        custom_tool_use_id: step_event(step),
        content: text_blocks("shipped"),
        is_error: false,
    }]);
    world.settle_to_model();
    let request = world.session.request();
    check_request(&request).unwrap();
    let text = Value::Object(request).to_string();
    assert!(text.contains("shipped") && !text.contains("forged"));
    assert!(!world.journal.iter().any(|record| matches!(record.body, Body::ToolDispatched { .. })));
    assert_eq!(world.session.unsecured().count(), 0, "it touched no file of the home");
}

#[test]
fn what_the_user_says_while_calls_wait_is_heard_and_an_interrupt_ends_the_turn() {
    let mut world = asking();
    world.say("Do it.");
    world.answers(vec![call("a", "bash", json!({"command": "ls"}))], "tool_use");
    let step = world.calls()[0];
    world.asked();
    world.say("And hurry.");
    assert!(world.session.is_paused(), "a message is no answer");
    assert!(matches!(world.settle().as_slice(), [Effect::Wait { .. }]));
    world.append(vec![Body::UserInterrupt {}]);
    world.settle();
    assert_eq!(world.results().last().unwrap().0, "interrupted by the user before it started");
    assert_eq!(world.session.status(), SessionStatus::Idle);
    assert!(!world.session.is_paused());
    // Too late.
    world.confirms(step, Confirmation::Allow, None);
    assert_eq!(world.settle(), []);
    world.say("Again.");
    world.settle_to_model();
    check_request(&world.session.request()).unwrap();
}

#[test]
fn a_call_that_nobody_answers_is_answered_for_them_in_the_end() {
    let mut world = asking();
    world.say("Do it.");
    world.answers(vec![call("a", "bash", json!({"command": "ls"}))], "tool_use");
    world.asked();
    let then = match world.session.next().as_slice() {
        [Effect::Wait { then, .. }] => then.clone(),
        other => panic!("{other:?}"),
    };
    world.append(then);
    world.settle_to_model();
    assert_eq!(world.results(), [("not run: nobody answered in time".to_owned(), true)]);
    check_request(&world.session.request()).unwrap();
}

/// An agent whose context is full soon.
fn forgetful() -> World {
    let document =
        json!({"model": {"id": "m", "context_tokens": 2000}, "tools": [{"type": "agent_toolset_20260401"}]});
    let config = AgentConfig::from_document(&document).unwrap();
    let id = SessionId::from_uuid(uuid::Uuid::from_u128(1));
    World { session: Session::new(id, config), journal: Vec::new() }
}

/// An answer after a request that filled so much of the context.
fn answer_at(content: Vec<Value>, stop_reason: &str, input_tokens: u64) -> ModelAnswerFacts {
    ModelAnswerFacts { usage: json!({"input_tokens": input_tokens}), ..answer(content, stop_reason) }
}

impl World {
    fn answers_at(&mut self, content: Vec<Value>, stop_reason: &str, input_tokens: u64) {
        let step = self.settle_to_model();
        let bodies = self.session.answered(step, answer_at(content, stop_reason, input_tokens));
        self.append(bodies);
    }

    /// One round: a call and its result.
    fn round(&mut self, number: usize, input_tokens: u64) {
        let id = format!("c{number}");
        self.answers_at(calls(&[&id]), "tool_use", input_tokens);
        if self.session.sandbox().is_none() {
            self.wakes(1);
        }
        self.settle();
        let step = self.calls()[0];
        self.finishes(step, &format!("result {number} {}", "x".repeat(300)));
    }

    fn request_text(&self) -> String {
        let request = self.session.request();
        check_request(&request).unwrap();
        Value::Object(request).to_string()
    }
}

#[test]
fn a_full_context_is_summarised_and_what_the_user_said_and_the_last_rounds_stay() {
    let mut world = forgetful();
    world.say("Count the ducks of 1987.");
    for number in 0..4 {
        world.round(number, 1000);
    }
    world.say("Only the green ones.");
    world.round(4, 1700);
    // More than four fifths of 2,000 tokens: the next request is for a summary.
    let before = world.session.request();
    let step = world.settle_to_model();
    let request = world.session.request();
    assert_eq!(request["tool_choice"], json!({"type": "none"}));
    check_request(&request).unwrap();
    check_prefix(&before, &request).unwrap();
    let summary = answer_at(text_blocks("17 green ducks so far."), "end_turn", 1800);
    let bodies = world.session.answered(step, summary);
    world.append(bodies);
    let kinds = world.journal.iter().filter(|r| matches!(r.body, Body::AgentMessage { .. })).count();
    assert_eq!(kinds, 0, "the summary is for the model");
    world.settle_to_model();
    let text = world.request_text();
    for kept in ["Count the ducks of 1987.", "17 green ducks so far.", "Only the green ones.", "result 4"] {
        assert!(text.contains(kept), "{kept}: {text}");
    }
    assert!(!text.contains("result 0") && !text.contains("tool_choice"));
    check_prefix(&before, &world.session.request()).unwrap();
    // The same fold again, from the journal alone.
    let mut again = forgetful();
    again.append(world.journal.iter().map(|record| record.body.clone()).collect());
    assert_eq!(again.session.request(), world.session.request());
    // And a second time: what the user said the first time is still there.
    for number in 5..9 {
        world.round(number, 1000);
    }
    world.round(9, 1900);
    let step = world.settle_to_model();
    assert_eq!(world.session.request()["tool_choice"], json!({"type": "none"}));
    let bodies = world.session.answered(step, answer_at(text_blocks("All counted."), "end_turn", 1));
    world.append(bodies);
    world.settle_to_model();
    let text = world.request_text();
    assert!(text.contains("Count the ducks of 1987.") && text.contains("Only the green ones."));
    assert!(text.contains("All counted.") && !text.contains("17 green ducks"));
}

#[test]
fn without_a_summary_the_session_goes_on_all_the_same() {
    for refused in [true, false] {
        let mut world = forgetful();
        world.say("Count the ducks.");
        for number in 0..5 {
            world.round(number, 1000);
        }
        if refused {
            world.round(5, 1900);
            let step = world.settle_to_model();
            let too_long = ModelFailureFacts { status: Some(400), ..failure(FailureKind::Rejected) };
            let bodies = world.session.failed(step, too_long, 0);
            world.append(bodies);
        } else {
            world.answers_at(vec![], "model_context_window_exceeded", 2000);
        }
        world.settle_to_model();
        let text = world.request_text();
        assert!(text.contains("Count the ducks.") && text.contains("c0"), "{text}");
        assert!(!text.contains("result 0"));
    }
}

#[test]
fn an_interrupt_while_the_summary_is_written_ends_the_turn_and_the_next_one_asks_again() {
    let mut world = forgetful();
    world.say("Count the ducks.");
    for number in 0..4 {
        world.round(number, 1000);
    }
    world.round(4, 1900);
    world.settle_to_model();
    world.append(vec![Body::UserInterrupt {}]);
    world.settle();
    assert!(!world.session.is_turn_open());
    world.say("Go on.");
    world.settle_to_model();
    assert_eq!(world.session.request()["tool_choice"], json!({"type": "none"}));
    assert!(
        world.session.pending.iter().any(|pending| pending.opens_turn),
        "the message waits for the real request"
    );
}
