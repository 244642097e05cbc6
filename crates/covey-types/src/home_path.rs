//! Paths inside a home.

use std::fmt;

/// A path relative to a home's root: bytes, not text, without empty, `.` or `..` components and without NUL.
/// The root itself is the empty path.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HomePath(Vec<u8>);

/// Why bytes are not a path inside a home.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidHomePath {
    /// It starts with `/`.
    #[error("an absolute path; paths in a home are relative to its root")]
    Absolute,
    /// A component is empty, `.` or `..`, or contains NUL.
    #[error("component {index} is empty, `.`, `..` or contains NUL")]
    Component {
        /// Position of the component, from 0.
        index: usize,
    },
}

impl HomePath {
    /// The home's root.
    pub const fn root() -> Self {
        Self(Vec::new())
    }

    /// Checks and wraps `bytes`.
    ///
    /// # Errors
    /// When the path is absolute or a component could leave the home.
    pub fn new(bytes: &[u8]) -> Result<Self, InvalidHomePath> {
        if bytes.first() == Some(&b'/') {
            return Err(InvalidHomePath::Absolute);
        }
        if bytes.is_empty() {
            return Ok(Self::root());
        }
        for (index, component) in bytes.split(|b| *b == b'/').enumerate() {
            if component.is_empty() || component == b"." || component == b".." || component.contains(&0) {
                return Err(InvalidHomePath::Component { index });
            }
        }
        Ok(Self(bytes.to_vec()))
    }

    /// The path's bytes, without a leading `/`.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The components from the root down.
    pub fn components(&self) -> impl Iterator<Item = &[u8]> {
        self.0.split(|b| *b == b'/').filter(|c| !c.is_empty())
    }
}

impl fmt::Display for HomePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.0))
    }
}

impl fmt::Debug for HomePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_cannot_leave_the_home() {
        assert_eq!(HomePath::new(b"/etc"), Err(InvalidHomePath::Absolute));
        for bad in [&b"a/../b"[..], b"..", b".", b"a//b", b"a/", b"a\0b"] {
            assert!(matches!(HomePath::new(bad), Err(InvalidHomePath::Component { .. })), "{bad:?}");
        }
        assert_eq!(HomePath::new(b"").unwrap(), HomePath::root());
        assert_eq!(HomePath::new(b"a/\xff/c").unwrap().components().count(), 3);
    }
}
