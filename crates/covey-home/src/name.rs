//! Names of orgs and homes as this crate sees them: opaque, and safe as one path component.

/// Longest name of an org or a home, in bytes.
pub const NAME_BYTES_MAX: usize = 128;

/// A text that is no name of an org or a home.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a name: expected 1 to {NAME_BYTES_MAX} of A-Z a-z 0-9 _ . - and not only dots")]
pub struct InvalidName(String);

/// Checks a name before it becomes a path component.
///
/// # Errors
/// When it is empty, too long, contains other characters or consists of dots only.
pub fn check_name(name: &str) -> Result<(), InvalidName> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
    let valid = (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(allowed)
        && name.bytes().any(|b| b != b'.');
    if valid { Ok(()) } else { Err(InvalidName(name.chars().take(NAME_BYTES_MAX).collect())) }
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
