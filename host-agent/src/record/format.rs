//! The payload of a block: postcard of the types here, which mirror the model's, so that a change of the model is no change of the
//! format by accident.

use std::collections::BTreeMap;
use std::sync::Arc;

use hint_proto::CpuSet;
use serde::{Deserialize, Serialize};

use super::counters::{Counters, Differences};
use super::{Decided, Moment, Scene, Settings};
use crate::config::VmPolicy;
use crate::discover::Found;
use crate::govern::AgentState;
use crate::model::{Accelerator, CpuGroup, Cpus, GroupTree, Limit, Mode, Vcpus, Vm, VmGroup, VmId};

/// Begins each payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BlockStart {
    /// The daemon's run: microseconds since 1970 at its start.
    pub(super) epoch: u64,
}

/// One moment. What is `None` is as in the moment before.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Entry {
    number: u64,
    scene: Option<SceneEntry>,
    agents: Option<Vec<AgentEntry>>,
    decided: Option<Vec<(Option<u32>, String)>>,
    counters: Counters,
}

/// Turns moments into entries, block by block.
#[derive(Debug, Default)]
pub(super) struct Encoder {
    last: Option<(Arc<Scene>, Vec<AgentState>, Vec<Decided>)>,
    differences: Differences,
}

impl Encoder {
    pub(super) fn entry(&mut self, moment: &Moment) -> Entry {
        let last = self.last.as_ref();
        let scene = last.is_none_or(|last| !Arc::ptr_eq(&last.0, &moment.scene));
        let agents = last.is_none_or(|last| last.1 != moment.agents);
        let decided = last.is_none_or(|last| last.2 != moment.decided);
        let entry = Entry {
            number: moment.number,
            scene: scene.then(|| SceneEntry::from(&*moment.scene)),
            agents: agents.then(|| moment.agents.iter().map(|agent| (*agent).into()).collect()),
            decided: decided.then(|| moment.decided.iter().map(decided_entry).collect()),
            counters: self.differences.take(&moment.sample),
        };
        self.last = Some((
            Arc::clone(&moment.scene),
            moment.agents.clone(),
            moment.decided.clone(),
        ));
        entry
    }
}

/// Turns the entries of a block into moments.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    last: Option<(Arc<Scene>, Vec<AgentState>, Vec<Decided>)>,
    differences: Differences,
}

impl Decoder {
    /// The moment; `None` for an entry that means nothing.
    pub(super) fn moment(&mut self, entry: Entry) -> Option<Moment> {
        let last = self.last.take();
        let (scene, agents, decided) = match last {
            Some((scene, agents, decided)) => (Some(scene), Some(agents), Some(decided)),
            None => (None, None, None),
        };
        let scene = match entry.scene {
            Some(scene) => Arc::new(scene.scene()?),
            None => scene?,
        };
        let agents = match entry.agents {
            Some(agents) => agents.into_iter().map(AgentState::from).collect(),
            None => agents?,
        };
        let decided = match entry.decided {
            Some(decided) => decided.into_iter().map(decided_from).collect(),
            None => decided?,
        };
        let sample = self.differences.give(entry.counters)?;
        self.last = Some((Arc::clone(&scene), agents.clone(), decided.clone()));
        Some(Moment {
            number: entry.number,
            scene,
            sample: Arc::new(sample),
            agents,
            decided,
        })
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct SceneEntry {
    found: Vec<FoundEntry>,
    groups: Vec<GroupEntry>,
    places: Vec<PlaceEntry>,
    common: String,
    online: String,
    mode: ModeEntry,
    host_weight: u32,
    policies: Vec<PolicyEntry>,
}

impl From<&Scene> for SceneEntry {
    fn from(scene: &Scene) -> Self {
        Self {
            found: scene.found.iter().map(FoundEntry::from).collect(),
            groups: scene.tree.groups.iter().map(GroupEntry::from).collect(),
            places: scene.tree.vms.iter().map(PlaceEntry::from).collect(),
            common: scene.common.to_string(),
            online: scene.online.to_string(),
            mode: scene.settings.mode.into(),
            host_weight: scene.settings.host_weight,
            policies: scene.settings.vms.iter().map(PolicyEntry::from).collect(),
        }
    }
}

impl SceneEntry {
    fn scene(self) -> Option<Scene> {
        let found: Option<Vec<Found>> = self.found.into_iter().map(FoundEntry::found).collect();
        let groups: Option<Vec<CpuGroup>> =
            self.groups.into_iter().map(GroupEntry::group).collect();
        let groups = groups?;
        let places = self.places.into_iter().map(PlaceEntry::place);
        let vms: BTreeMap<VmId, VmGroup> = places.collect();
        // Parents stand before their children.
        let in_order =
            |(index, group): (usize, &CpuGroup)| group.parent.is_none_or(|parent| parent < index);
        let known = vms.values().all(|place| place.group < groups.len());
        if !known || !groups.iter().enumerate().all(in_order) {
            return None;
        }
        Some(Scene {
            found: found?,
            tree: GroupTree { groups, vms },
            common: cpus(&self.common)?,
            online: cpus(&self.online)?,
            settings: Settings {
                mode: self.mode.into(),
                host_weight: self.host_weight,
                vms: self.policies.into_iter().map(VmPolicy::from).collect(),
            },
        })
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct FoundEntry {
    id: (u32, u64),
    name: String,
    uuid: Option<String>,
    tcg: bool,
    vcpus: Result<Vec<(u32, u32)>, String>,
    reach: String,
    affinity: Vec<(u32, String)>,
}

impl From<&Found> for FoundEntry {
    fn from(found: &Found) -> Self {
        let vm = &found.vm;
        Self {
            id: (vm.id.pid, vm.id.start_ticks),
            name: vm.name.clone(),
            uuid: vm.uuid.clone(),
            tcg: vm.accelerator == Accelerator::Tcg,
            vcpus: match &vm.vcpus {
                Vcpus::Known(threads) => {
                    Ok(threads.iter().map(|(vcpu, tid)| (*vcpu, *tid)).collect())
                }
                Vcpus::Unclassified(why) => Err(why.clone()),
            },
            reach: found.reach.to_string(),
            affinity: (found.affinity.iter())
                .map(|(vcpu, set)| (*vcpu, set.to_string()))
                .collect(),
        }
    }
}

impl FoundEntry {
    fn found(self) -> Option<Found> {
        let vcpus = match self.vcpus {
            Ok(threads) if threads.is_empty() => return None,
            Ok(threads) => Vcpus::Known(threads.into_iter().collect()),
            Err(why) => Vcpus::Unclassified(why),
        };
        let affinity = self.affinity.into_iter();
        let affinity: Option<_> = affinity
            .map(|(vcpu, set)| Some((vcpu, cpus(&set)?)))
            .collect();
        Some(Found {
            vm: Vm {
                id: vm_id(self.id),
                name: self.name,
                uuid: self.uuid,
                accelerator: if self.tcg {
                    Accelerator::Tcg
                } else {
                    Accelerator::Kvm
                },
                vcpus,
                cid: None,
                hybrid_socket: None,
            },
            allowed: None,
            reach: cpus(&self.reach)?,
            affinity: affinity?,
        })
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct GroupEntry {
    path: String,
    parent: Option<usize>,
    weight: Option<f64>,
    quota: Option<Option<f64>>,
    cpus: Option<String>,
    holds_vms: bool,
}

impl From<&CpuGroup> for GroupEntry {
    fn from(group: &CpuGroup) -> Self {
        Self {
            path: group.path.clone(),
            parent: group.parent,
            weight: group.weight,
            quota: group.quota.map(quota_entry),
            cpus: group.cpus.as_ref().map(CpuSet::to_string),
            holds_vms: group.holds_vms,
        }
    }
}

impl GroupEntry {
    fn group(self) -> Option<CpuGroup> {
        Some(CpuGroup {
            path: self.path,
            parent: self.parent,
            weight: self.weight,
            quota: self.quota.map(quota_from),
            cpus: match self.cpus {
                Some(list) => Some(cpus(&list)?),
                None => None,
            },
            holds_vms: self.holds_vms,
        })
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct PlaceEntry {
    id: (u32, u64),
    group: usize,
    vcpu_quota: Option<Option<f64>>,
    shared_with: Vec<(u32, u64)>,
    scattered: bool,
}

impl From<(&VmId, &VmGroup)> for PlaceEntry {
    fn from((id, place): (&VmId, &VmGroup)) -> Self {
        let ids = place.shared_with.iter();
        Self {
            id: (id.pid, id.start_ticks),
            group: place.group,
            vcpu_quota: place.vcpu_quota.map(quota_entry),
            shared_with: ids.map(|id| (id.pid, id.start_ticks)).collect(),
            scattered: place.scattered,
        }
    }
}

impl PlaceEntry {
    fn place(self) -> (VmId, VmGroup) {
        let place = VmGroup {
            group: self.group,
            vcpu_quota: self.vcpu_quota.map(quota_from),
            shared_with: self.shared_with.into_iter().map(vm_id).collect(),
            scattered: self.scattered,
        };
        (vm_id(self.id), place)
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct PolicyEntry {
    name: Option<String>,
    uuid: Option<String>,
    mode: ModeEntry,
    weight: Option<u32>,
    min_usable: u32,
    max_usable: Option<u32>,
    usable: Option<u32>,
    reservation: f64,
}

impl From<&VmPolicy> for PolicyEntry {
    fn from(policy: &VmPolicy) -> Self {
        // A new key must be thought of here; where a VM's socket is changes no decision.
        let VmPolicy {
            name,
            uuid,
            mode,
            weight,
            min_usable,
            max_usable,
            usable,
            reservation,
            hybrid_socket: _,
        } = policy;
        Self {
            name: name.clone(),
            uuid: uuid.clone(),
            mode: (*mode).into(),
            weight: *weight,
            min_usable: *min_usable,
            max_usable: *max_usable,
            usable: *usable,
            reservation: *reservation,
        }
    }
}

impl From<PolicyEntry> for VmPolicy {
    fn from(entry: PolicyEntry) -> Self {
        Self {
            name: entry.name,
            uuid: entry.uuid,
            mode: entry.mode.into(),
            weight: entry.weight,
            min_usable: entry.min_usable,
            max_usable: entry.max_usable,
            usable: entry.usable,
            reservation: entry.reservation,
            hybrid_socket: None,
        }
    }
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum ModeEntry {
    Observe,
    Advise,
    Enforce,
}

impl From<Mode> for ModeEntry {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Observe => Self::Observe,
            Mode::Advise => Self::Advise,
            Mode::Enforce => Self::Enforce,
        }
    }
}

impl From<ModeEntry> for Mode {
    fn from(mode: ModeEntry) -> Self {
        match mode {
            ModeEntry::Observe => Self::Observe,
            ModeEntry::Advise => Self::Advise,
            ModeEntry::Enforce => Self::Enforce,
        }
    }
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum AgentEntry {
    Absent,
    Fails,
    Works { in_use: Option<u32> },
}

impl From<AgentState> for AgentEntry {
    fn from(agent: AgentState) -> Self {
        match agent {
            AgentState::Absent => Self::Absent,
            AgentState::Fails => Self::Fails,
            AgentState::Works { in_use } => Self::Works { in_use },
        }
    }
}

impl From<AgentEntry> for AgentState {
    fn from(agent: AgentEntry) -> Self {
        match agent {
            AgentEntry::Absent => Self::Absent,
            AgentEntry::Fails => Self::Fails,
            AgentEntry::Works { in_use } => Self::Works { in_use },
        }
    }
}

fn decided_entry(decided: &Decided) -> (Option<u32>, String) {
    (decided.usable, decided.reason.clone())
}

fn decided_from((usable, reason): (Option<u32>, String)) -> Decided {
    Decided { usable, reason }
}

fn quota_entry(limit: Limit) -> Option<f64> {
    match limit {
        Limit::None => None,
        Limit::At(Cpus(cpus)) => Some(cpus),
    }
}

fn quota_from(quota: Option<f64>) -> Limit {
    quota.map_or(Limit::None, |cpus| Limit::At(Cpus(cpus)))
}

fn vm_id((pid, start_ticks): (u32, u64)) -> VmId {
    VmId { pid, start_ticks }
}

fn cpus(list: &str) -> Option<CpuSet> {
    list.parse().ok()
}
