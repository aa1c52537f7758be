//! What a division says: each claimant's share and target, what bound them, and the sets of pCPUs that are competed for.

use std::fmt;

use crate::model::Cpus;

/// The division of a host's pCPU time at one moment.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Division {
    /// By claimant, in the order of the input; `None` for one that a fault leaves out of the division.
    pub claimants: Vec<Option<Entitlement>>,
    /// The pCPUs by class; rising by id.
    pub classes: Vec<Class>,
    /// The sets of classes that are competed for as one. Each class is in exactly one.
    pub sets: Vec<CompetingSet>,
    /// Input that was left out, or read otherwise than it stood.
    pub faults: Vec<Fault>,
    pub(super) split: Vec<(usize, Cpus)>,
}

impl Division {
    /// The classes that can serve a claimant's target, as (place in [`Division::classes`], part of the target); the parts add
    /// up to the target. Where several classes could, each serves it as it serves claimants with the same pCPUs.
    #[must_use]
    pub fn split(&self, claimant: usize) -> &[(usize, Cpus)] {
        let entitlement = self.claimants.get(claimant).and_then(Option::as_ref);
        entitlement
            .and_then(|found| self.split.get(found.split.0..found.split.1))
            .unwrap_or_default()
    }
}

/// What one claimant is due.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Entitlement {
    /// Its part of the division at its estimated demand.
    pub share: Cpus,
    /// What bound the share.
    pub share_bound: Bound,
    /// The share that it would get if it wanted all its threads, the others at their estimates. Never below the share.
    pub target: Cpus,
    /// What bound the target.
    pub target_bound: Bound,
    /// The set where it would go for more, as its place in [`Division::sets`]: of those that its threads may use, one with time
    /// left, else the one with the highest level. It is short of pCPUs if and only if this set is.
    pub set: usize,
    pub(super) split: (usize, usize),
}

/// What kept a share or a target from being larger.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bound {
    /// It wants no more than this.
    Demand(Cpus),
    /// All that its threads can use at once.
    Threads(Cpus),
    /// Its own quota.
    Quota(Cpus),
    /// The quota of one of its groups.
    GroupQuota {
        /// Place in [`Host::groups`](crate::model::Host::groups).
        group: usize,
        /// The quota.
        cap: Cpus,
    },
    /// It may use no other pCPUs, and has all that these give.
    Cpuset(Cpus),
    /// Others want the same pCPUs: the level at which they are full.
    Level {
        /// What its pCPUs give to one unit of weight at the root of the tree.
        level: f64,
    },
    /// Its reservation, or a part of it, is more than its weight would bring it.
    Reservation(Cpus),
}

/// Identity of a class of pCPUs: its lowest pCPU. It stays as it is while neither pCPUs nor cpusets change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassId(pub u32);

/// pCPUs that the same threads may use.
#[derive(Debug, Clone, PartialEq)]
pub struct Class {
    /// Its identity.
    pub id: ClassId,
    /// Its pCPUs, rising.
    pub pcpus: Vec<u32>,
    /// What they give together.
    pub supply: Cpus,
    /// Its set's place in [`Division::sets`].
    pub set: usize,
}

/// Classes of pCPUs that are competed for as one.
///
/// Full sets are *tight*: who is bound by them may use no pCPUs but theirs and those of fuller ones, so nothing that happens on
/// other pCPUs can help. Of the other classes, those that one claimant may use are together.
#[derive(Debug, Clone, PartialEq)]
pub struct CompetingSet {
    /// Places in [`Division::classes`], rising.
    pub classes: Vec<usize>,
    /// What its pCPUs give.
    pub supply: Cpus,
    /// What those who are confined to it show that they want from it; without headroom.
    pub demand: Cpus,
    /// What the division gives from it.
    pub given: Cpus,
    /// Its level (what one unit of weight at the root gets) if it is tight; `None` where pCPU time is left.
    pub level: Option<f64>,
}

impl CompetingSet {
    /// Do those who are confined to its pCPUs show that they want more than these give?
    #[must_use]
    pub fn demand_exceeds_supply(&self) -> bool {
        self.demand.0 > self.supply.0
    }
}

/// Where a fault lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A pCPU, by its number.
    Pcpu(u32),
    /// A group, by its place in the input.
    Group(usize),
    /// A claimant, by its place in the input.
    Claimant(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pcpu(id) => write!(f, "pCPU {id}"),
            Self::Group(index) => write!(f, "group {index}"),
            Self::Claimant(index) => write!(f, "claimant {index}"),
        }
    }
}

/// Input that makes no sense, where it lies, and what was done about it. Only that group or claimant is concerned.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("{place}: {kind}")]
pub struct Fault {
    /// Where.
    pub place: Place,
    /// What.
    pub kind: FaultKind,
}

/// What is wrong with a part of the input.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum FaultKind {
    /// The weight is used as 1, the kernel's least.
    #[error("expected a positive weight, found {0}; it counts as 1")]
    Weight(f64),
    /// The figure is used as zero; a cap or `all` as no limit.
    #[error("expected a number of CPUs from 0 for {0}, found {1}; it counts as not given")]
    Figure(&'static str, f64),
    /// The parent is not among the groups: left out.
    #[error("expected a parent among the groups, found {0}; left out of the division")]
    Parent(usize),
    /// Its group is left out, and so is it.
    #[error("its group {0} is left out of the division, and so is it")]
    Cut(usize),
    /// The parents go round in a circle: left out.
    #[error("its parents go round in a circle; left out of the division")]
    Cycle,
    /// No threads: left out.
    #[error("expected one thread or more; left out of the division")]
    NoThreads,
    /// None of the pCPUs that it, or one of its threads, may use gives time. Such a thread counts for nothing; without any
    /// other thread the claimant is left out.
    #[error("no pCPU of its set is online")]
    NoPcpus,
    /// A pCPU that is there twice counts once.
    #[error("found twice; counted once")]
    Twice,
    /// The reservation can't be kept.
    #[error("{promised:.2} CPUs are reserved and {kept:.2} can be given")]
    Reservation {
        /// What it was promised (and wants).
        promised: f64,
        /// What there is for it.
        kept: f64,
    },
}
