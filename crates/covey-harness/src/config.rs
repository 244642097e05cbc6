//! What the loop reads of an agent's document. Everything else in it is kept and not looked at.

use serde_json::{Value, json};

use crate::toolset;

/// Tokens one answer may have when the agent does not say.
pub const OUTPUT_TOKENS_DEFAULT: u64 = 16_000;

/// Tokens that the model's context holds when the agent does not say.
pub const CONTEXT_TOKENS_DEFAULT: u64 = 200_000;

/// An answer takes at most this part of the context, when the agent does not say.
const ANSWER_SHARE: u64 = 4;

/// How the toolset is named in an agent's `tools`.
const TOOLSET_TYPE: &str = "agent_toolset_20260401";

/// What every agent is told about where it lives. Part of the cached prefix: no date, no id, no path that
/// differs between sessions.
const HOME_TEXT: &str = "\
You work in a sandbox. Your home directory is /home/agent. It is kept: whatever you leave there, installed \
tools, caches, notes and uncommitted work, is there again tomorrow, also after the sandbox or its host was \
lost. Files outside of it and running processes are not kept: the sandbox may be replaced between any two \
calls.

A result that says `interrupted, may have had effects` means that the call was started and its end is \
unknown. It is never run again by itself. Look at what it left behind before you repeat it.

If files of earlier calls were lost with a host, you are told which calls. Check before you build on them.";

/// An agent's configuration, as the loop needs it.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentConfig {
    /// The provider's name of the model.
    pub model: String,
    /// The agent's own system prompt.
    pub system: Option<String>,
    /// Tokens one answer may have.
    pub max_tokens: u64,
    /// Tokens that the model's context holds.
    pub context_tokens: u64,
    /// Definitions of the enabled tools, those that a client runs behind ours.
    pub tools: Vec<Value>,
    /// Who runs which of them.
    pub rules: ToolRules,
    /// Whether the agent itself says how much the context holds, and how much an answer may have.
    says: Says,
}

/// What an agent's document says of its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Says {
    context_tokens: bool,
    max_tokens: bool,
}

/// How calls of the tools are treated.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ToolRules {
    /// Names of tools whose calls run only when a client says so.
    asks: Vec<String>,
    /// Names of tools that a client runs.
    custom: Vec<String>,
}

impl ToolRules {
    /// Whether a call of the tool waits for a client's word.
    pub fn asks(&self, tool: &str) -> bool {
        self.asks.iter().any(|name| name == tool)
    }

    /// Whether a client runs the tool.
    pub fn is_custom(&self, tool: &str) -> bool {
        self.custom.iter().any(|name| name == tool)
    }
}

/// An agent document that the loop cannot work with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidConfig {
    /// No model.
    #[error("the agent names no model; set `model` to a name, or to an object with `id`")]
    NoModel,
}

impl AgentConfig {
    /// Reads an agent's document: `model` (a name or `{id, max_tokens?, context_tokens?}`), `system`, and of `tools` the entry
    /// of type `agent_toolset_20260401` with its `default_config` and `configs[{name, …}]` (`enabled`,
    /// `permission_policy.type`: `always_allow` or `always_ask`), and those of type `custom`, which a client runs.
    ///
    /// # Errors
    /// When there is no model.
    pub fn from_document(document: &Value) -> Result<Self, InvalidConfig> {
        let model = &document["model"];
        let name = model.as_str().or_else(|| model["id"].as_str()).filter(|n| !n.is_empty());
        let entries = || document["tools"].as_array().into_iter().flatten();
        let mut rules = ToolRules::default();
        let mut tools = entries().find(|tool| tool["type"] == TOOLSET_TYPE).map_or_else(Vec::new, |set| {
            let own =
                |tool: &str| set["configs"].as_array().into_iter().flatten().find(|c| c["name"] == tool);
            let default = &set["default_config"];
            let enabled = |tool: &str| {
                let own = own(tool).and_then(|config| config["enabled"].as_bool());
                own.or_else(|| default["enabled"].as_bool()).unwrap_or(true)
            };
            let asks = |tool: &&str| {
                let own = own(tool).and_then(|config| config["permission_policy"]["type"].as_str());
                own.or_else(|| default["permission_policy"]["type"].as_str()) == Some("always_ask")
            };
            rules.asks = toolset::TOOL_NAMES.iter().copied().filter(asks).map(str::to_owned).collect();
            toolset::definitions(&enabled)
        });
        for tool in entries().filter(|tool| tool["type"] == "custom") {
            let Some(name) = tool["name"].as_str() else { continue };
            rules.custom.push(name.to_owned());
            tools.push(json!({
                "name": name, "description": tool["description"], "input_schema": tool["input_schema"],
            }));
        }
        let number = |field: &str| model[field].as_u64().filter(|n| *n > 0);
        let (context_tokens, max_tokens) = (number("context_tokens"), number("max_tokens"));
        let says = Says { context_tokens: context_tokens.is_some(), max_tokens: max_tokens.is_some() };
        let config = Self {
            model: name.ok_or(InvalidConfig::NoModel)?.to_owned(),
            system: document["system"].as_str().filter(|s| !s.trim().is_empty()).map(str::to_owned),
            max_tokens: max_tokens.unwrap_or(OUTPUT_TOKENS_DEFAULT),
            context_tokens: context_tokens.unwrap_or(CONTEXT_TOKENS_DEFAULT),
            tools,
            rules,
            says,
        };
        Ok(config.with_bounded_answer())
    }

    /// What the operator says of the model's context, unless the agent says it itself.
    #[must_use]
    pub fn with_context_default(mut self, tokens: Option<u64>) -> Self {
        if let Some(tokens) = tokens.filter(|_| !self.says.context_tokens) {
            self.context_tokens = tokens;
        }
        self.with_bounded_answer()
    }

    /// An answer of the default length must leave room for the conversation.
    fn with_bounded_answer(mut self) -> Self {
        if !self.says.max_tokens {
            self.max_tokens = OUTPUT_TOKENS_DEFAULT.min((self.context_tokens / ANSWER_SHARE).max(1));
        }
        self
    }

    /// The system prompt's blocks. The last one carries the cache point that covers tools and system.
    pub fn system_blocks(&self) -> Value {
        let mut texts = Vec::new();
        if self.tools.iter().any(|tool| !self.rules.is_custom(tool["name"].as_str().unwrap_or_default())) {
            texts.push(HOME_TEXT);
        }
        texts.extend(self.system.as_deref());
        let last = texts.len().saturating_sub(1);
        texts
            .iter()
            .enumerate()
            .map(|(i, text)| {
                if i == last {
                    json!({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}})
                } else {
                    json!({"type": "text", "text": text})
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_come_from_the_toolset_entry_alone() {
        let config =
            |tools: Value| AgentConfig::from_document(&json!({"model": "m", "tools": tools})).unwrap();
        let names = |c: AgentConfig| {
            c.tools.iter().map(|t| t["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert!(names(config(json!([]))).is_empty());
        assert_eq!(names(config(json!([{"type": TOOLSET_TYPE}]))).len(), 6);
        let some = json!([{"type": TOOLSET_TYPE, "default_config": {"enabled": false},
                           "configs": [{"name": "read", "enabled": true}]}]);
        assert_eq!(names(config(some)), ["read"]);
    }

    #[test]
    fn a_tools_own_policy_wins_over_that_of_the_set_and_a_clients_tools_come_last() {
        let tools = json!([
            {"type": TOOLSET_TYPE, "default_config": {"permission_policy": {"type": "always_ask"}},
             "configs": [{"name": "read", "permission_policy": {"type": "always_allow"}}]},
            {"type": "custom", "name": "deploy", "description": "d", "input_schema": {"type": "object"}},
        ]);
        let config = AgentConfig::from_document(&json!({"model": "m", "tools": tools})).unwrap();
        let asking: Vec<_> = toolset::TOOL_NAMES.into_iter().filter(|name| config.rules.asks(name)).collect();
        assert_eq!(asking, ["bash", "write", "edit", "glob", "grep"]);
        assert!(config.rules.is_custom("deploy") && !config.rules.is_custom("bash"));
        let last = json!({"name": "deploy", "description": "d", "input_schema": {"type": "object"}});
        assert_eq!(config.tools.last(), Some(&last));
        let only = json!([{"type": "custom", "name": "deploy"}]);
        let config = AgentConfig::from_document(&json!({"model": "m", "tools": only})).unwrap();
        assert!(config.system_blocks().as_array().unwrap().is_empty(), "no sandbox, no home");
    }

    #[test]
    fn the_operator_says_how_large_the_context_is_unless_the_agent_does() {
        let of = |model: Value, tokens| {
            let config = AgentConfig::from_document(&json!({"model": model})).unwrap();
            let config = config.with_context_default(tokens);
            (config.context_tokens, config.max_tokens)
        };
        assert_eq!(of(json!("m"), None), (CONTEXT_TOKENS_DEFAULT, OUTPUT_TOKENS_DEFAULT));
        assert_eq!(of(json!("m"), Some(8192)), (8192, 2048));
        assert_eq!(of(json!({"id": "m", "max_tokens": 9}), Some(8192)), (8192, 9));
        assert_eq!(of(json!({"id": "m", "context_tokens": 4000}), Some(8192)), (4000, 1000));
    }

    #[test]
    fn the_model_may_be_a_name_or_an_object() {
        let model = |m: Value| AgentConfig::from_document(&json!({"model": m})).map(|c| c.model);
        assert_eq!(model(json!("a")).unwrap(), "a");
        assert_eq!(model(json!({"id": "b", "speed": "standard"})).unwrap(), "b");
        assert_eq!(model(json!(null)), Err(InvalidConfig::NoModel));
    }
}
