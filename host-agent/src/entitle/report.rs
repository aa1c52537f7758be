//! From a solution to what the division says of classes and competing sets.

use super::curves::Curves;
use super::division::{Class, ClassId, CompetingSet, Division};
use super::flow::TINY;
use super::solve::Solution;
use super::structure::Structure;
use crate::model::{Cpus, Host};

/// Fills in the classes, but for their supplies and sets.
pub(super) fn classes(host: &Host, structure: &Structure, division: &mut Division) {
    division.classes.clear();
    for class in &structure.classes {
        let pcpus: Vec<u32> = class
            .pcpus
            .iter()
            .map(|place| host.pcpus[*place].id)
            .collect();
        division.classes.push(Class {
            id: ClassId(pcpus[0]),
            pcpus,
            supply: Cpus::ZERO,
            set: 0,
        });
    }
}

/// Fills in the sets, and the classes' supplies and sets.
pub(super) fn sets(
    host: &Host,
    structure: &Structure,
    curves: &Curves,
    solution: &Solution,
    division: &mut Division,
) {
    let flow = &solution.flow;
    // Tight sets by their number; each other class leads its set or follows a lower one.
    let mut leader: Vec<usize> = (0..structure.classes.len()).collect();
    for (index, node) in structure.nodes.iter().enumerate() {
        if solution.node_sets[index].is_some() {
            continue;
        }
        let mut first = None;
        for (_, class) in arcs(structure, node.strands.clone()) {
            if solution.class_sets[class].is_none() {
                let this = root(&leader, class);
                let other = *first.get_or_insert(this);
                let other = root(&leader, other);
                leader[this.max(other)] = this.min(other);
            }
        }
    }
    division.sets.clear();
    let mut tight_place: Vec<Option<usize>> = vec![None; solution.tight.len()];
    for index in 0..structure.classes.len() {
        let lead = root(&leader, index);
        let known = match solution.class_sets[index] {
            Some(tight) => tight_place[tight],
            None if lead < index => Some(division.classes[lead].set),
            None => None,
        };
        let set = known.unwrap_or_else(|| {
            let level = solution.class_sets[index].map(|tight| {
                tight_place[tight] = Some(division.sets.len());
                solution.tight[tight].level
            });
            division.sets.push(CompetingSet {
                classes: Vec::new(),
                supply: Cpus::ZERO,
                demand: Cpus::ZERO,
                given: Cpus::ZERO,
                level,
            });
            division.sets.len() - 1
        });
        let supply = Cpus(flow.supply[index]);
        division.sets[set].classes.push(index);
        division.sets[set].supply = division.sets[set].supply + supply;
        division.classes[index].supply = supply;
        division.classes[index].set = set;
    }
    add_demand(host, structure, curves, solution, division);
}

/// What is shown to be wanted of each set, and what it gives.
fn add_demand(
    host: &Host,
    structure: &Structure,
    curves: &Curves,
    solution: &Solution,
    division: &mut Division,
) {
    let shown = shown(host, structure, curves);
    for (index, node) in structure.nodes.iter().enumerate() {
        let set = set_of(structure, solution, division, index);
        let mut wanted: f64 = node.leaves.clone().map(|leaf| shown[leaf]).sum();
        for (arc, class) in arcs(structure, node.strands.clone()) {
            let given = solution.flow.arcs[arc];
            let other = division.classes[class].set;
            division.sets[other].given.0 += given;
            if other != set {
                division.sets[other].demand.0 += given;
                wanted -= given;
            }
        }
        division.sets[set].demand.0 += wanted.max(0.0);
    }
}

/// What each leaf shows that it wants, as far as its threads, its quota and its groups' quotas allow. More threads than pCPUs
/// are demand above supply.
fn shown(host: &Host, structure: &Structure, curves: &Curves) -> Vec<f64> {
    let mut shown: Vec<f64> = structure
        .leaves
        .iter()
        .map(|leaf| {
            let claimant = &host.claimants[leaf.claimant];
            let quota = claimant.cap.map_or(f64::INFINITY, |cap| cap.0.max(0.0));
            claimant.shown.0.max(0.0).min(quota).min(leaf.threads)
        })
        .collect();
    let mut sums = vec![0.0; structure.branches.len()];
    for (leaf, shown) in structure.leaves.iter().zip(&shown) {
        sums[leaf.branch] += shown;
    }
    let mut parts = vec![1.0; structure.branches.len()];
    for branch in (1..structure.branches.len()).rev() {
        if sums[branch] > curves.caps[branch] {
            parts[branch] = curves.caps[branch] / sums[branch];
            sums[branch] = curves.caps[branch];
        }
        sums[structure.branches[branch].parent] += sums[branch];
    }
    for branch in 1..structure.branches.len() {
        parts[branch] *= parts[structure.branches[branch].parent];
    }
    for (leaf, shown) in structure.leaves.iter().zip(&mut shown) {
        *shown *= parts[leaf.branch];
    }
    shown
}

/// The set where a node would go for more.
pub(super) fn set_of(
    structure: &Structure,
    solution: &Solution,
    division: &Division,
    node: usize,
) -> usize {
    let held_by = solution.node_sets[node];
    arcs(structure, structure.nodes[node].strands.clone())
        .find(|(_, class)| solution.class_sets[*class] == held_by)
        .map_or(0, |(_, class)| division.classes[class].set)
}

/// Where each target could be served.
pub(super) fn splits(structure: &Structure, solution: &Solution, division: &mut Division) {
    division.split.clear();
    let flow = &solution.flow;
    let mut parts: Vec<(usize, f64, f64)> = Vec::new();
    for leaf in &structure.leaves {
        let Some(entitlement) = division.claimants[leaf.claimant].as_mut() else {
            continue;
        };
        parts.clear();
        let strands = structure.nodes[leaf.node].strands.clone();
        for (arc, class) in arcs(structure, strands) {
            let strand = structure.arcs[arc].0;
            let most = flow.supply[class].min(structure.strands[strand].threads);
            let spare = (flow.supply[class] - flow.classes[class]).max(0.0);
            parts.push((class, flow.arcs[arc] + spare, most));
        }
        let start = division.split.len();
        spread(entitlement.target.0, &parts, &mut division.split);
        entitlement.split = (start, division.split.len());
    }
}

/// Spreads an amount over (class, weight, most); beyond what the weights bring, in order.
fn spread(amount: f64, parts: &[(usize, f64, f64)], split: &mut Vec<(usize, Cpus)>) {
    let weights: f64 = parts.iter().map(|part| part.1).sum();
    let start = split.len();
    let mut left = amount;
    for (class, weight, most) in parts {
        let part = if weights > TINY {
            (amount * weight / weights).min(*most)
        } else {
            0.0
        };
        left -= part;
        split.push((*class, Cpus(part)));
    }
    for (place, (_, _, most)) in parts.iter().enumerate() {
        let more = (most - split[start + place].1.0).min(left);
        if more > 0.0 {
            split[start + place].1.0 += more;
            left -= more;
        }
    }
    // Strands of one claimant may use the same class.
    let mut kept = start;
    for place in start..split.len() {
        let (class, part) = split[place];
        match split[start..kept]
            .iter_mut()
            .find(|(other, _)| *other == class)
        {
            Some(other) => other.1.0 += part.0,
            None if part.0 > 0.0 => {
                split[kept] = (class, part);
                kept += 1;
            }
            None => {}
        }
    }
    split.truncate(kept);
}

/// Arcs of some strands, with their classes.
fn arcs(
    structure: &Structure,
    strands: std::ops::Range<usize>,
) -> impl Iterator<Item = (usize, usize)> + '_ {
    let range = structure.arcs_of(strands);
    range.map(|arc| (arc, structure.arcs[arc].1))
}

fn root(leader: &[usize], mut class: usize) -> usize {
    while leader[class] != class {
        class = leader[class];
    }
    class
}
