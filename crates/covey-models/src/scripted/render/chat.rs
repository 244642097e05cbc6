//! The Chat wire. The thinking comes as `reasoning_content`, as local servers send it; it has no signature there.

use serde_json::{Map, Value, json};

use super::super::plan::{Reply, model_name, usage};
use super::{Event, SplitMix, fragments};

/// What ends a stream.
const DONE: &str = "[DONE]";

/// The whole answer.
pub(super) fn whole(request: &Map<String, Value>, reply: &Reply) -> Value {
    let mut message = json!({"role": "assistant", "content": texts(reply, "text"), "refusal": null});
    if let Some(thinking) = texts(reply, "thinking").as_str() {
        message["reasoning_content"] = json!(thinking);
    }
    let calls: Vec<Value> = calls(reply)
        .map(|call| {
            let function = json!({"name": call["name"], "arguments": call["input"].to_string()});
            json!({"id": call["id"], "type": "function", "function": function})
        })
        .collect();
    if !calls.is_empty() {
        message["tool_calls"] = Value::Array(calls);
    }
    let choice =
        json!({"index": 0, "message": message, "finish_reason": finish_reason(reply), "logprobs": null});
    json!({
        "id": format!("chatcmpl-{}", reply.id),
        "object": "chat.completion",
        "created": 0,
        "model": model_name(request),
        "choices": [choice],
        "usage": counted(request, reply),
    })
}

/// The answer as chunks.
pub(super) fn events(request: &Map<String, Value>, reply: &Reply, random: &mut SplitMix) -> Vec<Event> {
    let chunk = |delta: Value, finish_reason: Value| {
        let choice = json!({"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": null});
        json!({
            "id": format!("chatcmpl-{}", reply.id),
            "object": "chat.completion.chunk",
            "created": 0,
            "model": model_name(request),
            "choices": [choice],
        })
    };
    let mut chunks = vec![chunk(json!({"role": "assistant", "content": "", "refusal": null}), Value::Null)];
    for (kind, field) in [("thinking", "reasoning_content"), ("text", "content")] {
        let text = texts(reply, kind);
        for piece in fragments(text.as_str().unwrap_or_default(), random) {
            chunks.push(chunk(json!({ field: piece }), Value::Null));
        }
    }
    // The first piece of every call before the arguments of any: calls in parallel are mixed on this wire.
    let mut rests = Vec::new();
    for (index, call) in calls(reply).enumerate() {
        let function = json!({"name": call["name"], "arguments": ""});
        let first = json!({"index": index, "id": call["id"], "type": "function", "function": function});
        chunks.push(chunk(json!({"tool_calls": [first]}), Value::Null));
        let pieces = fragments(&call["input"].to_string(), random);
        rests.push((index, pieces.into_iter()));
    }
    while !rests.is_empty() {
        let at = random.below(rests.len() as u64) as usize;
        let (index, pieces) = &mut rests[at];
        match pieces.next() {
            Some(piece) => {
                let next = json!({"index": index, "function": {"arguments": piece}});
                chunks.push(chunk(json!({"tool_calls": [next]}), Value::Null));
            }
            None => drop(rests.swap_remove(at)),
        }
    }
    chunks.push(chunk(json!({}), json!(finish_reason(reply))));
    if request.get("stream_options").is_some_and(|options| options["include_usage"] == true) {
        let mut last = chunk(json!({}), Value::Null);
        last["choices"] = json!([]);
        last["usage"] = counted(request, reply);
        chunks.push(last);
    }
    let mut events: Vec<Event> = chunks.iter().map(Event::plain).collect();
    events.push(Event { name: None, data: DONE.to_owned() });
    events
}

/// An error in the middle.
pub(super) fn error(message: &str) -> Event {
    let error =
        json!({"message": message, "type": "server_error", "param": null, "code": "server_is_overloaded"});
    Event::plain(&json!({"error": error}))
}

fn texts(reply: &Reply, kind: &str) -> Value {
    let of_kind = reply.content.iter().filter(|block| block["type"] == kind);
    let texts: Vec<&str> = of_kind.filter_map(|block| block[kind].as_str()).collect();
    if texts.is_empty() { Value::Null } else { json!(texts.join("\n\n")) }
}

fn calls(reply: &Reply) -> impl Iterator<Item = &Value> {
    reply.content.iter().filter(|block| block["type"] == "tool_use")
}

fn finish_reason(reply: &Reply) -> &'static str {
    if reply.stop_reason == "tool_use" { "tool_calls" } else { "stop" }
}

fn counted(request: &Map<String, Value>, reply: &Reply) -> Value {
    let usage = usage(request, &reply.content);
    let (input, output) = (usage["input_tokens"].as_u64(), usage["output_tokens"].as_u64());
    json!({
        "prompt_tokens": input,
        "completion_tokens": output,
        "total_tokens": input.zip(output).map(|(input, output)| input + output),
        "prompt_tokens_details": {"cached_tokens": 0},
    })
}
