//! The heuristic of an independent test of the paravirt-CPU series: avoid as many CPUs as steal time is worth, ⌊Δsteal / Δt⌋,
//! whatever was decided before.

use super::GuestRule;
use crate::sim::clock::{Nanos, SEC};
use crate::sim::sight::GuestSight;

/// One guest's.
#[derive(Debug, Default)]
pub struct StealMon {
    last: u64,
}

impl GuestRule for StealMon {
    const PERIOD: Nanos = SEC;

    fn decide(&mut self, guest: &GuestSight) -> usize {
        let steal: u64 = guest.steal.iter().sum();
        let avoided = (steal - self.last) / Self::PERIOD;
        self.last = steal;
        let avoided = usize::try_from(avoided).unwrap_or(usize::MAX);
        guest.steal.len().saturating_sub(avoided).max(1)
    }
}
