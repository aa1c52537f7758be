//! What observation hands to the decisions: rates of pCPUs and VMs between two samples.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Cpus, VmId};

/// What happened between two samples.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tick {
    /// Time of the later sample, on the broker's monotonic clock.
    pub at: Duration,
    /// Time between the samples; zero when there is only one.
    pub interval: Duration,
    /// The pool's pCPUs; `None` when their times are not known.
    pub pool: Option<PoolRates>,
    /// Each VM; `None` when one of its vCPU threads is not known.
    pub vms: BTreeMap<VmId, Option<VmRates>>,
    /// Counters that fell, and were left out.
    pub rejected: u64,
}

/// How the pCPUs of a pool spent their time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PoolRates {
    /// pCPUs with known times.
    pub cpus: Cpus,
    /// Idle.
    pub idle: Cpus,
    /// In interrupts.
    pub irq: Cpus,
    /// Taken by a hypervisor below this host.
    pub steal: Cpus,
}

/// How the vCPUs of a VM spent their time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct VmRates {
    /// On pCPUs.
    pub run: Cpus,
    /// Waiting for pCPUs.
    pub run_delay: Cpus,
    /// Time on pCPUs as the kernel's counters tell it.
    pub run_time: Duration,
    /// Time waiting as the kernel's counters tell it.
    pub run_delay_time: Duration,
}

/// Where a VM may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// On all pCPUs of the pool: it can be governed.
    Pool,
    /// On some of them, or its vCPUs on different ones: it takes part of the supply and is not governed.
    Overlapping,
    /// On none of them.
    Elsewhere,
}
