//! Who is asked: a model's name leads to a provider, and a provider that does not answer to the next one.
//!
//! The order is a function of the file and the model's name. Which of them a request goes to is decided by the session,
//! from its journal; nothing is remembered here, so every server and every restart asks the same one. What does not
//! belong here: when to go to the next (`covey_harness::retry`).

use std::path::Path;

use serde_json::json;

use crate::config::{DetailedRule, ModelRule, ModelsFile, ModelsFileError, Provider, read_text};
use crate::dialect::{Dialect, json as json_dialect};
use crate::endpoint::{CallLimits, Credential, Endpoint};
use crate::secret::Secret;
use crate::wire::Wire;
use crate::{Model, ModelCall, ModelDelta, ModelFailure, ModelRequest, Target};

/// Bytes of a key file that are read.
const KEY_FILE_BYTES_MAX: u64 = 64 * 1024;
/// The vendors' own endpoints.
const ANTHROPIC_URL: &str = "https://api.anthropic.com";
const OPENAI_URL: &str = "https://api.openai.com";

#[derive(Debug)]
struct Ready {
    config: Provider,
    endpoint: Endpoint,
}

/// All providers of a models file.
#[derive(Debug)]
pub struct Router {
    providers: Vec<Ready>,
}

/// A provider with the model that it is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Leg {
    provider: usize,
    model: String,
    dialect: Dialect,
    context_tokens: Option<u64>,
}

impl Router {
    /// Makes the clients. `directory` is where the file lies; `variable` looks an environment variable up.
    ///
    /// # Errors
    /// When a key file cannot be read, or a URL or key is not usable. A variable that is not set is no error: the first
    /// call says so, and [`Router::lacking_keys`] before.
    pub fn new(
        file: ModelsFile,
        directory: &Path,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, ModelsFileError> {
        let ready = |config: Provider| {
            let secret = match (&config.api_key_env, &config.api_key_file) {
                (Some(name), _) => variable(name).map(|key| Secret::new(&key)),
                (None, Some(path)) => {
                    Some(Secret::new(&read_text(&directory.join(path), KEY_FILE_BYTES_MAX)?))
                }
                (None, None) => None,
            };
            let credential = secret.map(|secret| match config.bearer {
                true => Credential::Bearer(secret),
                false => Credential::ApiKey(secret),
            });
            let vendors = if config.kind == Wire::Messages { ANTHROPIC_URL } else { OPENAI_URL };
            let url = config.base_url.as_deref().unwrap_or(vendors);
            let endpoint = Endpoint::new(config.kind, url, credential, CallLimits::default())
                .map_err(|source| ModelsFileError::Endpoint { provider: config.name.clone(), source })?;
            Ok(Ready { config, endpoint })
        };
        Ok(Self { providers: file.providers.into_iter().map(ready).collect::<Result<_, _>>()? })
    }

    /// Names of the providers whose calls would all fail for want of a key.
    pub fn lacking_keys(&self) -> impl Iterator<Item = &str> {
        self.providers
            .iter()
            .filter(|ready| ready.endpoint.lacks_key())
            .map(|ready| ready.config.name.as_str())
    }

    /// Everybody who answers for this model, in order: the first provider that serves it, and its fallbacks.
    fn legs(&self, model: &str) -> Vec<Leg> {
        let first = self.providers.iter().position(|ready| ready.config.rule(model).is_some());
        let mut next = first.map(|provider| (provider, model.to_owned()));
        let mut legs: Vec<Leg> = Vec::new();
        while let Some((provider, model)) = next.take() {
            if legs.iter().any(|leg| leg.provider == provider) {
                break;
            }
            let config = &self.providers[provider].config;
            // A fallback need not list the model that it is asked for.
            let rule = match config.rule(&model) {
                Some(ModelRule::Detailed(rule)) => rule.clone(),
                _ => DetailedRule { name: String::new(), dialect: None, context_tokens: None },
            };
            next = config.fallback.as_ref().and_then(|fallback| {
                let at = self.providers.iter().position(|ready| ready.config.name == fallback.provider)?;
                Some((at, fallback.model.clone().unwrap_or_else(|| model.clone())))
            });
            legs.push(Leg {
                provider,
                model,
                dialect: rule.dialect.unwrap_or(config.dialect),
                context_tokens: rule.context_tokens.or(config.context_tokens),
            });
        }
        legs
    }

    /// Which of the legs is wanted; the first when it is not one of them (any more).
    fn wanted(&self, legs: &[Leg], wanted: Option<&str>) -> usize {
        let is_wanted = |leg: &Leg| Some(self.name(leg)) == wanted;
        legs.iter().position(is_wanted).unwrap_or(0)
    }

    fn name(&self, leg: &Leg) -> &str {
        &self.providers[leg.provider].config.name
    }
}

impl Model for Router {
    fn target(&self, model: &str, wanted: Option<&str>) -> Target {
        let legs = self.legs(model);
        let at = self.wanted(&legs, wanted);
        let Some(leg) = legs.get(at) else { return Target::default() };
        let next = (legs.len() > 1).then(|| self.name(&legs[(at + 1) % legs.len()]).to_owned());
        Target {
            provider: Some(self.name(leg).to_owned()),
            wire: self.providers[leg.provider].config.kind.name(),
            context_tokens: leg.context_tokens,
            next,
        }
    }

    fn call<'a>(
        &'a self,
        request: &'a ModelRequest,
        on_delta: &'a (dyn Fn(ModelDelta) + Send + Sync),
    ) -> ModelCall<'a> {
        Box::pin(async move {
            let model = request.body.get("model").and_then(|model| model.as_str()).unwrap_or_default();
            let mut legs = self.legs(model);
            if legs.is_empty() {
                let detail =
                    format!("no provider of the models file serves {model}; add it to the `models` of one");
                return Err(ModelFailure::Rejected { status: 404, detail, request_id: None });
            }
            let leg = legs.swap_remove(self.wanted(&legs, request.provider.as_deref()));
            let endpoint = &self.providers[leg.provider].endpoint;
            let mut body = request.body.clone();
            body.insert("model".to_owned(), json!(leg.model));
            match leg.dialect {
                Dialect::Native => endpoint.ask(&body, None, on_delta).await,
                Dialect::Json => json_dialect::ask(endpoint, &body, on_delta).await,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn router() -> Router {
        let text = r#"
            [[providers]]
            name = "a"
            kind = "anthropic"
            base_url = "http://127.0.0.1:1"
            models = ["claude-*"]
            fallback = { provider = "b", model = "gpt" }
            [[providers]]
            name = "b"
            kind = "openai-chat"
            base_url = "http://127.0.0.1:1"
            models = [{ name = "gpt", context_tokens = 7 }]
            fallback = { provider = "c", model = "tiny" }
            [[providers]]
            name = "c"
            kind = "openai-responses"
            base_url = "http://127.0.0.1:1"
            models = ["other"]
            dialect = "json"
            fallback = { provider = "a" }
        "#;
        Router::new(ModelsFile::parse(text, false).unwrap(), Path::new("/"), &|_| None).unwrap()
    }

    #[test]
    fn the_order_begins_with_who_serves_the_model_and_follows_the_fallbacks_round() {
        let router = router();
        let order = |model: &str| {
            let mut wanted = None;
            let mut order = Vec::new();
            for _ in 0..4 {
                let target = router.target(model, wanted.as_deref());
                order.push(format!("{} {}", target.provider.unwrap(), target.wire));
                wanted = target.next;
            }
            order
        };
        let expected = ["a anthropic", "b openai-chat", "c openai-responses", "a anthropic"];
        assert_eq!(order("claude-x"), expected);
        assert_eq!(order("other")[..2], ["c openai-responses", "a anthropic"]);
        assert_eq!(router.target("claude-x", Some("b")).context_tokens, Some(7));
        assert_eq!(router.target("claude-x", Some("gone")).provider.as_deref(), Some("a"));
        let legs = router.legs("claude-x");
        let models: Vec<&str> = legs.iter().map(|leg| leg.model.as_str()).collect();
        assert_eq!((models, legs[2].dialect), (vec!["claude-x", "gpt", "tiny"], Dialect::Json));
        assert!(router.legs("nobody").is_empty());
    }

    #[test]
    fn a_key_comes_from_a_file_beside_the_models_file_or_from_the_environment() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("key"), "secret\n").unwrap();
        let of = |key: &str| {
            let text = format!(
                "[[providers]]\nname = \"a\"\nkind = \"openai-chat\"\nbase_url = \"http://h\"\n{key}"
            );
            ModelsFile::parse(&text, false).unwrap()
        };
        let none = |_: &str| None;
        assert!(Router::new(of("api_key_file = \"key\""), dir.path(), &none).is_ok());
        let error = Router::new(of("api_key_file = \"absent\""), dir.path(), &none).unwrap_err().to_string();
        assert!(error.contains("absent"), "{error}");
        let env = |name: &str| (name == "K").then(|| "s".to_owned());
        let router = Router::new(of("api_key_env = \"K\""), dir.path(), &env).unwrap();
        assert_eq!(router.lacking_keys().count(), 0);
    }
}
