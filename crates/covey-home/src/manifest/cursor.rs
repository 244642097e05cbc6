//! Reading primitives over untrusted bytes.

use covey_types::BlockHash;

/// Bytes that are not a manifest object.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("malformed {object} at byte {at}: {problem}")]
pub struct MalformedObject {
    /// Which object.
    pub object: &'static str,
    /// Offset of the problem.
    pub at: usize,
    /// What is wrong.
    pub problem: &'static str,
}

#[derive(Debug, Clone)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    object: &'static str,
}

impl<'a> Cursor<'a> {
    pub(crate) const fn new(bytes: &'a [u8], object: &'static str) -> Self {
        Self { bytes, at: 0, object }
    }

    pub(crate) fn malformed(&self, problem: &'static str) -> MalformedObject {
        MalformedObject { object: self.object, at: self.at, problem }
    }

    pub(crate) const fn at(&self) -> usize {
        self.at
    }

    pub(crate) const fn is_at_end(&self) -> bool {
        self.at == self.bytes.len()
    }

    pub(crate) fn end(&self) -> Result<(), MalformedObject> {
        if self.is_at_end() { Ok(()) } else { Err(self.malformed("bytes behind the end")) }
    }

    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], MalformedObject> {
        let taken = self.at.checked_add(len).and_then(|end| self.bytes.get(self.at..end));
        let taken = taken.ok_or_else(|| self.malformed("it ends too early"))?;
        self.at += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], MalformedObject> {
        let taken = self.take(N)?;
        let mut array = [0; N];
        array.copy_from_slice(taken);
        Ok(array)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, MalformedObject> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u16(&mut self) -> Result<u16, MalformedObject> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, MalformedObject> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, MalformedObject> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn i64(&mut self) -> Result<i64, MalformedObject> {
        Ok(i64::from_le_bytes(self.array()?))
    }

    pub(crate) fn hash(&mut self) -> Result<BlockHash, MalformedObject> {
        Ok(BlockHash::from_bytes(self.array()?))
    }

    /// An unsigned LEB128 number in its shortest form.
    pub(crate) fn varint(&mut self) -> Result<u64, MalformedObject> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            let part = u64::from(byte & 0x7f);
            if shift == 63 && part > 1 {
                return Err(self.malformed("a number above 64 bits"));
            }
            value |= part << shift;
            if byte & 0x80 == 0 {
                if byte == 0 && shift != 0 {
                    return Err(self.malformed("a number not in its shortest form"));
                }
                return Ok(value);
            }
        }
        Err(self.malformed("a number above 64 bits"))
    }

    /// A varint that is at most `max`.
    pub(crate) fn length(&mut self, max: usize, problem: &'static str) -> Result<usize, MalformedObject> {
        let value = self.varint()?;
        usize::try_from(value).ok().filter(|len| *len <= max).ok_or_else(|| self.malformed(problem))
    }

    pub(crate) fn header(&mut self, kind: u8) -> Result<(), MalformedObject> {
        if self.take(4)? != super::root::MAGIC {
            return Err(self.malformed("not a manifest object"));
        }
        if self.u8()? != super::root::VERSION {
            return Err(self.malformed("a version that this program does not know"));
        }
        if self.u8()? != kind {
            return Err(self.malformed("another kind of object"));
        }
        Ok(())
    }
}

pub(crate) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_one_form() {
        for value in [0, 1, 127, 128, 16_383, 16_384, u64::from(u32::MAX), u64::MAX] {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, value);
            let mut cursor = Cursor::new(&bytes, "test");
            assert_eq!(cursor.varint(), Ok(value));
            assert!(cursor.is_at_end());
        }
        for bad in [
            &[0x80, 0x00][..],
            &[0xff; 10],
            &[0x80],
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2],
        ] {
            assert!(Cursor::new(bad, "test").varint().is_err(), "{bad:?}");
        }
    }
}
