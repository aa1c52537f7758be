//! The division of each component's pCPU time: everybody's level rises until what all want can't be served together any more;
//! those who hold each other up stop there (a *tight* set), and the others go on.
//!
//! Found by decomposition (Fujishige, "Lexicographically optimal base of a polymatroid with respect to a weight vector", Math.
//! Oper. Res. 1980; Groenevelt 1991): at the level where all of a set would get what its pCPUs have, a maximum flow either
//! serves them, or its cut splits the set into those who stop below that level and those who stop above.

use super::curves::{Curves, Level};
use super::flow::{Flow, TINY};
use super::parts::Parts;
use super::structure::{Component, Structure};

/// What may be missing of what all want before it counts as not served.
const MISSING: f64 = 1e-9;
/// Steps of the search for a level before it gives up and takes what it has, which is then within rounding.
const STEPS: u32 = 200;

/// Who holds each other up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Tight {
    /// The root's level at which they stopped.
    pub(super) level: f64,
}

/// The result for the components that were solved.
#[derive(Debug, Default)]
pub(super) struct Solution {
    pub(super) flow: Flow,
    /// The root's level at which each node stopped; infinite where nothing held it up.
    pub(super) node_levels: Vec<f64>,
    /// The place among `tight` of what holds a node up.
    pub(super) node_sets: Vec<Option<usize>>,
    /// The place among `tight` of the set that a class belongs to.
    pub(super) class_sets: Vec<Option<usize>>,
    pub(super) tight: Vec<Tight>,
    pub(super) levels: Vec<Level>,
    wants: Vec<f64>,
    parts: Parts,
    order: Vec<usize>,
    /// Nodes that stopped and whose flow others must work round.
    held: Vec<usize>,
    missing: Vec<usize>,
}

impl Solution {
    /// Forgets everything but the supplies.
    pub(super) fn clear(&mut self, structure: &Structure) {
        self.flow.clear(structure);
        self.node_levels.clear();
        self.node_levels
            .resize(structure.nodes.len(), f64::INFINITY);
        self.node_sets.clear();
        self.node_sets.resize(structure.nodes.len(), None);
        self.class_sets.clear();
        self.class_sets.resize(structure.classes.len(), None);
        self.wants.clear();
        self.wants.resize(structure.nodes.len(), 0.0);
        self.levels.clear();
        self.levels
            .resize(structure.branches.len(), Level::of_root(0.0));
        self.tight.clear();
    }

    /// Solves one component, which must be clear.
    pub(super) fn solve(&mut self, structure: &Structure, curves: &Curves, component: &Component) {
        self.held.clear();
        self.order.clear();
        self.order.extend_from_slice(&component.nodes);
        let all = (0, self.order.len());
        self.resolve(structure, curves, component, all, f64::INFINITY);
        for node in &component.nodes {
            if self.node_sets[*node].is_none() {
                self.node_sets[*node] = self.closed_in(structure, *node);
            }
        }
    }

    /// Nodes that want nothing hold nobody up, and yet may have no pCPUs but those of tight sets: then the highest of these.
    fn closed_in(&self, structure: &Structure, node: usize) -> Option<usize> {
        let mut highest: Option<usize> = None;
        for strand in structure.nodes[node].strands.clone() {
            for arc in structure.strands[strand].arcs.clone() {
                let set = self.class_sets[structure.arcs[arc].1]?;
                if highest.is_none_or(|other| self.tight[other].level < self.tight[set].level) {
                    highest = Some(set);
                }
            }
        }
        highest
    }

    /// Solves for the nodes at `range` of the order, who get no more than `bound` together; the order within it may change.
    fn resolve(
        &mut self,
        structure: &Structure,
        curves: &Curves,
        component: &Component,
        range: (usize, usize),
        bound: f64,
    ) {
        let (mut start, end) = range;
        let mut bound = bound;
        while start < end {
            bound = bound.min(self.open_supply(structure, component));
            let level = self.find(structure, curves, component, (start, end), bound);
            self.serve(structure, curves, (start, end));
            if self.missing.is_empty() {
                self.stop(structure, component, (start, end), level);
                return;
            }
            let missing = std::mem::take(&mut self.missing);
            self.flow.mark(structure, &missing);
            self.missing = missing;
            let capacity = self.capacity(structure, component, (start, end));
            let mut split = start;
            for index in start..end {
                if self.flow.marked_node(self.order[index]) {
                    self.order.swap(index, split);
                    split += 1;
                }
            }
            if split == end && capacity < bound {
                bound = capacity;
                continue;
            }
            if split == end {
                // Rounding only: the cut is what was tried.
                self.stop(structure, component, (start, end), level);
                return;
            }
            for index in split..end {
                self.flow.lower(structure, self.order[index], 0.0);
            }
            self.resolve(structure, curves, component, (start, split), capacity);
            start = split;
            bound = f64::INFINITY;
        }
    }

    /// What the open classes could still give.
    fn open_supply(&self, structure: &Structure, component: &Component) -> f64 {
        let open: f64 = component
            .classes
            .iter()
            .filter(|class| !self.flow.closed_classes[**class])
            .map(|class| self.flow.supply[*class])
            .sum();
        let held: f64 = self
            .held
            .iter()
            .flat_map(|node| structure.nodes[*node].strands.clone())
            .filter(|strand| !self.flow.closed_strands[*strand])
            .map(|strand| self.flow.strands[strand])
            .sum();
        (open - held).max(0.0)
    }

    /// The level at which the nodes of a range would get `bound` together, infinite if they never do; leaves the branches'
    /// levels there.
    fn find(
        &mut self,
        structure: &Structure,
        curves: &Curves,
        component: &Component,
        range: (usize, usize),
        bound: f64,
    ) -> f64 {
        let nodes = &self.order[range.0..range.1];
        let (parts, levels) = (&mut self.parts, &mut self.levels);
        parts.set(structure, curves, nodes, &component.branches);
        let mut at = |s: f64| {
            curves.levels(structure, &component.branches, s, levels);
            parts.sum(structure, curves, levels)
        };
        find_level(f64::NAN, curves.top(), bound, &mut at)
    }

    /// Serves the nodes of a range with what they get at the branches' levels; who lacks something is in `missing` then.
    fn serve(&mut self, structure: &Structure, curves: &Curves, range: (usize, usize)) {
        self.missing.clear();
        for index in range.0..range.1 {
            let node = self.order[index];
            self.wants[node] = curves.node(structure, node, &self.levels).0;
            if self.flow.nodes[node] > self.wants[node] {
                self.flow.lower(structure, node, self.wants[node]);
            }
        }
        for index in range.0..range.1 {
            let node = self.order[index];
            if self.flow.serve(structure, node, self.wants[node]) > MISSING {
                self.missing.push(node);
            }
        }
    }

    /// What the marked nodes of a range can get at most.
    fn capacity(&self, structure: &Structure, component: &Component, range: (usize, usize)) -> f64 {
        let flow = &self.flow;
        let mut capacity: f64 = component
            .classes
            .iter()
            .filter(|class| !flow.closed_classes[**class] && flow.marked_class(**class))
            .map(|class| flow.supply[*class])
            .sum();
        for node in &self.order[range.0..range.1] {
            if flow.marked_node(*node) {
                capacity += structure.nodes[*node]
                    .strands
                    .clone()
                    .filter(|strand| !flow.closed_strands[*strand] && !flow.marked_strand(*strand))
                    .map(|strand| structure.strands[strand].threads)
                    .sum::<f64>();
            }
        }
        for node in &self.held {
            capacity -= structure.nodes[*node]
                .strands
                .clone()
                .filter(|strand| !flow.closed_strands[*strand] && flow.marked_strand(*strand))
                .map(|strand| flow.strands[strand])
                .sum::<f64>();
        }
        capacity.max(0.0)
    }

    /// The nodes of a range stop at a level.
    fn stop(
        &mut self,
        structure: &Structure,
        component: &Component,
        range: (usize, usize),
        level: f64,
    ) {
        let nodes = self.order[range.0..range.1].to_vec();
        if level.is_finite() {
            let set = self.tight.len();
            self.tight.push(Tight { level });
            self.flow.mark(structure, &nodes);
            for node in &nodes {
                self.node_levels[*node] = level;
                self.node_sets[*node] = Some(set);
            }
            for node in nodes.iter().chain(&self.held) {
                for strand in structure.nodes[*node].strands.clone() {
                    if self.flow.marked_strand(strand) {
                        self.flow.closed_strands[strand] = true;
                    }
                }
            }
            for class in &component.classes {
                if self.flow.marked_class(*class) && !self.flow.closed_classes[*class] {
                    self.flow.closed_classes[*class] = true;
                    self.class_sets[*class] = Some(set);
                }
            }
        }
        let flow = &self.flow;
        self.held.extend(nodes.iter().filter(|node| {
            structure.nodes[**node]
                .strands
                .clone()
                .any(|strand| !flow.closed_strands[strand] && flow.strands[strand] > TINY)
        }));
    }
}

/// Where a piecewise linear function that never falls reaches `bound`, from −1 to `top`; infinite if it never exceeds it. The
/// function says its value and its slope, and is asked last where the answer lies. `hint`, if positive and
/// not above `top`, is near the answer, and there is one.
pub(super) fn find_level(
    hint: f64,
    top: f64,
    bound: f64,
    at: &mut impl FnMut(f64) -> (f64, f64),
) -> f64 {
    let near = 1e-13 * bound.max(1.0);
    let (mut low, mut high) = (-1.0, top);
    let mut guess = if hint > 0.0 && hint <= top { hint } else { 0.0 };
    let mut from = at(guess);
    let mut asked_last = true;
    if guess == 0.0 && from.0 <= bound + near {
        if at(f64::INFINITY).0 <= bound + TINY {
            return f64::INFINITY;
        }
        asked_last = false;
    }
    for step in 0..STEPS {
        if (from.0 - bound).abs() <= near {
            break;
        }
        if from.0 < bound {
            low = guess;
        } else {
            high = guess;
        }
        let newton = guess + (bound - from.0) / from.1;
        // Newton's steps land on the answer once they are on its piece; halving keeps them from wandering.
        let next = if newton > low && newton < high && step % 4 != 3 {
            newton
        } else {
            f64::midpoint(low, high)
        };
        if next <= low || next >= high {
            break;
        }
        guess = next;
        from = at(guess);
        asked_last = true;
    }
    if !asked_last {
        at(guess);
    }
    guess
}
