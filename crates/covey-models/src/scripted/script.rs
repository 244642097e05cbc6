//! Scripts as data: what the scripted model says, readable from JSON.
//!
//! Unknown fields are refused: a misspelt one would silently change what a test proves.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A file with more bytes than this is not a script.
const SCRIPT_FILE_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// Several scripts, tried in order.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptFile {
    /// The first whose `when` matches answers.
    pub scripts: Vec<Script>,
}

/// What one kind of conversation gets as answers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Script {
    /// Matches when the conversation's first user message contains this text; empty matches every one.
    #[serde(default)]
    pub when: String,
    /// Goes into every call id and signature, so that two scripts never share one.
    #[serde(default)]
    pub seed: u64,
    /// The answers, in order, from the conversation's beginning on. After the last one the model says that its
    /// script has ended, and ends its turn.
    #[serde(default)]
    pub turns: Vec<ScriptTurn>,
    /// Answers that belong to a later user message: the newest user message that contains a chapter's `when`
    /// starts that chapter at its first turn.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chapters: Vec<Chapter>,
    /// What to do when the model is told that the home was rolled back; without it, the next turn follows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_rolled_back: Option<OnRolledBack>,
}

/// Answers from one user message on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chapter {
    /// Text that the user message contains; must not be empty.
    pub when: String,
    /// The answers, in order.
    pub turns: Vec<ScriptTurn>,
}

/// One answer of the model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptTurn {
    /// A thinking block with a signature that is verified when it comes back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thinking: Option<String>,
    /// What the model says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Tool calls; several are parallel. Without any the turn ends.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<ScriptCall>,
    /// How long the model takes, in milliseconds.
    #[serde(default)]
    pub think_ms: u64,
    /// What to do when a result says that its call was interrupted; without it, the next turn follows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_interrupted: Option<OnInterrupted>,
}

/// One tool call. `{{call_id}}` in any text of the input becomes the call's own id.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptCall {
    /// `bash`, `read`, …
    pub name: String,
    /// The input object.
    #[serde(default)]
    pub input: Map<String, Value>,
}

/// What the model does about calls that were interrupted and may have had effects.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OnInterrupted {
    /// Looks first: one tool call. `{{interrupted_id}}` becomes the id of the first interrupted call. Without it
    /// the interrupted calls are made again at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check: Option<ScriptCall>,
    /// After the check, the interrupted calls are made again, under fresh ids, when its result contains this text;
    /// otherwise the next turn follows. Empty: always again.
    #[serde(default)]
    pub again_when: String,
}

/// What the model does when the home was rolled back.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OnRolledBack {
    /// An answer that comes first, for instance one call that looks around.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first: Option<ScriptTurn>,
    /// Where the script goes on.
    #[serde(default)]
    pub then: AfterRollback,
}

/// Where a script goes on after a rollback.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AfterRollback {
    /// The turn that would have come anyway.
    #[default]
    Next,
    /// The turn whose results came with the news, once more under fresh ids.
    Again,
    /// The script's first turn.
    Start,
    /// The turn with this index, from 0.
    Turn(usize),
}

/// A script file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ScriptError {
    /// It cannot be read.
    #[error("cannot read the model script {path}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It is no script.
    #[error("{path} is no model script")]
    Parse {
        /// The file.
        path: String,
        /// Where and why.
        #[source]
        source: serde_json::Error,
    },
    /// It is too big.
    #[error("{path} exceeds {SCRIPT_FILE_BYTES_MAX} bytes")]
    TooLong {
        /// The file.
        path: String,
    },
}

impl ScriptFile {
    /// Reads a file.
    ///
    /// # Errors
    /// When it cannot be read or is no script; the error names the file and the place.
    pub fn read(path: &Path) -> Result<Self, ScriptError> {
        use std::io::Read as _;
        let name = path.display().to_string();
        let mut bytes = Vec::new();
        std::fs::File::open(path)
            .and_then(|file| file.take(SCRIPT_FILE_BYTES_MAX + 1).read_to_end(&mut bytes))
            .map_err(|source| ScriptError::Read { path: name.clone(), source })?;
        if bytes.len() as u64 > SCRIPT_FILE_BYTES_MAX {
            return Err(ScriptError::TooLong { path: name });
        }
        serde_json::from_slice(&bytes).map_err(|source| ScriptError::Parse { path: name, source })
    }

    /// Index of the script for a conversation that began with this text.
    pub fn choose(&self, first_user_text: &str) -> Option<usize> {
        self.scripts.iter().position(|script| first_user_text.contains(&script.when))
    }
}
