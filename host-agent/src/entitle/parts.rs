//! What some nodes get together at given levels of the branches: by a sum over claimants, or, where there are many, by a table
//! along the knots of each branch.

use super::curves::{Curves, Level};
use super::structure::Structure;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Parts {
    nodes: Vec<usize>,
    branches: Vec<usize>,
    tabled: bool,
    member: Vec<bool>,
    /// By branch and knot: what the leaves of these nodes get there, and the slope after it.
    tables: Vec<Vec<(f64, f64)>>,
}

impl Parts {
    /// Takes the nodes to sum over, which lie below some branches.
    pub(super) fn set(
        &mut self,
        structure: &Structure,
        curves: &Curves,
        nodes: &[usize],
        branches: &[usize],
    ) {
        for node in self.nodes.drain(..) {
            if let Some(member) = self.member.get_mut(node) {
                *member = false;
            }
        }
        self.nodes.extend_from_slice(nodes);
        self.branches.clear();
        self.branches.push(0);
        self.branches.extend_from_slice(branches);
        let leaves: usize = nodes
            .iter()
            .map(|node| structure.nodes[*node].leaves.len())
            .sum();
        let knots: usize = self
            .branches
            .iter()
            .map(|branch| curves.knot_count(*branch))
            .sum();
        self.tabled = 4 * leaves > knots;
        if !self.tabled {
            return;
        }
        self.member.resize(structure.nodes.len(), false);
        for node in nodes {
            self.member[*node] = true;
        }
        self.tables.resize_with(structure.branches.len(), Vec::new);
        for branch in &self.branches {
            let member = |leaf: usize| self.member[structure.leaves[leaf].node];
            let floors = structure.branches[*branch]
                .leaves
                .iter()
                .filter(|leaf| member(**leaf))
                .map(|leaf| curves.leaves[*leaf].floor)
                .sum();
            curves.table(*branch, floors, member, &mut self.tables[*branch]);
        }
    }

    /// What they get, and how fast that rises with the root's level.
    pub(super) fn sum(
        &self,
        structure: &Structure,
        curves: &Curves,
        levels: &[Level],
    ) -> (f64, f64) {
        let mut total = (0.0, 0.0);
        if self.tabled {
            for branch in &self.branches {
                let level = &levels[*branch];
                let Some((sum, slope)) = self.tables[*branch].get(level.knot).copied() else {
                    continue;
                };
                if level.floors < 1.0 {
                    total.0 += sum * level.floors;
                    total.1 += sum * level.floors_rise;
                } else if slope > 0.0 {
                    total.0 += sum + slope * (level.level - curves.knot_at(*branch, level.knot));
                    total.1 += slope * level.rise;
                } else {
                    total.0 += sum;
                }
            }
        } else {
            for node in &self.nodes {
                let part = curves.node(structure, *node, levels);
                total = (total.0 + part.0, total.1 + part.1);
            }
        }
        total
    }
}
