//! Limits on how much a guest may say, and on how often the log repeats it.

use std::time::Duration;

use tokio::time::Instant;

/// A bucket of tokens that refills at a steady rate.
#[derive(Debug)]
pub(super) struct RateLimit {
    burst: u32,
    refill: Duration,
    tokens: f64,
    at: Instant,
}

impl RateLimit {
    /// A full bucket of `burst` tokens that refills in the time `refill`, which is longer than zero.
    pub(super) fn new(burst: u32, refill: Duration, now: Instant) -> Self {
        Self {
            burst,
            refill,
            tokens: f64::from(burst),
            at: now,
        }
    }

    /// Takes `cost` tokens; `false` when there are fewer, and then takes none.
    pub(super) fn take(&mut self, cost: u32, now: Instant) -> bool {
        let burst = f64::from(self.burst);
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.tokens = (self.tokens + passed / self.refill.as_secs_f64() * burst).min(burst);
        self.at = now;
        let cost = f64::from(cost);
        let enough = self.tokens >= cost;
        if enough {
            self.tokens -= cost;
        }
        enough
    }
}

/// Lets a log line through now and then and counts the ones in between.
#[derive(Debug)]
pub(super) struct LogGate {
    limit: RateLimit,
    held_back: u64,
}

impl LogGate {
    /// A gate for five lines a minute.
    pub(super) fn new(now: Instant) -> Self {
        Self {
            limit: RateLimit::new(5, Duration::from_secs(60), now),
            held_back: 0,
        }
    }

    /// `Some(n)` when a line may be written, with the number held back since the last one.
    pub(super) fn open(&mut self, now: Instant) -> Option<u64> {
        if self.limit.take(1, now) {
            Some(std::mem::take(&mut self.held_back))
        } else {
            self.held_back += 1;
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_then_the_rate_holds() {
        let start = Instant::now();
        let mut limit = RateLimit::new(60, Duration::from_secs(3), start);
        assert!((0..60).all(|_| limit.take(1, start)));
        assert!(!limit.take(1, start));
        let second = start + Duration::from_secs(1);
        assert_eq!((0..100).filter(|_| limit.take(1, second)).count(), 20);
        let late = start + Duration::from_secs(600);
        assert_eq!((0..100).filter(|_| limit.take(1, late)).count(), 60);
    }

    #[test]
    fn the_gate_tells_how_many_lines_it_held_back() {
        let start = Instant::now();
        let mut gate = LogGate::new(start);
        let lines = (0..12).filter(|_| gate.open(start).is_some()).count();
        assert_eq!(lines, 5);
        assert_eq!(gate.open(start + Duration::from_secs(13)), Some(7));
    }
}
