//! The broker's own governor, behind its own making of rates. It sees what the host's kernel and the agents tell.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use hint_broker::govern::{AgentState, Governor, Input, Policy, VmInput};
use hint_broker::model::{Cpus, Group, Threads, VmId};
use hint_broker::observe::rates::Rates;
use hint_broker::observe::{CpuTimes, Sample, ThreadTimes, VmTimes};
use hint_proto::CpuSet;

use super::Arm;
use crate::sim::clock::{MS, Nanos};
use crate::sim::host::Times;
use crate::sim::sight::{GroupSight, HostSight, Sight, VmSight};

const TICK: Nanos = 100 * MS;
/// Weight of the host's own work, as the daemon has it by default.
const HOST_WEIGHT: f64 = 100.0;
/// Weight of one thread beside groups.
const THREAD_WEIGHT: f64 = 100.0;

/// The broker, ten times a second. Guests follow one tick late.
#[derive(Debug, Default)]
pub struct Broker {
    governor: Governor,
    rates: Rates,
    vms: Vec<VmInput>,
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
        if self.vms.is_empty() {
            self.vms = inputs(&sight.host);
        }
        for (input, vm) in self.vms.iter_mut().zip(&sight.host.vms) {
            input.agent = agent(vm);
        }
        let sample = self.sample(sight);
        let tick = self.rates.update(sample);
        let groups: Vec<Group> = sight.host.groups.iter().skip(1).map(group).collect();
        let input = Input {
            groups: &groups,
            vms: &self.vms,
            host_weight: HOST_WEIGHT,
        };
        let step = self.governor.step(&tick, &input);
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

/// Each VM is a claimant in its group, and shares it by thread with others that are in the same.
fn inputs(host: &HostSight) -> Vec<VmInput> {
    let mut sets: HashMap<u128, Arc<CpuSet>> = HashMap::new();
    let vms = host.vms.iter().enumerate();
    vms.map(|(index, vm)| {
        let set = sets
            .entry(vm.allowed.0)
            .or_insert_with(|| Arc::new(vm.allowed.iter().map(count).collect()));
        VmInput {
            id: id(index),
            threads: Some(Threads::Alike {
                count: count(vm.vcpus.len()),
                cpus: Some(Arc::clone(set)),
            }),
            parent: vm.group.checked_sub(1),
            weight: THREAD_WEIGHT * vm.vcpus.len() as f64,
            quota: None,
            policy: Policy::default(),
            enforced: true,
            agent: agent(vm),
        }
    })
    .collect()
}

fn agent(vm: &VmSight) -> AgentState {
    if vm.agent {
        AgentState::Works {
            in_use: Some(count(vm.in_use)),
        }
    } else {
        AgentState::Absent
    }
}

/// The root is none of the governor's groups.
fn group(group: &GroupSight) -> Group {
    Group {
        parent: group.parent.and_then(|parent| parent.checked_sub(1)),
        weight: f64::from(group.weight),
        cap: group.quota.map(Cpus),
        ..Group::default()
    }
}
