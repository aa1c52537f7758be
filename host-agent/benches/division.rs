//! How long one division takes: shares, targets and competing sets of a whole host, from new demands each time.
//!
//! Prints the median and the 99th percentile, in CPU time, for hosts of 50, 500 and 5000 VMs of 8 vCPUs, about as many as pCPUs, in
//! three levels of cgroups. The first argument picks hosts by name; `cargo bench` adds options of its own, which are ignored.

mod hosts;

use std::hint::black_box;

use hint_broker::entitle::Engine;
use hint_broker::model::{Cpus, Host};

use self::hosts::{Layout, Random, host, micros, percentile, time};

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
        let (time, division) = time(|| black_box(&mut engine).divide(black_box(&host)));
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
    println!(
        "{name:<26} {:>7} {:>8.1} {:>8.1} {:>8}",
        host.pcpus.len(),
        micros(percentile(&times, 50)),
        micros(percentile(&times, 99)),
        searched / rounds,
    );
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
