//! What a provider's refusal means: whether to ask again, when, and whether the conversation is too long.
//!
//! Pure. The providers write the same thing in several shapes; each is read from its body here, so that the loop has
//! three reactions to choose from and no dialects. What does not belong here: waiting.

use std::time::Duration;

use serde_json::Value;

use crate::{ModelFailure, retry_after};

/// Words by which the providers say that a request is longer than the model's context, lower case.
const TOO_LONG_WORDS: [&str; 8] = [
    "context_length_exceeded",
    "exceed_context_size",
    "prompt is too long",
    "maximum context length",
    "exceeds the context",
    "exceeds the available context",
    "context window",
    "input is too long",
];

/// A refusal as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status, or the one that belongs to an error in the middle of a stream.
    pub status: u16,
    /// For people, still with whatever the provider echoed.
    pub detail: String,
    /// The request id, where the body has it.
    pub request_id: Option<String>,
    /// The wait that the body asks for.
    pub retry_after: Option<Duration>,
}

impl Refusal {
    /// Reads an error's body: `{"error": {type, code, message}}` of Anthropic and OpenAI, the flat one of vLLM,
    /// `{"detail": …}`, or any text.
    pub fn read(status: u16, body: &[u8]) -> Self {
        let json: Value = serde_json::from_slice(body).unwrap_or_default();
        let error = if json["error"].is_object() { &json["error"] } else { &json };
        let texts: Vec<String> =
            ["type", "code", "message"].iter().filter_map(|at| text(&error[*at])).collect();
        let said = match (error["message"].is_string(), &json["error"], &json["detail"]) {
            (true, ..) => texts.join(": "),
            (false, Value::String(said), _) | (false, _, Value::String(said)) => said.clone(),
            _ => String::from_utf8_lossy(body).into_owned(),
        };
        Self {
            status,
            detail: format!("{status}: {said}"),
            request_id: json["request_id"].as_str().map(str::to_owned),
            retry_after: retry_after::in_body(&json),
        }
    }

    /// An error event in the middle of a stream.
    pub fn in_stream(status: u16, kind: &str, message: &str) -> Self {
        let retry_after = retry_after::in_words(message);
        Self { status, detail: format!("{kind}: {message}"), request_id: None, retry_after }
    }

    fn is_too_long(&self) -> bool {
        let detail = self.detail.to_lowercase();
        self.status == 413
            || (matches!(self.status, 400 | 422 | 500)
                && TOO_LONG_WORDS.iter().any(|word| detail.contains(word)))
    }
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) if !text.is_empty() => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// The failure that a refusal is. `detail` is its text without the key.
pub fn classify(
    refusal: &Refusal,
    detail: String,
    retry_after: Option<Duration>,
    request_id: Option<String>,
) -> ModelFailure {
    let status = refusal.status;
    if refusal.is_too_long() {
        return ModelFailure::TooLong { status, detail, request_id };
    }
    match status {
        401 | 403 => ModelFailure::Unauthorized { detail },
        408 | 409 | 425 | 429 | 500.. => {
            ModelFailure::Transient { status: Some(status), retry_after, detail, request_id }
        }
        _ => ModelFailure::Rejected { status, detail, request_id },
    }
}

/// The HTTP status that belongs to a code or type of OpenAI's errors, where only these come.
pub(crate) fn status_of(kind: &str) -> u16 {
    match kind {
        "invalid_request_error" | "BadRequestError" | "context_length_exceeded" | "invalid_prompt" => 400,
        "authentication_error" | "invalid_api_key" => 401,
        "permission_error" => 403,
        "not_found_error" | "model_not_found" => 404,
        "rate_limit_error" | "rate_limit_exceeded" | "insufficient_quota" | "tokens" | "requests" => 429,
        "server_is_overloaded" | "slow_down" | "overloaded_error" => 503,
        _ => 500,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(status: u16, body: &str) -> ModelFailure {
        let refusal = Refusal::read(status, body.as_bytes());
        classify(&refusal, refusal.detail.clone(), refusal.retry_after, refusal.request_id.clone())
    }

    #[test]
    fn every_providers_way_to_say_too_long_is_understood() {
        for body in [
            r#"{"type":"error","error":{"type":"invalid_request_error","message":"prompt is too long: 9 tokens > 8 maximum"}}"#,
            r#"{"error":{"message":"This model's maximum context length is 8 tokens.","type":"invalid_request_error","code":"context_length_exceeded"}}"#,
            r#"{"error":{"code":400,"message":"the request exceeds the available context size","type":"exceed_context_size_error"}}"#,
            r#"{"object":"error","message":"This model's maximum context length is 8","type":"BadRequestError","code":400}"#,
        ] {
            assert!(matches!(of(400, body), ModelFailure::TooLong { status: 400, .. }), "{body}");
        }
        assert!(matches!(of(413, "too large"), ModelFailure::TooLong { .. }));
        assert!(matches!(of(400, r#"{"error":{"message":"tools: bad"}}"#), ModelFailure::Rejected { .. }));
    }

    #[test]
    fn statuses_and_waits_are_read_from_the_body() {
        let wait = |failure: ModelFailure| match failure {
            ModelFailure::Transient { retry_after, .. } => retry_after,
            other => panic!("{other}"),
        };
        let limit = r#"{"error":{"message":"Rate limit reached. Please try again in 1.5s.","type":"tokens","code":"rate_limit_exceeded"}}"#;
        assert_eq!(wait(of(429, limit)), Some(Duration::from_millis(1500)));
        assert_eq!(wait(of(529, "{}")), None);
        assert_eq!(
            wait(of(503, r#"{"error":{"message":"busy","retry_after":7}}"#)),
            Some(Duration::from_secs(7))
        );
        assert!(matches!(of(401, "no"), ModelFailure::Unauthorized { .. }));
        assert!(matches!(of(307, ""), ModelFailure::Rejected { status: 307, .. }));
        let said = of(400, r#"{"detail":"Not a model"}"#).to_string();
        assert!(said.contains("400: Not a model"), "{said}");
    }
}
