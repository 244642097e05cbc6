//! A conversation in the journal's shape becomes a Responses request.
//!
//! Pure and byte-stable, as `chat::request`. Ids of messages and calls are not sent: without stored responses they name
//! nothing; only the pairing of calls and outputs counts.

use serde_json::{Map, Value, json};

use super::WIRE;
use crate::reading::WIRE_ITEM_TYPE;
use crate::translate;
use crate::wire::Question;

/// The body as it is sent.
pub fn request(question: Question<'_>) -> Map<String, Value> {
    let body = question.body;
    let mut out = Map::new();
    translate::copy(body, &mut out, "model", "model");
    translate::copy(body, &mut out, "max_tokens", question.output_limit_field.unwrap_or("max_output_tokens"));
    out.extend(translate::passed_on(body).map(|(name, value)| (name.clone(), value.clone())));
    if let Some(system) = translate::system(body) {
        out.insert("instructions".into(), json!(system));
    }
    let tools: Vec<Value> = translate::tools(body).iter().map(tool).collect();
    let has_tools = !tools.is_empty();
    if has_tools {
        out.insert("tools".into(), Value::Array(tools));
    }
    let mut items = Vec::new();
    for message in body.get("messages").and_then(Value::as_array).into_iter().flatten() {
        let blocks = translate::blocks(&message["content"]);
        if message["role"] == "assistant" {
            assistant(&blocks, &mut items)
        } else {
            user(&blocks, &mut items)
        }
    }
    out.insert("input".into(), Value::Array(items));
    if let Some(choice) = body.get("tool_choice").filter(|_| has_tools) {
        out.insert("tool_choice".into(), tool_choice(choice));
        if choice["disable_parallel_tool_use"] == true {
            out.insert("parallel_tool_calls".into(), json!(false));
        }
    }
    if let Some(schema) = question.schema {
        let format = json!({"type": "json_schema", "name": "answer", "schema": schema, "strict": false});
        out.insert("text".into(), json!({"format": format}));
    }
    out.insert("store".into(), json!(false));
    out.insert("include".into(), json!(["reasoning.encrypted_content"]));
    out.insert("stream".into(), json!(true));
    out
}

fn tool(tool: &Value) -> Value {
    let mut out = Map::new();
    out.insert("type".into(), json!("function"));
    out.insert("name".into(), tool["name"].clone());
    if let Some(description) = tool.get("description").filter(|text| text.is_string()) {
        out.insert("description".into(), description.clone());
    }
    out.insert("parameters".into(), tool["input_schema"].clone());
    // Strict schemas may have no optional fields; ours have.
    out.insert("strict".into(), json!(false));
    Value::Object(out)
}

fn tool_choice(choice: &Value) -> Value {
    match choice["type"].as_str().unwrap_or_default() {
        "none" => json!("none"),
        "any" => json!("required"),
        "tool" => json!({"type": "function", "name": choice["name"]}),
        _ => json!("auto"),
    }
}

fn user(blocks: &[Value], items: &mut Vec<Value>) {
    for result in blocks.iter().filter(|block| block["type"] == "tool_result") {
        let (text, pictures) = translate::result(result);
        let output = if pictures.is_empty() {
            json!(text)
        } else {
            let text = (!text.is_empty()).then(|| json!({"type": "input_text", "text": text}));
            text.into_iter().chain(pictures.iter().map(|url| picture(url))).collect()
        };
        let call_id = translate::call_id(result, "tool_use_id");
        items.push(json!({"type": "function_call_output", "call_id": call_id, "output": output}));
    }
    let parts: Vec<Value> = blocks
        .iter()
        .filter_map(|block| match translate::text_of(block) {
            Some(text) => Some(json!({"type": "input_text", "text": text})),
            None => translate::picture_of(block).map(|url| picture(&url)),
        })
        .collect();
    if !parts.is_empty() {
        items.push(json!({"type": "message", "role": "user", "content": parts}));
    }
}

fn picture(url: &str) -> Value {
    json!({"type": "input_image", "image_url": url, "detail": "auto"})
}

fn assistant(blocks: &[Value], items: &mut Vec<Value>) {
    let mut texts = Vec::new();
    let mut phase = None;
    for block in blocks {
        if let Some(text) = translate::text_of(block) {
            texts.push(json!({"type": "output_text", "text": text, "annotations": []}));
            continue;
        }
        let item = match block["type"].as_str().unwrap_or_default() {
            "tool_use" => json!({
                "type": "function_call",
                "call_id": translate::call_id(block, "id"),
                "name": block["name"],
                "arguments": block["input"].to_string(),
            }),
            WIRE_ITEM_TYPE if block["wire"] == WIRE => block["item"].clone(),
            _ => continue,
        };
        say(&mut texts, &mut phase, items);
        match item["phase"].as_str() {
            Some(of_next) if item["type"] == "message" => phase = Some(of_next.to_owned()),
            _ => items.push(item),
        }
    }
    say(&mut texts, &mut phase, items);
}

fn say(texts: &mut Vec<Value>, phase: &mut Option<String>, items: &mut Vec<Value>) {
    if texts.is_empty() {
        return;
    }
    let mut message = Map::new();
    message.insert("type".into(), json!("message"));
    message.insert("role".into(), json!("assistant"));
    message.extend(phase.take().map(|phase| ("phase".to_owned(), json!(phase))));
    message.insert("content".into(), Value::Array(std::mem::take(texts)));
    items.push(Value::Object(message));
}
