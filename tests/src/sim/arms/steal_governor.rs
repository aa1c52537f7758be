//! The steal governor of the preferred-CPU series: a guest that looks at its own steal time, and moves by one CPU a period.

use super::GuestRule;
use crate::sim::clock::{Nanos, SEC, seconds};
use crate::sim::sight::GuestSight;

/// As merged (thresholds 500 and 200 in hundredths of a percent, one period), or with other thresholds that must hold for
/// several periods in a row (`PATIENT`: 400 and 150, two, as posted in November 2025).
#[derive(Debug, Default)]
pub struct StealGovernor<const PATIENT: bool> {
    last: u64,
    high_for: u32,
    low_for: u32,
    started: bool,
}

impl<const PATIENT: bool> StealGovernor<PATIENT> {
    const HIGH: f64 = if PATIENT { 0.04 } else { 0.05 };
    const LOW: f64 = if PATIENT { 0.015 } else { 0.02 };
    const SAMPLES: u32 = if PATIENT { 2 } else { 1 };
}

impl<const PATIENT: bool> GuestRule for StealGovernor<PATIENT> {
    const PERIOD: Nanos = SEC;

    fn decide(&mut self, guest: &GuestSight) -> usize {
        // Threads on avoided vCPUs steal nothing, so the sum is that of the CPUs in use.
        let steal: u64 = guest.steal.iter().sum();
        let ratio = seconds(steal - self.last) / seconds(Self::PERIOD) / guest.in_use as f64;
        self.last = steal;
        if !std::mem::replace(&mut self.started, true) {
            return guest.in_use;
        }
        self.high_for = if ratio > Self::HIGH {
            self.high_for + 1
        } else {
            0
        };
        self.low_for = if ratio < Self::LOW {
            self.low_for + 1
        } else {
            0
        };
        if self.high_for >= Self::SAMPLES {
            self.high_for = 0;
            return (guest.in_use - 1).max(1);
        }
        if self.low_for >= Self::SAMPLES {
            self.low_for = 0;
            return (guest.in_use + 1).min(guest.steal.len());
        }
        guest.in_use
    }
}
