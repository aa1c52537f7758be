//! From what was found to what the governor takes: VMs with their CPU sets and what the configuration says of them.

use std::sync::Arc;

use hint_proto::CpuSet;

use crate::config::Config;
use crate::discover::Found;
use crate::govern::{AgentState, Policy, VmInput};
use crate::model::{Agent, Cpus, Group, Mode, Threads, Vcpus};

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
        config: &Config,
        common: &CpuSet,
        online: &CpuSet,
    ) {
        self.vms.clear();
        self.pcpus = CpuSet::new();
        let mut sets = std::mem::take(&mut self.sets);
        for found in found {
            let policy = config.policy(&found.vm);
            self.vms.push(VmInput {
                id: found.vm.id,
                threads: threads(found, common, online, &mut sets),
                parent: None,
                weight: f64::from(policy.weight),
                quota: None,
                policy: Policy {
                    min_usable: policy.min_usable,
                    max_usable: policy.max_usable,
                    fixed: policy.usable,
                    reservation: Cpus(policy.reservation),
                },
                enforced: policy.mode == Mode::Enforce,
                agent: AgentState::Absent,
            });
        }
        sets.retain(|set| Arc::strong_count(set) > 1);
        for set in &sets {
            self.pcpus = self.pcpus.union(set);
        }
        if self.pcpus.is_empty() {
            self.pcpus = common.clone();
        }
        self.sets = sets;
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
    let set = found.allowed.as_ref().unwrap_or(&found.reach);
    let usual = set.intersection(common);
    let set = if usual.is_empty() {
        set.intersection(online)
    } else {
        usual
    };
    Some(Threads::Alike {
        count: u32::try_from(vcpus.len()).ok()?,
        cpus: Some(shared(set, sets)),
    })
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
