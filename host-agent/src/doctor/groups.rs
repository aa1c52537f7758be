//! Probe: has each VM a CPU group of its own, with a weight that fits the configuration?

use std::collections::BTreeMap;

use super::{Notes, Patient, all_called, called};
use crate::model::{GroupTree, Vm};

pub(super) fn look(patient: &Patient<'_>, notes: &mut Notes) {
    for message in &patient.groups.degraded {
        notes.warn(
            message.clone(),
            "as it says; the broker goes by the weights of its configuration",
        );
    }
    let tree = &patient.groups.tree;
    let placed: Vec<&Vm> = patient
        .vms
        .iter()
        .filter(|vm| tree.vms.contains_key(&vm.id))
        .collect();
    let mut together: BTreeMap<usize, Vec<&Vm>> = BTreeMap::new();
    for vm in &placed {
        together.entry(tree.vms[&vm.id].group).or_default().push(vm);
    }
    let mut alone = 0;
    for (group, vms) in &together {
        let path = &tree.groups[*group].path;
        if path.is_empty() {
            notes.bad(
                format!("{}: in no CPU group of their own, where the kernel divides by thread and folding loses share", all_called(vms.iter().copied())),
                "start each VM in a cgroup of its own: libvirt does, and systemd-run --scope",
            );
        } else if vms.len() > 1 {
            notes.bad(
                format!("{}: in one CPU group, {path}, where the kernel divides by thread and one that folds loses share to the others", all_called(vms.iter().copied())),
                "give each VM a cgroup of its own",
            );
        } else {
            alone += 1;
        }
    }
    for vm in placed.iter().filter(|vm| tree.vms[&vm.id].scattered) {
        notes.warn(
            format!(
                "the vCPU threads of {} are in different CPU groups",
                called(vm)
            ),
            "put them into one cgroup, or into groups vcpuN of one",
        );
    }
    if alone > 0 {
        notes.good(format!("{alone} VMs have a CPU group of their own"));
    }
    other_proportions(patient, tree, &placed, notes);
}

/// Siblings whose weights are in other proportions than those that the broker goes by: the configuration's, where it has some.
fn other_proportions(patient: &Patient<'_>, tree: &GroupTree, placed: &[&Vm], notes: &mut Notes) {
    let mut siblings: BTreeMap<Option<usize>, Vec<(&Vm, f64)>> = BTreeMap::new();
    for vm in placed {
        let group = &tree.groups[tree.vms[&vm.id].group];
        if let (Some(weight), Some(_)) = (group.weight, group.parent) {
            let used = patient.config.policy(vm).weight.map_or(weight, f64::from);
            let beside = siblings.entry(group.parent).or_default();
            beside.push((vm, weight / used));
        }
    }
    for beside in siblings.values() {
        // The usual one is taken for right: a default of the other cgroup version stands out.
        let mut ratios: Vec<f64> = beside.iter().map(|(_, ratio)| *ratio).collect();
        ratios.sort_by(f64::total_cmp);
        let usual = ratios[(ratios.len() - 1) / 2];
        let odd: Vec<&Vm> = beside
            .iter()
            .filter(|(_, ratio)| (ratio / usual - 1.0).abs() > 0.1)
            .map(|(vm, _)| *vm)
            .collect();
        if !odd.is_empty() {
            notes.warn(
                format!("{}: weight of the CPU group in another proportion to its siblings than in the configuration", all_called(odd)),
                "set both alike: cpu.weight or cpu.shares (1024 is usual in v1, 100 in v2), and [[vm]] weight; or leave that out",
            );
        }
    }
}
