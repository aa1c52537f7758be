//! Govern: from what each VM could run to how many vCPUs it should use, and when to say so. Pure: no I/O and no clock; the
//! daemon, the tests and whoever replays a recording call the same [`Governor::step`].
//!
//! The rules, in their order: a VM that can't be judged or can't fold keeps all its vCPUs; without contention all do; under
//! contention each is folded to its share, rounded so that no pCPU idles; and what moves is damped, so that the price of a
//! wrong fold stays bounded. Whoever is in doubt gets the larger number.

mod contention;
mod damping;
mod explain;

use std::collections::BTreeMap;
use std::time::Duration;

use self::contention::PoolState;
use self::damping::{Damper, Move};
use crate::entitle::demand::Demand;
use crate::entitle::{Claim, max_min, target};
use crate::model::{Classes, Contention, Cpus, Placement, Reason, Tick, VmId};

/// After its start the broker watches, and so it does with each new VM, before it folds anything.
const WARM_UP: Duration = Duration::from_secs(1);
/// Rounding up leaves off so much of a partly served vCPU, where that leaves no pCPU idle ...
const ROUNDING: f64 = 0.15;
/// ... and so much where it would.
const ROUNDING_FULL: f64 = 0.02;
/// An unfolded VM that runs between these parts of its target sleeps too often to show its demand.
const SLEEPER: (f64, f64) = (0.30, 0.85);
/// A folded VM that wants its vCPUs and runs less than this part of what it is due, for so long, starves.
const STARVED: f64 = 0.70;
const STARVED_FOR: Duration = Duration::from_secs(2);
/// A VM that starved, or whose agent failed, is left unfolded for so long at first, and no longer than the second.
const SPARED: Duration = Duration::from_secs(60);
const SPARED_MOST: Duration = Duration::from_secs(960);

/// How long something is left alone that went wrong: twice as long each time.
#[derive(Debug, Default)]
struct Spared {
    until: Duration,
    last: Duration,
}

impl Spared {
    fn begin(&mut self, now: Duration) {
        self.last = if self.last.is_zero() {
            SPARED
        } else {
            (2 * self.last).min(SPARED_MOST)
        };
        self.until = now + self.last;
    }

    fn holds(&self, now: Duration) -> bool {
        now < self.until
    }
}

/// What the governor knows of a VM's agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentState {
    /// None.
    Absent,
    /// One that could not do as the last hint said.
    Fails,
    /// One that can; the guest uses so many vCPUs now, where it has said so.
    Works {
        /// vCPUs in use.
        in_use: Option<u32>,
    },
}

/// One VM, as the governor needs it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct VmInput {
    /// Which.
    pub id: VmId,
    /// Its vCPUs; `None` when they are not known.
    pub vcpus: Option<u32>,
    /// Where it may run.
    pub placement: Placement,
    /// Its weight among the claimants of the pool.
    pub weight: u32,
    /// The configuration's least usable.
    pub min_usable: u32,
    /// Is its guest told to apply what is decided? Where not, the decisions are shown only.
    pub enforced: bool,
    /// Its agent.
    pub agent: AgentState,
}

/// What was decided for one VM.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// Which.
    pub id: VmId,
    /// vCPUs to use now; `None` when its vCPUs are not known.
    pub usable: Option<u32>,
    /// The vCPUs by class.
    pub classes: Classes,
    /// What bound usable.
    pub reason: Reason,
    /// The decision in words, with its figures and what would change it.
    pub explanation: String,
    /// What ran, as a mean of the last half second.
    pub run: Option<Cpus>,
    /// What waited, as a mean of the last half second.
    pub run_delay: Option<Cpus>,
    /// What it is taken to want.
    pub demand: Option<Cpus>,
    /// What it would get if it wanted all its vCPUs.
    pub target: Option<Cpus>,
    /// Did usable change in this step?
    pub changed: bool,
}

/// One decision for the whole host.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Step {
    /// What the pool can give.
    pub supply: Option<Cpus>,
    /// How busy it is.
    pub used: Option<Cpus>,
    /// How idle it is.
    pub idle: Option<Cpus>,
    /// Is it contended?
    pub contention: Contention,
    /// The VMs, in the order of the input.
    pub decisions: Vec<Decision>,
}

/// Decides, tick by tick.
#[derive(Debug, Default)]
pub struct Governor {
    started: Option<Duration>,
    pool: PoolState,
    vms: BTreeMap<VmId, VmState>,
}

#[derive(Debug)]
struct VmState {
    first_seen: Duration,
    enforced: bool,
    demand: Demand,
    damper: Damper,
    starves_since: Option<Duration>,
    starved: Spared,
    failed: Spared,
}

impl VmState {
    fn new(now: Duration) -> Self {
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
    fn in_use(&self, vm: &VmInput, vcpus: u32) -> u32 {
        let told = self.damper.usable().unwrap_or(vcpus);
        match vm.agent {
            AgentState::Works {
                in_use: Some(in_use),
            } => in_use.max(told).clamp(1, vcpus.max(1)),
            _ => vcpus,
        }
    }
}

/// The pool divided: what each governable VM could get.
struct Division {
    supply: Cpus,
    demand: Cpus,
    targets: BTreeMap<VmId, Cpus>,
    rounding: f64,
}

/// What should be, before damping.
struct Wanted {
    usable: u32,
    reason: Reason,
}

impl Governor {
    /// Decides after one tick. `host_weight` is the weight of all work outside the VMs.
    pub fn step(&mut self, tick: &Tick, vms: &[VmInput], host_weight: u32) -> Step {
        let now = tick.at;
        self.started.get_or_insert(now);
        self.take_figures(tick, vms);
        let division = self.divide(now, vms, host_weight);
        let contention = self.pool.judge(
            now,
            division
                .as_ref()
                .map_or(Cpus::ZERO, |division| division.demand),
        );
        let decisions = vms
            .iter()
            .map(|vm| self.decide(now, vm, contention, division.as_ref()))
            .collect();
        Step {
            supply: self.pool.supply(),
            used: self.pool.used(),
            idle: self.pool.idle(),
            contention,
            decisions,
        }
    }

    /// Can threads be waiting for a pCPU now? Where not, their states need not be read.
    #[must_use]
    pub fn may_queue(&self) -> bool {
        self.pool.may_queue()
    }

    /// Folds and unfolds of a VM since it was seen first.
    #[must_use]
    pub fn changes(&self, id: VmId) -> (u64, u64) {
        self.vms.get(&id).map_or((0, 0), |state| {
            (state.damper.folds(), state.damper.unfolds())
        })
    }

    fn take_figures(&mut self, tick: &Tick, vms: &[VmInput]) {
        if tick.interval.is_zero() {
            return;
        }
        self.pool.push(tick.at, tick.interval, tick.pool);
        self.vms.retain(|id, _| vms.iter().any(|vm| vm.id == *id));
        for vm in vms {
            let state = self
                .vms
                .entry(vm.id)
                .or_insert_with(|| VmState::new(tick.at));
            let (Some(vcpus), Some(Some(rates))) = (vm.vcpus, tick.vms.get(&vm.id)) else {
                continue;
            };
            let in_use = state.in_use(vm, vcpus);
            state
                .demand
                .push(tick.at, tick.interval, rates.run, rates.run_delay, in_use);
        }
    }

    /// Divides the pool among the VMs on it and the host's own work; `None` while its supply is not known.
    fn divide(&self, now: Duration, vms: &[VmInput], host_weight: u32) -> Option<Division> {
        let supply = self.pool.supply()?;
        let mut claims = Vec::new();
        let mut claimants = Vec::new();
        let mut demand = Cpus::ZERO;
        let mut other = self.pool.used()?;
        for vm in vms.iter().filter(|vm| vm.placement != Placement::Elsewhere) {
            let (Some(vcpus), Some(state)) = (vm.vcpus, self.vms.get(&vm.id)) else {
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

    fn decide(
        &mut self,
        now: Duration,
        vm: &VmInput,
        contention: Contention,
        division: Option<&Division>,
    ) -> Decision {
        let started = self.started.unwrap_or(now);
        let state = self.vms.entry(vm.id).or_insert_with(|| VmState::new(now));
        let fresh = state.demand.is_fresh(now);
        let target = division
            .and_then(|division| division.targets.get(&vm.id))
            .copied();
        let mut decision = Decision {
            id: vm.id,
            usable: None,
            classes: Classes::default(),
            reason: Reason::Unclassified,
            explanation: String::new(),
            run: fresh.then(|| state.demand.run()),
            run_delay: fresh.then(|| state.demand.run_delay()),
            demand: vm
                .vcpus
                .filter(|_| fresh)
                .map(|vcpus| state.demand.estimate(vcpus)),
            target,
            changed: false,
        };
        if vm.agent == AgentState::Fails && !state.failed.holds(now) {
            state.failed.begin(now);
        }
        if state.enforced != vm.enforced {
            // What was only shown cost the guest nothing, so it counts against no budget.
            state.enforced = vm.enforced;
            state.damper.start_anew();
        }
        if let Some(vcpus) = vm.vcpus {
            let young = now.saturating_sub(state.first_seen.max(started)) < WARM_UP;
            let wanted = match (contention, division, target) {
                _ if vm.placement != Placement::Pool => Wanted {
                    usable: vcpus,
                    reason: Reason::Pinned,
                },
                _ if vm.agent == AgentState::Absent || state.failed.holds(now) => Wanted {
                    usable: vcpus,
                    reason: Reason::NoAgent,
                },
                (Contention::Contended, Some(division), Some(target)) if fresh => {
                    wanted(state, now, vm, vcpus, target, division.rounding, young)
                }
                (Contention::None, Some(_), Some(_)) if fresh => Wanted {
                    usable: vcpus,
                    reason: Reason::Uncontended,
                },
                _ => Wanted {
                    usable: vcpus,
                    reason: Reason::Unmeasured,
                },
            };
            let saturated = state.demand.is_saturated();
            let moved = state.damper.settle(
                now,
                vcpus,
                wanted.usable,
                saturated || contention != Contention::Contended,
            );
            decision.usable = Some(moved.usable());
            decision.reason = if moved == Move::PutOff(moved.usable()) {
                Reason::Damped
            } else {
                wanted.reason
            };
            decision.changed = matches!(moved, Move::Folded(_) | Move::Unfolded(_));
            decision.classes = classes(vcpus, moved.usable(), contention, target);
            if matches!(moved, Move::Unfolded(_)) && saturated {
                self.pool.restart_idle(now);
            }
        }
        decision.explanation = explain::explain(
            vm,
            &decision,
            contention,
            division.map(|division| (division.supply, division.demand)),
        );
        decision
    }
}

/// What a governable VM should use in a contended pool.
fn wanted(
    state: &mut VmState,
    now: Duration,
    vm: &VmInput,
    vcpus: u32,
    target: Cpus,
    rounding: f64,
    young: bool,
) -> Wanted {
    let in_use = state.in_use(vm, vcpus);
    let all = |reason| Wanted {
        usable: vcpus,
        reason,
    };
    let share = state
        .damper
        .steady(target, rounding, round_up(target, rounding))
        .clamp(1, vcpus);
    if starves(state, now, in_use, vcpus, target) {
        state.starved.begin(now);
    }
    let ran = state.demand.long_run().0 / target.0.min(f64::from(vcpus)).max(0.01);
    // A VM that wants nearly all its vCPUs shows its demand, whatever the host lets it run.
    let sleeps =
        in_use == vcpus && !state.demand.is_saturated() && ran > SLEEPER.0 && ran < SLEEPER.1;
    if share >= vcpus {
        all(Reason::ShareCovers)
    } else if young {
        all(Reason::WarmUp)
    } else if vcpus == 1 || (vcpus == 2 && target.0 > 1.0) {
        all(Reason::NoGain)
    } else if state.starved.holds(now) {
        all(Reason::Starved)
    } else if sleeps {
        all(Reason::Sleeper)
    } else if vm.min_usable > share {
        Wanted {
            usable: vm.min_usable.min(vcpus),
            reason: Reason::Policy,
        }
    } else {
        Wanted {
            usable: share,
            reason: Reason::Contention,
        }
    }
}

/// Has a folded VM that wants its vCPUs run much less than it is due, for some time? Then its peers take what it gave up.
fn starves(state: &mut VmState, now: Duration, in_use: u32, vcpus: u32, target: Cpus) -> bool {
    let due = target.0.min(f64::from(in_use));
    let hungry =
        in_use < vcpus && state.demand.is_saturated() && state.demand.run().0 < STARVED * due;
    if !hungry {
        state.starves_since = None;
        return false;
    }
    let since = *state.starves_since.get_or_insert(now);
    let starves = now - since >= STARVED_FOR;
    if starves {
        state.starves_since = None;
    }
    starves
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
fn round_up(target: Cpus, rounding: f64) -> u32 {
    ((target.0 - rounding).ceil() as u32).max(1)
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // the cast saturates, and NaN gives 0
fn classes(vcpus: u32, usable: u32, contention: Contention, target: Option<Cpus>) -> Classes {
    let full = match (contention, target) {
        (Contention::Contended, Some(target)) => ((target.0 + ROUNDING_FULL) as u32).min(usable),
        _ => usable,
    };
    Classes {
        full,
        partial: usable - full,
        avoided: vcpus - usable,
    }
}

#[cfg(test)]
mod tests;
