//! The CPU groups of this host, with real KVM VMs in them.

#![allow(
    clippy::unwrap_used,
    reason = "clippy exempts test functions but not the helpers of a test file"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use hint_broker::discover::Discovery;
use hint_broker::model::{CpuGroup, Cpus, GroupTree, Limit, Vm, VmGroup};
use hint_broker::observe::cgroups::Cgroups;
use hint_broker::root::Root;
use lab::cgroup;
use lab::lock;
use lab::process::Process;
use lab::skip::{self, Need};
use lab::vm_process::VmProcess;

const SOON: Duration = Duration::from_secs(60);

/// A named VM with one vCPU, in a group.
fn start_in(group: &cgroup::CpuGroup, name: &str) -> VmProcess {
    let path = Path::new(env!("CARGO_BIN_EXE_lab-kvm-vm"));
    let arguments = ["--vcpus", "1", "--named", "--", "-name", name];
    let vm = VmProcess::start(path, "qemu-system-x86_64", &arguments).unwrap();
    fs::write(group.procs(), vm.pid().to_string()).unwrap();
    vm
}

/// The group of the same name where time is counted, for hosts of v1 that count it in a hierarchy of its own.
struct Accounts(Option<PathBuf>);

impl Accounts {
    fn create(group: &cgroup::CpuGroup) -> Self {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let apart = mounts.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(' ').collect();
            let counts = |option: &str| option == "cpuacct";
            (fields[2] == "cgroup" && fields[3].split(',').any(counts)).then(|| fields[1])
        });
        let path = apart.map(|root| Path::new(root).join(group.path().file_name().unwrap()));
        let path = path.filter(|path| !path.exists());
        if let Some(path) = &path {
            fs::create_dir(path).unwrap();
        }
        Self(path)
    }

    fn add(&self, pid: u32) {
        if let Some(path) = &self.0 {
            fs::write(path.join("cgroup.procs"), pid.to_string()).unwrap();
        }
    }
}

impl Drop for Accounts {
    fn drop(&mut self) {
        let end = Instant::now() + SOON;
        while self
            .0
            .as_ref()
            .is_some_and(|path| fs::remove_dir(path).is_err())
            && Instant::now() < end
        {
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The VMs of these processes, once all of them are known.
fn find(processes: &[&VmProcess]) -> Vec<Vm> {
    let mut discovery = Discovery::new(Root::new("/"), false);
    let end = Instant::now() + SOON;
    loop {
        let found = discovery.scan().vms;
        let vms: Vec<Vm> = processes
            .iter()
            .filter_map(|process| found.iter().find(|found| found.vm.id.pid == process.pid()))
            .map(|found| found.vm.clone())
            .collect();
        if vms.len() == processes.len() {
            return vms;
        }
        assert!(Instant::now() < end, "{found:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn place<'a>(tree: &'a GroupTree, vm: &Vm) -> (&'a CpuGroup, &'a VmGroup) {
    let place = &tree.vms[&vm.id];
    (&tree.groups[place.group], place)
}

/// Scans until the tree is as wanted.
fn scan_until(cgroups: &mut Cgroups, vms: &[Vm], wanted: impl Fn(&GroupTree) -> bool) -> GroupTree {
    let end = Instant::now() + SOON;
    loop {
        let scan = cgroups.scan(vms);
        assert_eq!(scan.degraded, [""; 0]);
        if wanted(&scan.tree) {
            return scan.tree;
        }
        assert!(Instant::now() < end, "{:?}", scan.tree);
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn weights_quotas_siblings_and_moves_of_real_vms_are_seen() {
    if !skip::can_run(
        "weights_quotas_siblings_and_moves_of_real_vms_are_seen",
        &[Need::Root, Need::Kvm],
    ) {
        return;
    }
    if let Err(error) = cgroup::Controller::find() {
        skip::skipped(
            "weights_quotas_siblings_and_moves_of_real_vms_are_seen",
            &error.to_string(),
        );
        return;
    }
    let _cores = lock::cores().unwrap();
    let [left, right, busy] =
        ["left", "right", "busy"].map(|name| cgroup::CpuGroup::create(name).unwrap());
    left.set_weight(300).unwrap();
    left.set_quota(Some(1500)).unwrap();
    busy.set_weight(50).unwrap();
    let (a, b) = (start_in(&left, "a"), start_in(&right, "b"));
    let vms = find(&[&a, &b]);
    let accounts = Accounts::create(&busy);
    let folder = tempfile::tempdir().unwrap();
    let spin = ["-c", "while :; do :; done"].map(Into::into);
    let work = Process::start(
        Path::new("sh"),
        &spin,
        &folder.path().join("log"),
        Some(&busy),
    )
    .unwrap();
    accounts.add(work.pid());

    let mut cgroups = Cgroups::new(Root::new("/"));
    let tree = scan_until(&mut cgroups, &vms, |tree| tree.vms.len() == 2);
    let (group, vm) = place(&tree, &vms[0]);
    assert!(left.path().ends_with(&group.path), "{group:?}");
    assert_eq!(
        (group.weight, group.quota),
        (Some(300.0), Some(Limit::At(Cpus(1.5))))
    );
    assert_eq!(
        (vm.vcpu_quota, vm.shared_with.len(), vm.scattered),
        (Some(Limit::None), 0, false)
    );
    let (group, _) = place(&tree, &vms[1]);
    assert_eq!(
        (group.weight, group.quota),
        (Some(100.0), Some(Limit::None))
    );
    assert_eq!(
        group.parent.map(|parent| tree.groups[parent].path.as_str()),
        Some("")
    );

    // The other work is a sibling with its weight, and its use can be told.
    let at = tree
        .groups
        .iter()
        .position(|group| busy.path().ends_with(&group.path) && !group.path.is_empty())
        .unwrap();
    assert_eq!(
        (tree.groups[at].weight, tree.groups[at].holds_vms),
        (Some(50.0), false)
    );
    let first = cgroups.usage(&tree)[at].unwrap();
    let end = Instant::now() + SOON;
    while cgroups.usage(&tree)[at].unwrap() < first + Duration::from_millis(100) {
        assert!(Instant::now() < end, "{first:?}, and never more");
        thread::sleep(Duration::from_millis(50));
    }

    left.set_weight(50).unwrap();
    left.set_quota(None).unwrap();
    let tree = scan_until(&mut cgroups, &vms, |_| true);
    let (group, _) = place(&tree, &vms[0]);
    assert_eq!((group.weight, group.quota), (Some(50.0), Some(Limit::None)));

    fs::write(left.procs(), b.pid().to_string()).unwrap();
    let tree = scan_until(&mut cgroups, &vms, |tree| {
        tree.vms
            .get(&vms[1].id)
            .is_some_and(|vm| vm.shared_with == [vms[0].id])
    });
    assert_eq!(place(&tree, &vms[0]).1.shared_with, [vms[1].id]);

    assert!(a.terminate().unwrap().success());
    assert!(b.terminate().unwrap().success());
    let tree = scan_until(&mut cgroups, &vms, |tree| tree.vms.is_empty());
    assert!(
        tree.groups
            .iter()
            .all(|group| group.path.is_empty() || !group.holds_vms)
    );
}
