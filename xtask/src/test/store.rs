//! The stages in which a store's processes die, or the power goes; short runs of `kill-store` and `cut-power`.

use super::{Ground, Outcome, passed};
use crate::store::{CutPowerArgs, KillStoreArgs, cut_power, kill_store};

const KILLS: u32 = 30;
const CUTS: u32 = 5;
const SEED: u64 = 1;

pub(super) fn kills(ground: &Ground<'_>) -> anyhow::Result<Outcome> {
    passed(kill_store(ground.root, &KillStoreArgs { kills: KILLS, seed: SEED, worker: None, json: true }))
}

pub(super) fn cuts(ground: &Ground<'_>) -> anyhow::Result<Outcome> {
    if !ground.is_root {
        return Ok(Outcome::NotNeeded("only root can mount".to_owned()));
    }
    passed(cut_power(ground.root, &CutPowerArgs { cuts: CUTS, seed: SEED, worker: None, json: true }))
}
