//! A conversation with tools becomes one without: tools as text, calls and results as texts.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::translate;

/// What every answer must look like.
pub(super) const FORM: &str = "Answer with exactly one JSON object and nothing else: \
    {\"tool\": NAME, \"input\": {…}} to call a tool, or {\"answer\": TEXT} when you are done or have something to say.";

/// A request in this dialect.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    /// In the journal's shape, without tools.
    pub body: Map<String, Value>,
    /// What the answer must match; none when the model shall write freely.
    pub schema: Option<Value>,
}

/// Translates a request. Pure and byte-stable: a longer conversation begins with the same bytes.
pub fn request(body: &Map<String, Value>) -> Asked {
    let tools = translate::tools(body);
    let choice = body.get("tool_choice").cloned().unwrap_or_default();
    let mut out = body.clone();
    out.shift_remove("tools");
    out.shift_remove("tool_choice");
    if tools.is_empty() {
        return Asked { body: out, schema: None };
    }
    let mut system = translate::blocks(body.get("system").unwrap_or(&Value::Null));
    system.push(json!({"type": "text", "text": described(&tools)}));
    out.insert("system".into(), Value::Array(system));
    let mut names = HashMap::new();
    let messages = body.get("messages").and_then(Value::as_array).into_iter().flatten();
    out.insert("messages".into(), messages.map(|message| told(message, &mut names)).collect());
    Asked { body: out, schema: schema(&tools, &choice) }
}

/// The tools in few words: small models have small contexts.
fn described(tools: &[Value]) -> String {
    let mut text = String::from("You have these tools; `?` marks fields that may be left out.\n");
    for tool in tools {
        let schema = &tool["input_schema"];
        let required: Vec<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let fields: Vec<String> = schema["properties"]
            .as_object()
            .into_iter()
            .flatten()
            .map(|(name, field)| {
                let mark = if required.contains(&name.as_str()) { "" } else { "?" };
                format!("\"{name}\"{mark}: {}", field["type"].as_str().unwrap_or("any"))
            })
            .collect();
        let name = tool["name"].as_str().unwrap_or_default();
        text.push_str(&format!("\n{name} {{{}}}", fields.join(", ")));
        if let Some(description) = tool["description"].as_str() {
            text.push_str(&format!("\n  {description}"));
        }
    }
    text.push_str("\n\n");
    text.push_str(FORM);
    text
}

/// What the answer must match: one of the tools with its input, or an answer.
fn schema(tools: &[Value], choice: &Value) -> Option<Value> {
    let kind = choice["type"].as_str().unwrap_or("auto");
    let wanted = tools.iter().filter(|tool| kind != "tool" || tool["name"] == choice["name"]);
    let mut forms: Vec<Value> = wanted
        .map(|tool| {
            let mut input = tool["input_schema"].clone();
            input["additionalProperties"] = json!(false);
            object(json!({"tool": {"const": tool["name"]}, "input": input}), json!(["tool", "input"]))
        })
        .collect();
    match kind {
        "none" => return None,
        "any" | "tool" => {}
        _ => forms.push(object(json!({"answer": {"type": "string"}}), json!(["answer"]))),
    }
    Some(json!({"anyOf": forms}))
}

fn object(properties: Value, required: Value) -> Value {
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

/// One message with calls and results as texts. `names` remembers whose result an id is.
fn told(message: &Value, names: &mut HashMap<String, String>) -> Value {
    let blocks = translate::blocks(&message["content"]);
    let is_answer = message["role"] == "assistant";
    let content = if is_answer { answer(&blocks, names) } else { results(&blocks, names) };
    let mut out = message.clone();
    if let Some(out) = out.as_object_mut() {
        out.insert("content".into(), Value::Array(content));
    }
    out
}

fn answer(blocks: &[Value], names: &mut HashMap<String, String>) -> Vec<Value> {
    let texts: Vec<String> = blocks.iter().filter_map(translate::text_of).collect();
    let mut say = (!texts.is_empty()).then(|| texts.join(translate::BETWEEN_TEXTS));
    let mut objects = Vec::new();
    for block in blocks.iter().filter(|block| block["type"] == "tool_use") {
        let text = |field: &str| block[field].as_str().unwrap_or_default().to_owned();
        names.insert(text("id"), text("name"));
        let mut object = Map::new();
        if let Some(say) = say.take() {
            object.insert("say".into(), json!(say));
        }
        object.insert("tool".into(), block["name"].clone());
        object.insert("input".into(), block["input"].clone());
        objects.push(Value::Object(object).to_string());
    }
    if objects.is_empty() {
        objects.push(json!({"answer": say.unwrap_or_default()}).to_string());
    }
    vec![json!({"type": "text", "text": objects.join("\n")})]
}

fn results(blocks: &[Value], names: &HashMap<String, String>) -> Vec<Value> {
    let mut content = Vec::new();
    for block in blocks {
        if block["type"] != "tool_result" {
            content.push(block.clone());
            continue;
        }
        let id = block["tool_use_id"].as_str().unwrap_or_default();
        let name = names.get(id).map_or("a tool", String::as_str);
        let how = if block["is_error"] == true { " (an error)" } else { "" };
        let inner = translate::blocks(&block["content"]);
        let texts: Vec<String> = inner.iter().filter_map(translate::text_of).collect();
        let text = format!("Result of {name}{how}:\n{}", texts.join(translate::BETWEEN_TEXTS));
        let mut told = json!({"type": "text", "text": text});
        if let Some(point) = block.get("cache_control") {
            told["cache_control"] = point.clone();
        }
        content.push(told);
        content.extend(inner.into_iter().filter(|block| block["type"] == "image"));
    }
    content
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(messages: Value) -> Map<String, Value> {
        let tools = json!([{"name": "bash", "description": "Runs a command.", "input_schema": {"type": "object",
            "properties": {"command": {"type": "string"}, "restart": {"type": "boolean"}}, "required": ["command"]}}]);
        let body = json!({"model": "m", "max_tokens": 9, "system": "Be brief.", "tools": tools, "messages": messages});
        body.as_object().unwrap().clone()
    }

    fn history() -> Value {
        json!([
            {"role": "user", "content": "List them."},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "bash", "input": {"command": "ls"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "is_error": true,
                "content": [{"type": "text", "text": "no such"}]}]},
            {"role": "assistant", "content": [{"type": "text", "text": "There are none."}]},
            {"role": "user", "content": "Thanks."},
        ])
    }

    #[test]
    fn tools_calls_and_results_become_texts() {
        let asked = request(&body(history()));
        let system = asked.body["system"][1]["text"].as_str().unwrap();
        assert!(
            system.contains("bash {\"command\": string, \"restart\"?: boolean}\n  Runs a command."),
            "{system}"
        );
        assert!(!asked.body.contains_key("tools"));
        let text = |index: usize| asked.body["messages"][index]["content"][0]["text"].as_str().unwrap();
        assert_eq!(text(1), r#"{"say":"I look.","tool":"bash","input":{"command":"ls"}}"#);
        assert_eq!(text(2), "Result of bash (an error):\nno such");
        assert_eq!(text(3), r#"{"answer":"There are none."}"#);
        let forms = asked.schema.unwrap();
        assert_eq!(forms["anyOf"][0]["properties"]["tool"], json!({"const": "bash"}));
        assert_eq!(forms["anyOf"][1]["required"], json!(["answer"]));
    }

    #[test]
    fn a_longer_conversation_begins_with_the_same_bytes() {
        let bytes = |length: usize| {
            let messages = json!(history().as_array().unwrap()[..length]);
            Value::Object(request(&body(messages)).body)["messages"].to_string()
        };
        let (short, long) = (bytes(3), bytes(5));
        assert!(long.starts_with(short.strip_suffix(']').unwrap()), "{short}\n{long}");
    }

    #[test]
    fn a_summary_is_written_freely_behind_the_same_prefix() {
        let mut wish = body(history());
        wish.insert("tool_choice".into(), json!({"type": "none"}));
        let (free, bound) = (request(&wish), request(&body(history())));
        assert_eq!((free.schema, free.body), (None, bound.body));
        wish.shift_remove("tools");
        assert_eq!(request(&wish).schema, None);
    }
}
