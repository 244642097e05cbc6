//! What an answer means, in one sentence with the remedy.
//!
//! What stays true: "not there", "something else is there", "may pass" and "will not pass" are different answers (I7);
//! no sentence holds a secret. What does not belong here: what is done about it.

use std::fmt;
use std::io;
use std::time::Duration;

use covey_home::backend::BackendError;

use crate::wire::Answer;

/// A clock that is off by more is told about, because servers refuse what was signed by it (S3: 15 minutes).
const SKEW_TOLD: i64 = 5 * 60;

/// What follows from a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailureKind {
    /// The server says that there is no such object.
    Absent,
    /// The condition of a conditional put was not met.
    Condition,
    /// The range begins behind the end.
    Range,
    /// The server asks to try later, or is at fault. It may have done what was asked.
    Busy,
    /// The link failed. The server may have done what was asked.
    Lost,
    /// The bytes that arrived are not those that were sent.
    Damaged,
    /// Trying again changes nothing.
    Refused,
}

/// A failed try.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    kind: FailureKind,
    text: String,
    /// Bytes that nobody has sent are visible under the object's name.
    leaves_damage: bool,
}

impl Failure {
    pub(crate) fn new(kind: FailureKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into(), leaves_damage: false }
    }

    /// The same of a put that has stored other bytes than were sent, if it has.
    pub(crate) const fn leaving_damage(mut self, leaves_damage: bool) -> Self {
        self.leaves_damage |= leaves_damage;
        self
    }

    pub(crate) const fn leaves_damage(&self) -> bool {
        self.leaves_damage
    }

    pub(crate) const fn kind(&self) -> FailureKind {
        self.kind
    }

    pub(crate) const fn may_pass(&self) -> bool {
        matches!(self.kind, FailureKind::Busy | FailureKind::Lost | FailureKind::Damaged)
    }

    /// The same, from who has given up.
    pub(crate) fn after(self, tries: u32, time: Duration) -> Self {
        let mut text = format!("{} (tried {tries} times in {:.1} s)", self.text, time.as_secs_f32());
        if self.leaves_damage {
            text.push_str("; what is stored under this name is damaged: repair the store");
        }
        Self { text, ..self }
    }

    /// For callers of a backend; `what` was tried, on which file.
    pub(crate) fn into_backend(self, what: impl Into<String>) -> BackendError {
        let kind = match self.kind {
            FailureKind::Lost => io::ErrorKind::TimedOut,
            FailureKind::Busy => io::ErrorKind::ResourceBusy,
            FailureKind::Damaged => io::ErrorKind::InvalidData,
            FailureKind::Refused => io::ErrorKind::PermissionDenied,
            FailureKind::Absent | FailureKind::Condition | FailureKind::Range => io::ErrorKind::Other,
        };
        BackendError::unavailable(what, io::Error::new(kind, self.text))
    }

    /// Judges by what the server answered; `said` is what the client library made of it.
    pub(crate) fn judge(answer: &Answer, said: &str, at: &Told<'_>) -> Self {
        let (kind, text) = match answer.status {
            None if answer.asked => (FailureKind::Lost, format!("{} does not answer: {said}", at.endpoint)),
            // No request was made, so nothing was wrong with one: there is no credential, or none that signs.
            None => (FailureKind::Refused, format!("no request could be made: {said}; {CREDENTIALS}")),
            Some(status) => by_status(status, answer, said, at),
        };
        let text = match answer.skew.filter(|skew| kind == FailureKind::Refused && skew.abs() > SKEW_TOLD) {
            Some(skew) => format!("{} ({text})", clock(skew, at)),
            None => text,
        };
        Self::new(kind, text)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// What sentences name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Told<'a> {
    pub(crate) endpoint: &'a str,
    pub(crate) bucket: &'a str,
    pub(crate) region: &'a str,
    /// The id of the access key, which is no secret; none when it comes from elsewhere than the settings.
    pub(crate) key_id: Option<&'a str>,
}

const CREDENTIALS: &str = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or run where the machine \
                           itself has a role";

fn clock(skew: i64, at: &Told<'_>) -> String {
    let direction = if skew > 0 { "behind" } else { "ahead of" };
    let minutes = skew.abs() / 60;
    format!("this machine's clock is {minutes} min {direction} that of {}: set it (NTP)", at.endpoint)
}

fn by_status(status: u16, answer: &Answer, said: &str, at: &Told<'_>) -> (FailureKind, String) {
    let Told { endpoint, bucket, region, .. } = at;
    let key = at.key_id.map_or_else(|| "the access key".to_owned(), |id| format!("the access key {id}"));
    let refused = |text: String| (FailureKind::Refused, text);
    match (status, answer.code.as_str()) {
        (_, "NoSuchBucket") => refused(format!(
            "there is no bucket `{bucket}` at {endpoint}: create it, or correct its name or the endpoint"
        )),
        (_, "InvalidAccessKeyId") => {
            refused(format!("{key} is not known to {endpoint}: check AWS_ACCESS_KEY_ID and the endpoint"))
        }
        (_, "SignatureDoesNotMatch") => {
            refused(format!("the secret does not belong to {key}: check AWS_SECRET_ACCESS_KEY"))
        }
        (_, "RequestTimeTooSkewed" | "RequestExpired") => refused(answer.skew.map_or_else(
            || format!("this machine's clock is not that of {endpoint}: set it (NTP)"),
            |skew| clock(skew, at),
        )),
        (_, "ExpiredToken" | "InvalidToken" | "TokenRefreshRequired") => refused(format!(
            "the session token of {key} has expired or is not valid: get a new one (AWS_SESSION_TOKEN)"
        )),
        (301 | 307 | 308, _) | (_, "AuthorizationHeaderMalformed" | "IllegalLocationConstraintException") => {
            let right = answer.region.as_deref().filter(|right| right != region);
            refused(match right {
                Some(right) => {
                    format!(
                        "the bucket `{bucket}` is in region {right} and not in {region}: set AWS_REGION={right}"
                    )
                }
                None => format!(
                    "{endpoint} does not serve `{bucket}` for region {region}: set AWS_REGION and the endpoint to \
                     where the bucket is"
                ),
            })
        }
        (401 | 403, code) => refused(format!(
            "{key} may not do this in bucket `{bucket}` ({}): allow it s3:ListBucket on the bucket, and s3:GetObject, \
             s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload on its objects",
            shown(status, code)
        )),
        // The answer was good, and could not be read or understood.
        (200..=299, _) => {
            (FailureKind::Damaged, format!("the answer of {endpoint} breaks off or is damaged: {said}"))
        }
        (404, code) => (FailureKind::Absent, shown(status, code)),
        (304 | 412, code) => (FailureKind::Condition, shown(status, code)),
        (416, code) => (FailureKind::Range, shown(status, code)),
        (
            400,
            "BadDigest"
            | "XAmzContentSHA256Mismatch"
            | "XAmzContentChecksumMismatch"
            | "IncompleteBody"
            | "InvalidDigest"
            | "InvalidPart"
            | "MalformedXML",
        ) => (FailureKind::Damaged, format!("what was sent arrived damaged at {endpoint} ({})", answer.code)),
        (501, _) => refused(format!(
            "{endpoint} does not know this request ({}): use a server that does",
            answer.code
        )),
        (409 | 429 | 500..=599, code) | (400, code @ "RequestTimeout") => {
            (FailureKind::Busy, format!("{endpoint} answers {}", shown(status, code)))
        }
        (_, code) => refused(format!("{endpoint} answers {}: {}", shown(status, code), answer.message)),
    }
}

fn shown(status: u16, code: &str) -> String {
    if code.is_empty() { status.to_string() } else { format!("{status} {code}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: Told<'_> =
        Told { endpoint: "http://e", bucket: "bkt", region: "us-east-1", key_id: Some("AKIA1") };

    fn judged(status: u16, code: &str, change: impl FnOnce(&mut Answer)) -> Failure {
        let mut answer =
            Answer { asked: true, status: Some(status), code: code.to_owned(), ..Answer::default() };
        change(&mut answer);
        Failure::judge(&answer, "library's words", &AT)
    }

    #[test]
    fn each_wrong_setting_is_named_with_its_remedy() {
        let none = |_: &mut Answer| {};
        for (failure, words) in [
            (
                judged(403, "InvalidAccessKeyId", none),
                "AKIA1 is not known to http://e: check AWS_ACCESS_KEY_ID",
            ),
            (judged(403, "SignatureDoesNotMatch", none), "check AWS_SECRET_ACCESS_KEY"),
            (judged(404, "NoSuchBucket", none), "no bucket `bkt` at http://e: create it"),
            (
                judged(301, "PermanentRedirect", |answer| answer.region = Some("eu-west-1".into())),
                "in region eu-west-1 and not in us-east-1: set AWS_REGION=eu-west-1",
            ),
            (judged(400, "AuthorizationHeaderMalformed", none), "set AWS_REGION"),
            (
                judged(403, "RequestTimeTooSkewed", |answer| answer.skew = Some(3600)),
                "clock is 60 min behind",
            ),
            (judged(403, "AccessDenied", |answer| answer.skew = Some(-7200)), "clock is 120 min ahead"),
            (judged(403, "AccessDenied", none), "s3:PutObject"),
            (judged(400, "ExpiredToken", none), "AWS_SESSION_TOKEN"),
        ] {
            assert!(failure.to_string().contains(words), "{failure}");
            assert_eq!(failure.kind(), FailureKind::Refused, "{failure}");
        }
    }

    #[test]
    fn answers_are_told_apart_by_what_follows_from_them() {
        let kind = |status, code: &str| judged(status, code, |_| {}).kind();
        assert_eq!(kind(404, "NoSuchKey"), FailureKind::Absent);
        assert_eq!(kind(404, ""), FailureKind::Absent);
        assert_eq!(kind(206, ""), FailureKind::Damaged);
        assert_eq!(kind(412, "PreconditionFailed"), FailureKind::Condition);
        assert_eq!(kind(409, "ConditionalRequestConflict"), FailureKind::Busy);
        assert_eq!(kind(503, "SlowDown"), FailureKind::Busy);
        assert_eq!(kind(400, "BadDigest"), FailureKind::Damaged);
        assert_eq!(kind(416, "InvalidRange"), FailureKind::Range);
        assert_eq!(kind(501, "NotImplemented"), FailureKind::Refused);
        let silent = Answer { asked: true, ..Answer::default() };
        assert_eq!(Failure::judge(&silent, "reset", &AT).kind(), FailureKind::Lost);
        let unasked = Failure::judge(&Answer::default(), "no credentials", &AT);
        assert!(unasked.kind() == FailureKind::Refused && unasked.to_string().contains("AWS_PROFILE"));
    }
}
