//! `cargo xtask kill-store` and `cut-power`: the store's processes die, or the whole machine's memory does, and
//! everything that was acknowledged must be there.

mod kill;
mod power;
mod worker;

pub(crate) use kill::{KillStoreArgs, run as kill_store};
pub(crate) use power::{CutPowerArgs, run as cut_power};
