//! From a conversation to the body of a request.
//!
//! The bytes of what was sent once do not change later: system and tools are fixed, messages only grow. The
//! cache points are three: behind the system prompt (it covers the tools as well), at the end of the last
//! user message and at the end of the one before, which the previous request wrote. What does not belong
//! here: mending a history (`repair`).

use serde_json::{Map, Value, json};

use crate::config::AgentConfig;
use crate::repair::{Message, Role, repair};

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

/// Builds the body of the next request.
pub fn build(config: &AgentConfig, conversation: &[Entry]) -> Map<String, Value> {
    let mut history = Vec::new();
    let mut producer = None;
    for entry in conversation {
        match entry {
            Entry::Input(content) | Entry::Note(content) => {
                history.push(Message { role: Role::User, content: content.clone(), producer: None });
            }
            Entry::Answer { content, model, results } => {
                producer = Some(model.as_str());
                history.push(Message {
                    role: Role::Assistant,
                    content: content.clone(),
                    producer: Some(model.clone()),
                });
                let content: Vec<Value> = results.iter().filter_map(result_block).collect();
                history.push(Message { role: Role::User, content, producer: None });
            }
        }
    }
    let mut messages = repair(&merged(history), producer);
    set_cache_points(&mut messages);
    let mut body = Map::new();
    body.insert("model".into(), json!(config.model));
    body.insert("max_tokens".into(), json!(config.max_tokens));
    let system = config.system_blocks();
    if system.as_array().is_some_and(|blocks| !blocks.is_empty()) {
        body.insert("system".into(), system);
    }
    if !config.tools.is_empty() {
        body.insert("tools".into(), json!(config.tools));
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
            block.insert("cache_control".into(), json!({"type": "ephemeral"}));
        }
    }
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
        let first = build(&config, &conversation);
        conversation.push(Entry::Answer {
            content: vec![call("a"), call("b")],
            model: "m".into(),
            results: vec![done("a"), done("b")],
        });
        conversation.push(Entry::Input(text("also this")));
        let second = build(&config, &conversation);
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
}
