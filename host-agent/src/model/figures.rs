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
    /// Each online pCPU, rising by number; `None` when their times are not known. One that came online in between is missing.
    pub pcpus: Option<Vec<PcpuRates>>,
    /// Each VM; `None` when one of its vCPU threads is not known.
    pub vms: BTreeMap<VmId, Option<VmRates>>,
    /// Counters that fell, and were left out.
    pub rejected: u64,
}

/// How one pCPU spent its time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PcpuRates {
    /// Its number.
    pub pcpu: u32,
    /// Idle.
    pub idle: Cpus,
    /// In interrupts.
    pub irq: Cpus,
    /// Taken by a hypervisor below this host.
    pub steal: Cpus,
}

impl PcpuRates {
    /// What it can give to who wants it.
    #[must_use]
    pub fn supply(&self) -> Cpus {
        Cpus((1.0 - self.irq.0 - self.steal.0).clamp(0.0, 1.0))
    }

    /// What it gave to somebody; interrupts and steal are not work.
    #[must_use]
    pub fn used(&self) -> Cpus {
        Cpus((self.supply().0 - self.idle.0).max(0.0))
    }
}

/// How the vCPUs of a VM spent their time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct VmRates {
    /// On pCPUs.
    pub run: Cpus,
    /// Waiting for pCPUs.
    pub run_delay: Cpus,
    /// What its vCPUs would run if nothing made them wait.
    pub wanted: Cpus,
    /// By how much the number of vCPUs that want to run varies around that, squared, if each does so by itself.
    pub variance: f64,
    /// Time on pCPUs as the kernel's counters tell it.
    pub run_time: Duration,
    /// Time waiting as the kernel's counters tell it.
    pub run_delay_time: Duration,
}
