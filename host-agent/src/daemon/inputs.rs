//! From what was found to what the governor takes: VMs with their CPU sets and groups, and what the configuration says of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use hint_proto::CpuSet;

use crate::config::{Config, DEFAULT_WEIGHT, VmPolicy};
use crate::discover::Found;
use crate::govern::{AgentState, Policy, VmInput};
use crate::model::{Agent, Cpus, Group, GroupTree, Limit, Mode, Threads, Vcpus};

/// The governor's input, kept from tick to tick.
#[derive(Debug, Default)]
pub(super) struct Inputs {
    pub(super) vms: Vec<VmInput>,
    pub(super) groups: Vec<Group>,
    /// The pCPUs that any VM may use.
    pub(super) pcpus: CpuSet,
    sets: Vec<Arc<CpuSet>>,
}

impl Inputs {
    /// Follows what was found. `common` is what is online and not isolated, `online` what has times in `/proc/stat`.
    pub(super) fn follow(
        &mut self,
        found: &[Found],
        tree: &GroupTree,
        config: &Config,
        common: &CpuSet,
        online: &CpuSet,
    ) {
        let agents: BTreeMap<_, _> = self.vms.iter().map(|vm| (vm.id, vm.agent)).collect();
        self.vms.clear();
        let places = self.follow_groups(tree);
        let mut sets = std::mem::take(&mut self.sets);
        for found in found {
            let policy = config.policy(&found.vm);
            let mut vm = VmInput {
                id: found.vm.id,
                threads: threads(found, common, online, &mut sets),
                parent: None,
                weight: f64::from(policy.weight.unwrap_or(DEFAULT_WEIGHT)),
                quota: None,
                policy: Policy {
                    min_usable: policy.min_usable,
                    max_usable: policy.max_usable,
                    fixed: policy.usable,
                    reservation: Cpus(policy.reservation),
                },
                enforced: policy.mode == Mode::Enforce,
                agent: agents
                    .get(&found.vm.id)
                    .copied()
                    .unwrap_or(AgentState::Absent),
            };
            self.put_in_group(&mut vm, &policy, tree, &places);
            self.vms.push(vm);
        }
        sets.retain(|set| Arc::strong_count(set) > 1);
        self.pcpus = sets
            .iter()
            .fold(CpuSet::new(), |pcpus, set| pcpus.union(set));
        if self.pcpus.is_empty() {
            self.pcpus = common.clone();
        }
        self.sets = sets;
    }

    /// Takes over the groups that several VMs are in or below. One that a single VM is in is that VM. Gives each group's place
    /// and the number of VMs in it or below it.
    fn follow_groups(&mut self, tree: &GroupTree) -> Vec<(Option<usize>, usize)> {
        self.groups.clear();
        let mut counts = vec![0; tree.groups.len()];
        for vm in tree.vms.values() {
            for group in above(Some(vm.group), tree) {
                counts[group] += 1;
            }
        }
        let mut places: Vec<(Option<usize>, usize)> = Vec::with_capacity(counts.len());
        for (group, count) in tree.groups.iter().zip(counts) {
            let Some(parent) = group.parent.filter(|_| count > 1) else {
                places.push((None, count));
                continue;
            };
            let place = self.groups.len();
            self.groups.push(Group {
                // Parents stand before their children, and hold as many VMs or more; only the root has no place.
                parent: places.get(parent).and_then(|(place, _)| *place),
                weight: group.weight.unwrap_or_else(|| f64::from(DEFAULT_WEIGHT)),
                cap: cap(group.quota),
                ..Group::default()
            });
            places.push((Some(place), count));
        }
        places
    }

    /// Gives a VM its group's place, weight and quota. Where VMs share a group, the kernel divides by thread.
    fn put_in_group(
        &self,
        vm: &mut VmInput,
        policy: &VmPolicy,
        tree: &GroupTree,
        places: &[(Option<usize>, usize)],
    ) {
        let Some(found) = tree.vms.get(&vm.id) else {
            return;
        };
        let mut quota = found.vcpu_quota.unwrap_or(Limit::None);
        let mut weight = None;
        for index in above(Some(found.group), tree) {
            let (place, count) = places[index];
            if count > 1 {
                vm.parent = place;
                break;
            }
            // The outermost group that is the VM's alone is the one that weighs against others.
            weight = tree.groups[index].weight.or(weight);
            quota = quota.least(tree.groups[index].quota.unwrap_or(Limit::None));
        }
        vm.quota = cap(Some(quota));
        vm.weight = match (policy.weight, weight) {
            (Some(weight), Some(_)) => f64::from(weight),
            (None, Some(weight)) => weight,
            (own, None) => {
                let count = vm.threads.as_ref().map_or(1, Threads::count);
                f64::from(own.unwrap_or(DEFAULT_WEIGHT)) * count as f64
            }
        };
    }
}

/// A group and those above it, the nearest first.
fn above(group: Option<usize>, tree: &GroupTree) -> impl Iterator<Item = usize> + '_ {
    let known = |group: &usize| *group < tree.groups.len();
    std::iter::successors(group.filter(known), |group| {
        // Parents stand before their children.
        tree.groups[*group].parent.filter(|parent| parent < group)
    })
}

fn cap(limit: Option<Limit>) -> Option<Cpus> {
    match limit {
        Some(Limit::At(cap)) => Some(cap),
        Some(Limit::None) | None => None,
    }
}

/// What the governor needs to know of an agent.
pub(super) fn agent_state(agent: Option<&Agent>) -> AgentState {
    match agent {
        Some(agent) if agent.works() => {
            let in_use = u32::try_from(agent.preferred.intersection(&agent.online).len()).ok();
            AgentState::Works {
                in_use: in_use.filter(|in_use| *in_use > 0),
            }
        }
        Some(_) => AgentState::Fails,
        None => AgentState::Absent,
    }
}

/// A VM's vCPUs and where they may run. CPUs that are offline are in most affinities and mean nothing; a VM that nobody pinned
/// may use isolated CPUs, and its vCPUs never get there by themselves.
fn threads(
    found: &Found,
    common: &CpuSet,
    online: &CpuSet,
    sets: &mut Vec<Arc<CpuSet>>,
) -> Option<Threads> {
    let Vcpus::Known(vcpus) = &found.vm.vcpus else {
        return None;
    };
    let effective = |set: &CpuSet| {
        let usual = set.intersection(common);
        if usual.is_empty() {
            set.intersection(online)
        } else {
            usual
        }
    };
    let each = vcpus.keys().map(|vcpu| found.affinity.get(vcpu));
    let each: Option<Vec<&CpuSet>> = each.collect();
    match each {
        Some(each) if each.iter().any(|set| *set != each[0]) => {
            let each = each.into_iter().map(|set| shared(effective(set), sets));
            Some(Threads::Pinned(each.collect()))
        }
        other => {
            let set = other
                .and_then(|each| each.first().copied())
                .unwrap_or(&found.reach);
            Some(Threads::Alike {
                count: u32::try_from(vcpus.len()).ok()?,
                cpus: Some(shared(effective(set), sets)),
            })
        }
    }
}

/// The same set for all who have it: it is compared at each tick.
fn shared(set: CpuSet, sets: &mut Vec<Arc<CpuSet>>) -> Arc<CpuSet> {
    if let Some(known) = sets.iter().find(|known| ***known == set) {
        return Arc::clone(known);
    }
    let set = Arc::new(set);
    sets.push(Arc::clone(&set));
    set
}
