//! Answering calls that wait for somebody: `covey session allow|deny`, and the question that `covey run` asks.

use covey_types::Fault;
use serde_json::{Value, json};

use crate::client::{Client, id_path};
use crate::exit_code::Refusal;
use crate::view;

/// What a person says of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Word {
    Allow,
    Deny { message: Option<String> },
}

impl Word {
    /// What was typed: a yes, nothing or a no, or the reason why not.
    pub(crate) fn typed(line: &str) -> Self {
        let line = line.trim();
        match line.to_ascii_lowercase().as_str() {
            "y" | "yes" => Self::Allow,
            "" | "n" | "no" => Self::Deny { message: None },
            _ => Self::Deny { message: Some(line.to_owned()) },
        }
    }
}

/// The calls that the session's last `session.status_idle` names, whatever they wait for; none when it runs, or waits
/// for nobody.
pub(crate) async fn waiting(client: &Client, session: &str) -> anyhow::Result<Vec<String>> {
    let path = format!(
        "{}/events?order=desc&types=session.status_idle&types=session.status_running",
        id_path("sessions", session)?
    );
    let last = client.list(&path, Some(1)).await?;
    Ok(last.first().map_or_else(Vec::new, asked))
}

/// The calls that a `session.status_idle` names.
pub(crate) fn asked(idle: &Value) -> Vec<String> {
    if view::stop_reason(idle) != "requires_action" {
        return Vec::new();
    }
    let ids = idle.pointer("/stop_reason/event_ids").and_then(Value::as_array).into_iter().flatten();
    ids.filter_map(|id| id.as_str().map(String::from)).collect()
}

/// Says it of these calls, or of all that wait if none is named; gives what the server took.
pub(crate) async fn say(
    client: &Client,
    session: &str,
    calls: &[String],
    word: &Word,
) -> anyhow::Result<Value> {
    let calls = if calls.is_empty() { confirmable(client, session).await? } else { calls.to_vec() };
    if calls.is_empty() {
        let text = format!(
            "no call of session {session} waits for a word; `covey session events {session}` shows what happened"
        );
        return Err(Refusal::new(Fault::Conflict, text).into());
    }
    let events: Vec<Value> = calls.iter().map(|call| event(call, word)).collect();
    Ok(client.send(session, Value::Array(events)).await?)
}

/// Waiting calls that a word answers; the others wait for the result of a program's own tool.
async fn confirmable(client: &Client, session: &str) -> anyhow::Result<Vec<String>> {
    let mut waiting = waiting(client, session).await?;
    if !waiting.is_empty() {
        let path = format!("{}/events?types=agent.custom_tool_use", id_path("sessions", session)?);
        let custom = client.list(&path, None).await?;
        waiting.retain(|call| !custom.iter().any(|event| event["id"] == call.as_str()));
    }
    Ok(waiting)
}

fn event(call: &str, word: &Word) -> Value {
    match word {
        Word::Allow => json!({"type": "user.tool_confirmation", "tool_use_id": call, "result": "allow"}),
        Word::Deny { message } => {
            let mut event = json!({"type": "user.tool_confirmation", "tool_use_id": call, "result": "deny"});
            if let Some(message) = message {
                event["deny_message"] = message.as_str().into();
            }
            event
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_yes_is_a_no_and_its_reason() {
        let denied = |message: Option<&str>| Word::Deny { message: message.map(String::from) };
        assert_eq!(Word::typed(" Yes\n"), Word::Allow);
        assert_eq!(Word::typed("\n"), denied(None));
        assert_eq!(Word::typed("N"), denied(None));
        assert_eq!(Word::typed("use the test database\n"), denied(Some("use the test database")));
    }

    #[test]
    fn only_an_idle_that_requires_action_asks() {
        let idle = |reason: Value| json!({"type": "session.status_idle", "stop_reason": reason});
        let both = idle(json!({"type": "requires_action", "event_ids": ["sevt_1", "sevt_2"]}));
        assert_eq!(asked(&both), ["sevt_1", "sevt_2"]);
        assert!(asked(&idle(json!({"type": "end_turn"}))).is_empty());
    }
}
