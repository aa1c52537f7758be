//! From measured figures to the input of a division: who claims pCPU time, VMs and the host's own work.

use std::time::Duration;

use hint_proto::CpuSet;
use std::sync::Arc;

use super::input::{Input, VmInput};
use super::pcpus::Pcpus;
use super::state::VmState;
use crate::model::{Claimant, Cpus, Group, Host, Pcpu, Threads};

/// The input of a division, kept from tick to tick. The VMs are the first claimants, in their order; after them comes the host's
/// own work, once for each component: pCPUs that are connected by VMs which may use them.
#[derive(Debug, Default)]
pub(super) struct Claims {
    host: Host,
    /// What the places below follow from.
    groups: Vec<(Option<usize>, Option<Arc<CpuSet>>)>,
    vms: Vec<(Option<usize>, Option<Threads>)>,
    /// Each pCPU's component; `None` for one that no VM may use.
    component_of_pcpu: Vec<Option<usize>>,
    component_of_vm: Vec<Option<usize>>,
    components: usize,
    /// Grows with each change of groups, sets or pCPUs.
    version: u64,
    work: Vec<f64>,
}

impl Claims {
    /// Takes the figures of one tick.
    pub(super) fn fill(
        &mut self,
        now: Duration,
        input: &Input<'_>,
        pcpus: &Pcpus,
        states: &[VmState],
    ) {
        if !self.fits(input, pcpus) {
            self.follow(input, pcpus);
        }
        for (place, pcpu) in self.host.pcpus.iter_mut().enumerate() {
            pcpu.supply = pcpus.supply(place);
        }
        for (group, given) in self.host.groups.iter_mut().zip(input.groups) {
            (group.weight, group.floor, group.cap) = (given.weight, given.floor, given.cap);
        }
        self.work.clear();
        self.work.resize(self.components, 0.0);
        for (place, component) in self.component_of_pcpu.iter().enumerate() {
            if let Some(component) = component {
                self.work[*component] += pcpus.used(place).0;
            }
        }
        for (index, (vm, state)) in input.vms.iter().zip(states).enumerate() {
            let claimant = &mut self.host.claimants[index];
            claimant.weight = vm.weight;
            claimant.floor = vm.policy.reservation;
            claimant.cap = vm.quota;
            let known = vm.vcpus().filter(|_| state.demand.is_fresh(now));
            let (Some(vcpus), Some(component)) = (known, self.component_of_vm[index]) else {
                // Its use counts as the host's own work.
                (claimant.demand, claimant.shown, claimant.all) =
                    (Cpus::ZERO, Cpus::ZERO, Cpus::ZERO);
                continue;
            };
            claimant.demand = state.demand.estimate(vcpus);
            claimant.shown = state.shown(vm, vcpus);
            claimant.all = Cpus::from(vcpus);
            self.work[component] -= state.demand.run().0;
        }
        let claimants = self.host.claimants.iter_mut().skip(input.vms.len());
        for (claimant, work) in claimants.zip(&self.work) {
            claimant.weight = input.host_weight;
            // Measured in two places, the difference may be a little below nothing.
            claimant.demand = Cpus(work.max(0.0));
            claimant.shown = claimant.demand;
        }
    }

    pub(super) fn host(&self) -> &Host {
        &self.host
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// May any VM use this pCPU?
    pub(super) fn is_governed(&self, place: usize) -> bool {
        self.component_of_pcpu[place].is_some()
    }

    fn fits(&self, input: &Input<'_>, pcpus: &Pcpus) -> bool {
        let same_pcpus = self
            .host
            .pcpus
            .iter()
            .map(|pcpu| pcpu.id)
            .eq(pcpus.ids().iter().copied());
        let same_groups = self.groups.len() == input.groups.len()
            && self
                .groups
                .iter()
                .zip(input.groups)
                .all(|((parent, cpus), group)| *parent == group.parent && *cpus == group.cpus);
        let same_vms = self.vms.len() == input.vms.len()
            && self
                .vms
                .iter()
                .zip(input.vms)
                .all(|((parent, threads), vm)| *parent == vm.parent && *threads == vm.threads);
        self.version > 0 && same_pcpus && same_groups && same_vms
    }

    fn follow(&mut self, input: &Input<'_>, pcpus: &Pcpus) {
        self.version += 1;
        self.groups = input
            .groups
            .iter()
            .map(|group| (group.parent, group.cpus.clone()))
            .collect();
        self.vms = input
            .vms
            .iter()
            .map(|vm| (vm.parent, vm.threads.clone()))
            .collect();
        self.host.pcpus = pcpus
            .ids()
            .iter()
            .map(|id| Pcpu {
                id: *id,
                supply: Cpus::ZERO,
            })
            .collect();
        self.host.groups = input.groups.to_vec();
        self.find_components(input, pcpus);
        let mut work_sets = vec![CpuSet::new(); self.components];
        for (place, component) in self.component_of_pcpu.iter().enumerate() {
            if let Some(component) = component {
                work_sets[*component].insert(pcpus.ids()[place]);
            }
        }
        self.host.claimants.clear();
        self.host
            .claimants
            .extend(input.vms.iter().map(|vm| Claimant {
                parent: vm.parent,
                weight: vm.weight,
                demand: Cpus::ZERO,
                shown: Cpus::ZERO,
                all: Cpus::ZERO,
                floor: Cpus::ZERO,
                cap: None,
                threads: vm.threads.clone().unwrap_or(Threads::Alike {
                    count: 0,
                    cpus: None,
                }),
            }));
        self.host
            .claimants
            .extend(work_sets.into_iter().map(|set| Claimant {
                parent: None,
                weight: input.host_weight,
                demand: Cpus::ZERO,
                shown: Cpus::ZERO,
                all: Cpus(set.len() as f64),
                floor: Cpus::ZERO,
                cap: None,
                threads: Threads::Alike {
                    count: u32::try_from(set.len()).unwrap_or(u32::MAX),
                    cpus: Some(Arc::new(set)),
                },
            }));
    }

    fn find_components(&mut self, input: &Input<'_>, pcpus: &Pcpus) {
        let count = pcpus.ids().len();
        let mut leader: Vec<usize> = (0..count).collect();
        let mut used = vec![false; count];
        let mut firsts = Vec::with_capacity(input.vms.len());
        for vm in input.vms {
            let mut first = None;
            for_each_pcpu(vm, input.groups, pcpus, |place| {
                used[place] = true;
                let lead = root(&leader, place);
                let other = root(&leader, *first.get_or_insert(lead));
                leader[lead.max(other)] = lead.min(other);
            });
            firsts.push(first);
        }
        let mut number = vec![None; count];
        self.components = 0;
        self.component_of_pcpu.clear();
        for place in 0..count {
            let component = used[place].then(|| {
                *number[root(&leader, place)].get_or_insert_with(|| {
                    self.components += 1;
                    self.components - 1
                })
            });
            self.component_of_pcpu.push(component);
        }
        self.component_of_vm = firsts
            .into_iter()
            .map(|first| first.and_then(|place| self.component_of_pcpu[place]))
            .collect();
    }
}

/// Each pCPU that a VM's threads may use, maybe more than once, by its place.
pub(super) fn for_each_pcpu(
    vm: &VmInput,
    groups: &[Group],
    pcpus: &Pcpus,
    mut visit: impl FnMut(usize),
) {
    let Some(threads) = &vm.threads else { return };
    let mut limits: Vec<&CpuSet> = Vec::new();
    let mut group = vm.parent.and_then(|parent| groups.get(parent));
    // Parents that go round in a circle end here too.
    for _ in 0..groups.len() {
        let Some(inner) = group else { break };
        limits.extend(inner.cpus.as_deref());
        group = inner.parent.and_then(|parent| groups.get(parent));
    }
    let mut visit_set = |set: Option<&CpuSet>| {
        for (place, id) in pcpus.ids().iter().enumerate() {
            let within = set.is_none_or(|set| set.contains(*id));
            if within && limits.iter().all(|limit| limit.contains(*id)) {
                visit(place);
            }
        }
    };
    match threads {
        Threads::Alike { cpus, .. } => visit_set(cpus.as_deref()),
        Threads::Pinned(sets) => {
            for set in sets {
                visit_set(Some(set));
            }
        }
    }
}

fn root(leader: &[usize], mut place: usize) -> usize {
    while leader[place] != place {
        place = leader[place];
    }
    place
}
