//! How long the hint in force still holds. Pure: the caller hands in the time, of the monotonic clock.

use std::time::{Duration, Instant};

/// The lease of the hint in force, if there is one.
#[derive(Debug, Clone, Copy, Default)]
pub struct Lease {
    ends: Option<Instant>,
}

impl Lease {
    /// A hint was received at `received` and holds for `length`; it replaces the lease before.
    pub fn grant(&mut self, received: Instant, length: Duration) {
        self.ends = Some(received + length);
    }

    /// No hint is in force any more.
    pub fn end(&mut self) {
        self.ends = None;
    }

    /// When it runs out; `None` without a lease.
    #[must_use]
    pub fn ends(&self) -> Option<Instant> {
        self.ends
    }

    /// Has a lease run out by `now`? It is over at its last instant.
    #[must_use]
    pub fn is_over(&self, now: Instant) -> bool {
        self.ends.is_some_and(|ends| now >= ends)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_runs_out_once_and_a_renewal_moves_its_end() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let mut lease = Lease::default();
        assert!(!lease.is_over(start + 100 * second), "no lease, no end");
        lease.grant(start, 3 * second);
        assert!(!lease.is_over(start + 2 * second));
        assert!(lease.is_over(start + 3 * second));
        lease.grant(start + 2 * second, 3 * second);
        assert!(!lease.is_over(start + 4 * second));
        assert_eq!(lease.ends(), Some(start + 5 * second));
        assert!(lease.is_over(start + 5 * second));
        lease.end();
        assert!(!lease.is_over(start + 9 * second));
        assert_eq!(lease.ends(), None);
    }

    #[test]
    fn a_shorter_lease_replaces_a_longer_one() {
        let start = Instant::now();
        let mut lease = Lease::default();
        lease.grant(start, Duration::from_secs(60));
        lease.grant(start, Duration::from_secs(1));
        assert!(lease.is_over(start + Duration::from_secs(1)));
    }
}
