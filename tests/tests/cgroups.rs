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
use hint_broker::model::{CpuGroup, Cpus, GroupTree, Limit, Vcpus, Vm, VmGroup};
use hint_broker::observe::cgroups::Cgroups;
use hint_broker::root::Root;
use lab::cgroup;
use lab::lock;
use lab::process::Process;
use lab::skip::{self, Need};
use lab::vm_process::VmProcess;
use lab::{Guest, GuestSpec};

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

/// The VMs of these processes, once all of them are known with their vCPUs: a VMM names its threads a moment after it has its VM.
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
        let known = |vm: &Vm| matches!(&vm.vcpus, Vcpus::Known(vcpus) if !vcpus.is_empty());
        if vms.len() == processes.len() && vms.iter().all(known) {
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

/// What a real v2 says, in a guest with a kernel of today. `cpuset` is enabled in its root already.
const V2: &str = r#"
set -e
cp /usr/bin/lab-observe /tmp/qemu-system-x86_64
cd /sys/fs/cgroup
echo +cpu >cgroup.subtree_control
mkdir machine machine/web machine/idle plain
echo "+cpu +cpuset" >machine/cgroup.subtree_control
echo 300 >machine/cpu.weight
echo 0-1 >machine/cpuset.cpus
echo 200 >machine/web/cpu.weight
echo "150000 100000" >machine/web/cpu.max
echo 1 >machine/idle/cpu.idle
start() {
    chrt -o 0 setsid /tmp/qemu-system-x86_64 vm "$2" -name "$1" </dev/null >/dev/null 2>&1 &
    echo $! >"$3/cgroup.procs"
    eval "$1=$!"
    until [ "$(cat /proc/$!/task/*/comm | grep -c TCG)" = "$2" ]; do usleep 5000; done
}
start web 2 machine/web
start idle 1 machine/idle
start lost 1 plain
# As libvirt does: threaded groups for each vCPU, whose cgroup.procs can't be read.
for name in emulator vcpu0 vcpu1; do
    mkdir machine/web/$name
    echo threaded >machine/web/$name/cgroup.type
done
echo +cpu >machine/web/cgroup.subtree_control
for task in /proc/$web/task/*; do
    case $(cat $task/comm) in
        "CPU 0/TCG") to=vcpu0 ;;
        "CPU 1/TCG") to=vcpu1 ;;
        *) to=emulator ;;
    esac
    echo "${task##*/}" >machine/web/$to/cgroup.threads
done
echo "25000 100000" >machine/web/vcpu0/cpu.max
! cat machine/web/vcpu0/cgroup.procs 2>/dev/null
# No CPU controller below this one.
mkdir plain/inner
echo $lost >plain/inner/cgroup.procs
lab-observe groups
"#;

#[test]
fn a_real_v2_is_read_with_threaded_and_idle_groups() {
    let test = "a_real_v2_is_read_with_threaded_and_idle_groups";
    if !skip::can_run(test, &[Need::Guests]) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("lab-observe");
    lab::initramfs::strip(Path::new(env!("CARGO_BIN_EXE_lab-observe")), &program).unwrap();
    let guest = Guest::boot(&GuestSpec {
        programs: vec![program.display().to_string()],
        ..GuestSpec::named("cgroups")
    })
    .unwrap();
    let said = guest.sh(V2).unwrap();
    for line in [
        "group / weight ? quota max cpus 0-3 vms true used true",
        "group /machine weight 300.0 quota max cpus 0-1 vms true used true",
        "group /machine/idle weight 0.3 quota max cpus 0-1 vms true used true",
        "group /machine/web weight 200.0 quota 1.50 cpus 0-1 vms true used true",
        "group /plain weight 100.0 quota max cpus 0-3 vms true used true",
        "group /workload weight 100.0 quota max cpus 0-3 vms false used true",
        "vm web in /machine/web vcpus 1.25 shared 0 scattered false",
        "vm idle in /machine/idle vcpus max shared 0 scattered false",
        "vm lost in /plain vcpus max shared 0 scattered false",
    ] {
        assert!(
            said.lines().any(|found| found == line),
            "{line:?} is missing:\n{said}"
        );
    }
    assert_eq!(said.lines().count(), 9, "{said}");
}
