//! The division of a host's pCPU time: shares, targets and competing sets, from curves and flows.

use super::curves::{Child, Curves, Level};
use super::division::{self, Bound, Division, Entitlement, Fault, FaultKind};
use super::report;
use super::solve::Solution;
use super::structure::{Leaf, Structure};
use super::targets::Targets;
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
    targets: Targets,
    reach: Vec<f64>,
    division: Division,
}

impl Engine {
    /// Divides the pCPU time of `host`. The result is good until the next call.
    pub fn divide(&mut self, host: &Host) -> &Division {
        let changed = self.structure.follow(host);
        if changed {
            report::classes(host, &self.structure, &mut self.division);
        }
        let Self {
            structure,
            curves,
            shares,
            reach,
            division,
            ..
        } = self;
        division.faults.clear();
        division.faults.extend_from_slice(&structure.faults);
        let supply = &mut shares.solution.flow.supply;
        find_supply(host, structure, supply, &mut division.faults);
        shares.solution.clear(structure);
        find_reach(structure, &mut shares.solution, reach);
        curves.fill(host, structure, reach, &mut division.faults);
        shares.divide(structure, curves, None);
        report::sets(host, structure, curves, &shares.solution, division);
        report_broken_promises(structure, curves, &shares.shares, division);
        self.report_shares(host);
        // Targets last: some change the curves for a while.
        self.shares.restore(&self.structure, &mut self.curves);
        self.find_targets(host);
        report::splits(&self.structure, &self.shares.solution, &mut self.division);
        &self.division
    }

    /// Shares and what bound them; targets begin as the same.
    fn report_shares(&mut self, host: &Host) {
        let Self {
            structure,
            curves,
            shares,
            reach,
            division,
            ..
        } = self;
        division.claimants.clear();
        division.claimants.resize(host.claimants.len(), None);
        for (index, node) in structure.nodes.iter().enumerate() {
            let set = report::set_of(structure, &shares.solution, division, index);
            let level = shares.rise(structure, curves, index);
            for leaf in node.leaves.clone() {
                let bound = match shares.fixed[leaf] {
                    Some(level) => Bound::Level { level },
                    None => bound_of(
                        &Place {
                            host,
                            structure,
                            curves,
                            reach: reach[index],
                        },
                        leaf,
                        &curves.leaves[leaf],
                        shares.shares[leaf],
                        (level, &shares.solution.levels),
                    ),
                };
                division.claimants[structure.leaves[leaf].claimant] = Some(Entitlement {
                    share: Cpus(shares.shares[leaf]),
                    share_bound: bound,
                    target: Cpus(shares.shares[leaf]),
                    target_bound: bound,
                    set,
                    split: (0, 0),
                });
            }
        }
    }

    fn find_targets(&mut self, host: &Host) {
        let Self {
            structure,
            curves,
            shares,
            trial,
            targets,
            reach,
            division,
        } = self;
        targets.clear(structure);
        let mut trial_is_ready = false;
        for (index, leaf) in structure.leaves.iter().enumerate() {
            let (limit, own) = (shares.limits[index], curves.own_limit[index]);
            let Some(entitlement) = division.claimants[leaf.claimant].as_mut() else {
                continue;
            };
            if own <= limit + NEAR {
                continue;
            }
            let share = shares.shares[index];
            let found = if shares.quotas {
                None
            } else {
                targets.find(structure, curves, &mut shares.solution, index, share)
            };
            let place = |curves| Place {
                host,
                structure,
                curves,
                reach: reach[leaf.node],
            };
            if let Some(found) = found {
                entitlement.target = Cpus(found.target.max(share));
                entitlement.target_bound = bound_of(
                    &place(curves),
                    index,
                    &curves.wanting_all(index),
                    found.target,
                    (found.level, targets.levels()),
                );
                continue;
            }
            if !trial_is_ready {
                let supply = &shares.solution.flow.supply;
                trial.solution.flow.supply.clone_from(supply);
                trial_is_ready = true;
            }
            curves.set_limit(structure, index, own);
            trial.solution.clear(structure);
            trial.divide(structure, curves, Some(index));
            let level = trial.rise(structure, curves, leaf.node);
            entitlement.target = Cpus(trial.shares[index].max(share));
            entitlement.target_bound = bound_of(
                &place(curves),
                index,
                &curves.leaves[index],
                trial.shares[index],
                (level, &trial.solution.levels),
            );
            trial.restore(structure, curves);
            curves.set_limit(structure, index, limit);
        }
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
    /// May the quota of a group bind?
    quotas: bool,
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
        self.quotas = (0..structure.branches.len())
            .any(|branch| curves.caps[branch] + NEAR < curves.limits[branch]);
        let only = only
            .filter(|_| !self.quotas)
            .map(|leaf| structure.nodes[structure.leaves[leaf].node].component);
        // Each round fixes at least one leaf more.
        for _ in 0..=count {
            for (index, component) in structure.components.iter().enumerate() {
                if only.is_none_or(|only| only == index) {
                    self.solution.solve(structure, curves, component);
                    self.read(structure, curves, index);
                }
            }
            if !self.quotas || !self.fix(structure, curves) {
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
                    // Once only: what its neighbours take then must not make it want less and less.
                    if self.fixed[index].is_none() {
                        held_up.push(index);
                    }
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

    /// Raises the branches' levels to where a node stopped, and says where.
    fn rise(&mut self, structure: &Structure, curves: &Curves, node: usize) -> f64 {
        let level = self.solution.node_levels[node];
        let component = &structure.components[structure.nodes[node].component];
        let levels = &mut self.solution.levels;
        curves.levels(structure, &component.branches, level, levels);
        level
    }
}

/// What a bound is found from.
struct Place<'a> {
    host: &'a Host,
    structure: &'a Structure,
    curves: &'a Curves,
    /// What the claimant's pCPUs could give it alone.
    reach: f64,
}

/// What kept a leaf, which may have what `child` says and got `share`, from more. It stopped at a level of the root; the branches'
/// levels are those there.
fn bound_of(
    place: &Place<'_>,
    leaf: usize,
    child: &Child,
    share: f64,
    (level, levels): (f64, &[Level]),
) -> Bound {
    let Place {
        host,
        structure,
        curves,
        reach,
    } = *place;
    let Leaf {
        claimant,
        branch,
        threads,
        ..
    } = structure.leaves[leaf];
    if share + NEAR >= child.limit {
        let own = curves.own_limit[leaf];
        let claimant = &host.claimants[claimant];
        return if child.limit + NEAR < own {
            Bound::Demand(Cpus(child.limit))
        } else if let Some(cap) = claimant.cap.filter(|cap| cap.0 <= own) {
            Bound::Quota(cap)
        } else if reach < threads.min(claimant.all.0) {
            Bound::Cpuset(Cpus(reach))
        } else {
            Bound::Threads(Cpus(own))
        };
    }
    let mut at = branch;
    while at != 0 {
        let inner = &structure.branches[at];
        let (sum, _) = curves.branches[at].at(&levels[inner.parent]);
        let cap = curves.caps[at];
        if let Some(group) = inner.group.filter(|_| sum + NEAR >= cap) {
            return Bound::GroupQuota {
                group,
                cap: Cpus(cap),
            };
        }
        at = inner.parent;
    }
    let own = &levels[branch];
    if child.floor * own.floors > child.weight * own.level {
        Bound::Reservation(Cpus(child.floor))
    } else {
        Bound::Level { level }
    }
}

fn is_below(structure: &Structure, mut branch: usize, above: usize) -> bool {
    while branch > above {
        branch = structure.branches[branch].parent;
    }
    branch == above
}

/// What each class can give.
fn find_supply(host: &Host, structure: &Structure, supply: &mut Vec<f64>, faults: &mut Vec<Fault>) {
    supply.clear();
    supply.extend(structure.classes.iter().map(|class| {
        let mut sum = 0.0;
        for pcpu in class.pcpus.iter().map(|index| host.pcpus[*index]) {
            if pcpu.supply.0 >= 0.0 {
                sum += pcpu.supply.0.min(1.0);
            } else {
                faults.push(Fault {
                    place: division::Place::Pcpu(pcpu.id),
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
        let place = division::Place::Claimant(leaf.claimant);
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
        report(
            division::Place::Group(group),
            curves.branches[index].floor,
            kept,
        );
    }
}
