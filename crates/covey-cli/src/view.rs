//! A session's events as a person reads them.
//!
//! Inputs are shown short and results cut: the whole stands in the log (`covey session events --json`).

use covey_types::ByteCount;
use serde_json::Value;

use crate::output::{one_line, printable};

const INPUT_CHARS_MAX: usize = 160;
const RESULT_LINES_MAX: usize = 12;
const RESULT_LINE_CHARS_MAX: usize = 200;

/// The text for an event, or none where a person need not see it.
pub(crate) fn event(event: &Value) -> Option<String> {
    let kind = event["type"].as_str()?;
    match kind {
        "user.message" => Some(format!("you: {}", printable(&text_of(&event["content"])))),
        "user.interrupt" => Some("you: (interrupt)".to_owned()),
        "user.tool_confirmation" => Some(confirmation(event)),
        "user.custom_tool_result" => Some(tool_result(event)),
        "agent.message" => Some(printable(&text_of(&event["content"]))),
        "agent.thinking" => Some("  (thinking)".to_owned()),
        "agent.tool_use" | "agent.mcp_tool_use" | "agent.custom_tool_use" => Some(tool_use(event)),
        "agent.tool_result" | "agent.mcp_tool_result" => Some(tool_result(event)),
        "session.status_running" => Some("· running".to_owned()),
        "session.status_idle" => Some(format!("· idle ({})", stop_reason(event))),
        "session.status_rescheduled" => Some("· waiting to try again".to_owned()),
        "session.status_terminated" => Some("· terminated".to_owned()),
        "session.error" => Some(format!("! {}", one_line(&error(event)))),
        _ if kind.ends_with("home_rolled_back") => {
            Some("! the home went back: the files of some finished steps are missing".to_owned())
        }
        _ if kind.ends_with("home_incomplete") => Some(format!(
            "! the store has lost parts of the home: {} names are missing; see `covey store verify`",
            event["count"]
        )),
        _ if kind.ends_with("home.secured") || kind.ends_with("home_secured") => {
            Some(format!("· home secured, generation {}", event["generation"]))
        }
        "sandbox.waiting" => Some(format!("· waiting for a sandbox: {}", said(event, "reason"))),
        "sandbox.failed" => Some(format!("! no sandbox: {}", said(event, "detail"))),
        "sandbox.lost" => Some(format!("! the sandbox was lost: {}", said(event, "reason"))),
        "model.failed_over" => Some(format!(
            "! {} does not answer: {} is asked now",
            event["from"].as_str().unwrap_or("the model"),
            said(event, "to")
        )),
        // Spans, usage and whatever a newer server sends.
        _ => None,
    }
}

/// A field for people, or all that the event says where it is called otherwise.
fn said(event: &Value, name: &str) -> String {
    one_line(&event[name].as_str().map_or_else(|| event.to_string(), String::from))
}

fn text_of(content: &Value) -> String {
    if let Some(text) = content.as_str() {
        return text.to_owned();
    }
    let blocks = content.as_array().map(Vec::as_slice).unwrap_or_default();
    let texts: Vec<&str> = blocks.iter().filter_map(|block| block["text"].as_str()).collect();
    texts.join("\n")
}

fn tool_use(event: &Value) -> String {
    let input = &event["input"];
    // The argument that says most; else the whole input.
    let main = ["command", "file_path", "pattern"].iter().find_map(|name| input[*name].as_str());
    let shown = main.map_or_else(|| input.to_string(), String::from);
    let name = event["name"].as_str().unwrap_or("?");
    let asks = if event["evaluated_permission"] == "ask" { " (asks)" } else { "" };
    format!("→ {} {}{asks}", one_line(name), cut(&one_line(&shown), INPUT_CHARS_MAX))
}

fn confirmation(event: &Value) -> String {
    match (event["result"].as_str(), event["deny_message"].as_str()) {
        (Some("allow"), _) => "you: allowed".to_owned(),
        (_, Some(why)) => format!("you: denied: {}", one_line(why)),
        _ => "you: denied".to_owned(),
    }
}

fn tool_result(event: &Value) -> String {
    let text = printable(&text_of(&event["content"]));
    let lines: Vec<&str> = text.lines().collect();
    let mut shown = String::new();
    if event["is_error"] == Value::Bool(true) {
        shown.push_str("  ✗ error\n");
    }
    for line in lines.iter().take(RESULT_LINES_MAX) {
        shown.push_str("  │ ");
        shown.push_str(&cut(line, RESULT_LINE_CHARS_MAX));
        shown.push('\n');
    }
    if lines.len() > RESULT_LINES_MAX {
        let size = ByteCount(text.len() as u64);
        shown.push_str(&format!("  └ {} more lines ({size} in all)\n", lines.len() - RESULT_LINES_MAX));
    }
    shown.truncate(shown.trim_end().len());
    shown
}

fn cut(text: &str, chars_max: usize) -> String {
    match text.char_indices().nth(chars_max) {
        None => text.to_owned(),
        Some((at, _)) => format!("{}…", &text[..at]),
    }
}

/// `end_turn`, `requires_action`, …
pub(crate) fn stop_reason(event: &Value) -> &str {
    event
        .pointer("/stop_reason/type")
        .or_else(|| event.get("stop_reason"))
        .and_then(Value::as_str)
        .unwrap_or("?")
}

fn error(event: &Value) -> String {
    let error = &event["error"];
    error["message"].as_str().map_or_else(|| error.to_string(), String::from)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_session_reads_as_a_conversation() {
        let events = [
            json!({"type":"user.message","content":[{"type":"text","text":"fix it"}]}),
            json!({"type":"session.status_running"}),
            json!({"type":"agent.tool_use","name":"bash","input":{"command":"cargo test\n"}}),
            json!({"type":"agent.tool_result","is_error":true,"content":[{"type":"text","text":"a\nb\n"}]}),
            json!({"type":"agent.message","content":[{"type":"text","text":"done"}]}),
            json!({"type":"span.model_request_end"}),
            json!({"type":"session.status_idle","stop_reason":{"type":"end_turn"}}),
        ];
        let shown: Vec<String> = events.iter().filter_map(event).collect();
        assert_eq!(
            shown.join("\n"),
            "you: fix it\n· running\n→ bash cargo test \n  ✗ error\n  │ a\n  │ b\ndone\n· idle (end_turn)"
        );
    }

    #[test]
    fn what_goes_wrong_with_the_sandbox_is_not_passed_over() {
        let shown = |value: Value| event(&value).unwrap();
        assert!(shown(json!({"type":"sandbox.waiting","reason":"no runner"})).contains("no runner"));
        assert!(shown(json!({"type":"sandbox.failed","detail":"no cgroups"})).contains("no cgroups"));
        assert!(shown(json!({"type":"sandbox.lost","reason":"killed"})).contains("killed"));
    }

    #[test]
    fn long_results_are_cut_and_say_so() {
        let text = (1..=100).map(|n| n.to_string()).collect::<Vec<_>>().join("\n");
        let shown =
            event(&json!({"type":"agent.tool_result","content":[{"type":"text","text":text}]})).unwrap();
        assert_eq!(shown.lines().count(), RESULT_LINES_MAX + 1);
        assert!(shown.ends_with("└ 88 more lines (291 B in all)"), "{shown}");
    }

    #[test]
    fn output_of_a_tool_cannot_steer_the_terminal() {
        let shown = event(&json!({"type":"agent.tool_result","content":"\u{1b}]0;owned\u{7}"})).unwrap();
        assert!(!shown.contains('\u{1b}') && !shown.contains('\u{7}'));
    }
}
