//! Translations between the traits and wires of the server and the journal's own words.

use base64::Engine as _;
use covey_harness::record::FailureKind;
use covey_harness::session::{ModelAnswerFacts, ModelFailureFacts};
use covey_types::size::TOOL_RESULT_BYTES_MAX;
use covey_wire::runner::HomeSource;
use covey_wire::tool::{ToolContent, ToolResult};
use serde_json::{Value, json};

use crate::model::{ModelAnswer, ModelFailure, Target};

/// Bytes of one result as the journal keeps it, pictures in base64 included. The runner cuts texts far below;
/// this is the border against one that does not.
const RESULT_BYTES_MAX: usize = 8 * 1024 * 1024;

pub(super) fn answer(answer: ModelAnswer, from: Target) -> ModelAnswerFacts {
    let ModelAnswer { content, stop_reason, usage, model, request_id } = answer;
    ModelAnswerFacts { content, stop_reason, usage, model, request_id, provider: from.provider }
}

pub(super) fn failure(failure: ModelFailure, from: Target) -> ModelFailureFacts {
    let too_long = matches!(failure, ModelFailure::TooLong { .. });
    let (kind, status, retry_after, detail, request_id) = match failure {
        ModelFailure::Transient { status, retry_after, detail, request_id } => {
            (FailureKind::Transient, status, retry_after, detail, request_id)
        }
        ModelFailure::Rejected { status, detail, request_id }
        | ModelFailure::TooLong { status, detail, request_id } => {
            (FailureKind::Rejected, Some(status), None, detail, request_id)
        }
        ModelFailure::Unauthorized { detail } => (FailureKind::Unauthorized, None, None, detail, None),
    };
    ModelFailureFacts {
        failure: kind,
        status,
        retry_after_ms: retry_after.map(|d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX)),
        detail,
        request_id,
        provider: from.provider,
        next_provider: from.next,
        too_long,
    }
}

/// The blocks of a result, for the journal and the model.
pub(super) fn result_blocks(result: ToolResult) -> (Vec<Value>, bool) {
    let size: usize = result
        .content
        .iter()
        .map(|content| match content {
            ToolContent::Text { text } => text.len(),
            ToolContent::Image { data, .. } => data.len() / 3 * 4,
        })
        .sum();
    if size > RESULT_BYTES_MAX {
        let text = format!(
            "The result has {size} bytes, of which none are shown: at most {RESULT_BYTES_MAX} are kept \
             (texts: {TOOL_RESULT_BYTES_MAX}). Ask for a smaller part."
        );
        return (vec![json!({"type": "text", "text": text})], true);
    }
    let blocks = result.content.into_iter().map(|content| match content {
        ToolContent::Text { text } => json!({"type": "text", "text": text}),
        ToolContent::Image { media_type, data } => {
            let data = base64::engine::general_purpose::STANDARD.encode(data);
            json!({"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}})
        }
    });
    (blocks.collect(), result.is_error)
}

pub(super) const fn source_name(source: HomeSource) -> &'static str {
    match source {
        HomeSource::Adopted => "adopted",
        HomeSource::Kept => "kept",
        HomeSource::Materialized => "materialized",
        HomeSource::Empty => "empty",
    }
}

/// Whether the files are the published generation's and nothing newer.
pub(super) const fn is_put_back(source: HomeSource) -> bool {
    match source {
        HomeSource::Adopted | HomeSource::Kept => false,
        HomeSource::Materialized | HomeSource::Empty => true,
    }
}

/// A random number from 0 to 1000; without randomness the middle, which only makes herds likelier.
pub(super) fn jitter_permille() -> u16 {
    let mut bytes = [0; 2];
    match getrandom::fill(&mut bytes) {
        Ok(()) => u16::from_le_bytes(bytes) % 1001,
        Err(_) => 500,
    }
}
