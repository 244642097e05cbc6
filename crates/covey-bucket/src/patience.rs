//! How long, how often and at which intervals a request is tried again.
//!
//! What stays true: every wait has an end; waits grow and are spread at random, so that many clients of a server that
//! comes back do not come back together; who gives up says how often it was tried, for how long, and what the last
//! answer was. Whoever has left damage behind goes on until the deadline, however often it was tried. What does not
//! belong here: which failures may pass.

use std::future::Future;
use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use tokio::time::Instant;

use crate::failure::{Failure, FailureKind};

/// Limits of one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// A try without an answer for so long has failed; what is transferred has [`Patience::bytes_per_second_min`] on
    /// top.
    pub answer: Duration,
    /// The slowest transfer that is waited for.
    pub bytes_per_second_min: u64,
    /// After so long no further try begins.
    pub deadline: Duration,
    /// Tries at most.
    pub tries_max: u32,
    /// The same while a bucket is opened, when somebody waits to be told that a setting is wrong.
    pub tries_to_open_max: u32,
    /// Wait before the second try; doubled for each further one, and then shortened by chance to half at most.
    pub wait_first: Duration,
    /// Longest wait between two tries.
    pub wait_max: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            answer: Duration::from_secs(30),
            bytes_per_second_min: 256 * 1024,
            deadline: Duration::from_secs(180),
            tries_max: 10,
            tries_to_open_max: 4,
            wait_first: Duration::from_millis(100),
            wait_max: Duration::from_secs(20),
        }
    }
}

impl Patience {
    /// For opening a bucket.
    pub(crate) fn to_open(self) -> Self {
        Self { tries_max: self.tries_to_open_max, ..self }
    }

    /// One request; it has failed when no answer comes in time. `bytes` are transferred.
    pub(crate) async fn within<T>(
        &self,
        bytes: usize,
        request: impl Future<Output = T>,
    ) -> Result<T, Failure> {
        let limit =
            self.answer + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second_min.max(1) as f64);
        tokio::time::timeout(limit, request).await.map_err(|_| {
            Failure::new(FailureKind::Lost, format!("no answer within {} s", limit.as_secs_f32()))
        })
    }

    /// Does `attempt` until it succeeds, fails for good, or patience ends; it is given the number of the try, from 1.
    /// It sees to it that each of its requests ends.
    pub(crate) async fn persist<T, F>(&self, attempt: impl FnMut(u32) -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        self.persist_until(|failure| !failure.may_pass(), attempt).await
    }

    /// The same, but `is_enough` says after which failure it is not tried again.
    pub(crate) async fn persist_until<T, F>(
        &self,
        is_enough: impl Fn(&Failure) -> bool,
        mut attempt: impl FnMut(u32) -> F,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let begun = Instant::now();
        let (mut number, mut leaves_damage) = (1, false);
        loop {
            let failure = match attempt(number).await {
                Ok(done) => return Ok(done),
                // What an earlier try has left behind is there until a later one succeeds.
                Err(failure) => failure.leaving_damage(leaves_damage),
            };
            leaves_damage = failure.leaves_damage();
            let wait = self.wait(number);
            if is_enough(&failure) {
                return Err(if leaves_damage { failure.after(number, begun.elapsed()) } else { failure });
            }
            let is_tried_enough = number >= self.tries_max && !leaves_damage;
            if is_tried_enough || begun.elapsed() + wait >= self.deadline {
                return Err(failure.after(number, begun.elapsed()));
            }
            tracing::debug!(try_number = number, failure = %failure, "trying again");
            tokio::time::sleep(wait).await;
            number += 1;
        }
    }

    fn wait(&self, tried: u32) -> Duration {
        let full = self.wait_first.saturating_mul(1 << (tried - 1).min(16)).min(self.wait_max);
        // Half of it is sure, half is chance.
        let chance = RandomState::new().hash_one(tried) % 1024;
        full / 2 + full.mul_f64(chance as f64 / 2048.0)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// Waits that are over at once.
    fn quick() -> Patience {
        let wait = Duration::from_micros(1);
        Patience { wait_first: wait, wait_max: wait, ..Patience::default() }
    }

    fn blocking<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
    }

    fn failing(kind: FailureKind) -> (Failure, u32) {
        let tries = AtomicU32::new(0);
        let failed = blocking(quick().persist(|_| {
            tries.fetch_add(1, Ordering::SeqCst);
            async move { Err::<(), _>(Failure::new(kind, "broken")) }
        }));
        (failed.unwrap_err(), tries.into_inner())
    }

    #[test]
    fn what_may_pass_is_tried_until_patience_ends_and_the_rest_once() {
        let (failure, tries) = failing(FailureKind::Busy);
        assert_eq!(tries, Patience::default().tries_max);
        assert!(failure.to_string().contains("tried 10 times"), "{failure}");
        assert_eq!(failing(FailureKind::Refused).1, 1);
    }

    #[test]
    fn what_left_damage_behind_is_tried_until_it_is_mended() {
        let tries_max = Patience::default().tries_max;
        let tried = blocking(quick().persist(|number| async move {
            match number {
                2 => Err(Failure::new(FailureKind::Damaged, "flipped").leaving_damage(true)),
                number if number > tries_max * 3 => Ok(number),
                _ => Err(Failure::new(FailureKind::Busy, "broken")),
            }
        }));
        assert_eq!(tried.unwrap(), tries_max * 3 + 1);
        let patience = Patience { deadline: Duration::from_millis(1), ..quick() };
        let failed = blocking(patience.persist(|_| async {
            Err::<(), _>(Failure::new(FailureKind::Damaged, "flipped").leaving_damage(true))
        }));
        let text = failed.unwrap_err().to_string();
        assert!(text.contains("flipped") && text.contains("repair the store"), "{text}");
    }

    #[test]
    fn waits_grow_have_a_limit_and_are_never_nothing() {
        let patience = Patience::default();
        for tried in 1..40 {
            let wait = patience.wait(tried);
            assert!(wait >= patience.wait_first / 2 && wait <= patience.wait_max, "{tried}: {wait:?}");
        }
        assert!(patience.wait(8) > patience.wait_first * 10);
    }

    #[test]
    fn a_try_that_hangs_ends() {
        let patience = Patience { answer: Duration::from_millis(1), ..quick() };
        let failed = blocking(patience.within(0, std::future::pending::<()>())).unwrap_err();
        assert!(failed.may_pass() && failed.to_string().contains("no answer within 0.001 s"), "{failed}");
    }
}
