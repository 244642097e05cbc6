//! How long to wait before the next attempt: computed from what the journal holds, so that it can be computed
//! again after a crash. What does not belong here: waiting.

use covey_types::Fault;

/// Attempts of one model step: about twenty minutes of a provider's bad weather.
pub const MODEL_ATTEMPTS_MAX: u32 = 24;
/// Failures in a row after which the next provider is asked, where there is one: enough that a short burst of refusals
/// does not move a session to another model, few enough that nobody waits long for a provider that is down.
pub const FAILURES_BEFORE_FAILOVER: u32 = 3;
/// Attempts to get a sandbox ready: a few minutes.
pub const WAKE_ATTEMPTS_MAX: u32 = 10;
/// The first wait; each later one is twice as long.
pub const WAIT_FIRST_MS: u64 = 500;
/// The longest wait of our own choice.
pub const WAIT_LONGEST_MS: u64 = 60_000;
/// The longest wait a provider may ask for; a longer wish is cut to it and asked again.
pub const RETRY_AFTER_LONGEST_MS: u64 = 3_600_000;

/// The wait after attempt number `attempt` (from 1) failed. `jitter_permille` (0 to 1000) spreads it over the
/// upper half, so that many sessions do not come back at once.
pub fn wait_ms(attempt: u32, jitter_permille: u16, retry_after_ms: Option<u64>) -> u64 {
    let doublings = attempt.saturating_sub(1).min(20);
    let full = (WAIT_FIRST_MS << doublings).min(WAIT_LONGEST_MS);
    let jittered = full / 2 + full / 2 * u64::from(jitter_permille.min(1000)) / 1000;
    // The provider knows better, but it cannot make us come sooner than our own patience says.
    jittered.max(retry_after_ms.unwrap_or(0).min(RETRY_AFTER_LONGEST_MS))
}

/// Whether another attempt to ready a sandbox can help.
pub const fn may_wake_again(fault: Fault, attempt: u32) -> bool {
    let transient = match fault {
        Fault::Retry | Fault::Conflict | Fault::Limit | Fault::Full => true,
        Fault::NotFound | Fault::Invalid | Fault::Denied | Fault::Corrupt | Fault::Bug | Fault::TooLarge => {
            false
        }
    };
    transient && attempt < WAKE_ATTEMPTS_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_to_a_limit_and_obey_the_provider() {
        let unjittered: Vec<u64> = (1..=9).map(|n| wait_ms(n, 1000, None)).collect();
        assert_eq!(unjittered, [500, 1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000]);
        assert_eq!(wait_ms(1, 0, None), 250);
        assert_eq!(wait_ms(1, 0, Some(7000)), 7000);
        assert_eq!(wait_ms(9, 1000, Some(7000)), 60_000);
        assert_eq!(wait_ms(u32::MAX, u16::MAX, Some(u64::MAX)), RETRY_AFTER_LONGEST_MS);
    }
}
