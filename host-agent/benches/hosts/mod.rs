//! Random hosts to measure with.

use std::sync::Arc;
use std::time::Duration;

use hint_broker::model::{Claimant, Cpus, Group, Host, Pcpu, Threads};
use hint_proto::CpuSet;
use rustix::time::{ClockId, clock_gettime};

/// pCPUs of a node.
const NODE: u32 = 64;
/// vCPUs of a VM.
pub(crate) const VCPUS: u32 = 8;

/// Numbers that are as good as random, and always the same (Marsaglia's xorshift).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from(self.0 >> 32).unwrap_or(0)
    }

    pub(crate) fn below(&mut self, count: u32) -> u32 {
        self.next() % count
    }

    /// From 0 to 1.
    pub(crate) fn part(&mut self) -> f64 {
        f64::from(self.next()) / f64::from(u32::MAX)
    }
}

/// How the VMs are placed.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Layout {
    /// Everywhere.
    OnePool,
    /// A third everywhere, most others on one node, some on two neighbouring ones, so that sets overlap.
    Uneven,
    /// As before, and each group has a quota that binds now and then.
    Quotas,
    /// Each vCPU on one pCPU.
    Pinned,
}

fn range(first: u32, count: u32) -> Arc<CpuSet> {
    Arc::new((first..first + count).collect())
}

pub(crate) fn host(vms: u32, layout: Layout, random: &mut Random) -> Host {
    let nodes = (vms / 62).clamp(1, 120);
    let size = if vms < NODE { vms } else { NODE };
    let pcpus = nodes * size;
    let one: Vec<_> = (0..nodes).map(|node| range(node * size, size)).collect();
    let two: Vec<_> = (1..nodes)
        .map(|node| range((node - 1) * size, 2 * size))
        .collect();
    let single: Vec<_> = (0..pcpus).map(|pcpu| range(pcpu, 1)).collect();
    // machine.slice, tenants in it, VMs in those; system.slice and user.slice beside it.
    let mut groups = vec![Group::default()];
    for tenant in 0..(vms / 50).max(2) {
        groups.push(Group {
            parent: Some(0),
            weight: f64::from(50 + 25 * (tenant % 5)),
            cap: (layout == Layout::Quotas && tenant % 2 == 0).then_some(Cpus(48.0)),
            ..Group::default()
        });
    }
    let mut claimants = Vec::new();
    for vm in 0..vms {
        let cpus = match random.below(10) {
            _ if layout == Layout::OnePool => None,
            0..=2 => None,
            3..=4 if nodes > 1 => Some(two[random.below(nodes - 1) as usize].clone()),
            _ => Some(one[random.below(nodes) as usize].clone()),
        };
        let threads = if layout == Layout::Pinned {
            let first = random.below(pcpus / VCPUS) * VCPUS;
            let sets = (first..first + VCPUS).map(|pcpu| single[pcpu as usize].clone());
            Threads::Pinned(sets.collect())
        } else {
            Threads::Alike { count: VCPUS, cpus }
        };
        claimants.push(Claimant {
            parent: Some(1 + vm as usize % (groups.len() - 1)),
            weight: f64::from(100 * (1 + random.below(3))),
            demand: Cpus::ZERO,
            shown: Cpus::ZERO,
            all: Cpus::from(VCPUS),
            floor: Cpus(if vm % 50 == 0 { 1.0 } else { 0.0 }),
            cap: (vm % 20 == 0).then_some(Cpus(4.0)),
            threads,
        });
    }
    for _ in 0..2 {
        claimants.push(Claimant {
            parent: None,
            weight: 100.0,
            demand: Cpus::ZERO,
            shown: Cpus::ZERO,
            all: Cpus::from(pcpus),
            floor: Cpus::ZERO,
            cap: None,
            threads: Threads::Alike {
                count: pcpus,
                cpus: None,
            },
        });
    }
    Host {
        pcpus: (0..pcpus)
            .map(|id| Pcpu {
                id,
                supply: Cpus(1.0),
            })
            .collect(),
        groups,
        claimants,
    }
}

pub(crate) fn percentile(times: &[Duration], percent: usize) -> Duration {
    times[(times.len() - 1) * percent / 100]
}

pub(crate) fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// CPU time that something takes: what else runs on the machine is not its fault.
pub(crate) fn time<T>(run: impl FnOnce() -> T) -> (Duration, T) {
    let start = cpu_time();
    let result = run();
    (cpu_time().saturating_sub(start), result)
}

fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}
