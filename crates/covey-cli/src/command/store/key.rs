//! `covey store key`: making a master key, and changing keys.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use covey_bucket::Access;
use covey_home::backend::Backend;
use covey_home::{KeyringReport, MasterKey, OrgKeys};
use serde_json::json;

use super::place::existing;
use crate::exit_code::ExitCode;
use crate::global::Global;
use crate::output::{self, card};
use crate::store_key::{self, StoreKey};
use crate::store_location::StoreLocation;

/// What to do with keys.
#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Make a master key in a new file. Keep a copy apart from the store: without it nothing can be read.
    Create {
        /// The file; it must not exist.
        file: PathBuf,
    },
    /// Show which keys a store has; no key is needed for that.
    Show {
        #[command(flatten)]
        place: OrgPlace,
    },
    /// Give the org a new key, or the store a new master key.
    Rotate {
        #[command(flatten)]
        place: OrgPlace,
        #[command(flatten)]
        key: StoreKey,
        /// Wrap the org's keys with the master key in this file from now on, instead of adding a key.
        #[arg(long, value_name = "FILE")]
        new_key_file: Option<PathBuf>,
    },
}

/// Which org of which store.
#[derive(Debug, Args)]
pub(crate) struct OrgPlace {
    /// The store: a directory or s3://BUCKET/PREFIX.
    #[arg(long, value_name = "PLACE", value_parser = StoreLocation::parser())]
    store: StoreLocation,
    /// The org.
    #[arg(long)]
    org: String,
}

impl OrgPlace {
    fn backend(&self, global: &Global, access: Access) -> anyhow::Result<Arc<dyn Backend>> {
        existing(&self.store.open(&global.data_dir()?, access, false)?, &self.store, &self.org)
    }
}

pub(super) fn run(global: &Global, command: &KeyCommand) -> anyhow::Result<ExitCode> {
    match command {
        KeyCommand::Create { file } => create(global, file)?,
        KeyCommand::Show { place } => {
            let report = OrgKeys::report(&*place.backend(global, Access::Read)?)?;
            output::value(global.json, &json!({ "keyring": report }), |_| shown(report.as_ref()))?;
        }
        KeyCommand::Rotate { place, key, new_key_file } => {
            let master = key.read()?.context("say which master key opens the store: --key-file FILE")?;
            let backend = place.backend(global, Access::Write)?;
            match new_key_file {
                Some(file) => {
                    let new = store_key::read(file)?;
                    OrgKeys::rewrap(&*backend, &place.org, &master, &new)?;
                    output::value(global.json, &json!({ "master": new.id() }), |_| {
                        format!(
                            "master key {} opens the store now, and {} does not any more\n\
                             restart every server and runner with the new key file",
                            new.id(),
                            master.id()
                        )
                    })?;
                }
                None => {
                    let added = OrgKeys::rotate(&*backend, &place.org, &master)?;
                    output::value(global.json, &json!({ "key": added }), |_| {
                        format!(
                            "what is stored from now on is encrypted with key {added}\n\
                             collections write the rest anew and retire the older keys"
                        )
                    })?;
                }
            }
        }
    }
    Ok(ExitCode::Success)
}

fn create(global: &Global, file: &Path) -> anyhow::Result<()> {
    let key = MasterKey::create(file)?;
    output::value(global.json, &json!({ "master": key.id(), "file": file }), |_| {
        format!(
            "master key {} is in {}; keep a copy apart from the store\n\
             name it with --key-file or COVEY_STORE_KEY_FILE",
            key.id(),
            file.display()
        )
    })?;
    Ok(())
}

fn shown(report: Option<&KeyringReport>) -> String {
    let Some(report) = report else { return "not encrypted".to_owned() };
    let names = if report.names_are_keyed { "with the org's key" } else { "without a key" };
    let keys: Vec<String> = report.keys.iter().map(ToString::to_string).collect();
    card(&[
        ("master key", report.master.to_string()),
        ("keys, newest last", keys.join(" ")),
        ("blocks are named", names.to_owned()),
    ])
}
