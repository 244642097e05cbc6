//! Names of orgs and homes as this crate sees them: opaque, and safe as one path component.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

/// Longest name of an org or a home, in bytes.
pub const NAME_BYTES_MAX: usize = 128;

/// A text that is no name of an org or a home.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a name: expected 1 to {NAME_BYTES_MAX} of A-Z a-z 0-9 _ . - and not only dots")]
pub struct InvalidName(String);

impl InvalidName {
    pub(crate) fn of(text: &str) -> Self {
        Self(text.chars().take(NAME_BYTES_MAX).collect())
    }
}

/// Checks a name before it becomes a path component.
///
/// # Errors
/// When it is empty, too long, contains other characters or consists of dots only.
pub fn check_name(name: &str) -> Result<(), InvalidName> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
    let valid = (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(allowed)
        && name.bytes().any(|b| b != b'.');
    if valid { Ok(()) } else { Err(InvalidName::of(name)) }
}

/// 16 bytes that no other process and no earlier call has made.
pub(crate) fn random_bytes() -> [u8; 16] {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let seed = (std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
    let half = || u128::from(RandomState::new().hash_one(seed));
    (half() << 64 | half()).to_be_bytes()
}

/// The same as 32 hexadecimal digits: a name that nothing has yet.
pub fn random_name() -> String {
    format!("{:032x}", u128::from_be_bytes(random_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_harmless_path_component() {
        for good in ["a", "home_0193", "A.b-c", "..a"] {
            assert_eq!(check_name(good), Ok(()));
        }
        for bad in ["", ".", "..", "a/b", "a b", "a\0", &"x".repeat(129)] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
    }
}
