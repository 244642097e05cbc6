//! `covey doctor`: what this machine can and cannot do, found out by trying it.
//!
//! Nothing is left behind, and nothing is changed. What does not belong here: knowing how a sandbox is built;
//! the runner tries that itself.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use covey_bucket::{Access, BucketStore, OpenOptions, Patience, Settings};
use covey_runner::sandbox::probe::{Finding, probe};
use serde_json::{Value, json};

use crate::exit_code::ExitCode;
use crate::global::Global;
use crate::host;
use crate::model_choice;
use crate::output;
use crate::store_location::StoreLocation;

/// As root: the uid and gid of the trial's home; the first that a runner gives away.
const HOST_ID_TRIED: u32 = 200_000;
const REACH_LIMIT: Duration = Duration::from_secs(10);
/// Where `covey up` looks for the model's key.
const MODEL_KEYS: [&str; 3] = ["COVEY_MODEL_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"];

/// Options of `covey doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// The endpoint that `covey up` shall use; tried when given.
    #[arg(long, env = "COVEY_MODEL_URL", value_name = "URL")]
    model_url: Option<String>,
}

/// What trying one thing showed.
#[derive(Debug)]
struct Check {
    name: String,
    ok: bool,
    /// Without it Covey does not work here; the others only limit what it can do.
    needed: bool,
    detail: String,
    remedy: Option<String>,
}

impl Check {
    fn passed(name: &str, detail: impl Into<String>) -> Self {
        Self { name: name.to_owned(), ok: true, needed: true, detail: detail.into(), remedy: None }
    }

    fn failed(name: &str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        let remedy = Some(remedy.into());
        Self { name: name.to_owned(), ok: false, needed: true, detail: detail.into(), remedy }
    }

    /// Covey works without it.
    fn optional(self) -> Self {
        Self { needed: false, ..self }
    }

    fn to_json(&self) -> Value {
        json!({
            "name": self.name, "ok": self.ok, "needed": self.needed,
            "detail": self.detail, "remedy": self.remedy,
        })
    }

    fn to_text(&self) -> String {
        let verdict = match (self.ok, self.needed) {
            (true, _) => "ok",
            (false, true) => "NO",
            (false, false) => "no",
        };
        let mut text = format!("{verdict:3} {:18} {}\n", self.name, output::one_line(&self.detail));
        if let Some(remedy) = &self.remedy {
            text.push_str(&format!("    {:18} → {}\n", "", output::one_line(remedy)));
        }
        text
    }
}

pub(crate) async fn run(global: &Global, args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let data_dir = global.data_dir()?;
    let mut checks = vec![data_dir_is_writable(&data_dir)];
    checks.extend(sandbox_works(&data_dir));
    checks.push(homes_can_be_mounted(&data_dir));
    checks.push(models_file().unwrap_or_else(model_key));
    checks.extend(bucket_works().await);
    if let Some(url) = &args.model_url {
        checks.push(model_is_reachable(url).await);
    }
    let ok = checks.iter().all(|check| check.ok || !check.needed);
    let report = json!({ "ok": ok, "checks": checks.iter().map(Check::to_json).collect::<Vec<_>>() });
    output::value(global.json, &report, |_| {
        let verdict =
            if ok { "This machine can run Covey." } else { "This machine cannot run Covey yet: see NO." };
        checks.iter().map(Check::to_text).collect::<String>() + verdict
    })?;
    Ok(if ok { ExitCode::Success } else { ExitCode::Incapable })
}

/// The directory itself, or what would have to be its parent.
fn nearest_existing(dir: &Path) -> PathBuf {
    dir.ancestors().find(|dir| dir.is_dir()).unwrap_or(Path::new("/")).to_owned()
}

fn data_dir_is_writable(data_dir: &Path) -> Check {
    let place = nearest_existing(data_dir);
    match write_lock_and_sync(&place) {
        Ok(()) => Check::passed("data directory", format!("{}: writes, locks and syncs", place.display())),
        Err(error) => Check::failed(
            "data directory",
            format!("{}: {error}", place.display()),
            "choose another with --data-dir or COVEY_DATA_DIR, on a local file system that this user may write",
        ),
    }
}

fn homes_can_be_mounted(data_dir: &Path) -> Check {
    let name = "mounted homes";
    let check = match covey_mount::probe(&nearest_existing(data_dir)) {
        Ok(()) => Check::passed(name, "a home was mounted, changed and secured"),
        Err(error) => Check::failed(name, format!("homes are copied: {}", error.missing), error.remedy),
    };
    check.optional()
}

/// Whether the bucket that `covey up` would keep homes in can be used; nothing where it would use a directory.
async fn bucket_works() -> Option<Check> {
    let name = "home store";
    let setting = std::env::var("COVEY_BLOB_STORE").ok().filter(|text| !text.trim().is_empty())?;
    let place = match StoreLocation::from_setting(setting.trim()) {
        Ok(StoreLocation::Bucket(place)) => place,
        Ok(StoreLocation::Directory(_)) => return None,
        Err(error) => return Some(Check::failed(name, error.to_string(), "correct COVEY_BLOB_STORE")),
    };
    let tried = place.clone();
    let open = move || -> anyhow::Result<()> {
        let settings = Settings::from_environment(&|name| std::env::var(name).ok())?;
        // Nothing is changed here, so whether conditional puts work is tried by `covey up`.
        let (access, patience) = (Access::Read, Patience::default());
        let options =
            OpenOptions { settings: &settings, access, patience, local_dir: None, probe_again: true };
        BucketStore::open(&tried, &options)?;
        Ok(())
    };
    Some(match tokio::task::spawn_blocking(open).await {
        Ok(Ok(())) => Check::passed(name, format!("{place} can be read with this key")),
        Ok(Err(error)) => Check::failed(name, format!("{error:#}"), "correct what it says, then try again"),
        Err(error) => Check::failed(name, error.to_string(), "this is a fault of covey; report it"),
    })
}

/// What the database asks of a file system.
fn write_lock_and_sync(dir: &Path) -> std::io::Result<()> {
    let mut file = tempfile::NamedTempFile::new_in(dir)?;
    file.write_all(b"covey doctor")?;
    rustix::fs::flock(file.as_file(), rustix::fs::FlockOperation::NonBlockingLockExclusive)?;
    file.as_file().sync_all()?;
    fs::File::open(dir)?.sync_all()?;
    file.close()
}

/// Starts a real sandbox and looks around in it, in a directory of its own on the disk that `covey up` would use.
fn sandbox_works(data_dir: &Path) -> Vec<Check> {
    let place = match tempfile::Builder::new().prefix("covey-doctor-").tempdir_in(nearest_existing(data_dir))
    {
        Ok(place) => place,
        // Said already by the check of the data directory.
        Err(error) => return vec![Check::failed("sandbox", error.to_string(), "see the data directory")],
    };
    let (uid, gid) = if rustix::process::geteuid().is_root() {
        (HOST_ID_TRIED, HOST_ID_TRIED)
    } else {
        (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
    };
    probe(place.path(), uid, gid).into_iter().map(Check::from).collect()
}

impl From<Finding> for Check {
    fn from(finding: Finding) -> Self {
        Self {
            name: finding.name.to_owned(),
            ok: finding.ok,
            needed: finding.required,
            detail: finding.detail,
            remedy: finding.remedy,
        }
    }
}

/// Whether the models file works, when there is one.
fn models_file() -> Option<Check> {
    const NAME: &str = "models file";
    let path = PathBuf::from(host::setting("COVEY_MODELS_FILE")?);
    let router = match model_choice::router(&path) {
        Ok(router) => router,
        Err(error) => {
            let remedy = "docs/operating/models.md says what it must look like";
            return Some(Check::failed(NAME, format!("{error:#}"), remedy));
        }
    };
    let lacking: Vec<&str> = router.lacking_keys().collect();
    Some(if lacking.is_empty() {
        Check::passed(NAME, format!("{}: every provider has its key, or needs none", path.display()))
    } else {
        let remedy = "set the variables that their `api_key_env` names";
        Check::failed(NAME, format!("no key for {}", lacking.join(", ")), remedy).optional()
    })
}

fn model_key() -> Check {
    let is_set = |name: &&&str| std::env::var_os(name).is_some_and(|key| !key.is_empty());
    if let Some(name) = MODEL_KEYS.iter().find(is_set) {
        return Check::passed("model key", format!("{name} is set")).optional();
    }
    let remedy = "set one for `covey up`, unless the endpoint of --model-url needs none";
    Check::failed("model key", format!("none of {} is set", MODEL_KEYS.join(", ")), remedy).optional()
}

async fn model_is_reachable(url: &str) -> Check {
    let client = reqwest::Client::builder().timeout(REACH_LIMIT).build();
    let answer = match client {
        Ok(client) => client.get(url).send().await,
        Err(error) => Err(error),
    };
    match answer {
        // Any answer will do: there is something that speaks HTTP, and only a paid request would say more.
        Ok(response) => Check::passed("model", format!("{url} answers ({})", response.status())),
        Err(error) => Check::failed(
            "model",
            format!("{url} does not answer: {:#}", anyhow::Error::new(error.without_url())),
            "check the address, the network and the certificate",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_cannot_be_written_is_named_with_its_remedy() {
        let check = data_dir_is_writable(Path::new("/proc/self/no-such-directory"));
        assert!(!check.ok && check.needed);
        assert!(check.to_text().starts_with("NO  data directory"), "{}", check.to_text());
        assert!(check.remedy.is_some_and(|remedy| remedy.contains("--data-dir")));
    }

    #[test]
    fn trying_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        assert!(data_dir_is_writable(&dir.path().join("not/yet")).ok);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
