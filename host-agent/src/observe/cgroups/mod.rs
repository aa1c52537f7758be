//! The host's CPU groups: which of them divide time between the VMs and the host's own work, with their weights, quotas, CPU
//! sets and used time, for cgroup v1, v2 and both beside each other.
//!
//! It follows the groups from the root to those of the VMs, and looks at nothing else than their siblings on the way. What is
//! due to whom is not decided here.

mod files;
#[cfg(feature = "fuzz")]
pub(crate) mod fuzz;
mod membership;
mod mounts;
mod rates;
mod values;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use self::files::{GroupFiles, QuotaFiles, Standing, Values};
use self::membership::{Place, ancestors, parent};
use self::mounts::{Hierarchies, Hierarchy};
pub use self::rates::GroupRates;
use crate::model::{CpuGroup, Cpus, GroupTree, Limit, Vcpus, Vm, VmGroup, VmId};
use crate::root::{ReadError, Root};

/// Threads of a new VM are still being moved; those of an old one stay where they are, and are looked up once in so many scans.
const YOUNG_SCANS: u32 = 10;
const OLD_EVERY: u32 = 4;
/// Mounts hardly change.
const MOUNTS_EVERY: u32 = 30;

/// Reads the groups, again and again; keeps their files open.
#[derive(Debug)]
pub struct Cgroups {
    root: Root,
    hierarchies: Hierarchies,
    scans: u32,
    vms: BTreeMap<VmId, Member>,
    groups: BTreeMap<String, GroupFiles>,
}

/// What a scan found.
#[derive(Debug, Clone, Default)]
pub struct GroupScan {
    /// The groups.
    pub tree: GroupTree,
    /// What could not be read, with what it means and how to mend it.
    pub degraded: Vec<String>,
}

/// A VM whose threads were looked up.
#[derive(Debug, Default)]
struct Member {
    scans: u32,
    vcpus: BTreeMap<u32, u32>,
    /// The group of each vCPU's thread.
    threads: BTreeMap<u32, String>,
    /// Quotas of the threads' groups that lie below the VM's.
    quotas: BTreeMap<String, QuotaFiles>,
}

impl Cgroups {
    /// Reads below `root`.
    #[must_use]
    pub fn new(root: Root) -> Self {
        Self {
            root,
            hierarchies: Hierarchies::default(),
            scans: 0,
            vms: BTreeMap::new(),
            groups: BTreeMap::new(),
        }
    }

    /// Reads where the VMs are and what their groups and those beside them say; nothing when there are none. Meant for about
    /// once a second.
    pub fn scan(&mut self, vms: &[Vm]) -> GroupScan {
        if !vms.iter().any(|vm| matches!(vm.vcpus, Vcpus::Known(_))) {
            return GroupScan::default();
        }
        let mut problems = Problems::default();
        self.find_hierarchies(&mut problems);
        let Some(cpu) = self.hierarchies.cpu.clone() else {
            problems.note("no cgroup hierarchy with the CPU controller is mounted here: weights and quotas of VMs are not known");
            return GroupScan {
                tree: GroupTree::default(),
                degraded: problems.messages(),
            };
        };
        self.find_members(vms, &cpu, &mut problems);
        let tree = self.read_tree(&cpu, &mut problems);
        GroupScan {
            tree,
            degraded: problems.messages(),
        }
    }

    /// The time that each group of the last scan has used until now, in the order of [`GroupTree::groups`].
    pub fn usage(&mut self, tree: &GroupTree) -> Vec<Option<Duration>> {
        let groups = tree.groups.iter();
        groups
            .map(|group| {
                let files = self.groups.get_mut(&group.path)?;
                files.usage(&self.root).ok().flatten()
            })
            .collect()
    }

    fn find_hierarchies(&mut self, problems: &mut Problems) {
        let due = self.hierarchies.cpu.is_none() || self.scans.is_multiple_of(MOUNTS_EVERY);
        self.scans = self.scans.wrapping_add(1);
        if !due {
            return;
        }
        match Hierarchies::read(&self.root) {
            Ok(found) if found == self.hierarchies => {}
            Ok(found) => {
                self.hierarchies = found;
                self.groups.clear();
                self.vms.clear();
            }
            Err(error) => problems.failed(&error, "the CPU groups may have moved"),
        }
    }

    fn find_members(&mut self, vms: &[Vm], cpu: &Hierarchy, problems: &mut Problems) {
        let mut known = std::mem::take(&mut self.vms);
        for vm in vms {
            let Vcpus::Known(vcpus) = &vm.vcpus else {
                continue;
            };
            let mut member = known
                .remove(&vm.id)
                .filter(|member| member.vcpus == *vcpus)
                .unwrap_or_default();
            // Old VMs take turns.
            let turn = self.scans.wrapping_add(vm.id.pid).is_multiple_of(OLD_EVERY);
            let due = member.scans < YOUNG_SCANS || member.threads.is_empty() || turn;
            member.scans = member.scans.saturating_add(1);
            member.vcpus.clone_from(vcpus);
            if due {
                member.threads = self.threads(vm.id.pid, vcpus, cpu, problems);
            }
            self.vms.insert(vm.id, member);
        }
    }

    /// The group of each vCPU thread; nothing when one of them is not known, since half a VM is none.
    fn threads(
        &self,
        pid: u32,
        vcpus: &BTreeMap<u32, u32>,
        cpu: &Hierarchy,
        problems: &mut Problems,
    ) -> BTreeMap<u32, String> {
        let mut threads = BTreeMap::new();
        for (index, tid) in vcpus {
            match membership::place(&self.root, cpu, pid, *tid) {
                Ok(Some(Place::In(path))) => {
                    threads.insert(*index, path);
                }
                Ok(Some(Place::Hidden(_))) => {
                    problems.note(&format!(
                        "some VMs are in CPU groups that can't be seen below {}: their weights and quotas are not known; run the broker in the host's cgroup namespace",
                        cpu.point.display()
                    ));
                    return BTreeMap::new();
                }
                Ok(None) => return BTreeMap::new(),
                Err(error) => {
                    problems.failed(&error, "the CPU group of its VM is not known");
                    return BTreeMap::new();
                }
            }
        }
        threads
    }

    fn read_tree(&mut self, cpu: &Hierarchy, problems: &mut Problems) -> GroupTree {
        let mut reading = Reading {
            root: &self.root,
            hierarchies: &self.hierarchies,
            cpu,
            kept: std::mem::take(&mut self.groups),
            files: BTreeMap::new(),
            values: BTreeMap::new(),
            problems,
        };
        reading.read("");
        // The scheduler sees a VM in the nearest group that the CPU controller is passed on to.
        let mut places: BTreeMap<VmId, (String, String, bool)> = BTreeMap::new();
        for (id, member) in &self.vms {
            let Some((own, scattered)) = membership::of_vm(&member.threads) else {
                continue;
            };
            let line: Vec<&str> = std::iter::once(own).chain(ancestors(own)).collect();
            if line.iter().any(|path| reading.read(path) == Standing::Gone) {
                continue;
            }
            let is_group = |path: &&&str| reading.values[**path].standing == Standing::Group;
            let group = line.iter().find(is_group).copied().unwrap_or("");
            places.insert(*id, (group.to_owned(), own.to_owned(), scattered));
        }
        for path in above(places.values().map(|(group, ..)| group.as_str())) {
            reading.read_children(&path);
        }
        let Reading { files, values, .. } = reading;
        self.groups = files;
        for (id, member) in &mut self.vms {
            if !places.contains_key(id) {
                // Moved, or ending: look at once.
                member.threads.clear();
            }
        }
        let (groups, index) = arrange(&values, places.values().map(|(group, ..)| group.as_str()));
        let mut vms = BTreeMap::new();
        for (id, (group, own, scattered)) in &places {
            let others = places
                .iter()
                .filter(|(other, (path, ..))| *other != id && path == group);
            let shared_with = others.map(|(other, _)| *other).collect();
            let member = self.vms.get_mut(id).expect("places are of these VMs");
            let vm = VmGroup {
                group: index[group.as_str()],
                vcpu_quota: member.vcpu_quota(&self.root, cpu, own, problems),
                shared_with,
                scattered: *scattered,
            };
            vms.insert(*id, vm);
        }
        GroupTree { groups, vms }
    }
}

/// One reading of all groups.
struct Reading<'a> {
    root: &'a Root,
    hierarchies: &'a Hierarchies,
    cpu: &'a Hierarchy,
    kept: BTreeMap<String, GroupFiles>,
    files: BTreeMap<String, GroupFiles>,
    values: BTreeMap<String, Values>,
    problems: &'a mut Problems,
}

impl Reading<'_> {
    /// Reads a group once.
    fn read(&mut self, path: &str) -> Standing {
        if let Some(values) = self.values.get(path) {
            return values.standing;
        }
        let mut files = self
            .kept
            .remove(path)
            .unwrap_or_else(|| GroupFiles::new(self.hierarchies, self.cpu, path));
        let values = files.read(self.root, |error| {
            self.problems
                .failed(&error, "what this CPU group is due is not known");
        });
        let standing = values.standing;
        self.values.insert(path.to_owned(), values);
        self.files.insert(path.to_owned(), files);
        standing
    }

    fn read_children(&mut self, path: &str) {
        let folder = self.cpu.point.join(path);
        match self.root.list_directories(&folder.to_string_lossy()) {
            Ok(names) => {
                for name in names.unwrap_or_default() {
                    let name = name.to_string_lossy();
                    let child = match path {
                        "" => name.into_owned(),
                        path => format!("{path}/{name}"),
                    };
                    self.read(&child);
                }
            }
            Err(error) => self.problems.failed(
                &error,
                "what stands beside the VMs' CPU groups is not known",
            ),
        }
    }
}

impl Member {
    /// The sum of what the vCPU threads' own groups, below the VM's, allow.
    fn vcpu_quota(
        &mut self,
        root: &Root,
        cpu: &Hierarchy,
        own: &str,
        problems: &mut Problems,
    ) -> Option<Limit> {
        let below: Vec<&String> = self.threads.values().filter(|path| *path != own).collect();
        self.quotas.retain(|path, _| below.contains(&path));
        let mut sum = Cpus::ZERO;
        let mut limited = false;
        for path in self.threads.values() {
            let one = Cpus::from(1);
            let line = std::iter::once(path.as_str()).chain(ancestors(path));
            let mut least = Limit::None;
            for group in line.take_while(|group| *group != own && group.len() > own.len()) {
                let files = self
                    .quotas
                    .entry(group.to_owned())
                    .or_insert_with(|| QuotaFiles::new(cpu, group));
                match files.read(root) {
                    Ok(limit) => least = least.least(limit),
                    Err(error) => {
                        problems.failed(&error, "the quota of this vCPU is not known");
                        return None;
                    }
                }
            }
            limited |= least != Limit::None;
            sum = sum
                + match least.least(Limit::At(one)) {
                    Limit::At(cpus) => cpus,
                    Limit::None => one,
                };
        }
        Some(if limited { Limit::At(sum) } else { Limit::None })
    }
}

/// All groups that lie above these, and the root.
fn above<'a>(groups: impl Iterator<Item = &'a str>) -> BTreeSet<String> {
    let mut above = BTreeSet::from([String::new()]);
    for group in groups {
        above.extend(ancestors(group).map(str::to_owned));
    }
    above
}

/// The groups in order, parents before children, and each one's place. Groups that the scheduler doesn't see are left out.
fn arrange<'a>(
    values: &'a BTreeMap<String, Values>,
    with_vms: impl Iterator<Item = &'a str>,
) -> (Vec<CpuGroup>, BTreeMap<&'a str, usize>) {
    let mut holding = BTreeSet::from([""]);
    for group in with_vms {
        holding.insert(group);
        holding.extend(ancestors(group));
    }
    let mut groups: Vec<CpuGroup> = Vec::new();
    let mut index = BTreeMap::new();
    // In this order a parent comes before its children, since its path is a part of theirs.
    for (path, values) in values {
        if values.standing != Standing::Group {
            continue;
        }
        let parents = std::iter::successors(parent(path), |path| parent(path));
        let parent = parents
            .into_iter()
            .find_map(|path| index.get(path).copied());
        // A group without a CPU set of its own has that of the group above.
        let inherited = parent.and_then(|parent: usize| groups[parent].cpus.clone());
        index.insert(path.as_str(), groups.len());
        groups.push(CpuGroup {
            path: path.clone(),
            parent,
            weight: values.weight.filter(|_| parent.is_some()),
            quota: values.quota,
            cpus: values.cpus.clone().or(inherited),
            holds_vms: holding.contains(path.as_str()),
        });
    }
    (groups, index)
}

/// What could not be read: the first of each kind, since one cause has a thousand files.
#[derive(Debug, Default)]
struct Problems(BTreeMap<&'static str, String>, BTreeSet<String>);

impl Problems {
    fn failed(&mut self, error: &ReadError, effect: &'static str) {
        self.0
            .entry(effect)
            .or_insert_with(|| format!("{error}: {effect}"));
    }

    fn note(&mut self, message: &str) {
        self.1.insert(message.to_owned());
    }

    fn messages(self) -> Vec<String> {
        self.0.into_values().chain(self.1).collect()
    }
}

#[cfg(test)]
mod tests;
