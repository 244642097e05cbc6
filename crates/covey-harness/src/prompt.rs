//! From a conversation to the body of a request.
//!
//! The bytes of what was sent once do not change later: system and tools are fixed, messages only grow. The
//! cache points are four: behind the tools, which agents share, behind the system prompt, at the end of the last
//! user message and at the end of the one before, which the previous request wrote. What does not belong
//! here: mending a history (`repair`).

use serde_json::{Map, Value, json};

use crate::config::AgentConfig;
use crate::repair::{Message, Reader, Role, repair};

/// One part of the conversation.
#[derive(Debug, Clone, PartialEq)]
pub enum Entry {
    /// What the user said.
    Input(Vec<Value>),
    /// What we say: a note, or what stands for an older part of the conversation.
    Note(Vec<Value>),
    /// An answer with the results of its calls.
    Answer {
        /// The provider's raw blocks.
        content: Vec<Value>,
        /// The model that answered.
        model: String,
        /// The provider that answered; none where there is only one.
        provider: Option<String>,
        /// One per call, in the order of the calls.
        results: Vec<CallResult>,
    },
}

/// The result of one call, as the prompt needs it.
#[derive(Debug, Clone, PartialEq)]
pub struct CallResult {
    /// The provider's id of the call.
    pub call_id: String,
    /// Content blocks and whether it is an error; none while it runs.
    pub outcome: Option<(Vec<Value>, bool)>,
}

/// Who is asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Addressee<'a> {
    /// The provider's name; none where there is only one.
    pub provider: Option<&'a str>,
    /// The wire over which it is asked.
    pub wire: &'a str,
}

/// Builds the body of the next request.
pub fn build(config: &AgentConfig, conversation: &[Entry], to: Addressee<'_>) -> Map<String, Value> {
    let mut history = Vec::new();
    let mut reader = Reader { model: None, provider: to.provider, wire: to.wire };
    let user = |content| Message { role: Role::User, content, producer: None, provider: None };
    for entry in conversation {
        match entry {
            Entry::Input(content) | Entry::Note(content) => {
                history.push(user(content.clone()));
            }
            Entry::Answer { content, model, provider, results } => {
                if reader.is_from(provider.as_deref()) {
                    reader.model = Some(model.as_str());
                }
                history.push(Message {
                    role: Role::Assistant,
                    content: content.clone(),
                    producer: Some(model.clone()),
                    provider: provider.clone(),
                });
                history.push(user(results.iter().filter_map(result_block).collect()));
            }
        }
    }
    let mut messages = repair(&merged(history), &reader);
    set_cache_points(&mut messages);
    let mut body = Map::new();
    body.insert("model".into(), json!(config.model));
    body.insert("max_tokens".into(), json!(config.max_tokens));
    let system = config.system_blocks();
    if system.as_array().is_some_and(|blocks| !blocks.is_empty()) {
        body.insert("system".into(), system);
    }
    if !config.tools.is_empty() {
        let mut tools = config.tools.clone();
        if let Some(Value::Object(last)) = tools.last_mut() {
            last.insert("cache_control".into(), cache_point());
        }
        body.insert("tools".into(), Value::Array(tools));
    }
    body.insert("messages".into(), json!(messages));
    body
}

fn result_block(result: &CallResult) -> Option<Value> {
    let (content, is_error) = result.outcome.as_ref()?;
    let mut block = json!({"type": "tool_result", "tool_use_id": result.call_id, "content": content});
    if *is_error {
        block["is_error"] = json!(true);
    }
    Some(block)
}

/// Puts results and the texts behind them into one message, which is what the results' place depends on.
fn merged(history: Vec<Message>) -> Vec<Message> {
    let mut out: Vec<Message> = Vec::new();
    for message in history {
        match out.last_mut() {
            Some(last) if last.role == Role::User && message.role == Role::User => {
                last.content.extend(message.content);
            }
            _ => out.push(message),
        }
    }
    out
}

fn set_cache_points(messages: &mut [Value]) {
    let users = messages.iter_mut().rev().filter(|m| m["role"] == "user").take(2);
    for message in users {
        if let Some(Value::Object(block)) =
            message["content"].as_array_mut().and_then(|blocks| blocks.last_mut())
        {
            block.insert("cache_control".into(), cache_point());
        }
    }
}

fn cache_point() -> Value {
    json!({"type": "ephemeral"})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::{check_prefix, check_request};

    fn text(text: &str) -> Vec<Value> {
        vec![json!({"type": "text", "text": text})]
    }

    #[test]
    fn results_come_in_the_order_of_the_calls_and_before_what_the_user_said_meanwhile() {
        let config =
            AgentConfig::from_document(&json!({"model": "m", "tools": [{"type": "agent_toolset_20260401"}]}))
                .unwrap();
        let call = |id: &str| json!({"type": "tool_use", "id": id, "name": "bash", "input": {}});
        let done = |id: &str| CallResult { call_id: id.into(), outcome: Some((text("ok"), id == "b")) };
        let mut conversation = vec![Entry::Input(text("hi"))];
        let to = Addressee::default();
        let first = build(&config, &conversation, to);
        conversation.push(Entry::Answer {
            content: vec![call("a"), call("b")],
            model: "m".into(),
            provider: None,
            results: vec![done("a"), done("b")],
        });
        conversation.push(Entry::Input(text("also this")));
        let second = build(&config, &conversation, to);
        assert_eq!(check_request(&second), Ok(()));
        assert_eq!(check_prefix(&first, &second), Ok(()));
        let last = &second["messages"][2]["content"];
        assert_eq!(last[0]["tool_use_id"], "a");
        assert_eq!(last[1]["is_error"], true);
        assert_eq!(last[2]["text"], "also this");
        assert!(
            last[2]["cache_control"].is_object()
                && second["messages"][0]["content"][0]["cache_control"].is_object()
        );
    }

    /// The text of a request up to its last cache point, without the marks: the provider's cache does not see them.
    fn cached(body: &Map<String, Value>) -> String {
        let text = |field: &str| bare(&body[field]).to_string();
        let messages = text("messages");
        let open = messages.strip_suffix("}]}]").unwrap();
        format!("{}\n{}\n{open}", text("tools"), text("system"))
    }

    fn bare(value: &Value) -> Value {
        let mut value = value.clone();
        match &mut value {
            Value::Object(map) => {
                map.shift_remove("cache_control");
                map.values_mut().for_each(|inner| *inner = bare(inner));
            }
            Value::Array(list) => list.iter_mut().for_each(|inner| *inner = bare(inner)),
            _ => {}
        }
        value
    }

    #[test]
    fn each_request_begins_with_the_bytes_of_the_one_before_up_to_its_cache_point() {
        let config = AgentConfig::from_document(
            &json!({"model": "m", "system": "s", "tools": [{"type": "agent_toolset_20260401"}]}),
        )
        .unwrap();
        let mut conversation = vec![Entry::Input(text("begin"))];
        let mut before = build(&config, &conversation, Addressee::default());
        for n in 0..20 {
            let call =
                json!({"type": "tool_use", "id": format!("c{n}"), "name": "bash", "input": {"z": n, "a": 1}});
            let thinking = json!({"type": "thinking", "thinking": "t", "signature": format!("s{n}")});
            let outcome = Some((text("ok"), n % 3 == 0));
            conversation.push(Entry::Answer {
                content: vec![thinking, call],
                model: "m".into(),
                provider: Some("p".into()),
                results: vec![CallResult { call_id: format!("c{n}"), outcome }],
            });
            if n % 4 == 0 {
                conversation.push(Entry::Note(text("[covey] A note.")));
            }
            let next = build(&config, &conversation, Addressee { provider: Some("p"), wire: "anthropic" });
            assert!(cached(&next).starts_with(&cached(&before)), "request {n}");
            assert_eq!(check_prefix(&before, &next), Ok(()));
            assert_eq!(check_request(&next), Ok(()));
            before = next;
        }
        let points = Value::Object(before).to_string().matches("cache_control").count();
        assert_eq!(points, crate::verify::CACHE_POINTS_MAX);
    }
}
