//! Repeating failed operations until the deadline, for all providers.

use crate::failure::Failure;
use std::thread;
use std::time::{Duration, Instant};

use pagevault_keystore::protocol::ErrorClass;

/// Pauses between attempts: they double each time, less a random part.
#[derive(Debug, Clone, Copy)]
pub struct Backoff {
    /// Maximum of the first pause.
    pub first: Duration,
    /// Maximum of all pauses.
    pub limit: Duration,
}

impl Default for Backoff {
    fn default() -> Backoff {
        Backoff { first: Duration::from_millis(100), limit: Duration::from_secs(5) }
    }
}

/// Calls `attempt` until it succeeds, fails with an error that is not transient, or the next pause
/// would exceed `deadline`. Returns the last error, with the number of attempts in its detail. If
/// that has the class `deadline` and there was another one before, returns the latter, which is
/// more informative. `passing` is called with each error that is followed by another attempt,
/// because that attempt may never end.
pub fn retry<T>(
    backoff: Backoff,
    deadline: Option<Instant>,
    mut passing: impl FnMut(Failure),
    mut attempt: impl FnMut() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let mut wait = backoff.first;
    let mut attempts = 0_u32;
    let mut before = None;
    loop {
        attempts = attempts.saturating_add(1);
        let error = match (attempt(), before.take()) {
            (Ok(value), _) => return Ok(value),
            (Err(late), Some(before)) if late.class == ErrorClass::Deadline => before,
            (Err(error), _) => error,
        };
        let pause = jittered(wait);
        let in_time = deadline.is_some_and(|deadline| Instant::now() + pause < deadline);
        if !error.retry || !in_time {
            return Err(counted(error, attempts));
        }
        passing(counted(error.clone(), attempts));
        before = Some(error);
        thread::sleep(pause);
        wait = (wait * 2).min(backoff.limit);
    }
}

/// Adds the number of attempts to the detail, if there was more than one.
fn counted(mut error: Failure, attempts: u32) -> Failure {
    if attempts > 1 {
        let tried = format!("Tried {attempts} times.");
        error.detail = Some(match error.detail {
            Some(detail) => format!("{detail} {tried}"),
            None => tried,
        });
    }
    error
}

/// A random duration between half of `wait` and `wait`, so that servers that lost the same provider
/// do not retry in step. Without random bytes `wait` itself, which is harmless.
fn jittered(wait: Duration) -> Duration {
    let part = getrandom::u32().map_or(1.0, |r| 0.5 + f64::from(r) / f64::from(u32::MAX) / 2.0);
    wait.mul_f64(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAST: Backoff =
        Backoff { first: Duration::from_millis(1), limit: Duration::from_millis(4) };

    fn soon() -> Option<Instant> {
        Some(Instant::now() + Duration::from_secs(5))
    }

    fn throttled() -> Failure {
        Failure::new(ErrorClass::Throttled, "too many requests").transient()
    }

    #[test]
    fn transient_errors_are_tried_again() {
        let mut left = 3;
        let result = retry(FAST, soon(), drop, || {
            left -= 1;
            if left == 0 { Ok(7) } else { Err(throttled()) }
        });
        assert_eq!(result, Ok(7));
    }

    #[test]
    fn other_errors_are_not() {
        let mut calls = 0;
        let result: Result<(), _> = retry(FAST, soon(), drop, || {
            calls += 1;
            Err(Failure::new(ErrorClass::Denied, "no"))
        });
        assert_eq!((calls, result.unwrap_err().detail()), (1, ""));
    }

    #[test]
    fn errors_before_another_attempt_are_reported_at_once() {
        let (mut calls, mut told) = (0, Vec::new());
        let result = retry(
            FAST,
            soon(),
            |error| told.push(error.detail().to_owned()),
            || {
                calls += 1;
                if calls == 3 { Ok(()) } else { Err(throttled()) }
            },
        );
        assert_eq!((result, told), (Ok(()), vec![String::new(), "Tried 2 times.".to_owned()]));
    }

    #[test]
    fn the_deadline_does_not_hide_an_earlier_error() {
        let mut calls = 0;
        let result: Result<(), _> =
            retry(FAST, Some(Instant::now() + Duration::from_millis(50)), drop, || {
                calls += 1;
                let late = Failure::new(ErrorClass::Deadline, "late").transient();
                Err(if calls == 1 { throttled() } else { late })
            });
        assert_eq!((calls > 1, result.unwrap_err().class), (true, ErrorClass::Throttled));
    }

    #[test]
    fn the_last_error_is_returned_before_the_deadline() {
        let start = Instant::now();
        let deadline = start + Duration::from_millis(50);
        let error = retry::<()>(FAST, Some(deadline), drop, || Err(throttled())).unwrap_err();
        assert!(Instant::now() <= deadline + Duration::from_secs(1));
        assert_eq!(error.class, ErrorClass::Throttled);
        assert!(error.detail().starts_with("Tried "), "{}", error.detail());
    }

    #[test]
    fn waits_stay_under_their_limit() {
        for _ in 0..100 {
            let pause = jittered(Duration::from_millis(100));
            assert!((50..=100).contains(&pause.as_millis()), "{pause:?}");
        }
    }
}
