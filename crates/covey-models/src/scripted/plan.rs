//! Chooses the next answer from the request's history, and from nothing else.
//!
//! The history is walked once from its beginning, as a small state machine: each assistant message moves the
//! position, and what the user message behind it says (interrupted, rolled back, a new chapter) decides what is
//! next. Call ids carry the position they were made at, so they are fresh whenever a turn is played again, and the
//! same whenever the same request is answered again.
//!
//! When the client asks for a summary, because the conversation grows too long, the summary carries the positions before
//! the latest answers; a history that begins with it is walked from the one that belongs to its first answer.

use std::fmt;

use covey_harness::verify::{COMPACT_ASK_MARK, COMPACTED_MARK};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::script::{AfterRollback, OnInterrupted, Script, ScriptCall, ScriptFile, ScriptTurn};
use crate::ModelAnswer;

/// A result that is an error and contains this was interrupted by a loss. The loop's words for a call that the
/// user interrupted are others.
pub(super) const INTERRUPTED_MARK: &str = "interrupted, may have had effects";
/// A user message that contains this says that the home was rolled back.
pub(super) const ROLLED_BACK_MARK: &str = "The home was put back as of generation";
/// What the model says when its script has no more turns.
pub(super) const SCRIPT_END_TEXT: &str = "The script has ended.";
/// An interrupted call is made again this often; then the next turn follows. Every loss in a chaos run costs one.
const RECOVERY_ATTEMPTS_MAX: u32 = 16;

/// What stands around the positions in a summary.
const POSITIONS_BEGIN: &str = "<<script ";
const POSITIONS_END: &str = ">>";
/// Positions that a summary carries: as many answers may be kept beside it.
const POSITIONS_MAX: usize = 256;

/// A request that no script answers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum PlanError {
    /// No script's `when` matches.
    #[error("no script matches the first user message; add one whose `when` is part of it, or is empty")]
    NoScript,
    /// The request has no user message with text.
    #[error("the request has no user message")]
    NoUserMessage,
    /// The history begins with a summary that is not ours.
    #[error("the summary at the beginning does not say where in its script the conversation stands")]
    Lost,
}

/// The next answer.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Reply {
    pub(super) content: Vec<Value>,
    pub(super) stop_reason: &'static str,
    pub(super) think_ms: u64,
    pub(super) id: String,
}

impl Reply {
    pub(super) fn into_answer(self, request: &Map<String, Value>) -> ModelAnswer {
        ModelAnswer {
            usage: usage(request, &self.content),
            model: model_name(request),
            request_id: Some(format!("req_{}", self.id)),
            stop_reason: self.stop_reason.to_owned(),
            content: self.content,
        }
    }
}

/// The model's name as the request has it.
pub(super) fn model_name(request: &Map<String, Value>) -> String {
    request.get("model").and_then(Value::as_str).unwrap_or("scripted").to_owned()
}

/// Four bytes are one token; wrong, but the same each time.
pub(super) fn usage(request: &Map<String, Value>, content: &[Value]) -> Value {
    let tokens = |bytes: usize| bytes / 4 + 1;
    json!({
        "input_tokens": tokens(request.get("messages").map_or(0, |messages| messages.to_string().len())),
        "output_tokens": tokens(content.iter().map(|block| block.to_string().len()).sum()),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    })
}

/// The signature of a thinking text; verified when the block comes back.
pub(super) fn signature(text: &str) -> String {
    format!("covey-{}", &blake3::hash(text.as_bytes()).to_hex()[..32])
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Phase {
    /// The turn as written.
    Plain,
    /// The check of `on_interrupted`.
    Check,
    /// The interrupted calls once more.
    Again,
    /// `on_rolled_back.first`.
    RolledBack,
}

/// Where in its script a conversation stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Position {
    /// Assistant messages before the running chapter began; 0 for the script's own turns.
    since: usize,
    chapter: Option<usize>,
    /// Rollbacks so far.
    epoch: u32,
    turn: usize,
    phase: Phase,
    attempt: u32,
    /// Which of the turn's calls were interrupted and not yet made again, and the id of the first of them.
    interrupted: Vec<usize>,
    interrupted_id: String,
}

impl Position {
    fn at(since: usize, chapter: Option<usize>, epoch: u32) -> Self {
        Self {
            since,
            chapter,
            epoch,
            turn: 0,
            phase: Phase::Plain,
            attempt: 0,
            interrupted: Vec::new(),
            interrupted_id: String::new(),
        }
    }

    fn go_to(&mut self, turn: usize) {
        self.turn = turn;
        self.phase = Phase::Plain;
        self.attempt = 0;
        self.interrupted.clear();
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phase = match self.phase {
            Phase::Plain => "p",
            Phase::Check => "c",
            Phase::Again => "a",
            Phase::RolledBack => "r",
        };
        write!(f, "m{}e{}t{}{phase}{}", self.since, self.epoch, self.turn, self.attempt)
    }
}

/// What a summary carries.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Carried {
    /// Index of the script.
    script: usize,
    /// Answers so far.
    answers: usize,
    /// Before each of the latest answers, and behind the last one.
    positions: Vec<Position>,
}

/// A conversation up to its end.
struct Walk<'a> {
    script: &'a Script,
    index: usize,
    answers: usize,
    position: Position,
    /// Before each of the latest answers.
    before: Vec<Position>,
}

impl Walk<'_> {
    fn summary(&self) -> String {
        let mut positions = self.before.clone();
        positions.push(self.position.clone());
        let positions = positions.split_off(positions.len().saturating_sub(POSITIONS_MAX));
        let carried = Carried { script: self.index, answers: self.answers, positions };
        // A position is made of numbers and names, which always have a JSON form.
        let carried = serde_json::to_string(&carried).unwrap_or_default();
        format!("{} answers were given. {POSITIONS_BEGIN}{carried}{POSITIONS_END}", self.answers)
    }
}

/// Whether the request asks for a summary of its conversation.
pub(super) fn asks_for_summary(request: &Map<String, Value>) -> bool {
    let last = request.get("messages").and_then(Value::as_array).and_then(|messages| messages.last());
    last.is_some_and(|message| texts(message).iter().any(|text| text.starts_with(COMPACT_ASK_MARK)))
}

/// Where a conversation stands that begins with a summary, and how many answers came before those that are kept.
fn resumed(summary: &str) -> Result<(usize, usize, Position), PlanError> {
    let carried = summary
        .rfind(POSITIONS_BEGIN)
        .map(|at| &summary[at + POSITIONS_BEGIN.len()..])
        .and_then(|rest| serde_json::from_str::<Carried>(rest.split_once(POSITIONS_END)?.0).ok());
    let kept = summary
        .rsplit_once("Your last ")
        .and_then(|(_, rest)| rest.split_once(" answers follow")?.0.parse::<usize>().ok());
    let (mut carried, kept) = carried.zip(kept).ok_or(PlanError::Lost)?;
    let at = carried.positions.len().checked_sub(kept + 1).ok_or(PlanError::Lost)?;
    let answers = carried.answers.checked_sub(kept).ok_or(PlanError::Lost)?;
    Ok((carried.script, answers, carried.positions.swap_remove(at)))
}

/// Chooses the answer to `request`.
///
/// # Errors
/// When there is no user message, or no script for it.
pub(super) fn reply(scripts: &ScriptFile, request: &Map<String, Value>) -> Result<Reply, PlanError> {
    let empty = Vec::new();
    let messages = request.get("messages").and_then(Value::as_array).unwrap_or(&empty);
    let walk = walk(scripts, messages)?;
    if asks_for_summary(request) {
        let content = vec![json!({"type": "text", "text": walk.summary()})];
        let id = format!("s{:x}{}summary", walk.script.seed, walk.position);
        return Ok(Reply { content, stop_reason: "end_turn", think_ms: 0, id });
    }
    Ok(compose(walk.script, &walk.position))
}

fn walk<'a>(scripts: &'a ScriptFile, messages: &[Value]) -> Result<Walk<'a>, PlanError> {
    let first = messages.iter().find(|message| role(message) == "user").ok_or(PlanError::NoUserMessage)?;
    let first_texts = texts(first);
    let summary = first_texts.first().filter(|text| text.starts_with(COMPACTED_MARK));
    let (index, answers, position) = match summary {
        Some(summary) => resumed(summary)?,
        None => {
            let index = scripts.choose(&first_texts.join("\n")).ok_or(PlanError::NoScript)?;
            (index, 0, Position::at(0, None, 0))
        }
    };
    let script = scripts.scripts.get(index).ok_or(PlanError::NoScript)?;
    let mut walk = Walk { script, index, answers, position, before: Vec::new() };
    for (at, message) in messages.iter().enumerate() {
        if role(message) == "assistant" {
            walk.answers += 1;
            // Between two user messages there may be a resumed answer; only the last of them counts.
            if messages.get(at + 1).is_some_and(|next| role(next) == "assistant") {
                continue;
            }
            walk.before.push(walk.position.clone());
            let results = messages.get(at + 1).map(results).unwrap_or_default();
            let told = messages.get(at + 1).map(texts).unwrap_or_default();
            advance(script, &mut walk.position, message, &results, &told);
        }
        if role(message) == "user" {
            // What the user said before stands in the summary, and is in its position already.
            let said: Vec<String> =
                texts(message).into_iter().filter(|text| !text.starts_with(COMPACTED_MARK)).collect();
            let chapter = script
                .chapters
                .iter()
                .rposition(|c| !c.when.is_empty() && said.iter().any(|text| text.contains(&c.when)));
            if let Some(chapter) = chapter {
                walk.position = Position::at(walk.answers, Some(chapter), walk.position.epoch);
            }
        }
    }
    Ok(walk)
}

/// Moves the position over one assistant message and what the user message behind it says.
fn advance(
    script: &Script,
    position: &mut Position,
    answer: &Value,
    results: &[CallResult<'_>],
    told: &[String],
) {
    if told.iter().any(|text| text.contains(ROLLED_BACK_MARK)) {
        position.epoch += 1;
        if let Some(rule) = &script.on_rolled_back {
            if rule.first.is_some() {
                position.phase = Phase::RolledBack;
                position.attempt = 0;
            } else {
                position.go_to(after_rollback(rule.then, position.turn));
            }
            return;
        }
    }
    if position.phase == Phase::RolledBack {
        let then = script.on_rolled_back.as_ref().map(|rule| rule.then).unwrap_or_default();
        position.go_to(after_rollback(then, position.turn));
        return;
    }
    let rule = turns(script, position).get(position.turn).and_then(|turn| turn.on_interrupted.as_ref());
    let Some(rule) = rule.filter(|_| position.attempt < RECOVERY_ATTEMPTS_MAX) else {
        position.go_to(position.turn + 1);
        return;
    };
    let lost: Vec<&CallResult<'_>> = results.iter().filter(|result| result.interrupted()).collect();
    match position.phase {
        Phase::Check if lost.is_empty() => {
            let seen: String = results.iter().map(|result| result.text.as_str()).collect();
            if seen.contains(&rule.again_when) {
                position.phase = Phase::Again;
            } else {
                position.go_to(position.turn + 1);
            }
        }
        // The check itself was interrupted: look again.
        Phase::Check => position.attempt += 1,
        _ if lost.is_empty() => position.go_to(position.turn + 1),
        _ => {
            position.interrupted = interrupted_calls(answer, &lost, position);
            position.interrupted_id = lost[0].id.to_owned();
            position.attempt += 1;
            position.phase = if rule.check.is_some() { Phase::Check } else { Phase::Again };
        }
    }
}

fn after_rollback(then: AfterRollback, turn: usize) -> usize {
    match then {
        AfterRollback::Next => turn + 1,
        AfterRollback::Again => turn,
        AfterRollback::Start => 0,
        AfterRollback::Turn(turn) => turn,
    }
}

/// Which calls of the turn, by index, the lost results belong to.
fn interrupted_calls(answer: &Value, lost: &[&CallResult<'_>], position: &Position) -> Vec<usize> {
    let ids: Vec<&str> = blocks(answer)
        .iter()
        .filter(|block| block.get("type").and_then(Value::as_str) == Some("tool_use"))
        .filter_map(|block| block.get("id").and_then(Value::as_str))
        .collect();
    let made = |at: usize| {
        if position.phase == Phase::Again { position.interrupted.get(at).copied() } else { Some(at) }
    };
    ids.iter()
        .enumerate()
        .filter(|(_, id)| lost.iter().any(|result| result.id == **id))
        .filter_map(|(at, _)| made(at))
        .collect()
}

fn turns<'a>(script: &'a Script, position: &Position) -> &'a [ScriptTurn] {
    match position.chapter {
        Some(chapter) => &script.chapters[chapter].turns,
        None => &script.turns,
    }
}

fn compose(script: &Script, position: &Position) -> Reply {
    let id = format!("s{:x}{position}", script.seed);
    let turn = turns(script, position).get(position.turn);
    let numbered =
        |calls: &[ScriptCall]| -> Vec<(usize, ScriptCall)> { calls.iter().cloned().enumerate().collect() };
    let (text, thinking, calls, think_ms) = match (position.phase, turn) {
        (Phase::RolledBack, _) => {
            let first =
                script.on_rolled_back.as_ref().and_then(|rule| rule.first.clone()).unwrap_or_default();
            (first.text, first.thinking, numbered(&first.calls), first.think_ms)
        }
        (_, None) => (Some(SCRIPT_END_TEXT.to_owned()), None, Vec::new(), 0),
        (Phase::Plain, Some(turn)) => {
            (turn.text.clone(), turn.thinking.clone(), numbered(&turn.calls), turn.think_ms)
        }
        (Phase::Check, Some(turn)) => {
            let check = turn.on_interrupted.as_ref().and_then(|OnInterrupted { check, .. }| check.clone());
            let text = "A call was interrupted; I look at what it did.".to_owned();
            (Some(text), None, check.into_iter().enumerate().collect(), turn.think_ms)
        }
        (Phase::Again, Some(turn)) => {
            let calls = numbered(&turn.calls);
            let again = calls.into_iter().filter(|(at, _)| position.interrupted.contains(at)).collect();
            (Some("It has to be done again.".to_owned()), None, again, turn.think_ms)
        }
    };
    let mut content = Vec::new();
    if let Some(thinking) = thinking.filter(|text| !text.is_empty()) {
        content.push(json!({"type": "thinking", "thinking": thinking, "signature": signature(&thinking)}));
    }
    if let Some(text) = text.filter(|text| !text.is_empty()) {
        content.push(json!({"type": "text", "text": text}));
    }
    let stop_reason = if calls.is_empty() { "end_turn" } else { "tool_use" };
    for (at, call) in calls {
        let call_id = format!("toolu_{id}k{at}");
        let mut input = Value::Object(call.input);
        fill(&mut input, "{{call_id}}", &call_id);
        fill(&mut input, "{{interrupted_id}}", &position.interrupted_id);
        content.push(json!({"type": "tool_use", "id": call_id, "name": call.name, "input": input}));
    }
    if content.is_empty() {
        content.push(json!({"type": "text", "text": "Done."}));
    }
    Reply { content, stop_reason, think_ms, id }
}

fn fill(value: &mut Value, mark: &str, with: &str) {
    match value {
        Value::String(text) if text.contains(mark) => *text = text.replace(mark, with),
        Value::Array(list) => list.iter_mut().for_each(|value| fill(value, mark, with)),
        Value::Object(map) => map.values_mut().for_each(|value| fill(value, mark, with)),
        _ => {}
    }
}

struct CallResult<'a> {
    id: &'a str,
    is_error: bool,
    text: String,
}

impl CallResult<'_> {
    fn interrupted(&self) -> bool {
        self.is_error && self.text.contains(INTERRUPTED_MARK)
    }
}

fn role(message: &Value) -> &str {
    message.get("role").and_then(Value::as_str).unwrap_or_default()
}

fn blocks(message: &Value) -> &[Value] {
    message.get("content").and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// The texts of a content that is a string or a list of blocks.
fn texts_of(content: Option<&Value>) -> Vec<String> {
    match content {
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(blocks)) => blocks
            .iter()
            .filter(|block| block.get("type").and_then(Value::as_str) == Some("text"))
            .filter_map(|block| Some(block.get("text")?.as_str()?.to_owned()))
            .collect(),
        _ => Vec::new(),
    }
}

fn texts(message: &Value) -> Vec<String> {
    texts_of(message.get("content"))
}

fn results(message: &Value) -> Vec<CallResult<'_>> {
    blocks(message)
        .iter()
        .filter(|block| block.get("type").and_then(Value::as_str) == Some("tool_result"))
        .map(|block| CallResult {
            id: block.get("tool_use_id").and_then(Value::as_str).unwrap_or_default(),
            is_error: block.get("is_error").and_then(Value::as_bool).unwrap_or_default(),
            text: texts_of(block.get("content")).concat(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(json: Value) -> ScriptFile {
        serde_json::from_value(json!({ "scripts": [json] })).unwrap()
    }

    fn request(messages: &[Value]) -> Map<String, Value> {
        let Value::Object(body) = json!({"model": "m", "messages": messages}) else { unreachable!() };
        body
    }

    /// Plays a conversation: each user content is answered; returns all messages.
    fn play(scripts: &ScriptFile, user: &[Value]) -> Vec<Value> {
        let mut messages = Vec::new();
        for content in user {
            messages.push(json!({"role": "user", "content": content}));
            let reply = reply(scripts, &request(&messages)).unwrap();
            messages.push(json!({"role": "assistant", "content": reply.content}));
        }
        messages
    }

    fn result(id: &str, text: &str, is_error: bool) -> Value {
        json!({"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": text}],
            "is_error": is_error})
    }

    fn ids(message: &Value) -> Vec<String> {
        blocks(message).iter().filter_map(|b| Some(b.get("id")?.as_str()?.to_owned())).collect()
    }

    const LOST: &str = "interrupted, may have had effects: the sandbox is gone.";

    #[test]
    fn turns_follow_the_history_and_the_same_history_gives_the_same_answer() {
        let scripts = script(json!({"seed": 255, "turns": [
            {"thinking": "hm", "text": "go", "calls": [
                {"name": "bash", "input": {"command": "echo {{call_id}}"}},
                {"name": "read", "input": {"file_path": "a"}}]},
            {"text": "done"},
        ]}));
        let first = play(&scripts, &[json!("start")]);
        let [a, b] = &ids(&first[1])[..] else { panic!("two calls") };
        assert_eq!((a.as_str(), b.as_str()), ("toolu_sffm0e0t0p0k0", "toolu_sffm0e0t0p0k1"));
        assert_eq!(blocks(&first[1])[2]["input"]["command"], json!(format!("echo {a}")));
        assert_eq!(blocks(&first[1])[0]["signature"], json!(signature("hm")));
        let answers = json!([result(a, "x", false), result(b, "y", false)]);
        let all = play(&scripts, &[json!("start"), answers, json!("more")]);
        assert_eq!(all[3]["content"], json!([{"type": "text", "text": "done"}]));
        assert_eq!(all[5]["content"][0]["text"], json!(SCRIPT_END_TEXT));
        let again = reply(&scripts, &request(&all[..1])).unwrap();
        assert_eq!(json!(again.content), all[1]["content"]);
        assert_eq!(again.stop_reason, "tool_use");
    }

    #[test]
    fn an_interrupted_call_is_checked_and_made_again_only_when_the_check_says_so() {
        let scripts = script(json!({"turns": [
            {"calls": [{"name": "bash", "input": {"command": "a"}}, {"name": "bash", "input": {"command": "b"}}],
             "on_interrupted": {"check": {"name": "bash", "input": {"command": "grep {{interrupted_id}} log"}},
                                "again_when": "absent"}},
            {"text": "done"},
        ]}));
        let plain = ["toolu_s0m0e0t0p0k0", "toolu_s0m0e0t0p0k1"];
        let lost = json!([result(plain[0], "ok", false), result(plain[1], LOST, true)]);
        let mut user = vec![json!("start"), lost];
        let messages = play(&scripts, &user);
        let check = ids(&messages[3]);
        assert_eq!(check, ["toolu_s0m0e0t0c1k0"]);
        assert_eq!(blocks(&messages[3])[1]["input"]["command"], json!(format!("grep {} log", plain[1])));

        user.push(json!([result(&check[0], "absent", false)]));
        let again = ids(&play(&scripts, &user)[5]);
        assert_eq!(again, ["toolu_s0m0e0t0a1k1"], "only the second call, under a fresh id");
        // The repeated call is lost as well: checked again, under a fresh id.
        user.push(json!([result(&again[0], LOST, true)]));
        let second_check = ids(&play(&scripts, &user)[7]);
        assert_eq!(second_check, ["toolu_s0m0e0t0c2k0"]);
        user.push(json!([result(&second_check[0], "present", false)]));
        assert_eq!(play(&scripts, &user)[9]["content"][0]["text"], json!("done"));
    }

    #[test]
    fn an_interruption_without_a_rule_goes_on_with_the_next_turn() {
        let scripts = script(json!({"turns": [{"calls": [{"name": "bash"}]}, {"text": "done"}]}));
        let lost = json!([result("toolu_s0m0e0t0p0k0", LOST, true)]);
        assert_eq!(play(&scripts, &[json!("x"), lost])[3]["content"][0]["text"], json!("done"));
    }

    #[test]
    fn a_rollback_looks_around_and_starts_again_under_fresh_ids() {
        let scripts = script(json!({
            "turns": [{"calls": [{"name": "bash"}]}, {"calls": [{"name": "bash"}]}, {"text": "done"}],
            "on_rolled_back": {"first": {"text": "look", "calls": [{"name": "glob"}]}, "then": "start"},
        }));
        let ok = |id: &str| json!([result(id, "ok", false)]);
        let mut user = vec![
            json!("x"),
            ok("toolu_s0m0e0t0p0k0"),
            json!([result("toolu_s0m0e0t1p0k0", "ok", false),
                {"type": "text", "text": "[covey] The home was put back as of generation 3. Check it."}]),
        ];
        assert_eq!(ids(&play(&scripts, &user)[5]), ["toolu_s0m0e1t1r0k0"]);
        user.push(ok("toolu_s0m0e1t1r0k0"));
        assert_eq!(ids(&play(&scripts, &user)[7]), ["toolu_s0m0e1t0p0k0"]);
    }

    #[test]
    fn scripts_and_chapters_are_chosen_by_what_the_user_wrote() {
        let scripts: ScriptFile = serde_json::from_value(json!({"scripts": [
            {"when": "alpha", "turns": [{"text": "A"}], "chapters": [
                {"when": "read", "turns": [{"calls": [{"name": "read"}]}, {"text": "was read"}]}]},
            {"turns": [{"text": "default"}]},
        ]}))
        .unwrap();
        assert_eq!(play(&scripts, &[json!("beta")])[1]["content"][0]["text"], json!("default"));
        let user = [json!("alpha"), json!("please read"), json!([result("toolu_s0m1e0t0p0k0", "x", false)])];
        let messages = play(&scripts, &user);
        assert_eq!(messages[1]["content"][0]["text"], json!("A"));
        assert_eq!(ids(&messages[3]), ["toolu_s0m1e0t0p0k0"]);
        assert_eq!(messages[5]["content"][0]["text"], json!("was read"));
        let none = ScriptFile { scripts: vec![Script { when: "zzz".into(), ..Script::default() }] };
        let body = request(&[json!({"role": "user", "content": "alpha"})]);
        assert_eq!(reply(&none, &body), Err(PlanError::NoScript));
    }

    #[test]
    fn a_conversation_goes_on_behind_its_summary_wherever_it_was_cut() {
        let scripts: ScriptFile = serde_json::from_value(json!({"scripts": [
            {"when": "never", "turns": []},
            {"when": "begin", "seed": 3, "turns": (0..6).map(|n| json!({"text": format!("step {n}"),
                "calls": [{"name": "bash", "input": {"command": "{{call_id}}"}}]})).collect::<Vec<_>>(),
             "chapters": [{"when": "more", "turns": [{"text": "one"}, {"text": "two"}]}]},
        ]}))
        .unwrap();
        let mut messages = vec![json!({"role": "user", "content": "begin"})];
        for _ in 0..4 {
            let answer = reply(&scripts, &request(&messages)).unwrap().content;
            let id = answer[1]["id"].as_str().unwrap().to_owned();
            messages.push(json!({"role": "assistant", "content": answer}));
            messages.push(json!({"role": "user", "content": [result(&id, "ok", false)]}));
        }
        let next = reply(&scripts, &request(&messages)).unwrap();
        let mut asked = messages.clone();
        let ask = json!({"type": "text", "text": format!("{COMPACT_ASK_MARK} Write.")});
        asked[8]["content"].as_array_mut().unwrap().push(ask);
        let summary = reply(&scripts, &request(&asked)).unwrap();
        assert_eq!(summary.stop_reason, "end_turn");
        let summary = summary.content[0]["text"].as_str().unwrap();
        for kept in 0..=4 {
            let note =
                format!("{COMPACTED_MARK} begin, never more {summary} Your last {kept} answers follow word");
            let mut short = vec![json!({"role": "user", "content": [{"type": "text", "text": note}]})];
            // The results of what was left out are left out as well.
            short.extend_from_slice(&messages[9 - 2 * kept..]);
            assert_eq!(reply(&scripts, &request(&short)), Ok(next.clone()), "{kept} kept");
            let last = short.len() - 1;
            let more = json!({"type": "text", "text": "and more"});
            short[last]["content"].as_array_mut().unwrap().push(more);
            assert_eq!(reply(&scripts, &request(&short)).unwrap().content[0]["text"], "one");
        }
        let foreign =
            json!({"role": "user", "content": format!("{COMPACTED_MARK} Your last 0 answers follow")});
        assert_eq!(reply(&scripts, &request(&[foreign])), Err(PlanError::Lost));
    }

    #[test]
    fn a_misspelt_script_is_refused() {
        let wrong = json!({"scripts": [{"turns": [{"txet": "x"}]}]});
        let error = serde_json::from_value::<ScriptFile>(wrong).unwrap_err().to_string();
        assert!(error.contains("txet"), "{error}");
    }
}
