//! Hides a file of this host that can be made anew from an encrypted store: it lies beside the store and holds the
//! lengths of its blocks.
//!
//! The bytes are mixed with the output of keyed BLAKE3, whose key is derived from the org's secret and the file's name.
//! A name is chosen at random and its file written once, so no part of the output is used twice. Nothing is
//! authenticated: what such a file says of a block is checked by reading the block.

use crate::keys::CacheKey;

/// Bytes that are mixed at once.
const PART_BYTES: usize = 4096;

/// Of one file.
#[derive(Clone)]
pub(super) struct Mask {
    key: [u8; 32],
}

impl std::fmt::Debug for Mask {
    /// Without the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mask")
    }
}

impl Mask {
    pub(super) fn new(key: &CacheKey, file_name: &str) -> Self {
        Self { key: key.of_file(file_name) }
    }

    /// Hides, or shows, the bytes that stand at `offset` of the file.
    pub(super) fn apply(&self, offset: u64, bytes: &mut [u8]) {
        let mut output = blake3::Hasher::new_keyed(&self.key).finalize_xof();
        output.set_position(offset);
        let mut pad = [0; PART_BYTES];
        for part in bytes.chunks_mut(PART_BYTES) {
            let pad = &mut pad[..part.len()];
            output.fill(pad);
            part.iter_mut().zip(pad).for_each(|(byte, pad)| *byte ^= *pad);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_range_is_shown_as_it_was_hidden() {
        let mask = Mask { key: [3; 32] };
        let plain: Vec<u8> = (0..20_000_u32).map(|n| n as u8).collect();
        let mut hidden = plain.clone();
        for (at, part) in hidden.chunks_mut(777).enumerate() {
            mask.apply(at as u64 * 777, part);
        }
        assert_ne!(hidden, plain);
        for range in [0..20_000, 1..2, 63..4200, 12_345..19_999] {
            let mut part = hidden[range.clone()].to_vec();
            mask.apply(range.start as u64, &mut part);
            assert_eq!(part, plain[range]);
        }
    }
}
