//! The pCPUs by class (those that the same threads may use), each with its state of contention, and which VM may use which.
//!
//! A class is entered when the set of classes that it is competed for with is full and more is wanted of it; it is left by its
//! own idle time. The states outlive changes of pinning: a class that is new takes over the state of the one its first pCPU
//! was in.

use std::time::Duration;

use super::SHOWN_OVER;
use super::claims::for_each_pcpu;
use super::gate::{Figure, Gate, Idle, Left};
use super::input::Input;
use super::pcpus::Pcpus;
use crate::entitle::{Class, ClassId, Division};
use crate::model::{Contention, Cpus};

#[derive(Debug)]
struct State {
    id: ClassId,
    pcpus: Vec<u32>,
    /// Places of its pCPUs.
    places: Vec<usize>,
    gate: Gate,
    /// Idle time, as it is shown.
    idle: Cpus,
    /// Contention ended in this step.
    left: Option<Left>,
}

/// All classes.
#[derive(Debug, Default)]
pub(super) struct Classes {
    version: u64,
    states: Vec<State>,
    /// For each VM the range of its classes in `of_vms`.
    ranges: Vec<(usize, usize)>,
    of_vms: Vec<usize>,
    sets: Vec<(f64, f64)>,
}

impl Classes {
    /// Follows the classes of a division; `version` is that of the claims.
    pub(super) fn follow(
        &mut self,
        version: u64,
        classes: &[Class],
        input: &Input<'_>,
        pcpus: &Pcpus,
    ) {
        if self.version == version {
            return;
        }
        self.version = version;
        let old = std::mem::take(&mut self.states);
        self.states = classes
            .iter()
            .map(|class| State {
                id: class.id,
                pcpus: class.pcpus.clone(),
                places: class
                    .pcpus
                    .iter()
                    .filter_map(|pcpu| pcpus.place(*pcpu))
                    .collect(),
                gate: old
                    .iter()
                    .find(|state| state.pcpus.contains(&class.id.0))
                    .map_or_else(Gate::default, |state| state.gate.clone()),
                idle: Cpus::ZERO,
                left: None,
            })
            .collect();
        let mut class_of = vec![usize::MAX; pcpus.ids().len()];
        for (index, state) in self.states.iter().enumerate() {
            for place in &state.places {
                class_of[*place] = index;
            }
        }
        self.ranges.clear();
        self.of_vms.clear();
        for vm in input.vms {
            let start = self.of_vms.len();
            let of_vms = &mut self.of_vms;
            for_each_pcpu(vm, input.groups, pcpus, |place| {
                let class = class_of[place];
                if class != usize::MAX && !of_vms[start..].contains(&class) {
                    of_vms.push(class);
                }
            });
            self.ranges.push((start, self.of_vms.len()));
        }
    }

    /// Takes the figures of one tick.
    pub(super) fn push(&mut self, interval: Duration, division: &Division, pcpus: &Pcpus) {
        self.sets.clear();
        self.sets.resize(division.sets.len(), (0.0, 0.0));
        let idle_of = |state: &State| -> f64 {
            state
                .places
                .iter()
                .map(|place| pcpus.latest(*place).idle.0)
                .sum()
        };
        for (state, class) in self.states.iter().zip(&division.classes) {
            let (idle, count) = &mut self.sets[class.set];
            *idle += idle_of(state);
            *count += state.places.len() as f64;
        }
        for (state, class) in self.states.iter_mut().zip(&division.classes) {
            let set = &division.sets[class.set];
            let (idle, count) = self.sets[class.set];
            state.left = None;
            let figure = Figure {
                interval,
                busy: 1.0 - idle / count.max(1.0),
                wanted: ratio(set.demand, set.supply),
                idle: Cpus(idle_of(state)),
            };
            state.gate.push(class.supply, figure);
            state.idle = state.gate.idle_over(SHOWN_OVER).unwrap_or(Cpus::ZERO);
        }
    }

    /// Figures are missing: nothing is known any more.
    pub(super) fn forget(&mut self) {
        for state in &mut self.states {
            state.gate.forget();
        }
    }

    /// Takes the states on. Each class that is contended and had idle time for long is handed to `idles`, which says whether
    /// somebody was given that time; else its contention ends.
    pub(super) fn turn(
        &mut self,
        now: Duration,
        mut idles: impl FnMut(&Self, usize, Cpus) -> bool,
    ) {
        for index in 0..self.states.len() {
            let turned = self.states[index].gate.turn(now);
            if turned == Idle::No {
                continue;
            }
            let idle = self.states[index].gate.idle().unwrap_or(Cpus::ZERO);
            let given = self.states[index].gate.may_raise() && idles(self, index, idle);
            let state = &mut self.states[index];
            if given {
                state.gate.raised(now);
            } else if turned == Idle::Much {
                state.left = Some(state.gate.leave(now));
            }
        }
    }

    /// A VM was given more vCPUs and needs a moment to fill them.
    pub(super) fn restart_idle(&mut self, vm: usize, now: Duration) {
        let (start, end) = self.ranges[vm];
        for class in &self.of_vms[start..end] {
            self.states[*class].gate.restart_idle(now);
        }
    }

    /// May this VM use this class?
    pub(super) fn may_use(&self, vm: usize, class: usize) -> bool {
        let (start, end) = self.ranges[vm];
        self.of_vms[start..end].contains(&class)
    }

    /// A VM's contention: it is contended only if each class that it may use is.
    pub(super) fn of_vm(&self, vm: usize) -> Contention {
        let mut found = Contention::Unknown;
        for state in self.states_of(vm) {
            match state.gate.contention() {
                Contention::Unknown => return Contention::Unknown,
                Contention::None => found = Contention::None,
                Contention::Contended if found == Contention::Unknown => {
                    found = Contention::Contended;
                }
                Contention::Contended => {}
            }
        }
        found
    }

    /// Since when the last of its classes has been full.
    pub(super) fn full_since(&self, vm: usize) -> Duration {
        let full = self.states_of(vm).map(|state| state.gate.full_since());
        full.max().unwrap_or_default()
    }

    /// Has the load that a VM competed with ended in this step?
    pub(super) fn load_ended(&self, vm: usize) -> bool {
        self.states_of(vm)
            .any(|state| state.left == Some(Left::LoadEnded))
    }

    /// Idle time of the classes that a VM may use.
    pub(super) fn idle(&self, vm: usize) -> Cpus {
        self.states_of(vm).map(|state| state.idle).sum()
    }

    /// How much idle time would end a VM's contention: the least of its classes.
    pub(super) fn idle_bound(&self, vm: usize) -> Option<Cpus> {
        let bounds = self.states_of(vm).map(|state| state.gate.idle_bound());
        bounds.min_by(|a, b| a.0.total_cmp(&b.0))
    }

    /// Was any busier than this in the last tick?
    pub(super) fn is_any_busier(&self, part: f64) -> bool {
        self.states.iter().any(|state| state.gate.was_busier(part))
    }

    /// Each class: its id and its contention.
    pub(super) fn contentions(&self) -> impl Iterator<Item = (ClassId, Contention)> {
        self.states
            .iter()
            .map(|state| (state.id, state.gate.contention()))
    }

    fn states_of(&self, vm: usize) -> impl Iterator<Item = &State> {
        let (start, end) = self.ranges.get(vm).copied().unwrap_or_default();
        self.of_vms[start..end]
            .iter()
            .map(|class| &self.states[*class])
    }
}

fn ratio(wanted: Cpus, supply: Cpus) -> f64 {
    if supply.0 > 0.0 {
        wanted.0 / supply.0
    } else {
        0.0
    }
}
