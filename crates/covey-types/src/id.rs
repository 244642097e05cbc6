//! Typed identifiers.
//!
//! An id is 128 bits, printed as `<prefix>_<32 lowercase hex digits>`; the prefix names the noun, so a
//! session id pasted where an agent id belongs is refused with a sentence and not looked up. New ids are
//! UUIDv7 (they sort by creation), made by whoever owns a clock and randomness, never in this crate.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uuid::Uuid;

/// A text that is not an id of the wanted kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {article} id: expected `{prefix}_` and 32 hexadecimal digits")]
pub struct InvalidId {
    text: String,
    article: &'static str,
    prefix: &'static str,
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal, $article:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Uuid);

        impl $name {
            /// The text before the underscore.
            pub const PREFIX: &'static str = $prefix;

            /// Wraps a UUID, normally a fresh UUIDv7.
            pub const fn from_uuid(uuid: Uuid) -> Self {
                Self(uuid)
            }

            /// The 128 bits behind the text form.
            pub const fn as_uuid(&self) -> Uuid {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "_{}"), self.0.simple())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                let invalid =
                    || InvalidId { text: text.chars().take(80).collect(), article: $article, prefix: $prefix };
                let hex = text.strip_prefix(concat!($prefix, "_")).ok_or_else(invalid)?;
                // One text form for one id: hyphens, braces and capitals, which the parser takes, are refused.
                if hex.len() != 32 || !hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
                    return Err(invalid());
                }
                Uuid::try_parse(hex).map(Self).map_err(|_| invalid())
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

id!(
    /// A tenant; owns everything below, and nothing crosses its border.
    OrgId, "org", "an org"
);
id!(
    /// A versioned configuration plus exactly one home.
    AgentId, "agent", "an agent"
);
id!(
    /// What a session's sandbox is made from (limits, network, root file system).
    EnvironmentId, "env", "an environment"
);
id!(
    /// The directory tree of one agent.
    HomeId, "home", "a home"
);
id!(
    /// The append-only event log of one conversation.
    SessionId, "sesn", "a session"
);
id!(
    /// One public event of a session.
    EventId, "sevt", "an event"
);
id!(
    /// One model call or one tool call; the idempotency key of its effect.
    StepId, "step", "a step"
);
id!(
    /// A process on a host that owns sandboxes and working copies.
    RunnerId, "rnr", "a runner"
);
id!(
    /// One incarnation of isolated processes; never used for a second one.
    SandboxId, "sbx", "a sandbox"
);
id!(
    /// An API token (the row, not the secret).
    TokenId, "tok", "a token"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_form_round_trips_and_the_wrong_prefix_is_refused() {
        let id = StepId::from_uuid(Uuid::from_u128(0x0198_0000_0000_7000_8000_0000_0000_00ff));
        let text = id.to_string();
        assert_eq!(text, "step_019800000000700080000000000000ff");
        assert_eq!(text.parse::<StepId>(), Ok(id));
        let error = text.parse::<AgentId>().unwrap_err().to_string();
        assert!(error.contains("not an agent id"), "{error}");
    }

    #[test]
    fn only_one_text_form_is_an_id() {
        for text in ["step_", "step_0198", "step_019800000000700080000000000000FF", "", "step", "step_{0198}"]
        {
            assert!(text.parse::<StepId>().is_err(), "{text}");
        }
    }
}
