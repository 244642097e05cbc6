//! The strict verifier: what a Messages request must look like, and how two consecutive ones must relate.
//!
//! It is stricter than the provider, never laxer: a request that passes here is not refused with a 400 for
//! its shape. The output of [`crate::repair`] must always pass; the scripted model's server refuses whatever
//! does not. What does not belong here: mending anything.

use serde_json::{Map, Value};

/// How the message begins that stands for an older part of the conversation.
pub const COMPACTED_MARK: &str =
    "[covey] An older part of this conversation was left out, because your context is limited.";
/// How the last words of a request begin that asks for a summary of the conversation.
pub const COMPACT_ASK_MARK: &str = "[covey] This conversation is about to be too long for your context.";
/// Cache points that the provider accepts in one request.
pub const CACHE_POINTS_MAX: usize = 4;

/// Why a request is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A field is missing or has the wrong type.
    #[error("{at}: expected {expected}")]
    Shape {
        /// Where, as a path into the body.
        at: String,
        /// What belongs there.
        expected: &'static str,
    },
    /// The first message is not the user's, two neighbours have the same role, or the end is not the user's.
    #[error("messages[{index}]: role {role} is out of turn")]
    Turn {
        /// The message.
        index: usize,
        /// Its role.
        role: String,
    },
    /// A text is empty or white space only.
    #[error("{at}: empty text")]
    EmptyText {
        /// Where.
        at: String,
    },
    /// A call has no result in the next message.
    #[error("messages[{index}]: the call {id} has no result in the next message")]
    OrphanedCall {
        /// The assistant message.
        index: usize,
        /// The provider's id of the call.
        id: String,
    },
    /// A result answers no call of the message before it, or answers one twice.
    #[error("messages[{index}]: the result for {id} answers no open call of the message before")]
    StrayResult {
        /// The user message.
        index: usize,
        /// The id it names.
        id: String,
    },
    /// Results are not in the order of the calls, or something stands before them.
    #[error("messages[{index}]: results must come first and in the order of the calls, at block {block}")]
    ResultOrder {
        /// The user message.
        index: usize,
        /// The first block out of place.
        block: usize,
    },
    /// Two calls carry the same id.
    #[error("messages[{index}]: the id {id} is used by two calls")]
    DuplicateCall {
        /// The later message.
        index: usize,
        /// The id.
        id: String,
    },
    /// A block stands in a message of the wrong role.
    #[error("{at}: a {kind} block does not belong in a {role} message")]
    Misplaced {
        /// Where.
        at: String,
        /// The block's type.
        kind: String,
        /// The message's role.
        role: String,
    },
    /// A thinking block without text or signature, or as the last block of a message.
    #[error("{at}: {reason}")]
    Thinking {
        /// Where.
        at: String,
        /// What is wrong.
        reason: &'static str,
    },
    /// An answer does not come back as it was given.
    #[error("messages[{index}]: the assistant's block {block} is not the one that was answered")]
    Changed {
        /// The message.
        index: usize,
        /// The block.
        block: usize,
    },
    /// More cache points than the provider takes.
    #[error("{count} cache points, at most {CACHE_POINTS_MAX} are allowed")]
    CachePoints {
        /// How many.
        count: usize,
    },
    /// Two tools have one name.
    #[error("tools[{index}]: the name {name} is used twice")]
    DuplicateTool {
        /// The later tool.
        index: usize,
        /// The name.
        name: String,
    },
    /// The cached prefix changed between two requests.
    #[error("the prefix changed at {at}")]
    UnstablePrefix {
        /// The first place that differs.
        at: String,
    },
    /// The JSON text holds a `\ud800`–`\udfff` escape without its partner.
    #[error("lone surrogate escape at byte {offset}")]
    LoneSurrogate {
        /// Offset of the backslash.
        offset: usize,
    },
}

fn shape(at: impl Into<String>, expected: &'static str) -> Violation {
    Violation::Shape { at: at.into(), expected }
}

/// Checks one request by itself.
///
/// # Errors
/// The first violation found, in reading order.
pub fn check_request(body: &Map<String, Value>) -> Result<(), Violation> {
    if body.get("model").and_then(Value::as_str).is_none_or(str::is_empty) {
        return Err(shape("model", "a model name"));
    }
    if body.get("max_tokens").and_then(Value::as_u64).is_none_or(|n| n == 0) {
        return Err(shape("max_tokens", "a positive number"));
    }
    match body.get("system") {
        None => {}
        Some(Value::String(text)) => check_text("system", text)?,
        Some(Value::Array(blocks)) => {
            for (i, block) in blocks.iter().enumerate() {
                let at = format!("system[{i}]");
                let text = block.get("text").and_then(Value::as_str);
                check_text(&at, text.ok_or_else(|| shape(&at, "a text block"))?)?;
            }
        }
        Some(_) => return Err(shape("system", "a text or an array of text blocks")),
    }
    check_tools(body.get("tools"))?;
    let messages = body.get("messages").and_then(Value::as_array).filter(|m| !m.is_empty());
    check_messages(messages.ok_or_else(|| shape("messages", "at least one message"))?)?;
    let count = cache_points(&Value::Object(body.clone()));
    if count > CACHE_POINTS_MAX {
        return Err(Violation::CachePoints { count });
    }
    Ok(())
}

fn check_text(at: &str, text: &str) -> Result<(), Violation> {
    if text.trim().is_empty() { Err(Violation::EmptyText { at: at.to_owned() }) } else { Ok(()) }
}

fn check_tools(tools: Option<&Value>) -> Result<(), Violation> {
    let Some(tools) = tools else { return Ok(()) };
    let tools = tools.as_array().ok_or_else(|| shape("tools", "an array"))?;
    let mut names: Vec<&str> = Vec::new();
    for (index, tool) in tools.iter().enumerate() {
        let at = format!("tools[{index}]");
        let name = tool.get("name").and_then(Value::as_str).filter(|n| !n.is_empty());
        let name = name.ok_or_else(|| shape(format!("{at}.name"), "a name"))?;
        // Tools that the provider runs carry a dated type and no schema.
        if tool.get("type").is_none() && !tool.get("input_schema").is_some_and(Value::is_object) {
            return Err(shape(format!("{at}.input_schema"), "a JSON schema object"));
        }
        if names.contains(&name) {
            return Err(Violation::DuplicateTool { index, name: name.to_owned() });
        }
        names.push(name);
    }
    Ok(())
}

/// The blocks of a message; a plain text counts as one text block.
fn blocks_of(message: &Value) -> Option<Vec<Value>> {
    match message.get("content")? {
        Value::String(text) => Some(vec![serde_json::json!({"type": "text", "text": text})]),
        Value::Array(blocks) => Some(blocks.clone()),
        _ => None,
    }
}

fn check_messages(messages: &[Value]) -> Result<(), Violation> {
    let mut seen: Vec<String> = Vec::new();
    let mut open: Vec<String> = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        let role = message.get("role").and_then(Value::as_str).unwrap_or_default();
        let in_turn = if index % 2 == 0 { "user" } else { "assistant" };
        if role != in_turn {
            return Err(Violation::Turn { index, role: role.to_owned() });
        }
        let at = format!("messages[{index}].content");
        let blocks = blocks_of(message).filter(|b| !b.is_empty());
        let blocks = blocks.ok_or_else(|| shape(&at, "at least one block"))?;
        if role == "user" {
            check_results(index, &blocks, &open)?;
            open.clear();
        }
        for (i, block) in blocks.iter().enumerate() {
            check_block(&format!("{at}[{i}]"), role, block)?;
            if block["type"] == "tool_use" {
                // The shape was checked above, so the id is there.
                let id = block["id"].as_str().unwrap_or_default().to_owned();
                if seen.contains(&id) {
                    return Err(Violation::DuplicateCall { index, id });
                }
                seen.push(id.clone());
                open.push(id);
            }
        }
        if role == "assistant" && blocks.last().is_some_and(is_thinking) {
            return Err(Violation::Thinking {
                at: format!("{at}[{}]", blocks.len() - 1),
                reason: "thinking may not end a message",
            });
        }
    }
    let index = messages.len() - 1;
    if let Some(id) = open.first() {
        return Err(Violation::OrphanedCall { index, id: id.clone() });
    }
    // Only a paused answer is sent back without anything behind it, and only tools that the provider runs
    // make an answer pause.
    let paused = messages[index]["content"]
        .as_array()
        .is_some_and(|blocks| blocks.iter().any(|b| b["type"] == "server_tool_use"));
    if index % 2 == 1 && !paused {
        return Err(Violation::Turn { index, role: "assistant".to_owned() });
    }
    Ok(())
}

fn check_results(index: usize, blocks: &[Value], open: &[String]) -> Result<(), Violation> {
    let results: Vec<(usize, &str)> = blocks
        .iter()
        .enumerate()
        .filter(|(_, b)| b["type"] == "tool_result")
        .map(|(i, b)| (i, b["tool_use_id"].as_str().unwrap_or_default()))
        .collect();
    for (n, (_, id)) in results.iter().enumerate() {
        let twice = results[..n].iter().any(|(_, earlier)| earlier == id);
        if twice || !open.iter().any(|o| o == id) {
            return Err(Violation::StrayResult { index, id: (*id).to_owned() });
        }
    }
    if let Some(missing) = open.iter().find(|o| !results.iter().any(|(_, id)| id == o)) {
        return Err(Violation::OrphanedCall { index: index.saturating_sub(1), id: missing.clone() });
    }
    for (n, (block, id)) in results.iter().enumerate() {
        if *block != n || *id != open[n] {
            return Err(Violation::ResultOrder { index, block: n });
        }
    }
    Ok(())
}

fn is_thinking(block: &Value) -> bool {
    block["type"] == "thinking" || block["type"] == "redacted_thinking"
}

fn check_block(at: &str, role: &str, block: &Value) -> Result<(), Violation> {
    let kind = block.get("type").and_then(Value::as_str).ok_or_else(|| shape(at, "a block with a type"))?;
    let misplaced = || Violation::Misplaced { at: at.into(), kind: kind.into(), role: role.into() };
    let text_of = |field: &str| block.get(field).and_then(Value::as_str);
    match kind {
        "text" => check_text(at, text_of("text").ok_or_else(|| shape(at, "a text"))?),
        "tool_use" if role == "assistant" => {
            if text_of("id").is_none_or(str::is_empty) || text_of("name").is_none_or(str::is_empty) {
                return Err(shape(at, "a call with id and name"));
            }
            if block.get("input").is_some_and(Value::is_object) {
                Ok(())
            } else {
                Err(shape(format!("{at}.input"), "an object"))
            }
        }
        "tool_result" if role == "user" => match block.get("content") {
            None => Ok(()),
            Some(Value::String(text)) => check_text(at, text),
            Some(Value::Array(inner)) => inner
                .iter()
                .enumerate()
                .try_for_each(|(i, b)| check_block(&format!("{at}[{i}]"), "result", b)),
            Some(_) => Err(shape(at, "a text or blocks")),
        },
        "thinking" if role == "assistant" => {
            let reason = "thinking needs its text and its signature";
            if text_of("thinking").is_none() || text_of("signature").is_none_or(str::is_empty) {
                return Err(Violation::Thinking { at: at.into(), reason });
            }
            Ok(())
        }
        "redacted_thinking" if role == "assistant" => match text_of("data") {
            Some(data) if !data.is_empty() => Ok(()),
            _ => Err(Violation::Thinking { at: at.into(), reason: "redacted thinking needs its data" }),
        },
        "tool_use" | "tool_result" | "thinking" | "redacted_thinking" => Err(misplaced()),
        "image" | "document" if role == "assistant" => Err(misplaced()),
        // Unknown kinds pass: the provider grows faster than this list.
        _ => Ok(()),
    }
}

fn cache_points(value: &Value) -> usize {
    match value {
        Value::Object(map) => map.iter().fold(0, |n, (key, inner)| {
            // A call's input may hold a field of this name; it is data there.
            let own = usize::from(key == "cache_control" && inner.is_object());
            n + own + if key == "input" || key == "input_schema" { 0 } else { cache_points(inner) }
        }),
        Value::Array(list) => list.iter().map(cache_points).sum(),
        _ => 0,
    }
}

/// A block without its cache point: the provider's cache ignores where the points of earlier requests were.
fn bare(block: &Value) -> Value {
    let mut block = block.clone();
    if let Value::Object(map) = &mut block {
        map.shift_remove("cache_control");
    }
    block
}

/// Equality of the bytes that would be sent, which, unlike `==`, sees the order of keys.
fn same_bytes(a: &Value, b: &Value) -> bool {
    let (a, b) = (a.to_string(), b.to_string());
    a == b
}

/// Checks that `next` continues `previous`, another request of the same session: tools and system are the
/// same bytes, and the messages are the earlier ones with something behind them. The last message of
/// `previous` may have grown at its end. A change of the model starts a new prefix.
///
/// # Errors
/// The first place that differs.
pub fn check_prefix(previous: &Map<String, Value>, next: &Map<String, Value>) -> Result<(), Violation> {
    if previous.get("model") != next.get("model") {
        return Ok(());
    }
    // The older part was replaced by a summary: nothing of what was cached is left but tools and system.
    let first = |body: &Map<String, Value>| {
        let text = body.get("messages").map(|messages| messages[0]["content"][0]["text"].clone());
        text.unwrap_or_default()
    };
    let is_compacted = first(next).as_str().is_some_and(|text| text.starts_with(COMPACTED_MARK))
        && first(next) != first(previous);
    let unstable = |at: String| Violation::UnstablePrefix { at };
    let null = Value::Null;
    for field in ["tools", "system"] {
        if !same_bytes(previous.get(field).unwrap_or(&null), next.get(field).unwrap_or(&null)) {
            return Err(unstable(field.to_owned()));
        }
    }
    if is_compacted {
        return Ok(());
    }
    let empty = Vec::new();
    let before = previous.get("messages").and_then(Value::as_array).unwrap_or(&empty);
    let after = next.get("messages").and_then(Value::as_array).unwrap_or(&empty);
    for (index, old) in before.iter().enumerate() {
        let new = after.get(index).ok_or_else(|| unstable(format!("messages[{index}]")))?;
        let (old_blocks, new_blocks) =
            (blocks_of(old).unwrap_or_default(), blocks_of(new).unwrap_or_default());
        let may_grow = index + 1 == before.len();
        if old["role"] != new["role"] || (new_blocks.len() != old_blocks.len() && !may_grow) {
            return Err(unstable(format!("messages[{index}]")));
        }
        for (block, old_block) in old_blocks.iter().enumerate() {
            let kept = new_blocks.get(block).is_some_and(|new| same_bytes(&bare(old_block), &bare(new)));
            if !kept {
                return Err(unstable(format!("messages[{index}].content[{block}]")));
            }
        }
    }
    Ok(())
}

/// Checks that the last assistant message of `next` ends with `answer`, block for block and byte for byte
/// (empty texts and thinking at the very end may be left out). A paused answer and its continuation are one
/// message, so something may stand before it.
///
/// # Errors
/// [`Violation::Changed`] at the first block that differs.
pub fn check_answer_kept(answer: &[Value], next: &Map<String, Value>) -> Result<(), Violation> {
    let empty = Vec::new();
    let messages = next.get("messages").and_then(Value::as_array).unwrap_or(&empty);
    let is_empty_text =
        |b: &&Value| b["type"] == "text" && b["text"].as_str().is_some_and(|t| t.trim().is_empty());
    let mut wanted: Vec<&Value> = answer.iter().filter(|b| !is_empty_text(b)).collect();
    while wanted.last().is_some_and(|b| is_thinking(b)) {
        wanted.pop();
    }
    if wanted.is_empty() {
        return Ok(());
    }
    let Some(index) = messages.iter().rposition(|m| m["role"] == "assistant") else {
        return Err(Violation::Changed { index: messages.len(), block: 0 });
    };
    let got = blocks_of(&messages[index]).unwrap_or_default();
    let Some(skipped) = got.len().checked_sub(wanted.len()) else {
        return Err(Violation::Changed { index, block: 0 });
    };
    for (block, (wanted, got)) in wanted.iter().zip(&got[skipped..]).enumerate() {
        if !same_bytes(wanted, got) {
            return Err(Violation::Changed { index, block });
        }
    }
    Ok(())
}

/// Checks raw JSON text for escapes of half a character, which no strict reader accepts.
///
/// # Errors
/// [`Violation::LoneSurrogate`] with the offset of the first one.
pub fn check_json_text(text: &[u8]) -> Result<(), Violation> {
    let unit = |at: usize| -> Option<u16> {
        let escape = text.get(at..at + 6)?;
        let hex = escape.strip_prefix(b"\\u")?;
        u16::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()
    };
    let mut at = 0;
    while at < text.len() {
        if text[at] != b'\\' {
            at += 1;
            continue;
        }
        match unit(at) {
            Some(0xd800..=0xdbff) if matches!(unit(at + 6), Some(0xdc00..=0xdfff)) => at += 12,
            Some(0xd800..=0xdfff) => return Err(Violation::LoneSurrogate { offset: at }),
            Some(_) => at += 6,
            None => at += 2,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn body(messages: Value) -> Map<String, Value> {
        let value = json!({"model": "m", "max_tokens": 10, "system": "s", "messages": messages});
        value.as_object().unwrap().clone()
    }

    fn user(blocks: Value) -> Value {
        json!({"role": "user", "content": blocks})
    }

    fn assistant(blocks: Value) -> Value {
        json!({"role": "assistant", "content": blocks})
    }

    fn call(id: &str) -> Value {
        json!({"type": "tool_use", "id": id, "name": "bash", "input": {}})
    }

    fn result(id: &str) -> Value {
        json!({"type": "tool_result", "tool_use_id": id, "content": "ok"})
    }

    #[test]
    fn a_plain_round_with_two_calls_passes() {
        let ok = body(json!([
            user(json!("do it")),
            assistant(json!([{"type":"thinking","thinking":"","signature":"x"}, call("a"), call("b")])),
            user(json!([result("a"), result("b"), {"type": "text", "text": "and this"}])),
        ]));
        assert_eq!(check_request(&ok), Ok(()));
    }

    type Refusal = fn(&Violation) -> bool;

    #[test]
    fn each_broken_request_is_refused_for_its_own_reason() {
        let text = json!([{"type": "text", "text": "hi"}]);
        let cases: Vec<(Value, Refusal)> = vec![
            (json!([]), |v| matches!(v, Violation::Shape { .. })),
            (json!([assistant(text.clone())]), |v| matches!(v, Violation::Turn { index: 0, .. })),
            (json!([user(text.clone()), assistant(text.clone())]), |v| {
                matches!(v, Violation::Turn { index: 1, .. })
            }),
            (json!([user(text.clone()), user(text.clone())]), |v| {
                matches!(v, Violation::Turn { index: 1, .. })
            }),
            (json!([user(json!([{"type": "text", "text": " \n"}]))]), |v| {
                matches!(v, Violation::EmptyText { .. })
            }),
            (json!([user(text.clone()), assistant(json!([call("a")]))]), |v| {
                matches!(v, Violation::OrphanedCall { index: 1, .. })
            }),
            (json!([user(text.clone()), assistant(json!([call("a")])), user(text.clone())]), |v| {
                matches!(v, Violation::OrphanedCall { index: 1, .. })
            }),
            (json!([user(json!([result("a")]))]), |v| matches!(v, Violation::StrayResult { .. })),
            (
                json!([
                    user(text.clone()),
                    assistant(json!([call("a")])),
                    user(json!([result("a"), result("a")]))
                ]),
                |v| matches!(v, Violation::StrayResult { .. }),
            ),
            (
                json!([
                    user(text.clone()),
                    assistant(json!([call("a"), call("b")])),
                    user(json!([result("b"), result("a")]))
                ]),
                |v| matches!(v, Violation::ResultOrder { block: 0, .. }),
            ),
            (
                json!([
                    user(text.clone()),
                    assistant(json!([call("a")])),
                    user(json!([text[0], result("a")]))
                ]),
                |v| matches!(v, Violation::ResultOrder { .. }),
            ),
            (json!([user(text.clone()), assistant(json!([call("a"), call("a")]))]), |v| {
                matches!(v, Violation::DuplicateCall { .. })
            }),
            (json!([user(json!([call("a")]))]), |v| matches!(v, Violation::Misplaced { .. })),
            (json!([user(text.clone()), assistant(json!([{"type":"thinking","thinking":"t"}]))]), |v| {
                matches!(v, Violation::Thinking { .. })
            }),
            (
                json!([
                    user(text.clone()),
                    assistant(json!([text[0], {"type":"thinking","thinking":"t","signature":"s"}]))
                ]),
                |v| matches!(v, Violation::Thinking { .. }),
            ),
        ];
        for (messages, expected) in cases {
            let violation = check_request(&body(messages.clone())).expect_err(&messages.to_string());
            assert!(expected(&violation), "{messages}: {violation}");
        }
    }

    #[test]
    fn five_cache_points_are_too_many_but_a_field_of_that_name_in_an_input_is_data() {
        let point = json!({"type": "ephemeral"});
        let block = json!({"type": "text", "text": "t", "cache_control": point});
        let mut request = body(json!([user(json!([block, block, block, block, block]))]));
        assert_eq!(check_request(&request), Err(Violation::CachePoints { count: 5 }));
        let mut poked = call("a");
        poked["input"] = json!({"cache_control": point});
        request["messages"] = json!([
            user(json!([block, block, block, block])),
            assistant(json!([poked])),
            user(json!([result("a")]))
        ]);
        assert_eq!(check_request(&request), Ok(()));
    }

    #[test]
    fn the_prefix_may_grow_and_move_its_cache_points_but_not_change() {
        let first = body(json!([user(json!([{"type": "text", "text": "a", "cache_control": {}}]))]));
        let grown = body(json!([
            user(json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])),
            assistant(json!([{"type": "text", "text": "c"}])),
            user(json!("d")),
        ]));
        assert_eq!(check_prefix(&first, &grown), Ok(()));
        assert!(check_prefix(&grown, &first).is_err());
        let mut other = grown.clone();
        other["messages"][0]["content"][0]["text"] = json!("A");
        assert_eq!(
            check_prefix(&first, &other),
            Err(Violation::UnstablePrefix { at: "messages[0].content[0]".into() })
        );
        let mut other = grown.clone();
        other["system"] = json!("t");
        assert_eq!(check_prefix(&first, &other), Err(Violation::UnstablePrefix { at: "system".into() }));
        other["model"] = json!("another");
        assert_eq!(check_prefix(&first, &other), Ok(()));
    }

    #[test]
    fn an_answer_must_come_back_byte_for_byte() {
        let answer = [json!({"type":"thinking","thinking":"t","signature":"s"}), call("a")];
        let mut next = body(json!([user(json!("x")), assistant(json!(answer)), user(json!([result("a")]))]));
        assert_eq!(check_answer_kept(&answer, &next), Ok(()));
        next["messages"][1]["content"][0]["thinking"] = json!("T");
        assert_eq!(check_answer_kept(&answer, &next), Err(Violation::Changed { index: 1, block: 0 }));
        next["messages"][1]["content"] = json!([answer[1]]);
        assert_eq!(check_answer_kept(&answer, &next), Err(Violation::Changed { index: 1, block: 0 }));
    }

    #[test]
    fn half_a_character_is_found_in_the_raw_text() {
        assert_eq!(check_json_text(br#"{"a":"\ud83d\ude00 \\ud800 \u00e4"}"#), Ok(()));
        assert_eq!(check_json_text(br#"{"a":"\ud83d"}"#), Err(Violation::LoneSurrogate { offset: 6 }));
        assert_eq!(check_json_text(br#"["\ude00"]"#), Err(Violation::LoneSurrogate { offset: 2 }));
    }
}
