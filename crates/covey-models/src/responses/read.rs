//! The events of a Responses stream become an answer in the journal's shape.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::WIRE;
use crate::reading::{ANSWER_BLOCKS_MAX, AssembleError, Ids, Reading, input_of, object, usage_of, wire_item};
use crate::{ModelAnswer, ModelDelta, failure};

/// The state between two events.
#[derive(Debug)]
pub struct Reader {
    ids: Ids,
    /// Finished items by their place in the output.
    items: BTreeMap<u64, Value>,
    /// The response object of the last event.
    response: Option<Map<String, Value>>,
}

impl Reader {
    pub(crate) const fn new(ids: Ids) -> Self {
        Self { ids, items: BTreeMap::new(), response: None }
    }

    fn event(
        &mut self,
        mut event: Map<String, Value>,
        show: &mut dyn FnMut(ModelDelta),
    ) -> Result<(), AssembleError> {
        let kind = event.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
        let delta = || event.get("delta").and_then(Value::as_str).unwrap_or_default().to_owned();
        match kind.as_str() {
            "response.output_text.delta" | "response.refusal.delta" => show(ModelDelta::Text(delta())),
            "response.reasoning_summary_text.delta" | "response.reasoning_text.delta" => {
                show(ModelDelta::Thinking(delta()));
            }
            "response.output_item.done" => {
                let place =
                    event.get("output_index").and_then(Value::as_u64).unwrap_or(self.items.len() as u64);
                let Some(item @ Value::Object(_)) = event.remove("item") else {
                    return Err(AssembleError::Malformed(
                        "`response.output_item.done` without `item`".into(),
                    ));
                };
                if self.items.len() == ANSWER_BLOCKS_MAX {
                    return Err(AssembleError::Malformed(format!("more than {ANSWER_BLOCKS_MAX} items")));
                }
                self.items.insert(place, item);
            }
            "response.completed" | "response.incomplete" | "response.failed" => {
                let Some(Value::Object(response)) = event.remove("response") else {
                    return Err(AssembleError::Malformed(format!("`{kind}` without `response`")));
                };
                self.end(response)?;
            }
            "error" => {
                let error = event.remove("error").filter(Value::is_object);
                return Err(provider_error(&error.unwrap_or(Value::Object(event))));
            }
            // What is only shown elsewhere, and what the provider adds one day.
            _ => {}
        }
        Ok(())
    }

    fn end(&mut self, mut response: Map<String, Value>) -> Result<(), AssembleError> {
        match response.get("status").and_then(Value::as_str) {
            Some("failed" | "cancelled") => {
                return Err(provider_error(response.get("error").unwrap_or(&Value::Null)));
            }
            Some("in_progress" | "queued") => return Err(AssembleError::Unfinished("`response.completed`")),
            _ => {}
        }
        if let Some(Value::Array(output)) = response.remove("output") {
            for (place, item) in (0..).zip(output.into_iter().take(ANSWER_BLOCKS_MAX)) {
                self.items.entry(place).or_insert(item);
            }
        }
        self.response = Some(response);
        Ok(())
    }

    fn answer(self, request_id: Option<String>) -> Result<ModelAnswer, AssembleError> {
        let Some(response) = self.response else {
            return Err(AssembleError::Unfinished("`response.completed`"));
        };
        let mut content = Vec::new();
        let (mut has_calls, mut is_refused) = (false, false);
        for (place, item) in self.items.into_values().enumerate() {
            match item["type"].as_str().unwrap_or_default() {
                "message" => {
                    if let Some(phase) = item["phase"].as_str() {
                        // Said of the texts that follow; the provider wants it back with them.
                        content.push(wire_item(WIRE, json!({"type": "message", "phase": phase})));
                    }
                    for part in item["content"].as_array().into_iter().flatten() {
                        is_refused |= part["type"] == "refusal";
                        let text = part["text"].as_str().or_else(|| part["refusal"].as_str());
                        let text = text.filter(|text| !text.is_empty());
                        content.extend(text.map(|text| json!({"type": "text", "text": text})));
                    }
                }
                "function_call" => {
                    has_calls = true;
                    let given = item["call_id"].as_str().or_else(|| item["id"].as_str());
                    let id =
                        given.filter(|id| !id.is_empty()).map_or_else(|| self.ids.call(place), str::to_owned);
                    let input = input_of(item["arguments"].as_str().unwrap_or_default());
                    content.push(json!({"type": "tool_use", "id": id, "name": item["name"], "input": input}));
                }
                _ => content.push(wire_item(WIRE, item)),
            }
        }
        let incomplete = response.get("incomplete_details").map(|details| &details["reason"]);
        let stop_reason = match incomplete.and_then(Value::as_str) {
            Some("content_filter") => "refusal",
            Some(_) => "max_tokens",
            None if response.get("status").is_some_and(|status| status == "incomplete") => "max_tokens",
            None if is_refused => "refusal",
            None if has_calls => "tool_use",
            None => "end_turn",
        };
        let model = response.get("model").and_then(Value::as_str).unwrap_or_default().to_owned();
        let usage = mapped(response.get("usage").unwrap_or(&Value::Null));
        Ok(ModelAnswer { content, stop_reason: stop_reason.to_owned(), usage, model, request_id })
    }
}

impl Reading for Reader {
    fn take(&mut self, data: &str, show: &mut dyn FnMut(ModelDelta)) -> Result<(), AssembleError> {
        // Some servers end as the Chat wire does.
        if self.response.is_some() || data.trim() == "[DONE]" {
            return Ok(());
        }
        self.event(object(data)?, show)
    }

    fn is_complete(&self) -> bool {
        self.response.is_some()
    }

    fn finish(self: Box<Self>, request_id: Option<String>) -> Result<ModelAnswer, AssembleError> {
        self.answer(request_id)
    }

    fn whole(
        mut self: Box<Self>,
        answer: Map<String, Value>,
        request_id: Option<String>,
    ) -> Result<ModelAnswer, AssembleError> {
        self.end(answer)?;
        self.answer(request_id)
    }
}

/// Usage under the journal's names; what the provider said stands beside it.
fn mapped(usage: &Value) -> Value {
    let input = usage["input_tokens"].as_u64().unwrap_or(0);
    let detail = |field: &str| usage["input_tokens_details"][field].as_u64().unwrap_or(0);
    let cached = detail("cached_tokens").min(input);
    let written = detail("cache_write_tokens").min(input - cached);
    let output = usage["output_tokens"].as_u64().unwrap_or(0);
    usage_of((input, cached, written), output, usage)
}

fn provider_error(error: &Value) -> AssembleError {
    let text = |field: &str| error[field].as_str().filter(|text| !text.is_empty() && *text != "error");
    let kind = text("code").or_else(|| text("type")).unwrap_or("error").to_owned();
    let message = text("message").unwrap_or("unknown").to_owned();
    AssembleError::Provider { status: failure::status_of(&kind), kind, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(events: &[Value]) -> Result<ModelAnswer, AssembleError> {
        let mut reader = Box::new(Reader::new(Ids::of(&Map::new())));
        for event in events {
            reader.take(&event.to_string(), &mut |_| {})?;
        }
        reader.finish(None)
    }

    fn done(place: u64, item: Value) -> Value {
        json!({"type": "response.output_item.done", "output_index": place, "item": item})
    }

    fn end(kind: &str, response: Value) -> Value {
        json!({"type": kind, "response": response})
    }

    #[test]
    fn items_become_blocks_and_reasoning_stays_what_it_was() {
        let reasoning = json!({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"});
        let call = json!({"type": "function_call", "id": "fc_1", "call_id": "c", "name": "bash",
            "arguments": "{\"command\":\"ls\"}"});
        let message = json!({"type": "message", "id": "msg_1", "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}]});
        let usage =
            json!({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 5}, "output_tokens": 2});
        let answer = read(&[
            json!({"type": "response.created", "response": {"status": "in_progress"}}),
            done(2, call),
            done(0, reasoning.clone()),
            done(1, message),
            end(
                "response.completed",
                json!({"model": "m", "status": "completed", "output": [], "usage": usage}),
            ),
        ])
        .unwrap();
        assert_eq!(
            Value::Array(answer.content),
            json!([wire_item(WIRE, reasoning), {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c", "name": "bash", "input": {"command": "ls"}}])
        );
        assert_eq!((answer.stop_reason.as_str(), answer.model.as_str()), ("tool_use", "m"));
        assert_eq!(
            (&answer.usage["input_tokens"], &answer.usage["cache_read_input_tokens"]),
            (&json!(4), &json!(5))
        );
    }

    #[test]
    fn ends_are_mapped_and_no_end_is_no_answer() {
        let message = |part: Value| json!({"type": "message", "content": [part]});
        let text = || message(json!({"type": "output_text", "text": "a"}));
        let stop = |kind: &str, response: Value| read(&[end(kind, response)]).unwrap().stop_reason;
        assert_eq!(
            stop("response.completed", json!({"status": "completed", "output": [text()]})),
            "end_turn"
        );
        let refused =
            json!({"status": "completed", "output": [message(json!({"type": "refusal", "refusal": "no"}))]});
        assert_eq!(stop("response.completed", refused), "refusal");
        let cut = |reason: &str| json!({"status": "incomplete", "incomplete_details": {"reason": reason}});
        assert_eq!(stop("response.incomplete", cut("max_output_tokens")), "max_tokens");
        assert_eq!(stop("response.incomplete", cut("content_filter")), "refusal");
        assert!(matches!(read(&[done(0, text())]), Err(AssembleError::Unfinished(_))));
    }

    #[test]
    fn the_phase_of_a_message_goes_back_with_it() {
        let item = json!({"type": "message", "role": "assistant", "phase": "commentary",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}]});
        let answer =
            read(&[end("response.completed", json!({"status": "completed", "output": [item]}))]).unwrap();
        let body = json!({"model": "m", "messages": [{"role": "assistant", "content": answer.content}]});
        let body = body.as_object().unwrap();
        let sent =
            super::super::request(crate::wire::Question { body, schema: None, output_limit_field: None });
        assert_eq!(
            sent["input"],
            json!([{"type": "message", "role": "assistant", "phase": "commentary",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}]}])
        );
    }

    #[test]
    fn failures_have_the_status_that_belongs_to_them() {
        let status = |event: Value| match read(&[event]) {
            Err(AssembleError::Provider { status, message, .. }) => (status, message),
            other => panic!("{other:?}"),
        };
        let failed = json!({"status": "failed", "error": {"code": "rate_limit_exceeded", "message": "slow"}});
        assert_eq!(status(end("response.failed", failed)), (429, "slow".into()));
        let event = json!({"type": "error", "code": "server_error", "message": "boom", "param": null});
        assert_eq!(status(event), (500, "boom".into()));
    }
}
