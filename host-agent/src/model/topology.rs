//! What the host is made of: its pCPUs, and how they belong together.

use std::collections::BTreeMap;

use hint_proto::CpuSet;

/// The host's pCPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// Online.
    pub online: CpuSet,
    /// Online, and kept out of load balancing at boot (`isolcpus=`): only what is pinned there runs there.
    pub isolated: CpuSet,
    /// The online pCPUs of each core, by its first: hardware threads of one core share its speed.
    pub cores: BTreeMap<u32, CpuSet>,
    /// The online pCPUs of each NUMA node, by its number; empty when the kernel knows no nodes.
    pub nodes: BTreeMap<u32, CpuSet>,
    /// Relative speed of each pCPU, 1024 being that of the fastest; empty where the kernel takes all for equal.
    pub capacity: BTreeMap<u32, u32>,
}

impl Topology {
    /// pCPUs where threads run that nobody pinned: online and not isolated, unless all are isolated.
    #[must_use]
    pub fn common(&self) -> CpuSet {
        let common = self.online.difference(&self.isolated);
        if common.is_empty() {
            self.online.clone()
        } else {
            common
        }
    }
}
