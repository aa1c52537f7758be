//! How long to wait before the broker is dialled again.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(100);
const LAST: Duration = Duration::from_secs(5);

/// Pauses that double, each a random part of its bound, so that many guests don't come back all at once.
#[derive(Debug, Clone, Copy)]
pub struct Backoff {
    bound: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { bound: FIRST }
    }
}

impl Backoff {
    /// The next pause: at random up to the bound, which doubles from 100 ms to 5 s.
    pub fn pause(&mut self) -> Duration {
        let bound = self.bound;
        self.bound = (bound * 2).min(LAST);
        bound.mul_f64(fastrand::f64())
    }

    /// The broker works: start anew.
    pub fn reset(&mut self) {
        self.bound = FIRST;
    }
}

/// A pause that the broker asked for, and up to a quarter more at random.
#[must_use]
pub fn spread(asked: Duration) -> Duration {
    asked + asked.mul_f64(fastrand::f64() / 4.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_double_up_to_five_seconds_and_start_anew() {
        let mut backoff = Backoff::default();
        for bound_ms in [100, 200, 400, 800, 1600, 3200, 5000, 5000] {
            assert_eq!(backoff.bound, Duration::from_millis(bound_ms));
            assert!(backoff.pause() <= Duration::from_millis(bound_ms));
        }
        backoff.reset();
        assert!(backoff.pause() <= FIRST);
    }

    #[test]
    fn an_asked_pause_is_never_shortened() {
        let asked = Duration::from_secs(2);
        for _ in 0..100 {
            let pause = spread(asked);
            assert!(pause >= asked && pause <= Duration::from_millis(2500));
        }
    }
}
