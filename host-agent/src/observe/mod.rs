//! Observe: counters of the host as they stand, read from `/proc` and `/sys`. No rates here: those are made from two samples
//! in [`rates`], which is pure.

pub mod cgroups;
#[cfg(feature = "fuzz")]
pub(crate) mod fuzz;
mod pcpus;
pub mod rates;
mod schedstat;
mod topology;

use std::collections::BTreeMap;
use std::time::Duration;

pub use self::pcpus::CpuTimes;
use self::schedstat::ThreadReader;
pub use self::schedstat::ThreadTimes;
use self::topology::TopologyReader;
pub use self::topology::TopologyScan;
use crate::model::{Vcpus, Vm, VmId};
use crate::root::Root;

/// All counters at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sample {
    /// When, on the broker's monotonic clock.
    pub at: Duration,
    /// Times of each online pCPU since boot; `None` when they can't be read.
    pub pcpus: Option<BTreeMap<u32, CpuTimes>>,
    /// The VMs whose vCPUs are known.
    pub vms: BTreeMap<VmId, VmTimes>,
    /// What could not be read, with what it means and how to mend it.
    pub degraded: Vec<String>,
}

/// The counters of one VM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VmTimes {
    /// When its threads were read, on the broker's monotonic clock.
    pub at: Duration,
    /// Each vCPU thread by its id; `None` where the kernel doesn't tell.
    pub threads: BTreeMap<u32, Option<ThreadTimes>>,
}

/// Reads counters; keeps the files of the vCPU threads open, which makes a read seven times cheaper.
#[derive(Debug)]
pub struct Observer {
    root: Root,
    readers: BTreeMap<VmId, BTreeMap<u32, ThreadReader>>,
    topology: TopologyReader,
}

impl Observer {
    /// Reads below `root`.
    #[must_use]
    pub fn new(root: Root) -> Self {
        Self {
            root,
            readers: BTreeMap::new(),
            topology: TopologyReader::default(),
        }
    }

    /// The host's pCPUs as they are now. Cheap as long as none comes or goes.
    pub fn topology(&mut self) -> &TopologyScan {
        self.topology.read(&self.root)
    }

    /// Reads all counters. `now` is the broker's monotonic clock. With `find_waiting`, the state of threads whose counters
    /// stand still is read too: run delay is credited only when a thread gets its pCPU, so one that waits looks asleep.
    pub fn sample(&mut self, vms: &[Vm], now: impl Fn() -> Duration, find_waiting: bool) -> Sample {
        let mut sample = Sample {
            at: now(),
            ..Sample::default()
        };
        match pcpus::read(&self.root) {
            Ok(times) => sample.pcpus = Some(times),
            Err(error) => sample.degraded.push(format!(
                "{error}: contention can't be judged and no guest is folded; give the broker the whole of /proc (no ProcSubset=pid)"
            )),
        }
        let mut readers = BTreeMap::new();
        let mut unreadable = 0u32;
        let mut first_error = None;
        for vm in vms {
            let Vcpus::Known(threads) = &vm.vcpus else {
                continue;
            };
            let mut kept = self.readers.remove(&vm.id).unwrap_or_default();
            let mut current = BTreeMap::new();
            let mut times = VmTimes {
                at: now(),
                threads: BTreeMap::new(),
            };
            for tid in threads.values() {
                let reader = kept
                    .remove(tid)
                    .map_or_else(|| ThreadReader::open(&self.root, vm.id.pid, *tid), Ok);
                let read = reader.and_then(|mut reader| {
                    let read = reader.read(&self.root, find_waiting);
                    current.insert(*tid, reader);
                    read
                });
                let read = read.unwrap_or_else(|error| {
                    unreadable += 1;
                    first_error.get_or_insert(error);
                    current.remove(tid);
                    None
                });
                times.threads.insert(*tid, read);
            }
            readers.insert(vm.id, current);
            sample.vms.insert(vm.id, times);
        }
        self.readers = readers;
        if let Some(error) = first_error {
            sample.degraded.push(format!(
                "{error} ({unreadable} vCPU threads in all): their VMs are not folded"
            ));
        }
        sample
    }
}
