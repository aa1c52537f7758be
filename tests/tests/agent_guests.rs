//! The agent in guests of many shapes: cores, uneven nodes, CPUs that go, pinned tasks, isolated CPUs, a guest that is stopped.
//! The broker is real, and its configuration fixes how many vCPUs are usable.

#![allow(
    clippy::unwrap_used,
    reason = "clippy exempts test functions but not the helpers of a test file"
)]

use std::thread;
use std::time::{Duration, Instant};

use hint_proto::CpuSet;
use lab::skip::{self, Need};
use lab::{Broker, BrokerSpec, Guest, GuestSpec, Kernel, Topology, assets, lock};
use serde_json::json;

const SOON: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(5);
/// What a guest that ran out of its lease may need beyond it on a busy machine.
const SLACK: Duration = Duration::from_secs(10);
const RECORD: &str = "/run/hint-agent/restore.json";

fn cpus(list: &str) -> CpuSet {
    CpuSet::parse_list(list).unwrap()
}

fn broker(guest: &str, usable: u32) -> Broker {
    Broker::start(&BrokerSpec {
        mode: "enforce",
        lease: LEASE,
        more: format!("[[vm]]\nname = \"{guest}\"\nusable = {usable}\n"),
    })
    .unwrap()
}

fn with_agent(spec: GuestSpec) -> GuestSpec {
    GuestSpec {
        files: vec![(assets::agent().unwrap(), "/bin/hint-agent".into())],
        ..spec
    }
}

#[track_caller]
fn wait_for_work_cpus(guest: &Guest, list: &str) {
    let found = guest
        .wait_for(SOON, Guest::work_cpus, |found| *found == cpus(list))
        .unwrap();
    assert_eq!(found.to_string(), list, "{}", guest.agent_log().unwrap());
}

/// The texts of all groups' CPUs.
fn texts(guest: &Guest) -> String {
    guest
        .sh("head -v -c 4096 /sys/fs/cgroup/*/cpuset.cpus")
        .unwrap()
}

#[track_caller]
fn wait_for_texts(guest: &Guest, wanted: &str) {
    let found = guest
        .wait_for(SOON, |guest| Ok(texts(guest)), |found| found == wanted)
        .unwrap();
    assert_eq!(found, wanted, "{}", guest.agent_log().unwrap());
    assert_eq!(guest.run(&format!("test -e {RECORD}")).unwrap().status, 1);
}

/// Gives the groups texts of their own, so that every byte of them must come back.
fn own_texts(guest: &Guest, all: &str) -> String {
    guest
        .sh(&format!(
            "mkdir /sys/fs/cgroup/narrow /sys/fs/cgroup/empty
             echo {all} >/sys/fs/cgroup/workload/cpuset.cpus
             echo 1-3 >/sys/fs/cgroup/narrow/cpuset.cpus"
        ))
        .unwrap();
    texts(guest)
}

#[test]
fn whole_cores_of_uneven_nodes_and_exact_texts_after_whatever_ends_the_fold() {
    const NAME: &str = "whole_cores_of_uneven_nodes_and_exact_texts_after_whatever_ends_the_fold";
    if !skip::can_run(NAME, &[Need::Guests]) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let guest = Guest::boot(&with_agent(GuestSpec {
        vcpus: 12,
        memory_mib: 768,
        numa_nodes: 4,
        node_vcpus: vec![6, 4, 0, 2],
        topology: Some(Topology {
            sockets: 6,
            cores: 1,
            threads: 2,
        }),
        ..GuestSpec::named("uneven")
    }))
    .unwrap();
    // Linux numbers the nodes with CPUs first.
    for (node, list) in ["0-5", "6-9", "10-11", ""].iter().enumerate() {
        let found = guest
            .sh(&format!("cat /sys/devices/system/node/node{node}/cpulist"))
            .unwrap();
        assert_eq!(found.trim(), *list, "node {node}");
    }
    let found = own_texts(&guest, "0-11");
    let pinned = guest
        .spawn_work("exec taskset -c 9 sh -c 'while :; do sleep 1; done'")
        .unwrap();
    let pid = guest.work_pids(pinned).unwrap()[0];
    let affinity = |wanted: &str| {
        let found = guest
            .wait_for(SOON, |g| g.cpus_allowed(pid), |set| *set == cpus(wanted))
            .unwrap();
        assert_eq!(found, cpus(wanted));
    };
    affinity("9");

    for (usable, wanted) in [(6, "0-3,6-7"), (8, "0-3,6-7,10-11"), (3, "0-1,6")] {
        let mut broker = broker("uneven", usable);
        guest.start_agent(&["run"]).unwrap();
        wait_for_work_cpus(&guest, wanted);
        let status = guest.sh("hint-agent status --json").unwrap();
        assert!(status.contains("\"state\": \"folded\""), "{status}");
        assert!(!guest.cpus_allowed(pid).unwrap().contains(9));
        match usable {
            6 => guest.signal_agent("TERM").unwrap(),
            8 => guest.signal_agent("KILL").unwrap(),
            _ => broker.kill(),
        }
        wait_for_texts(&guest, &found);
        affinity("9");
        if usable == 3 {
            guest.signal_agent("TERM").unwrap();
        }
    }
    let probe = guest.sh("hint-agent probe").unwrap();
    assert!(
        probe.contains("cpuset: works, and would be used"),
        "{probe}"
    );
    assert!(probe.contains("0-11 in 6 cores on 3 NUMA nodes"), "{probe}");
}

#[test]
fn a_cpu_that_goes_while_folded_and_a_stop_that_outlasts_the_lease() {
    const NAME: &str = "a_cpu_that_goes_while_folded_and_a_stop_that_outlasts_the_lease";
    if !skip::can_run(NAME, &[Need::Guests]) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let guest = Guest::boot(&with_agent(GuestSpec::named("hotplug"))).unwrap();
    let found = own_texts(&guest, "0-3");
    let mut broker = broker("hotplug", 2);
    guest.start_agent(&["run"]).unwrap();
    wait_for_work_cpus(&guest, "0-1");

    // One in use goes: another takes its place.
    guest
        .sh("echo 0 >/sys/devices/system/cpu/cpu1/online")
        .unwrap();
    wait_for_work_cpus(&guest, "0,2");
    guest
        .sh("echo 1 >/sys/devices/system/cpu/cpu1/online")
        .unwrap();

    guest.qmp("stop", &json!({})).unwrap();
    broker.kill();
    thread::sleep(LEASE + Duration::from_secs(2));
    guest.qmp("cont", &json!({})).unwrap();
    let start = Instant::now();
    wait_for_texts(&guest, &found);
    assert!(start.elapsed() < LEASE + SLACK, "{:?}", start.elapsed());
    guest.signal_agent("TERM").unwrap();
}

#[test]
fn isolated_cpus_stay_as_they_are() {
    const NAME: &str = "isolated_cpus_stay_as_they_are";
    if !skip::can_run(NAME, &[Need::ParavirtGuests]) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let spec = with_agent(GuestSpec {
        vcpus: 6,
        kernel_args: vec!["isolcpus=4-5".to_owned()],
        ..GuestSpec::named("isolated").with_kernel(Kernel::Paravirt)
    });
    let guest = Guest::boot(&spec).unwrap();
    let isolated = guest.sh("cat /sys/devices/system/cpu/isolated").unwrap();
    if isolated != "4-5" {
        return skip::skipped(NAME, "a kernel that isolates CPUs");
    }
    let _broker = broker("isolated", 2);
    guest.start_agent(&["run"]).unwrap();
    let avoided = guest
        .wait_for(SOON, Guest::avoided_cpus, |found| *found == cpus("2-3"))
        .unwrap();
    assert_eq!(avoided, cpus("2-3"), "{}", guest.agent_log().unwrap());
    guest.signal_agent("KILL").unwrap();
    let avoided = guest
        .wait_for(SOON, Guest::avoided_cpus, CpuSet::is_empty)
        .unwrap();
    assert!(avoided.is_empty());
    let probe = guest.run("hint-agent probe --actuator cpuset").unwrap();
    assert_eq!(probe.status, 4);
    assert!(
        probe.text().contains("CPUs 4-5 are isolated"),
        "{}",
        probe.text()
    );
}
