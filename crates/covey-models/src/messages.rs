//! The Anthropic Messages wire: the journal's own shape, so requests go out as they are.

pub mod assemble;

use serde_json::{Map, Value};

use crate::reading::WIRE_ITEM_TYPE;
use crate::wire::Question;

/// The body as it is sent. A block that only another wire understands is left out; a message that has nothing else
/// cannot be empty, so it says that something was left out.
pub fn request(question: Question<'_>) -> Map<String, Value> {
    let mut body = question.body.clone();
    for message in body.get_mut("messages").and_then(Value::as_array_mut).into_iter().flatten() {
        let Some(Value::Array(blocks)) = message.get_mut("content") else { continue };
        let before = blocks.len();
        blocks.retain(|block| block["type"] != WIRE_ITEM_TYPE);
        if blocks.is_empty() && before > 0 {
            blocks.push(serde_json::json!({"type": "text", "text": LEFT_OUT}));
        }
    }
    body.insert("stream".to_owned(), Value::Bool(true));
    body
}

/// What stands in a message that held nothing that this wire understands.
const LEFT_OUT: &str = "(not shown)";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_another_wire_has_left_in_the_history_is_not_sent() {
        let item = json!({"type": WIRE_ITEM_TYPE, "wire": "openai-responses", "item": {"type": "reasoning"}});
        let body = json!({"model": "m", "unknown": {"b": 1, "a": 2}, "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [item, {"type": "text", "text": "b"}]},
            {"role": "user", "content": [{"type": "text", "text": "c"}]},
            {"role": "assistant", "content": [item]},
        ]});
        let body = body.as_object().unwrap();
        let sent = request(Question { body, schema: None, output_limit_field: None });
        let expected = json!({"model": "m", "unknown": {"b": 1, "a": 2}, "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
            {"role": "user", "content": [{"type": "text", "text": "c"}]},
            {"role": "assistant", "content": [{"type": "text", "text": LEFT_OUT}]},
        ], "stream": true});
        assert_eq!(Value::Object(sent).to_string(), expected.to_string());
    }
}
