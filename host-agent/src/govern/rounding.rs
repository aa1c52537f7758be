//! From a target to a number of vCPUs.

use crate::model::{BoundBy, Cpus};

/// Rounding up leaves off so much of a partly served vCPU, where that leaves no pCPU idle ...
const LEFT_OFF: f64 = 0.15;
/// ... but no more than this part of the target, which nobody gives back ...
const LEFT_OFF_PART: f64 = 0.04;
/// ... and so much where it would: what measuring may be wrong by.
pub(super) const LEFT_OFF_LEAST: f64 = 0.02;

/// With the vCPUs that it is left, a VM must run this part of what it is due, even if what waits does not come sooner again.
const SERVED: f64 = 0.92;

/// Slope of the logistic curve that is nearest to the normal one.
const LOGISTIC: f64 = 1.702;

/// How targets are rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rounding {
    /// A small part of a vCPU is left off.
    Coarse,
    /// Hardly anything is left off, since pCPUs would idle, or since nobody else could use it.
    Fine,
}

impl Rounding {
    /// What it leaves off.
    pub(super) fn left_off(self, target: Cpus) -> f64 {
        match self {
            Self::Coarse => LEFT_OFF.min((LEFT_OFF_PART * target.0).max(LEFT_OFF_LEAST)),
            Self::Fine => LEFT_OFF_LEAST,
        }
    }

    /// Rounds up; at least 1.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // the cast saturates, and NaN gives 0
    pub(super) fn up(self, target: Cpus) -> u32 {
        ((target.0 - self.left_off(target)).ceil() as u32).max(1)
    }
}

/// The rounding for one competing set: the coarse one unless it would leave pCPUs idle that VMs want.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Round {
    /// Shares of the VMs that get less than they claim.
    pub(super) limited: f64,
    /// Their targets, rounded coarsely.
    pub(super) rounded: f64,
}

impl Round {
    pub(super) fn add(&mut self, share: Cpus, target: Cpus) {
        self.limited += share.0;
        self.rounded += f64::from(Rounding::Coarse.up(target));
    }

    pub(super) fn rounding(&self, limit: BoundBy) -> Rounding {
        let idles = self.rounded + 1e-9 < self.limited - LEFT_OFF;
        if idles || matches!(limit, BoundBy::Quota(_)) {
            Rounding::Fine
        } else {
            Rounding::Coarse
        }
    }
}

/// The least count from `rounded` on with which a VM runs what it is due, if the number of vCPUs that want to run is spread like
/// this around its mean. With n of them wanting and u in use, min(n, u) run: m - σ·L((u - m) / σ) on the mean, where L is the
/// standard normal loss, here by the logistic curve that is nearest to the normal one (Bowling et al., 2009).
pub(super) fn with_room(
    rounded: u32,
    vcpus: u32,
    target: Cpus,
    mean: Cpus,
    deviation: Cpus,
) -> u32 {
    let due = SERVED * target.0.min(mean.0);
    let deviation = deviation.0.max(1e-3);
    let runs = |usable: u32| {
        let z = LOGISTIC * (mean.0 - f64::from(usable)) / deviation;
        // ln(1 + e^z) without overflow.
        let loss = z.max(0.0) + (-z.abs()).exp().ln_1p();
        mean.0 - deviation * loss / LOGISTIC
    };
    (rounded..vcpus)
        .find(|usable| runs(*usable) >= due)
        .unwrap_or(vcpus)
}
