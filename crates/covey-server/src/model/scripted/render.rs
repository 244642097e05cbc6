//! An answer as bytes on the wire: stream events, cut where a seed says, with the faults that a test asks for.
//!
//! Pure: what is sent when is data; the server only sends it.

use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::check::UNKNOWN_BLOCK_TYPE;
use super::plan::{Reply, model_name, signature, usage};

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

/// The whole message, as an endpoint answers that was not asked to stream.
pub(super) fn message(request: &Map<String, Value>, reply: &Reply) -> Value {
    json!({
        "id": format!("msg_{}", reply.id),
        "type": "message",
        "role": "assistant",
        "model": model_name(request),
        "content": reply.content,
        "stop_reason": reply.stop_reason,
        "stop_sequence": null,
        "usage": usage(request, &reply.content),
    })
}

/// The answer as a stream.
pub(super) fn stream(
    request: &Map<String, Value>,
    reply: &Reply,
    fault: Option<Fault>,
    chunking: Chunking,
    seed: u64,
) -> Sending {
    let mut random = SplitMix(seed);
    let mut events = events(request, reply, fault == Some(Fault::UnknownBlock), &mut random);
    let middle = events.len() / 2;
    match fault {
        Some(Fault::MidStreamError) => {
            events.truncate(middle);
            let error = json!({"type": "overloaded_error", "message": "Overloaded, says the script"});
            events.push(json!({"type": "error", "error": error}));
        }
        Some(Fault::Truncated | Fault::Hangup) => events.truncate(middle),
        _ => {}
    }
    let mut bytes = Vec::new();
    for (at, event) in events.iter().enumerate() {
        if fault == Some(Fault::Garbage) && at == middle {
            bytes.extend_from_slice(b"event: content_block_delta\ndata: {\"type\": \xff\n\n");
        }
        let kind = event["type"].as_str().unwrap_or_default();
        bytes.extend_from_slice(format!("event: {kind}\ndata: {event}\n\n").as_bytes());
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

fn events(
    request: &Map<String, Value>,
    reply: &Reply,
    unknown_block: bool,
    random: &mut SplitMix,
) -> Vec<Value> {
    let mut start = message(request, reply);
    let usage = start["usage"].clone();
    start["content"] = json!([]);
    start["stop_reason"] = Value::Null;
    start["usage"]["output_tokens"] = json!(1);
    let mut events = vec![json!({"type": "message_start", "message": start}), json!({"type": "ping"})];
    let mut content = reply.content.clone();
    if unknown_block {
        let payload = "kept as it came";
        let block = json!({"type": UNKNOWN_BLOCK_TYPE, "payload": payload, "signature": signature(payload)});
        content.insert(0, block);
    }
    for (index, block) in content.iter().enumerate() {
        let (start, deltas) = taken_apart(block, random);
        events.push(json!({"type": "content_block_start", "index": index, "content_block": start}));
        for delta in deltas {
            events.push(json!({"type": "content_block_delta", "index": index, "delta": delta}));
            if random.below(8) == 0 {
                events.push(json!({"type": "ping"}));
            }
        }
        events.push(json!({"type": "content_block_stop", "index": index}));
    }
    events.push(json!({
        "type": "message_delta",
        "delta": {"stop_reason": reply.stop_reason, "stop_sequence": null},
        "usage": {"output_tokens": usage["output_tokens"]},
    }));
    events.push(json!({"type": "message_stop"}));
    events
}

/// A block as its start and its deltas.
fn taken_apart(block: &Value, random: &mut SplitMix) -> (Value, Vec<Value>) {
    let text = |name: &str| block[name].as_str().unwrap_or_default().to_owned();
    let mut start = block.clone();
    let mut pieces = |text: &str, kind: &str, field: &str| -> Vec<Value> {
        fragments(text, random).into_iter().map(|piece| json!({"type": kind, field: piece})).collect()
    };
    match block["type"].as_str().unwrap_or_default() {
        "text" => {
            start["text"] = json!("");
            (start, pieces(&text("text"), "text_delta", "text"))
        }
        "thinking" => {
            (start["thinking"], start["signature"]) = (json!(""), json!(""));
            let mut deltas = pieces(&text("thinking"), "thinking_delta", "thinking");
            deltas.push(json!({"type": "signature_delta", "signature": block["signature"]}));
            (start, deltas)
        }
        "tool_use" => {
            start["input"] = json!({});
            (start, pieces(&block["input"].to_string(), "input_json_delta", "partial_json"))
        }
        _ => (start, Vec::new()),
    }
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
    use super::super::super::assemble::Assembler;
    use super::super::super::sse::SseParser;
    use super::super::plan;
    use super::*;

    #[test]
    fn what_is_taken_apart_and_cut_is_put_together_again() {
        let scripts = serde_json::from_value(json!({"scripts": [{"turns": [{
            "thinking": "hä €? 🦊", "text": "Ich prüfe das. ".repeat(9),
            "calls": [{"name": "bash", "input": {"command": "echo 'ä🦊' \"\\\\\"", "n": [1, {"a": null}]}},
                      {"name": "noargs"}]}]}]}))
        .unwrap();
        let Value::Object(request) = json!({"messages": [{"role": "user", "content": "x"}]}) else {
            panic!()
        };
        let reply = plan::reply(&scripts, &request).unwrap();
        for (seed, chunking) in
            (0..40).zip([Chunking::Whole, Chunking::Bytes, Chunking::Seeded].into_iter().cycle())
        {
            let sending = stream(&request, &reply, None, chunking, seed);
            let (mut parser, mut assembler) = (SseParser::default(), Assembler::default());
            for piece in &sending.pieces {
                for event in parser.push(piece).unwrap() {
                    assembler.push(&event.data).unwrap();
                }
            }
            let answer = assembler.finish(Some(format!("req_{}", reply.id))).unwrap();
            assert_eq!(answer, reply.clone().into_answer(&request));
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
