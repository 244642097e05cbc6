//! Applies the strict verifier to every request, and remembers what it refused.
//!
//! Three layers: the request by itself, its answers against what the script must have said (recomputed from the
//! history, so it holds across restarts), and its prefix against the request before it. A request does not say which
//! conversation it belongs to, so the last layer looks only where one conversation began with these words in the
//! life of this process. What counts as a violation is the harness's verifier's decision.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use covey_harness::verify;
use serde::Serialize;
use serde_json::{Map, Value};

use super::plan::{self, signature};
use super::script::ScriptFile;
use crate::wire::Wire;

/// Beginnings of conversations that are remembered for the prefix check; later ones are not checked by it.
const BEGINNINGS_MAX: usize = 1024;
/// Violations whose text is kept; later ones are only counted.
const VIOLATIONS_KEPT_MAX: usize = 256;
/// The type of the block that the fault `unknown_block` adds.
pub(super) const UNKNOWN_BLOCK_TYPE: &str = "covey_unknown_block";

/// A refused request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// Number of the request, from 1, in this process.
    pub request: u64,
    /// What was wrong.
    pub text: String,
}

#[derive(Debug, Default)]
struct Memory {
    requests: u64,
    refused: u64,
    violations: Vec<Violation>,
    /// By the first user message.
    beginnings: HashMap<String, Beginning>,
}

#[derive(Debug, Default)]
struct Beginning {
    /// Conversations that began so, retries of a first request included.
    count: u64,
    last: Map<String, Value>,
}

/// The verifier with its memory.
#[derive(Debug, Default)]
pub struct RequestChecker {
    memory: Mutex<Memory>,
}

impl RequestChecker {
    /// Checks the next request of any conversation, translated from its wire. `raw` is its JSON text, when there is one.
    ///
    /// # Errors
    /// The violation's text.
    pub(super) fn check(
        &self,
        scripts: &ScriptFile,
        wire: Wire,
        body: &Map<String, Value>,
        raw: Option<&[u8]>,
    ) -> Result<(), String> {
        let mut memory = self.memory();
        memory.requests += 1;
        let result = by_itself(body, raw)
            .and_then(|()| answers_kept(scripts, wire, body))
            .and_then(|()| prefix_kept(&mut memory.beginnings, body));
        if let Err(text) = &result {
            memory.refused += 1;
            if memory.violations.len() < VIOLATIONS_KEPT_MAX {
                let violation = Violation { request: memory.requests, text: text.clone() };
                memory.violations.push(violation);
            }
        }
        result
    }

    /// The first 256 violations.
    pub fn violations(&self) -> Vec<Violation> {
        self.memory().violations.clone()
    }

    /// Requests checked and requests refused.
    pub fn counts(&self) -> (u64, u64) {
        let memory = self.memory();
        (memory.requests, memory.refused)
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        // Nothing in here is left half changed by a panic.
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn by_itself(body: &Map<String, Value>, raw: Option<&[u8]>) -> Result<(), String> {
    if let Some(raw) = raw {
        verify::check_json_text(raw).map_err(|e| e.to_string())?;
    }
    verify::check_request(body).map_err(|e| e.to_string())
}

/// Every answer in the history is the one that the script gives to the history before it.
fn answers_kept(scripts: &ScriptFile, wire: Wire, body: &Map<String, Value>) -> Result<(), String> {
    let Some(messages) = body.get("messages").and_then(Value::as_array) else { return Ok(()) };
    for (index, message) in messages.iter().enumerate() {
        if message.get("role").and_then(Value::as_str) != Some("assistant") {
            continue;
        }
        let mut so_far = body.clone();
        so_far.insert("messages".to_owned(), Value::Array(messages[..index].to_vec()));
        // Without a script for it the answer to this request says so.
        let Ok(expected) = plan::reply(scripts, &so_far) else { return Ok(()) };
        let mut kept = message.clone();
        if let Some(Value::Array(blocks)) = kept.get_mut("content") {
            for (at, block) in blocks.iter().enumerate() {
                signed(block).map_err(|what| format!("messages[{index}].content[{at}]: {what}"))?;
            }
            blocks.retain(|block| block.get("type").and_then(Value::as_str) != Some(UNKNOWN_BLOCK_TYPE));
        }
        // A client may write an object's keys in another order: that is the same object, to the provider as well.
        so_far.insert("messages".to_owned(), Value::Array(vec![with_sorted_keys(kept)]));
        let is_thinking = |block: &Value| block["type"] == "thinking";
        // Clients of the other wires are free to leave reasoning out, but not to change it.
        let has_thinking =
            so_far["messages"][0]["content"].as_array().is_some_and(|c| c.iter().any(is_thinking));
        let may_lack = wire != Wire::Messages && !has_thinking;
        let expected = expected.content.into_iter().filter(|block| !(may_lack && is_thinking(block)));
        let expected: Vec<Value> = expected.map(with_sorted_keys).collect();
        verify::check_answer_kept(&expected, &so_far)
            .map_err(|e| format!("{e} (answer {index} of the history)"))?;
    }
    Ok(())
}

fn with_sorted_keys(mut value: Value) -> Value {
    value.sort_all_objects();
    value
}

/// A block with one of our signatures is as it was sent.
fn signed(block: &Value) -> Result<(), &'static str> {
    let field = |name: &str| block.get(name).and_then(Value::as_str);
    let text = match field("type") {
        Some("thinking") => field("thinking"),
        Some(UNKNOWN_BLOCK_TYPE) => field("payload"),
        _ => return Ok(()),
    };
    let matches = text.map(signature).as_deref() == field("signature");
    if matches { Ok(()) } else { Err("the signature does not belong to this block") }
}

/// The request continues the one before it in its conversation, where that is known for certain.
fn prefix_kept(beginnings: &mut HashMap<String, Beginning>, body: &Map<String, Value>) -> Result<(), String> {
    let Some(messages) = body.get("messages").and_then(Value::as_array) else { return Ok(()) };
    let Some(key) = messages.first().map(without_cache_points) else { return Ok(()) };
    if messages.len() == 1 {
        if beginnings.len() < BEGINNINGS_MAX || beginnings.contains_key(&key) {
            let beginning = beginnings.entry(key).or_default();
            beginning.count += 1;
            beginning.last = body.clone();
        }
        return Ok(());
    }
    // None is a conversation that began before this process did; several cannot be told apart.
    let Some(beginning) = beginnings.get_mut(&key).filter(|beginning| beginning.count == 1) else {
        return Ok(());
    };
    verify::check_prefix(&beginning.last, body).map_err(|e| e.to_string())?;
    // What asks for a summary is a branch: the conversation goes on without it, if it cannot be had.
    if !plan::asks_for_summary(body) {
        beginning.last = body.clone();
    }
    Ok(())
}

fn without_cache_points(message: &Value) -> String {
    let mut message = message.clone();
    if let Some(Value::Array(blocks)) = message.get_mut("content") {
        for block in blocks.iter_mut().filter_map(Value::as_object_mut) {
            block.shift_remove("cache_control");
        }
    }
    message.to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn body(messages: Value) -> Map<String, Value> {
        let value = json!({"model": "m", "max_tokens": 9, "system": "s", "messages": messages});
        value.as_object().unwrap().clone()
    }

    fn scripts() -> ScriptFile {
        serde_json::from_value(json!({"scripts": [{"turns": [
            {"thinking": "hm", "text": "one"}, {"text": "two"}, {"text": "three"}]}]}))
        .unwrap()
    }

    fn history() -> Value {
        let first =
            plan::reply(&scripts(), &body(json!([{"role": "user", "content": "a"}]))).unwrap().content;
        json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": first},
            {"role": "user", "content": "b"}])
    }

    fn start() -> Map<String, Value> {
        body(json!([{"role": "user", "content": "a"}]))
    }

    fn with_other_system(mut body: Map<String, Value>) -> Map<String, Value> {
        body.insert("system".into(), json!("t"));
        body
    }

    #[test]
    fn conversations_that_begin_alike_are_not_taken_for_one() {
        let checker = RequestChecker::default();
        let requests =
            [start(), body(history()), with_other_system(start()), with_other_system(body(history()))];
        for request in requests {
            assert_eq!(checker.check(&scripts(), Wire::Messages, &request, None), Ok(()));
        }
        assert_eq!((checker.counts(), checker.violations()), ((4, 0), vec![]));
    }

    #[test]
    fn changed_answers_thinking_and_prefixes_are_refused_and_counted() {
        let checker = RequestChecker::default();
        for request in [start(), body(history())] {
            assert_eq!(checker.check(&scripts(), Wire::Messages, &request, None), Ok(()));
        }
        let mut changes = vec![with_other_system(body(history()))];
        for (pointer, value) in
            [("/1/content/1/text", "uno"), ("/1/content/0/thinking", "HM"), ("/2/content", "c")]
        {
            let mut messages = history();
            *messages.pointer_mut(pointer).unwrap() = json!(value);
            changes.push(body(messages));
        }
        for change in &changes {
            let error = checker.check(&scripts(), Wire::Messages, change, None).unwrap_err();
            assert!(!error.is_empty());
        }
        assert_eq!(checker.counts(), (6, 4));
        assert_eq!(checker.violations().iter().map(|v| v.request).collect::<Vec<_>>(), [3, 4, 5, 6]);
        let raw = br#"{"a":"\ud800"}"#;
        assert!(checker.check(&scripts(), Wire::Messages, &body(history()), Some(raw)).is_err());
    }

    #[test]
    fn a_request_for_a_summary_is_a_branch_and_not_what_the_next_one_continues() {
        let checker = RequestChecker::default();
        let check = |body: Map<String, Value>| checker.check(&scripts(), Wire::Messages, &body, None);
        assert_eq!(check(start()), Ok(()));
        assert_eq!(check(body(history())), Ok(()));
        let mut asked = history();
        asked[2]["content"] = json!([{"type": "text", "text": "b"},
            {"type": "text", "text": format!("{} Write.", verify::COMPACT_ASK_MARK)}]);
        let mut wish = body(asked);
        wish.insert("tool_choice".into(), json!({"type": "none"}));
        assert_eq!(check(wish), Ok(()));
        let mut longer = history();
        let second = plan::reply(&scripts(), &body(history())).unwrap().content;
        let more = [json!({"role": "assistant", "content": second}), json!({"role": "user", "content": "c"})];
        longer.as_array_mut().unwrap().extend(more);
        assert_eq!(check(body(longer)), Ok(()));
    }

    #[test]
    fn an_unknown_block_may_come_back_but_not_changed() {
        let checker = RequestChecker::default();
        let mut messages = history();
        let block = json!({"type": UNKNOWN_BLOCK_TYPE, "payload": "p", "signature": signature("p")});
        messages[1]["content"].as_array_mut().unwrap().insert(0, block);
        assert_eq!(checker.check(&scripts(), Wire::Messages, &body(messages.clone()), None), Ok(()));
        messages[1]["content"][0]["payload"] = json!("q");
        assert!(checker.check(&scripts(), Wire::Messages, &body(messages), None).is_err());
    }
}
