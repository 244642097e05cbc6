//! Amounts as people write them: `500MiB`, `7d`, `none`.

/// A limit, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Amount {
    /// This much.
    Set(u64),
    /// `none`.
    Unset,
}

impl Amount {
    /// The number, where `none` means `unset`.
    pub(crate) const fn or(self, unset: u64) -> u64 {
        match self {
            Self::Set(number) => number,
            Self::Unset => unset,
        }
    }
}

pub(crate) fn number(text: &str) -> Result<Amount, String> {
    with_unit(text, &[("", 1)], "a whole number or `none`")
}

pub(crate) fn seconds(text: &str) -> Result<Amount, String> {
    let units = [("s", 1), ("m", 60), ("h", 3600), ("d", 86_400), ("w", 604_800)];
    with_unit(text, &units, "a number with s, m, h, d or w behind it, or `none`")
}

pub(crate) fn bytes(text: &str) -> Result<Amount, String> {
    let units = [
        ("", 1),
        ("B", 1),
        ("kB", 1000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("TB", 1_000_000_000_000),
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
    ];
    with_unit(text, &units, "a number of bytes, with MB, GiB and the like behind it, or `none`")
}

fn with_unit(text: &str, units: &[(&str, u64)], expected: &str) -> Result<Amount, String> {
    if text == "none" {
        return Ok(Amount::Unset);
    }
    let at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(at);
    let factor = units.iter().find(|(name, _)| *name == unit.trim_start()).map(|(_, factor)| *factor);
    let number =
        digits.parse::<u64>().ok().zip(factor).and_then(|(number, factor)| number.checked_mul(factor));
    number.map(Amount::Set).ok_or_else(|| format!("expected {expected}"))
}

/// A time in its largest unit that is exact.
pub(crate) fn duration(seconds: u64) -> String {
    let units = [(604_800, "w"), (86_400, "d"), (3600, "h"), (60, "m")];
    let exact = units.iter().find(|(unit, _)| seconds >= *unit && seconds.is_multiple_of(*unit));
    exact.map_or_else(|| format!("{seconds}s"), |(unit, name)| format!("{}{name}", seconds / unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_read_with_their_units_and_nothing_is_guessed() {
        assert_eq!(bytes("10GiB"), Ok(Amount::Set(10 << 30)));
        assert_eq!(bytes("1 MB"), Ok(Amount::Set(1_000_000)));
        assert_eq!(bytes("7"), Ok(Amount::Set(7)));
        assert_eq!(bytes("none"), Ok(Amount::Unset));
        assert_eq!(seconds("7d"), Ok(Amount::Set(604_800)));
        for bad in ["", "GiB", "-1", "1.5GiB", "10gib", "99999999999999TiB", "10 G"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
        // A bare number of seconds would be taken for days by half of all people.
        assert!(seconds("7").is_err() && seconds("7y").is_err() && number("7d").is_err());
        assert_eq!([duration(1_209_600), duration(86_400), duration(90)], ["2w", "1d", "90s"]);
    }
}
