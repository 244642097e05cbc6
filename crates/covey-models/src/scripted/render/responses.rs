//! The Responses wire. The signature of the thinking is its `encrypted_content`.

use serde_json::{Map, Value, json};

use super::super::check::UNKNOWN_BLOCK_TYPE;
use super::super::plan::{Reply, model_name, signature, usage};
use super::{Event, SplitMix, fragments};

/// The whole answer.
pub(super) fn whole(request: &Map<String, Value>, reply: &Reply) -> Value {
    response(request, reply, "completed", items(reply, false))
}

fn response(request: &Map<String, Value>, reply: &Reply, status: &str, output: Vec<Value>) -> Value {
    let usage = match status {
        "completed" => counted(request, reply),
        _ => Value::Null,
    };
    json!({
        "id": format!("resp_{}", reply.id),
        "object": "response",
        "created_at": 0,
        "status": status,
        "error": null,
        "incomplete_details": null,
        "instructions": request.get("system"),
        "metadata": {},
        "model": model_name(request),
        "output": output,
        "parallel_tool_calls": true,
        "temperature": null,
        "tool_choice": "auto",
        "tools": [],
        "top_p": null,
        "usage": usage,
    })
}

/// Items of the answer: runs of texts are one message.
fn items(reply: &Reply, unknown_block: bool) -> Vec<Value> {
    let mut items: Vec<Value> = Vec::new();
    if unknown_block {
        let payload = "kept as it came";
        items.push(json!({"type": UNKNOWN_BLOCK_TYPE, "payload": payload, "signature": signature(payload)}));
    }
    for (place, block) in reply.content.iter().enumerate() {
        let id = |prefix: &str| format!("{prefix}_{}_{place}", reply.id);
        items.push(match block["type"].as_str().unwrap_or_default() {
            "thinking" => json!({
                "type": "reasoning",
                "id": id("rs"),
                "summary": [{"type": "summary_text", "text": block["thinking"]}],
                "encrypted_content": block["signature"],
            }),
            "tool_use" => json!({
                "type": "function_call",
                "id": id("fc"),
                "call_id": block["id"],
                "name": block["name"],
                "arguments": block["input"].to_string(),
                "status": "completed",
            }),
            _ => json!({
                "type": "message",
                "id": id("msg"),
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": block["text"], "annotations": [], "logprobs": []}],
            }),
        });
    }
    items
}

/// The answer as events.
pub(super) fn events(
    request: &Map<String, Value>,
    reply: &Reply,
    unknown_block: bool,
    random: &mut SplitMix,
) -> Vec<Event> {
    let mut events = Vec::new();
    let begun = || response(request, reply, "in_progress", Vec::new());
    events.push(json!({"type": "response.created", "response": begun()}));
    events.push(json!({"type": "response.in_progress", "response": begun()}));
    let items = items(reply, unknown_block);
    for (index, item) in items.iter().enumerate() {
        item_events(item, index, random, &mut events);
    }
    let response = response(request, reply, "completed", items);
    events.push(json!({"type": "response.completed", "response": response}));
    for (number, event) in events.iter_mut().enumerate() {
        event["sequence_number"] = json!(number);
    }
    events.iter().map(Event::typed).collect()
}

fn item_events(item: &Value, index: usize, random: &mut SplitMix, events: &mut Vec<Value>) {
    let mut begun = item.clone();
    // What is sent in pieces: the events' name, where the piece belongs, and its text.
    let (name, place, text) = match item["type"].as_str().unwrap_or_default() {
        "reasoning" => {
            begun["summary"] = json!([]);
            begun["encrypted_content"] = Value::Null;
            ("reasoning_summary_text", json!({"summary_index": 0}), &item["summary"][0]["text"])
        }
        "message" => {
            begun["status"] = json!("in_progress");
            begun["content"] = json!([]);
            ("output_text", json!({"content_index": 0, "logprobs": []}), &item["content"][0]["text"])
        }
        "function_call" => {
            begun["status"] = json!("in_progress");
            begun["arguments"] = json!("");
            ("function_call_arguments", json!({}), &item["arguments"])
        }
        _ => ("", json!({}), &Value::Null),
    };
    let event = |kind: String, more: Value| {
        let mut event = json!({"type": kind, "item_id": item["id"], "output_index": index});
        for fields in [&place, &more] {
            event
                .as_object_mut()
                .into_iter()
                .for_each(|event| event.extend(fields.as_object().cloned().unwrap_or_default()));
        }
        event
    };
    events.push(json!({"type": "response.output_item.added", "output_index": index, "item": begun}));
    let part = match name {
        "output_text" => Some(("content_part", json!({"type": name, "annotations": [], "logprobs": []}))),
        "reasoning_summary_text" => Some(("reasoning_summary_part", json!({"type": "summary_text"}))),
        _ => None,
    };
    let part_event = |end: &str, text: &Value| {
        part.clone().map(|(name, mut part)| {
            part["text"] = text.clone();
            event(format!("response.{name}.{end}"), json!({"part": part}))
        })
    };
    events.extend(part_event("added", &json!("")));
    for piece in fragments(text.as_str().unwrap_or_default(), random) {
        events.push(event(format!("response.{name}.delta"), json!({"delta": piece})));
    }
    if !name.is_empty() {
        let field = if name == "function_call_arguments" { "arguments" } else { "text" };
        events.push(event(format!("response.{name}.done"), json!({ field: text })));
    }
    events.extend(part_event("done", text));
    events.push(json!({"type": "response.output_item.done", "output_index": index, "item": item}));
}

/// An error in the middle.
pub(super) fn error(message: &str) -> Event {
    let event = json!({"type": "error", "code": "server_is_overloaded", "message": message, "param": null});
    Event::typed(&event)
}

fn counted(request: &Map<String, Value>, reply: &Reply) -> Value {
    let usage = usage(request, &reply.content);
    let (input, output) = (usage["input_tokens"].as_u64(), usage["output_tokens"].as_u64());
    json!({
        "input_tokens": input,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input.zip(output).map(|(input, output)| input + output),
    })
}
