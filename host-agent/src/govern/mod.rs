//! Govern: from what each VM could run to how many vCPUs it should use, and when to say so. Pure: no I/O and no clock; the
//! daemon, the tests and whoever replays a recording call the same [`Governor::step`].
//!
//! The rules, in their order: a VM that can't be judged or can't fold keeps all its vCPUs; without contention all do; under
//! contention each is folded to its share, rounded so that no pCPU idles; and what moves is damped, so that the price of a
//! wrong fold stays bounded. Whoever is in doubt gets the larger number.

mod claims;
mod classes;
mod damping;
mod decide;
mod gate;
mod input;
mod pcpus;
mod rounding;
mod state;

use std::collections::HashMap;
use std::time::Duration;

use self::claims::Claims;
use self::classes::Classes;
use self::decide::Moment;
use self::gate::{Gate, Idle};
pub use self::input::{AgentState, Input, Policy, VmInput};
use self::pcpus::Pcpus;
use self::rounding::Round;
use self::state::VmState;
use crate::entitle::{Bound, Division, Engine};
use crate::model::{Contention, Cpus, Reason, Tick, VmId, Why};

/// Idle time is shown as a mean over so long.
const SHOWN_OVER: Duration = Duration::from_millis(500);
/// Threads may be waiting where pCPUs are idle for less than this part of the time.
const MAY_QUEUE: f64 = 0.1;

/// What was decided for one VM.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decision {
    /// Which.
    pub id: VmId,
    /// vCPUs to use now; `None` when its vCPUs are not known.
    pub usable: Option<u32>,
    /// The vCPUs by class.
    pub classes: crate::model::Classes,
    /// What bound usable, and what would change it.
    pub why: Why,
    /// Contention of the pCPUs that it may use, or of its quota.
    pub contention: Contention,
    /// Idle time of the pCPUs that it may use.
    pub spare: Option<Cpus>,
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
    /// Folds since it was seen first.
    pub folds: u64,
    /// Unfolds since then.
    pub unfolds: u64,
}

impl Decision {
    /// What bound usable, without the figures.
    #[must_use]
    pub fn reason(&self) -> Reason {
        self.why.reason()
    }
}

/// One decision for the whole host.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Step {
    /// What the pCPUs that VMs may use can give.
    pub supply: Option<Cpus>,
    /// How busy they are.
    pub used: Option<Cpus>,
    /// How idle they are.
    pub idle: Option<Cpus>,
    /// Contended, if any of them are.
    pub contention: Contention,
    /// The VMs, in the order of the input.
    pub decisions: Vec<Decision>,
}

/// Decides, tick by tick.
#[derive(Debug, Default)]
pub struct Governor {
    started: Option<Duration>,
    pcpus: Pcpus,
    claims: Claims,
    engine: Engine,
    classes: Classes,
    groups: Vec<Gate>,
    group_runs: Vec<(f64, f64)>,
    rounds: Vec<Round>,
    vms: Vec<VmState>,
    hungry: Vec<usize>,
    step: Step,
    may_queue: bool,
}

impl Governor {
    /// Decides after one tick.
    pub fn step(&mut self, tick: &Tick, input: &Input<'_>) -> &Step {
        let now = tick.at;
        let started = *self.started.get_or_insert(now);
        follow(&mut self.vms, now, input.vms);
        let known = self.take_figures(tick, input);
        let Self {
            pcpus,
            claims,
            engine,
            classes,
            groups,
            group_runs,
            rounds,
            vms,
            hungry,
            step,
            ..
        } = self;
        let division = known.then(|| {
            claims.fill(now, input, pcpus, vms);
            engine.divide(claims.host())
        });
        if let Some(division) = division {
            classes.follow(claims.version(), &division.classes, input, pcpus);
            round(rounds, division, input);
            if !tick.interval.is_zero() {
                classes.push(tick.interval, division, pcpus);
                push_quotas(tick.interval, input, vms, groups, group_runs);
                for vm in vms.iter_mut() {
                    vm.turn_quota(now);
                }
                for group in groups.iter_mut() {
                    if group.turn(now) == Idle::Much {
                        group.leave(now);
                    }
                }
                classes.turn(now, |classes, class, idle| {
                    give(now, classes, class, idle, input, vms, hungry)
                });
            }
        } else {
            classes.forget();
        }
        step.decisions.clear();
        for (index, vm) in input.vms.iter().enumerate() {
            let moment = Moment {
                now,
                started,
                index,
                division,
                classes,
                groups,
                all_groups: input.groups,
                rounds,
            };
            let (decision, raised) = moment.decide(vm, &mut vms[index]);
            if raised {
                classes.restart_idle(index, now);
            }
            step.decisions.push(decision);
        }
        self.sum_up(known);
        &self.step
    }

    /// The last step.
    #[must_use]
    pub fn last(&self) -> &Step {
        &self.step
    }

    /// Can threads be waiting for a pCPU now? Where not, their states need not be read.
    #[must_use]
    pub fn may_queue(&self) -> bool {
        self.may_queue
    }

    fn take_figures(&mut self, tick: &Tick, input: &Input<'_>) -> bool {
        if tick.interval.is_zero() {
            return !self.pcpus.ids().is_empty();
        }
        for (vm, state) in input.vms.iter().zip(&mut self.vms) {
            let (Some(vcpus), Some(Some(rates))) = (vm.vcpus(), tick.vms.get(&vm.id)) else {
                continue;
            };
            let in_use = state.in_use(vm, vcpus);
            state.demand.push(tick.at, tick.interval, rates, in_use);
            state.note_hunger(tick.at, vm, vcpus);
        }
        self.pcpus.push(tick.interval, tick.pcpus.as_deref())
    }

    fn sum_up(&mut self, known: bool) {
        let step = &mut self.step;
        (step.supply, step.used, step.idle) = (None, None, None);
        step.contention = Contention::Unknown;
        self.may_queue = false;
        if !known {
            return;
        }
        let (mut supply, mut used, mut idle) = (Cpus::ZERO, Cpus::ZERO, Cpus::ZERO);
        for place in 0..self.pcpus.ids().len() {
            if self.claims.is_governed(place) {
                supply = supply + self.pcpus.supply(place);
                used = used + self.pcpus.used(place);
                idle = idle + self.pcpus.latest(place).idle;
            }
        }
        (step.supply, step.used) = (Some(supply), Some(used));
        step.idle = Some(Cpus((supply.0 - used.0).max(0.0)));
        self.may_queue = self.classes.is_any_busier(1.0 - MAY_QUEUE);
        let any = self
            .classes
            .contentions()
            .any(|(_, contention)| contention == Contention::Contended);
        step.contention = if any {
            Contention::Contended
        } else {
            Contention::None
        };
    }
}

/// Brings the states into the order of the VMs; new VMs get one, and those of VMs that are gone are dropped.
fn follow(states: &mut Vec<VmState>, now: Duration, vms: &[VmInput]) {
    if states
        .iter()
        .map(|state| state.id)
        .eq(vms.iter().map(|vm| vm.id))
    {
        return;
    }
    let mut known: HashMap<VmId, VmState> =
        states.drain(..).map(|state| (state.id, state)).collect();
    states.extend(vms.iter().map(|vm| {
        known
            .remove(&vm.id)
            .unwrap_or_else(|| VmState::new(vm.id, now))
    }));
}

/// How targets are rounded in each competing set.
fn round(rounds: &mut Vec<Round>, division: &Division, input: &Input<'_>) {
    rounds.clear();
    rounds.resize(division.sets.len(), Round::default());
    for (vm, entitlement) in input.vms.iter().zip(&division.claimants) {
        let Some(entitlement) = entitlement else {
            continue;
        };
        let folds = matches!(vm.agent, AgentState::Works { .. });
        let limited = folds
            && !matches!(
                entitlement.share_bound,
                Bound::Demand(_) | Bound::Threads(_) | Bound::Quota(_) | Bound::GroupQuota { .. }
            );
        if let Some(round) = rounds.get_mut(entitlement.set).filter(|_| limited) {
            round.add(entitlement.share, entitlement.target);
        }
    }
}

/// Takes what a tick said of the quotas, of VMs and of groups.
fn push_quotas(
    interval: Duration,
    input: &Input<'_>,
    vms: &mut [VmState],
    groups: &mut Vec<Gate>,
    runs: &mut Vec<(f64, f64)>,
) {
    groups.resize(input.groups.len(), Gate::default());
    runs.clear();
    runs.resize(input.groups.len(), (0.0, 0.0));
    for (vm, state) in input.vms.iter().zip(vms) {
        let Some(vcpus) = vm.vcpus() else { continue };
        let wanted = state.shown(vm, vcpus);
        state.push_quota(interval, vm.quota, wanted);
        for group in ancestors(vm.parent, input.groups) {
            runs[group].0 += state.demand.latest_run().0;
            runs[group].1 += wanted.0;
        }
    }
    for ((gate, group), (run, wanted)) in groups.iter_mut().zip(input.groups).zip(runs) {
        state::push_quota(gate, interval, group.cap, Cpus(*run), Cpus(*wanted));
    }
}

/// The groups above a VM, the nearest first.
fn ancestors(
    parent: Option<usize>,
    groups: &[crate::model::Group],
) -> impl Iterator<Item = usize> + '_ {
    let known = move |index: &usize| *index < groups.len();
    let first = parent.filter(known);
    // Parents that go round in a circle end here too.
    std::iter::successors(first, move |group| groups[*group].parent.filter(known))
        .take(groups.len())
}

/// Gives the idle time of a class to folded VMs that fill what they have, as more vCPUs than their share; says whether there are
/// any.
fn give(
    now: Duration,
    classes: &Classes,
    class: usize,
    idle: Cpus,
    input: &Input<'_>,
    vms: &mut [VmState],
    hungry: &mut Vec<usize>,
) -> bool {
    hungry.clear();
    for (index, (vm, state)) in input.vms.iter().zip(vms.iter()).enumerate() {
        let Some(vcpus) = vm.vcpus() else { continue };
        if state.is_hungry(vm, vcpus)
            && classes.may_use(index, class)
            && classes.of_vm(index) == Contention::Contended
        {
            hungry.push(index);
        }
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    // the cast saturates, and NaN gives 0
    let each = (idle.0 / hungry.len().max(1) as f64).ceil() as u32;
    // Time that was idle before a guest had anything to do was not kept from it.
    for index in hungry.iter() {
        if vms[*index].hungered(now) {
            vms[*index].more.raise(now, each);
        }
    }
    !hungry.is_empty()
}

#[cfg(test)]
mod tests;
