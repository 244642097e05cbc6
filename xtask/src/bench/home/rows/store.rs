//! How large the store is.

use anyhow::Context as _;

use super::super::claim::Row;
use super::super::peers::Peer;
use super::super::place;
use super::{Bench, Costs};

/// Another agent's home of the same kind, in the same org.
pub(super) fn second_home(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    bench.secured_home()?;
    bench.say("a second home of the same kind");
    let second = bench.work.join("second");
    place::remove(&second)?;
    place::copy(bench.given, &second)?;
    bench.us.mutate(&second, 77)?;
    let cache = bench.work.join("second-cache");
    place::remove(&cache)?;
    let before = place::size_of(&bench.store)?;
    let (cost, said) = bench.us.secure(&second, &bench.store, &cache)?;
    let grown = place::size_of(&bench.store)?.saturating_sub(before);
    let unique = said["bytes_new"].as_u64().context("a secure did not say what is new")?;
    let mut row = bench.row("second home of the same kind, same org", &[cost], &Costs::new());
    row.figure("store before", before);
    row.figure("store grew by", grown);
    row.figure("unique bytes of the home", unique);
    row.claim(
        "the store grows by less than 1 % and the unique bytes",
        Some(grown as f64 <= before as f64 / 100.0 + unique as f64),
    );
    place::remove(&second)?;
    place::remove(&cache)?;
    Ok(vec![row])
}

/// One home in a store of its own, as it is when collections have had the time to compress it harder.
pub(super) fn recompressed(bench: &mut Bench<'_>) -> anyhow::Result<Vec<Row>> {
    bench.saved_by(|peer| peer == Peer::Restic)?;
    place::remove(&bench.store)?;
    place::remove(&bench.cache)?;
    let root = bench.secured_home()?;
    let before = place::size_of(&bench.store)?;
    bench.say("recompression");
    let (cost, said) = bench.us.recompress(&root, &bench.store)?;
    let after = place::size_of(&bench.store)?;
    let mut row = bench.row("store size after the background recompression", &[cost], &Costs::new());
    row.figure("store bytes before", before);
    row.figure("store bytes", after);
    row.figure("packs improved", said["packs_improved"].clone());
    let restic = bench.peers.iter().find(|peer| peer.peer == Peer::Restic);
    let restic = restic.map(|peer| place::size_of(&peer.store())).transpose()?;
    row.figure("store bytes of restic", restic);
    let holds = restic.map(|restic| after as f64 <= 0.95 * restic as f64);
    row.claim("at most 0.95 x restic, metadata included", holds);
    Ok(vec![row])
}
