//! Discovery and measurement on real KVM vCPUs of this host.

#![allow(
    clippy::unwrap_used,
    reason = "clippy exempts test functions but not the helpers of a test file"
)]

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use hint_broker::ctl::Client;
use hint_broker::discover::{Discovery, Found};
use hint_broker::model::{Accelerator, Vcpus, Vm};
use hint_broker::observe::Observer;
use hint_broker::observe::rates::Rates;
use hint_broker::root::Root;
use lab::cgroup::CpuGroup;
use lab::mounts::HostView;
use lab::process::find_program;
use lab::skip::{self, Need};
use lab::vm_process::VmProcess;
use lab::{assets, lock};
use rustix::process::{Pid, Signal, kill_process};

const SOON: Duration = Duration::from_secs(60);
/// The user and group that own nothing.
const NOBODY: u32 = 65_534;

/// Starts it under the name of a program, with its vCPUs running.
fn start_vm(program: &str, arguments: &[&str]) -> VmProcess {
    let path = Path::new(env!("CARGO_BIN_EXE_lab-kvm-vm"));
    VmProcess::start(path, program, arguments).unwrap()
}

/// Scans until what is found of one process is as wanted, and gives that.
fn scan_until(
    discovery: &mut Discovery,
    pid: u32,
    wanted: impl Fn(Option<&Found>) -> bool,
) -> Option<Found> {
    let end = Instant::now() + SOON;
    loop {
        let vms = discovery.scan().vms;
        let found = vms.into_iter().find(|found| found.vm.id.pid == pid);
        if wanted(found.as_ref()) {
            return found;
        }
        assert!(Instant::now() < end, "still {found:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn has_vcpus(count: usize) -> impl Fn(Option<&Found>) -> bool {
    move |found| matches!(found.map(|found| &found.vm.vcpus), Some(Vcpus::Known(threads)) if threads.len() == count)
}

/// Why a process's vCPUs are not known.
fn unclassified(discovery: &mut Discovery, pid: u32) -> String {
    let is_unclassified = |found: Option<&Found>| {
        matches!(
            found.map(|found| &found.vm.vcpus),
            Some(Vcpus::Unclassified(_))
        )
    };
    match scan_until(discovery, pid, is_unclassified)
        .unwrap()
        .vm
        .vcpus
    {
        Vcpus::Unclassified(why) => why,
        Vcpus::Known(threads) => panic!("{threads:?}"),
    }
}

fn debugfs_complaints(discovery: &mut Discovery) -> Vec<String> {
    let degraded = discovery.scan().degraded;
    degraded
        .into_iter()
        .filter(|message| message.contains("debug/kvm"))
        .collect()
}

#[test]
fn debugfs_tells_the_vcpus_of_any_vmm() {
    let needs = [Need::Kvm, Need::Root, Need::Debugfs];
    if !skip::can_run("debugfs_tells_the_vcpus_of_any_vmm", &needs) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let host = HostView::with_debugfs().unwrap();
    let mut discovery = Discovery::new(Root::new(host.root()), false);
    let mut vm = start_vm("some-new-vmm", &["--vcpus", "3"]);
    let pid = vm.pid();

    let found = scan_until(&mut discovery, pid, has_vcpus(3)).unwrap();
    assert_eq!(found.vm.accelerator, Accelerator::Kvm);
    assert_eq!((found.vm.name.as_str(), found.vm.cid), ("", None));
    let Vcpus::Known(threads) = &found.vm.vcpus else {
        unreachable!("has_vcpus")
    };
    assert!(threads.keys().copied().eq(0..3), "{threads:?}");
    for tid in threads.values() {
        assert_ne!(*tid, pid, "a vCPU is a thread of its own");
        assert!(fs::exists(format!("/proc/{pid}/task/{tid}")).unwrap());
    }
    assert_eq!(found.allowed.as_ref(), Some(&found.reach));
    assert_eq!(debugfs_complaints(&mut discovery), [""; 0]);

    let before = threads.clone();
    vm.add_vcpu().unwrap();
    let found = scan_until(&mut discovery, pid, has_vcpus(4)).unwrap();
    let Vcpus::Known(threads) = found.vm.vcpus else {
        unreachable!("has_vcpus")
    };
    assert!(
        before
            .iter()
            .all(|(index, tid)| threads.get(index) == Some(tid))
    );

    assert!(vm.terminate().unwrap().success());
    scan_until(&mut discovery, pid, |found| found.is_none());
}

#[test]
fn thread_names_tell_the_vcpus_where_debugfs_does_not() {
    if !skip::can_run(
        "thread_names_tell_the_vcpus_where_debugfs_does_not",
        &[Need::Kvm, Need::Root],
    ) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let host = HostView::without_debugfs().unwrap();
    let mut discovery = Discovery::new(Root::new(host.root()), false);
    let arguments = [
        "--vcpus",
        "2",
        "--named",
        "--",
        "-name",
        "guest=web,debug-threads=on",
        "-device",
        "vhost-vsock-pci,guest-cid=33",
    ];
    let mut vm = start_vm("/usr/bin/qemu-system-x86_64", &arguments);
    let pid = vm.pid();

    let found = scan_until(&mut discovery, pid, has_vcpus(2)).unwrap();
    assert_eq!(found.vm.accelerator, Accelerator::Kvm);
    assert_eq!((found.vm.name.as_str(), found.vm.cid), ("web", Some(33)));
    let Vcpus::Known(threads) = &found.vm.vcpus else {
        unreachable!("has_vcpus")
    };
    for (index, tid) in threads {
        let name = fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm")).unwrap();
        assert_eq!(name.trim_end(), format!("CPU {index}/KVM"));
    }
    let complaints = debugfs_complaints(&mut discovery);
    assert_eq!(complaints.len(), 1);
    assert!(complaints[0].contains("mount -t debugfs"), "{complaints:?}");

    vm.add_vcpu().unwrap();
    scan_until(&mut discovery, pid, has_vcpus(3));
    assert!(vm.close_input().unwrap().success());
    scan_until(&mut discovery, pid, |found| found.is_none());
}

#[test]
fn vcpus_that_nothing_tells_are_unclassified_with_the_reason() {
    if !skip::can_run(
        "vcpus_that_nothing_tells_are_unclassified_with_the_reason",
        &[Need::Kvm, Need::Root, Need::Debugfs],
    ) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let host = HostView::without_debugfs().unwrap();
    let mut discovery = Discovery::new(Root::new(host.root()), false);
    let unnamed = start_vm("qemu-system-x86_64", &["--vcpus", "2"]);
    let why = unclassified(&mut discovery, unnamed.pid());
    assert!(why.contains("debug-threads=on, or mount debugfs"), "{why}");
    let unknown = start_vm("some-new-vmm", &["--vcpus", "2", "--named"]);
    let why = unclassified(&mut discovery, unknown.pid());
    assert!(why.contains("no VMM whose thread names are known"), "{why}");

    // Mixed up, the vCPUs of two VMs would be one VM of their sum; debugfs could tell them apart, but they are one process.
    let two = start_vm("qemu-system-x86_64", &["--vms", "2", "--named"]);
    for host in [host, HostView::with_debugfs().unwrap()] {
        let mut discovery = Discovery::new(Root::new(host.root()), false);
        let why = unclassified(&mut discovery, two.pid());
        assert!(why.contains("holds 2 KVM VMs"), "{why}");
    }
}

/// Measures until the demand reads the number of vCPUs to 2 %. Other work on this machine moves run to run delay and back; their sum it
/// moves only at the ends of a window.
fn demand_is(number: u32, most_run: f64, observer: &mut Observer, vm: &Vm) {
    let number = f64::from(number);
    let mut tries = Vec::new();
    loop {
        let (run, demand) = measure(observer, vm);
        tries.push(format!("run {run:.3} demand {demand:.3}"));
        assert!(run <= most_run * 1.02, "{number} vCPUs: {tries:?}");
        if (demand - number).abs() <= 0.02 * number {
            break;
        }
        assert!(tries.len() < 10, "{number} vCPUs: {tries:?}");
    }
    println!("{number} vCPUs: {tries:?}");
}

#[test]
fn spinning_vcpus_show_their_number_as_demand() {
    if !skip::can_run(
        "spinning_vcpus_show_their_number_as_demand",
        &[Need::Kvm, Need::Root, Need::Debugfs],
    ) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let host = HostView::with_debugfs().unwrap();
    for vcpus in [1u32, 2, 5] {
        let vm = start_vm("some-new-vmm", &["--vcpus", &vcpus.to_string()]);
        let root = Root::new(host.root());
        let mut discovery = Discovery::new(root.clone(), false);
        let wanted = has_vcpus(usize::try_from(vcpus).unwrap());
        let found = scan_until(&mut discovery, vm.pid(), wanted).unwrap();
        demand_is(vcpus, f64::from(vcpus), &mut Observer::new(root), &found.vm);
    }
}

#[test]
fn a_quota_changes_what_vcpus_run_and_not_what_they_want() {
    let test = "a_quota_changes_what_vcpus_run_and_not_what_they_want";
    if !skip::can_run(test, &[Need::Kvm, Need::Root, Need::Debugfs]) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let group = match CpuGroup::create("quota") {
        Ok(group) => group,
        Err(error) => {
            skip::skipped(test, &error.to_string());
            return;
        }
    };
    group.set_quota(Some(1000)).unwrap();
    let host = HostView::with_debugfs().unwrap();
    let vm = start_vm("some-new-vmm", &["--vcpus", "4"]);
    fs::write(group.procs(), vm.pid().to_string()).unwrap();
    let root = Root::new(host.root());
    let mut discovery = Discovery::new(root.clone(), false);
    let found = scan_until(&mut discovery, vm.pid(), has_vcpus(4)).unwrap();
    // A period's quota may be used at the end of one window and the next at its beginning.
    demand_is(4, 1.1, &mut Observer::new(root), &found.vm);
}

#[test]
fn run_delay_is_what_the_guest_sees_as_steal() {
    let test = "run_delay_is_what_the_guest_sees_as_steal";
    if !skip::can_run(test, &[Need::Kvm, Need::Root, Need::Debugfs]) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let host = HostView::with_debugfs().unwrap();
    let mut vm = start_vm("some-new-vmm", &["--vcpus", "5"]);
    let root = Root::new(host.root());
    let mut discovery = Discovery::new(root.clone(), false);
    let found = scan_until(&mut discovery, vm.pid(), has_vcpus(5)).unwrap();
    let Vcpus::Known(threads) = &found.vm.vcpus else {
        unreachable!("has_vcpus")
    };
    let mut observer = Observer::new(root);
    let started = Instant::now();
    let mut read = |vm: &mut VmProcess| {
        let steal = vm.steal_ns().unwrap();
        let vms = std::slice::from_ref(&found.vm);
        let sample = observer.sample(vms, || started.elapsed(), false);
        let times = &sample.vms[&found.vm.id].threads;
        let delay = threads.values().map(|tid| times[tid].unwrap().run_delay);
        (steal, delay.collect::<Vec<Duration>>())
    };
    // Both are read one after the other, and a vCPU may get its pCPU in between: a window in which none did so for long will come.
    let mut tries = Vec::new();
    loop {
        let (steal_before, delay_before) = read(&mut vm);
        thread::sleep(Duration::from_secs(4));
        let (steal, delay) = read(&mut vm);
        let steals = steal
            .iter()
            .zip(&steal_before)
            .map(|(now, old)| (now - old) as f64);
        let delays = delay.iter().zip(&delay_before);
        let delays = delays.map(|(now, old)| (*now - *old).as_nanos() as f64);
        let both: Vec<(f64, f64)> = steals.zip(delays).collect();
        let equal = |(steal, delay): &(f64, f64)| (steal - delay).abs() <= 0.01 * delay;
        let waited = both.iter().all(|(_, delay)| *delay > 1e9);
        let all = both.len() == 5 && waited && both.iter().all(equal);
        tries.push(both);
        if all {
            break;
        }
        assert!(tries.len() < 10, "steal and run delay in ns: {tries:?}");
    }
    println!("steal and run delay in ns: {tries:?}");
}

#[test]
fn a_starved_vcpu_reads_as_waiting() {
    let test = "a_starved_vcpu_reads_as_waiting";
    if !skip::can_run(test, &[Need::Kvm, Need::Root, Need::Debugfs]) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let host = HostView::with_debugfs().unwrap();
    let vm = start_vm("some-new-vmm", &["--vcpus", "1"]);
    let root = Root::new(host.root());
    let mut discovery = Discovery::new(root.clone(), false);
    let found = scan_until(&mut discovery, vm.pid(), has_vcpus(1)).unwrap();
    let Vcpus::Known(threads) = &found.vm.vcpus else {
        unreachable!("has_vcpus")
    };
    // On one pCPU, it gets what an ordinary thread of high weight leaves it: about a thousandth of a percent.
    let tid = threads[&0].to_string();
    for (program, arguments) in [("taskset", ["-c", "-p", "0"]), ("chrt", ["-i", "-p", "0"])] {
        let status = Command::new(find_program(program).unwrap())
            .args(arguments)
            .arg(&tid)
            .stdout(Stdio::null())
            .status();
        assert!(status.unwrap().success(), "{program}");
    }
    let mut spinner = Command::new(find_program("taskset").unwrap())
        .args([
            "-c",
            "0",
            "nice",
            "-n",
            "-20",
            "setpriv",
            "--pdeathsig",
            "KILL",
        ])
        .args(["sh", "-c", "while :; do :; done"])
        .spawn()
        .unwrap();
    let mut observer = Observer::new(root);
    let started = Instant::now();
    let mut waiting = 0;
    while waiting < 5 && started.elapsed() < SOON {
        let vms = std::slice::from_ref(&found.vm);
        let sample = observer.sample(vms, || started.elapsed(), true);
        let times = &sample.vms[&found.vm.id].threads;
        waiting += u32::from(times.values().flatten().any(|times| times.waiting));
        thread::sleep(Duration::from_millis(20));
    }
    let (run, demand) = measure(&mut observer, &found.vm);
    spinner.kill().unwrap();
    spinner.wait().unwrap();
    assert_eq!(waiting, 5, "it never stood still");
    assert!(
        run < 0.5 && (demand - 1.0).abs() <= 0.05,
        "run {run:.3} demand {demand:.3}"
    );
}

/// Mean run, and run + run delay, over 3 s of ticks.
fn measure(observer: &mut Observer, vm: &Vm) -> (f64, f64) {
    let started = Instant::now();
    let mut rates = Rates::default();
    let mut weighted = (0.0, 0.0);
    let mut time = 0.0;
    while time < 3.0 {
        let sample = observer.sample(std::slice::from_ref(vm), || started.elapsed(), true);
        let tick = rates.update(sample);
        assert_eq!(tick.rejected, 0);
        if let Some(rates) = tick.vms[&vm.id] {
            let seconds = tick.interval.as_secs_f64();
            weighted.0 += rates.run.0 * seconds;
            weighted.1 += (rates.run.0 + rates.run_delay.0) * seconds;
            time += seconds;
        }
        assert!(started.elapsed() < SOON, "only {time} s of rates");
        thread::sleep(Duration::from_millis(100));
    }
    (weighted.0 / time, weighted.1 / time)
}

#[test]
fn a_broker_without_rights_says_what_it_may_not_see() {
    if !skip::can_run(
        "a_broker_without_rights_says_what_it_may_not_see",
        &[Need::Kvm, Need::Root],
    ) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let vm = start_vm("qemu-system-x86_64", &["--vcpus", "2", "--named"]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    // The build may be where only its owner may look.
    let program = path.join("hint-broker");
    fs::copy(assets::broker().unwrap(), &program).unwrap();
    let socket = path.join("control.sock");
    let config = path.join("broker.toml");
    let text = format!(
        "mode = \"enforce\"\n[discover]\nrescan_ms = 100\n[channel]\nvsock = false\n[control]\nsocket = \"{}\"\n[metrics]\nenabled = false\n",
        socket.display()
    );
    fs::write(&config, text).unwrap();
    let log = path.join("log");
    let mut broker = Command::new(find_program("setpriv").unwrap())
        .args(["--pdeathsig", "KILL"])
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&program)
        .args(["run", "--config"])
        .arg(&config)
        .stdin(Stdio::null())
        .stderr(File::create(&log).unwrap())
        .spawn()
        .unwrap();

    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let ask = || {
        runtime.block_on(async {
            let mut client = Client::connect(&socket).await.ok()?;
            client.list().await.ok()
        })
    };
    let said = || fs::read_to_string(&log).unwrap_or_default();
    let may_not_look = |message: &String| message.contains("may not be looked into");
    let end = Instant::now() + SOON;
    loop {
        if let Some(state) = ask()
            && state.host.degraded.iter().any(may_not_look)
        {
            assert_eq!(state.vms.len(), 0, "{:?}", state.vms);
            break;
        }
        assert_eq!(broker.try_wait().unwrap(), None, "{}", said());
        assert!(Instant::now() < end, "{:?}\n{}", ask(), said());
        thread::sleep(Duration::from_millis(50));
    }
    // It goes on saying so, also after the first scans, in which each process is looked at every time.
    let end = Instant::now() + Duration::from_secs(5);
    while Instant::now() < end {
        let degraded = ask().unwrap().host.degraded;
        assert!(
            degraded.iter().any(may_not_look),
            "{degraded:?}\n{}",
            said()
        );
        thread::sleep(Duration::from_millis(50));
    }

    kill_process(Pid::from_child(&broker), Signal::TERM).unwrap();
    assert!(broker.wait().unwrap().success(), "{}", said());
    assert!(!said().contains("panicked"), "{}", said());
    assert!(!socket.exists());
    drop(vm);
}
