//! The models file: which providers there are, which models each one serves, and who is asked when one does not answer.
//!
//! TOML, or JSON when its name ends in `.json` (`docs/operating/models.md`). Unknown keys are refused. Keys of providers
//! are never in it: only where they are. What does not belong here: asking anybody.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::dialect::Dialect;
use crate::wire::Wire;

/// A file with more bytes than this is no models file.
const FILE_BYTES_MAX: u64 = 1024 * 1024;
/// Providers that one file may name.
pub const PROVIDERS_MAX: usize = 64;

/// The file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelsFile {
    /// In the order in which they are looked through for a model.
    pub providers: Vec<Provider>,
}

/// Somebody who answers for models.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provider {
    /// For the journal, for events and for `fallback`.
    pub name: String,
    /// The wire.
    pub kind: Wire,
    /// With or without `/v1` at its end; the vendor's own when absent.
    #[serde(default)]
    pub base_url: Option<String>,
    /// Environment variable that holds the key.
    #[serde(default)]
    pub api_key_env: Option<String>,
    /// File that holds the key; relative to the models file.
    #[serde(default)]
    pub api_key_file: Option<PathBuf>,
    /// `anthropic` only: the key goes as `Authorization: Bearer` instead of `x-api-key`.
    #[serde(default)]
    pub bearer: bool,
    /// What it serves; everything when absent.
    #[serde(default = "everything")]
    pub models: Vec<ModelRule>,
    /// For all its models that say nothing else.
    #[serde(default)]
    pub dialect: Dialect,
    /// Tokens that the context of its models holds, when neither the agent nor a rule says.
    #[serde(default)]
    pub context_tokens: Option<u64>,
    /// Who is asked when this one does not answer.
    #[serde(default)]
    pub fallback: Option<Fallback>,
}

/// Models by their name.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum ModelRule {
    /// A name, or a pattern with `*`.
    Name(String),
    /// The same with what differs for these models.
    Detailed(DetailedRule),
}

/// A rule with what differs from the provider's.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DetailedRule {
    /// A name, or a pattern with `*`.
    pub name: String,
    /// How these models are told of their tools.
    #[serde(default)]
    pub dialect: Option<Dialect>,
    /// Tokens that their context holds.
    #[serde(default)]
    pub context_tokens: Option<u64>,
}

/// Somebody else to ask.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fallback {
    /// The provider's name.
    pub provider: String,
    /// The model there; the same name when absent.
    #[serde(default)]
    pub model: Option<String>,
}

fn everything() -> Vec<ModelRule> {
    vec![ModelRule::Name("*".into())]
}

impl ModelRule {
    /// The name or pattern.
    pub fn pattern(&self) -> &str {
        match self {
            Self::Name(name) | Self::Detailed(DetailedRule { name, .. }) => name,
        }
    }
}

impl Provider {
    /// The first rule for a model of this name.
    pub fn rule(&self, model: &str) -> Option<&ModelRule> {
        self.models.iter().find(|rule| matches(rule.pattern(), model))
    }
}

/// Whether a name fits a pattern in which `*` stands for anything.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// A models file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelsFileError {
    /// It, or a key file that it names, cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It is not what it should be.
    #[error("{path} is no models file: {reason}")]
    Parse {
        /// The file.
        path: String,
        /// Where and why.
        reason: String,
    },
    /// It contradicts itself.
    #[error("the models file does not work: {0}")]
    Invalid(String),
    /// A provider's URL or key is not usable.
    #[error("the provider {provider} of the models file is not usable: {source}")]
    Endpoint {
        /// Its name.
        provider: String,
        /// What is wrong.
        #[source]
        source: crate::endpoint::EndpointError,
    },
}

impl ModelsFile {
    /// Reads a file.
    ///
    /// # Errors
    /// When it cannot be read, is neither TOML nor JSON of this form, or names what is not there.
    pub fn read(path: &Path) -> Result<Self, ModelsFileError> {
        let text = read_text(path, FILE_BYTES_MAX)?;
        let is_json = path.extension().is_some_and(|extension| extension == "json");
        Self::parse(&text, is_json).map_err(|error| match error {
            ModelsFileError::Parse { reason, .. } => {
                ModelsFileError::Parse { path: path.display().to_string(), reason }
            }
            other => other,
        })
    }

    /// Reads a file's text.
    ///
    /// # Errors
    /// As [`ModelsFile::read`].
    pub fn parse(text: &str, is_json: bool) -> Result<Self, ModelsFileError> {
        let parsed: Result<Self, String> = if is_json {
            serde_json::from_str(text).map_err(|e| e.to_string())
        } else {
            toml::from_str(text).map_err(|e| e.to_string())
        };
        let file = parsed.map_err(|reason| ModelsFileError::Parse { path: "it".into(), reason })?;
        file.check().map_err(ModelsFileError::Invalid)?;
        Ok(file)
    }

    fn check(&self) -> Result<(), String> {
        if self.providers.is_empty() {
            return Err("it names no provider".into());
        }
        if self.providers.len() > PROVIDERS_MAX {
            return Err(format!("it names more than {PROVIDERS_MAX} providers"));
        }
        for (index, provider) in self.providers.iter().enumerate() {
            let name = &provider.name;
            if name.trim().is_empty() {
                return Err(format!("provider {} has no name", index + 1));
            }
            if self.providers[..index].iter().any(|earlier| earlier.name == *name) {
                return Err(format!("two providers are named {name}"));
            }
            if provider.api_key_env.is_some() && provider.api_key_file.is_some() {
                return Err(format!("{name} has both `api_key_env` and `api_key_file`"));
            }
            if provider.models.iter().any(|rule| rule.pattern().is_empty()) {
                return Err(format!("{name} has an empty name in `models`"));
            }
            let contexts = provider.models.iter().filter_map(|rule| match rule {
                ModelRule::Detailed(rule) => rule.context_tokens,
                ModelRule::Name(_) => None,
            });
            if contexts.chain(provider.context_tokens).any(|tokens| tokens == 0) {
                return Err(format!("{name} has `context_tokens = 0`; leave it out when it is not known"));
            }
            if let Some(fallback) = &provider.fallback {
                let known = self.providers.iter().any(|other| other.name == fallback.provider);
                if !known || fallback.provider == *name {
                    let other = &fallback.provider;
                    return Err(format!(
                        "{name} falls back to {other}, which is no other provider of the file"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Reads a small text file.
pub(crate) fn read_text(path: &Path, bytes_max: u64) -> Result<String, ModelsFileError> {
    use std::io::Read as _;
    let mut text = String::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(bytes_max + 1).read_to_string(&mut text))
        .and_then(|length| match length as u64 > bytes_max {
            true => Err(std::io::Error::other(format!("it has more than {bytes_max} bytes"))),
            false => Ok(text),
        })
        .map_err(|source| ModelsFileError::Read { path: path.display().to_string(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
        [[providers]]
        name = "main"
        kind = "anthropic"
        api_key_env = "MAIN_KEY"
        models = ["claude-*"]
        fallback = { provider = "second", model = "gpt-5" }

        [[providers]]
        name = "second"
        kind = "openai-responses"
        base_url = "https://api.openai.com/v1"
        api_key_file = "second.key"
        models = ["gpt-*"]

        [[providers]]
        name = "local"
        kind = "openai-chat"
        base_url = "http://127.0.0.1:8080"
        context_tokens = 8192
        models = [{ name = "smollm*", dialect = "json", context_tokens = 4096 }, "qwen*"]
    "#;

    #[test]
    fn toml_and_json_say_the_same() {
        let file = ModelsFile::parse(FILE, false).unwrap();
        let [main, second, local] = &file.providers[..] else { panic!("three providers") };
        assert_eq!((main.kind, second.kind, local.kind), (Wire::Messages, Wire::Responses, Wire::Chat));
        assert_eq!(main.fallback.as_ref().unwrap().model.as_deref(), Some("gpt-5"));
        assert!(main.rule("claude-x").is_some() && main.rule("gpt-5").is_none());
        let Some(ModelRule::Detailed(rule)) = local.rule("smollm2-135m") else { panic!("a rule") };
        assert_eq!((rule.dialect, rule.context_tokens), (Some(Dialect::Json), Some(4096)));
        let json = r#"{"providers": [{"name": "a", "kind": "openai-chat", "models": ["m"]}]}"#;
        assert_eq!(ModelsFile::parse(json, true).unwrap().providers[0].kind, Wire::Chat);
    }

    #[test]
    fn what_contradicts_itself_is_refused_by_name() {
        let refused = |text: &str| ModelsFile::parse(text, false).unwrap_err().to_string();
        let provider = |more: &str| format!("[[providers]]\nname = \"a\"\nkind = \"anthropic\"\n{more}\n");
        assert!(refused("providers = []").contains("no provider"));
        assert!(refused(&provider("").repeat(2)).contains("two providers are named a"));
        assert!(refused(&provider("fallback = { provider = \"b\" }")).contains("falls back to b"));
        assert!(refused(&provider("modles = []")).contains("modles"));
        assert!(refused(&provider("api_key_env = \"A\"\napi_key_file = \"b\"")).contains("both"));
        assert!(refused("[[providers]]\nname = \"a\"\nkind = \"gopher\"").contains("gopher"));
        assert!(refused(&provider("context_tokens = 0")).contains("context_tokens"));
    }

    #[test]
    fn a_star_stands_for_anything() {
        for (pattern, name, fits) in [
            ("*", "", true),
            ("a", "a", true),
            ("a", "ab", false),
            ("a*", "abc", true),
            ("*c", "abc", true),
            ("a*b*c", "a-b-c", true),
            ("a*b*c", "acb", false),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }
}
