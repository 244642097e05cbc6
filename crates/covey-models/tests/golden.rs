//! Requests and streams of all wires beside what they are translated into, byte for byte.
//!
//! A changed file is a changed request: what providers have cached of running sessions is lost. A new case needs new
//! files (`COVEY_WRITE_GOLDEN=1 cargo test -p covey-models --test golden`).

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use covey_models::dialect::json as json_dialect;
    use covey_models::reading::AssembleError;
    use covey_models::sse::SseParser;
    use covey_models::wire::Question;
    use covey_models::{ModelAnswer, Wire};
    use proptest::prelude::*;
    use serde_json::{Map, Value, json};

    const WIRES: [Wire; 3] = [Wire::Messages, Wire::Chat, Wire::Responses];

    fn place(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
    }

    fn golden(name: &str) -> String {
        fs::read_to_string(place(name)).unwrap()
    }

    /// Compares with the file; the order of keys counts.
    fn assert_golden(name: &str, got: &Value) {
        let got = format!("{}\n", serde_json::to_string_pretty(got).unwrap());
        if std::env::var_os("COVEY_WRITE_GOLDEN").is_some() && !place(name).exists() {
            fs::write(place(name), &got).unwrap();
        }
        assert!(got == golden(name), "{name} differs; now it is:\n{got}");
    }

    fn request() -> Map<String, Value> {
        serde_json::from_str(&golden("request.json")).unwrap()
    }

    fn question(body: &Map<String, Value>) -> Question<'_> {
        Question { body, schema: None, output_limit_field: None }
    }

    fn read<'a>(wire: Wire, pieces: impl Iterator<Item = &'a [u8]>) -> Result<ModelAnswer, AssembleError> {
        let mut reading = wire.reading(&wire.request(question(&request())));
        let mut parser = SseParser::default();
        for piece in pieces {
            for event in parser.push(piece).unwrap() {
                reading.take(&event.data, &mut |_| {})?;
            }
        }
        reading.finish(Some("req_1".into()))
    }

    #[test]
    fn a_request_is_written_as_each_wire_has_it() {
        for wire in WIRES {
            let sent = wire.request(question(&request()));
            assert_golden(&format!("request.{}.json", wire.name()), &Value::Object(sent));
        }
    }

    #[test]
    fn a_request_in_the_json_dialect_is_a_chat_request_with_a_schema() {
        let asked = json_dialect::request(&request());
        let question =
            Question { body: &asked.body, schema: asked.schema.as_ref(), output_limit_field: None };
        assert_golden("request.json-dialect.json", &Value::Object(Wire::Chat.request(question)));
    }

    #[test]
    fn a_stream_becomes_an_answer_in_the_journals_shape() {
        for wire in WIRES {
            let stream = golden(&format!("{}.stream.txt", file_name(wire)));
            let answer = read(wire, std::iter::once(stream.as_bytes())).unwrap();
            let ModelAnswer { content, stop_reason, usage, model, request_id } = answer;
            let answer = json!({"content": content, "stop_reason": stop_reason, "usage": usage, "model": model,
                "request_id": request_id});
            assert_golden(&format!("{}.answer.json", file_name(wire)), &answer);
        }
    }

    const fn file_name(wire: Wire) -> &'static str {
        match wire {
            Wire::Messages => "anthropic",
            Wire::Chat => "chat",
            Wire::Responses => "responses",
        }
    }

    #[test]
    fn what_came_over_a_wire_goes_back_over_it_and_is_understood_there() {
        for wire in [Wire::Chat, Wire::Responses] {
            let stream = golden(&format!("{}.stream.txt", file_name(wire)));
            let answer = read(wire, std::iter::once(stream.as_bytes())).unwrap();
            let messages = json!([{"role": "user", "content": [{"type": "text", "text": "go"}]},
                {"role": "assistant", "content": answer.content}]);
            let body = json!({"model": "m", "max_tokens": 9, "messages": messages});
            let sent = wire.request(question(body.as_object().unwrap()));
            assert_eq!(wire.incoming(&sent).unwrap()["messages"], messages, "{wire:?}");
        }
    }

    #[test]
    fn each_request_of_a_conversation_begins_with_the_bytes_of_the_one_before() {
        for wire in WIRES {
            let of_length = |length: usize| {
                let mut body = request();
                let messages = body["messages"].as_array().unwrap()[..length].to_vec();
                body.insert("messages".into(), Value::Array(messages));
                // The marks of cache points move; the provider's cache does not see them.
                let text = Value::Object(wire.request(question(&body))).to_string();
                let text = text.replace(",\"cache_control\":{\"type\":\"ephemeral\"}", "");
                let list = if wire == Wire::Responses { "\"input\":[" } else { "\"messages\":[" };
                assert!(text.contains(list), "{text}");
                let end = text.rfind("],\"tool_choice\"").unwrap();
                text[..end].to_owned()
            };
            for length in [1, 3] {
                let (short, long) = (of_length(length), of_length(length + 2));
                assert!(long.starts_with(&short), "{wire:?}\n{short}\n{long}");
            }
        }
    }

    proptest! {
        #[test]
        fn however_a_stream_is_cut_the_answer_is_the_same(
            which in 0_usize..3, sizes in prop::collection::vec(1_usize..40, 1..50),
        ) {
            let wire = WIRES[which];
            let stream = golden(&format!("{}.stream.txt", file_name(wire)));
            let whole = read(wire, std::iter::once(stream.as_bytes())).unwrap();
            let mut rest = stream.as_bytes();
            let mut pieces = Vec::new();
            for size in sizes.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (piece, tail) = rest.split_at((*size).min(rest.len()));
                pieces.push(piece);
                rest = tail;
            }
            prop_assert_eq!(read(wire, pieces.into_iter()).unwrap(), whole);
        }

        #[test]
        fn no_prefix_of_a_stream_is_an_answer_before_its_end_was_said(which in 0_usize..3, part in 0.0_f64..1.0) {
            let wire = WIRES[which];
            let stream = golden(&format!("{}.stream.txt", file_name(wire)));
            let end = ["event: message_stop", "\"finish_reason\":\"tool_calls\"", "event: response.completed"][which];
            let limit = stream.find(end).unwrap();
            let length = (limit as f64 * part) as usize;
            let got = read(wire, std::iter::once(&stream.as_bytes()[..length]));
            prop_assert!(matches!(got, Err(AssembleError::Unfinished(_))), "{:?}", got);
        }

        #[test]
        fn arbitrary_events_never_panic(which in 0_usize..3, lines in prop::collection::vec(event(), 0..12)) {
            let stream: String = lines.iter().map(|line| format!("data: {line}\n\n")).collect();
            let whole = read(WIRES[which], std::iter::once(stream.as_bytes()));
            prop_assert_eq!(read(WIRES[which], stream.as_bytes().chunks(3)), whole);
        }
    }

    /// Events as wires have them, with fields missing, doubled and of the wrong type.
    fn event() -> impl Strategy<Value = String> {
        let odd = prop::sample::select(vec![
            json!(null),
            json!(1),
            json!("x"),
            json!([]),
            json!({}),
            json!([1, {}]),
        ]);
        let kind = prop::sample::select(vec![
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
            "error",
            "response.output_item.done",
            "response.completed",
            "response.failed",
            "ping",
        ]);
        let field = prop::sample::select(vec![
            "message",
            "index",
            "delta",
            "content_block",
            "usage",
            "choices",
            "error",
            "item",
            "response",
            "model",
            "output_index",
        ]);
        let typed = (kind, prop::collection::vec((field, odd.clone()), 0..4)).prop_map(|(kind, fields)| {
            let mut event = json!({"type": kind});
            for (name, value) in fields {
                event[name] = value;
            }
            event.to_string()
        });
        let chat = (prop::sample::select(vec!["content", "tool_calls", "function_call", "refusal"]), odd)
            .prop_map(|(name, value)| {
                json!({"choices": [{"delta": {name: value}, "finish_reason": "stop"}]}).to_string()
            });
        prop_oneof![typed, chat, Just("[DONE]".to_owned()), Just("{".to_owned()), "[ -~]{0,20}"]
    }
}
