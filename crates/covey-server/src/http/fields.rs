//! Reads request bodies and queries field by field, so that an error names the field.
//!
//! Unknown fields are let pass (the SDKs send more than is used here); a known field of the wrong type, and a
//! known feature that Covey does not have, are refused. Nothing is silently ignored that would change what the
//! caller gets.

use std::collections::BTreeMap;

use covey_wire::api::{METADATA_KEY_CHARS_MAX, METADATA_PAIRS_MAX, METADATA_VALUE_CHARS_MAX};
use serde_json::{Map, Value};

use super::error::{ApiError, Result};

/// An object of a request, and where it stands in it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fields<'a> {
    at: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The body itself.
    pub(super) fn body(map: &'a Map<String, Value>) -> Self {
        Self { at: "", map }
    }

    /// An object inside the body; `at` is its path.
    pub(super) fn at(at: &'a str, value: &'a Value) -> Result<Self> {
        match value {
            Value::Object(map) => Ok(Self { at, map }),
            _ => Err(ApiError::invalid(format!("`{at}`: expected an object"))),
        }
    }

    pub(super) fn path(&self, name: &str) -> String {
        if self.at.is_empty() { name.to_owned() } else { format!("{}.{name}", self.at) }
    }

    pub(super) fn wrong(&self, name: &str, expected: &str) -> ApiError {
        ApiError::invalid(format!("`{}`: expected {expected}", self.path(name)))
    }

    fn missing(&self, name: &str) -> ApiError {
        ApiError::invalid(format!("`{}` is missing", self.path(name)))
    }

    /// The value, when it is there and not null.
    pub(super) fn value(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// Whether the field is there, null included.
    pub(super) fn has(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(name, "a string")),
        }
    }

    pub(super) fn required_text(&self, name: &str) -> Result<&'a str> {
        self.text(name)?.ok_or_else(|| self.missing(name))
    }

    /// A text with something in it and at most `chars_max` characters.
    pub(super) fn name(&self, name: &str, chars_max: usize) -> Result<Option<&'a str>> {
        let text = self.text(name)?;
        if text.is_some_and(|text| text.trim().is_empty() || text.chars().count() > chars_max) {
            return Err(self.wrong(name, &format!("1 to {chars_max} characters")));
        }
        Ok(text)
    }

    pub(super) fn required_name(&self, name: &str, chars_max: usize) -> Result<&'a str> {
        self.name(name, chars_max)?.ok_or_else(|| self.missing(name))
    }

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.wrong(name, "true or false")),
        }
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<u64>> {
        match self.value(name) {
            None => Ok(None),
            Some(value) => {
                value.as_u64().map(Some).ok_or_else(|| self.wrong(name, "a whole number of at least 0"))
            }
        }
    }

    pub(super) fn list(&self, name: &str) -> Result<Option<&'a [Value]>> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(_) => Err(self.wrong(name, "a list")),
        }
    }

    pub(super) fn required_list(&self, name: &str) -> Result<&'a [Value]> {
        self.list(name)?.ok_or_else(|| self.missing(name))
    }

    /// The pairs of a metadata field; a null value asks for the pair's removal (updates only).
    pub(super) fn metadata(&self, name: &str) -> Result<Option<BTreeMap<String, Option<String>>>> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let Value::Object(map) = value else { return Err(self.wrong(name, "an object of strings")) };
        let mut pairs = BTreeMap::new();
        for (key, value) in map {
            if key.is_empty() || key.chars().count() > METADATA_KEY_CHARS_MAX {
                return Err(self.wrong(name, &format!("keys of 1 to {METADATA_KEY_CHARS_MAX} characters")));
            }
            let value = match value {
                Value::Null => None,
                Value::String(text) if text.chars().count() <= METADATA_VALUE_CHARS_MAX => Some(text.clone()),
                _ => {
                    let expected = format!("a string of at most {METADATA_VALUE_CHARS_MAX} characters");
                    return Err(self.wrong(&format!("{name}.{key}"), &expected));
                }
            };
            pairs.insert(key.clone(), value);
        }
        Ok(Some(pairs))
    }

    /// Refuses a feature that Covey does not have, unless the field asks for nothing of it.
    pub(super) fn unsupported(&self, name: &str) -> Result<()> {
        let asks = match self.value(name) {
            None => false,
            Some(Value::Array(list)) => !list.is_empty(),
            Some(_) => true,
        };
        if asks {
            let path = self.path(name);
            return Err(ApiError::invalid(format!(
                "`{path}` is not supported by this version of Covey; leave it out"
            )));
        }
        Ok(())
    }
}

/// Applies a metadata patch to what is stored.
pub(super) fn patch_metadata(
    stored: &mut BTreeMap<String, String>,
    patch: BTreeMap<String, Option<String>>,
) -> Result<()> {
    for (key, value) in patch {
        match value {
            Some(value) => stored.insert(key, value),
            None => stored.remove(&key),
        };
    }
    if stored.len() > METADATA_PAIRS_MAX {
        return Err(ApiError::invalid(format!("`metadata`: expected at most {METADATA_PAIRS_MAX} pairs")));
    }
    Ok(())
}

/// The parameters behind the `?`.
#[derive(Debug, Default)]
pub(super) struct Query {
    pairs: Vec<(String, String)>,
}

impl Query {
    pub(super) fn new(pairs: Vec<(String, String)>) -> Self {
        Self { pairs }
    }

    pub(super) fn one(&self, name: &str) -> Option<&str> {
        self.pairs.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// `name[]=a&name[]=b`, as the SDKs write it, and `name=a,b`, as people do.
    pub(super) fn many(&self, name: &str) -> Vec<&str> {
        let matches = |key: &str| key == name || key.strip_suffix("[]") == Some(name);
        let values = self.pairs.iter().filter(|(key, _)| matches(key));
        values.flat_map(|(_, value)| value.split(',')).filter(|value| !value.is_empty()).collect()
    }

    pub(super) fn flag(&self, name: &str) -> Result<bool> {
        match self.one(name) {
            None | Some("" | "false") => Ok(false),
            Some("true") => Ok(true),
            Some(_) => Err(ApiError::invalid(format!("`{name}`: expected true or false"))),
        }
    }

    /// Refuses filters that Covey does not have: a list that ignored one would show too much.
    pub(super) fn unsupported(&self, names: &[&str]) -> Result<()> {
        let asked = |key: &str| names.iter().any(|name| key == *name || key.starts_with(&format!("{name}[")));
        match self.pairs.iter().find(|(key, _)| asked(key)) {
            Some((key, _)) => Err(ApiError::invalid(format!(
                "the filter `{key}` is not supported by this version of Covey; leave it out"
            ))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn message(error: ApiError) -> String {
        format!("{error:?}")
    }

    #[test]
    fn a_wrong_field_is_named_with_its_path() {
        let body = json!({"a": 1, "b": {"c": true}, "d": "x", "e": null, "metadata": {"k": 5}});
        let fields = Fields::body(body.as_object().unwrap());
        assert!(message(fields.text("a").unwrap_err()).contains("`a`: expected a string"));
        let inner = Fields::at("b", &body["b"]).unwrap();
        assert!(message(inner.number("c").unwrap_err()).contains("`b.c`: expected a whole number"));
        assert!(message(Fields::at("d", &body["d"]).unwrap_err()).contains("`d`: expected an object"));
        assert!(message(fields.required_text("e").unwrap_err()).contains("`e` is missing"));
        assert!(
            message(fields.metadata("metadata").unwrap_err()).contains("`metadata.k`: expected a string")
        );
        assert!(message(fields.unsupported("d").unwrap_err()).contains("`d` is not supported"));
        assert!(fields.unsupported("e").is_ok() && fields.has("e") && !fields.has("f"));
    }

    #[test]
    fn a_metadata_patch_adds_replaces_and_removes_up_to_the_limit() {
        let mut stored = BTreeMap::from([("a".to_owned(), "1".to_owned()), ("b".to_owned(), "2".to_owned())]);
        let patch = [("a", None), ("b", Some("3")), ("c", Some("4"))];
        let patch = patch.into_iter().map(|(k, v)| (k.to_owned(), v.map(str::to_owned))).collect();
        patch_metadata(&mut stored, patch).unwrap();
        assert_eq!(stored.iter().map(|(k, v)| format!("{k}{v}")).collect::<String>(), "b3c4");
        let many = (0..METADATA_PAIRS_MAX).map(|n| (n.to_string(), Some(String::new()))).collect();
        assert!(patch_metadata(&mut stored, many).is_err());
    }

    #[test]
    fn both_forms_of_a_list_in_a_query_are_read() {
        let pair = |k: &str, v: &str| (k.to_owned(), v.to_owned());
        let query =
            Query::new(vec![pair("types[]", "a"), pair("types", "b,c"), pair("created_at[gte]", "x")]);
        assert_eq!(query.many("types"), ["a", "b", "c"]);
        assert!(query.unsupported(&["created_at"]).is_err());
        assert!(query.unsupported(&["created"]).is_ok());
    }
}
