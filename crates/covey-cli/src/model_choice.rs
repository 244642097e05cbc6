//! Which models a server asks: from flags and environment to somebody who answers.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use covey_server::config::Config;
use covey_server::model::config::ModelsFile;
use covey_server::model::scripted::{ScriptFile, ScriptedModel};
use covey_server::model::{Model, Router};

use crate::host::setting;

/// The choice.
#[derive(Debug, Clone)]
pub(crate) enum ModelChoice {
    /// A Messages-compatible endpoint; none: `COVEY_MODEL_URL`, `ANTHROPIC_BASE_URL`, then the vendor's.
    Endpoint(Option<String>),
    /// The providers of a models file.
    File(PathBuf),
    /// A script in place of a model.
    Script(PathBuf),
}

/// The providers of a models file, with the keys that file and environment name.
pub(crate) fn router(path: &Path) -> Result<Router> {
    let directory = path.parent().unwrap_or(Path::new("."));
    ModelsFile::read(path)
        .and_then(|file| Router::new(file, directory, &setting))
        .with_context(|| format!("the models file {} cannot be used", path.display()))
}

impl ModelChoice {
    /// Makes the clients, or reads the script.
    pub(crate) fn open(&self, config: &mut Config) -> Result<Arc<dyn Model>> {
        match self {
            Self::Script(path) => {
                let script = ScriptFile::read(path)
                    .with_context(|| format!("the model script {} cannot be used", path.display()))?;
                Ok(Arc::new(ScriptedModel::new(script)))
            }
            Self::File(path) => {
                let router = router(path)?;
                for provider in router.lacking_keys() {
                    tracing::warn!(
                        provider,
                        "no key is set for this provider: its calls will fail; set the variable that its `api_key_env` \
                         names and start again"
                    );
                }
                Ok(Arc::new(router))
            }
            Self::Endpoint(url) => {
                let url = url
                    .clone()
                    .or_else(|| setting("COVEY_MODEL_URL"))
                    .or_else(|| setting("ANTHROPIC_BASE_URL"));
                if let Some(url) = url {
                    config.model_url = url;
                }
                if config.lacks_model_key(&setting) {
                    tracing::warn!(
                        "no model key is set: sessions will fail at their first model call; set ANTHROPIC_API_KEY \
                         (or COVEY_MODEL_KEY) and start again, or choose another endpoint with --model-url"
                    );
                }
                Ok(Arc::new(config.model_client(&setting)?))
            }
        }
    }
}
