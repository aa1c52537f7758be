//! The decision for one VM: the first rule that fits, then damping, then the grounds.

use std::time::Duration;

use super::classes::Classes;
use super::damping::Move;
use super::gate::{Gate, wanted_bound};
use super::input::{AgentState, VmInput};
use super::rounding::{LEFT_OFF_LEAST, Round, Rounding, with_room};
use super::state::VmState;
use super::{Decision, ancestors};
use crate::entitle::{Bound, Division, Entitlement};
use crate::model::{BoundBy, Contention, Cpus, Group, Pool, Rule, Turn, Why};

/// After its start the broker watches, and so it does with each new VM, before it folds anything.
const WARM_UP: Duration = Duration::from_secs(1);
/// Two vCPUs are folded to one only for a share of this or less: two threads that wait for each other are slow on one.
const SMALL_SHARE: f64 = 0.6;
/// A VM that wants less than so many times its target is served without folding.
const LIMITED: f64 = 1.1;

/// What holds for all VMs of a step, and which VM it is about.
pub(super) struct Moment<'a> {
    pub(super) now: Duration,
    /// The broker's first step.
    pub(super) started: Duration,
    pub(super) index: usize,
    pub(super) division: Option<&'a Division>,
    pub(super) classes: &'a Classes,
    /// The state of each group's quota.
    pub(super) groups: &'a [Gate],
    pub(super) all_groups: &'a [Group],
    pub(super) rounds: &'a [Round],
}

/// What should be, before damping.
struct Wanted {
    usable: u32,
    rule: Rule,
}

/// A VM that can be judged by its share.
struct Share {
    target: Cpus,
    limit: BoundBy,
    rounding: Rounding,
}

impl Moment<'_> {
    /// Decides; says also whether the VM was given more vCPUs that it needs a moment to fill.
    pub(super) fn decide(&self, vm: &VmInput, state: &mut VmState) -> (Decision, bool) {
        let now = self.now;
        let fresh = state.demand.is_fresh(now);
        let entitlement = self
            .division
            .and_then(|division| division.claimants.get(self.index)?.as_ref());
        let pool_contention = self.classes.of_vm(self.index);
        let share = entitlement
            .filter(|_| vm.vcpus().is_some() && fresh)
            .map(|found| self.share(found));
        if vm.agent == AgentState::Fails && !state.failed.holds(now) {
            state.failed.begin(now);
        }
        if state.enforced != vm.enforced {
            // What was only shown cost the guest nothing, so it counts against no budget.
            state.enforced = vm.enforced;
            state.damper.start_anew();
            state.more.clear();
            state.room = 0;
        }
        if self.classes.load_ended(self.index) {
            state.damper.load_ended(now);
            state.more.clear();
        }
        let quota = self.quota(vm, state);
        let contention = match (pool_contention, quota) {
            (Contention::None, Some(_)) => Contention::Contended,
            (contention, _) => contention,
        };
        let target = share.as_ref().map(|share| share.target);
        let mut decision = Decision {
            id: vm.id,
            usable: None,
            classes: crate::model::Classes::default(),
            why: Why {
                rule: Rule::Unclassified,
                usable: 0,
                vcpus: 0,
                in_use: None,
                weight: vm.weight,
                target: share.as_ref().map(|share| (share.target, share.limit)),
                pool: entitlement.and_then(|found| self.pool(found)),
                turns: [None; 2],
            },
            contention,
            spare: self.division.map(|_| self.classes.idle(self.index)),
            run: fresh.then(|| state.demand.run()),
            run_delay: fresh.then(|| state.demand.run_delay()),
            demand: vm
                .vcpus()
                .filter(|_| fresh)
                .map(|vcpus| state.demand.estimate(vcpus)),
            target,
            changed: false,
            folds: 0,
            unfolds: 0,
        };
        let mut raised = false;
        if let Some(vcpus) = vm.vcpus() {
            let known = self.division.is_some() && fresh;
            let mut wanted = if self.division.is_some() && entitlement.is_none() {
                all(vcpus, Rule::NoPcpus)
            } else if vm.agent == AgentState::Absent {
                all(vcpus, Rule::AgentAbsent)
            } else if state.failed.holds(now) {
                all(vcpus, Rule::AgentFails(state.failed.left(now)))
            } else if let Some(fixed) = vm.policy.fixed {
                Wanted {
                    usable: fixed.clamp(1, vcpus),
                    rule: Rule::Fixed,
                }
            } else {
                match (contention, &share) {
                    (Contention::Contended, Some(share)) if known => {
                        self.by_share(vm, state, vcpus, share, quota, decision.why.pool)
                    }
                    (Contention::None, Some(_)) if known => all(vcpus, Rule::Uncontended),
                    _ => all(vcpus, Rule::Unmeasured),
                }
            };
            let governed = !matches!(
                wanted.rule,
                Rule::NoPcpus | Rule::AgentAbsent | Rule::AgentFails(_) | Rule::Fixed
            );
            if let Some(most) = vm
                .policy
                .max_usable
                .filter(|most| governed && *most < wanted.usable)
            {
                wanted = Wanted {
                    usable: most.max(1),
                    rule: Rule::AtMost(most),
                };
            }
            let hungry = state.demand.is_saturated();
            let moved = if wanted.rule == Rule::Fixed {
                state.damper.set(vcpus, wanted.usable)
            } else {
                // Only a raise that follows a share may wait; whatever ends a fold for another reason ends it now.
                let by_share = matches!(
                    wanted.rule,
                    Rule::Share { .. } | Rule::Quota(_) | Rule::AtLeast(_) | Rule::ShareCovers
                );
                state
                    .damper
                    .settle(now, vcpus, wanted.usable, hungry || !by_share)
            };
            let usable = moved.usable();
            decision.usable = Some(usable);
            decision.changed = matches!(moved, Move::Folded(_) | Move::Unfolded(_));
            decision.why.rule = match moved {
                Move::PutOff(_, wait) => Rule::Damped {
                    wanted: wanted.usable,
                    wait,
                },
                _ => wanted.rule,
            };
            decision.why.usable = usable;
            decision.why.vcpus = vcpus;
            decision.why.in_use = match vm.agent {
                AgentState::Works { in_use } => in_use,
                AgentState::Absent | AgentState::Fails => None,
            };
            // A class that changed with every tremble of the target would be news to the guest each time.
            let steady = state.damper.steady_target().or(target);
            decision.classes = vcpus_by_class(vcpus, usable, contention, steady);
            decision.why.turns = self.turns(&decision, share.as_ref(), state);
            raised = matches!(moved, Move::Unfolded(_)) && hungry;
            if matches!(moved, Move::Folded(_)) {
                let ran = state.demand.long_run(self.full_since(state, quota));
                state.folded(now, ran);
            }
        }
        (decision.folds, decision.unfolds) = (state.damper.folds(), state.damper.unfolds());
        (decision, raised)
    }

    /// What a VM under contention should use; `quota` is the one that it uses up.
    fn by_share(
        &self,
        vm: &VmInput,
        state: &mut VmState,
        vcpus: u32,
        share: &Share,
        quota: Option<Cpus>,
        pool: Option<Pool>,
    ) -> Wanted {
        let now = self.now;
        let target = share.target;
        let in_use = state.in_use(vm, vcpus);
        let mut more = state.more.vcpus(now);
        // With a vCPU for each pCPU of its competing set, another one could only wait.
        let has_all = pool.is_some_and(|pool| f64::from(in_use) >= pool.supply.0 - LEFT_OFF_LEAST);
        if more == 0 && state.is_short(now, in_use, vcpus, target) && !has_all {
            state.more.raise(now, 1);
            more = state.more.vcpus(now);
        }
        let rounded = state.damper.steady(target, share.rounding);
        // What it did before its pCPUs were full tells of the time before its load began.
        let full_since = self.full_since(state, quota);
        let (wants, deviation) = state.demand.spread(full_since);
        let folded = in_use < vcpus;
        if !folded {
            let least = with_room(rounded, vcpus, target, wants, deviation);
            state.room = least.saturating_sub(rounded);
        } else if state.fills(now) {
            // It was seen while its load began: its vCPUs don't rest.
            state.room = 0;
        }
        let usable = rounded
            .saturating_add(more)
            .saturating_add(state.room)
            .clamp(1, vcpus);
        if state.starves(now, in_use, vcpus, target) {
            state.starved.begin(now);
        }
        let satisfied = if folded {
            state.is_satisfied(now, target)
        } else {
            state.demand.measured().0 < LIMITED * target.0
        };
        let since = state.first_seen.max(self.started);
        if usable >= vcpus && rounded < vcpus && state.room > 0 {
            all(vcpus, Rule::Sleeper(wants))
        } else if usable >= vcpus {
            all(vcpus, Rule::ShareCovers)
        } else if now.saturating_sub(since) < WARM_UP {
            all(vcpus, Rule::WarmUp(since + WARM_UP - now))
        } else if vcpus == 1 || (vcpus == 2 && target.0 > SMALL_SHARE) {
            all(vcpus, Rule::NoGain)
        } else if state.starved.holds(now) {
            all(vcpus, Rule::Starved(state.starved.left(now)))
        } else if state.demand.swings() {
            all(vcpus, Rule::Swings)
        } else if satisfied {
            all(vcpus, Rule::Satisfied(state.demand.measured()))
        } else if vm.policy.min_usable > usable {
            Wanted {
                usable: vm.policy.min_usable.min(vcpus),
                rule: Rule::AtLeast(vm.policy.min_usable),
            }
        } else {
            let rule = match (share.limit, quota) {
                (BoundBy::Quota(cap), _) | (_, Some(cap)) => Rule::Quota(cap),
                _ => Rule::Share {
                    more: more + state.room,
                },
            };
            Wanted { usable, rule }
        }
    }

    /// Since when what binds the VM has been full.
    fn full_since(&self, state: &VmState, quota: Option<Cpus>) -> Duration {
        let pcpus = self.classes.full_since(self.index);
        if quota.is_some() && self.classes.of_vm(self.index) != Contention::Contended {
            state.quota.full_since()
        } else {
            pcpus
        }
    }

    fn share(&self, entitlement: &Entitlement) -> Share {
        let limit = match entitlement.target_bound {
            Bound::Demand(_) | Bound::Threads(_) => BoundBy::Vcpus,
            Bound::Quota(cap) | Bound::GroupQuota { cap, .. } => BoundBy::Quota(cap),
            Bound::Cpuset(_) => BoundBy::Cpuset,
            Bound::Level { .. } => BoundBy::Others,
            Bound::Reservation(_) => BoundBy::Reservation,
        };
        let round = self
            .rounds
            .get(entitlement.set)
            .copied()
            .unwrap_or_default();
        Share {
            target: entitlement.target,
            limit,
            rounding: round.rounding(limit),
        }
    }

    fn pool(&self, entitlement: &Entitlement) -> Option<Pool> {
        let set = self.division?.sets.get(entitlement.set)?;
        Some(Pool {
            supply: set.supply,
            wanted: set.demand,
        })
    }

    /// The least quota that the VM uses up, its own or one of its groups'.
    fn quota(&self, vm: &VmInput, state: &VmState) -> Option<Cpus> {
        let used_up = |gate: &Gate| gate.contention() == Contention::Contended;
        let own = vm.quota.filter(|_| used_up(&state.quota));
        let groups = ancestors(vm.parent, self.all_groups)
            .filter(|group| self.groups.get(*group).is_some_and(used_up))
            .filter_map(|group| self.all_groups[group].cap);
        own.into_iter()
            .chain(groups)
            .min_by(|a, b| a.0.total_cmp(&b.0))
    }

    /// What would change a decision.
    fn turns(
        &self,
        decision: &Decision,
        share: Option<&Share>,
        state: &VmState,
    ) -> [Option<Turn>; 2] {
        let why = &decision.why;
        let idle = self.classes.idle_bound(self.index).map(Turn::Idle);
        match why.rule {
            Rule::Unclassified => [None, None],
            Rule::NoPcpus => [Some(Turn::Pcpus), None],
            Rule::AgentAbsent => [Some(Turn::Agent), None],
            Rule::AgentFails(left) => [Some(Turn::Agent), Some(Turn::Time(left))],
            Rule::Unmeasured => [Some(Turn::Figures), None],
            Rule::Uncontended => [
                why.pool.map(|pool| Turn::Wanted(wanted_bound(pool.supply))),
                None,
            ],
            Rule::WarmUp(left) => [Some(Turn::Time(left)), idle],
            Rule::NoGain | Rule::Sleeper(_) | Rule::Swings => [idle, None],
            Rule::Satisfied(_) => {
                let wanted = share.map(|share| Turn::Demand(Cpus(LIMITED * share.target.0)));
                [wanted, idle]
            }
            Rule::Starved(left) => [Some(Turn::Time(left)), Some(Turn::OwnGroup)],
            Rule::Fixed | Rule::AtMost(_) => [Some(Turn::Configuration), None],
            Rule::AtLeast(_) => [Some(Turn::Configuration), idle],
            Rule::ShareCovers => {
                let below = share.and_then(|share| fewer(share, why.vcpus));
                [below, idle]
            }
            Rule::Share { more } => {
                let above = share
                    .and_then(|share| further(share, why.usable - more.min(why.usable), state));
                [above, idle]
            }
            Rule::Quota(_) => [Some(Turn::Quota), None],
            Rule::Damped { wait, .. } => match wait {
                crate::model::Wait::For(left) => [Some(Turn::Time(left)), None],
                crate::model::Wait::Budget => [None, None],
            },
        }
    }
}

/// The target that gives one vCPU more than `rounded`.
fn further(share: &Share, rounded: u32, state: &VmState) -> Option<Turn> {
    let whole = f64::from(rounded);
    let bound = whole + share.rounding.left_off(Cpus(whole));
    let steady = state
        .damper
        .steady_bound()
        .map_or(bound, |(_, above)| above.0.max(bound));
    Some(Turn::TargetFrom {
        target: Cpus(steady),
        usable: rounded + 1,
    })
}

/// The target below which a VM is folded.
fn fewer(share: &Share, vcpus: u32) -> Option<Turn> {
    let usable = vcpus.checked_sub(1).filter(|usable| *usable > 0)?;
    let whole = f64::from(usable);
    Some(Turn::TargetBelow {
        target: Cpus(whole + share.rounding.left_off(Cpus(whole))),
        usable,
    })
}

fn all(vcpus: u32, rule: Rule) -> Wanted {
    Wanted {
        usable: vcpus,
        rule,
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // the cast saturates, and NaN gives 0
fn vcpus_by_class(
    vcpus: u32,
    usable: u32,
    contention: Contention,
    target: Option<Cpus>,
) -> crate::model::Classes {
    let full = match (contention, target) {
        (Contention::Contended, Some(target)) => ((target.0 + LEFT_OFF_LEAST) as u32).min(usable),
        _ => usable,
    };
    crate::model::Classes {
        full,
        partial: usable - full,
        avoided: vcpus - usable,
    }
}
