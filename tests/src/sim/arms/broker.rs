//! The broker's own governor, behind its own making of rates. It sees what the host's kernel and the agents tell.

use std::collections::BTreeMap;
use std::time::Duration;

use hint_broker::entitle::pool::{self, Affinity};
use hint_broker::govern::{AgentState, Governor, VmInput};
use hint_broker::model::{Placement, VmId};
use hint_broker::observe::rates::Rates;
use hint_broker::observe::{CpuTimes, Sample, ThreadTimes, VmTimes};
use hint_proto::CpuSet;

use super::Arm;
use crate::sim::clock::{MS, Nanos};
use crate::sim::host::Times;
use crate::sim::mask::Mask;
use crate::sim::sight::{HostSight, Sight, VmSight};

const TICK: Nanos = 100 * MS;
/// Weight of the host's own work, as the daemon has it by default.
const HOST_WEIGHT: u32 = 100;

/// The broker, ten times a second. Guests follow one tick late.
#[derive(Debug, Default)]
pub struct Broker {
    governor: Governor,
    rates: Rates,
    pool: CpuSet,
    placements: Vec<Placement>,
    last: BTreeMap<(usize, u32), Times>,
}

impl Arm for Broker {
    fn period(&self) -> Nanos {
        TICK
    }

    fn delay(&self) -> Nanos {
        TICK
    }

    fn decide(&mut self, sight: &Sight) -> Vec<usize> {
        if self.placements.is_empty() {
            (self.pool, self.placements) = place(&sight.host);
        }
        let sample = self.sample(sight);
        let tick = self.rates.update(sample, &self.pool);
        let vms = sight.host.vms.iter().zip(&self.placements).enumerate();
        let inputs: Vec<VmInput> = vms
            .map(|(index, (vm, placement))| input(index, vm, *placement))
            .collect();
        let step = self.governor.step(&tick, &inputs, HOST_WEIGHT);
        let decisions = step.decisions.iter().zip(&sight.host.vms);
        decisions
            .map(|(decision, vm)| {
                decision
                    .usable
                    .map_or(vm.vcpus.len(), |usable| usable as usize)
            })
            .collect()
    }
}

impl Broker {
    fn sample(&mut self, sight: &Sight) -> Sample {
        let at = Duration::from_nanos(sight.at);
        let pcpus = sight.host.idle.iter().zip(0..).map(|(idle, cpu)| {
            let times = CpuTimes {
                idle: Duration::from_nanos(*idle),
                ..CpuTimes::default()
            };
            (cpu, times)
        });
        let mut sample = Sample {
            at,
            pcpus: Some(pcpus.collect()),
            ..Sample::default()
        };
        for (index, vm) in sight.host.vms.iter().enumerate() {
            let threads = vm.vcpus.iter().zip(0..).map(|(times, vcpu)| {
                let before = self.last.insert((index, vcpu), *times);
                let still = before.is_some_and(|before| {
                    (before.run, before.run_delay) == (times.run, times.run_delay)
                });
                let times = ThreadTimes {
                    run: Duration::from_nanos(times.run),
                    run_delay: Duration::from_nanos(times.run_delay),
                    waiting: still && times.runnable && self.governor.may_queue(),
                };
                (vcpu, Some(times))
            });
            let threads = threads.collect();
            sample.vms.insert(id(index), VmTimes { at, threads });
        }
        sample
    }
}

fn id(index: usize) -> VmId {
    VmId {
        pid: u32::try_from(index).map_or(u32::MAX, |index| index + 1),
        start_ticks: 1,
    }
}

fn count(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn input(index: usize, vm: &VmSight, placement: Placement) -> VmInput {
    let agent = if vm.agent {
        AgentState::Works {
            in_use: Some(count(vm.in_use)),
        }
    } else {
        AgentState::Absent
    };
    VmInput {
        id: id(index),
        vcpus: Some(count(vm.vcpus.len())),
        placement,
        weight: vm.weight,
        min_usable: 1,
        enforced: true,
        agent,
    }
}

fn place(host: &HostSight) -> (CpuSet, Vec<Placement>) {
    let set = |mask: Mask| -> CpuSet { mask.iter().map(count).collect() };
    let online = set(Mask::first(host.idle.len()));
    let sets: Vec<CpuSet> = host.vms.iter().map(|vm| set(vm.allowed)).collect();
    let affinities: Vec<Affinity<'_>> = sets
        .iter()
        .map(|set| Affinity {
            allowed: Some(set),
            reach: set,
        })
        .collect();
    pool::choose(&online, &online, &affinities)
}
