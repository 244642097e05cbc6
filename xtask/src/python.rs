//! Virtual environments with what packages of Python bring: servers for tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;

use crate::process;

const INSTALL_LIMIT: Duration = Duration::from_secs(15 * 60);

/// Makes the environment `name` below `tools` as the file `requirements` says; returns where it is. What was made from
/// the same file is kept.
pub(crate) fn environment(
    root: &Path,
    tools: &Path,
    name: &str,
    requirements: &str,
) -> anyhow::Result<PathBuf> {
    let requirements = root.join(requirements);
    let place = tools.join(name);
    let wanted = fs::read_to_string(&requirements).with_context(|| format!("{}", requirements.display()))?;
    let mark = place.join("made-from");
    if fs::read_to_string(&mark).is_ok_and(|made| made == wanted) {
        return Ok(place);
    }
    if place.exists() {
        fs::remove_dir_all(&place)?;
    }
    let made = process::run(Command::new("python3").args(["-m", "venv"]).arg(&place), INSTALL_LIMIT);
    made.context("no virtual environment; on Debian: `apt-get install python3 python3-venv`")?;
    let mut pip = Command::new(place.join("bin/python"));
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"]);
    process::run(pip.arg(&requirements), INSTALL_LIMIT)?;
    fs::write(mark, wanted)?;
    Ok(place)
}

/// Where the environment's packages are.
pub(crate) fn packages(environment: &Path) -> anyhow::Result<PathBuf> {
    let mut python = Command::new(environment.join("bin/python"));
    python.args(["-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]);
    Ok(PathBuf::from(process::output_of_success(&mut python, INSTALL_LIMIT)?.trim()))
}
