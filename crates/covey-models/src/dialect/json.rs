//! The constrained-JSON dialect, for models that cannot call tools natively.
//!
//! The tools stand in the system prompt, each with its fields in one line; the answer is one JSON object, which servers
//! that can enforce a schema (llama-server, vLLM, Ollama) let the model write and nothing else. The history is
//! written in the same form, so that the model sees what it is meant to do, and is the same bytes each time. What an
//! unconstrained model writes around or instead is understood as far as it is clear, and asked for again when not.

mod parse;
mod request;

use serde_json::{Map, Value, json};

use crate::endpoint::Endpoint;
use crate::reading::Ids;
use crate::{ModelAnswer, ModelDelta, ModelFailure};

pub use parse::{cut_answer, parse};
pub use request::{Asked, request};

/// Times that an answer is asked for again because it was not in the form; then the call has failed.
pub const REPAIRS_MAX: u32 = 2;
/// Bytes of a malformed answer that are sent back for its repair.
const REPAIR_BYTES_MAX: usize = 8 * 1024;

/// Asks in this dialect. `body` is in the journal's shape, and so is the answer.
///
/// # Errors
/// Those of the endpoint; and rejected, when the model does not keep to the form.
pub async fn ask(
    endpoint: &Endpoint,
    body: &Map<String, Value>,
    on_delta: &(dyn Fn(ModelDelta) + Send + Sync),
) -> Result<ModelAnswer, ModelFailure> {
    let Asked { body: mut asked, schema } = request(body);
    let ids = Ids::of(body);
    let mut spent = Spent::default();
    let mut last_fault = String::new();
    for _ in 0..=REPAIRS_MAX {
        // What arrives is half a JSON object; only the finished answer can be shown.
        let answer = endpoint.ask(&asked, schema.as_ref(), &|_| {}).await?;
        spent.add(&answer.usage);
        let text = said(&answer);
        let is_whole = !matches!(answer.stop_reason.as_str(), "max_tokens" | "refusal");
        if schema.is_none() {
            on_delta(ModelDelta::Text(text));
            return Ok(ModelAnswer { usage: spent.usage(), ..answer });
        }
        if let Some(words) = cut_answer(&text) {
            on_delta(ModelDelta::Text(words.clone()));
            let content = vec![json!({"type": "text", "text": words})];
            let stop_reason = if is_whole { "max_tokens".to_owned() } else { answer.stop_reason };
            return Ok(ModelAnswer { content, stop_reason, usage: spent.usage(), ..answer });
        }
        if !is_whole {
            on_delta(ModelDelta::Text(text));
            return Ok(ModelAnswer { usage: spent.usage(), ..answer });
        }
        match parse(&text, &ids) {
            Ok(content) => {
                for text in content.iter().filter_map(|block| block["text"].as_str()) {
                    on_delta(ModelDelta::Text(text.to_owned()));
                }
                let calls = content.iter().any(|block| block["type"] == "tool_use");
                let stop_reason = if calls { "tool_use" } else { "end_turn" }.to_owned();
                return Ok(ModelAnswer { content, stop_reason, usage: spent.usage(), ..answer });
            }
            Err(fault) => {
                ask_again(&mut asked, &text, &fault);
                last_fault = fault;
            }
        }
    }
    let times = REPAIRS_MAX + 1;
    let detail = format!(
        "the model answered {times} times without the JSON object that it was asked for ({last_fault}); choose a server \
         that enforces `response_format`, or a larger model"
    );
    Err(ModelFailure::Rejected { status: 200, detail, request_id: None })
}

fn said(answer: &ModelAnswer) -> String {
    let texts: Vec<&str> = answer.content.iter().filter_map(|block| block["text"].as_str()).collect();
    texts.join("\n")
}

fn ask_again(asked: &mut Map<String, Value>, text: &str, fault: &str) {
    let Some(Value::Array(messages)) = asked.get_mut("messages") else { return };
    let shown = match &text[..text.floor_char_boundary(REPAIR_BYTES_MAX)] {
        shown if shown.trim().is_empty() => "(nothing)",
        shown => shown,
    };
    let text = format!("That was not understood: {fault}. {}", request::FORM);
    messages.push(json!({"role": "assistant", "content": [{"type": "text", "text": shown}]}));
    messages.push(json!({"role": "user", "content": [{"type": "text", "text": text}]}));
}

/// What all attempts together used up.
#[derive(Debug, Default)]
struct Spent {
    numbers: Map<String, Value>,
    /// Of the last attempt alone: what the conversation takes in the context.
    context_tokens: u64,
}

impl Spent {
    fn add(&mut self, usage: &Value) {
        self.context_tokens = 0;
        for name in
            ["input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"]
        {
            let more = usage[name].as_u64().unwrap_or(0);
            let so_far = self.numbers.get(name).and_then(Value::as_u64).unwrap_or(0);
            self.numbers.insert(name.to_owned(), json!(so_far.saturating_add(more)));
            self.context_tokens = self.context_tokens.saturating_add(more);
        }
    }

    fn usage(self) -> Value {
        let mut usage = self.numbers;
        usage.insert("context_tokens".to_owned(), json!(self.context_tokens));
        Value::Object(usage)
    }
}
