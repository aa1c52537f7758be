//! VMs of real VMMs as discovery and observation see them: libvirt's, and QEMUs whose vCPUs only their monitor tells.

#![allow(
    clippy::unwrap_used,
    reason = "clippy exempts test functions but not the helpers of a test file"
)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use hint_broker::discover::{Discovery, Found};
use hint_broker::entitle::Engine;
use hint_broker::entitle::assemble::{Observed, VmClaim, assemble};
use hint_broker::model::{Accelerator, Cpus, GroupTree, Limit, Vcpus, Vm};
use hint_broker::observe::cgroups::Cgroups;
use hint_broker::root::Root;
use lab::libvirt::Libvirt;
use lab::process::Process;
use lab::skip::{self, Need};

const SOON: Duration = Duration::from_secs(60);

/// Scans until what is found of one VM is as wanted, and gives that.
fn scan_until(
    discovery: &mut Discovery,
    which: impl Fn(&Found) -> bool,
    wanted: impl Fn(&Found) -> bool,
) -> Found {
    let end = Instant::now() + SOON;
    loop {
        let vms = discovery.scan().vms;
        let found = vms.into_iter().find(&which);
        if let Some(found) = found.clone().filter(&wanted) {
            return found;
        }
        assert!(Instant::now() < end, "still {found:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn vcpus(found: &Found) -> BTreeMap<u32, u32> {
    match &found.vm.vcpus {
        Vcpus::Known(threads) => threads.clone(),
        Vcpus::Unclassified(_) => BTreeMap::new(),
    }
}

fn why(found: &Found) -> &str {
    match &found.vm.vcpus {
        Vcpus::Unclassified(why) => why,
        Vcpus::Known(_) => "",
    }
}

/// Scans until the group of a VM has this weight, its own quota and the sum of its vCPUs'.
fn groups_until(cgroups: &mut Cgroups, vm: &Vm, wanted: (f64, Limit, Limit)) -> GroupTree {
    let end = Instant::now() + SOON;
    loop {
        let scan = cgroups.scan(std::slice::from_ref(vm));
        assert_eq!(scan.degraded, [""; 0]);
        let place = scan.tree.vms.get(&vm.id);
        let group = place.map(|place| &scan.tree.groups[place.group]);
        let found = place
            .zip(group)
            .map(|(place, group)| (group.weight, group.quota, place.vcpu_quota));
        if found == Some((Some(wanted.0), Some(wanted.1), Some(wanted.2))) {
            return scan.tree;
        }
        assert!(Instant::now() < end, "still {found:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// What a VM that wants all its vCPUs gets of two idle pCPUs.
fn share(found: &Found, tree: &GroupTree) -> f64 {
    let all = Cpus::from(u32::try_from(found.affinity.len()).unwrap());
    let claim = VmClaim {
        demand: all,
        shown: all,
        floor: Cpus::ZERO,
        weight: 100.0,
        vcpus: found.affinity.values().cloned().map(Some).collect(),
    };
    let assembled = assemble(&Observed {
        pcpus: &BTreeMap::from([(0, Cpus(1.0)), (1, Cpus(1.0))]),
        tree,
        used: &[],
        vms: &BTreeMap::from([(found.vm.id, claim)]),
    });
    let mut engine = Engine::default();
    let division = engine.divide(&assembled.host);
    division.claimants[assembled.vms[&found.vm.id]]
        .as_ref()
        .unwrap()
        .share
        .0
}

/// A figure of `virsh schedinfo`.
fn schedinfo(libvirt: &Libvirt, vm: &str, key: &str) -> i64 {
    let text = libvirt.virsh(&["schedinfo", vm]).unwrap();
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = lines.find(|(name, _)| name.trim() == key).unwrap();
    value.trim().parse().unwrap()
}

#[test]
fn a_vm_of_libvirt_is_due_what_virsh_says() {
    let needs = [Need::Root, Need::Libvirt];
    if !skip::can_run("a_vm_of_libvirt_is_due_what_virsh_says", &needs) {
        return;
    }
    let libvirt = Libvirt::start().unwrap();
    let uuid = "6c9a5bd2-2e19-4f8c-9a3f-0a4f4b1a7b10";
    let tune = "<shares>2048</shares><period>100000</period><quota>50000</quota>\
                <global_period>100000</global_period><global_quota>150000</global_quota>\
                <vcpupin vcpu='0' cpuset='0'/><vcpupin vcpu='1' cpuset='1'/>";
    libvirt.start_vm("web-1", uuid, 2, tune).unwrap();

    let root = Root::new("/");
    let mut discovery = Discovery::new(root.clone(), true);
    let is_web = |found: &Found| found.vm.uuid.as_deref() == Some(uuid);
    let found = scan_until(&mut discovery, is_web, |found| vcpus(found).len() == 2);
    assert_eq!(found.vm.name, "web-1");
    assert_eq!(found.vm.accelerator, Accelerator::Tcg);
    assert!(vcpus(&found).keys().copied().eq(0..2));
    let pins: Vec<String> = found.affinity.values().map(ToString::to_string).collect();
    assert_eq!(pins, ["0", "1"]);

    let mut cgroups = Cgroups::new(root);
    let due = |shares: i64, vcpu_quota: i64, global: i64| {
        let cpus = |quota: i64| f64::from(i32::try_from(quota).unwrap()) / 100_000.0;
        let limit = |quota: i64, times: f64| match quota {
            -1 => Limit::None,
            quota => Limit::At(Cpus(cpus(quota) * times)),
        };
        let weight = f64::from(i32::try_from(shares).unwrap()) * 100.0 / 1024.0;
        (weight, limit(global, 1.0), limit(vcpu_quota, 2.0))
    };
    let said = |key: &str| schedinfo(&libvirt, "web-1", key);
    let as_virsh_says = || due(said("cpu_shares"), said("vcpu_quota"), said("global_quota"));
    assert_eq!(as_virsh_says(), due(2048, 50_000, 150_000));
    let tree = groups_until(&mut cgroups, &found.vm, as_virsh_says());
    let group = &tree.groups[tree.vms[&found.vm.id].group];
    assert!(
        group.path.ends_with("qemu-1-web-1.libvirt-qemu"),
        "{group:?}"
    );
    assert!(tree.vms[&found.vm.id].shared_with.is_empty());

    assert!(
        (share(&found, &tree) - 1.0).abs() < 1e-6,
        "two vCPUs, half a pCPU each"
    );

    // Changes are followed, by the figures that virsh shows then.
    libvirt
        .virsh(&["schedinfo", "web-1", "--live", "--set", "cpu_shares=512"])
        .unwrap();
    libvirt
        .virsh(&["schedinfo", "web-1", "--live", "--set", "vcpu_quota=25000"])
        .unwrap();
    libvirt
        .virsh(&["schedinfo", "web-1", "--live", "--set", "global_quota=-1"])
        .unwrap();
    libvirt.virsh(&["vcpupin", "web-1", "0", "1"]).unwrap();
    assert_eq!(as_virsh_says(), due(512, 25_000, -1));
    let tree = groups_until(&mut cgroups, &found.vm, as_virsh_says());
    let found = scan_until(&mut discovery, is_web, |found| {
        found.affinity.values().all(|cpus| cpus.to_string() == "1")
    });
    assert!((share(&found, &tree) - 0.5).abs() < 1e-6, "a quarter each");

    libvirt.virsh(&["destroy", "web-1"]).unwrap();
    let end = Instant::now() + SOON;
    while discovery.scan().vms.iter().any(is_web) {
        assert!(Instant::now() < end, "it is still there");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A QEMU with three vCPUs and nothing else.
fn start_qemu(folder: &Path, name: &str, before: &[&str], more: &[&str]) -> Process {
    let common = [
        "-accel",
        "tcg,thread=multi",
        "-smp",
        "3",
        "-m",
        "64",
        "-nodefaults",
        "-display",
        "none",
        "-name",
        name,
    ];
    let line = [before, &["qemu-system-x86_64"], &common, more].concat();
    let arguments: Vec<_> = line[1..].iter().map(Into::into).collect();
    let log = folder.join(name.split(',').next().unwrap());
    Process::start(Path::new(line[0]), &arguments, &log, None).unwrap()
}

#[test]
fn vcpus_without_names_are_told_by_the_monitor_when_it_is_free() {
    let test = "vcpus_without_names_are_told_by_the_monitor_when_it_is_free";
    if !skip::can_run(test, &[Need::Root, Need::Qemu]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let named = |name: &'static str| move |found: &Found| found.vm.name == name;
    let mut discovery = Discovery::new(Root::new("/"), true);

    // Three with a monitor each: free, in use, and free in a PID namespace of its own.
    let qmp = format!("unix:{},server=on,wait=off", path("free.sock"));
    let free = start_qemu(folder.path(), "qmp-free", &[], &["-qmp", &qmp]);
    let chardev = format!("socket,id=m,path={},server=on,wait=off", path("busy.sock"));
    let busy = start_qemu(
        folder.path(),
        "qmp-busy",
        &[],
        &["-chardev", &chardev, "-mon", "chardev=m,mode=control"],
    );
    let qmp = format!("unix:{},server=on,wait=off", path("far.sock"));
    let far = start_qemu(
        folder.path(),
        "qmp-far",
        &["unshare", "--pid", "--fork", "--kill-child"],
        &["-qmp", &qmp],
    );
    let end = Instant::now() + SOON;
    let tool = loop {
        match UnixStream::connect(path("busy.sock")) {
            Ok(tool) => break tool,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
        thread::sleep(Duration::from_millis(20));
    };
    let mut said = BufReader::new(tool.try_clone().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.contains("QMP"), "{line}");

    for name in ["qmp-free", "qmp-far"] {
        let found = scan_until(&mut discovery, named(name), |found| vcpus(found).len() == 3);
        let (pid, threads) = (found.vm.id.pid, vcpus(&found));
        assert_eq!(pid == free.pid(), name == "qmp-free");
        assert_ne!(pid, far.pid());
        assert!(threads.keys().copied().eq(0..3), "{name}: {threads:?}");
        for tid in threads.values() {
            let comm = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm")).unwrap();
            assert_eq!(
                comm.trim_end(),
                "qemu-system-x86",
                "nothing but the monitor can have told"
            );
            assert_ne!(*tid, pid);
        }
    }

    // The tool's monitor is left alone, and works for the tool.
    let found = scan_until(&mut discovery, named("qmp-busy"), |found| {
        why(found).contains("is in use")
    });
    assert_eq!(found.vm.id.pid, busy.pid());
    (&tool)
        .write_all(b"{\"execute\":\"qmp_capabilities\"}\n")
        .unwrap();
    line.clear();
    said.read_line(&mut line).unwrap();
    assert!(line.contains("return"), "{line}");
    drop((tool, said));
    scan_until(&mut discovery, named("qmp-busy"), |found| {
        vcpus(found).len() == 3
    });

    // The broker does not stay on a line: a tool that comes now is served.
    let tool = UnixStream::connect(path("free.sock")).unwrap();
    tool.set_read_timeout(Some(SOON)).unwrap();
    line.clear();
    BufReader::new(tool).read_line(&mut line).unwrap();
    assert!(line.contains("QMP"), "{line}");
}

#[test]
fn names_of_threads_tell_without_the_monitor() {
    if !skip::can_run(
        "names_of_threads_tell_without_the_monitor",
        &[Need::Root, Need::Qemu],
    ) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let qemu = start_qemu(folder.path(), "named,debug-threads=on", &[], &[]);
    let silent = start_qemu(folder.path(), "silent", &[], &[]);
    let mut discovery = Discovery::new(Root::new("/"), true);
    let pid = qemu.pid();
    let found = scan_until(
        &mut discovery,
        |found| found.vm.id.pid == pid,
        |found| vcpus(found).len() == 3,
    );
    for (index, tid) in vcpus(&found) {
        let comm = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm")).unwrap();
        assert_eq!(comm.trim_end(), format!("CPU {index}/TCG"));
    }
    // With neither, its threads stay unknown, and it says why.
    let pid = silent.pid();
    let found = scan_until(
        &mut discovery,
        |found| found.vm.id.pid == pid,
        |found| !why(found).is_empty(),
    );
    assert!(
        why(&found).contains("no QMP socket") && why(&found).contains("debug-threads=on"),
        "{found:?}"
    );
}
