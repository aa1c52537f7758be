use std::sync::Arc;

use super::*;
use crate::fixture::{Tree, vm};
use crate::root::{Fault, Faults};

const V2: &str = r"
[proc/self]
mountinfo = 22 1 0:20 / / rw - ext4 /dev/vda1 rw
| 34 22 0:29 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw
[sys/fs/cgroup]
cpu.stat = usage_usec 9000000
cpuset.cpus.effective = 0-7
[sys/fs/cgroup/system.slice]
cpu.weight = 100
cpu.max = max 100000
cpu.idle = 0
cpu.stat = usage_usec 2000000
[sys/fs/cgroup/batch.slice]
cpu.weight = 100
cpu.idle = 1
cpu.stat = usage_usec 1
[sys/fs/cgroup/machine.slice]
cpu.weight = 300
cpu.max = 600000 100000
cpuset.cpus.effective = 2-7
cpu.stat = usage_usec 7000000
[sys/fs/cgroup/machine.slice/machine-qemu\x2d1\x2dweb.scope]
cpu.weight = 200
cpu.max = max 100000
cpu.stat = usage_usec 4000000
[sys/fs/cgroup/machine.slice/machine-qemu\x2d1\x2dweb.scope/libvirt]
cpu.weight = 100
cpu.max = max 100000
cpu.stat = usage_usec 4000000
[sys/fs/cgroup/machine.slice/machine-qemu\x2d1\x2dweb.scope/libvirt/vcpu0]
cpu.max = 50000 100000
[sys/fs/cgroup/machine.slice/machine-qemu\x2d1\x2dweb.scope/libvirt/vcpu1]
cpu.max = max 100000
[sys/fs/cgroup/machine.slice/machine-qemu\x2d1\x2dweb.scope/libvirt/emulator]
cpu.max = max 100000
[sys/fs/cgroup/machine.slice/db.scope]
cpu.weight = 100
cpu.max = 150000 100000
cpu.stat = usage_usec 3000000
@thread 10 11 | CPU 0/KVM | 2-7 | 0::/machine.slice/machine-qemu\x2d1\x2dweb.scope/libvirt/vcpu0
@thread 10 12 | CPU 1/KVM | 2-7 | 0::/machine.slice/machine-qemu\x2d1\x2dweb.scope/libvirt/vcpu1
@thread 20 21 | CPU 0/KVM | 2-7 | 0::/machine.slice/db.scope
";

fn scan(cgroups: &mut Cgroups, vms: &[Vm]) -> GroupTree {
    let scan = cgroups.scan(vms);
    assert_eq!(scan.degraded, [""; 0]);
    scan.tree
}

/// `path: weight quota cpus`, for each group.
fn shown(tree: &GroupTree) -> Vec<String> {
    let number = |value: Option<f64>| value.map_or("?".to_owned(), |value| format!("{value:.2}"));
    let groups = tree.groups.iter().map(|group| {
        let quota = match group.quota {
            None => "?".to_owned(),
            Some(Limit::None) => "max".to_owned(),
            Some(Limit::At(cpus)) => cpus.to_string(),
        };
        let cpus = group
            .cpus
            .as_ref()
            .map_or("?".to_owned(), ToString::to_string);
        let above = group.parent.map(|parent| tree.groups[parent].path.as_str());
        assert_eq!(above.is_none(), group.path.is_empty());
        let vms = if group.holds_vms { " vms" } else { "" };
        format!(
            "{}: {} {quota} {cpus}{vms}",
            group.path,
            number(group.weight)
        )
    });
    groups.collect()
}

fn group_of<'a>(tree: &'a GroupTree, vm: &Vm) -> (&'a str, &'a VmGroup) {
    let found = &tree.vms[&vm.id];
    (tree.groups[found.group].path.as_str(), found)
}

#[test]
fn v2_with_libvirts_groups_has_weights_quotas_and_siblings_level_by_level() {
    let tree = Tree::new(V2);
    let (web, db) = (vm(10, &[11, 12]), vm(20, &[21]));
    let mut cgroups = Cgroups::new(tree.root.clone());
    let found = scan(&mut cgroups, &[web.clone(), db.clone()]);
    assert_eq!(
        shown(&found),
        [
            ": ? max 0-7 vms",
            "batch.slice: 0.29 max 0-7",
            "machine.slice: 300.00 6.00 2-7 vms",
            "machine.slice/db.scope: 100.00 1.50 2-7 vms",
            r"machine.slice/machine-qemu\x2d1\x2dweb.scope: 200.00 max 2-7 vms",
            r"machine.slice/machine-qemu\x2d1\x2dweb.scope/libvirt: 100.00 max 2-7 vms",
            "system.slice: 100.00 max 0-7",
        ]
    );
    let (path, group) = group_of(&found, &web);
    assert_eq!(
        path,
        r"machine.slice/machine-qemu\x2d1\x2dweb.scope/libvirt"
    );
    assert_eq!(group.vcpu_quota, Some(Limit::At(Cpus(1.5))));
    assert!(group.shared_with.is_empty() && !group.scattered);
    let (path, group) = group_of(&found, &db);
    assert_eq!(path, "machine.slice/db.scope");
    assert_eq!(group.vcpu_quota, Some(Limit::None));
    let seconds: Vec<Option<u64>> = cgroups
        .usage(&found)
        .into_iter()
        .map(|usage| usage.map(|usage| usage.as_secs()))
        .collect();
    assert_eq!(
        seconds,
        [
            Some(9),
            Some(0),
            Some(7),
            Some(3),
            Some(4),
            Some(4),
            Some(2)
        ]
    );
}

#[test]
fn changes_by_virsh_and_systemd_are_followed() {
    let tree = Tree::new(V2);
    let (web, db) = (vm(10, &[11, 12]), vm(20, &[21]));
    let vms = [web.clone(), db.clone()];
    let mut cgroups = Cgroups::new(tree.root.clone());
    scan(&mut cgroups, &vms);
    tree.add(
        r"
        [sys/fs/cgroup/machine.slice/db.scope]
        cpu.weight = 400
        cpu.max = max 100000
        [sys/fs/cgroup/machine.slice/machine-qemu\x2d1\x2dweb.scope/libvirt/vcpu1]
        cpu.max = 25000 100000
        [sys/fs/cgroup/build.slice]
        cpu.weight = 50
        cpu.stat = usage_usec 0
        ",
    );
    tree.remove("sys/fs/cgroup/batch.slice");
    let found = scan(&mut cgroups, &vms);
    let shown = shown(&found);
    assert!(shown.contains(&"machine.slice/db.scope: 400.00 max 2-7 vms".to_owned()));
    assert!(shown.contains(&"build.slice: 50.00 max 0-7".to_owned()));
    assert!(!shown.iter().any(|group| group.starts_with("batch")));
    assert_eq!(
        group_of(&found, &web).1.vcpu_quota,
        Some(Limit::At(Cpus(0.75)))
    );

    // A VM that is moved is found in its new group; its old one goes with it.
    tree.add("@thread 20 21 | CPU 0/KVM | 0-7 | 0::/build.slice");
    tree.remove("sys/fs/cgroup/machine.slice/db.scope");
    let found = scan(&mut cgroups, &vms);
    assert_eq!(group_of(&found, &db).0, "build.slice");
    let found = scan(&mut cgroups, &[web]);
    assert_eq!(found.vms.len(), 1);
}

#[test]
fn v1_has_its_controllers_apart_or_together() {
    for (cpu, cpuacct) in [("cpu", "cpuacct"), ("cpu,cpuacct", "cpu,cpuacct")] {
        let mounts = if cpu == cpuacct {
            format!("32 31 0:29 / /c/{cpu} rw - cgroup cgroup rw,{cpu}")
        } else {
            "32 31 0:29 / /c/cpu rw - cgroup cgroup rw,cpu\n| 33 31 0:30 / /c/cpuacct rw - cgroup cgroup rw,cpuacct".to_owned()
        };
        let vm_path = r"machine.slice/machine-qemu\x2d1\x2dweb.scope";
        let tree = Tree::new(&format!(
            r"
            [proc/self]
            mountinfo = {mounts}
            | 34 31 0:31 / /c/cpuset rw - cgroup cgroup rw,cpuset
            | 35 31 0:32 / /c/unified rw - cgroup2 cgroup2 rw
            | 36 31 0:33 / /c/systemd rw - cgroup cgroup rw,name=systemd
            [c/{cpu}]
            cpu.shares = 1024
            cpu.cfs_quota_us = -1
            cpu.cfs_period_us = 100000
            [c/{cpuacct}]
            cpuacct.usage = 5000000000
            [c/cpuset]
            cpuset.effective_cpus = 0-3
            [c/{cpu}/machine.slice]
            cpu.shares = 2048
            cpu.cfs_quota_us = -1
            cpu.cfs_period_us = 100000
            [c/{cpu}/{vm_path}]
            cpu.shares = 512
            cpu.cfs_quota_us = 350000
            cpu.cfs_period_us = 100000
            [c/{cpuacct}/{vm_path}]
            cpuacct.usage = 2000000000
            [c/cpuset/{vm_path}]
            cpuset.cpus = 1-2
            [c/{cpu}/{vm_path}/vcpu0]
            cpu.shares = 1024
            cpu.cfs_quota_us = 20000
            cpu.cfs_period_us = 100000
            [c/{cpu}/{vm_path}/vcpu1]
            cpu.shares = 1024
            cpu.cfs_quota_us = 150000
            cpu.cfs_period_us = 100000
            [c/{cpu}/system.slice]
            cpu.shares = 1024
            cpu.cfs_quota_us = -1
            [c/unified/{vm_path}]
            cpu.stat = usage_usec 1
            [c/unified/machine.slice]
            cpu.stat = usage_usec 3000000
            @thread 10 11 | CPU 0/KVM | 1 | 7:name=systemd:/x\n4:{cpu}:/{vm_path}/vcpu0\n0::/{vm_path}
            @thread 10 12 | CPU 1/KVM | 2 | 7:name=systemd:/x\n4:{cpu}:/{vm_path}/vcpu1\n0::/{vm_path}
            "
        ));
        let web = vm(10, &[11, 12]);
        let mut cgroups = Cgroups::new(tree.root.clone());
        let found = scan(&mut cgroups, std::slice::from_ref(&web));
        assert_eq!(
            shown(&found),
            [
                ": ? max 0-3 vms".to_owned(),
                "machine.slice: 200.00 max 0-3 vms".to_owned(),
                format!("{vm_path}: 50.00 3.50 1-2 vms"),
                "system.slice: 100.00 max 0-3".to_owned(),
            ]
        );
        let (path, group) = group_of(&found, &web);
        assert_eq!(path, vm_path);
        // One vCPU never has more than one pCPU.
        assert_eq!(group.vcpu_quota, Some(Limit::At(Cpus(1.2))));
        let usage = cgroups.usage(&found);
        assert_eq!(usage[0], Some(Duration::from_secs(5)));
        assert_eq!(usage[1], Some(Duration::from_secs(3)), "v2 counts it");
        assert_eq!(usage[2], Some(Duration::from_secs(2)));
        assert_eq!(usage[3], None, "no such group there: not known");
    }
}

#[test]
fn a_group_that_the_controller_is_not_passed_on_to_counts_as_threads_of_the_group_above() {
    let tree = Tree::new(
        r"
        [proc/self]
        mountinfo = 34 22 0:29 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw
        [sys/fs/cgroup]
        cpu.stat = usage_usec 1
        [sys/fs/cgroup/user.slice]
        cpu.weight = 100
        cpu.stat = usage_usec 1
        [sys/fs/cgroup/user.slice/a.scope]
        cpu.stat = usage_usec 1
        [sys/fs/cgroup/user.slice/b.scope]
        cpu.stat = usage_usec 1
        # cgroup.procs of a threaded group can't be read; nobody asks for it
        cgroup.type = threaded
        @thread 10 11 | CPU 0/KVM | 0-7 | 0::/user.slice/a.scope
        @thread 20 21 | CPU 0/KVM | 0-7 | 0::/user.slice/b.scope
        ",
    );
    let (a, b) = (vm(10, &[11]), vm(20, &[21]));
    let found = scan(
        &mut Cgroups::new(tree.root.clone()),
        &[a.clone(), b.clone()],
    );
    assert_eq!(
        shown(&found),
        [": ? max ? vms", "user.slice: 100.00 max ? vms"]
    );
    assert_eq!(group_of(&found, &a).1.shared_with, [b.id]);
    assert_eq!(group_of(&found, &b).1.shared_with, [a.id]);
}

#[test]
fn vms_in_one_group_or_in_the_root_are_flagged() {
    let tree = Tree::new(V2);
    tree.add(
        r"
        @thread 20 21 | CPU 0/KVM | 0-7 | 0::/
        @thread 30 31 | CPU 0/KVM | 0-7 | 0::/
        @thread 40 41 | CPU 0/KVM | 0-7 | 0::/system.slice
        @thread 40 42 | CPU 1/KVM | 0-7 | 0::/batch.slice
        ",
    );
    let (a, b, wide) = (vm(20, &[21]), vm(30, &[31]), vm(40, &[41, 42]));
    let vms = [a.clone(), b.clone(), wide.clone()];
    let found = scan(&mut Cgroups::new(tree.root.clone()), &vms);
    let (path, group) = group_of(&found, &a);
    assert_eq!((path, group.scattered), ("", false));
    assert_eq!(group.shared_with, [b.id, wide.id]);
    assert!(group_of(&found, &wide).1.scattered);
}

#[test]
fn half_a_vm_is_none_and_the_others_are_unharmed() {
    let tree = Tree::new(V2);
    let (web, db) = (vm(10, &[11, 12]), vm(20, &[21]));
    let mut cgroups = Cgroups::new(tree.root.clone());
    tree.write("proc/10/task/12/cgroup", "");
    let found = scan(&mut cgroups, &[web.clone(), db.clone()]);
    assert!(found.vms.keys().eq([&db.id]));
    tree.write(
        "proc/10/task/12/cgroup",
        "0::/machine.slice/gone (deleted)\n",
    );
    let found = scan(&mut cgroups, &[web.clone(), db.clone()]);
    assert!(found.vms.keys().eq([&db.id]));
    tree.write("proc/10/task/12/cgroup", "nonsense\n");
    let bad = cgroups.scan(&[web, db.clone()]);
    assert!(bad.tree.vms.keys().eq([&db.id]));
    assert_eq!(bad.degraded.len(), 1);
    assert!(
        bad.degraded[0].contains("proc/10/task/12/cgroup"),
        "{:?}",
        bad.degraded
    );
}

#[test]
fn values_that_mean_nothing_are_unknown_and_named() {
    let tree = Tree::new(V2);
    tree.write("sys/fs/cgroup/machine.slice/db.scope/cpu.weight", "x\n");
    tree.write("sys/fs/cgroup/machine.slice/db.scope/cpu.max", "?\n");
    let scan = Cgroups::new(tree.root.clone()).scan(&[vm(20, &[21])]);
    assert!(
        shown(&scan.tree).contains(&"machine.slice/db.scope: ? ? 2-7 vms".to_owned()),
        "{:?}",
        scan.tree
    );
    assert_eq!(scan.degraded.len(), 1, "one cause, one message");
    assert!(
        scan.degraded[0].contains("db.scope/cpu.weight"),
        "{:?}",
        scan.degraded
    );
}

#[test]
fn a_host_without_the_controller_or_outside_of_what_is_seen_says_so() {
    let tree = Tree::new(V2);
    tree.write(
        "proc/self/mountinfo",
        "22 1 0:20 / / rw - ext4 /dev/vda1 rw\n",
    );
    let mut cgroups = Cgroups::new(tree.root.clone());
    let scan = cgroups.scan(&[vm(20, &[21])]);
    assert_eq!(scan.tree, GroupTree::default());
    assert!(
        scan.degraded[0].contains("no cgroup hierarchy"),
        "{:?}",
        scan.degraded
    );
    tree.write(
        "proc/self/mountinfo",
        "34 22 0:29 /kubepods /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    );
    let scan = cgroups.scan(&[vm(20, &[21])]);
    assert!(scan.tree.vms.is_empty());
    assert!(
        scan.degraded[0].contains("cgroup namespace"),
        "{:?}",
        scan.degraded
    );
    tree.remove("proc/self/mountinfo");
    let scan = Cgroups::new(tree.root.clone()).scan(&[vm(20, &[21])]);
    assert!(
        scan.degraded[0].contains("mountinfo"),
        "{:?}",
        scan.degraded
    );
}

#[test]
fn weights_written_on_the_scale_of_v1_are_taken_as_they_are() {
    let tree = Tree::new(V2);
    let mut vms = Vec::new();
    for (pid, name, weight) in [
        (101, "101.scope", 100),
        (102, "102.scope", 100),
        (103, "103.scope", 1024),
    ] {
        tree.add(&format!(
            "[sys/fs/cgroup/qemu.slice]\ncpu.weight = 100\ncpu.stat = usage_usec 1\n\
             [sys/fs/cgroup/qemu.slice/{name}]\ncpu.weight = {weight}\ncpu.stat = usage_usec 1\n\
             @thread {pid} {pid} | CPU 0/KVM | 0-7 | 0::/qemu.slice/{name}"
        ));
        vms.push(vm(pid, &[pid]));
    }
    let found = scan(&mut Cgroups::new(tree.root.clone()), &vms);
    let weight = |vm: &Vm| found.groups[found.vms[&vm.id].group].weight;
    assert_eq!(
        vms.iter().map(weight).collect::<Vec<_>>(),
        [Some(100.0), Some(100.0), Some(1024.0)]
    );
}

#[test]
fn faults_of_one_vm_or_group_harm_no_other() {
    let tree = Tree::new(V2);
    let (web, db) = (vm(10, &[11, 12]), vm(20, &[21]));
    let vms = [web.clone(), db.clone()];
    let whole = scan(&mut Cgroups::new(tree.root.clone()), &vms);
    let described = |tree: &GroupTree| {
        let (path, group) = group_of(tree, &web);
        let weights: Vec<Option<f64>> =
            std::iter::successors(Some(group.group), |at| tree.groups[*at].parent)
                .map(|at| tree.groups[at].weight)
                .collect();
        (path.to_owned(), group.vcpu_quota, weights)
    };
    for seed in 0..50 {
        for within in ["proc/20/", "db.scope", "batch.slice"] {
            let root = Root::with_faults(tree.path(), Arc::new(Faults::any(within, seed)));
            let mut cgroups = Cgroups::new(root);
            for _ in 0..3 {
                let found = cgroups.scan(&vms).tree;
                assert_eq!(described(&found), described(&whole), "{within} {seed}");
                cgroups.usage(&found);
            }
        }
        // Everything may fail, and nothing panics.
        let mut cgroups = Cgroups::new(Root::with_faults(
            tree.path(),
            Arc::new(Faults::any("", seed)),
        ));
        for _ in 0..5 {
            let found = cgroups.scan(&vms).tree;
            assert!(found.vms.values().all(|vm| vm.group < found.groups.len()));
            cgroups.usage(&found);
        }
    }
}

#[test]
fn what_is_refused_is_unknown_and_named() {
    let tree = Tree::new(V2);
    let (web, db) = (vm(10, &[11, 12]), vm(20, &[21]));
    for (fault, weight, named) in [
        (Fault::Error(rustix::io::Errno::ACCESS), None, true),
        (Fault::Error(rustix::io::Errno::OPNOTSUPP), None, true),
        (Fault::Garbage, None, true),
        (Fault::Half, Some(10.0), false),
        (Fault::Empty, None, true),
    ] {
        let faults = Arc::new(Faults::always("db.scope/cpu.weight", fault));
        let scan =
            Cgroups::new(Root::with_faults(tree.path(), faults)).scan(&[web.clone(), db.clone()]);
        let (_, group) = group_of(&scan.tree, &db);
        // "100", cut in its middle, is a number still: nobody can tell.
        assert_eq!(scan.tree.groups[group.group].weight, weight, "{fault:?}");
        assert_eq!(
            !scan.degraded.is_empty(),
            named,
            "{fault:?}: {:?}",
            scan.degraded
        );
        assert_eq!(scan.tree.vms.len(), 2);
    }
}
