//! What each claimant gets by weights, floors and limits alone, as pCPU time grows: a curve for each, over the *level* at the root
//! of the tree. Which pCPUs the time comes from is no matter here.
//!
//! At level s a child of the root with weight w gets clamp(s·w, floor, limit); what a group gets is divided among its children
//! in the same way, at a level of the group's own. Levels from −1 to 0 are for reservations that can't all be kept: there,
//! children of the root get the part 1 + s of their floors.

use super::division::{Fault, FaultKind, Place};
use super::structure::Structure;
use crate::model::{Cpus, Host};

/// Weights outside of this range would drown in rounding.
const WEIGHTS: (f64, f64) = (1e-6, 1e9);

/// Weight and bounds of a child, in its parent's terms.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Child {
    pub(super) weight: f64,
    pub(super) floor: f64,
    pub(super) limit: f64,
}

impl Child {
    /// What it gets at a level where all floors are kept.
    fn by_level(&self, level: f64) -> f64 {
        (level * self.weight).max(self.floor).min(self.limit)
    }

    /// How fast that grows with the level.
    fn slope_at(&self, level: f64) -> f64 {
        if level >= self.floor / self.weight && level < self.limit / self.weight {
            self.weight
        } else {
            0.0
        }
    }

    /// What it gets at a level, and how fast that grows with the root's level.
    pub(super) fn at(&self, level: &Level) -> (f64, f64) {
        let (by_weight, by_floor) = (level.level * self.weight, level.floors * self.floor);
        if by_weight >= by_floor {
            if by_weight < self.limit {
                (by_weight, level.rise * self.weight)
            } else {
                (self.limit, 0.0)
            }
        } else {
            (by_floor, level.floors_rise * self.floor)
        }
    }
}

/// How far a group has got.
#[derive(Debug, Clone, Copy)]
pub(super) struct Level {
    /// What one unit of weight gets; infinite where every child has all that it may have.
    pub(super) level: f64,
    /// The part of their floors that the children get; 1 unless these can't all be kept.
    pub(super) floors: f64,
    /// How fast the level rises with the root's.
    pub(super) rise: f64,
    /// How fast the part of the floors does.
    pub(super) floors_rise: f64,
    /// The knot where the piece begins on which the level lies.
    pub(super) knot: usize,
}

impl Level {
    /// The level where not even the floors are covered: each child gets the same part of its own.
    fn below_floors(floors: f64, sum: f64, rise: f64) -> Self {
        Self {
            level: 0.0,
            floors: sum / floors,
            rise: 0.0,
            floors_rise: rise / floors,
            knot: 0,
        }
    }
}

impl Level {
    /// The root's at `s`, but for its knot.
    pub(super) fn of_root(s: f64) -> Self {
        if s < 0.0 {
            Self {
                level: 0.0,
                floors: 1.0 + s,
                rise: 0.0,
                floors_rise: 1.0,
                knot: 0,
            }
        } else {
            Self {
                level: s,
                floors: 1.0,
                rise: if s.is_finite() { 1.0 } else { 0.0 },
                floors_rise: 0.0,
                knot: 0,
            }
        }
    }
}

/// A knot of the piecewise linear sum of a branch's children over the branch's level.
#[derive(Debug, Clone, Copy)]
struct Knot {
    at: f64,
    sum: f64,
    /// Of the piece that begins here.
    slope: f64,
}

/// What the slope changes by at a knot, and for which leaf, if it is one.
type Change = (f64, Option<usize>);

/// See the module. All by leaf or branch of the [`Structure`].
#[derive(Debug, Default)]
pub(super) struct Curves {
    pub(super) leaves: Vec<Child>,
    /// What a leaf could use if it wanted everything: by its threads, quota and pCPUs.
    pub(super) own_limit: Vec<f64>,
    /// What a leaf is promised, whatever it wants.
    promised: Vec<f64>,
    pub(super) branches: Vec<Child>,
    /// The quota of each branch's group; infinite without one.
    pub(super) caps: Vec<f64>,
    group_floors: Vec<f64>,
    /// Sums over a branch's children.
    floors: Vec<f64>,
    pub(super) limits: Vec<f64>,
    knots: Vec<Vec<Knot>>,
    /// By branch and knot.
    changes: Vec<Vec<Change>>,
    events: Vec<(f64, f64, Option<usize>)>,
}

impl Curves {
    /// Reads weights, floors, quotas and demands. `reach` is what each node's pCPUs could
    /// give it alone.
    pub(super) fn fill(
        &mut self,
        host: &Host,
        structure: &Structure,
        reach: &[f64],
        faults: &mut Vec<Fault>,
    ) {
        self.leaves.clear();
        self.own_limit.clear();
        self.promised.clear();
        for leaf in &structure.leaves {
            let claimant = &host.claimants[leaf.claimant];
            let mut check = Check {
                place: Place::Claimant(leaf.claimant),
                faults,
            };
            let weight = check.weight(claimant.weight);
            let all = check.figure("all", claimant.all, f64::INFINITY);
            let cap = claimant
                .cap
                .map_or(f64::INFINITY, |cap| check.figure("cap", cap, f64::INFINITY));
            let demand = check.figure("demand", claimant.demand, 0.0);
            let promised = check.figure("floor", claimant.floor, 0.0);
            let own_limit = all.min(cap).min(leaf.threads).min(reach[leaf.node]);
            let limit = demand.min(own_limit);
            self.own_limit.push(own_limit);
            self.promised.push(promised);
            self.leaves.push(Child {
                weight,
                floor: promised.min(limit),
                limit,
            });
        }
        let count = structure.branches.len();
        self.branches.clear();
        self.branches.resize(count, Child::default());
        self.caps.clear();
        self.caps.resize(count, f64::INFINITY);
        self.group_floors.clear();
        self.group_floors.resize(count, 0.0);
        self.floors.clear();
        self.floors.resize(count, 0.0);
        self.limits.clear();
        self.limits.resize(count, 0.0);
        self.knots.resize_with(count, Vec::new);
        self.changes.resize_with(count, Vec::new);
        for (index, branch) in structure.branches.iter().enumerate() {
            let Some(place) = branch.group else {
                continue;
            };
            let group = &host.groups[place];
            let mut check = Check {
                place: Place::Group(place),
                faults,
            };
            self.branches[index].weight = check.weight(group.weight);
            self.group_floors[index] = check.figure("floor", group.floor, 0.0);
            self.caps[index] = group
                .cap
                .map_or(f64::INFINITY, |cap| check.figure("cap", cap, f64::INFINITY));
        }
        for branch in (0..count).rev() {
            self.bound(structure, branch);
            self.draw(structure, branch);
        }
    }

    /// Lets a leaf want up to `limit`, or no more than it, and draws what follows from that anew.
    pub(super) fn set_limit(&mut self, structure: &Structure, leaf: usize, limit: f64) {
        self.leaves[leaf].limit = limit;
        self.leaves[leaf].floor = self.promised[leaf].min(limit);
        let mut branch = structure.leaves[leaf].branch;
        loop {
            self.bound(structure, branch);
            self.draw(structure, branch);
            if branch == 0 {
                return;
            }
            branch = structure.branches[branch].parent;
        }
    }

    /// Floor and limit of a branch, by its children's.
    fn bound(&mut self, structure: &Structure, index: usize) {
        let branch = &structure.branches[index];
        let (mut floors, mut limits) = (0.0, 0.0);
        for leaf in &branch.leaves {
            floors += self.leaves[*leaf].floor;
            limits += self.leaves[*leaf].limit;
        }
        for child in &branch.branches {
            floors += self.branches[*child].floor;
            limits += self.branches[*child].limit;
        }
        self.floors[index] = floors;
        self.limits[index] = limits;
        let limit = limits.min(self.caps[index]);
        self.branches[index].limit = limit;
        self.branches[index].floor = self.group_floors[index].max(floors).min(limit);
    }

    /// The knots of a branch, by its children's bounds.
    fn draw(&mut self, structure: &Structure, index: usize) {
        let branch = &structure.branches[index];
        let (leaves, branches) = (&self.leaves, &self.branches);
        let children = branch
            .leaves
            .iter()
            .map(|leaf| (&leaves[*leaf], Some(*leaf)))
            .chain(
                branch
                    .branches
                    .iter()
                    .map(|child| (&branches[*child], None)),
            );
        self.events.clear();
        for (child, leaf) in children {
            if child.limit > child.floor {
                if child.floor > 0.0 {
                    self.events
                        .push((child.floor / child.weight, child.weight, leaf));
                }
                self.events
                    .push((child.limit / child.weight, -child.weight, leaf));
            }
        }
        self.events.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let knots = &mut self.knots[index];
        let changes = &mut self.changes[index];
        knots.clear();
        changes.clear();
        // From the end, where nobody grows any more, so that most weights are added and not taken off.
        let mut slope = 0.0;
        for (at, change, leaf) in self.events.iter().rev() {
            knots.push(Knot {
                at: *at,
                sum: 0.0,
                slope,
            });
            changes.push((*change, *leaf));
            slope = f64::max(slope - change, 0.0);
        }
        knots.push(Knot {
            at: 0.0,
            sum: 0.0,
            slope,
        });
        changes.push((0.0, None));
        knots.reverse();
        changes.reverse();
        let (mut at, mut sum, mut slope) = (0.0, self.floors[index], 0.0);
        for knot in knots {
            sum += (knot.at - at) * slope;
            knot.sum = sum;
            (at, slope) = (knot.at, knot.slope);
        }
    }

    /// The level of a branch that gets `sum`, which rises at `rise`.
    pub(super) fn settle(&self, branch: usize, sum: f64, rise: f64) -> Level {
        let floors = self.floors[branch];
        if sum < floors {
            return Level::below_floors(floors, sum, rise);
        }
        let knots = &self.knots[branch];
        let after = knots.partition_point(|knot| knot.sum <= sum);
        let at = after.saturating_sub(1);
        let (level, rise) = match knots.get(at) {
            Some(knot) if after < knots.len() && knot.slope > 0.0 => {
                (knot.at + (sum - knot.sum) / knot.slope, rise / knot.slope)
            }
            _ => (f64::INFINITY, 0.0),
        };
        Level {
            level,
            floors: 1.0,
            rise,
            floors_rise: 0.0,
            knot: at,
        }
    }

    /// The level of a branch one of whose children is `new` instead of `old`; see [`Self::settle`]. Weights are the same, and
    /// neither bound of `new` is lower.
    pub(super) fn settle_changed(
        &self,
        branch: usize,
        sum: f64,
        rise: f64,
        old: &Child,
        new: &Child,
    ) -> Level {
        let floors = self.floors[branch] - old.floor + new.floor;
        if sum < floors {
            return Level::below_floors(floors, sum, rise);
        }
        let more = |level: f64| new.by_level(level) - old.by_level(level);
        let knots = &self.knots[branch];
        // Rounding may put even the first knot, which is never missing, above the sum.
        let after = knots
            .partition_point(|knot| knot.sum + more(knot.at) <= sum)
            .max(1);
        let full = Level {
            level: f64::INFINITY,
            floors: 1.0,
            rise: 0.0,
            floors_rise: 0.0,
            knot: after - 1,
        };
        let knot = knots[after - 1];
        // The old child's own knots are among the branch's; the new one's may lie within the piece.
        let others = knot.slope - old.slope_at(knot.at);
        let end = knots.get(after).map_or(f64::INFINITY, |next| next.at);
        let (mut at, mut value) = (knot.at, knot.sum + more(knot.at));
        for next in [new.floor / new.weight, new.limit / new.weight, end] {
            if next <= at {
                continue;
            }
            let next = next.min(end);
            let slope = (others + new.slope_at(at)).max(0.0);
            if slope > 0.0 && (next.is_infinite() || value + slope * (next - at) > sum) {
                return Level {
                    level: at + (sum - value).max(0.0) / slope,
                    rise: rise / slope,
                    ..full
                };
            }
            if next == end {
                break;
            }
            value += slope * (next - at);
            at = next;
        }
        if end.is_finite() {
            // Rounding only: the next knot is the answer.
            return Level {
                level: end,
                knot: after,
                ..full
            };
        }
        full
    }

    /// A branch with one child changed.
    pub(super) fn changed_branch(&self, branch: usize, old: &Child, new: &Child) -> Child {
        let floors = self.floors[branch] - old.floor + new.floor;
        let limits = self.limits[branch] - old.limit + new.limit;
        let limit = limits.min(self.caps[branch]);
        Child {
            weight: self.branches[branch].weight,
            floor: self.group_floors[branch].max(floors).min(limit),
            limit,
        }
    }

    /// A leaf that wants all that it can use.
    pub(super) fn wanting_all(&self, leaf: usize) -> Child {
        Child {
            weight: self.leaves[leaf].weight,
            floor: self.promised[leaf].min(self.own_limit[leaf]),
            limit: self.own_limit[leaf],
        }
    }

    /// The root's level from which nobody gets more.
    pub(super) fn top(&self) -> f64 {
        self.knots[0].last().map_or(0.0, |knot| knot.at)
    }

    /// The root's level at `s`.
    pub(super) fn root_at(&self, s: f64) -> Level {
        let after = self.knots[0].partition_point(|knot| knot.at <= s);
        Level {
            knot: after.saturating_sub(1),
            ..Level::of_root(s)
        }
    }

    pub(super) fn knot_count(&self, branch: usize) -> usize {
        self.knots[branch].len()
    }

    pub(super) fn knot_at(&self, branch: usize, knot: usize) -> f64 {
        self.knots[branch][knot].at
    }

    /// By knot of a branch, what some of its leaves get there and the slope after it; `floors` is the sum of their floors.
    pub(super) fn table(
        &self,
        branch: usize,
        floors: f64,
        member: impl Fn(usize) -> bool,
        table: &mut Vec<(f64, f64)>,
    ) {
        let knots = &self.knots[branch];
        table.clear();
        table.resize(knots.len(), (0.0, 0.0));
        let mut slope = 0.0;
        for ((change, leaf), entry) in self.changes[branch].iter().zip(table.iter_mut()).rev() {
            entry.1 = slope;
            if leaf.is_some_and(&member) {
                slope = f64::max(slope - change, 0.0);
            }
        }
        let (mut at, mut sum, mut slope) = (0.0, floors, slope);
        for (knot, entry) in knots.iter().zip(table.iter_mut()) {
            sum += (knot.at - at) * slope;
            entry.0 = sum;
            (at, slope) = (knot.at, entry.1);
        }
    }

    /// The levels of some branches, parents first, at the root's level `s`.
    pub(super) fn levels(
        &self,
        structure: &Structure,
        branches: &[usize],
        s: f64,
        levels: &mut [Level],
    ) {
        levels[0] = self.root_at(s);
        for branch in branches {
            let above = levels[structure.branches[*branch].parent];
            let (sum, rise) = self.branches[*branch].at(&above);
            levels[*branch] = self.settle(*branch, sum, rise);
        }
    }

    /// What the claimants of a node get together, and how fast that rises.
    pub(super) fn node(&self, structure: &Structure, node: usize, levels: &[Level]) -> (f64, f64) {
        let mut total = (0.0, 0.0);
        for bucket in &structure.buckets[structure.nodes[node].buckets.clone()] {
            let level = levels[bucket.branch];
            let (mut sum, mut weights, mut floors) = (0.0, 0.0, 0.0);
            for leaf in &self.leaves[bucket.leaves.clone()] {
                let (by_weight, by_floor) = (level.level * leaf.weight, level.floors * leaf.floor);
                sum += by_weight.max(by_floor).min(leaf.limit);
                let grows = by_weight >= by_floor && by_weight < leaf.limit;
                weights += if grows { leaf.weight } else { 0.0 };
                floors += if by_weight < by_floor {
                    leaf.floor
                } else {
                    0.0
                };
            }
            total.0 += sum;
            total.1 += weights * level.rise + floors * level.floors_rise;
        }
        total
    }
}

/// Reads figures that may be none.
struct Check<'a> {
    place: Place,
    faults: &'a mut Vec<Fault>,
}

impl Check<'_> {
    fn weight(&mut self, weight: f64) -> f64 {
        if weight.is_finite() && weight > 0.0 {
            weight.clamp(WEIGHTS.0, WEIGHTS.1)
        } else {
            self.report(FaultKind::Weight(weight));
            1.0
        }
    }

    fn figure(&mut self, name: &'static str, figure: Cpus, otherwise: f64) -> f64 {
        if figure.0 >= 0.0 {
            figure.0
        } else {
            self.report(FaultKind::Figure(name, figure.0));
            otherwise
        }
    }

    fn report(&mut self, kind: FaultKind) {
        self.faults.push(Fault {
            place: self.place,
            kind,
        });
    }
}
