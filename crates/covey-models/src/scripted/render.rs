//! An answer as bytes on a wire: stream events, cut where a seed says, with the faults that a test asks for.
//!
//! Pure: what is sent when is data; the server only sends it.

mod chat;
mod messages;
mod responses;

use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::plan::Reply;
use crate::wire::Wire;

/// What a stream says that breaks off.
const OVERLOADED_TEXT: &str = "Overloaded, says the script";

/// How a stream is cut into pieces.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Chunking {
    /// In one piece.
    #[default]
    Whole,
    /// Byte by byte.
    Bytes,
    /// In pieces of 1 to 64 bytes, as the seed says.
    Seeded,
}

/// Something that goes wrong with one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// Status 429.
    RateLimited {
        /// The `retry-after` header, in seconds.
        retry_after_s: u32,
    },
    /// Status 529.
    Overloaded {
        /// The `retry-after` header, in seconds.
        retry_after_s: u32,
    },
    /// Status 500.
    ServerError,
    /// Status 200, then an `error` event in the middle.
    MidStreamError,
    /// The stream ends in the middle, as if it were finished.
    Truncated,
    /// The connection breaks in the middle.
    Hangup,
    /// An event in the middle that is no JSON.
    Garbage,
    /// The right answer, with a pause before every piece.
    SlowDrip {
        /// Length of one pause, in milliseconds.
        pause_ms: u64,
    },
    /// The right answer, behind a block of a type that no client knows; it is verified when it comes back.
    UnknownBlock,
}

/// Which requests go wrong.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FaultPlan {
    /// The first requests, one each.
    pub first: Vec<Fault>,
    /// Of the later requests, how many in a hundred.
    pub percent: u8,
    /// What happens to those; empty means nothing.
    pub kinds: Vec<Fault>,
}

impl FaultPlan {
    /// What happens to the request with this number, from 0.
    pub(super) fn fault(&self, seed: u64, request: u64) -> Option<Fault> {
        if let Some(fault) = usize::try_from(request).ok().and_then(|at| self.first.get(at)) {
            return Some(*fault);
        }
        let mut random = SplitMix(seed ^ request.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let hit = !self.kinds.is_empty() && random.below(100) < u64::from(self.percent);
        hit.then(|| self.kinds[random.below(self.kinds.len() as u64) as usize])
    }
}

/// A small seeded generator (SplitMix64): the same numbers for the same seed on every machine.
#[derive(Debug)]
pub(super) struct SplitMix(pub(super) u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`, which is not 0.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// What is sent after the head of an answer.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) pieces: Vec<Bytes>,
    /// Before each piece.
    pub(super) pause: Duration,
    /// Whether the connection breaks at the end instead of ending the body.
    pub(super) hang_up: bool,
}

/// One event of a stream.
#[derive(Debug)]
pub(super) struct Event {
    /// The `event` field, on the wires that have one.
    name: Option<String>,
    data: String,
}

impl Event {
    /// An event that is named as its `type` says.
    fn typed(data: &Value) -> Self {
        Self { name: data["type"].as_str().map(str::to_owned), data: data.to_string() }
    }

    /// An event without a name.
    fn plain(data: &Value) -> Self {
        Self { name: None, data: data.to_string() }
    }
}

/// The whole answer, as an endpoint answers that was not asked to stream.
pub(super) fn whole(wire: Wire, request: &Map<String, Value>, reply: &Reply) -> Value {
    match wire {
        Wire::Messages => messages::whole(request, reply),
        Wire::Chat => chat::whole(request, reply),
        Wire::Responses => responses::whole(request, reply),
    }
}

/// How a stream goes wrong and how it is cut.
#[derive(Debug, Clone, Copy)]
pub(super) struct Manner {
    pub(super) fault: Option<Fault>,
    pub(super) chunking: Chunking,
    pub(super) seed: u64,
}

/// The answer as a stream.
pub(super) fn stream(wire: Wire, request: &Map<String, Value>, reply: &Reply, manner: Manner) -> Sending {
    let Manner { fault, chunking, seed } = manner;
    let mut random = SplitMix(seed);
    let unknown_block = fault == Some(Fault::UnknownBlock);
    let mut events = match wire {
        Wire::Messages => messages::events(request, reply, unknown_block, &mut random),
        Wire::Chat => chat::events(request, reply, &mut random),
        Wire::Responses => responses::events(request, reply, unknown_block, &mut random),
    };
    let middle = events.len() / 2;
    match fault {
        Some(Fault::MidStreamError) => {
            events.truncate(middle);
            events.push(match wire {
                Wire::Messages => messages::error(OVERLOADED_TEXT),
                Wire::Chat => chat::error(OVERLOADED_TEXT),
                Wire::Responses => responses::error(OVERLOADED_TEXT),
            });
        }
        Some(Fault::Truncated | Fault::Hangup) => events.truncate(middle),
        _ => {}
    }
    let mut bytes = Vec::new();
    for (at, event) in events.iter().enumerate() {
        if fault == Some(Fault::Garbage) && at == middle {
            bytes.extend_from_slice(b"data: {\"type\": \xff\n\n");
        }
        let name = event.name.as_ref().map_or_else(String::new, |name| format!("event: {name}\n"));
        bytes.extend_from_slice(format!("{name}data: {}\n\n", event.data).as_bytes());
    }
    let pause = match fault {
        Some(Fault::SlowDrip { pause_ms }) => Duration::from_millis(pause_ms),
        _ => Duration::ZERO,
    };
    Sending { pieces: cut(bytes, chunking, &mut random), pause, hang_up: fault == Some(Fault::Hangup) }
}

fn cut(bytes: Vec<u8>, chunking: Chunking, random: &mut SplitMix) -> Vec<Bytes> {
    let mut rest = Bytes::from(bytes);
    let mut pieces = Vec::new();
    while !rest.is_empty() {
        let length = match chunking {
            Chunking::Whole => rest.len(),
            Chunking::Bytes => 1,
            Chunking::Seeded => 1 + random.below(64) as usize,
        };
        pieces.push(rest.split_to(length.min(rest.len())));
    }
    pieces
}

/// Pieces of 1 to 24 characters.
fn fragments(text: &str, random: &mut SplitMix) -> Vec<String> {
    let mut rest = text.chars().peekable();
    let mut fragments = Vec::new();
    while rest.peek().is_some() {
        let length = 1 + random.below(24) as usize;
        fragments.push(rest.by_ref().take(length).collect());
    }
    fragments
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::plan;
    use super::*;
    use crate::sse::SseParser;
    use crate::wire::Question;

    #[test]
    fn what_is_taken_apart_and_cut_is_put_together_again() {
        let scripts = serde_json::from_value(json!({"scripts": [{"turns": [{
            "thinking": "hä €? 🦊", "text": "Ich prüfe das. ".repeat(9),
            "calls": [{"name": "bash", "input": {"command": "echo 'ä🦊' \"\\\\\"", "n": [1, {"a": null}]}},
                      {"name": "noargs"}]}]}]}))
        .unwrap();
        let Value::Object(request) = json!({"model": "m", "messages": [{"role": "user", "content": "x"}],
            "stream_options": {"include_usage": true}})
        else {
            panic!()
        };
        let reply = plan::reply(&scripts, &request).unwrap();
        for wire in [Wire::Messages, Wire::Chat, Wire::Responses] {
            let sent = wire.request(Question { body: &request, schema: None, output_limit_field: None });
            let expected =
                wire.reading(&sent).whole(whole(wire, &request, &reply).as_object().unwrap().clone(), None);
            let expected = expected.unwrap();
            assert_eq!(expected.stop_reason, reply.stop_reason);
            let calls = |content: &[Value]| {
                content.iter().filter(|block| block["type"] == "tool_use").cloned().collect::<Vec<_>>()
            };
            assert_eq!(calls(&expected.content), calls(&reply.content));
            for (seed, chunking) in
                (0..40).zip([Chunking::Whole, Chunking::Bytes, Chunking::Seeded].into_iter().cycle())
            {
                let sending = stream(wire, &request, &reply, Manner { fault: None, chunking, seed });
                let (mut parser, mut reading) = (SseParser::default(), wire.reading(&sent));
                for piece in &sending.pieces {
                    for event in parser.push(piece).unwrap() {
                        reading.take(&event.data, &mut |_| {}).unwrap();
                    }
                }
                assert!(reading.is_complete());
                let answer = reading.finish(None).unwrap();
                assert_eq!(answer.content, expected.content, "{wire:?}");
                assert_eq!(answer.usage["output_tokens"], expected.usage["output_tokens"]);
                assert_eq!(
                    (answer.stop_reason, answer.model),
                    (expected.stop_reason.clone(), expected.model.clone())
                );
            }
        }
    }

    #[test]
    fn faults_come_first_by_list_and_then_by_chance_of_the_seed() {
        let plan = FaultPlan {
            first: vec![Fault::ServerError, Fault::Truncated],
            percent: 30,
            kinds: vec![Fault::Garbage],
        };
        assert_eq!(plan.fault(1, 0), Some(Fault::ServerError));
        assert_eq!(plan.fault(1, 1), Some(Fault::Truncated));
        let hits =
            |seed| (2..1002).filter(|n| plan.fault(seed, *n) == Some(Fault::Garbage)).collect::<Vec<_>>();
        assert!((200..400).contains(&hits(1).len()), "{}", hits(1).len());
        assert_eq!(hits(1), hits(1));
        assert_ne!(hits(1), hits(2));
        assert_eq!(FaultPlan::default().fault(1, 5), None);
    }
}
