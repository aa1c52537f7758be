//! What the governor keeps of one VM between steps.

use std::time::Duration;

use super::damping::Damper;
use super::{AgentState, VmInput};
use crate::entitle::demand::Demand;
use crate::model::Cpus;

/// A folded VM that wants its vCPUs and runs less than this part of what it is due, for so long, starves.
const STARVED: f64 = 0.70;
const STARVED_FOR: Duration = Duration::from_secs(2);
/// A VM that starved, or whose agent failed, is left unfolded for so long at first, and no longer than the second.
const SPARED: Duration = Duration::from_secs(60);
const SPARED_MOST: Duration = Duration::from_secs(960);

/// One VM's history, as far as decisions need it.
#[derive(Debug)]
pub(super) struct VmState {
    pub(super) first_seen: Duration,
    pub(super) enforced: bool,
    pub(super) demand: Demand,
    pub(super) damper: Damper,
    starves_since: Option<Duration>,
    pub(super) starved: Spared,
    pub(super) failed: Spared,
}

impl VmState {
    pub(super) fn new(now: Duration) -> Self {
        Self {
            first_seen: now,
            enforced: false,
            demand: Demand::default(),
            damper: Damper::default(),
            starves_since: None,
            starved: Spared::default(),
            failed: Spared::default(),
        }
    }

    /// How many vCPUs the guest uses, of those that it was told to: all of them until its agent has said otherwise. What it
    /// avoids beyond that is its own choice and hides no demand.
    pub(super) fn in_use(&self, vm: &VmInput, vcpus: u32) -> u32 {
        let told = self.damper.usable().unwrap_or(vcpus);
        match vm.agent {
            AgentState::Works {
                in_use: Some(in_use),
            } => in_use.max(told).clamp(1, vcpus.max(1)),
            _ => vcpus,
        }
    }

    /// Has a folded VM that wants its vCPUs run much less than it is due, for some time? Then its peers take what it gave up.
    pub(super) fn starves(&mut self, now: Duration, in_use: u32, vcpus: u32, target: Cpus) -> bool {
        let due = target.0.min(f64::from(in_use));
        let hungry =
            in_use < vcpus && self.demand.is_saturated() && self.demand.run().0 < STARVED * due;
        if !hungry {
            self.starves_since = None;
            return false;
        }
        let since = *self.starves_since.get_or_insert(now);
        let starves = now - since >= STARVED_FOR;
        if starves {
            self.starves_since = None;
        }
        starves
    }
}

/// How long something is left alone that went wrong: twice as long each time.
#[derive(Debug, Default)]
pub(super) struct Spared {
    until: Duration,
    last: Duration,
}

impl Spared {
    pub(super) fn begin(&mut self, now: Duration) {
        self.last = if self.last.is_zero() {
            SPARED
        } else {
            (2 * self.last).min(SPARED_MOST)
        };
        self.until = now + self.last;
    }

    pub(super) fn holds(&self, now: Duration) -> bool {
        now < self.until
    }
}
