//! Records of a pax extended header: `LENGTH KEY=VALUE\n`, the length counting itself.

/// Appends one record. The key must not contain `=`; values are any bytes.
pub(super) fn push(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    // Space, `=` and the line's end.
    let rest = key.len() + value.len() + 3;
    let mut digits = 1;
    while (rest + digits).to_string().len() > digits {
        digits += 1;
    }
    out.extend_from_slice((rest + digits).to_string().as_bytes());
    out.push(b' ');
    out.extend_from_slice(key);
    out.push(b'=');
    out.extend_from_slice(value);
    out.push(b'\n');
}

/// Reads all records; none when they are malformed.
pub(super) fn parse(mut bytes: &[u8]) -> Option<Vec<(&[u8], &[u8])>> {
    let mut records = Vec::new();
    while !bytes.is_empty() {
        let space = bytes.iter().take(20).position(|byte| *byte == b' ')?;
        let len: usize = std::str::from_utf8(&bytes[..space]).ok()?.parse().ok()?;
        let record = bytes.get(space + 1..len)?.strip_suffix(b"\n")?;
        let equals = record.iter().position(|byte| *byte == b'=')?;
        records.push((&record[..equals], &record[equals + 1..]));
        bytes = &bytes[len..];
    }
    Some(records)
}

/// GNU tar's way to put a name with `=` or `%` in a key.
pub(super) fn escape(name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    for byte in name {
        match byte {
            b'%' => out.extend_from_slice(b"%25"),
            b'=' => out.extend_from_slice(b"%3D"),
            byte => out.push(*byte),
        }
    }
    out
}

/// The reverse; other `%` sequences stay as they are.
pub(super) fn unescape(key: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(key.len());
    let mut rest = key;
    while let Some((first, behind)) = rest.split_first() {
        let (byte, skip) = match rest.get(..3) {
            Some(b"%25") => (b'%', 2),
            Some(b"%3D") => (b'=', 2),
            _ => (*first, 0),
        };
        out.push(byte);
        rest = &behind[skip..];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_counts_its_own_length() {
        for len in 0..1200 {
            let value = vec![b'v'; len];
            let mut out = Vec::new();
            push(&mut out, b"key", &value);
            push(&mut out, b"k", b"a=b\nc");
            assert_eq!(parse(&out).unwrap(), vec![(&b"key"[..], &value[..]), (b"k", b"a=b\nc")]);
        }
        for bad in [&b"5 a=b"[..], b"x a=b\n", b"99 a=b\n", b"6 a=bc", b"4 ab\n", b"0 a=\n", b"1 \n"] {
            assert!(parse(bad).is_none(), "{bad:?}");
        }
    }

    #[test]
    fn names_of_attributes_come_back() {
        for name in [&b"user.a"[..], b"user.a=b%3D%25%", b"user.\xff%2"] {
            assert!(!escape(name).contains(&b'='));
            assert_eq!(unescape(&escape(name)), name);
        }
    }
}
