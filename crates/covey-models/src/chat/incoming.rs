//! A Chat request becomes a conversation in the journal's shape: what somebody else's client sent.

use serde_json::{Map, Value, json};

use super::WIRE;
use crate::reading::{input_of, wire_item};
use crate::translate;

/// The limit of an answer when the request names none.
const OUTPUT_TOKENS_DEFAULT: u64 = 16_000;
/// Fields that have a place of their own.
const OWN_FIELDS: [&str; 10] = [
    "model",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "messages",
    "stream",
    "stream_options",
];

/// Translates a request. What it does not know it passes on.
///
/// # Errors
/// A sentence that names the field that is not as it must be.
pub fn from_chat(body: &Map<String, Value>) -> Result<Map<String, Value>, String> {
    let mut out = Map::new();
    out.insert("model".into(), body.get("model").cloned().unwrap_or_default());
    let limit = body.get("max_completion_tokens").or_else(|| body.get("max_tokens"));
    out.insert("max_tokens".into(), limit.cloned().unwrap_or_else(|| json!(OUTPUT_TOKENS_DEFAULT)));
    match body.get("stop") {
        Some(Value::String(stop)) => drop(out.insert("stop_sequences".into(), json!([stop]))),
        Some(stop @ Value::Array(_)) => drop(out.insert("stop_sequences".into(), stop.clone())),
        _ => {}
    }
    let passed_on = body.iter().filter(|(name, _)| !OWN_FIELDS.contains(&name.as_str()));
    out.extend(passed_on.map(|(name, value)| (name.clone(), value.clone())));
    let messages = body.get("messages").and_then(Value::as_array).ok_or("messages: expected an array")?;
    let mut conversation = Conversation::default();
    for (index, message) in messages.iter().enumerate() {
        conversation.add(message).map_err(|what| format!("messages[{index}]: {what}"))?;
    }
    if !conversation.system.is_empty() {
        out.insert("system".into(), json!(conversation.system.join(translate::BETWEEN_TEXTS)));
    }
    if let Some(tools) = body.get("tools").and_then(Value::as_array).filter(|tools| !tools.is_empty()) {
        out.insert("tools".into(), tools.iter().map(tool).collect());
    }
    if let Some(choice) = body.get("tool_choice") {
        out.insert("tool_choice".into(), tool_choice(choice));
    }
    out.insert("messages".into(), Value::Array(conversation.messages));
    Ok(out)
}

fn tool(tool: &Value) -> Value {
    let function = &tool["function"];
    let mut out = Map::new();
    out.insert("name".into(), function["name"].clone());
    if let Some(description) = function.get("description") {
        out.insert("description".into(), description.clone());
    }
    let none = || json!({"type": "object", "properties": {}});
    out.insert("input_schema".into(), function.get("parameters").cloned().unwrap_or_else(none));
    Value::Object(out)
}

fn tool_choice(choice: &Value) -> Value {
    match choice {
        Value::String(word) if word == "none" => json!({"type": "none"}),
        Value::String(word) if word == "required" => json!({"type": "any"}),
        Value::Object(_) => json!({"type": "tool", "name": choice["function"]["name"]}),
        _ => json!({"type": "auto"}),
    }
}

#[derive(Default)]
struct Conversation {
    system: Vec<String>,
    messages: Vec<Value>,
}

impl Conversation {
    fn add(&mut self, message: &Value) -> Result<(), String> {
        let content = &message["content"];
        match message["role"].as_str().unwrap_or_default() {
            "system" | "developer" => {
                self.system.extend(parts(content).iter().filter_map(translate::text_of))
            }
            "user" => self.push("user", parts(content)),
            "tool" => {
                let id = message["tool_call_id"].as_str().ok_or("expected `tool_call_id`")?;
                let texts: Vec<String> = parts(content).iter().filter_map(translate::text_of).collect();
                let text = texts.join(translate::BETWEEN_TEXTS);
                let (text, is_error) = translate::unmarked(&text);
                let mut block = json!({"type": "tool_result", "tool_use_id": id});
                if !text.is_empty() {
                    block["content"] = json!([{"type": "text", "text": text}]);
                }
                if is_error {
                    block["is_error"] = json!(true);
                }
                self.push("user", vec![block]);
            }
            "assistant" => {
                let mut blocks = Vec::new();
                for field in ["reasoning_content", "reasoning"] {
                    if let Some(text) = message[field].as_str() {
                        blocks.push(wire_item(WIRE, json!({ field: text })));
                    }
                }
                blocks.extend(parts(content).into_iter().filter(|block| block["text"] != ""));
                blocks.extend(message["tool_calls"].as_array().into_iter().flatten().map(|call| {
                    let function = &call["function"];
                    let input = input_of(function["arguments"].as_str().unwrap_or_default());
                    json!({"type": "tool_use", "id": call["id"], "name": function["name"], "input": input})
                }));
                self.push("assistant", blocks);
            }
            role => return Err(format!("there is no role `{role}`")),
        }
        Ok(())
    }

    /// Neighbours of one role are one message there.
    fn push(&mut self, role: &str, mut blocks: Vec<Value>) {
        match self.messages.last_mut() {
            Some(last) if last["role"] == role => {
                if let Some(content) = last["content"].as_array_mut() {
                    content.append(&mut blocks);
                }
            }
            _ => self.messages.push(json!({"role": role, "content": blocks})),
        }
    }
}

fn parts(content: &Value) -> Vec<Value> {
    let Value::Array(parts) = content else { return translate::blocks(content) };
    parts
        .iter()
        .filter_map(|part| match part["type"].as_str()? {
            "text" => Some(json!({"type": "text", "text": part["text"]})),
            "refusal" => Some(json!({"type": "text", "text": part["refusal"]})),
            "image_url" => Some(translate::picture_block(part["image_url"]["url"].as_str()?)),
            _ => None,
        })
        .collect()
}
