//! Whatever fails, and however: the daemon goes on, other VMs are as they were, and operators see what failed.

use super::*;
use crate::ctl::{HostJson, HostState};
use crate::fixture::Tree;
use crate::metrics::page;
use crate::publish::ChannelSettings;
use crate::root::{Fault, Faults};

const PROXMOX: &str = include_str!("../../../tests/fixtures/proxmox.tree");
const JAILER: &str = include_str!("../../../tests/fixtures/firecracker-jailer.tree");
const KUBEVIRT: &str = include_str!("../../../tests/fixtures/kubevirt.tree");
const CENTOS7: &str = include_str!("../../../tests/fixtures/centos7-v1.tree");
const KATA: &str = include_str!("../../../tests/fixtures/kata-v1.tree");
const HYBRID: &str = include_str!("../../../tests/fixtures/hybrid.tree");

/// A channel that listens nowhere.
fn publisher() -> Publisher {
    let settings = ChannelSettings {
        vsock: false,
        ..ChannelSettings::default()
    };
    Publisher::start(settings, 1).unwrap()
}

/// A daemon that looks for everything in each tick.
fn host(root: Root) -> Host {
    let mut config = Config::default();
    config.discover.rescan = Duration::ZERO;
    Host::new(config, root, 1)
}

fn tick(host: &mut Host, publisher: &Publisher) -> HostView {
    host.next_groups = Duration::ZERO;
    host.tick(publisher)
}

/// The host's part of `hintctl list --json`, and the metrics.
fn shown(view: &HostView) -> (HostJson, String) {
    let json = HostJson::from(&HostState::from(view).host);
    serde_json::to_string(&json).unwrap();
    (json, String::from_utf8(page(view).unwrap()).unwrap())
}

fn faulty(tree: &Tree, faults: Faults) -> Root {
    Root::with_faults(tree.path(), Arc::new(faults))
}

#[tokio::test]
async fn whatever_fails_at_any_moment_nothing_panics() {
    let publisher = publisher();
    for text in [PROXMOX, JAILER, KUBEVIRT, CENTOS7, KATA, HYBRID] {
        let tree = Tree::new(text);
        for seed in 0..12 {
            let mut host = host(faulty(&tree, Faults::any("", seed)));
            for _ in 0..5 {
                let view = tick(&mut host, &publisher);
                let (json, metrics) = shown(&view);
                assert_eq!(json.degraded, view.degraded);
                let count = format!("hint_broker_degraded_sources {}\n", view.degraded.len());
                assert!(metrics.contains(&count), "{metrics}");
            }
        }
    }
}

/// One VM's files, and those of the whole host: what is refused, not supported or nonsense is named, and never a zero.
#[tokio::test]
async fn what_fails_is_named_in_the_list_and_counted_in_the_metrics() {
    let publisher = publisher();
    let tree = Tree::new(PROXMOX);
    tree.add(
        "[sys/kernel/debug/kvm]\n[sys/devices/system/node]\nonline = 0\nnode0/cpulist = 0-1\n\
         [sys/devices/system/cpu]\nisolated =\ncpu0/topology/thread_siblings_list = 0\n\
         cpu1/topology/thread_siblings_list = 1\ncpu0/cpu_capacity = 1024\ncpu1/cpu_capacity = 1024\n",
    );
    let whole = tick(&mut host(tree.root.clone()), &publisher);
    assert_eq!(whole.degraded, [""; 0]);
    for path in [
        "proc/stat",
        "proc/self/mountinfo",
        "proc/103/task/1030/comm",
        "proc/103/task/1030/status",
        "proc/103/task/1030/cgroup",
        "proc/103/task/1031/schedstat",
        "sys/devices/system/cpu/online",
        "sys/devices/system/cpu/isolated",
        "cpu1/topology/thread_siblings_list",
        "cpu1/cpu_capacity",
        "sys/devices/system/node/online",
        "node0/cpulist",
        "qemu.slice/103.scope/cpu.weight",
        "qemu.slice/103.scope/cpu.max",
        "fs/cgroup/cpuset.cpus.effective",
    ] {
        for fault in [
            Fault::Error(rustix::io::Errno::ACCESS),
            Fault::Error(rustix::io::Errno::OPNOTSUPP),
            Fault::Garbage,
        ] {
            // A name may be anything, and a mountinfo without hierarchies is one of another host.
            let may_be_so = ["comm", "mountinfo"]
                .iter()
                .any(|name| path.ends_with(name));
            if fault == Fault::Garbage && may_be_so {
                continue;
            }
            let view = tick(
                &mut host(faulty(&tree, Faults::always(path, fault))),
                &publisher,
            );
            let denied = fault == Fault::Error(rustix::io::Errno::ACCESS);
            let (json, metrics) = shown(&view);
            let named = json.degraded.iter().any(|message| message.contains(path))
                || denied
                    && json
                        .degraded
                        .iter()
                        .any(|message| message.contains("look like VMMs"));
            assert!(named, "{path} {fault:?}: {:?}", json.degraded);
            assert!(
                !metrics.contains("hint_broker_degraded_sources 0\n"),
                "{path} {fault:?}"
            );
            // The other VMs are there, with all that is known of them.
            for before in whole.vms.iter().filter(|vm| vm.vm.id.pid != 103) {
                let now = view.vms.iter().find(|vm| vm.vm.id == before.vm.id);
                assert_eq!(now.map(|now| &now.vm), Some(&before.vm), "{path} {fault:?}");
            }
        }
    }
}

/// What a process that ends leaves behind harms nobody, and is no degradation.
#[tokio::test]
async fn files_that_vanish_take_their_own_vm_with_them_at_most() {
    let publisher = publisher();
    let tree = Tree::new(PROXMOX);
    tree.add("[sys/kernel/debug/kvm]\n");
    let whole = tick(&mut host(tree.root.clone()), &publisher);
    for path in [
        "proc/103/",
        "proc/103/stat",
        "proc/103/cmdline",
        "proc/103/fd",
        "proc/103/task",
        "proc/103/task/1031/comm",
        "proc/103/task/1031/status",
        "proc/103/task/1031/cgroup",
        "proc/103/task/1031/schedstat",
        "qemu.slice/103.scope",
    ] {
        for fault in [
            Fault::Error(rustix::io::Errno::NOENT),
            Fault::Error(rustix::io::Errno::SRCH),
            Fault::Empty,
        ] {
            let mut host = host(faulty(&tree, Faults::always(path, fault)));
            let view = tick(&mut host, &publisher);
            // An empty value of a group that is there is nonsense, and named.
            let nonsense = fault == Fault::Empty && path.starts_with("qemu.slice");
            assert_eq!(
                !view.degraded.is_empty(),
                nonsense,
                "{path} {fault:?}: {:?}",
                view.degraded
            );
            for before in whole.vms.iter().filter(|vm| vm.vm.id.pid != 103) {
                let now = view.vms.iter().find(|vm| vm.vm.id == before.vm.id);
                assert_eq!(now.map(|now| &now.vm), Some(&before.vm), "{path} {fault:?}");
            }
        }
    }
}

/// Some kernels print a set of CPUs that they don't keep so, after many blanks.
#[tokio::test]
async fn a_host_without_a_set_of_isolated_cpus_starts_like_any_other() {
    let tree = Tree::new(PROXMOX);
    tree.add("[sys/kernel/debug/kvm]\n");
    let null = format!("{}(null)\n", " ".repeat(240));
    tree.write("sys/devices/system/cpu/isolated", &null);
    let view = tick(&mut host(tree.root.clone()), &publisher());
    assert_eq!(view.degraded, [""; 0]);
    assert_eq!(view.pcpus.to_string(), "0-1");
    tree.write("sys/devices/system/cpu/isolated", "none\n");
    let view = tick(&mut host(tree.root.clone()), &publisher());
    assert!(view.degraded[0].contains("cpu/isolated") && view.degraded[0].contains("none"));
    assert_eq!(view.vms.len(), 3);
}
