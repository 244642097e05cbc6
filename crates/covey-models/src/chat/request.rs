//! A conversation in the journal's shape becomes a Chat request.
//!
//! Pure and byte-stable: what was sent once is the same bytes in every later request, so that the provider's cache (and
//! that of a local server) counts. What grows, and what asks for the answer's form, stands behind it.

use serde_json::{Map, Value, json};

use super::WIRE;
use crate::reading::WIRE_ITEM_TYPE;
use crate::translate::{self, BETWEEN_TEXTS, PICTURE_BELOW};
use crate::wire::Question;

/// Name of the field that limits the answer on most servers.
const OUTPUT_LIMIT_FIELD: &str = "max_tokens";

/// The body as it is sent.
pub fn request(question: Question<'_>) -> Map<String, Value> {
    let body = question.body;
    let mut out = Map::new();
    translate::copy(body, &mut out, "model", "model");
    translate::copy(body, &mut out, "max_tokens", question.output_limit_field.unwrap_or(OUTPUT_LIMIT_FIELD));
    translate::copy(body, &mut out, "stop_sequences", "stop");
    out.extend(translate::passed_on(body).map(|(name, value)| (name.clone(), value.clone())));
    let tools: Vec<Value> = translate::tools(body).iter().map(tool).collect();
    let has_tools = !tools.is_empty();
    if has_tools {
        out.insert("tools".into(), Value::Array(tools));
    }
    let mut messages = Vec::new();
    messages.extend(translate::system(body).map(|text| json!({"role": "system", "content": text})));
    for message in body.get("messages").and_then(Value::as_array).into_iter().flatten() {
        let blocks = translate::blocks(&message["content"]);
        if message["role"] == "assistant" {
            messages.push(assistant(&blocks));
        } else {
            user(&blocks, &mut messages);
        }
    }
    out.insert("messages".into(), Value::Array(messages));
    if let Some(choice) = body.get("tool_choice").filter(|_| has_tools) {
        out.insert("tool_choice".into(), tool_choice(choice));
        if choice["disable_parallel_tool_use"] == true {
            out.insert("parallel_tool_calls".into(), json!(false));
        }
    }
    if let Some(schema) = question.schema {
        let form = json!({"name": "answer", "schema": schema});
        out.insert("response_format".into(), json!({"type": "json_schema", "json_schema": form}));
    }
    out.insert("stream".into(), json!(true));
    out.insert("stream_options".into(), json!({"include_usage": true}));
    out
}

fn tool(tool: &Value) -> Value {
    let mut function = Map::new();
    function.insert("name".into(), tool["name"].clone());
    if let Some(description) = tool.get("description").filter(|text| text.is_string()) {
        function.insert("description".into(), description.clone());
    }
    function.insert("parameters".into(), tool["input_schema"].clone());
    json!({"type": "function", "function": function})
}

fn tool_choice(choice: &Value) -> Value {
    match choice["type"].as_str().unwrap_or_default() {
        "none" => json!("none"),
        "any" => json!("required"),
        "tool" => json!({"type": "function", "function": {"name": choice["name"]}}),
        _ => json!("auto"),
    }
}

fn user(blocks: &[Value], messages: &mut Vec<Value>) {
    let mut pictures = Vec::new();
    for result in blocks.iter().filter(|block| block["type"] == "tool_result") {
        let (mut text, of_result) = translate::result(result);
        if !of_result.is_empty() {
            text.push_str(if text.is_empty() { "" } else { BETWEEN_TEXTS });
            text.push_str(PICTURE_BELOW);
            pictures.extend(of_result);
        }
        let id = translate::call_id(result, "tool_use_id");
        messages.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
    }
    let texts: Vec<String> = blocks.iter().filter_map(translate::text_of).collect();
    pictures.extend(blocks.iter().filter_map(translate::picture_of));
    if pictures.is_empty() {
        if !texts.is_empty() {
            messages.push(json!({"role": "user", "content": texts.join(BETWEEN_TEXTS)}));
        }
        return;
    }
    // Only where there is a picture: many servers' templates know texts alone.
    let parts = pictures.iter().map(|url| json!({"type": "image_url", "image_url": {"url": url}}));
    let texts = texts.iter().map(|text| json!({"type": "text", "text": text}));
    messages.push(json!({"role": "user", "content": parts.chain(texts).collect::<Vec<_>>()}));
}

fn assistant(blocks: &[Value]) -> Value {
    let mut message = Map::new();
    message.insert("role".into(), json!("assistant"));
    let own = blocks.iter().filter(|block| block["type"] == WIRE_ITEM_TYPE && block["wire"] == WIRE);
    for fields in own.filter_map(|block| block["item"].as_object()) {
        message.extend(fields.iter().map(|(name, value)| (name.clone(), value.clone())));
    }
    let texts: Vec<String> = blocks.iter().filter_map(translate::text_of).collect();
    let calls: Vec<Value> = blocks.iter().filter(|block| block["type"] == "tool_use").map(call).collect();
    let content = match (texts.is_empty(), calls.is_empty()) {
        (true, false) => Value::Null,
        (..) => json!(texts.join(BETWEEN_TEXTS)),
    };
    message.insert("content".into(), content);
    if !calls.is_empty() {
        message.insert("tool_calls".into(), Value::Array(calls));
    }
    Value::Object(message)
}

fn call(block: &Value) -> Value {
    json!({
        "id": translate::call_id(block, "id"),
        "type": "function",
        "function": {"name": block["name"], "arguments": block["input"].to_string()},
    })
}
