//! The division of a host's pCPU time: shares, targets and competing sets, from curves and flows.

use super::curves::{Curves, Level};
use super::division::{Bound, Division, Entitlement, Fault, FaultKind, Place};
use super::report;
use super::solve::Solution;
use super::structure::Structure;
use crate::model::{Cpus, Host};

/// Differences below this are rounding.
pub(super) const NEAR: f64 = 1e-9;

/// Divides pCPU time. Keeps buffers, and what follows from groups and cpusets alone, from one division to the next; the result
/// depends on the input only.
#[derive(Debug, Default)]
pub struct Engine {
    structure: Structure,
    curves: Curves,
    shares: Shares,
    /// For targets that are divided anew.
    trial: Shares,
    reach: Vec<f64>,
    division: Division,
}

impl Engine {
    /// Divides the pCPU time of `host`. The result is good until the next call.
    pub fn divide(&mut self, host: &Host) -> &Division {
        self.structure.follow(host);
        let Self {
            structure,
            curves,
            shares,
            trial,
            reach,
            division,
        } = self;
        division.faults.clear();
        division.faults.extend_from_slice(&structure.faults);
        supply(
            host,
            structure,
            &mut shares.solution.flow.supply,
            &mut division.faults,
        );
        trial
            .solution
            .flow
            .supply
            .clone_from(&shares.solution.flow.supply);
        shares.solution.clear(structure);
        find_reach(structure, &mut shares.solution, reach);
        curves.fill(host, structure, reach, &mut division.faults);
        shares.divide(structure, curves, None);
        report::sets(host, structure, curves, &shares.solution, division);
        division.claimants.clear();
        division.claimants.resize(host.claimants.len(), None);
        for (index, leaf) in structure.leaves.iter().enumerate() {
            let share = shares.shares[index];
            let bound = shares.bound(host, structure, curves, reach, index);
            division.claimants[leaf.claimant] = Some(Entitlement {
                share: Cpus(share),
                share_bound: bound,
                target: Cpus(share),
                target_bound: bound,
                set: report::set_of(structure, &shares.solution, division, leaf.node),
                split: (0, 0),
            });
        }
        report_broken_promises(structure, curves, &shares.shares, division);
        // Targets last: they change the curves for a while.
        for (index, leaf) in structure.leaves.iter().enumerate() {
            let Some(entitlement) = division.claimants[leaf.claimant].as_mut() else {
                continue;
            };
            let (limit, own) = (shares.limits[index], curves.own_limit[index]);
            if own > limit + NEAR {
                shares.restore(structure, curves);
                curves.set_limit(structure, index, own);
                trial.solution.clear(structure);
                trial.divide(structure, curves, Some(index));
                entitlement.target = Cpus(trial.shares[index].max(shares.shares[index]));
                entitlement.target_bound = trial.bound(host, structure, curves, reach, index);
                curves.set_limit(structure, index, limit);
            }
        }
        report::splits(structure, &shares.solution, division);
        &self.division
    }
}

/// One division: what each leaf gets.
#[derive(Debug, Default)]
struct Shares {
    solution: Solution,
    shares: Vec<f64>,
    /// What each leaf wanted at the start.
    limits: Vec<f64>,
    /// Leaves that were held up, and are taken to want no more than they got, so that others in their groups can have the rest
    /// of the groups' quotas; with the level where they were held up.
    fixed: Vec<Option<f64>>,
    any_fixed: bool,
    totals: Vec<f64>,
    most: Vec<Level>,
}

impl Shares {
    /// Divides by the curves as they stand; `solution` must be clear. With `only`, nothing is found but what this leaf gets,
    /// where the others allow that.
    fn divide(&mut self, structure: &Structure, curves: &mut Curves, only: Option<usize>) {
        let count = structure.leaves.len();
        self.limits.clear();
        self.limits
            .extend(curves.leaves.iter().map(|leaf| leaf.limit));
        self.fixed.clear();
        self.fixed.resize(count, None);
        self.any_fixed = false;
        self.shares.clear();
        self.shares.resize(count, 0.0);
        let quotas = (0..structure.branches.len())
            .any(|branch| curves.caps[branch] + NEAR < curves.limits[branch]);
        let only = only
            .filter(|_| !quotas)
            .map(|leaf| structure.nodes[structure.leaves[leaf].node].component);
        // Each round fixes at least one leaf more.
        for _ in 0..=count {
            for (index, component) in structure.components.iter().enumerate() {
                if only.is_none_or(|only| only == index) {
                    self.solution.solve(structure, curves, component);
                    self.read(structure, curves, index);
                }
            }
            if !quotas || !self.fix(structure, curves) {
                return;
            }
            self.any_fixed = true;
            self.solution.clear(structure);
        }
    }

    /// Undoes what [`Self::fix`] did to the curves.
    fn restore(&self, structure: &Structure, curves: &mut Curves) {
        if self.any_fixed {
            for (leaf, limit) in self.limits.iter().enumerate() {
                if self.fixed[leaf].is_some() {
                    curves.set_limit(structure, leaf, *limit);
                }
            }
        }
    }

    /// What each leaf of a component gets.
    fn read(&mut self, structure: &Structure, curves: &Curves, component: usize) {
        let component = &structure.components[component];
        let mut at = None;
        for node in &component.nodes {
            let s = self.solution.node_levels[*node];
            if at != Some(s) {
                curves.levels(structure, &component.branches, s, &mut self.solution.levels);
                at = Some(s);
            }
            for leaf in structure.nodes[*node].leaves.clone() {
                let level = &self.solution.levels[structure.leaves[leaf].branch];
                self.shares[leaf] = curves.leaves[leaf].at(level).0;
            }
        }
    }

    /// A group's quota may hold back some of its members although others, whose pCPUs are full, can't use their parts of it.
    /// Then those are taken to want what they got. Says whether there are any.
    fn fix(&mut self, structure: &Structure, curves: &mut Curves) -> bool {
        self.totals.clear();
        self.totals.resize(structure.branches.len(), 0.0);
        self.most.clear();
        self.most
            .resize(structure.branches.len(), Level::of_root(f64::INFINITY));
        for (branch, inner) in structure.branches.iter().enumerate().skip(1) {
            let (sum, rise) = curves.branches[branch].at(&self.most[inner.parent]);
            self.most[branch] = curves.settle(branch, sum, rise);
        }
        for (leaf, share) in self.shares.iter().enumerate() {
            self.totals[structure.leaves[leaf].branch] += share;
        }
        for branch in (1..structure.branches.len()).rev() {
            self.totals[structure.branches[branch].parent] += self.totals[branch];
        }
        let mut found = false;
        for branch in 1..structure.branches.len() {
            if curves.caps[branch] + NEAR >= curves.limits[branch]
                || self.totals[branch] + NEAR >= curves.caps[branch]
            {
                continue;
            }
            let mut held_back = false;
            let mut held_up = Vec::new();
            for (index, leaf) in structure.leaves.iter().enumerate() {
                if !is_below(structure, leaf.branch, branch) {
                    continue;
                }
                let most = curves.leaves[index].at(&self.most[leaf.branch]).0;
                if self.shares[index] + NEAR < most {
                    held_up.push(index);
                } else if self.shares[index] + NEAR < curves.leaves[index].limit {
                    held_back = true;
                }
            }
            if held_back {
                for leaf in held_up {
                    found = true;
                    let level = self.solution.node_levels[structure.leaves[leaf].node];
                    self.fixed[leaf] = Some(level);
                    curves.set_limit(structure, leaf, self.shares[leaf]);
                }
            }
        }
        found
    }

    /// What kept a leaf from more.
    fn bound(
        &mut self,
        host: &Host,
        structure: &Structure,
        curves: &Curves,
        reach: &[f64],
        index: usize,
    ) -> Bound {
        let leaf = &structure.leaves[index];
        let share = self.shares[index];
        if let Some(level) = self.fixed[index] {
            return Bound::Level { level };
        }
        let child = &curves.leaves[index];
        if share + NEAR >= child.limit {
            let own = curves.own_limit[index];
            let claimant = &host.claimants[leaf.claimant];
            return if child.limit + NEAR < own {
                Bound::Demand(Cpus(child.limit))
            } else if let Some(cap) = claimant.cap.filter(|cap| cap.0 <= own) {
                Bound::Quota(cap)
            } else if reach[leaf.node] < leaf.threads.min(claimant.all.0) {
                Bound::Cpuset(Cpus(reach[leaf.node]))
            } else {
                Bound::Threads(Cpus(own))
            };
        }
        let s = self.solution.node_levels[leaf.node];
        let component = &structure.components[structure.nodes[leaf.node].component];
        curves.levels(structure, &component.branches, s, &mut self.solution.levels);
        let mut branch = leaf.branch;
        while branch != 0 {
            let inner = &structure.branches[branch];
            let (sum, _) = curves.branches[branch].at(&self.solution.levels[inner.parent]);
            let cap = curves.caps[branch];
            if let Some(group) = inner.group.filter(|_| sum + NEAR >= cap) {
                return Bound::GroupQuota {
                    group,
                    cap: Cpus(cap),
                };
            }
            branch = inner.parent;
        }
        let level = &self.solution.levels[leaf.branch];
        if child.floor * level.floors > child.weight * level.level {
            Bound::Reservation(Cpus(child.floor))
        } else {
            Bound::Level { level: s }
        }
    }
}

fn is_below(structure: &Structure, mut branch: usize, above: usize) -> bool {
    while branch > above {
        branch = structure.branches[branch].parent;
    }
    branch == above
}

/// What each class can give.
fn supply(host: &Host, structure: &Structure, supply: &mut Vec<f64>, faults: &mut Vec<Fault>) {
    supply.clear();
    supply.extend(structure.classes.iter().map(|class| {
        let mut sum = 0.0;
        for pcpu in class.pcpus.iter().map(|index| host.pcpus[*index]) {
            if pcpu.supply.0 >= 0.0 {
                sum += pcpu.supply.0.min(1.0);
            } else {
                faults.push(Fault {
                    place: Place::Pcpu(pcpu.id),
                    kind: FaultKind::Figure("supply", pcpu.supply.0),
                });
            }
        }
        sum
    }));
}

/// What its pCPUs could give each node if there were no other.
fn find_reach(structure: &Structure, solution: &mut Solution, reach: &mut Vec<f64>) {
    reach.clear();
    for (index, node) in structure.nodes.iter().enumerate() {
        let flow = &mut solution.flow;
        let threads: f64 = node
            .strands
            .clone()
            .map(|strand| structure.strands[strand].threads)
            .sum();
        let strands = node.strands.clone().map(|strand| {
            let arcs = &structure.arcs[structure.strands[strand].arcs.clone()];
            let supply: f64 = arcs.iter().map(|(_, class)| flow.supply[*class]).sum();
            supply.min(structure.strands[strand].threads)
        });
        reach.push(if node.overlaps {
            let missing = flow.serve(structure, index, threads);
            flow.lower(structure, index, 0.0);
            threads - missing
        } else {
            strands.sum()
        });
    }
}

/// Says which reservations can't be kept.
fn report_broken_promises(
    structure: &Structure,
    curves: &Curves,
    shares: &[f64],
    division: &mut Division,
) {
    let mut report = |place, promised: f64, kept: f64| {
        if kept + 1e-6 < promised {
            division.faults.push(Fault {
                place,
                kind: FaultKind::Reservation { promised, kept },
            });
        }
    };
    for (index, leaf) in structure.leaves.iter().enumerate() {
        let place = Place::Claimant(leaf.claimant);
        report(place, curves.leaves[index].floor, shares[index]);
    }
    for (index, branch) in structure.branches.iter().enumerate() {
        let Some(group) = branch.group.filter(|_| curves.branches[index].floor > 0.0) else {
            continue;
        };
        let kept = structure
            .leaves
            .iter()
            .zip(shares)
            .filter(|(leaf, _)| is_below(structure, leaf.branch, index))
            .map(|(_, share)| share)
            .sum();
        report(Place::Group(group), curves.branches[index].floor, kept);
    }
}
