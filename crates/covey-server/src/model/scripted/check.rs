//! Applies the strict verifier to every request, and remembers what it refused.
//!
//! Three layers: the request by itself, its answers against what the script must have said (recomputed from the
//! history, so it holds across restarts), and its prefix against earlier requests of the same conversation (only
//! while this process lives). What counts as a violation is the harness's verifier's decision.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use covey_harness::verify;
use serde::Serialize;
use serde_json::{Map, Value};

use super::plan::{self, signature};
use super::script::ScriptFile;

/// Requests that are remembered for the prefix check; the oldest conversation is forgotten first.
const REQUESTS_REMEMBERED_MAX: usize = 1024;
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
    earlier: VecDeque<Map<String, Value>>,
}

/// The verifier with its memory.
#[derive(Debug, Default)]
pub struct RequestChecker {
    memory: Mutex<Memory>,
}

impl RequestChecker {
    /// Checks the next request of any conversation. `raw` is its JSON text, when there is one.
    ///
    /// # Errors
    /// The violation's text.
    pub(super) fn check(
        &self,
        scripts: &ScriptFile,
        body: &Map<String, Value>,
        raw: Option<&[u8]>,
    ) -> Result<(), String> {
        let mut memory = self.memory();
        memory.requests += 1;
        let result = by_itself(body, raw)
            .and_then(|()| answers_kept(scripts, body))
            .and_then(|()| prefix_kept(&mut memory.earlier, body));
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
fn answers_kept(scripts: &ScriptFile, body: &Map<String, Value>) -> Result<(), String> {
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
        let expected: Vec<Value> = expected.content.into_iter().map(with_sorted_keys).collect();
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

/// The request continues one of the earlier ones, or starts a conversation.
fn prefix_kept(earlier: &mut VecDeque<Map<String, Value>>, body: &Map<String, Value>) -> Result<(), String> {
    let messages = |body: &Map<String, Value>| {
        body.get("messages").and_then(Value::as_array).map_or(&[][..], Vec::as_slice).to_vec()
    };
    let ours = messages(body);
    let same_start = |other: &Map<String, Value>| messages(other).first() == ours.first();
    let mut longest: Option<(usize, usize)> = None;
    let mut violation = None;
    for (at, other) in earlier.iter().enumerate().filter(|(_, other)| same_start(other)) {
        match verify::check_prefix(other, body) {
            Ok(()) => {
                let length = messages(other).len();
                if longest.is_none_or(|(best, _)| length >= best) {
                    longest = Some((length, at));
                }
            }
            Err(error) => violation = Some(error.to_string()),
        }
    }
    match (longest, violation) {
        (Some((_, at)), _) => {
            earlier.remove(at);
        }
        // Two conversations may begin with the same words; only a history can contradict another one.
        (None, Some(text)) if ours.len() > 1 => return Err(text),
        _ => {}
    }
    if earlier.len() == REQUESTS_REMEMBERED_MAX {
        earlier.pop_front();
    }
    earlier.push_back(body.clone());
    Ok(())
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

    #[test]
    fn a_continued_conversation_passes_also_beside_one_that_begins_alike() {
        let checker = RequestChecker::default();
        let start = body(json!([{"role": "user", "content": "a"}]));
        for request in [start.clone(), start.clone(), body(history()), start, body(history())] {
            assert_eq!(checker.check(&scripts(), &request, None), Ok(()));
        }
        assert_eq!((checker.counts(), checker.violations()), ((5, 0), vec![]));
    }

    #[test]
    fn changed_answers_thinking_and_prefixes_are_refused_and_counted() {
        let checker = RequestChecker::default();
        assert_eq!(checker.check(&scripts(), &body(history()), None), Ok(()));
        let mut changes = Vec::new();
        for (pointer, value) in
            [("/1/content/1/text", "uno"), ("/1/content/0/thinking", "HM"), ("/2/content", "c")]
        {
            let mut messages = history();
            *messages.pointer_mut(pointer).unwrap() = json!(value);
            changes.push(body(messages));
        }
        let mut other_system = body(history());
        other_system.insert("system".into(), json!("t"));
        changes.push(other_system);
        for change in &changes {
            let error = checker.check(&scripts(), change, None).unwrap_err();
            assert!(!error.is_empty());
        }
        assert_eq!(checker.counts(), (5, 4));
        assert_eq!(checker.violations().iter().map(|v| v.request).collect::<Vec<_>>(), [2, 3, 4, 5]);
        let raw = br#"{"a":"\ud800"}"#;
        assert!(checker.check(&scripts(), &body(history()), Some(raw)).is_err());
    }

    #[test]
    fn an_unknown_block_may_come_back_but_not_changed() {
        let checker = RequestChecker::default();
        let mut messages = history();
        let block = json!({"type": UNKNOWN_BLOCK_TYPE, "payload": "p", "signature": signature("p")});
        messages[1]["content"].as_array_mut().unwrap().insert(0, block);
        assert_eq!(checker.check(&scripts(), &body(messages.clone()), None), Ok(()));
        messages[1]["content"][0]["payload"] = json!("q");
        assert!(checker.check(&scripts(), &body(messages), None).is_err());
    }
}
