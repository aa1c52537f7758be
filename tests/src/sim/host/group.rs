//! The tree of CPU groups: what one runnable thread of a group weighs on a pCPU, and quotas.
//!
//! The kernel keeps an entity of each group on each pCPU and gives it the part of the group's weight that the group's load on
//! that pCPU is of its whole load (`calc_group_shares` in kernel/sched/fair.c). Multiplied down the path that is a weight of
//! each thread, and this is what is kept here. Loads are decaying averages, as there.

use crate::sim::clock::{MS, Nanos};

/// A load that is this old counts 1/e: the kernel halves it every 32 ms.
const LOAD_TIME: f64 = 46.0 * MS as f64;

/// `cpu.max` of a group.
#[derive(Debug, Clone)]
pub(super) struct Quota {
    pub(super) per_period: Nanos,
    pub(super) period: Nanos,
    /// What is left in this period; below zero by what was run too much.
    pub(super) left: i64,
    pub(super) throttled: bool,
    /// Threads that wait for the next period.
    pub(super) waiting: Vec<usize>,
    pub(super) running: usize,
}

/// One group. Only groups without groups in them hold threads.
#[derive(Debug, Clone)]
pub(super) struct Group {
    pub(super) parent: Option<usize>,
    pub(super) weight: f64,
    pub(super) quota: Option<Quota>,
    /// Groups with a quota on the path to the root, this one included.
    pub(super) limits: Vec<usize>,
    pub(super) usage: Nanos,
    children: Vec<usize>,
    runnable: usize,
    load: f64,
    load_at: Nanos,
    /// The group's weight against all other threads of the host.
    effective: f64,
    /// What one of its runnable threads weighs.
    pub(super) thread_weight: f64,
}

impl Group {
    fn decay(&mut self, now: Nanos) {
        let part = (-((now - self.load_at) as f64) / LOAD_TIME).exp();
        self.load = self.load * part + self.runnable as f64 * (1.0 - part);
        self.load_at = now;
    }

    /// The threads share the group's weight by their loads; one that runs counts in full.
    fn weigh_thread(&mut self) {
        self.thread_weight = self.effective / self.load.max(1.0);
    }
}

/// All groups; 0 is the root.
#[derive(Debug)]
pub(super) struct Groups {
    pub(super) all: Vec<Group>,
}

impl Groups {
    pub(super) fn new() -> Self {
        let mut groups = Self { all: Vec::new() };
        groups.push(None, 100.0, None);
        groups
    }

    pub(super) fn add(
        &mut self,
        parent: usize,
        weight: f64,
        quota: Option<(Nanos, Nanos)>,
    ) -> usize {
        let index = self.push(Some(parent), weight, quota);
        self.all[parent].children.push(index);
        index
    }

    fn push(&mut self, parent: Option<usize>, weight: f64, quota: Option<(Nanos, Nanos)>) -> usize {
        let index = self.all.len();
        let mut limits = parent.map_or_else(Vec::new, |parent| self.all[parent].limits.clone());
        if quota.is_some() {
            limits.push(index);
        }
        let quota = quota.map(|(per_period, period)| Quota {
            per_period,
            period,
            left: per_period.cast_signed(),
            throttled: false,
            waiting: Vec::new(),
            running: 0,
        });
        self.all.push(Group {
            parent,
            weight,
            quota,
            limits,
            usage: 0,
            children: Vec::new(),
            runnable: 0,
            load: 0.0,
            load_at: 0,
            effective: weight,
            thread_weight: weight,
        });
        index
    }

    /// A thread of `group` became runnable, or is none any more.
    pub(super) fn set_runnable(&mut self, group: usize, runnable: bool, now: Nanos) {
        let mut next = Some(group);
        while let Some(index) = next {
            let group = &mut self.all[index];
            group.decay(now);
            group.runnable = if runnable {
                group.runnable + 1
            } else {
                group.runnable - 1
            };
            next = group.parent;
        }
        self.all[group].weigh_thread();
    }

    /// Weighs all groups anew: those whose neighbours came or went too.
    pub(super) fn weigh(&mut self, now: Nanos) {
        for index in 0..self.all.len() {
            self.all[index].decay(now);
            // A parent stands before its children.
            let group = &self.all[index];
            let effective = match group.parent {
                None | Some(0) => group.weight,
                Some(parent) => {
                    let others: f64 = self.all[parent]
                        .children
                        .iter()
                        .filter(|sibling| **sibling != index)
                        .map(|sibling| {
                            let sibling = &self.all[*sibling];
                            sibling.weight * sibling.load.min(1.0)
                        })
                        .sum();
                    self.all[parent].effective * group.weight / (group.weight + others)
                }
            };
            self.all[index].effective = effective;
            self.all[index].weigh_thread();
        }
    }

    /// Is a group on the path of `group` out of quota?
    pub(super) fn throttling(&self, group: usize) -> Option<usize> {
        self.all[group].limits.iter().copied().find(|limit| {
            self.all[*limit]
                .quota
                .as_ref()
                .is_some_and(|quota| quota.throttled)
        })
    }

    /// Takes `time` from the quotas on the path of `group`; true when one of them ran out by it.
    pub(super) fn charge(&mut self, group: usize, time: Nanos) -> bool {
        self.all[group].usage += time;
        let mut out = false;
        for place in 0..self.all[group].limits.len() {
            let limit = self.all[group].limits[place];
            if let Some(quota) = &mut self.all[limit].quota {
                quota.left -= time.cast_signed();
                out |= quota.left <= 0 && !quota.throttled;
                quota.throttled |= quota.left <= 0;
            }
        }
        out
    }

    /// How long a running thread of `group` may go on before its quotas must be looked at again.
    pub(super) fn may_run(&self, group: usize) -> Option<Nanos> {
        let limits = self.all[group].limits.iter();
        limits
            .filter_map(|limit| self.all[*limit].quota.as_ref())
            .map(|quota| quota.left.max(0).cast_unsigned() / quota.running.max(1) as u64)
            .min()
    }

    pub(super) fn count_running(&mut self, group: usize, starts: bool) {
        for place in 0..self.all[group].limits.len() {
            let limit = self.all[group].limits[place];
            if let Some(quota) = &mut self.all[limit].quota {
                quota.running = if starts {
                    quota.running + 1
                } else {
                    quota.running - 1
                };
            }
        }
    }

    /// Starts the next period of `group`; gives the threads that may run again.
    pub(super) fn refill(&mut self, group: usize) -> Vec<usize> {
        let Some(quota) = &mut self.all[group].quota else {
            return Vec::new();
        };
        quota.left = quota.per_period.cast_signed() + quota.left.min(0);
        quota.throttled = quota.left <= 0;
        if quota.throttled {
            Vec::new()
        } else {
            std::mem::take(&mut quota.waiting)
        }
    }
}
