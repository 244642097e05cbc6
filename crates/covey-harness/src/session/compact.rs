//! Making room in the model's context: the older part of the conversation is replaced by a summary.
//!
//! What stays true: the cut lies between complete rounds, so no call loses its result; the agent's instructions are not
//! part of the conversation and so never cut; what the user said in the part that goes stays word for word, up to
//! a limit; the journal keeps everything. The model writes the summary; when it cannot, one is put together
//! without it, so that a session is never stuck because it is long.

use serde_json::{Map, Value, json};

use super::{ModelState, Session};
use crate::effect::Effect;
use crate::prompt::{self, Addressee, Entry};
use crate::record::Body;
use crate::verify::{COMPACT_ASK_MARK, COMPACTED_MARK};

/// Of the model's context; beyond it the older part of the conversation is left out before the next request.
const FULL_PERCENT: u64 = 80;
/// Of the model's context, what is kept as it was, at a guess of four bytes for each token.
const KEPT_PERCENT: u64 = 10;
const BYTES_PER_TOKEN: u64 = 4;
/// What the user said in left out parts, together; beyond it the middle goes, the first and the latest stay.
const WORDS_BYTES_MAX: usize = 64 * 1024;
/// Bytes of a summary that are kept.
const SUMMARY_BYTES_MAX: usize = 64 * 1024;
/// Calls that a summary without the model names.
const CALLS_NAMED_MAX: usize = 50;

const ASK: &str = "Write a summary that you can go \
                   on from, as you will see only it, what the user said, and the last steps. Say what the task is, \
                   what was done and found out, which files matter and what is in them, what is decided and why, what \
                   is still to be done and what comes next. Name paths, commands, errors and numbers exactly. Call no \
                   tool.";

impl Session {
    pub(super) fn wants_compaction(&self) -> bool {
        let full = self.config.context_tokens.saturating_mul(FULL_PERCENT) / 100;
        self.context_used > full && self.can_compact()
    }

    /// Whether there is an answer that would be left out.
    pub(super) fn can_compact(&self) -> bool {
        let left_out = self.conversation.len() - self.kept_entries();
        self.conversation[..left_out].iter().any(|entry| matches!(entry, Entry::Answer { .. }))
    }

    /// Parts at the end that stay: as many as fit. A part is whole: an answer stands with its results.
    fn kept_entries(&self) -> usize {
        let budget = self.config.context_tokens.saturating_mul(KEPT_PERCENT) / 100 * BYTES_PER_TOKEN;
        let mut bytes = 0;
        self.conversation
            .iter()
            .rev()
            .take_while(|entry| {
                bytes += bytes_of(entry);
                bytes <= budget
            })
            .count()
    }

    /// The request for a summary: the conversation as it was sent, so that what the provider has cached of it counts, and
    /// the wish behind it.
    pub(super) fn summary_request(&self, to: Addressee<'_>) -> Map<String, Value> {
        let mut conversation = self.conversation.clone();
        let text = format!("{COMPACT_ASK_MARK} {ASK}");
        conversation.push(Entry::Note(vec![json!({"type": "text", "text": text})]));
        let mut request = prompt::build(&self.config, &conversation, to);
        if request.contains_key("tools") {
            request.insert("tool_choice".into(), json!({"type": "none"}));
        }
        request
    }

    /// What the model's summary makes of the conversation.
    pub(super) fn compacted(&self, content: &[Value]) -> Body {
        let texts: Vec<&str> = content.iter().filter_map(|block| block["text"].as_str()).collect();
        let text = texts.join("\n");
        let summary = match text.trim() {
            "" => self.list_of_calls(),
            text => cut_at(text, SUMMARY_BYTES_MAX).to_owned(),
        };
        Body::ContextCompacted { summary, kept: self.kept_entries() as u64 }
    }

    /// The same where no model can write one.
    pub(super) fn compact_without_model(&self) -> Effect {
        let summary = self.list_of_calls();
        Effect::Append(vec![Body::ContextCompacted { summary, kept: self.kept_entries() as u64 }])
    }

    fn list_of_calls(&self) -> String {
        let calls: Vec<String> = self
            .conversation
            .iter()
            .filter_map(|entry| match entry {
                Entry::Answer { content, .. } => Some(content),
                _ => None,
            })
            .flatten()
            .filter(|block| block["type"] == "tool_use")
            .map(|block| {
                let input: String = block["input"].to_string().chars().take(200).collect();
                format!("- {} {input}", block["name"].as_str().unwrap_or_default())
            })
            .collect();
        let named = calls.len().saturating_sub(CALLS_NAMED_MAX);
        format!(
            "No summary could be written. {} calls were made; the latest of them:\n{}",
            calls.len(),
            calls[named..].join("\n")
        )
    }

    /// Folds the record.
    pub(super) fn compact(&mut self, summary: &str, kept: u64) {
        let kept = usize::try_from(kept).unwrap_or(usize::MAX).min(self.conversation.len());
        let rest = self.conversation.split_off(self.conversation.len() - kept);
        let gone = std::mem::replace(&mut self.conversation, rest);
        let answers = self.conversation.iter().filter(|entry| matches!(entry, Entry::Answer { .. })).count();
        self.words_left_out.extend(gone.iter().filter_map(|entry| match entry {
            Entry::Input(content) => Some(words_of(content)),
            _ => None,
        }));
        bound_words(&mut self.words_left_out);
        let text = format!(
            "{COMPACTED_MARK} What the user said in it, word for word:\n\n{}\n\nSummary of it:\n\n{summary}\n\nFiles in the \
             home directory are as they were left. Your last {answers} answers follow word for word. Go on from here.",
            self.words_left_out.join("\n\n---\n\n")
        );
        self.conversation.insert(0, Entry::Note(vec![json!({"type": "text", "text": text})]));
        self.context_used = 0;
        self.model = ModelState::Quiet;
    }
}

fn bytes_of(entry: &Entry) -> u64 {
    let bytes = |blocks: &[Value]| blocks.iter().map(|block| block.to_string().len() as u64).sum::<u64>();
    match entry {
        Entry::Input(content) | Entry::Note(content) => bytes(content),
        Entry::Answer { content, results, .. } => {
            let results = results.iter().filter_map(|result| result.outcome.as_ref());
            bytes(content) + results.map(|(content, _)| bytes(content)).sum::<u64>()
        }
    }
}

fn words_of(content: &[Value]) -> String {
    let texts = content.iter().map(|block| block["text"].as_str().unwrap_or("(a picture or document)"));
    texts.collect::<Vec<_>>().join("\n")
}

/// Keeps the first and the latest, where all together are too long.
fn bound_words(words: &mut Vec<String>) {
    let mut total: usize = words.iter().map(String::len).sum();
    while total > WORDS_BYTES_MAX && words.len() > 2 {
        total -= words.remove(1).len();
    }
    for word in words.iter_mut().filter(|word| word.len() > WORDS_BYTES_MAX / 2) {
        *word = format!("{} […]", cut_at(word, WORDS_BYTES_MAX / 2));
    }
}

fn cut_at(text: &str, bytes_max: usize) -> &str {
    let mut end = bytes_max.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_and_the_latest_words_stay_when_there_are_too_many() {
        let mut words: Vec<String> = (0..100).map(|n| format!("{n}:{}", "ä".repeat(1000))).collect();
        bound_words(&mut words);
        assert!(words.iter().map(String::len).sum::<usize>() <= WORDS_BYTES_MAX);
        assert!(words[0].starts_with("0:") && words.last().unwrap().starts_with("99:"));
        let mut long = vec!["ä".repeat(WORDS_BYTES_MAX); 2];
        bound_words(&mut long);
        assert!(long.iter().all(|word| word.len() <= WORDS_BYTES_MAX / 2 + 10));
    }
}
