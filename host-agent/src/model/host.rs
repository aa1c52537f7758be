//! The host as the division of pCPU time sees it at one moment: what there is, who claims it, and by which rules.
//!
//! Plain figures without history. Who fills them in keeps the order of the vectors: results name groups and claimants by their
//! place in them.

use std::sync::Arc;

use hint_proto::CpuSet;

use super::Cpus;

/// All that a division needs.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Host {
    /// The online pCPUs that give time to claimants, each once, in any order.
    pub pcpus: Vec<Pcpu>,
    /// The groups between the root and the claimants, in any order.
    pub groups: Vec<Group>,
    /// Who claims pCPU time.
    pub claimants: Vec<Claimant>,
}

/// One pCPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pcpu {
    /// Its number.
    pub id: u32,
    /// What it can give, 0 to 1: less than 1 where interrupts, tasks that can't be bargained with or a hypervisor below take a
    /// part. More counts as 1; what is no number, or negative, as 0.
    pub supply: Cpus,
}

/// Claimants and groups that share one weight, as a cgroup does.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// Its parent's place in [`Host::groups`]; `None` for a child of the root.
    pub parent: Option<usize>,
    /// Its weight among its siblings, positive; by the kernel's `cpu.weight`, 100 is usual.
    pub weight: f64,
    /// What it is promised while its members want it; zero for no promise.
    pub floor: Cpus,
    /// What its members may use together (`cpu.max`); `None` for no limit.
    pub cap: Option<Cpus>,
    /// pCPUs that its members may use; `None` for no limit of its own.
    pub cpus: Option<Arc<CpuSet>>,
}

impl Default for Group {
    /// A child of the root with the kernel's usual weight and no limits.
    fn default() -> Self {
        Self {
            parent: None,
            weight: 100.0,
            floor: Cpus::ZERO,
            cap: None,
            cpus: None,
        }
    }
}

/// One who claims pCPU time: a VM, or work outside the VMs such as a service or all of `system.slice`.
#[derive(Debug, Clone, PartialEq)]
pub struct Claimant {
    /// Its group's place in [`Host::groups`]; `None` for a child of the root.
    pub parent: Option<usize>,
    /// Its weight among its siblings, positive.
    pub weight: f64,
    /// What it is estimated to want, with headroom.
    pub demand: Cpus,
    /// What it shows that it wants, without headroom: counts for whether pCPUs are contended, and not in the division.
    pub shown: Cpus,
    /// What it would claim if it wanted all it can use: a VM's vCPUs.
    pub all: Cpus,
    /// What it is promised while it wants it; zero for no promise.
    pub floor: Cpus,
    /// What it may use (its quota); `None` for no limit.
    pub cap: Option<Cpus>,
    /// Its threads, and where each may run.
    pub threads: Threads,
}

/// Threads that may run at the same time, each on one pCPU at a time.
#[derive(Debug, Clone, PartialEq)]
pub enum Threads {
    /// So many, all with the same pCPUs: a VM's vCPUs where nobody pinned them one by one.
    Alike {
        /// How many; a VM's vCPUs.
        count: u32,
        /// pCPUs that each of them may use; `None` for all that its groups leave it.
        cpus: Option<Arc<CpuSet>>,
    },
    /// One by one, with the pCPUs that each may use.
    Pinned(Vec<Arc<CpuSet>>),
}

impl Threads {
    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        match self {
            Self::Alike { count, .. } => *count as usize,
            Self::Pinned(sets) => sets.len(),
        }
    }
}
