//! The division by its definition: slow, and as plain as it gets. Levels are found by halving, and whether amounts can be served
//! by trying every set of claimants (Hall's condition).

use std::collections::BTreeMap;

use hint_broker::model::{Claimant, Host, Threads};

/// Less than this is rounding.
const TINY: f64 = 1e-9;
const HALVINGS: u32 = 70;

pub(crate) struct Reference<'a> {
    host: &'a Host,
    /// Supply of each pCPU.
    supply: BTreeMap<u32, f64>,
    /// pCPUs of each thread of each claimant.
    threads: Vec<Vec<Vec<u32>>>,
    /// The most that the claimants of each set (by bits) can be given together.
    most: Vec<f64>,
    pub(crate) limits: Vec<f64>,
}

impl<'a> Reference<'a> {
    pub(crate) fn new(host: &'a Host) -> Self {
        let supply: BTreeMap<u32, f64> = host
            .pcpus
            .iter()
            .map(|pcpu| (pcpu.id, pcpu.supply.0))
            .collect();
        let threads = host
            .claimants
            .iter()
            .map(|claimant| places(host, claimant))
            .collect();
        let mut reference = Self {
            host,
            supply,
            threads,
            most: Vec::new(),
            limits: Vec::new(),
        };
        let sets = 1_usize << host.claimants.len();
        reference.most = (0..sets).map(|set| reference.most_of(set)).collect();
        reference.limits = (0..host.claimants.len())
            .map(|index| {
                host.claimants[index]
                    .demand
                    .0
                    .min(reference.own_limit(index))
            })
            .collect();
        reference
    }

    /// Has the claimant a pCPU at all?
    pub(crate) fn takes_part(&self, index: usize) -> bool {
        !self.threads[index].is_empty()
    }

    pub(crate) fn own_limit(&self, index: usize) -> f64 {
        let claimant = &self.host.claimants[index];
        let cap = claimant.cap.map_or(f64::INFINITY, |cap| cap.0);
        claimant.all.0.min(cap).min(self.most[1 << index])
    }

    /// By duality: pCPUs in some set give all they have, and each thread that reaches another pCPU gets one CPU.
    fn most_of(&self, set: usize) -> f64 {
        let pcpus: Vec<u32> = self.supply.keys().copied().collect();
        (0..1_usize << pcpus.len())
            .map(|cut| {
                let inside = |id: &u32| {
                    pcpus
                        .iter()
                        .position(|other| other == id)
                        .is_some_and(|place| cut & 1 << place != 0)
                };
                let given: f64 = self
                    .supply
                    .iter()
                    .filter(|(id, _)| inside(id))
                    .map(|(_, supply)| supply)
                    .sum();
                let threads = self
                    .threads
                    .iter()
                    .enumerate()
                    .filter(|(index, _)| set & 1 << index != 0)
                    .flat_map(|(_, threads)| threads)
                    .filter(|thread| !thread.iter().all(inside))
                    .count();
                given + threads as f64
            })
            .fold(f64::INFINITY, f64::min)
    }

    fn children(&self, group: Option<usize>) -> (Vec<usize>, Vec<usize>) {
        let groups = (0..self.host.groups.len())
            .filter(|index| self.host.groups[*index].parent == group)
            .collect();
        let claimants = (0..self.host.claimants.len())
            .filter(|index| self.host.claimants[*index].parent == group && self.takes_part(*index))
            .collect();
        (groups, claimants)
    }

    /// Floor and limit of a claimant.
    fn claimant_bounds(&self, limits: &[f64], index: usize) -> (f64, f64) {
        let floor = self.host.claimants[index].floor.0;
        (floor.min(limits[index]), limits[index])
    }

    /// Floor and limit of a group.
    fn group_bounds(&self, limits: &[f64], index: usize) -> (f64, f64) {
        let (groups, claimants) = self.children(Some(index));
        let (mut floor, mut limit) = (0.0, 0.0);
        for child in groups {
            let (a, b) = self.group_bounds(limits, child);
            floor += a;
            limit += b;
        }
        for child in claimants {
            let (a, b) = self.claimant_bounds(limits, child);
            floor += a;
            limit += b;
        }
        let group = &self.host.groups[index];
        let limit = limit.min(group.cap.map_or(f64::INFINITY, |cap| cap.0));
        (floor.max(group.floor.0).min(limit), limit)
    }

    /// What each claimant gets at the root's level `s`, whatever the pCPUs can give.
    fn curve(&self, limits: &[f64], s: f64) -> Vec<f64> {
        let mut shares = vec![0.0; self.host.claimants.len()];
        self.descend(limits, None, s, (1.0 + s).min(1.0), &mut shares);
        shares
    }

    fn descend(
        &self,
        limits: &[f64],
        group: Option<usize>,
        level: f64,
        floors: f64,
        shares: &mut [f64],
    ) {
        let level = level.max(0.0);
        let (groups, claimants) = self.children(group);
        let get = |(floor, limit): (f64, f64), weight: f64| {
            (level * weight).max(floor * floors).min(limit)
        };
        for index in claimants {
            shares[index] = get(
                self.claimant_bounds(limits, index),
                self.host.claimants[index].weight,
            );
        }
        for index in groups {
            let sum = get(
                self.group_bounds(limits, index),
                self.host.groups[index].weight,
            );
            let (level, floors) = self.level_in(limits, index, sum);
            self.descend(limits, Some(index), level, floors, shares);
        }
    }

    /// Level, and part of the floors, at which the children of a group get `sum`.
    fn level_in(&self, limits: &[f64], group: usize, sum: f64) -> (f64, f64) {
        let (groups, claimants) = self.children(Some(group));
        let mut children: Vec<(f64, f64, f64)> = Vec::new();
        for index in groups {
            let (floor, limit) = self.group_bounds(limits, index);
            children.push((self.host.groups[index].weight, floor, limit));
        }
        for index in claimants {
            let (floor, limit) = self.claimant_bounds(limits, index);
            children.push((self.host.claimants[index].weight, floor, limit));
        }
        let floors: f64 = children.iter().map(|child| child.1).sum();
        if sum < floors {
            return (0.0, sum / floors);
        }
        let top = children
            .iter()
            .map(|child| child.2 / child.0)
            .fold(0.0, f64::max);
        let level = halve(0.0, top, |level| {
            let got: f64 = children
                .iter()
                .map(|(weight, floor, limit)| (level * weight).max(*floor).min(*limit))
                .sum();
            got <= sum
        });
        (level, 1.0)
    }

    fn top(&self, limits: &[f64]) -> f64 {
        let (groups, claimants) = self.children(None);
        let groups = groups
            .iter()
            .map(|index| self.group_bounds(limits, *index).1 / self.host.groups[*index].weight);
        let claimants = claimants
            .iter()
            .map(|index| limits[*index] / self.host.claimants[*index].weight);
        groups.chain(claimants).fold(0.0, f64::max)
    }

    fn sum(set: usize, shares: &[f64]) -> f64 {
        shares
            .iter()
            .enumerate()
            .filter(|(index, _)| set & 1 << index != 0)
            .map(|(_, share)| share)
            .sum()
    }

    /// Can the pCPUs give these shares?
    pub(crate) fn feasible(&self, shares: &[f64], tolerance: f64) -> bool {
        (0..self.most.len()).all(|set| Self::sum(set, shares) <= self.most[set] + tolerance)
    }

    /// Raises the level until some can't have more, who stop; and so on with the others. Returns shares, and who stopped.
    fn fill(&self, limits: &[f64]) -> (Vec<f64>, Vec<bool>) {
        let count = limits.len();
        let mut stopped: Vec<Option<f64>> = vec![None; count];
        let top = self.top(limits);
        let at = |stopped: &[Option<f64>], s: f64| -> Vec<f64> {
            let curve = self.curve(limits, s);
            (0..count)
                .map(|index| stopped[index].unwrap_or(curve[index]))
                .collect()
        };
        loop {
            if self.feasible(&at(&stopped, top), 1e-12) {
                let shares = at(&stopped, top);
                return (shares, stopped.iter().map(Option::is_some).collect());
            }
            let feasible = |s: f64| self.feasible(&at(&stopped, s), 1e-12);
            let s = if feasible(0.0) {
                halve(0.0, top, feasible)
            } else {
                halve(-1.0, 0.0, feasible)
            };
            let shares = at(&stopped, s);
            let mut any = false;
            for set in 0..self.most.len() {
                if Self::sum(set, &shares) + TINY < self.most[set] {
                    continue;
                }
                for index in 0..count {
                    if set & 1 << index != 0 && stopped[index].is_none() {
                        stopped[index] = Some(shares[index]);
                        any = true;
                    }
                }
            }
            assert!(any, "nobody stops at {s}: {shares:?}");
        }
    }

    fn is_below(&self, claimant: usize, group: usize) -> bool {
        let mut at = self.host.claimants[claimant].parent;
        while let Some(index) = at {
            if index == group {
                return true;
            }
            at = self.host.groups[index].parent;
        }
        false
    }

    /// The shares when each wants up to its limit. Where members of a group can't use their part of its quota because their
    /// pCPUs are full, it goes to the others: then each such member, once, is taken to want what it got.
    pub(crate) fn shares(&self, limits: &[f64]) -> Vec<f64> {
        let mut now = limits.to_vec();
        let mut fixed = vec![false; now.len()];
        loop {
            let (shares, _) = self.fill(&now);
            let most = self.curve(&now, self.top(&now));
            let mut next = now.clone();
            for (group, inner) in self.host.groups.iter().enumerate() {
                let members: Vec<usize> = (0..now.len())
                    .filter(|index| self.takes_part(*index) && self.is_below(*index, group))
                    .collect();
                let total: f64 = members.iter().map(|index| shares[*index]).sum();
                let (groups, claimants) = self.children(Some(group));
                let groups = groups.iter().map(|child| self.group_bounds(&now, *child).1);
                let wanted: f64 = groups
                    .chain(claimants.iter().map(|child| now[*child]))
                    .sum();
                let left = inner
                    .cap
                    .is_some_and(|cap| total + TINY < cap.0 && cap.0 + TINY < wanted);
                let held_back = members.iter().any(|index| {
                    shares[*index] + TINY >= most[*index] && shares[*index] + TINY < now[*index]
                });
                if left && held_back {
                    for index in members {
                        if shares[index] + TINY < most[index] && !fixed[index] {
                            next[index] = shares[index];
                            fixed[index] = true;
                        }
                    }
                }
            }
            if next == now {
                return shares;
            }
            now = next;
        }
    }

    /// The share of one claimant if it wanted everything.
    pub(crate) fn target(&self, index: usize) -> f64 {
        let mut limits = self.limits.clone();
        limits[index] = self.own_limit(index);
        self.shares(&limits)[index]
    }
}

/// The largest value for which it holds; it holds for `low`, and up to some value.
fn halve(low: f64, high: f64, holds: impl Fn(f64) -> bool) -> f64 {
    if holds(high) {
        return high;
    }
    let (mut low, mut high) = (low, high);
    for _ in 0..HALVINGS {
        let middle = f64::midpoint(low, high);
        if holds(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

/// The pCPUs of each thread that has any.
fn places(host: &Host, claimant: &Claimant) -> Vec<Vec<u32>> {
    let mut allowed: Vec<u32> = host.pcpus.iter().map(|pcpu| pcpu.id).collect();
    let mut at = claimant.parent;
    while let Some(index) = at {
        if let Some(cpus) = &host.groups[index].cpus {
            allowed.retain(|id| cpus.contains(*id));
        }
        at = host.groups[index].parent;
    }
    let threads = match &claimant.threads {
        Threads::Alike { count, cpus } => {
            if let Some(cpus) = cpus {
                allowed.retain(|id| cpus.contains(*id));
            }
            vec![allowed; *count as usize]
        }
        Threads::Pinned(sets) => sets
            .iter()
            .map(|cpus| {
                allowed
                    .iter()
                    .copied()
                    .filter(|id| cpus.contains(*id))
                    .collect()
            })
            .collect(),
    };
    threads
        .into_iter()
        .filter(|thread| !thread.is_empty())
        .collect()
}
