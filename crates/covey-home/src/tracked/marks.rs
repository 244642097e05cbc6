//! The attributes by which overlayfs says what a name in an upper directory means.

use std::ffi::CStr;
use std::io;

use super::GROUP_ATTRIBUTE;
use crate::manifest::{Xattr, Xattrs, is_kept_xattr};

/// The kernel's limit for a list of names, and for a value.
const XATTR_BYTES_MAX: usize = 65_536;

/// Whether a directory is the whole truth.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Opaque {
    /// The directory of the same place below shows through.
    #[default]
    No,
    /// Nothing shows through.
    Yes,
    /// It shows through, and regular files in here may be whiteouts.
    HoldsWhiteouts,
}

/// What the marks of one inode say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Marks {
    pub(super) opaque: Opaque,
    /// Where below it was before it was renamed.
    pub(super) redirect: Option<Redirect>,
    /// Only the metadata is here.
    pub(super) metacopy: bool,
    /// An empty regular file that stands for "gone", where its directory says so.
    pub(super) whiteout: bool,
    /// The kernel has written marks here.
    pub(super) has_origin: bool,
    /// Number in the base's link table.
    pub(super) group: Option<usize>,
}

/// Where below a renamed inode was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Redirect {
    /// A lower path.
    Path(Vec<u8>),
    /// A name in the lower directory of its own directory.
    Name(Vec<u8>),
}

impl Redirect {
    fn parse(value: &[u8]) -> Option<Self> {
        let is_name = |name: &[u8]| !matches!(name, b"" | b"." | b"..");
        match value.strip_prefix(b"/") {
            Some(path) if path.split(|byte| *byte == b'/').all(is_name) => Some(Self::Path(path.to_vec())),
            None if is_name(value) && !value.contains(&b'/') => Some(Self::Name(value.to_vec())),
            _ => None,
        }
    }
}

/// The kept attributes and the marks of the inode at `path`, which is not followed if it is a link.
pub(super) fn read(path: &CStr) -> io::Result<(Xattrs, Marks)> {
    read_with(
        |buffer| rustix::fs::llistxattr(path, buffer),
        |name, buffer| rustix::fs::lgetxattr(path, name, buffer),
    )
}

/// The same of the inode that a descriptor's path in `/proc` leads to.
pub(super) fn read_followed(path: &CStr) -> io::Result<(Xattrs, Marks)> {
    read_with(
        |buffer| rustix::fs::listxattr(path, buffer),
        |name, buffer| rustix::fs::getxattr(path, name, buffer),
    )
}

fn read_with(
    list: impl Fn(&mut [u8]) -> rustix::io::Result<usize>,
    get: impl Fn(&CStr, &mut [u8]) -> rustix::io::Result<usize>,
) -> io::Result<(Xattrs, Marks)> {
    let mut few = [0; 512];
    let names = match list(&mut few) {
        Ok(0) | Err(rustix::io::Errno::OPNOTSUPP) => return Ok(Default::default()),
        Ok(len) => few[..len].to_vec(),
        Err(rustix::io::Errno::RANGE) => {
            let mut many = vec![0; XATTR_BYTES_MAX];
            let len = list(&mut many)?;
            many.truncate(len);
            many
        }
        Err(error) => return Err(error.into()),
    };
    let value_of = |name: &CStr| -> io::Result<Option<Vec<u8>>> {
        let mut few = [0; 256];
        match get(name, &mut few) {
            Ok(len) => return Ok(Some(few[..len].to_vec())),
            Err(rustix::io::Errno::NODATA) => return Ok(None),
            Err(rustix::io::Errno::RANGE) => {}
            Err(error) => return Err(error.into()),
        }
        let mut value = vec![0; XATTR_BYTES_MAX];
        let len = get(name, &mut value)?;
        value.truncate(len);
        Ok(Some(value))
    };
    let damaged = |what: &'static str| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut kept = Vec::new();
    let mut marks = Marks::default();
    for name in names.split_inclusive(|byte| *byte == 0) {
        let Ok(name) = CStr::from_bytes_with_nul(name) else { continue };
        match name.to_bytes() {
            b"trusted.overlay.opaque" => {
                marks.opaque = match value_of(name)?.as_deref() {
                    Some(b"y") => Opaque::Yes,
                    Some(b"x") => Opaque::HoldsWhiteouts,
                    _ => Opaque::No,
                };
            }
            b"trusted.overlay.redirect" => {
                let value = value_of(name)?.unwrap_or_default();
                let redirect = Redirect::parse(&value).ok_or_else(|| damaged("its redirect is no path"))?;
                marks.redirect = Some(redirect);
            }
            b"trusted.overlay.metacopy" => marks.metacopy = true,
            b"trusted.overlay.whiteout" => marks.whiteout = true,
            b"trusted.overlay.origin" => marks.has_origin = true,
            bytes if bytes == GROUP_ATTRIBUTE => {
                let value = value_of(name)?.unwrap_or_default();
                let number = std::str::from_utf8(&value).ok().and_then(|text| text.parse().ok());
                marks.group = Some(number.ok_or_else(|| damaged("its group of links is no number"))?);
            }
            bytes if is_kept_xattr(bytes) => {
                if let Some(value) = value_of(name)? {
                    kept.push(Xattr { name: bytes.to_vec(), value });
                }
            }
            _ => {}
        }
    }
    kept.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok((Xattrs(kept), marks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_is_a_path_or_a_name_and_nothing_else() {
        assert_eq!(Redirect::parse(b"/a/b"), Some(Redirect::Path(b"a/b".to_vec())));
        assert_eq!(Redirect::parse(b"a\xff"), Some(Redirect::Name(b"a\xff".to_vec())));
        for bad in [&b""[..], b"/", b"/a//b", b"/a/..", b"..", b"a/b"] {
            assert_eq!(Redirect::parse(bad), None, "{bad:?}");
        }
    }
}
