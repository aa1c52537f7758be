//! How long the hint in force still holds. Pure: the caller hands in the time, of [`crate::clock`].

use std::time::Duration;

use crate::clock::Moment;

/// The lease of the hint in force, if there is one.
#[derive(Debug, Clone, Copy, Default)]
pub struct Lease {
    ends: Option<Moment>,
}

impl Lease {
    /// A hint was received at `received` and holds for `length`; it replaces the lease before.
    pub fn grant(&mut self, received: Moment, length: Duration) {
        self.ends = Some(received + length);
    }

    /// No hint is in force any more.
    pub fn end(&mut self) {
        self.ends = None;
    }

    /// When it runs out; `None` without a lease.
    #[must_use]
    pub fn ends(&self) -> Option<Moment> {
        self.ends
    }

    /// Has a lease run out by `now`? It is over at its last instant.
    #[must_use]
    pub fn is_over(&self, now: Moment) -> bool {
        self.ends.is_some_and(|ends| now >= ends)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_runs_out_once_and_a_renewal_moves_its_end() {
        let start = Moment::now();
        let second = Duration::from_secs(1);
        let mut lease = Lease::default();
        assert!(!lease.is_over(start + second * 100), "no lease, no end");
        lease.grant(start, second * 3);
        assert!(!lease.is_over(start + second * 2));
        assert!(lease.is_over(start + second * 3));
        lease.grant(start + second * 2, second * 3);
        assert!(!lease.is_over(start + second * 4));
        assert_eq!(lease.ends(), Some(start + second * 5));
        assert!(lease.is_over(start + second * 5));
        lease.end();
        assert!(!lease.is_over(start + second * 9));
        assert_eq!(lease.ends(), None);
    }

    #[test]
    fn a_shorter_lease_replaces_a_longer_one() {
        let start = Moment::now();
        let mut lease = Lease::default();
        lease.grant(start, Duration::from_secs(60));
        lease.grant(start, Duration::from_secs(1));
        assert!(lease.is_over(start + Duration::from_secs(1)));
    }
}
