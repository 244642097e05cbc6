//! The chunks of a Chat stream become an answer in the journal's shape.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::WIRE;
use crate::reading::{
    ANSWER_BLOCKS_MAX, AssembleError, Ids, Reading, guessed_tokens, input_of, object, usage_of, wire_item,
};
use crate::{ModelAnswer, ModelDelta, failure};

/// What ends a stream.
const DONE: &str = "[DONE]";
/// Fields in which servers put the model's reasoning.
const REASONING_FIELDS: [&str; 2] = ["reasoning_content", "reasoning"];

#[derive(Debug, Default)]
struct Call {
    id: String,
    name: String,
    arguments: String,
}

/// The state between two chunks.
#[derive(Debug)]
pub struct Reader {
    ids: Ids,
    /// Bytes of the request, for peers that count no tokens.
    request_bytes: usize,
    model: String,
    text: String,
    refusal: String,
    reasoning: Option<(&'static str, String)>,
    calls: BTreeMap<u64, Call>,
    finish_reason: Option<String>,
    usage: Option<Value>,
    done: bool,
}

impl Reader {
    pub(crate) fn new(ids: Ids, sent: &Map<String, Value>) -> Self {
        Self {
            ids,
            request_bytes: sent.get("messages").map_or(0, |messages| messages.to_string().len()),
            model: String::new(),
            text: String::new(),
            refusal: String::new(),
            reasoning: None,
            calls: BTreeMap::new(),
            finish_reason: None,
            usage: None,
            done: false,
        }
    }

    /// Takes a chunk, or a whole answer: they differ in the name of one field.
    fn chunk(
        &mut self,
        mut chunk: Map<String, Value>,
        show: &mut dyn FnMut(ModelDelta),
    ) -> Result<(), AssembleError> {
        if let Some(error) = chunk.get("error").filter(|error| !error.is_null()) {
            return Err(provider_error(error));
        }
        if let Some(model) = chunk.get("model").and_then(Value::as_str).filter(|model| !model.is_empty()) {
            self.model = model.to_owned();
        }
        if let Some(usage) = chunk.remove("usage").filter(Value::is_object) {
            self.usage = Some(usage);
        }
        let Some(Value::Array(choices)) = chunk.remove("choices") else { return Ok(()) };
        // Only one answer was asked for.
        let Some(Value::Object(mut choice)) =
            choices.into_iter().find(|c| c["index"].as_u64().unwrap_or(0) == 0)
        else {
            return Ok(());
        };
        if let Some(Value::String(reason)) = choice.remove("finish_reason") {
            self.finish_reason = Some(reason);
        }
        match choice.remove("delta").filter(Value::is_object).or_else(|| choice.remove("message")) {
            Some(Value::Object(delta)) => self.delta(delta, show),
            _ => Ok(()),
        }
    }

    fn delta(
        &mut self,
        mut delta: Map<String, Value>,
        show: &mut dyn FnMut(ModelDelta),
    ) -> Result<(), AssembleError> {
        for field in REASONING_FIELDS {
            let Some(Value::String(piece)) = delta.remove(field) else { continue };
            let (known, text) = self.reasoning.get_or_insert_with(|| (field, String::new()));
            // Some servers fill both fields with the same.
            if *known == field && !piece.is_empty() {
                text.push_str(&piece);
                show(ModelDelta::Thinking(piece));
            }
        }
        if let Some(piece) = delta.remove("content").as_ref().and_then(content_text)
            && !piece.is_empty()
        {
            self.text.push_str(&piece);
            show(ModelDelta::Text(piece));
        }
        if let Some(Value::String(piece)) = delta.remove("refusal") {
            self.refusal.push_str(&piece);
        }
        if let Some(Value::Array(calls)) = delta.remove("tool_calls") {
            for call in calls {
                self.call(&call)?;
            }
        }
        match delta.remove("function_call") {
            Some(call @ Value::Object(_)) => self.call(&json!({"index": 0, "function": call})),
            _ => Ok(()),
        }
    }

    fn call(&mut self, piece: &Value) -> Result<(), AssembleError> {
        let id = piece["id"].as_str().unwrap_or_default();
        let index = piece["index"].as_u64().unwrap_or_else(|| self.index_without(id));
        if self.calls.len() == ANSWER_BLOCKS_MAX && !self.calls.contains_key(&index) {
            return Err(AssembleError::Malformed(format!("more than {ANSWER_BLOCKS_MAX} calls")));
        }
        let call = self.calls.entry(index).or_default();
        if call.id.is_empty() {
            id.clone_into(&mut call.id);
        }
        let function = &piece["function"];
        let name = function["name"].as_str().unwrap_or_default();
        // Some servers repeat the name in every piece.
        if call.name != name {
            call.name.push_str(name);
        }
        match &function["arguments"] {
            Value::String(text) => call.arguments.push_str(text),
            Value::Null => {}
            whole => call.arguments = whole.to_string(),
        }
        Ok(())
    }

    /// Where a piece without an index belongs: a new id begins a new call.
    fn index_without(&self, id: &str) -> u64 {
        let Some((last, call)) = self.calls.last_key_value() else { return 0 };
        if id.is_empty() || call.id == id { *last } else { last.saturating_add(1) }
    }

    fn answer(self, request_id: Option<String>) -> Result<ModelAnswer, AssembleError> {
        let Some(reason) = self.finish_reason else {
            return Err(AssembleError::Unfinished("a finish reason"));
        };
        let answer_bytes =
            self.text.len() + self.calls.values().map(|call| call.arguments.len()).sum::<usize>();
        let mut content = Vec::new();
        if let Some((field, text)) = self.reasoning.filter(|(_, text)| !text.is_empty()) {
            content.push(wire_item(WIRE, json!({ field: text })));
        }
        let is_refused = !self.refusal.is_empty();
        for text in [self.text, self.refusal].into_iter().filter(|text| !text.is_empty()) {
            content.push(json!({"type": "text", "text": text}));
        }
        let has_calls = !self.calls.is_empty();
        for (place, call) in self.calls.into_values().enumerate() {
            let id = if call.id.is_empty() { self.ids.call(place) } else { call.id };
            let input = input_of(&call.arguments);
            content.push(json!({"type": "tool_use", "id": id, "name": call.name, "input": input}));
        }
        let stop_reason = match reason.as_str() {
            _ if is_refused => "refusal",
            "content_filter" => "refusal",
            "length" => "max_tokens",
            // Whatever the server calls it: there are calls, so their results are waited for.
            _ if has_calls => "tool_use",
            _ => "end_turn",
        };
        let usage = match self.usage {
            Some(usage) => mapped(&usage),
            None => json!({
                "input_tokens": guessed_tokens(self.request_bytes),
                "output_tokens": guessed_tokens(answer_bytes),
                "guessed": true,
            }),
        };
        Ok(ModelAnswer { content, stop_reason: stop_reason.to_owned(), usage, model: self.model, request_id })
    }
}

impl Reading for Reader {
    fn take(&mut self, data: &str, show: &mut dyn FnMut(ModelDelta)) -> Result<(), AssembleError> {
        if self.done {
            return Ok(());
        }
        if data.trim() == DONE {
            self.done = true;
            return Ok(());
        }
        self.chunk(object(data)?, show)
    }

    fn is_complete(&self) -> bool {
        self.done
    }

    fn finish(self: Box<Self>, request_id: Option<String>) -> Result<ModelAnswer, AssembleError> {
        self.answer(request_id)
    }

    fn whole(
        mut self: Box<Self>,
        answer: Map<String, Value>,
        request_id: Option<String>,
    ) -> Result<ModelAnswer, AssembleError> {
        self.chunk(answer, &mut |_| {})?;
        self.answer(request_id)
    }
}

fn content_text(content: &Value) -> Option<String> {
    match content {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => Some(parts.iter().filter_map(|part| part["text"].as_str()).collect()),
        _ => None,
    }
}

/// Usage under the journal's names; what the provider said stands beside it.
fn mapped(usage: &Value) -> Value {
    let prompt = usage["prompt_tokens"].as_u64().unwrap_or(0);
    let cached = usage["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .or_else(|| usage["prompt_cache_hit_tokens"].as_u64())
        .unwrap_or(0)
        .min(prompt);
    let written =
        usage["prompt_tokens_details"]["cache_write_tokens"].as_u64().unwrap_or(0).min(prompt - cached);
    let output = usage["completion_tokens"].as_u64().unwrap_or(0);
    usage_of((prompt, cached, written), output, usage)
}

fn provider_error(error: &Value) -> AssembleError {
    let text = |field: &str| error[field].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let kind = text("code").or_else(|| text("type")).unwrap_or_else(|| "error".into());
    let message = error.as_str().map(str::to_owned).or_else(|| text("message"));
    let number = error["code"].as_u64().or_else(|| error["status"].as_u64());
    let status = number.and_then(|n| u16::try_from(n).ok()).filter(|n| (400..600).contains(n));
    let status = status.unwrap_or_else(|| failure::status_of(&kind));
    AssembleError::Provider { status, kind, message: message.unwrap_or_else(|| "unknown".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(chunks: &[Value]) -> Result<ModelAnswer, AssembleError> {
        let mut reader = Box::new(Reader::new(Ids::of(&Map::new()), &Map::new()));
        for chunk in chunks {
            reader.take(&chunk.to_string(), &mut |_| {})?;
        }
        reader.finish(None)
    }

    fn delta(delta: Value) -> Value {
        json!({"model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": null}]})
    }

    fn end(reason: &str) -> Value {
        json!({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    }

    #[test]
    fn parallel_calls_are_put_together_by_their_index() {
        let call = |index: u64, id: Option<&str>, name: Option<&str>, arguments: &str| {
            delta(json!({"tool_calls": [{"index": index, "id": id, "type": "function",
                "function": {"name": name, "arguments": arguments}}]}))
        };
        let answer = read(&[
            delta(json!({"role": "assistant", "content": null})),
            call(0, Some("a"), Some("bash"), ""),
            call(1, Some("b"), Some("read"), "{\"file_"),
            call(0, None, None, "{\"command\":"),
            call(1, None, None, "path\":\"x\"}"),
            call(0, None, None, "\"ls\"}"),
            end("tool_calls"),
            json!({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 4}}}),
        ])
        .unwrap();
        assert_eq!(
            Value::Array(answer.content),
            json!([{"type": "tool_use", "id": "a", "name": "bash", "input": {"command": "ls"}},
                {"type": "tool_use", "id": "b", "name": "read", "input": {"file_path": "x"}}])
        );
        assert_eq!((answer.stop_reason.as_str(), answer.model.as_str()), ("tool_use", "m"));
        assert_eq!(answer.usage["input_tokens"], 6);
        assert_eq!(answer.usage["cache_read_input_tokens"], 4);
        assert_eq!(answer.usage["output_tokens"], 3);
    }

    #[test]
    fn what_local_servers_do_differently_is_understood() {
        // No index, no id, arguments as an object, two calls at once, a wrong finish reason, no usage.
        let calls = json!([{"function": {"name": "bash", "arguments": {"command": "ls"}}},
            {"id": "x", "function": {"name": "bash", "arguments": "{}"}}]);
        let answer = read(&[
            delta(json!({"reasoning_content": "hm"})),
            delta(json!({"tool_calls": calls})),
            end("stop"),
        ]);
        let answer = answer.unwrap();
        assert_eq!(answer.content[0], wire_item(WIRE, json!({"reasoning_content": "hm"})));
        assert_eq!(answer.content[1]["input"], json!({"command": "ls"}));
        assert_eq!((answer.content.len(), answer.content[2]["id"].as_str()), (3, Some("x")));
        assert_eq!(answer.stop_reason, "tool_use");
        assert_eq!(answer.usage["guessed"], true);
        let first = answer.content[1]["id"].as_str().unwrap();
        assert!(first.starts_with("call_") && first.len() <= 40, "{first}");
        let parts = delta(json!({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}));
        assert_eq!(read(&[parts, end("eos")]).unwrap().content, [json!({"type": "text", "text": "ab"})]);
    }

    #[test]
    fn ends_are_mapped_and_no_end_is_no_answer() {
        let text = || delta(json!({"content": "a"}));
        let stop = |reason: &str| read(&[text(), end(reason)]).unwrap().stop_reason;
        assert_eq!((stop("stop"), stop("length")), ("end_turn".into(), "max_tokens".into()));
        assert_eq!(stop("content_filter"), "refusal");
        let refused = read(&[delta(json!({"refusal": "I will not."})), end("stop")]).unwrap();
        assert_eq!(
            (refused.stop_reason.as_str(), &refused.content[0]["text"]),
            ("refusal", &json!("I will not."))
        );
        assert!(matches!(read(&[text()]), Err(AssembleError::Unfinished(_))));
        let mut reader = Box::new(Reader::new(Ids::of(&Map::new()), &Map::new()));
        reader.take(DONE, &mut |_| {}).unwrap();
        assert!(matches!(reader.finish(None), Err(AssembleError::Unfinished(_))));
    }

    #[test]
    fn an_error_in_the_middle_has_the_status_that_belongs_to_it() {
        let status = |error: Value| match read(&[delta(json!({"content": "a"})), json!({"error": error})]) {
            Err(AssembleError::Provider { status, .. }) => status,
            other => panic!("{other:?}"),
        };
        assert_eq!(status(json!({"message": "m", "type": "server_error"})), 500);
        assert_eq!(status(json!({"message": "m", "code": "rate_limit_exceeded"})), 429);
        assert_eq!(status(json!({"message": "m", "type": "BadRequestError", "code": 400})), 400);
        assert_eq!(status(json!("boom")), 500);
    }
}
