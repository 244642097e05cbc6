//! A Responses request becomes a conversation in the journal's shape: what somebody else's client sent.

use serde_json::{Map, Value, json};

use super::WIRE;
use crate::reading::{input_of, wire_item};
use crate::translate;

/// The limit of an answer when the request names none.
const OUTPUT_TOKENS_DEFAULT: u64 = 16_000;
/// Fields that have a place of their own.
const OWN_FIELDS: [&str; 10] = [
    "model",
    "max_output_tokens",
    "instructions",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "input",
    "store",
    "include",
    "stream",
];

/// Translates a request. What it does not know it passes on.
///
/// # Errors
/// A sentence that names the field that is not as it must be, or that refers to a response that is stored nowhere.
pub fn from_responses(body: &Map<String, Value>) -> Result<Map<String, Value>, String> {
    if body.get("previous_response_id").is_some_and(|id| !id.is_null()) {
        return Err("previous_response_id: no response is stored here; send the whole input".into());
    }
    let mut out = Map::new();
    out.insert("model".into(), body.get("model").cloned().unwrap_or_default());
    let limit = body.get("max_output_tokens").filter(|limit| !limit.is_null());
    out.insert("max_tokens".into(), limit.cloned().unwrap_or_else(|| json!(OUTPUT_TOKENS_DEFAULT)));
    let passed_on = body.iter().filter(|(name, _)| !OWN_FIELDS.contains(&name.as_str()));
    out.extend(passed_on.map(|(name, value)| (name.clone(), value.clone())));
    let mut system: Vec<String> =
        body.get("instructions").and_then(Value::as_str).map(str::to_owned).into_iter().collect();
    let mut messages = Vec::new();
    match body.get("input") {
        Some(Value::String(text)) => push(&mut messages, "user", json!({"type": "text", "text": text})),
        Some(Value::Array(items)) => {
            for (index, item) in items.iter().enumerate() {
                add(item, &mut system, &mut messages).map_err(|what| format!("input[{index}]: {what}"))?;
            }
        }
        _ => return Err("input: expected a text or an array".into()),
    }
    if !system.is_empty() {
        out.insert("system".into(), json!(system.join(translate::BETWEEN_TEXTS)));
    }
    if let Some(tools) = body.get("tools").and_then(Value::as_array).filter(|tools| !tools.is_empty()) {
        out.insert("tools".into(), tools.iter().map(tool).collect());
    }
    if let Some(choice) = body.get("tool_choice") {
        out.insert("tool_choice".into(), tool_choice(choice));
    }
    out.insert("messages".into(), Value::Array(messages));
    Ok(out)
}

fn tool(tool: &Value) -> Value {
    if tool["type"] != "function" {
        return tool.clone();
    }
    let mut out = Map::new();
    out.insert("name".into(), tool["name"].clone());
    if let Some(description) = tool.get("description") {
        out.insert("description".into(), description.clone());
    }
    out.insert("input_schema".into(), tool["parameters"].clone());
    Value::Object(out)
}

fn tool_choice(choice: &Value) -> Value {
    match choice {
        Value::String(word) if word == "none" => json!({"type": "none"}),
        Value::String(word) if word == "required" => json!({"type": "any"}),
        Value::Object(_) => json!({"type": "tool", "name": choice["name"]}),
        _ => json!({"type": "auto"}),
    }
}

fn add(item: &Value, system: &mut Vec<String>, messages: &mut Vec<Value>) -> Result<(), String> {
    let kind = item["type"].as_str().unwrap_or("message");
    match (kind, item["role"].as_str()) {
        ("message", Some("system" | "developer")) => {
            system.extend(parts(&item["content"]).iter().filter_map(translate::text_of));
        }
        ("message", Some(role @ ("user" | "assistant"))) => {
            for block in parts(&item["content"]) {
                push(messages, role, block);
            }
        }
        ("message", _) => return Err("expected a role".into()),
        ("function_call", _) => {
            let input = input_of(item["arguments"].as_str().unwrap_or_default());
            let block =
                json!({"type": "tool_use", "id": item["call_id"], "name": item["name"], "input": input});
            push(messages, "assistant", block);
        }
        ("function_call_output", _) => {
            let id = item["call_id"].as_str().ok_or("expected `call_id`")?;
            push(messages, "user", result(id, &item["output"]));
        }
        _ => push(messages, "assistant", wire_item(WIRE, item.clone())),
    }
    Ok(())
}

fn result(id: &str, output: &Value) -> Value {
    let mut content = parts(output);
    let mut is_error = false;
    if let Some(first) = content.first_mut()
        && let Some(text) = translate::text_of(first)
    {
        let (rest, marked) = translate::unmarked(&text);
        is_error = marked;
        first["text"] = json!(rest);
    }
    content.retain(|block| block["text"] != "");
    let mut block = json!({"type": "tool_result", "tool_use_id": id});
    if !content.is_empty() {
        block["content"] = Value::Array(content);
    }
    if is_error {
        block["is_error"] = json!(true);
    }
    block
}

fn parts(content: &Value) -> Vec<Value> {
    let Value::Array(parts) = content else { return translate::blocks(content) };
    parts
        .iter()
        .filter_map(|part| match part["type"].as_str()? {
            "input_text" | "output_text" | "text" => Some(json!({"type": "text", "text": part["text"]})),
            "refusal" => Some(json!({"type": "text", "text": part["refusal"]})),
            "input_image" => Some(translate::picture_block(part["image_url"].as_str()?)),
            _ => None,
        })
        .collect()
}

/// Neighbours of one role are one message there.
fn push(messages: &mut Vec<Value>, role: &str, block: Value) {
    match messages.last_mut() {
        Some(last) if last["role"] == role => {
            if let Some(content) = last["content"].as_array_mut() {
                content.push(block);
            }
        }
        _ => messages.push(json!({"role": role, "content": [block]})),
    }
}
