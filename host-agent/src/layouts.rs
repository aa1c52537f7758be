//! Hosts as they are found in the field, from discovery to CPU groups: what is recognised, and what faults of files do to it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::discover::{Discovery, Found, Scan};
use crate::entitle::Engine;
use crate::entitle::assemble::{Observed, VmClaim, assemble};
use crate::fixture::Tree;
use crate::model::{Cpus, GroupTree, Limit, Vcpus};
use crate::observe::Observer;
use crate::observe::cgroups::Cgroups;
use crate::root::{Fault, Faults, Root};

const CENTOS7: &str = include_str!("../tests/fixtures/centos7-v1.tree");
const HYBRID: &str = include_str!("../tests/fixtures/hybrid.tree");
const KUBEVIRT: &str = include_str!("../tests/fixtures/kubevirt.tree");
const PROXMOX: &str = include_str!("../tests/fixtures/proxmox.tree");
const KATA: &str = include_str!("../tests/fixtures/kata-v1.tree");
const JAILER: &str = include_str!("../tests/fixtures/firecracker-jailer.tree");

/// What is seen of a host.
struct Seen {
    found: Vec<Found>,
    groups: GroupTree,
    degraded: Vec<String>,
}

fn look(root: &Root) -> Seen {
    let Scan {
        vms: found,
        degraded,
    } = Discovery::new(root.clone(), false).scan();
    let vms: Vec<_> = found.iter().map(|found| found.vm.clone()).collect();
    let scan = Cgroups::new(root.clone()).scan(&vms);
    let mut observer = Observer::new(root.clone());
    let sample = observer.sample(&vms, || Duration::ZERO, true);
    let topology = observer.topology();
    let others = [&scan.degraded, &sample.degraded, &topology.degraded];
    let others = others.into_iter().flatten().cloned();
    Seen {
        degraded: degraded.into_iter().chain(others).collect(),
        found,
        groups: scan.tree,
    }
}

impl Seen {
    /// `name uuid vcpus`, in the order of PIDs.
    fn vms(&self) -> Vec<String> {
        let vms = self.found.iter().map(|found| {
            let vcpus = match &found.vm.vcpus {
                Vcpus::Known(threads) => format!("{threads:?}"),
                Vcpus::Unclassified(why) => why.clone(),
            };
            format!("{} {vcpus}", found.vm.name)
        });
        vms.collect()
    }

    /// What holds for a VM from its group to the root: each weight, and the least of all quotas.
    fn entitlement(&self, pid: u32) -> (Vec<Option<f64>>, Option<Limit>) {
        let (_, place) = self
            .groups
            .vms
            .iter()
            .find(|(id, _)| id.pid == pid)
            .unwrap();
        let line: Vec<_> =
            std::iter::successors(Some(place.group), |at| self.groups.groups[*at].parent)
                .map(|at| &self.groups.groups[at])
                .collect();
        let weights = line
            .iter()
            .filter(|group| group.parent.is_some())
            .map(|group| group.weight);
        let quota = line
            .iter()
            .map(|group| group.quota)
            .fold(place.vcpu_quota, |least, quota| Some(least?.least(quota?)));
        (weights.collect(), quota)
    }

    fn group(&self, pid: u32) -> &str {
        let (_, place) = self
            .groups
            .vms
            .iter()
            .find(|(id, _)| id.pid == pid)
            .unwrap();
        &self.groups.groups[place.group].path
    }

    /// The groups without VMs.
    fn host_work(&self) -> Vec<&str> {
        let others = self.groups.groups.iter().filter(|group| !group.holds_vms);
        others.map(|group| group.path.as_str()).collect()
    }
}

fn at(cpus: f64) -> Option<Limit> {
    Some(Limit::At(Cpus(cpus)))
}

impl Seen {
    /// What each VM gets when all of them want all their vCPUs, in the order of PIDs.
    fn shares(&self, pcpus: u32) -> Vec<f64> {
        let claim = |found: &Found| {
            let all = Cpus::from(u32::try_from(found.affinity.len()).unwrap());
            VmClaim {
                demand: all,
                shown: all,
                floor: Cpus::ZERO,
                weight: 100.0,
                vcpus: found.affinity.values().cloned().map(Some).collect(),
            }
        };
        let vms = self
            .found
            .iter()
            .map(|found| (found.vm.id, claim(found)))
            .collect();
        let assembled = assemble(&Observed {
            pcpus: &(0..pcpus).map(|cpu| (cpu, Cpus(1.0))).collect(),
            tree: &self.groups,
            used: &[],
            vms: &vms,
        });
        assert!(assembled.guessed.is_empty());
        let mut engine = Engine::default();
        let division = engine.divide(&assembled.host);
        assert!(division.faults.is_empty(), "{:?}", division.faults);
        let share = |claimant: &usize| division.claimants[*claimant].as_ref().unwrap().share.0;
        assembled.vms.values().map(share).collect()
    }
}

fn near(found: &[f64], wanted: &[f64]) -> bool {
    found.len() == wanted.len() && found.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-6)
}

/// What is seen of a fixture; nothing but debugfs is missing in any.
fn look_at(fixture: &str) -> Seen {
    let seen = look(&Tree::new(fixture).root);
    let only_debugfs = seen.degraded.len() == 1 && seen.degraded[0].contains("debug/kvm");
    assert!(only_debugfs, "{:?}", seen.degraded);
    seen
}

#[test]
fn centos_7_with_v1() {
    let seen = look_at(CENTOS7);
    assert_eq!(seen.vms(), ["vm01-web {0: 2310, 1: 2311}"]);
    assert_eq!(
        seen.group(2301),
        r"machine.slice/machine-qemu\x2d37\x2dvm01\x2dweb.scope"
    );
    assert_eq!(
        seen.entitlement(2301),
        (vec![Some(200.0), Some(100.0)], at(1.0))
    );
    assert!(near(&seen.shares(4), &[1.0]), "{:?}", seen.shares(4));
    assert_eq!(seen.host_work(), ["system.slice"]);
    // Each vCPU is pinned elsewhere.
    let found = &seen.found[0];
    assert_eq!(found.allowed, None);
    let pins: Vec<String> = found
        .affinity
        .iter()
        .map(|(vcpu, cpus)| format!("{vcpu}: {cpus}"))
        .collect();
    assert_eq!(pins, ["0: 0", "1: 1"]);
}

#[test]
fn a_hybrid_host_where_only_libvirts_groups_tell() {
    let seen = look_at(HYBRID);
    assert_eq!(seen.vms(), ["db {0: 901, 1: 902}"]);
    assert_eq!(seen.group(900), "machine/qemu-1-db.libvirt-qemu");
    assert_eq!(
        seen.entitlement(900),
        (vec![Some(50.0), Some(100.0)], at(1.5))
    );
}

#[test]
fn kubevirt_with_v2() {
    let seen = look_at(KUBEVIRT);
    assert_eq!(seen.vms(), ["default_testvm {0: 5007, 1: 5008}"]);
    assert!(
        seen.group(5000).ends_with("cri-containerd-77.scope"),
        "{}",
        seen.group(5000)
    );
    let weights = [8.0, 8.0, 40.0, 157.0].map(Some).to_vec();
    assert_eq!(seen.entitlement(5000), (weights, at(2.0)));
    assert!(near(&seen.shares(4), &[2.0]), "{:?}", seen.shares(4));
    let others: Vec<&str> = seen
        .host_work()
        .into_iter()
        .map(|path| path.rsplit('/').next().unwrap())
        .collect();
    assert_eq!(
        others,
        [
            "kubepods-besteffort.slice",
            "cri-containerd-88.scope",
            "kubepods-burstable-pod2c.slice",
            "system.slice"
        ]
    );
}

#[test]
fn proxmox_with_weights_of_two_scales_and_a_name_twice() {
    let seen = look_at(PROXMOX);
    assert_eq!(
        seen.vms(),
        ["copy {0: 1010}", "copy {0: 1020}", "big {0: 1030, 1: 1031}"]
    );
    let uuids: Vec<&str> = seen
        .found
        .iter()
        .filter_map(|found| found.vm.uuid.as_deref())
        .collect();
    assert_eq!(uuids.len(), 3);
    assert_eq!(
        seen.entitlement(101),
        (vec![Some(100.0), Some(100.0)], Some(Limit::None))
    );
    assert_eq!(
        seen.entitlement(102),
        (vec![Some(100.0), Some(100.0)], at(1.0))
    );
    assert_eq!(
        seen.entitlement(103),
        (vec![Some(1024.0), Some(100.0)], Some(Limit::None))
    );
    let due = [100.0, 100.0, 1024.0].map(|weight| 2.0 * weight / 1224.0);
    assert!(near(&seen.shares(2), &due), "{:?}", seen.shares(2));
}

#[test]
fn kata_with_its_vcpus_apart_from_the_rest() {
    let seen = look_at(KATA);
    assert_eq!(seen.vms(), ["sandbox-ab12 {0: 707}"]);
    assert_eq!(seen.found[0].vm.cid, Some(2_684_318_441));
    assert_eq!(seen.group(700), "kubepods/pod9/kata_ab12");
    assert_eq!(
        seen.entitlement(700),
        (vec![Some(100.0), Some(100.0), Some(200.0)], at(1.0))
    );
    assert_eq!(seen.host_work(), ["kata_overhead"]);
}

#[test]
fn firecrackers_of_two_ages_under_the_jailer() {
    let seen = look_at(JAILER);
    assert_eq!(
        seen.vms(),
        ["551e7604 {0: 803, 1: 802}", "a81c0f17 {0: 812}"]
    );
    assert_eq!(
        seen.entitlement(800),
        (vec![Some(50.0), Some(100.0)], at(0.5))
    );
    assert_eq!(
        seen.entitlement(810),
        (vec![Some(150.0), Some(100.0)], Some(Limit::None))
    );
    assert!(near(&seen.shares(2), &[0.5, 1.0]), "{:?}", seen.shares(2));
}

#[test]
fn cloud_hypervisors_vsock_is_taken_once_it_is_there() {
    let tree = Tree::new(PROXMOX);
    tree.add(
        r"
        @process 300 | cloud-hypervisor\0--vsock\0cid=3,socket=/run/ch.sock
        @kvm 300
        @thread 300 301 | vcpu0 | 0-1 | 0::/machine.slice/machine-ch\x2d1\x2dmail.scope
        [proc/300]
        cgroup = 0::/machine.slice/machine-ch\x2d1\x2dmail.scope
        [run]
        ",
    );
    let socket = || {
        let seen = look(&tree.root);
        let vm = &seen
            .found
            .iter()
            .find(|found| found.vm.id.pid == 300)
            .unwrap()
            .vm;
        assert_eq!((vm.name.as_str(), vm.cid), ("mail", None));
        vm.hybrid_socket.clone()
    };
    assert_eq!(socket(), None);
    let _vsock = std::os::unix::net::UnixListener::bind(tree.path().join("run/ch.sock")).unwrap();
    assert_eq!(
        socket().as_deref(),
        Some(std::path::Path::new("/run/ch.sock"))
    );
}

#[test]
fn a_vm_that_is_migrated_on_its_host_is_two_and_said_to_be() {
    let tree = Tree::new(PROXMOX);
    let uuid = "00000000-0000-4000-8000-000000000001";
    for (pid, more) in [(201, r"\0-S"), (202, "")] {
        tree.add(&format!(
            r"
            @process {pid} | qemu-system-x86_64{more}\0-name\0v1\0-uuid\0{uuid}\0-daemonize\0-cpu\0host
            @kvm {pid}
            @thread {pid} {pid}1 | CPU 0/KVM | 0-1 | 0::/qemu.slice/101.scope
            "
        ));
    }
    let seen = look(&tree.root);
    let same: Vec<u32> = seen
        .found
        .iter()
        .filter(|found| found.vm.uuid.as_deref() == Some(uuid))
        .map(|found| found.vm.id.pid)
        .collect();
    assert_eq!(same, [201, 202]);
    assert!(
        seen.degraded
            .iter()
            .any(|message| message.contains("VMs 201-2010 and 202-2020 have the same UUID")),
        "{:?}",
        seen.degraded
    );
    assert_eq!(
        seen.groups
            .vms
            .values()
            .filter(|vm| vm.shared_with.len() == 2)
            .count(),
        3
    );
}

#[test]
fn a_vm_whose_files_fail_harms_no_other_and_shows() {
    for seed in 0..60 {
        let tree = Tree::new(PROXMOX);
        let faults = Arc::new(Faults::any("proc/103/", seed));
        let root = Root::with_faults(tree.path(), faults);
        let mut discovery = Discovery::new(root.clone(), false);
        let mut cgroups = Cgroups::new(root.clone());
        let mut observer = Observer::new(root);
        for tick in 1..4 {
            let scan = discovery.scan();
            let vms: Vec<_> = scan.vms.iter().map(|found| found.vm.clone()).collect();
            let groups = cgroups.scan(&vms).tree;
            let sample = observer.sample(&vms, || Duration::from_secs(tick), true);
            for (pid, tid) in [(101, 1010), (102, 1020)] {
                let found = scan
                    .vms
                    .iter()
                    .find(|found| found.vm.id.pid == pid)
                    .unwrap();
                assert_eq!(found.vm.vcpus, Vcpus::Known(BTreeMap::from([(0, tid)])));
                assert_eq!(
                    groups.groups[groups.vms[&found.vm.id].group].path,
                    format!("qemu.slice/{pid}.scope")
                );
                assert!(sample.vms[&found.vm.id].threads[&tid].is_some());
            }
        }
    }
}

#[test]
fn a_vm_that_may_not_be_read_or_says_nonsense_is_left_out_and_named() {
    let tree = Tree::new(PROXMOX);
    for fault in [Fault::Error(rustix::io::Errno::OPNOTSUPP), Fault::Garbage] {
        let faults = Arc::new(Faults::always("proc/103/task/1030/status", fault));
        let seen = look(&Root::with_faults(tree.path(), faults));
        assert_eq!(seen.found.len(), 2, "{fault:?}");
        assert!(
            seen.degraded
                .iter()
                .any(|message| message.contains("proc/103/task/1030/status")),
            "{fault:?}: {:?}",
            seen.degraded
        );
    }
}
