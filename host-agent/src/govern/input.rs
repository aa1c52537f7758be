//! What the governor is told about the VMs beside their figures.

use crate::model::{Cpus, Group, Threads, VmId};

/// The host's VMs and the groups that they are in.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// The groups between the root and the VMs.
    pub groups: &'a [Group],
    /// The VMs; decisions come in their order.
    pub vms: &'a [VmInput],
    /// Weight of all work outside the VMs, as a child of the root.
    pub host_weight: f64,
}

/// One VM, as the governor needs it.
#[derive(Debug, Clone, PartialEq)]
pub struct VmInput {
    /// Which.
    pub id: VmId,
    /// Its vCPUs and where they may run: sets that are not empty, of online pCPUs. `None` when they are not known.
    pub threads: Option<Threads>,
    /// Its group's place in [`Input::groups`]; `None` for a child of the root.
    pub parent: Option<usize>,
    /// Its weight among its siblings.
    pub weight: f64,
    /// Its quota: the least of those that concern it alone; `None` for no limit.
    pub quota: Option<Cpus>,
    /// The configuration's wishes.
    pub policy: Policy,
    /// Is its guest told to apply what is decided? Where not, the decisions are shown only.
    pub enforced: bool,
    /// Its agent.
    pub agent: AgentState,
}

impl VmInput {
    /// How many vCPUs it has; `None` when they are not known.
    pub(super) fn vcpus(&self) -> Option<u32> {
        let count = self.threads.as_ref()?.count();
        u32::try_from(count).ok().filter(|count| *count > 0)
    }
}

/// What the configuration says of one VM's usable count.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Policy {
    /// The least under contention; 1 or more.
    pub min_usable: u32,
    /// The most, contended or not.
    pub max_usable: Option<u32>,
    /// Always this.
    pub fixed: Option<u32>,
    /// pCPU time that it gets while it wants it, whatever the weights say.
    pub reservation: Cpus,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            min_usable: 1,
            max_usable: None,
            fixed: None,
            reservation: Cpus::ZERO,
        }
    }
}

/// What the governor knows of a VM's agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentState {
    /// None.
    Absent,
    /// One that could not do as the last hint said.
    Fails,
    /// One that can; the guest uses so many vCPUs now, where it has said so.
    Works {
        /// vCPUs in use.
        in_use: Option<u32>,
    },
}
