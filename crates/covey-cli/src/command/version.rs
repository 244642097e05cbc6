//! `covey version`.

use serde_json::json;

use crate::exit_code::ExitCode;
use crate::global::Global;
use crate::output;

pub(crate) fn run(global: &Global) -> anyhow::Result<ExitCode> {
    let version = json!({ "version": env!("CARGO_PKG_VERSION") });
    output::value(global.json, &version, |_| format!("covey {}", env!("CARGO_PKG_VERSION")))?;
    Ok(ExitCode::Success)
}
