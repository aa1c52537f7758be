//! How long one division takes: shares, targets and competing sets of a whole host, from new demands each time.
//!
//! Prints the median and the 99th percentile for hosts of 50, 500 and 5000 VMs of 8 vCPUs, about as many as pCPUs, in three
//! levels of cgroups. The first argument picks hosts by name; `cargo bench` adds options of its own, which are ignored.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hint_broker::entitle::Engine;
use hint_broker::model::{Claimant, Cpus, Group, Host, Pcpu, Threads};
use hint_proto::CpuSet;

/// pCPUs of a node.
const NODE: u32 = 64;
/// vCPUs of a VM.
const VCPUS: u32 = 8;

/// Numbers that are as good as random, and always the same (Marsaglia's xorshift).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from(self.0 >> 32).unwrap_or(0)
    }

    fn below(&mut self, count: u32) -> u32 {
        self.next() % count
    }

    /// From 0 to 1.
    fn part(&mut self) -> f64 {
        f64::from(self.next()) / f64::from(u32::MAX)
    }
}

/// How the VMs are placed.
#[derive(Clone, Copy, PartialEq)]
enum Layout {
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

fn host(vms: u32, layout: Layout, random: &mut Random) -> Host {
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

/// New demands and supplies: a part of the VMs wants everything, the others anything; services want little.
fn change(host: &mut Host, saturated: f64, random: &mut Random) {
    for pcpu in &mut host.pcpus {
        pcpu.supply = Cpus(0.97 + 0.03 * random.part());
    }
    let vms = host.claimants.len() - 2;
    for (index, claimant) in host.claimants.iter_mut().enumerate() {
        let demand = if index >= vms {
            claimant.all.0 * 0.01 * random.part()
        } else if random.part() < saturated {
            claimant.all.0
        } else {
            2.0 * random.part()
        };
        (claimant.demand, claimant.shown) = (Cpus(demand), Cpus(demand));
    }
}

fn percentile(times: &[Duration], percent: usize) -> Duration {
    times[(times.len() - 1) * percent / 100]
}

fn main() {
    let wanted = std::env::args().skip(1).find(|word| !word.starts_with('-'));
    println!(
        "{:<26} {:>7} {:>8} {:>8} {:>8}",
        "host", "pCPUs", "p50 µs", "p99 µs", "targets"
    );
    let cases = [
        ("one-pool", Layout::OnePool),
        ("uneven", Layout::Uneven),
        ("quotas", Layout::Quotas),
        ("pinned", Layout::Pinned),
    ];
    for (name, layout) in cases {
        for (vms, rounds) in [(50, 2000), (500, 1000), (5000, 30)] {
            // These are divided anew for each target, which takes too long for the largest.
            let anew = matches!(layout, Layout::Quotas | Layout::Pinned);
            let rounds = if anew { rounds / 50 } else { rounds };
            if rounds == 0 {
                continue;
            }
            for saturated in [0.1, 0.5] {
                let name = format!("{name}-{vms}-{:.0}%", saturated * 100.0);
                if wanted.as_ref().is_none_or(|word| name.contains(word)) {
                    measure(&name, vms, layout, saturated, rounds);
                }
            }
        }
    }
}

fn measure(name: &str, vms: u32, layout: Layout, saturated: f64, rounds: usize) {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut host = host(vms, layout, &mut random);
    let mut engine = Engine::default();
    let mut times = Vec::with_capacity(rounds);
    let mut searched = 0;
    for round in 0..rounds + 10 {
        change(&mut host, saturated, &mut random);
        let start = Instant::now();
        let division = black_box(&mut engine).divide(black_box(&host));
        let time = start.elapsed();
        // The first ones build what later ones keep.
        if round >= 10 {
            times.push(time);
            searched += division
                .claimants
                .iter()
                .flatten()
                .filter(|found| found.target.0 > found.share.0 + 1e-9)
                .count();
        }
    }
    times.sort_unstable();
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    println!(
        "{name:<26} {:>7} {:>8.1} {:>8.1} {:>8}",
        host.pcpus.len(),
        micros(percentile(&times, 50)),
        micros(percentile(&times, 99)),
        searched / rounds,
    );
}
