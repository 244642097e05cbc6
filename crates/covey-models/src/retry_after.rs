//! How long a provider asks to wait: the `retry-after` header (seconds or a date), a field of the body, or its words.
//!
//! A date is compared with the `date` header of the same answer, so that no decision compares two machines' clocks
//! (I5); without one it is read as "not given".

use std::time::Duration;

use serde_json::Value;

/// A longer wait than this is cut: the provider cannot park a session for a day with one header.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);

/// Reads the wait. `date` is the answer's own `date` header. None for what is absent or unreadable.
pub fn parse(retry_after: &str, date: Option<&str>) -> Option<Duration> {
    let text = retry_after.trim();
    let wait = match text.parse::<f64>() {
        Ok(seconds) if seconds.is_finite() => {
            Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(RETRY_AFTER_MAX)
        }
        Ok(_) => return None,
        Err(_) => {
            let until = unix_seconds(text)?;
            let now = unix_seconds(date?.trim())?;
            Duration::from_secs(u64::try_from((until - now).max(0)).ok()?)
        }
    };
    Some(wait.min(RETRY_AFTER_MAX))
}

/// The wait that an error's body asks for: `retry_after` or `retry_after_ms` beside or inside `error`, or its message.
pub fn in_body(body: &Value) -> Option<Duration> {
    let number = |field: &str| {
        let found = [&body["error"][field], &body[field]].into_iter().find(|value| !value.is_null())?;
        found.as_f64().or_else(|| found.as_str()?.trim().parse().ok())
    };
    let seconds = number("retry_after").or_else(|| Some(number("retry_after_ms")? / 1000.0));
    let message = body["error"]["message"].as_str().or_else(|| body["message"].as_str());
    seconds.and_then(limited).or_else(|| in_words(message?))
}

/// The wait in a sentence such as `Please try again in 1m6.5s.` or `… in 20ms`.
pub fn in_words(text: &str) -> Option<Duration> {
    const BEFORE: &str = "try again in ";
    let lower = text.to_lowercase();
    let mut rest = &lower[lower.find(BEFORE)? + BEFORE.len()..];
    let mut seconds = None;
    loop {
        let length = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let Ok(number) = rest[..length].trim_end_matches('.').parse::<f64>() else { break };
        rest = rest[length..].trim_start();
        // The longest unit first: `m` begins `ms` as well.
        let units = [("ms", 0.001), ("h", 3600.0), ("m", 60.0), ("s", 1.0)];
        let Some((unit, factor)) = units.into_iter().find(|(unit, _)| rest.starts_with(unit)) else { break };
        seconds = Some(seconds.unwrap_or(0.0) + number * factor);
        rest = &rest[unit.len()..];
    }
    seconds.and_then(limited)
}

fn limited(seconds: f64) -> Option<Duration> {
    let wait = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(RETRY_AFTER_MAX);
    seconds.is_finite().then_some(wait.min(RETRY_AFTER_MAX))
}

/// Reads the one date form that HTTP lets servers send: `Sun, 06 Nov 1994 08:49:37 GMT`.
fn unix_seconds(text: &str) -> Option<i64> {
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (_, rest) = text.split_once(", ")?;
    let parts: Vec<&str> = rest.split_ascii_whitespace().collect();
    let [day, month, year, clock, "GMT"] = parts[..] else { return None };
    let month = MONTHS.iter().position(|name| *name == month)? as i64 + 1;
    let (day, year) = (day.parse::<i64>().ok()?, year.parse::<i64>().ok()?);
    let fields: Vec<i64> = clock.split(':').map(|f| f.parse().ok()).collect::<Option<_>>()?;
    let [hour, minute, second] = fields[..] else { return None };
    let sane = (1..=31).contains(&day) && (1970..=9999).contains(&year);
    if !sane || !(0..24).contains(&hour) || !(0..60).contains(&minute) || !(0..=60).contains(&second) {
        return None;
    }
    // Years that begin in March put the leap day last; 719 468 days lie between 0000-03-01 and 1970-01-01.
    let year = if month <= 2 { year - 1 } else { year };
    let day_of_year = (153 * (month + if month > 2 { -3 } else { 9 }) + 2) / 5 + day - 1;
    let days = year * 365 + year / 4 - year / 100 + year / 400 + day_of_year - 719_468;
    Some(days * 86_400 + hour * 3600 + minute * 60 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_fields_are_read_whatever_unit_they_use() {
        let words = |text: &str| {
            in_words(&format!("Limit reached. Please try again in {text}")).map(|d| d.as_millis())
        };
        assert_eq!(words("20ms."), Some(20));
        assert_eq!(words("1.5s"), Some(1500));
        assert_eq!(words("6m0s"), Some(360_000));
        assert_eq!(words("1h2m3s. Visit"), Some(3_600_000), "cut to the limit");
        assert_eq!(words("7 seconds"), Some(7000));
        assert_eq!(words("a while"), None);
        let body = |text: &str| in_body(&serde_json::from_str(text).unwrap()).map(|d| d.as_millis());
        assert_eq!(body(r#"{"error": {"retry_after_ms": 250}}"#), Some(250));
        assert_eq!(body(r#"{"retry_after": "3"}"#), Some(3000));
        assert_eq!(body(r#"{"message": "try again in 2s"}"#), Some(2000));
        assert_eq!(body("{}"), None);
    }

    #[test]
    fn seconds_and_dates_are_read_and_long_waits_cut() {
        let date = Some("Sun, 29 Nov 2026 23:59:50 GMT");
        assert_eq!(parse("7", None), Some(Duration::from_secs(7)));
        assert_eq!(parse(" 0.5 ", None), Some(Duration::from_millis(500)));
        assert_eq!(parse("-3", None), Some(Duration::ZERO));
        assert_eq!(parse("1e300", None), Some(RETRY_AFTER_MAX));
        assert_eq!(parse("Mon, 30 Nov 2026 00:00:05 GMT", date), Some(Duration::from_secs(15)));
        assert_eq!(parse("Sun, 29 Nov 2026 23:00:00 GMT", date), Some(Duration::ZERO));
        assert_eq!(parse("Mon, 30 Nov 2026 00:00:05 GMT", None), None);
        for text in ["", "soon", "NaN", "Mon, 30 Foo 2026 00:00:05 GMT", "Mon, 99 Nov 2026 00:00:05 GMT"] {
            assert_eq!(parse(text, date), None, "{text}");
        }
        assert_eq!(unix_seconds("Thu, 01 Jan 1970 00:00:00 GMT"), Some(0));
        assert_eq!(unix_seconds("Tue, 29 Feb 2000 00:00:00 GMT"), Some(951_782_400));
    }
}
