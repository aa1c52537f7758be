//! The input of a division, from what was observed: CPU groups, where VMs and the host's own work stand in them, and what they
//! want. Pure.
//!
//! A group with one VM and nothing else is that VM's claim itself, with the group's weight and quota. VMs in one group, and VMs
//! outside of all, claim as the kernel sees them: thread by thread.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hint_proto::CpuSet;

use crate::model::{Claimant, Cpus, Group, GroupTree, Host, Limit, Pcpu, Threads, VmGroup, VmId};

/// The weight of a new group, and of one thread beside groups.
const USUAL_WEIGHT: f64 = 100.0;
/// What is not a VM may want this much more in the next moment than it used in the last.
const HEADROOM: f64 = 0.10;

/// What a VM claims.
#[derive(Debug, Clone, PartialEq)]
pub struct VmClaim {
    /// What it is estimated to want, with headroom.
    pub demand: Cpus,
    /// What it shows that it wants.
    pub shown: Cpus,
    /// What it is promised while it wants it.
    pub floor: Cpus,
    /// Its weight where its group is not known.
    pub weight: f64,
    /// Where the thread of each vCPU may run, in any order; as many as it has vCPUs. `None` is anywhere.
    pub vcpus: Vec<Option<CpuSet>>,
}

/// All that a division is made of.
#[derive(Debug)]
pub struct Observed<'a> {
    /// Online pCPUs, and what each can give.
    pub pcpus: &'a BTreeMap<u32, Cpus>,
    /// The host's groups.
    pub tree: &'a GroupTree,
    /// What each group used in the last moment, in the order of the tree; `None` and what is missing count as nothing.
    pub used: &'a [Option<Cpus>],
    /// The VMs.
    pub vms: &'a BTreeMap<VmId, VmClaim>,
}

/// The input, and which claim is whose.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Assembled {
    /// The input.
    pub host: Host,
    /// Each VM's place in [`Host::claimants`].
    pub vms: BTreeMap<VmId, usize>,
    /// The place there of each group without VMs, by its place in the tree.
    pub others: BTreeMap<usize, usize>,
    /// A weight or quota on the way to one of these VMs is not known; the usual weight, and no quota, are taken for it.
    pub guessed: BTreeSet<VmId>,
}

/// Puts it together.
#[must_use]
pub fn assemble(observed: &Observed<'_>) -> Assembled {
    let tree = observed.tree;
    let mut result = Assembled::default();
    let pcpus = observed.pcpus.iter();
    result.host.pcpus = pcpus
        .map(|(id, supply)| Pcpu {
            id: *id,
            supply: *supply,
        })
        .collect();
    let own = own_groups(tree);
    // The places in the result of the groups that stay groups.
    let mut places: Vec<Option<usize>> = vec![None; tree.groups.len()];
    for (index, group) in tree.groups.iter().enumerate() {
        let Some(above) = group.parent else {
            continue;
        };
        let parent = places[above];
        let cpus = group.cpus.as_ref();
        let cpus = cpus.filter(|cpus| tree.groups[above].cpus.as_ref() != Some(*cpus));
        if !group.holds_vms {
            let used = observed.used.get(index).copied().flatten();
            result.others.insert(index, result.host.claimants.len());
            result.host.claimants.push(Claimant {
                parent,
                weight: group.weight.unwrap_or(USUAL_WEIGHT),
                cap: cap(group.quota),
                ..other_work(
                    used.unwrap_or_default(),
                    group.cpus.as_ref(),
                    observed.pcpus,
                )
            });
        } else if !own.contains_key(&index) {
            places[index] = Some(result.host.groups.len());
            result.host.groups.push(Group {
                parent,
                weight: group.weight.unwrap_or(USUAL_WEIGHT),
                cap: cap(group.quota),
                cpus: cpus.cloned().map(Arc::new),
                ..Group::default()
            });
        }
    }
    for (id, claim) in observed.vms {
        let place = tree.vms.get(id);
        if place.is_none_or(|place| is_guessed(tree, place)) {
            result.guessed.insert(*id);
        }
        let claimant = claim_of(*id, claim, tree, place, &own, &places);
        result.vms.insert(*id, result.host.claimants.len());
        result.host.claimants.push(claimant);
    }
    result
}

/// The groups that have one VM, and nothing else that could claim; with their VM.
fn own_groups(tree: &GroupTree) -> BTreeMap<usize, VmId> {
    let above: BTreeSet<usize> = tree
        .groups
        .iter()
        .filter_map(|group| group.parent)
        .collect();
    let alone = tree.vms.iter().filter(|(_, vm)| {
        let is_root = tree.groups[vm.group].parent.is_none();
        !is_root && vm.shared_with.is_empty() && !vm.scattered && !above.contains(&vm.group)
    });
    alone.map(|(id, vm)| (vm.group, *id)).collect()
}

fn claim_of(
    id: VmId,
    claim: &VmClaim,
    tree: &GroupTree,
    place: Option<&VmGroup>,
    own: &BTreeMap<usize, VmId>,
    places: &[Option<usize>],
) -> Claimant {
    #[allow(
        clippy::cast_precision_loss,
        reason = "a VM has some thousand vCPUs at most"
    )]
    let count = claim.vcpus.len() as f64;
    let (parent, weight, quota) = match place {
        None => (None, claim.weight, None),
        Some(place) if own.get(&place.group) == Some(&id) => {
            let group = &tree.groups[place.group];
            let quotas = [group.quota, place.vcpu_quota].into_iter().flatten();
            let parent = group.parent.and_then(|above| places[above]);
            let weight = group.weight.unwrap_or(USUAL_WEIGHT);
            (parent, weight, quotas.reduce(Limit::least))
        }
        // One thread weighs as much as a new group.
        Some(place) => (
            places[place.group],
            USUAL_WEIGHT * count.max(1.0),
            place.vcpu_quota,
        ),
    };
    Claimant {
        parent,
        weight,
        demand: claim.demand,
        shown: claim.shown,
        all: Cpus(count),
        floor: claim.floor,
        cap: cap(quota),
        threads: threads(&claim.vcpus),
    }
}

fn threads(vcpus: &[Option<CpuSet>]) -> Threads {
    let first = vcpus.first().cloned().flatten();
    // VMs with so many vCPUs don't exist.
    let count = u32::try_from(vcpus.len()).unwrap_or(u32::MAX);
    if vcpus.iter().all(|cpus| *cpus == first) {
        return Threads::Alike {
            count,
            cpus: first.map(Arc::new),
        };
    }
    let anywhere: CpuSet = (0..hint_proto::MAX_CPUS).collect();
    let sets = vcpus
        .iter()
        .map(|cpus| Arc::new(cpus.clone().unwrap_or_else(|| anywhere.clone())));
    Threads::Pinned(sets.collect())
}

/// A group without VMs: nobody knows how much it would use, so what it used is what it wants.
fn other_work(used: Cpus, cpus: Option<&CpuSet>, pcpus: &BTreeMap<u32, Cpus>) -> Claimant {
    let may_use = |cpu: &&u32| cpus.is_none_or(|cpus| cpus.contains(**cpu));
    let count = pcpus.keys().filter(may_use).count();
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    Claimant {
        parent: None,
        weight: USUAL_WEIGHT,
        demand: Cpus(used.0 * (1.0 + HEADROOM)),
        shown: used,
        all: Cpus::from(count),
        floor: Cpus::ZERO,
        cap: None,
        threads: Threads::Alike {
            count,
            cpus: cpus.cloned().map(Arc::new),
        },
    }
}

fn cap(quota: Option<Limit>) -> Option<Cpus> {
    match quota {
        Some(Limit::At(cpus)) => Some(cpus),
        Some(Limit::None) | None => None,
    }
}

fn is_guessed(tree: &GroupTree, place: &VmGroup) -> bool {
    let mut line = std::iter::successors(Some(place.group), |at| tree.groups[*at].parent)
        .map(|at| &tree.groups[at]);
    place.vcpu_quota.is_none()
        || line.any(|group| {
            group.parent.is_some() && (group.weight.is_none() || group.quota.is_none())
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entitle::Engine;
    use crate::model::CpuGroup;

    fn id(pid: u32) -> VmId {
        VmId {
            pid,
            start_ticks: 1,
        }
    }

    fn group(
        path: &str,
        parent: Option<usize>,
        weight: f64,
        quota: Limit,
        holds_vms: bool,
    ) -> CpuGroup {
        CpuGroup {
            path: path.to_owned(),
            parent,
            weight: parent.map(|_| weight),
            quota: Some(quota),
            cpus: Some("0-7".parse().unwrap()),
            holds_vms,
        }
    }

    fn place(group: usize, shared_with: &[u32]) -> VmGroup {
        VmGroup {
            group,
            vcpu_quota: Some(Limit::None),
            shared_with: shared_with.iter().copied().map(id).collect(),
            scattered: false,
        }
    }

    fn busy(vcpus: usize) -> VmClaim {
        let all = Cpus(f64::from(u32::try_from(vcpus).unwrap()));
        VmClaim {
            demand: all,
            shown: all,
            floor: Cpus::ZERO,
            weight: 100.0,
            vcpus: vec![None; vcpus],
        }
    }

    /// system.slice beside machine.slice, which has VMs 1 and 2 in groups of their own and 3 and 4 in one.
    fn tree() -> GroupTree {
        GroupTree {
            groups: vec![
                group("", None, 0.0, Limit::None, true),
                group("machine", Some(0), 300.0, Limit::None, true),
                group("machine/a", Some(1), 200.0, Limit::None, true),
                group("machine/b", Some(1), 100.0, Limit::At(Cpus(0.5)), true),
                group("machine/cd", Some(1), 100.0, Limit::None, true),
                group("system", Some(0), 100.0, Limit::None, false),
            ],
            vms: BTreeMap::from([
                (id(1), place(2, &[])),
                (id(2), place(3, &[])),
                (id(3), place(4, &[4])),
                (id(4), place(4, &[3])),
            ]),
        }
    }

    fn put_together(
        tree: &GroupTree,
        used: &[Option<Cpus>],
        vms: &BTreeMap<VmId, VmClaim>,
    ) -> Assembled {
        let pcpus: BTreeMap<u32, Cpus> = (0..8).map(|cpu| (cpu, Cpus(1.0))).collect();
        assemble(&Observed {
            pcpus: &pcpus,
            tree,
            used,
            vms,
        })
    }

    fn shares(assembled: &Assembled) -> Vec<f64> {
        let mut engine = Engine::default();
        let division = engine.divide(&assembled.host);
        assert!(division.faults.is_empty(), "{:?}", division.faults);
        let share = |claimant: &usize| division.claimants[*claimant].as_ref().unwrap().share.0;
        let vms = assembled.vms.values().map(share);
        vms.chain(assembled.others.values().map(share)).collect()
    }

    fn near(found: &[f64], wanted: &[f64]) -> bool {
        found.len() == wanted.len() && found.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-6)
    }

    #[test]
    fn weights_count_level_by_level_and_quotas_hold() {
        let vms = (1..5).map(|pid| (id(pid), busy(8))).collect();
        let mut used = vec![None; 6];
        used[5] = Some(Cpus(8.0));
        let assembled = put_together(&tree(), &used, &vms);
        assert_eq!(
            assembled.host.groups.len(),
            2,
            "machine, and the shared group"
        );
        assert_eq!(assembled.host.claimants.len(), 5);
        assert!(assembled.guessed.is_empty());
        // machine has 6 of 8 by 300 to 100; b stays at its quota, a and cd divide the rest by 200 to 100.
        let rest = 5.5;
        let found = shares(&assembled);
        let wanted = [rest * 2.0 / 3.0, 0.5, rest / 6.0, rest / 6.0, 2.0];
        assert!(near(&found, &wanted), "{found:?}, not {wanted:?}");
    }

    #[test]
    fn work_beside_the_vms_wants_what_it_used() {
        let vms = (1..5).map(|pid| (id(pid), busy(8))).collect();
        let mut used = vec![None; 6];
        used[5] = Some(Cpus(1.0));
        let found = shares(&put_together(&tree(), &used, &vms));
        assert!((found[4] - 1.1).abs() < 1e-6, "{found:?}");
        let found = shares(&put_together(&tree(), &[], &vms));
        assert!(found[4].abs() < 1e-6, "{found:?}");
    }

    #[test]
    fn in_a_shared_group_threads_are_counted() {
        let vms = BTreeMap::from([(id(3), busy(6)), (id(4), busy(2))]);
        let mut tree = tree();
        tree.groups[4].quota = Some(Limit::At(Cpus(2.0)));
        let found = shares(&put_together(&tree, &[], &vms));
        assert!(near(&found, &[1.5, 0.5, 0.0]), "{found:?}");
    }

    #[test]
    fn a_vm_whose_group_is_not_known_has_the_weight_of_the_configuration_and_is_told_of() {
        let vms = BTreeMap::from([
            (id(1), busy(8)),
            (
                id(9),
                VmClaim {
                    weight: 300.0,
                    ..busy(8)
                },
            ),
        ]);
        let mut tree = tree();
        let assembled = put_together(&tree, &[], &vms);
        assert!(assembled.guessed.iter().eq([&id(9)]));
        let found = shares(&assembled);
        assert!(near(&found, &[4.0, 4.0, 0.0]), "{found:?}");
        tree.groups[2].weight = None;
        assert_eq!(put_together(&tree, &[], &vms).guessed.len(), 2);
        // With no tree at all, configured weights are all there is.
        let found = shares(&put_together(&GroupTree::default(), &[], &vms));
        assert!(near(&found, &[2.0, 6.0]), "{found:?}");
    }

    #[test]
    fn pinned_vcpus_stay_where_they_may_run() {
        let pins = |lists: &[&str]| {
            lists
                .iter()
                .map(|list| Some(list.parse().unwrap()))
                .collect()
        };
        let one = VmClaim {
            vcpus: pins(&["0", "0"]),
            ..busy(2)
        };
        let two = VmClaim {
            vcpus: pins(&["0", "1"]),
            ..busy(2)
        };
        let vms = BTreeMap::from([(id(1), one), (id(2), two)]);
        let mut tree = tree();
        tree.groups[2].weight = Some(100.0);
        tree.groups[3].quota = Some(Limit::None);
        let assembled = put_together(&tree, &[], &vms);
        assert!(matches!(
            assembled.host.claimants[assembled.vms[&id(1)]].threads,
            Threads::Alike { count: 2, .. }
        ));
        assert!(
            matches!(&assembled.host.claimants[assembled.vms[&id(2)]].threads, Threads::Pinned(sets) if sets.len() == 2)
        );
        let found = shares(&assembled);
        assert!(near(&found[..2], &[1.0, 1.0]), "{found:?}");
    }
}
