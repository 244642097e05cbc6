//! The Messages wire.

use serde_json::{Map, Value, json};

use super::super::check::UNKNOWN_BLOCK_TYPE;
use super::super::plan::{Reply, model_name, signature, usage};
use super::{Event, SplitMix, fragments};

/// The whole message, as an endpoint answers that was not asked to stream.
pub(super) fn whole(request: &Map<String, Value>, reply: &Reply) -> Value {
    json!({
        "id": format!("msg_{}", reply.id),
        "type": "message",
        "role": "assistant",
        "model": model_name(request),
        "content": reply.content,
        "stop_reason": reply.stop_reason,
        "stop_sequence": null,
        "usage": usage(request, &reply.content),
    })
}

/// The answer as events.
pub(super) fn events(
    request: &Map<String, Value>,
    reply: &Reply,
    unknown_block: bool,
    random: &mut SplitMix,
) -> Vec<Event> {
    let mut start = whole(request, reply);
    let usage = start["usage"].clone();
    start["content"] = json!([]);
    start["stop_reason"] = Value::Null;
    start["usage"]["output_tokens"] = json!(1);
    let mut events = vec![json!({"type": "message_start", "message": start}), json!({"type": "ping"})];
    let mut content = reply.content.clone();
    if unknown_block {
        let payload = "kept as it came";
        let block = json!({"type": UNKNOWN_BLOCK_TYPE, "payload": payload, "signature": signature(payload)});
        content.insert(0, block);
    }
    for (index, block) in content.iter().enumerate() {
        let (start, deltas) = taken_apart(block, random);
        events.push(json!({"type": "content_block_start", "index": index, "content_block": start}));
        for delta in deltas {
            events.push(json!({"type": "content_block_delta", "index": index, "delta": delta}));
            if random.below(8) == 0 {
                events.push(json!({"type": "ping"}));
            }
        }
        events.push(json!({"type": "content_block_stop", "index": index}));
    }
    events.push(json!({
        "type": "message_delta",
        "delta": {"stop_reason": reply.stop_reason, "stop_sequence": null},
        "usage": {"output_tokens": usage["output_tokens"]},
    }));
    events.push(json!({"type": "message_stop"}));
    events.iter().map(Event::typed).collect()
}

/// An error in the middle.
pub(super) fn error(message: &str) -> Event {
    let error = json!({"type": "overloaded_error", "message": message});
    Event::typed(&json!({"type": "error", "error": error}))
}

/// A block as its start and its deltas.
fn taken_apart(block: &Value, random: &mut SplitMix) -> (Value, Vec<Value>) {
    let text = |name: &str| block[name].as_str().unwrap_or_default().to_owned();
    let mut start = block.clone();
    let mut pieces = |text: &str, kind: &str, field: &str| -> Vec<Value> {
        fragments(text, random).into_iter().map(|piece| json!({"type": kind, field: piece})).collect()
    };
    match block["type"].as_str().unwrap_or_default() {
        "text" => {
            start["text"] = json!("");
            (start, pieces(&text("text"), "text_delta", "text"))
        }
        "thinking" => {
            (start["thinking"], start["signature"]) = (json!(""), json!(""));
            let mut deltas = pieces(&text("thinking"), "thinking_delta", "thinking");
            deltas.push(json!({"type": "signature_delta", "signature": block["signature"]}));
            (start, deltas)
        }
        "tool_use" => {
            start["input"] = json!({});
            (start, pieces(&block["input"].to_string(), "input_json_delta", "partial_json"))
        }
        _ => (start, Vec::new()),
    }
}
