//! Which bucket, as people write it: `s3://bucket/prefix`.

use std::fmt;
use std::str::FromStr;

use covey_home::name::check_name;

/// Shortest and longest name of a bucket, in bytes, as S3 has them.
const BUCKET_BYTES: std::ops::RangeInclusive<usize> = 3..=63;
/// Parts of a prefix at most.
const PREFIX_PARTS_MAX: usize = 8;
const SCHEME: &str = "s3://";

/// A bucket and the prefix that all keys of a store have in it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BucketPlace {
    bucket: String,
    prefix: Vec<String>,
}

/// A text that is no `s3://bucket/prefix`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` names no bucket: {problem}; write s3://BUCKET or s3://BUCKET/PREFIX")]
pub struct InvalidPlace {
    text: String,
    problem: &'static str,
}

impl BucketPlace {
    /// Whether a text is meant as a bucket, well written or not.
    pub fn is_meant_by(text: &str) -> bool {
        text.starts_with(SCHEME)
    }

    /// The bucket's name.
    pub fn bucket(&self) -> &str {
        &self.bucket
    }

    /// What every key begins with, without a slash at its end; may be empty.
    pub fn prefix(&self) -> String {
        self.prefix.join("/")
    }
}

impl fmt::Display for BucketPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}", self.bucket)?;
        self.prefix.iter().try_for_each(|part| write!(f, "/{part}"))
    }
}

impl FromStr for BucketPlace {
    type Err = InvalidPlace;

    fn from_str(text: &str) -> Result<Self, InvalidPlace> {
        // Shown in the error, so a key that was written into the address must not be.
        let shown = || text.rsplit_once('@').map_or(text, |(_, behind)| behind).chars().take(200).collect();
        let invalid = |problem| InvalidPlace { text: shown(), problem };
        let rest = text.strip_prefix(SCHEME).ok_or_else(|| invalid("it does not begin with s3://"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let in_name = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'-');
        if !BUCKET_BYTES.contains(&bucket.len()) || !bucket.bytes().all(in_name) {
            return Err(invalid("a bucket's name is 3 to 63 of a-z 0-9 . -"));
        }
        let prefix: Vec<String> =
            prefix.split('/').filter(|part| !part.is_empty()).map(str::to_owned).collect();
        if prefix.len() > PREFIX_PARTS_MAX || prefix.iter().any(|part| check_name(part).is_err()) {
            return Err(invalid("a prefix is up to 8 names of A-Z a-z 0-9 _ . - with slashes between"));
        }
        Ok(Self { bucket: bucket.to_owned(), prefix })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_read_as_it_is_written() {
        for text in ["s3://abc", "s3://my-bucket.x/homes", "s3://abc/a/b_c/d.e"] {
            assert_eq!(text.parse::<BucketPlace>().unwrap().to_string(), text);
        }
        let slashes: BucketPlace = "s3://abc//a/".parse().unwrap();
        assert_eq!((slashes.bucket(), slashes.prefix().as_str()), ("abc", "a"));
    }

    #[test]
    fn what_is_no_place_is_refused_without_showing_a_key() {
        for bad in ["abc", "s3://", "s3://ab", "s3://Abc", "s3://abc/..", "s3://abc/a b", "file:///x"] {
            assert!(bad.parse::<BucketPlace>().is_err(), "{bad}");
        }
        let error = "s3://AKIA:secret@abc".parse::<BucketPlace>().unwrap_err().to_string();
        assert!(!error.contains("secret"), "{error}");
    }
}
