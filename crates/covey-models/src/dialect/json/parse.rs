//! What a model wrote becomes blocks: liberal in what is around the JSON, strict in what it says.

use serde_json::{Map, Value, json};

use crate::reading::{Ids, input_of};

/// Calls of one answer that are taken; more is a model that has lost itself.
const CALLS_MAX: usize = 32;
/// Places at which the beginning of an answer is looked for; a text with more braces is none.
const BEGINNINGS_MAX: usize = 256;
/// Names under which models give a call's input.
const INPUT_FIELDS: [&str; 5] = ["input", "arguments", "parameters", "args", "params"];
/// Names under which models give what they say.
const ANSWER_FIELDS: [&str; 4] = ["answer", "say", "text", "response"];

/// Reads an answer.
///
/// # Errors
/// What is wrong with it, in words for the model.
pub fn parse(text: &str, ids: &Ids) -> Result<Vec<Value>, String> {
    if text.trim().is_empty() {
        return Err("it was empty".into());
    }
    let found = objects(text);
    if found.is_empty() {
        // Plain words are an answer: what else could they be?
        return match text.contains('{') {
            true => Err("it held no complete JSON object of the form that is asked for".into()),
            false => Ok(vec![json!({"type": "text", "text": text.trim()})]),
        };
    }
    let mut said = Vec::new();
    let mut calls = Vec::new();
    for object in found {
        match object {
            // Said behind a call, it speaks of a result that is not there yet.
            Said::Words(words) if calls.is_empty() => said.push(words),
            Said::Words(_) => {}
            Said::Call { name, input } => calls.push((name, input)),
        }
    }
    if calls.len() > CALLS_MAX {
        return Err(format!("it called {} tools at once, at most {CALLS_MAX} are allowed", calls.len()));
    }
    let words = said.into_iter().filter(|words| !words.trim().is_empty());
    let mut content: Vec<Value> = words.map(|words| json!({"type": "text", "text": words})).collect();
    content.extend(calls.into_iter().enumerate().map(|(place, (name, input))| {
        json!({"type": "tool_use", "id": ids.call(place), "name": name, "input": input})
    }));
    Ok(content)
}

/// The words of an answer that ends in their middle: the limit of output tokens was reached, whatever the server calls it.
pub fn cut_answer(text: &str) -> Option<String> {
    let open = &text[text.find('{')?..];
    let closed = format!("{}\"}}", open.trim_end_matches('\\'));
    let object: Map<String, Value> = serde_json::from_str(&closed).ok()?;
    let mut fields = object.iter();
    let (Some((field, Value::String(words))), None) = (fields.next(), fields.next()) else { return None };
    (ANSWER_FIELDS.contains(&field.as_str()) && !words.trim().is_empty()).then(|| words.clone())
}

enum Said {
    Words(String),
    Call { name: String, input: Value },
}

/// The objects of the first run of JSON that means something: several may follow each other, but what comes behind other
/// words is no longer the answer.
fn objects(text: &str) -> Vec<Said> {
    for (start, _) in text.match_indices(['{', '[']).take(BEGINNINGS_MAX) {
        let mut stream = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
        let Some(Ok(value)) = stream.next() else { continue };
        let mut found = meant(&value);
        if found.is_empty() {
            continue;
        }
        let mut end = start + stream.byte_offset();
        loop {
            let rest = text[end..].trim_start_matches([' ', '\t', '\r', '\n', ',']);
            let mut stream = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
            let Some(Ok(value @ (Value::Object(_) | Value::Array(_)))) = stream.next() else { return found };
            found.extend(meant(&value));
            end = text.len() - rest.len() + stream.byte_offset();
        }
    }
    Vec::new()
}

fn meant(value: &Value) -> Vec<Said> {
    match value {
        Value::Array(list) => list.iter().flat_map(meant).collect(),
        Value::Object(object) => meant_by(object),
        _ => Vec::new(),
    }
}

fn meant_by(object: &Map<String, Value>) -> Vec<Said> {
    if let Some(list @ Value::Array(_)) = object.get("calls").or_else(|| object.get("tool_calls")) {
        return words_of(object).into_iter().chain(meant(list)).collect();
    }
    if let Some(function @ Value::Object(_)) = object.get("function") {
        return meant(function);
    }
    let name = ["tool", "name", "tool_name"].iter().find_map(|field| object.get(*field)?.as_str());
    let Some(name) = name.filter(|name| !matches!(*name, "" | "none" | "null" | "answer")) else {
        return words_of(object).into_iter().collect();
    };
    let given = INPUT_FIELDS.iter().find_map(|field| object.get(*field));
    let input = match given {
        Some(Value::String(text)) => input_of(text),
        Some(input @ Value::Object(_)) => input.clone(),
        Some(_) => json!({}),
        // The fields stand beside the name.
        None => {
            let own = |name: &str| matches!(name, "tool" | "name" | "tool_name" | "say" | "id" | "type");
            let fields = object.iter().filter(|(name, _)| !own(name));
            Value::Object(fields.map(|(name, value)| (name.clone(), value.clone())).collect())
        }
    };
    let say = object.get("say").and_then(Value::as_str).map(|words| Said::Words(words.to_owned()));
    say.into_iter().chain([Said::Call { name: name.to_owned(), input }]).collect()
}

fn words_of(object: &Map<String, Value>) -> Option<Said> {
    let words = ANSWER_FIELDS.iter().find_map(|field| object.get(*field)?.as_str());
    words.map(|words| Said::Words(words.to_owned()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &str) -> Result<Value, String> {
        let mut content = parse(text, &Ids::of(&Map::new()))?;
        for block in content.iter_mut().filter_map(Value::as_object_mut) {
            block.shift_remove("id");
            block.shift_remove("type");
        }
        Ok(Value::Array(content))
    }

    #[test]
    fn what_stands_around_the_object_does_not_matter() {
        let call = json!([{"name": "bash", "input": {"command": "ls {a}"}}]);
        for text in [
            r#"{"tool":"bash","input":{"command":"ls {a}"}}"#,
            "```json\n{\"tool\": \"bash\", \"input\": {\"command\": \"ls {a}\"}}\n```\nThat should do it.",
            "Sure! I will use {braces}.\n{\"tool\":\"bash\",\"command\":\"ls {a}\"}",
            "<think>maybe {\"x\": 1}</think> {\"name\": \"bash\", \"arguments\": \"{\\\"command\\\": \\\"ls {a}\\\"}\"}",
            r#"[{"type":"function","function":{"name":"bash","parameters":{"command":"ls {a}"}}}]"#,
            r#"{"tool_calls":[{"tool":"bash","args":{"command":"ls {a}"}}]}"#,
        ] {
            assert_eq!(read(text), Ok(call.clone()), "{text}");
        }
    }

    #[test]
    fn several_calls_are_taken_but_not_what_comes_behind_an_invented_result() {
        let text = "{\"say\":\"Both.\",\"tool\":\"a\",\"input\":{}}\n{\"tool\":\"b\",\"input\":{}}\nResult of b:\n{\"tool\":\"c\"}";
        let expected = json!([{"text": "Both."}, {"name": "a", "input": {}}, {"name": "b", "input": {}}]);
        assert_eq!(read(text), Ok(expected));
        let spoken = r#"{"tool":"a","input":{}} {"answer":"It is done."}"#;
        assert_eq!(read(spoken), Ok(json!([{"name": "a", "input": {}}])));
    }

    #[test]
    fn an_answer_that_was_cut_keeps_its_words_and_a_call_that_was_cut_is_none() {
        assert_eq!(cut_answer("{\"answer\": \"It is 12").as_deref(), Some("It is 12"));
        assert_eq!(cut_answer("{\"answer\": \"a \\\"b\\").as_deref(), Some("a \"b"));
        for text in
            ["{\"tool\":\"bash\",\"input\":{\"command\":\"rm", "{\"answer\":", "words", "{\"answer\":\"a\"}"]
        {
            assert_eq!(cut_answer(text), None, "{text}");
        }
    }

    #[test]
    fn words_are_an_answer_and_half_an_object_is_none() {
        assert_eq!(read(" Hello. "), Ok(json!([{"text": "Hello."}])));
        assert_eq!(read(r#"{"answer":"Hi."}"#), Ok(json!([{"text": "Hi."}])));
        assert_eq!(read(r#"{"tool":"none","answer":"Hi."}"#), Ok(json!([{"text": "Hi."}])));
        for text in ["", " \n", r#"{"tool":"bash","input":{"command":"#, r#"{"colour":"red"}"#] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_fail_otherwise_than_by_saying_so(
            text in "\\PC{0,80}", braces in "[{}\\[\\]\":,a-z0-9 ]{0,60}",
        ) {
            for text in [text, braces] {
                if let Ok(content) = parse(&text, &Ids::of(&Map::new())) {
                    let is_sound = |block: &Value| block["type"] == "text" || block["input"].is_object();
                    prop_assert!(content.iter().all(is_sound));
                }
            }
        }
    }
}
