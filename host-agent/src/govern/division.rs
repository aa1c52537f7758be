//! The pool divided: who claims how much of it, and what each VM could get.

use std::collections::BTreeMap;
use std::time::Duration;

use super::VmInput;
use super::contention::PoolState;
use super::state::VmState;
use crate::entitle::{Claim, max_min, target};
use crate::model::{Cpus, Placement, VmId};

/// Rounding up leaves off so much of a partly served vCPU, where that leaves no pCPU idle ...
const ROUNDING: f64 = 0.15;
/// ... and so much where it would.
pub(super) const ROUNDING_FULL: f64 = 0.02;

/// The pool divided: what each governable VM could get.
#[derive(Debug)]
pub(super) struct Division {
    /// What the pool can give.
    pub(super) supply: Cpus,
    /// What all who claim a part of it show that they want, without headroom.
    pub(super) demand: Cpus,
    /// What each governable VM would get if it wanted all its vCPUs.
    pub(super) targets: BTreeMap<VmId, Cpus>,
    /// What to leave off when rounding a target up.
    pub(super) rounding: f64,
}

/// Divides the pool among the VMs on it and the host's own work; `None` while its supply is not known.
pub(super) fn divide(
    pool: &PoolState,
    states: &BTreeMap<VmId, VmState>,
    now: Duration,
    vms: &[VmInput],
    host_weight: u32,
) -> Option<Division> {
    let supply = pool.supply()?;
    let mut claims = Vec::new();
    let mut claimants = Vec::new();
    let mut demand = Cpus::ZERO;
    let mut other = pool.used()?;
    for vm in vms.iter().filter(|vm| vm.placement != Placement::Elsewhere) {
        let (Some(vcpus), Some(state)) = (vm.vcpus, states.get(&vm.id)) else {
            continue;
        };
        if !state.demand.is_fresh(now) {
            continue;
        }
        let hides = state.in_use(vm, vcpus) < vcpus && state.demand.is_saturated();
        demand = demand
            + if hides {
                Cpus::from(vcpus)
            } else {
                state.demand.measured()
            };
        other = other - state.demand.run();
        claims.push(Claim {
            weight: f64::from(vm.weight),
            demand: state.demand.estimate(vcpus),
        });
        claimants.push((vm, vcpus));
    }
    // What the VMs did not use, the host did. Measured in two places, the difference may be a little below nothing.
    let other = Cpus(other.0.max(0.0));
    demand = demand + other;
    claims.push(Claim {
        weight: f64::from(host_weight),
        demand: other,
    });
    let targets: BTreeMap<VmId, Cpus> = claimants
        .iter()
        .enumerate()
        .filter(|(_, (vm, _))| vm.placement == Placement::Pool)
        .map(|(index, (vm, vcpus))| (vm.id, target(supply, &claims, index, Cpus::from(*vcpus))))
        .collect();
    let rounding = rounding(supply, &claims, &claimants, &targets);
    Some(Division {
        supply,
        demand,
        targets,
        rounding,
    })
}

/// The rounding for all VMs: the coarser one unless it would leave pCPUs idle that VMs want.
fn rounding(
    supply: Cpus,
    claims: &[Claim],
    claimants: &[(&VmInput, u32)],
    targets: &BTreeMap<VmId, Cpus>,
) -> f64 {
    let shares = max_min(supply, claims);
    let mut left = supply.0;
    let mut rounded = 0.0;
    for (index, share) in shares.iter().enumerate() {
        let limited = share.0 + 1e-9 < claims[index].demand.0;
        let governed = claimants.get(index).and_then(|(vm, _)| targets.get(&vm.id));
        match governed.filter(|_| limited) {
            Some(target) => rounded += f64::from(round_up(*target, ROUNDING)),
            None => left -= share.0,
        }
    }
    if rounded + 1e-9 < left - ROUNDING {
        ROUNDING_FULL
    } else {
        ROUNDING
    }
}

/// Rounds up, after leaving off `rounding`; at least 1.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // the cast saturates, and NaN gives 0
pub(super) fn round_up(target: Cpus, rounding: f64) -> u32 {
    ((target.0 - rounding).ceil() as u32).max(1)
}
