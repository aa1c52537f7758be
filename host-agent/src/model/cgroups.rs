//! The host's CPU groups as the scheduler divides time among them: level by level, by weight among siblings.

use std::collections::BTreeMap;

use hint_proto::CpuSet;

use super::{Cpus, VmId};

/// A limit of CPU time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Limit {
    /// There is none.
    None,
    /// So many CPUs' worth.
    At(Cpus),
}

impl Limit {
    /// The lesser of both.
    #[must_use]
    pub fn least(self, other: Self) -> Self {
        match (self, other) {
            (Self::None, limit) | (limit, Self::None) => limit,
            (Self::At(a), Self::At(b)) => Self::At(if b < a { b } else { a }),
        }
    }
}

/// All groups from the root to those of the VMs, and their siblings on each level.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GroupTree {
    /// The root first, each parent before its children. Empty when the host's groups can't be read.
    pub groups: Vec<CpuGroup>,
    /// Where the VMs are; one that is missing is not known.
    pub vms: BTreeMap<VmId, VmGroup>,
}

/// One group that the scheduler gives time as a whole.
#[derive(Debug, Clone, PartialEq)]
pub struct CpuGroup {
    /// Its path below the root of the hierarchy; empty for the root.
    pub path: String,
    /// Its parent's place in [`GroupTree::groups`]; `None` for the root.
    pub parent: Option<usize>,
    /// Its weight among its siblings; 100 is that of a new group, and of one thread beside groups. The root has none.
    pub weight: Option<f64>,
    /// Its own quota; those of its ancestors hold too.
    pub quota: Option<Limit>,
    /// The CPUs that its threads may run on.
    pub cpus: Option<CpuSet>,
    /// Is a VM in it or below it? All others are the host's own work.
    pub holds_vms: bool,
}

/// Where a VM is in the tree.
#[derive(Debug, Clone, PartialEq)]
pub struct VmGroup {
    /// The place in [`GroupTree::groups`] of the smallest group that has all of its vCPU threads.
    pub group: usize,
    /// What its vCPU threads' own quotas add up to, where each vCPU has a group below that one, as under libvirt.
    pub vcpu_quota: Option<Limit>,
    /// Other VMs in the same group: among them the kernel divides by thread.
    pub shared_with: Vec<VmId>,
    /// Its vCPU threads are in groups that weigh against each other, and not in one group of their VM.
    pub scattered: bool,
}
