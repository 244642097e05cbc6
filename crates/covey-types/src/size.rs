//! Sizes and the system limits that several crates must agree on.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A number of bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ByteCount(pub u64);

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        // Integer arithmetic on purpose: tenths are enough for people, and no float rounds 1023.99 to 1024.
        let mut tenths = u128::from(self.0) * 10 / 1024;
        let mut unit = 0;
        while tenths >= 10_240 && unit + 1 < UNITS.len() {
            tenths /= 1024;
            unit += 1;
        }
        write!(f, "{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
    }
}

/// Files up to this size are one block; twice as big would double what a one-byte edit of such a file costs.
pub const WHOLE_FILE_BYTES_MAX: u64 = 8 * 1024 * 1024;
/// Larger files are cut in pieces of this size at fixed offsets.
pub const PIECE_BYTES: u64 = 4 * 1024 * 1024;
/// A frame on any of our links is at most this long; longer means a broken or hostile peer.
pub const FRAME_BYTES_MAX: usize = 32 * 1024 * 1024;
/// What of one tool result reaches the model (head and tail together); the full text stays readable by path.
pub const TOOL_RESULT_BYTES_MAX: usize = 100 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well_at_every_unit_border() {
        let shown: Vec<String> = [0, 1023, 1024, 1536, 1024 * 1024 - 1, 1024 * 1024, u64::MAX]
            .map(|n| ByteCount(n).to_string())
            .into();
        assert_eq!(shown, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1023.9 KiB", "1.0 MiB", "16777215.9 TiB"]);
    }
}
