//! Arbitrary bytes as a model's event stream: nothing panics, the pieces do not matter, and only a stream that says
//! that it is finished becomes an answer. Run with `cargo +nightly fuzz run sse`.

#![no_main]

use covey_models::messages::assemble::Assembler;
use covey_models::sse::{SseEvent, SseParser};
use libfuzzer_sys::fuzz_target;

fn parse<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Option<Vec<SseEvent>> {
    let mut parser = SseParser::default();
    let mut events = Vec::new();
    for piece in pieces {
        events.extend(parser.push(piece).ok()?);
    }
    Some(events)
}

fuzz_target!(|input: &[u8]| {
    // The first byte says how long the pieces are.
    let Some((size, bytes)) = input.split_first() else { return };
    let whole = parse(std::iter::once(bytes));
    assert_eq!(whole, parse(bytes.chunks(usize::from(*size).max(1))));
    let mut assembler = Assembler::default();
    for event in whole.unwrap_or_default() {
        if assembler.push(&event.data).is_err() {
            return;
        }
    }
    let stopped = assembler.is_stopped();
    assert!(stopped || assembler.finish(None).is_err());
});
