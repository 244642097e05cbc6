//! Arbitrary bytes as the answer of a model, streamed over each wire and as one JSON object: nothing panics, the pieces do
//! not matter, and every answer has blocks that a later request can hold. Run with `cargo +nightly fuzz run answers`.

#![no_main]

use covey_models::dialect::json::parse;
use covey_models::reading::{AssembleError, Ids};
use covey_models::sse::SseParser;
use covey_models::wire::Question;
use covey_models::{ModelAnswer, Wire};
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value, json};

fn read<'a>(
    wire: Wire,
    pieces: impl Iterator<Item = &'a [u8]>,
) -> Option<Result<ModelAnswer, AssembleError>> {
    let mut parser = SseParser::default();
    let mut reading = wire.reading(&Map::new());
    for piece in pieces {
        for event in parser.push(piece).ok()? {
            if let Err(error) = reading.take(&event.data, &mut |_| {}) {
                return Some(Err(error));
            }
        }
    }
    Some(reading.finish(None))
}

fn check(wire: Wire, answer: ModelAnswer) {
    let body = json!({"model": "m", "max_tokens": 1, "messages": [
        {"role": "user", "content": "x"}, {"role": "assistant", "content": answer.content}]});
    let body = body.as_object().unwrap();
    for to in [wire, Wire::Messages, Wire::Chat, Wire::Responses] {
        let sent = to.request(Question { body, schema: None, output_limit_field: None });
        assert!(!Value::Object(sent).to_string().is_empty());
    }
}

fuzz_target!(|input: &[u8]| {
    // The first byte says which wire, the second how long the pieces are.
    let [which, size, bytes @ ..] = input else { return };
    let wire = [Wire::Messages, Wire::Chat, Wire::Responses][usize::from(*which) % 3];
    let whole = read(wire, std::iter::once(bytes));
    assert_eq!(whole, read(wire, bytes.chunks(usize::from(*size).max(1))));
    if let Some(Ok(answer)) = whole {
        check(wire, answer);
    }
    if let Ok(object) = serde_json::from_slice::<Map<String, Value>>(bytes)
        && let Ok(answer) = wire.reading(&Map::new()).whole(object, None)
    {
        check(wire, answer);
    }
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(content) = parse(text, &Ids::of(&Map::new()))
    {
        assert!(content.iter().all(|block| block["type"] == "text" || block["input"].is_object()));
    }
});
