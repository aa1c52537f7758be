//! What a claimant would get if it wanted everything, from the solution for what all want now, without solving anew.
//!
//! One claimant that wants more slows down its siblings, and nobody else's curve. So:
//! - While pCPU time that it can reach is left over, it gets that, and nobody is held up who was not.
//! - Else it is held up with the set that it belongs to, or with those whose pCPUs it would fill, at a level that follows from
//!   one equation: what all of these get is what their pCPUs have. This is the answer if their part of the pCPU time can be
//!   served so, and if fuller sets that they reach into are full below that level still; a curve that was slowed down might no
//!   longer fill them. Where this can't be shown, the division has to be made anew.

use super::curves::{Child, Curves, Level};
use super::flow::Flow;
use super::parts::Parts;
use super::solve::{Solution, find_level};
use super::structure::Structure;

/// What may be missing of what a node would get before it counts as not served.
const MISSING: f64 = 1e-9;

/// A target.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    pub(super) target: f64,
    /// The root's level where the claimant is held up; infinite if nothing does so.
    pub(super) level: f64,
}

/// Those who would be held up together.
#[derive(Debug, Default)]
struct Together {
    /// For which node this holds.
    node: Option<usize>,
    /// The tight set, if it is one.
    set: Option<usize>,
    /// Can the targets be found from it?
    usable: bool,
    nodes: Vec<usize>,
    classes: Vec<usize>,
    /// What they get together.
    sum: f64,
    /// The level where they were held up up to now.
    level: f64,
    /// The highest level of the fuller sets that they reach into, and the levels of branches there.
    fuller: Option<f64>,
    fuller_levels: Vec<Level>,
    saved: Vec<f64>,
    /// Where to begin to look for a level.
    hint: f64,
    /// What the node can surely take over from the others, whoever of them gives it.
    exchange: f64,
    /// What is left over for the node, if it is not held up.
    spare: f64,
}

/// Buffers.
#[derive(Debug, Default)]
pub(super) struct Targets {
    together: Together,
    parts: Parts,
    levels: Vec<Level>,
    /// The branches above the leaf, the lowest first, each with what it was and what it would be.
    path: Vec<(usize, Child, Child)>,
}

impl Targets {
    /// Forgets the last solution.
    pub(super) fn clear(&mut self, structure: &Structure) {
        self.together.node = None;
        self.together.set = None;
        self.together.classes.clear();
        self.levels.clear();
        self.levels
            .resize(structure.branches.len(), Level::of_root(0.0));
        self.together.fuller_levels.clone_from(&self.levels);
    }

    /// The levels of branches for the last target that was found.
    pub(super) fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// The target of a leaf; `None` where the division has to be made anew. `solution` is as before afterwards.
    pub(super) fn find(
        &mut self,
        structure: &Structure,
        curves: &Curves,
        solution: &mut Solution,
        leaf: usize,
        share: f64,
    ) -> Option<Found> {
        let node = structure.leaves[leaf].node;
        if self.together.node != Some(node) {
            let before = self.together.set;
            self.together.set(structure, curves, solution, node);
            if before.is_none() || before != self.together.set {
                let component = &structure.components[structure.nodes[node].component];
                let nodes = &self.together.nodes;
                self.parts
                    .set(structure, curves, nodes, &component.branches);
            }
        }
        let (old, new) = (curves.leaves[leaf], curves.wanting_all(leaf));
        if !self.lay_path(structure, curves, leaf, old, new) {
            return None;
        }
        if solution.node_sets[node].is_none() {
            self.rise(structure, curves, node, f64::INFINITY);
            let most = new.at(&self.levels[structure.leaves[leaf].branch]).0;
            if most - share <= self.together.spare + MISSING {
                return Some(Found {
                    target: most,
                    level: f64::INFINITY,
                });
            }
        }
        if !self.together.usable {
            return None;
        }
        let level = self.find_level(structure, curves, leaf);
        let branch = structure.leaves[leaf].branch;
        let target = new.at(&self.levels[branch]).0;
        let stays = level >= 0.0
            && self
                .together
                .fuller
                .is_none_or(|fuller| self.stays_full(level, fuller));
        (stays && self.is_served(structure, curves, solution, leaf, target - share))
            .then_some(Found { target, level })
    }

    /// What changes above the leaf; `false` if a group's quota would bind.
    fn lay_path(
        &mut self,
        structure: &Structure,
        curves: &Curves,
        leaf: usize,
        old: Child,
        new: Child,
    ) -> bool {
        self.path.clear();
        let (mut old, mut new) = (old, new);
        let mut branch = structure.leaves[leaf].branch;
        while branch != 0 {
            // A branch, and its child on the way to the leaf.
            self.path.push((branch, old, new));
            if curves.limits[branch] - old.limit + new.limit > curves.caps[branch] {
                return false;
            }
            new = curves.changed_branch(branch, &old, &new);
            old = curves.branches[branch];
            branch = structure.branches[branch].parent;
        }
        self.path.push((0, old, new));
        true
    }

    /// The levels of all branches of a component at the root's level `s`.
    fn rise(&mut self, structure: &Structure, curves: &Curves, node: usize, s: f64) {
        let component = &structure.components[structure.nodes[node].component];
        self.levels[0] = curves.root_at(s);
        let mut below = self.path.len() - 1;
        for branch in &component.branches {
            let above = &self.levels[structure.branches[*branch].parent];
            if below > 0 && self.path[below - 1].0 == *branch {
                // The changed child of the branch above is this branch.
                let (sum, rise) = self.path[below].2.at(above);
                below -= 1;
                let (_, old, new) = &self.path[below];
                self.levels[*branch] = curves.settle_changed(*branch, sum, rise, old, new);
            } else {
                let (sum, rise) = curves.branches[*branch].at(above);
                self.levels[*branch] = curves.settle(*branch, sum, rise);
            }
        }
    }

    /// What a node gets at the levels, and how fast that rises.
    fn sum(&self, structure: &Structure, curves: &Curves, node: usize, leaf: usize) -> (f64, f64) {
        let (sum, rise) = curves.node(structure, node, &self.levels);
        let more = if structure.leaves[leaf].node == node {
            self.more(structure, leaf)
        } else {
            (0.0, 0.0)
        };
        (sum + more.0, rise + more.1)
    }

    /// What the leaf gets more than it wants, and how fast that rises.
    fn more(&self, structure: &Structure, leaf: usize) -> (f64, f64) {
        let level = &self.levels[structure.leaves[leaf].branch];
        let (old, new) = (self.path[0].1.at(level), self.path[0].2.at(level));
        (new.0 - old.0, new.1 - old.1)
    }

    /// The level where all who are held up together get what there is for them.
    fn find_level(&mut self, structure: &Structure, curves: &Curves, leaf: usize) -> f64 {
        let node = structure.leaves[leaf].node;
        let (top, sum) = (self.together.level.min(curves.top()), self.together.sum);
        let top = top.max(
            self.path
                .last()
                .map_or(0.0, |(_, _, new)| new.limit / new.weight),
        );
        let level = find_level(self.together.hint, top, sum, &mut |s| {
            self.rise(structure, curves, node, s);
            let (sum, rise) = self.parts.sum(structure, curves, &self.levels);
            let more = self.more(structure, leaf);
            (sum + more.0, rise + more.1)
        });
        self.together.hint = level;
        level
    }

    /// Are the fuller sets full at their level, even with slower curves?
    fn stays_full(&self, level: f64, fuller: f64) -> bool {
        level >= fuller
            && self.path.iter().all(|(branch, _, _)| {
                let (now, then) = (&self.levels[*branch], &self.together.fuller_levels[*branch]);
                *branch == 0 || (now.level >= then.level && now.floors >= then.floors)
            })
    }

    /// Can the pCPUs serve all who are held up together as they would be?
    fn is_served(
        &mut self,
        structure: &Structure,
        curves: &Curves,
        solution: &mut Solution,
        leaf: usize,
        more: f64,
    ) -> bool {
        if more <= self.together.exchange {
            return true;
        }
        let wanted = structure.leaves[leaf].node;
        let flow = &mut solution.flow;
        let mut right = true;
        for node in &self.together.nodes {
            if *node != wanted {
                let sum = self.sum(structure, curves, *node, leaf).0;
                right &= sum <= flow.nodes[*node] + MISSING;
                if sum < flow.nodes[*node] {
                    flow.lower(structure, *node, sum);
                }
            }
        }
        let sum = self.sum(structure, curves, wanted, leaf).0;
        right = right && flow.serve(structure, wanted, sum) <= MISSING;
        let Together {
            nodes,
            classes,
            saved,
            ..
        } = &self.together;
        flow.restore(structure, nodes, classes, saved);
        right
    }
}

impl Together {
    /// Finds who would be held up with the claimants of a node, and opens their pCPUs for trials.
    fn set(
        &mut self,
        structure: &Structure,
        curves: &Curves,
        solution: &mut Solution,
        node: usize,
    ) {
        let component = &structure.components[structure.nodes[node].component];
        for class in &self.classes {
            solution.flow.closed_classes[*class] = solution.class_sets[*class].is_some();
        }
        self.node = Some(node);
        self.nodes.clear();
        self.classes.clear();
        self.usable = false;
        self.spare = 0.0;
        self.set = solution.node_sets[node];
        if let Some(set) = self.set {
            self.level = solution.tight[set].level;
            let member = |node: &&usize| solution.node_sets[**node] == Some(set);
            self.nodes.extend(component.nodes.iter().filter(member));
            let member = |class: &&usize| solution.class_sets[**class] == Some(set);
            self.classes.extend(component.classes.iter().filter(member));
        } else {
            self.level = f64::INFINITY;
            self.find_spare(structure, solution, node);
        }
        self.hint = self.level;
        self.find_sum(structure, solution);
        self.find_exchange(structure, &solution.flow);
        self.find_fuller(structure, curves, solution, component);
    }

    /// What is left over for a node that is not held up, and who would be held up with it if it took more.
    fn find_spare(&mut self, structure: &Structure, solution: &mut Solution, node: usize) {
        let component = &structure.components[structure.nodes[node].component];
        let flow = &mut solution.flow;
        let mut saved = std::mem::take(&mut self.saved);
        flow.save(structure, &component.nodes, &component.classes, &mut saved);
        let before = flow.nodes[node];
        flow.serve(structure, node, f64::MAX);
        self.spare = flow.nodes[node] - before;
        flow.mark(structure, &[node]);
        let marked = |node: &&usize| flow.marked_node(**node);
        self.nodes.extend(component.nodes.iter().filter(marked));
        let marked = |class: &&usize| flow.marked_class(**class);
        self.classes.extend(component.classes.iter().filter(marked));
        flow.restore(structure, &component.nodes, &component.classes, &saved);
        self.saved = saved;
    }

    /// What they can get together. Only where all of it is from their own pCPUs, and all of these serve them only.
    fn find_sum(&mut self, structure: &Structure, solution: &mut Solution) {
        let flow = &solution.flow;
        let supply: f64 = self.classes.iter().map(|class| flow.supply[*class]).sum();
        let now: f64 = self.nodes.iter().map(|node| flow.nodes[*node]).sum();
        let given: f64 = self.classes.iter().map(|class| flow.classes[*class]).sum();
        let own: f64 = self
            .nodes
            .iter()
            .flat_map(|node| structure.arcs_of(structure.nodes[*node].strands.clone()))
            .filter(|arc| self.classes.contains(&structure.arcs[*arc].1))
            .map(|arc| flow.arcs[arc])
            .sum();
        // A strand that all its threads limit may have more from elsewhere.
        let confined = self
            .nodes
            .iter()
            .flat_map(|node| structure.arcs_of(structure.nodes[*node].strands.clone()))
            .map(|arc| structure.arcs[arc].1)
            .all(|class| solution.class_sets[class].is_some() || self.classes.contains(&class));
        self.sum = supply;
        self.usable = !self.nodes.is_empty()
            && confined
            && self
                .nodes
                .iter()
                .all(|node| solution.node_sets[*node] == self.set)
            && (now - own).abs() <= MISSING
            && (given - own).abs() <= MISSING
            && (self.level.is_infinite() || (supply - given).abs() <= MISSING);
        flow.save(structure, &self.nodes, &self.classes, &mut self.saved);
        let flow = &mut solution.flow;
        for class in &self.classes {
            flow.closed_classes[*class] = false;
        }
        for node in &self.nodes {
            for strand in structure.nodes[*node].strands.clone() {
                flow.closed_strands[strand] = false;
            }
        }
    }

    /// One of the others that may use all of the pCPUs can leave the node its part of those that the node may use, and take
    /// what the others give instead, wherever that is.
    fn find_exchange(&mut self, structure: &Structure, flow: &Flow) {
        let Some(wanted) = self.node else {
            return;
        };
        self.exchange = if self.nodes.len() < 2 {
            f64::INFINITY
        } else {
            0.0
        };
        let alike = |node: usize| structure.nodes[node].strands.len() == 1;
        if !alike(wanted) {
            return;
        }
        let arcs = |node: usize| structure.arcs_of(structure.nodes[node].strands.clone());
        for other in self.nodes.iter().copied().filter(|node| alike(*node)) {
            let reached = arcs(other).filter(|arc| self.classes.contains(&structure.arcs[*arc].1));
            if reached.count() < self.classes.len() {
                continue;
            }
            let taken = arcs(other)
                .filter(|arc| {
                    let class = structure.arcs[*arc].1;
                    other == wanted || arcs(wanted).any(|own| structure.arcs[own].1 == class)
                })
                .map(|arc| flow.arcs[arc])
                .sum();
            // The node itself may use all of them: it takes what the others give.
            let taken = if other == wanted {
                f64::INFINITY
            } else {
                taken
            };
            self.exchange = self.exchange.max(taken);
        }
    }

    /// The fuller sets that they reach into.
    fn find_fuller(
        &mut self,
        structure: &Structure,
        curves: &Curves,
        solution: &Solution,
        component: &super::structure::Component,
    ) {
        self.fuller = None;
        for node in &self.nodes {
            for arc in structure.arcs_of(structure.nodes[*node].strands.clone()) {
                let class = structure.arcs[arc].1;
                if let Some(set) = solution.class_sets[class]
                    && !self.classes.contains(&class)
                {
                    let level = solution.tight[set].level;
                    self.fuller = Some(self.fuller.map_or(level, |other| other.max(level)));
                }
            }
        }
        if let Some(level) = self.fuller {
            curves.levels(
                structure,
                &component.branches,
                level,
                &mut self.fuller_levels,
            );
        }
    }
}
