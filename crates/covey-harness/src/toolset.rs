//! The six tools as the model sees them, and the check of a call before it becomes a step.
//!
//! The schemas are part of the cached prefix: their text is the same bytes in every request of every
//! session. What does not belong here: running a tool.

use serde_json::{Map, Value, json};

/// Names of all tools, in the order in which they are offered.
pub const TOOL_NAMES: [&str; 6] = ["bash", "read", "write", "edit", "glob", "grep"];
/// Fields that no tool has and that mean nothing to any.
const IGNORED_FIELDS: [&str; 1] = ["description"];

/// The definitions of the enabled tools, in fixed order.
pub fn definitions(enabled: &dyn Fn(&str) -> bool) -> Vec<Value> {
    TOOL_NAMES.iter().filter(|name| enabled(name)).map(|name| definition(name)).collect()
}

fn definition(name: &str) -> Value {
    let (description, properties, required): (&str, Value, &[&str]) = match name {
        "bash" => (
            "Runs a command in a persistent shell in the home directory's sandbox. The working directory, \
             environment and background jobs survive from call to call; `restart` begins a new shell. There \
             is no terminal: standard input is empty. A command is killed after `timeout_ms` (default 120000, \
             at most 600000). Long output is cut in the middle and its full text kept in a file that the \
             result names. Between calls the sandbox is frozen, background jobs included, unless \
             `keep_running` is true.",
            json!({
                "command": {"type": "string", "description": "The command, in the language of bash."},
                "restart": {"type": "boolean", "description": "Begin a new shell first."},
                "timeout_ms": {"type": "integer", "minimum": 1, "maximum": 600_000},
                "keep_running": {"type": "boolean", "description": "Do not freeze the sandbox after this call."},
            }),
            &[],
        ),
        "read" => (
            "Reads a file. Text comes with line numbers; pictures are shown. `view_range` is [first, last] \
             line, counted from 1; -1 as last means to the end.",
            json!({
                "file_path": {"type": "string"},
                "view_range": {
                    "type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2,
                },
            }),
            &["file_path"],
        ),
        "write" => (
            "Writes a whole file, creating directories as needed. An existing file must have been read before, \
             and not have changed since.",
            json!({"file_path": {"type": "string"}, "content": {"type": "string"}}),
            &["file_path", "content"],
        ),
        "edit" => (
            "Replaces `old_string` by `new_string` in a file that was read before. `old_string` must occur \
             exactly once, unless `replace_all` is true.",
            json!({
                "file_path": {"type": "string"},
                "old_string": {"type": "string"},
                "new_string": {"type": "string"},
                "replace_all": {"type": "boolean"},
            }),
            &["file_path", "old_string", "new_string"],
        ),
        "glob" => (
            "Lists files whose path matches a pattern such as `src/**/*.rs`, newest first. `path` is where to \
             look; the home by default.",
            json!({"pattern": {"type": "string"}, "path": {"type": "string"}}),
            &["pattern"],
        ),
        _ => (
            "Searches file contents for a regular expression and shows matching lines with path and line \
             number. `path` is a file or directory; the home by default.",
            json!({"pattern": {"type": "string"}, "path": {"type": "string"}}),
            &["pattern"],
        ),
    };
    json!({
        "name": name,
        "description": description,
        "input_schema": {"type": "object", "properties": properties, "required": required},
    })
}

/// Checks a call against the definitions; of a client's own tool only what every JSON Schema of an object says, for
/// the rest the client knows better.
///
/// # Errors
/// A sentence for the model that says what to change.
pub fn check(
    definitions: &[Value],
    name: &str,
    input: &Value,
    is_custom: bool,
) -> Result<Map<String, Value>, String> {
    let names = || definitions.iter().filter_map(|d| d["name"].as_str()).collect::<Vec<_>>().join(", ");
    let Some(definition) = definitions.iter().find(|d| d["name"] == name) else {
        return Err(format!("There is no tool `{name}`. The tools are: {}.", names()));
    };
    let Some(input) = input.as_object() else {
        return Err(format!("The input of `{name}` must be a JSON object. Nothing was run."));
    };
    let schema = &definition["input_schema"];
    for field in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if !input.contains_key(field) {
            return Err(format!("`{name}` needs the field `{field}`. Nothing was run."));
        }
    }
    if is_custom {
        return Ok(input.clone());
    }
    for (field, value) in input {
        let Some(kind) = schema["properties"][field]["type"].as_str() else {
            // Models like to say what a call is for; that changes nothing. Anything else they mean, and a `timeout`
            // that is passed over in silence would be a command that runs for two minutes instead of two seconds.
            if IGNORED_FIELDS.contains(&field.as_str()) {
                continue;
            }
            let known = schema["properties"].as_object().into_iter().flat_map(Map::keys);
            let known = known.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            return Err(format!("`{name}` has no field `{field}`; it has {known}. Nothing was run."));
        };
        let fits = match kind {
            "string" => value.is_string(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_i64() || value.is_u64(),
            _ => value.is_array(),
        };
        if !fits && !value.is_null() {
            return Err(format!("The field `{field}` of `{name}` must be of type {kind}. Nothing was run."));
        }
    }
    if name == "bash" && !["command", "restart"].iter().any(|f| input.get(*f).is_some_and(|v| !v.is_null())) {
        return Err("`bash` needs `command`, or `restart`. Nothing was run.".to_owned());
    }
    Ok(input.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_are_the_same_bytes_every_time() {
        let text = |enabled: &dyn Fn(&str) -> bool| json!(definitions(enabled)).to_string();
        assert_eq!(text(&|_| true), text(&|_| true));
        assert_eq!(definitions(&|name| name != "bash").len(), 5);
    }

    #[test]
    fn a_bad_call_is_answered_with_what_to_change() {
        let all = definitions(&|_| true);
        let refused = |name: &str, input: Value| check(&all, name, &input, false).unwrap_err();
        assert!(refused("sh", json!({})).contains("bash, read, write, edit, glob, grep"));
        assert!(refused("read", json!({})).contains("`file_path`"));
        assert!(refused("read", json!("x")).contains("JSON object"));
        assert!(refused("write", json!({"file_path": 1, "content": ""})).contains("type string"));
        assert!(refused("bash", json!({"timeout_ms": 5})).contains("`command`"));
        let unknown = refused("bash", json!({"command": "sleep 9", "timeout": 2000}));
        assert!(unknown.contains("no field `timeout`") && unknown.contains("`timeout_ms`"), "{unknown}");
        assert!(check(&all, "bash", &json!({"command": "ls", "description": "Lists"}), false).is_ok());
        assert!(check(&all, "bash", &json!({"restart": true}), false).is_ok());
        assert!(
            check(&all, "edit", &json!({"file_path": "a", "old_string": "", "new_string": "b"}), false)
                .is_ok()
        );
    }
}
