//! Stream events of the Messages API become a finished answer, or a reason why there is none.
//!
//! Pure. Blocks come out as the provider meant them: unknown block types, fields and deltas survive, because they
//! are sent back on the next request. An answer exists only after `message_stop` with every block closed and a
//! stop reason; everything else is unfinished, whatever has arrived.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::reading::{ANSWER_BLOCKS_MAX, AssembleError, Reading, input_of, object};
use crate::{ModelAnswer, ModelDelta};

#[derive(Debug)]
struct Block {
    value: Map<String, Value>,
    /// The pieces of `input`, parsed only at the block's end: a prefix of JSON may parse as something else.
    partial_json: String,
    open: bool,
}

/// Status that the provider answers with when it is overloaded; not registered, so not in any table.
const OVERLOADED: u16 = 529;

/// The state between two events.
#[derive(Debug, Default)]
pub struct Assembler {
    message: Option<Map<String, Value>>,
    blocks: BTreeMap<u64, Block>,
    usage: Map<String, Value>,
    stopped: bool,
}

impl Assembler {
    /// Takes one event's data. Returns what may be shown at once.
    ///
    /// # Errors
    /// When the provider reports an error or the event contradicts the protocol; the answer is then lost.
    pub fn push(&mut self, data: &str) -> Result<Option<ModelDelta>, AssembleError> {
        let malformed = |detail: String| AssembleError::Malformed(detail);
        let mut event = object(data)?;
        let kind = event.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
        if kind == "error" {
            return Err(provider_error(&event));
        }
        if self.stopped {
            // Whatever follows `message_stop` cannot change an answer that is finished.
            return Ok(None);
        }
        match kind.as_str() {
            "message_start" => {
                let Some(Value::Object(mut message)) = event.remove("message") else {
                    return Err(malformed("`message_start` without `message`".into()));
                };
                if self.message.is_some() {
                    return Err(malformed("a second `message_start`".into()));
                }
                if let Some(Value::Object(usage)) = message.remove("usage") {
                    self.usage = usage;
                }
                self.message = Some(message);
                Ok(None)
            }
            "content_block_start" => self.start_block(event).map(|()| None),
            "content_block_delta" => self.extend_block(event),
            "content_block_stop" => self.block(&event)?.1.close().map(|()| None),
            "message_delta" => {
                let message =
                    self.message.as_mut().ok_or_else(|| malformed("`message_delta` too early".into()))?;
                if let Some(Value::Object(delta)) = event.remove("delta") {
                    message.extend(delta);
                }
                if let Some(Value::Object(usage)) = event.remove("usage") {
                    // Cumulative; a null says "not counted here", not "zero".
                    self.usage.extend(usage.into_iter().filter(|(_, value)| !value.is_null()));
                }
                Ok(None)
            }
            "message_stop" => {
                self.stopped = true;
                Ok(None)
            }
            // `ping`, and what the provider adds one day.
            _ => Ok(None),
        }
    }

    /// Whether `message_stop` has arrived: nothing more is needed from the stream.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// The answer.
    ///
    /// # Errors
    /// When the stream has not said that it is finished.
    pub fn finish(self, request_id: Option<String>) -> Result<ModelAnswer, AssembleError> {
        let mut message = self.message.ok_or(AssembleError::Unfinished("`message_start`"))?;
        if !self.stopped {
            return Err(AssembleError::Unfinished("`message_stop`"));
        }
        if self.blocks.values().any(|block| block.open) {
            return Err(AssembleError::Unfinished("`content_block_stop`"));
        }
        let mut content = match message.remove("content") {
            Some(Value::Array(blocks)) => blocks,
            _ => Vec::new(),
        };
        content.extend(self.blocks.into_values().map(|block| Value::Object(block.value)));
        message.insert("content".to_owned(), Value::Array(content));
        message.insert("usage".to_owned(), Value::Object(self.usage));
        from_message(message, request_id)
    }

    fn start_block(&mut self, mut event: Map<String, Value>) -> Result<(), AssembleError> {
        let index = index(&event)?;
        let Some(Value::Object(value)) = event.remove("content_block") else {
            return Err(AssembleError::Malformed("`content_block_start` without `content_block`".into()));
        };
        if self.blocks.len() == ANSWER_BLOCKS_MAX {
            return Err(AssembleError::Malformed(format!("more than {ANSWER_BLOCKS_MAX} blocks")));
        }
        let block = Block { value, partial_json: String::new(), open: true };
        if self.blocks.insert(index, block).is_some() {
            return Err(AssembleError::Malformed(format!("block {index} starts twice")));
        }
        Ok(())
    }

    fn block(&mut self, event: &Map<String, Value>) -> Result<(u64, &mut Block), AssembleError> {
        let index = index(event)?;
        match self.blocks.get_mut(&index) {
            Some(block) if block.open => Ok((index, block)),
            _ => Err(AssembleError::Malformed(format!("block {index} is not open"))),
        }
    }

    fn extend_block(&mut self, mut event: Map<String, Value>) -> Result<Option<ModelDelta>, AssembleError> {
        let Some(Value::Object(mut delta)) = event.remove("delta") else {
            return Err(AssembleError::Malformed("`content_block_delta` without `delta`".into()));
        };
        let (_, block) = self.block(&event)?;
        let kind = delta.remove("type");
        let text = |field: &str| delta.get(field).and_then(Value::as_str).map(str::to_owned);
        let shown = match kind.as_ref().and_then(Value::as_str).unwrap_or_default() {
            "input_json_delta" => {
                block.partial_json.push_str(&text("partial_json").unwrap_or_default());
                return Ok(None);
            }
            "signature_delta" => {
                block.value.extend(delta);
                return Ok(None);
            }
            "citations_delta" => {
                if let Some(citation) = delta.remove("citation") {
                    append(&mut block.value, "citations", Value::Array(vec![citation]));
                }
                return Ok(None);
            }
            "text_delta" => text("text").map(ModelDelta::Text),
            "thinking_delta" => text("thinking").map(ModelDelta::Thinking),
            _ => None,
        };
        // The rule for every delta that is not special, unknown ones included: the same-named field grows.
        for (field, piece) in delta {
            append(&mut block.value, &field, piece);
        }
        Ok(shown)
    }
}

impl Reading for Assembler {
    fn take(&mut self, data: &str, show: &mut dyn FnMut(ModelDelta)) -> Result<(), AssembleError> {
        if let Some(delta) = self.push(data)? {
            show(delta);
        }
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.is_stopped()
    }

    fn finish(self: Box<Self>, request_id: Option<String>) -> Result<ModelAnswer, AssembleError> {
        Self::finish(*self, request_id)
    }

    fn whole(
        self: Box<Self>,
        answer: Map<String, Value>,
        request_id: Option<String>,
    ) -> Result<ModelAnswer, AssembleError> {
        from_message(answer, request_id)
    }
}

impl Block {
    fn close(&mut self) -> Result<(), AssembleError> {
        self.open = false;
        if self.partial_json.is_empty() {
            return Ok(());
        }
        let text = std::mem::take(&mut self.partial_json);
        self.value.insert("input".to_owned(), input_of(&text));
        Ok(())
    }
}

/// Text grows by text, a list by a list; anything else is replaced.
fn append(block: &mut Map<String, Value>, field: &str, piece: Value) {
    match (block.get_mut(field), piece) {
        (Some(Value::String(text)), Value::String(more)) => text.push_str(&more),
        (Some(Value::Array(list)), Value::Array(more)) => list.extend(more),
        (_, piece) => {
            block.insert(field.to_owned(), piece);
        }
    }
}

fn index(event: &Map<String, Value>) -> Result<u64, AssembleError> {
    let index = event.get("index").and_then(Value::as_u64);
    index.ok_or_else(|| AssembleError::Malformed("a block event without `index`".into()))
}

fn provider_error(event: &Map<String, Value>) -> AssembleError {
    let field = |name: &str| {
        let text = event.get("error").and_then(|error| error.get(name)).and_then(Value::as_str);
        text.unwrap_or("unknown").to_owned()
    };
    let kind = field("type");
    AssembleError::Provider { status: status_of(&kind), kind, message: field("message") }
}

/// The HTTP status that the provider sends with an error type; in the middle of a stream only the type comes.
fn status_of(kind: &str) -> u16 {
    match kind {
        "invalid_request_error" => 400,
        "authentication_error" => 401,
        "billing_error" => 402,
        "permission_error" => 403,
        "not_found_error" => 404,
        "request_too_large" => 413,
        "rate_limit_error" => 429,
        "timeout_error" => 504,
        "overloaded_error" => OVERLOADED,
        _ => 500,
    }
}

/// Reads a whole message object: the end of a stream, or the answer of an endpoint that does not stream.
///
/// # Errors
/// When it is not a finished message.
pub fn from_message(
    mut message: Map<String, Value>,
    request_id: Option<String>,
) -> Result<ModelAnswer, AssembleError> {
    let Some(Value::String(stop_reason)) = message.remove("stop_reason") else {
        return Err(AssembleError::Unfinished("a stop reason"));
    };
    let Some(Value::Array(content)) = message.remove("content") else {
        return Err(AssembleError::Malformed("a message without `content`".into()));
    };
    let model = message.get("model").and_then(Value::as_str).unwrap_or_default().to_owned();
    let usage = message.remove("usage").unwrap_or_else(|| json!({}));
    Ok(ModelAnswer { content, stop_reason, usage, model, request_id })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MALFORMED_INPUT_KEY;

    fn assemble(events: &[Value]) -> Result<ModelAnswer, AssembleError> {
        let mut assembler = Assembler::default();
        for event in events {
            assembler.push(&event.to_string())?;
        }
        assembler.finish(None)
    }

    fn answer(blocks: &[(Value, &[Value])]) -> Vec<Value> {
        let mut events = vec![json!({"type": "message_start", "message": {
            "id": "msg_1", "model": "m", "content": [], "usage": {"input_tokens": 3, "output_tokens": 1}}})];
        for (index, (start, deltas)) in blocks.iter().enumerate() {
            events.push(json!({"type": "content_block_start", "index": index, "content_block": start}));
            events.extend(
                deltas.iter().map(|d| json!({"type": "content_block_delta", "index": index, "delta": d})),
            );
            events.push(json!({"type": "ping"}));
            events.push(json!({"type": "content_block_stop", "index": index}));
        }
        events.push(json!({"type": "message_delta", "delta": {"stop_reason": "tool_use"},
            "usage": {"output_tokens": 9, "input_tokens": null}}));
        events.push(json!({"type": "message_stop"}));
        events
    }

    #[test]
    fn known_and_unknown_blocks_fields_and_deltas_survive() {
        let got = assemble(&answer(&[
            (
                json!({"type": "thinking", "thinking": "", "signature": ""}),
                &[
                    json!({"type": "thinking_delta", "thinking": "a"}),
                    json!({"type": "thinking_delta", "thinking": "b"}),
                    json!({"type": "signature_delta", "signature": "sig"}),
                ],
            ),
            (json!({"type": "redacted_thinking", "data": "xyz"}), &[]),
            (
                json!({"type": "text", "text": "", "new_field": {"kept": 1}}),
                &[
                    json!({"type": "text_delta", "text": "hi"}),
                    json!({"type": "citations_delta", "citation": {"n": 1}}),
                    json!({"type": "citations_delta", "citation": {"n": 2}}),
                ],
            ),
            (
                json!({"type": "tool_use", "id": "t", "name": "bash", "input": {}}),
                &[
                    json!({"type": "input_json_delta", "partial_json": ""}),
                    json!({"type": "input_json_delta", "partial_json": "{\"command\":\"l"}),
                    json!({"type": "input_json_delta", "partial_json": "s\"}"}),
                ],
            ),
            (
                json!({"type": "hologram", "voxels": [1]}),
                &[json!({"type": "voxel_delta", "voxels": [2], "caption": "c"})],
            ),
        ]))
        .unwrap();
        assert_eq!(
            Value::Array(got.content),
            json!([
                {"type": "thinking", "thinking": "ab", "signature": "sig"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "hi", "new_field": {"kept": 1}, "citations": [{"n": 1}, {"n": 2}]},
                {"type": "tool_use", "id": "t", "name": "bash", "input": {"command": "ls"}},
                {"type": "hologram", "voxels": [1, 2], "caption": "c"},
            ])
        );
        assert_eq!(got.usage, json!({"input_tokens": 3, "output_tokens": 9}));
        assert_eq!((got.stop_reason.as_str(), got.model.as_str()), ("tool_use", "m"));
    }

    #[test]
    fn an_input_that_is_no_json_object_is_kept_under_a_key_that_tools_refuse() {
        for text in ["{\"command\":", "[1]", "\"x\"", "{\"a\":\"\\ud800\"}"] {
            let start = json!({"type": "tool_use", "id": "t", "name": "bash", "input": {}});
            let delta = [json!({"type": "input_json_delta", "partial_json": text})];
            let got = assemble(&answer(&[(start, &delta)])).unwrap();
            assert_eq!(got.content[0]["input"], json!({ MALFORMED_INPUT_KEY: text }));
        }
    }

    #[test]
    fn no_prefix_of_a_stream_is_an_answer() {
        let block = json!({"type": "text", "text": "hi"});
        let events = answer(&[(block, &[])]);
        for length in 0..events.len() {
            let error = assemble(&events[..length]).unwrap_err();
            assert!(matches!(error, AssembleError::Unfinished(_)), "{length}: {error}");
        }
        assert!(assemble(&events).is_ok());
    }

    #[test]
    fn contradictions_and_errors_are_named() {
        let broken = [
            json!([1]),
            json!({"type": "message_start"}),
            json!({"type": "content_block_delta", "index": 0, "delta": {}}),
            json!({"type": "content_block_stop"}),
            json!({"type": "message_delta", "delta": {}}),
        ];
        for event in broken {
            let error = assemble(std::slice::from_ref(&event)).unwrap_err();
            assert!(matches!(error, AssembleError::Malformed(_)), "{event}: {error}");
        }
        let event = json!({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}});
        assert_eq!(assemble(&[event]).unwrap_err().to_string(), "overloaded_error: Overloaded");
    }
}
