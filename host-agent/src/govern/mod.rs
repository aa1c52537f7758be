//! Govern: from what each VM could run to how many vCPUs it should use, and when to say so. Pure: no I/O and no clock; the
//! daemon, the tests and whoever replays a recording call the same [`Governor::step`].
//!
//! The rules, in their order: a VM that can't be judged or can't fold keeps all its vCPUs; without contention all do; under
//! contention each is folded to its share, rounded so that no pCPU idles; and what moves is damped, so that the price of a
//! wrong fold stays bounded. Whoever is in doubt gets the larger number.

mod contention;
mod damping;
mod division;
mod explain;
mod state;

use std::collections::BTreeMap;
use std::time::Duration;

use self::contention::PoolState;
use self::damping::Move;
use self::division::{Division, ROUNDING_FULL, divide, round_up};
use self::state::VmState;
use crate::model::{Classes, Contention, Cpus, Placement, Reason, Tick, VmId};

/// After its start the broker watches, and so it does with each new VM, before it folds anything.
const WARM_UP: Duration = Duration::from_secs(1);
/// An unfolded VM that runs between these parts of its target sleeps too often to show its demand.
const SLEEPER: (f64, f64) = (0.30, 0.85);
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
        let division = divide(&self.pool, &self.vms, now, vms, host_weight);
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
                    let full_since = self.pool.full_since();
                    wanted(
                        state,
                        vm,
                        vcpus,
                        target,
                        division.rounding,
                        Moment {
                            now,
                            full_since,
                            young,
                        },
                    )
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
            // Only a raise that follows a share may wait; whatever ends a fold for another reason ends it now.
            let by_share = matches!(
                wanted.reason,
                Reason::Contention | Reason::Policy | Reason::ShareCovers
            );
            let moved = state
                .damper
                .settle(now, vcpus, wanted.usable, saturated || !by_share);
            decision.usable = Some(moved.usable());
            decision.reason = if moved == Move::PutOff(moved.usable()) {
                Reason::Damped
            } else {
                wanted.reason
            };
            decision.changed = matches!(moved, Move::Folded(_) | Move::Unfolded(_));
            // A class that changed with every tremble of the target would be news to the guest each time.
            let steady = state.damper.steady_target().or(target);
            decision.classes = classes(vcpus, moved.usable(), contention, steady);
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

/// When a VM is judged.
#[derive(Clone, Copy)]
struct Moment {
    now: Duration,
    /// Its pool has been full since then.
    full_since: Duration,
    /// It or the broker has been watched for too short a time.
    young: bool,
}

/// What a governable VM should use in a contended pool.
fn wanted(
    state: &mut VmState,
    vm: &VmInput,
    vcpus: u32,
    target: Cpus,
    rounding: f64,
    moment: Moment,
) -> Wanted {
    let Moment {
        now,
        full_since,
        young,
    } = moment;
    let in_use = state.in_use(vm, vcpus);
    let all = |reason| Wanted {
        usable: vcpus,
        reason,
    };
    let share = state
        .damper
        .steady(target, rounding, round_up(target, rounding))
        .clamp(1, vcpus);
    if state.starves(now, in_use, vcpus, target) {
        state.starved.begin(now);
    }
    // What it ran before the pool was full tells of the time before its load began.
    let ran = state.demand.long_run(full_since).0 / target.0.min(f64::from(vcpus)).max(0.01);
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
