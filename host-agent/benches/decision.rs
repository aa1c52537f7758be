//! How long one whole decision takes: demand, division, contention, usable, damping and grounds, for all VMs of a host.
//!
//! Prints the median and the 99th percentile, in CPU time, for hosts of 50, 500 and 5000 VMs of 8 vCPUs. Fails when 500 VMs with
//! uneven CPU sets take a millisecond or more.

mod hosts;

use std::hint::black_box;
use std::process::ExitCode;
use std::time::Duration;

use hint_broker::govern::{AgentState, Governor, Input, Policy, VmInput};
use hint_broker::model::{Claimant, Cpus, PcpuRates, Tick, VmId, VmRates};

use self::hosts::{Layout, Random, VCPUS, host, micros, percentile, time};

const TICK: Duration = Duration::from_millis(100);
/// What 500 VMs with uneven CPU sets may take, in the 99th percentile.
const BOUND: Duration = Duration::from_millis(1);

fn main() -> ExitCode {
    println!(
        "{:<16} {:>7} {:>8} {:>8}",
        "host", "pCPUs", "p50 µs", "p99 µs"
    );
    let mut slow = false;
    for (name, layout) in [("one-pool", Layout::OnePool), ("uneven", Layout::Uneven)] {
        for (vms, rounds) in [(50, 2000), (500, 1000), (5000, 50)] {
            let p99 = measure(&format!("{name}-{vms}"), vms, layout, rounds);
            slow |= layout == Layout::Uneven && vms == 500 && p99 >= BOUND;
        }
    }
    if slow {
        eprintln!(
            "500 VMs with uneven CPU sets: expected less than {BOUND:?} in the 99th percentile"
        );
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn measure(name: &str, vms: u32, layout: Layout, rounds: usize) -> Duration {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let host = host(vms, layout, &mut random);
    let inputs: Vec<VmInput> = (1..=vms).zip(&host.claimants).map(vm).collect();
    let input = Input {
        groups: &host.groups,
        vms: &inputs,
        host_weight: 100.0,
    };
    let busy = PcpuRates::default();
    let pcpus: Vec<PcpuRates> = (host.pcpus.iter())
        .map(|pcpu| PcpuRates {
            pcpu: pcpu.id,
            ..busy
        })
        .collect();
    let mut governor = Governor::default();
    let mut times = Vec::with_capacity(rounds);
    let mut folded = 0;
    for round in 0..rounds + 20 {
        let rates =
            (inputs.iter().enumerate()).map(|(index, vm)| (vm.id, Some(rates(index, &mut random))));
        let tick = Tick {
            at: TICK * u32::try_from(round + 1).unwrap_or(u32::MAX),
            interval: TICK,
            pcpus: Some(pcpus.clone()),
            vms: rates.collect(),
            ..Tick::default()
        };
        let (time, step) = time(|| black_box(&mut governor).step(black_box(&tick), &input));
        // The first ones build what later ones keep, and warm up.
        if round >= 20 {
            times.push(time);
        }
        folded = (step.decisions.iter())
            .filter(|decision| decision.usable.is_some_and(|usable| usable < VCPUS))
            .count();
    }
    times.sort_unstable();
    let p99 = percentile(&times, 99);
    println!(
        "{name:<16} {:>7} {:>8.1} {:>8.1}   {folded} folded",
        host.pcpus.len(),
        micros(percentile(&times, 50)),
        micros(p99),
    );
    p99
}

fn vm((number, claimant): (u32, &Claimant)) -> VmInput {
    VmInput {
        id: VmId {
            pid: number,
            start_ticks: 1,
        },
        threads: Some(claimant.threads.clone()),
        parent: claimant.parent,
        weight: claimant.weight,
        quota: claimant.cap,
        policy: Policy {
            reservation: claimant.floor,
            ..Policy::default()
        },
        enforced: true,
        agent: AgentState::Works { in_use: None },
    }
}

/// Half of the VMs want everything, the others anything.
fn rates(index: usize, random: &mut Random) -> VmRates {
    let wanted = if index.is_multiple_of(2) {
        f64::from(VCPUS)
    } else {
        2.0 * random.part()
    };
    let run = wanted.min(1.0);
    VmRates {
        run: Cpus(run),
        run_delay: Cpus(wanted - run),
        wanted: Cpus(wanted),
        variance: 0.3,
        ..VmRates::default()
    }
}
