//! Repair of a history: whatever the journal holds, the request that comes out is well formed.
//!
//! Run before every request. Blocks that are fine are passed on byte for byte; what would be refused is
//! dropped, put in order or answered by a substitute, so that no session can be bricked by its own past. The
//! same history gives the same bytes, and a longer history only adds to them. The output always passes
//! [`crate::verify::check_request`]. What does not belong here: cutting a history that is too long.

use std::collections::{HashMap, HashSet};

use serde_json::{Value, json};

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The user, and the tools.
    User,
    /// The model.
    Assistant,
}

/// One message of a history.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// Raw blocks.
    pub content: Vec<Value>,
    /// The model that made it; thinking is replayed to its maker only.
    pub producer: Option<String>,
    /// The provider that answered with it; none where there is only one.
    pub provider: Option<String>,
}

/// Who will read the history.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reader<'a> {
    /// The model that answered last there.
    pub model: Option<&'a str>,
    /// The provider; none where there is only one.
    pub provider: Option<&'a str>,
    /// The wire over which it is asked.
    pub wire: &'a str,
}

impl Reader<'_> {
    /// Whether something that this provider made may go to the reader. What was recorded before providers had names
    /// may: then there was one.
    pub(crate) fn is_from(&self, provider: Option<&str>) -> bool {
        self.provider.is_none() || provider.is_none() || self.provider == provider
    }
}

/// Type of a block that only the wire understands that its `wire` names.
const WIRE_ITEM_TYPE: &str = "wire_item";

const NO_RESULT: &str = "interrupted, may have had effects: no result of this call is known";
const EMPTY_RESULT: &str = "(no output)";
const BEGINNING: &str = "(The beginning of the conversation is not available.)";
/// What the user side says when there is nothing else to answer an answer with.
pub(crate) const GO_ON: &str = "Go on.";

/// Makes a history sendable to `reader`.
pub fn repair(history: &[Message], reader: &Reader<'_>) -> Vec<Value> {
    let mut out = Output::default();
    for message in history {
        match message.role {
            Role::User => out.user(&message.content),
            Role::Assistant => {
                let is_from_there = reader.is_from(message.provider.as_deref());
                let own = message.producer.as_deref() == reader.model || message.producer.is_none();
                let wire = is_from_there.then_some(reader.wire);
                out.assistant(&message.content, own && is_from_there, wire);
            }
        }
    }
    out.finish()
}

#[derive(Default)]
struct Output {
    messages: Vec<(Role, Vec<Value>)>,
    seen_ids: HashSet<String>,
    /// Calls of the last assistant message: the id as it was, the id as it is sent.
    open: Vec<(String, String)>,
}

impl Output {
    fn push(&mut self, role: Role, blocks: Vec<Value>) {
        if blocks.is_empty() {
            return;
        }
        match self.messages.last_mut() {
            Some((last, content)) if *last == role => content.extend(blocks),
            _ => self.messages.push((role, blocks)),
        }
    }

    fn user(&mut self, content: &[Value]) {
        let mut results: HashMap<&str, &Value> = HashMap::new();
        let mut rest = Vec::new();
        for block in content {
            match kind_of(block) {
                "tool_result" => {
                    let id = block["tool_use_id"].as_str().unwrap_or_default();
                    results.entry(id).or_insert(block);
                }
                "" | "tool_use" | "thinking" | "redacted_thinking" => {}
                "text" if is_empty_text(block) => {}
                _ => rest.push(block.clone()),
            }
        }
        let open = std::mem::take(&mut self.open);
        let answers = open.iter().map(|(was, is)| match results.get(was.as_str()) {
            Some(result) => repaired_result(result, is),
            None => substitute(is),
        });
        let mut blocks: Vec<Value> = answers.collect();
        blocks.append(&mut rest);
        self.push(Role::User, blocks);
    }

    fn assistant(&mut self, content: &[Value], own: bool, wire: Option<&str>) {
        self.close_open_calls();
        if self.messages.is_empty() {
            self.push(Role::User, vec![json!({"type": "text", "text": BEGINNING})]);
        }
        let mut blocks = Vec::new();
        for block in content {
            match kind_of(block) {
                "" | "tool_result" | "image" | "document" => {}
                "text" if is_empty_text(block) => {}
                "thinking" | "redacted_thinking" if !own || !is_whole_thinking(block) => {}
                WIRE_ITEM_TYPE if block["wire"].as_str() != wire => {}
                "tool_use" => blocks.extend(self.repaired_call(block)),
                _ => blocks.push(block.clone()),
            }
        }
        while blocks.last().is_some_and(is_thinking) {
            blocks.pop();
        }
        self.push(Role::Assistant, blocks);
    }

    fn repaired_call(&mut self, block: &Value) -> Option<Value> {
        block["name"].as_str().filter(|name| !name.is_empty())?;
        let was = block["id"].as_str().unwrap_or_default().to_owned();
        let mut is = was.clone();
        let mut number = self.seen_ids.len();
        while is.is_empty() || self.seen_ids.contains(&is) {
            is = format!("call_{number}_{was}");
            number += 1;
        }
        self.seen_ids.insert(is.clone());
        self.open.push((was.clone(), is.clone()));
        if was == is && block["input"].is_object() {
            return Some(block.clone());
        }
        let mut block = block.clone();
        block["id"] = json!(is);
        if !block["input"].is_object() {
            block["input"] = json!({});
        }
        Some(block)
    }

    fn close_open_calls(&mut self) {
        if !self.open.is_empty() {
            self.user(&[]);
        }
    }

    fn finish(mut self) -> Vec<Value> {
        self.close_open_calls();
        let ends_open = match self.messages.last() {
            None => Some(BEGINNING),
            // A paused answer goes back as it is.
            Some((Role::Assistant, blocks)) if !blocks.iter().any(|b| kind_of(b) == "server_tool_use") => {
                Some(GO_ON)
            }
            Some(_) => None,
        };
        if let Some(text) = ends_open {
            self.push(Role::User, vec![json!({"type": "text", "text": text})]);
        }
        self.messages
            .into_iter()
            .map(|(role, content)| {
                let role = if role == Role::User { "user" } else { "assistant" };
                json!({"role": role, "content": content})
            })
            .collect()
    }
}

fn kind_of(block: &Value) -> &str {
    block.get("type").and_then(Value::as_str).unwrap_or_default()
}

fn is_empty_text(block: &Value) -> bool {
    block.get("text").and_then(Value::as_str).is_none_or(|text| text.trim().is_empty())
}

fn is_thinking(block: &Value) -> bool {
    matches!(kind_of(block), "thinking" | "redacted_thinking")
}

fn is_whole_thinking(block: &Value) -> bool {
    let filled = |field: &str| block.get(field).and_then(Value::as_str).is_some_and(|s| !s.is_empty());
    match kind_of(block) {
        "thinking" => filled("signature") && block.get("thinking").is_some_and(Value::is_string),
        _ => filled("data"),
    }
}

fn substitute(id: &str) -> Value {
    json!({"type": "tool_result", "tool_use_id": id, "content": NO_RESULT, "is_error": true})
}

fn repaired_result(result: &Value, id: &str) -> Value {
    let mut result = result.clone();
    result["tool_use_id"] = json!(id);
    let content = match &result["content"] {
        Value::String(text) if !text.trim().is_empty() => return result,
        Value::Array(blocks) => blocks
            .iter()
            .filter(|b| match kind_of(b) {
                "text" => !is_empty_text(b),
                "" | "tool_use" | "tool_result" | "thinking" | "redacted_thinking" => false,
                _ => true,
            })
            .cloned()
            .collect(),
        _ => Vec::new(),
    };
    result["content"] = if content.is_empty() { json!(EMPTY_RESULT) } else { json!(content) };
    result
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Map;

    use super::*;
    use crate::verify::{check_prefix, check_request};

    const M: Reader<'static> = Reader { model: Some("m"), provider: None, wire: "" };

    fn body(messages: Vec<Value>) -> Map<String, Value> {
        let body = json!({"model": "m", "max_tokens": 1, "messages": messages});
        body.as_object().unwrap().clone()
    }

    fn block() -> impl Strategy<Value = Value> {
        let id = || prop::sample::select(vec!["", "a", "b", "c"]);
        let text = || prop::sample::select(vec!["", " ", "x"]);
        prop_oneof![
            text().prop_map(|t| json!({"type": "text", "text": t})),
            id().prop_map(|i| json!({"type": "tool_use", "id": i, "name": "bash", "input": {}})),
            id().prop_map(|i| json!({"type": "tool_use", "id": i, "name": "bash", "input": "cut"})),
            id().prop_map(|i| json!({"type": "tool_use", "id": i})),
            (id(), text()).prop_map(|(i, t)| json!({"type": "tool_result", "tool_use_id": i, "content": t})),
            (id(), prop::collection::vec(text(), 0..3)).prop_map(|(i, ts)| {
                let inner: Vec<Value> = ts.iter().map(|t| json!({"type": "text", "text": t})).collect();
                json!({"type": "tool_result", "tool_use_id": i, "content": inner})
            }),
            text().prop_map(|t| json!({"type": "thinking", "thinking": "t", "signature": t.trim()})),
            text().prop_map(|t| json!({"type": "redacted_thinking", "data": t.trim()})),
            Just(json!({"type": "image", "source": {}})),
            Just(json!({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}})),
            Just(json!({"type": "new_kind_of_block"})),
            Just(json!({"type": WIRE_ITEM_TYPE, "wire": "", "item": {}})),
            Just(json!({"type": WIRE_ITEM_TYPE, "wire": "other", "item": {}})),
            Just(json!({"type": "text"})),
            Just(json!("not a block")),
            Just(json!({})),
        ]
    }

    fn history() -> impl Strategy<Value = Vec<Message>> {
        let message = (any::<bool>(), prop::collection::vec(block(), 0..5), any::<bool>()).prop_map(
            |(user, content, own)| Message {
                role: if user { Role::User } else { Role::Assistant },
                content,
                producer: Some(if own { "m" } else { "other" }.to_owned()),
                provider: None,
            },
        );
        prop::collection::vec(message, 0..8)
    }

    proptest! {
        #[test]
        fn any_history_becomes_a_request_that_the_strict_verifier_accepts(history in history()) {
            let request = body(repair(&history, &M));
            prop_assert_eq!(check_request(&request), Ok(()), "{}", Value::Object(request.clone()));
        }

        #[test]
        fn repair_is_deterministic(history in history()) {
            prop_assert_eq!(repair(&history, &M), repair(&history, &M));
        }
    }

    #[test]
    fn what_is_fine_is_passed_on_byte_for_byte_and_only_grows() {
        let user = |content: Value| Message {
            role: Role::User,
            content: content.as_array().unwrap().clone(),
            producer: None,
            provider: None,
        };
        let answer = |content: Value| Message {
            role: Role::Assistant,
            content: content.as_array().unwrap().clone(),
            producer: Some("m".into()),
            provider: None,
        };
        let call =
            json!({"type": "tool_use", "id": "a", "name": "bash", "input": {"z": 1, "a": 2}, "extra": 1});
        let thinking = json!({"type": "thinking", "thinking": "t", "signature": "s"});
        let history = [
            user(json!([{"type": "text", "text": "hi"}])),
            answer(json!([thinking, call])),
            user(json!([{"type": "tool_result", "tool_use_id": "a", "content": "ok"}])),
            answer(json!([{"type": "text", "text": "done"}])),
            user(json!([{"type": "text", "text": "more"}])),
        ];
        let short = repair(&history[..3], &M);
        assert_eq!(json!(short[1]["content"]).to_string(), json!([thinking, call]).to_string());
        let long = repair(&history, &M);
        assert_eq!(check_prefix(&body(short), &body(long)), Ok(()));
    }

    #[test]
    fn foreign_thinking_is_dropped() {
        let thinking = json!({"type": "thinking", "thinking": "t", "signature": "s"});
        let text = json!({"type": "text", "text": "x"});
        let message = Message {
            role: Role::Assistant,
            content: vec![thinking, text.clone()],
            producer: Some("a".into()),
            provider: None,
        };
        let sent = repair(&[message], &Reader { model: Some("b"), ..M });
        assert_eq!(sent[1]["content"], json!([text]));
    }

    #[test]
    fn what_one_provider_or_wire_made_goes_to_no_other() {
        let thinking = json!({"type": "thinking", "thinking": "t", "signature": "s"});
        let item = json!({"type": WIRE_ITEM_TYPE, "wire": "w", "item": {"type": "reasoning"}});
        let text = json!({"type": "text", "text": "x"});
        let message = Message {
            role: Role::Assistant,
            content: vec![thinking.clone(), item.clone(), text.clone()],
            producer: Some("m".into()),
            provider: Some("a".into()),
        };
        let sent = |provider, wire| {
            let reader = Reader { model: Some("m"), provider, wire };
            repair(std::slice::from_ref(&message), &reader)[1]["content"].clone()
        };
        assert_eq!(sent(Some("a"), "w"), json!([thinking, item, text]));
        assert_eq!(sent(Some("a"), "v"), json!([thinking, text]));
        assert_eq!(sent(Some("b"), "w"), json!([text]), "the same model and wire, but other signatures");
    }
}
