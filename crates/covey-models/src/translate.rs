//! What both OpenAI wires need of a conversation in the journal's shape.
//!
//! Pure. What does not belong here: the shape of one wire.

use serde_json::{Map, Value};

/// Fields of the Messages API that have their own place, or none, on the other wires. Every other field is passed on
/// as it is: what the operator or the agent adds is meant for the provider.
const OWN_FIELDS: [&str; 13] = [
    "model",
    "max_tokens",
    "system",
    "tools",
    "tool_choice",
    "messages",
    "stop_sequences",
    "stream",
    "metadata",
    "thinking",
    "cache_control",
    "context_management",
    "container",
];
/// Longest id of a call that every provider takes.
const CALL_ID_BYTES_MAX: usize = 40;
/// What marks the result of a call that failed, as these wires have no field for it.
pub(crate) const ERROR_MARK: &str = "[error] ";
/// What stands between two texts that become one.
pub(crate) const BETWEEN_TEXTS: &str = "\n\n";
/// What stands where a picture comes in the message behind, because a result can hold only text.
pub(crate) const PICTURE_BELOW: &str = "(The picture is in the next message.)";

/// Copies a field to the name that the other wire has for it.
pub(crate) fn copy(body: &Map<String, Value>, out: &mut Map<String, Value>, from: &str, to: &str) {
    if let Some(value) = body.get(from) {
        out.insert(to.to_owned(), value.clone());
    }
}

/// Fields that are nobody's own, in their order.
pub(crate) fn passed_on(body: &Map<String, Value>) -> impl Iterator<Item = (&String, &Value)> {
    body.iter().filter(|(name, _)| !OWN_FIELDS.contains(&name.as_str()))
}

/// The blocks of a content that is a text or a list.
pub(crate) fn blocks(content: &Value) -> Vec<Value> {
    match content {
        Value::String(text) => vec![serde_json::json!({"type": "text", "text": text})],
        Value::Array(blocks) => blocks.clone(),
        _ => Vec::new(),
    }
}

/// The system prompt as one text.
pub(crate) fn system(body: &Map<String, Value>) -> Option<String> {
    let texts: Vec<String> = blocks(body.get("system")?).iter().filter_map(text_of).collect();
    (!texts.is_empty()).then(|| texts.join(BETWEEN_TEXTS))
}

/// The text of a text block.
pub(crate) fn text_of(block: &Value) -> Option<String> {
    (block["type"] == "text").then(|| block["text"].as_str().map(str::to_owned)).flatten()
}

/// The address of a picture: data of its own, or a link.
pub(crate) fn picture_of(block: &Value) -> Option<String> {
    let source = (block["type"] == "image").then(|| &block["source"])?;
    match source["type"].as_str()? {
        "base64" => {
            Some(format!("data:{};base64,{}", source["media_type"].as_str()?, source["data"].as_str()?))
        }
        "url" => Some(source["url"].as_str()?.to_owned()),
        _ => None,
    }
}

/// The picture block of an address, the way back of [`picture_of`].
pub(crate) fn picture_block(address: &str) -> Value {
    let data = address.strip_prefix("data:").and_then(|rest| rest.split_once(";base64,"));
    match data {
        Some((media_type, data)) => serde_json::json!({
            "type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}),
        None => serde_json::json!({"type": "image", "source": {"type": "url", "url": address}}),
    }
}

/// An id that every provider takes; the same id every time.
pub(crate) fn call_id(block: &Value, field: &str) -> String {
    let id = block[field].as_str().unwrap_or_default();
    let fits = id.len() <= CALL_ID_BYTES_MAX
        && !id.is_empty()
        && id.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'));
    if fits { id.to_owned() } else { format!("call_{}", &blake3::hash(id.as_bytes()).to_hex()[..24]) }
}

/// A result as text, and the pictures in it.
pub(crate) fn result(block: &Value) -> (String, Vec<String>) {
    let inner = blocks(&block["content"]);
    let pictures: Vec<String> = inner.iter().filter_map(picture_of).collect();
    let texts: Vec<String> = inner.iter().filter_map(text_of).collect();
    let mark = if block["is_error"] == true { ERROR_MARK } else { "" };
    (format!("{mark}{}", texts.join(BETWEEN_TEXTS)), pictures)
}

/// A result's text without its mark, and whether it had one.
pub(crate) fn unmarked(text: &str) -> (&str, bool) {
    text.strip_prefix(ERROR_MARK).map_or((text, false), |rest| (rest, true))
}

/// The tools that a client or Covey runs; those of a provider have no counterpart elsewhere.
pub(crate) fn tools(body: &Map<String, Value>) -> Vec<Value> {
    let tools = body.get("tools").and_then(Value::as_array).into_iter().flatten();
    tools.filter(|tool| tool["input_schema"].is_object()).cloned().collect()
}
