//! The mask of CPUs to avoid on a real kernel that has one: the kernel's own manners, and the agent's actuator on it.
//!
//! The kernel is the lab's own (`tests/guest-kernel`). What these tests hold it to is what the agent counts on.

#![allow(
    clippy::unwrap_used,
    reason = "clippy exempts test functions but not the helpers of a test file"
)]

use std::thread;
use std::time::{Duration, Instant};

use hint_proto::{CpuSet, v1};
use lab::load::OtherWork;
use lab::skip::{self, Need};
use lab::{Broker, BrokerSpec, Guest, GuestSpec, Kernel, Topology, WorkId, lock};

const SOON: Duration = Duration::from_secs(60);
const AGENT: &[&str] = &["run"];
/// In which a task has left a CPU that is avoided from now on: the median of so many tries, so that a busy machine does no harm.
const LEAVES_WITHIN_MS: u64 = 50;
const TRIES: usize = 11;
/// CPUs of other work on the host beside which these times still prove something; how many tries may be lost to more, and how
/// long to wait for less after each.
const QUIET: f64 = 0.4;
const DISTURBED: u32 = 8;
const QUIET_PATIENCE: Duration = Duration::from_secs(60);
const MASK_CHANGES: usize = 1000;
/// So many changes are one command of the guest.
const BATCH: usize = 50;
/// Every so many changes a CPU goes or comes.
const HOTPLUG_EVERY: usize = 8;

fn mask_guest(name: &str) -> GuestSpec {
    GuestSpec::named(name).with_kernel(Kernel::Paravirt)
}

fn cpus(list: &str) -> CpuSet {
    CpuSet::parse_list(list).unwrap()
}

/// Words of the kernel's log that stand for a fault of its own.
fn complaints(guest: &Guest) -> Vec<String> {
    let log = String::from_utf8_lossy(&std::fs::read(guest.console_log()).unwrap()).into_owned();
    let words = [
        "WARNING:",
        "BUG:",
        "Oops",
        "Call Trace",
        "stall",
        "lockup",
        "possible circular",
        "corruption",
        "blocked for more than",
    ];
    log.lines()
        .filter(|line| words.iter().any(|word| line.contains(word)))
        .map(str::to_owned)
        .collect()
}

/// Starts so many endless loops with a command before each; gives their processes without the shell that waits for them.
fn spinners(guest: &Guest, number: usize, before: &str) -> (WorkId, Vec<u32>) {
    let one = format!("{before} sh -c 'while :; do :; done' & ");
    let work = guest
        .spawn_work(&format!("{}wait", one.repeat(number)))
        .unwrap();
    let pids = guest
        .wait_for(
            SOON,
            |guest| guest.work_pids(work),
            |pids| pids.len() == number + 1,
        )
        .unwrap();
    assert_eq!(pids.len(), number + 1, "{pids:?}");
    (work, pids[1..].to_vec())
}

/// The CPU that each task ran on last, all at one time.
fn cpus_of(guest: &Guest, pids: &[u32]) -> Vec<u32> {
    stat_fields(guest, pids, 39)
}

/// Hundredths of a second that a task has run outside the kernel.
fn user_ticks(guest: &Guest, pid: u32) -> u32 {
    stat_fields(guest, &[pid], 14)[0]
}

/// A field of each `/proc/<pid>/stat`, counted from 1 as in proc(5).
fn stat_fields(guest: &Guest, pids: &[u32], field: usize) -> Vec<u32> {
    let files: Vec<String> = pids.iter().map(|pid| format!("/proc/{pid}/stat")).collect();
    let text = guest.sh(&format!("cat {}", files.join(" "))).unwrap();
    text.lines()
        .map(|stat| {
            let (_, fields) = stat.rsplit_once(") ").unwrap();
            fields.split(' ').nth(field - 3).unwrap().parse().unwrap()
        })
        .collect()
}

/// Where the tasks run, once that is as wanted or has not come to be so for a long time.
fn settled(guest: &Guest, pids: &[u32], wanted: impl Fn(&[u32]) -> bool) -> Vec<u32> {
    guest
        .wait_for(
            SOON,
            |guest| Ok(cpus_of(guest, pids)),
            |cpus: &Vec<u32>| wanted(cpus),
        )
        .unwrap()
}

fn count(cpus: &[u32], cpu: u32) -> usize {
    cpus.iter().filter(|found| **found == cpu).count()
}

/// Hundredths of a second that each CPU has spent on tasks at normal priority and on the kernel for them.
fn busy_ticks(guest: &Guest) -> Vec<u64> {
    let text = guest.sh("grep '^cpu[0-9]' /proc/stat").unwrap();
    text.lines()
        .map(|line| {
            let fields: Vec<u64> = line
                .split_ascii_whitespace()
                .skip(1)
                .map(|field| field.parse().unwrap())
                .collect();
            fields[0] + fields[1] + fields[2]
        })
        .collect()
}

#[test]
fn the_kernel_keeps_tasks_off_avoided_cpus() {
    const NAME: &str = "the_kernel_keeps_tasks_off_avoided_cpus";
    if !skip::can_run(NAME, &[Need::ParavirtGuests]) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let guest = Guest::boot(&mask_guest("mask")).unwrap();
    println!("boot: {:?}", guest.boot_time());
    the_file_takes_what_leaves_a_cpu(&guest);
    tasks_leave_and_pinned_ones_stay(&guest);
    tasks_leave_at_once(&guest);
    new_and_waking_tasks_are_kept_off(&guest);
    a_cpu_that_goes_offline_leaves_the_mask(&guest);
    assert_eq!(complaints(&guest), [""; 0]);
}

fn the_file_takes_what_leaves_a_cpu(guest: &Guest) {
    assert_eq!(guest.avoided_cpus().unwrap(), cpus(""));
    let takes = |list: &str| guest.avoid(list).is_ok();
    for list in ["1-3", "0,2", "3"] {
        assert!(takes(list), "{list}");
        assert_eq!(guest.avoided_cpus().unwrap(), cpus(list));
    }
    for list in ["0-3", "0-4", "1-63", "0-99999", "junk", "-1", "2-1"] {
        let error = guest.avoid(list).unwrap_err().to_string();
        assert!(error.contains("Invalid argument"), "{list}: {error}");
        assert_eq!(guest.avoided_cpus().unwrap(), cpus("3"), "{list}");
    }
    assert!(takes(""));
    assert_eq!(guest.avoided_cpus().unwrap(), cpus(""));
}

fn tasks_leave_and_pinned_ones_stay(guest: &Guest) {
    let (free, free_pids) = spinners(guest, 8, "");
    let (bound, bound_pids) = spinners(guest, 4, "taskset -c 2-3");
    let (one, one_pids) = spinners(guest, 1, "taskset -c 1");
    let one_pid = one_pids[0];
    settled(guest, &bound_pids, |on| on.iter().all(|cpu| *cpu >= 2));

    guest.avoid("1-3").unwrap();
    let on = settled(guest, &free_pids, |on| on.iter().all(|cpu| *cpu == 0));
    assert_eq!(on, [0; 8]);
    // Who may only be on avoided CPUs goes on there, and on all of them.
    let before = user_ticks(guest, one_pid);
    let on = settled(guest, &bound_pids, |on| {
        count(on, 2) == 2 && count(on, 3) == 2
    });
    assert_eq!((count(&on, 2), count(&on, 3)), (2, 2), "{on:?}");
    guest
        .wait_for(
            SOON,
            |guest| Ok(user_ticks(guest, one_pid)),
            |ticks| *ticks > before + 50,
        )
        .unwrap();
    assert!(user_ticks(guest, one_pid) > before + 50, "it goes on");
    assert_eq!(cpus_of(guest, &one_pids), [1]);
    assert_eq!(guest.cpus_allowed(one_pid).unwrap(), cpus("1"));
    assert_eq!(guest.cpus_allowed(bound_pids[0]).unwrap(), cpus("2-3"));
    assert_eq!(guest.cpus_allowed(free_pids[0]).unwrap(), cpus("0-3"));

    // Preferred CPUs share the load.
    guest.avoid("1-2").unwrap();
    guest.kill_work(bound).unwrap();
    let on = settled(guest, &free_pids, |on| {
        count(on, 0) == 4 && count(on, 3) == 4
    });
    assert_eq!((count(&on, 0), count(&on, 3)), (4, 4), "{on:?}");

    // An affinity that widens ends the exception.
    guest.sh(&format!("taskset -p -c 1,3 {one_pid}")).unwrap();
    assert_eq!(settled(guest, &[one_pid], |on| on == [3]), [3]);

    guest.avoid("").unwrap();
    let all_used = |on: &[u32]| (0..4).all(|cpu| count(on, cpu) > 0);
    assert!(all_used(&settled(guest, &free_pids, all_used)));
    guest.kill_work(free).unwrap();
    guest.kill_work(one).unwrap();
}

/// How long a running task stays on its CPU after a write to a file, in the guest's own time.
fn leaving_times(guest: &Guest, pid: u32, prepare: &str, change: &str) -> Vec<u64> {
    let script = format!(
        "mask=/sys/devices/system/cpu/paravirt pid={pid}\n\
         now() {{ read -r up _ </proc/uptime; up=${{up%.*}}${{up#*.}}; }}\n\
         on() {{ read -r line </proc/$pid/stat; set -- ${{line##*) }}; cpu=${{37}}; }}\n\
         for i in $(seq {TRIES}); do\n\
         {prepare}\n\
         until on; [ $cpu = 2 ]; do usleep 20000; done\n\
         usleep 100000\n\
         now; start=$up\n\
         {change}\n\
         until on; [ $cpu != 2 ]; do :; done\n\
         now; echo $(((up - start) * 10))\n\
         done"
    );
    let text = guest.sh(&script).unwrap();
    let mut times: Vec<u64> = text.lines().map(|line| line.parse().unwrap()).collect();
    times.sort_unstable();
    times
}

fn tasks_leave_at_once(guest: &Guest) {
    let (work, pids) = spinners(guest, 1, "");
    let pid = pids[0];
    let mut disturbed = 0;
    loop {
        let meter = OtherWork::start(std::slice::from_ref(guest));
        let by_mask = leaving_times(guest, pid, "echo 0-1,3 >$mask", "echo 2 >$mask");
        let by_affinity = leaving_times(
            guest,
            pid,
            "echo 2 >$mask; taskset -p -c 2 $pid >/dev/null",
            "taskset -p -c 1-2 $pid >/dev/null",
        );
        guest.sh(&format!("taskset -p -c 0-3 {pid}")).unwrap();
        println!(
            "ms to leave an avoided CPU: by the mask {by_mask:?}, by an affinity {by_affinity:?}"
        );
        let in_time = |times: &[u64]| times[times.len() / 2] <= LEAVES_WITHIN_MS;
        if in_time(&by_mask) && in_time(&by_affinity) {
            break;
        }
        // Where the host does not run the guest, the guest's time goes on: beside other work it proves nothing.
        assert!(
            meter.peak() > QUIET && disturbed < DISTURBED,
            "{by_mask:?} {by_affinity:?} beside {:.2} CPUs of other work",
            meter.peak()
        );
        disturbed += 1;
        meter.wait_for_quiet(QUIET, QUIET_PATIENCE);
    }
    guest.avoid("").unwrap();
    guest.kill_work(work).unwrap();
}

fn new_and_waking_tasks_are_kept_off(guest: &Guest) {
    guest.avoid("1-3").unwrap();
    let before = busy_ticks(guest);
    guest.hackbench(1200).unwrap();
    // Each of many short programs forks and execs.
    let forks = guest
        .spawn_work("for i in $(seq 200); do cat /proc/self/stat | cut -d ' ' -f 39; done")
        .unwrap();
    let output = guest.wait_work(forks, SOON).unwrap();
    let used: Vec<u64> = busy_ticks(guest)
        .into_iter()
        .zip(before)
        .map(|(now, before)| now - before)
        .collect();
    println!("hundredths of a second on each CPU while 1-3 are avoided: {used:?}");
    let text = output.text();
    let elsewhere = text.lines().filter(|cpu| *cpu != "0").count();
    assert_eq!((text.lines().count(), elsewhere), (200, 0), "{text}");
    // The command server is real-time, and the kernel's own work is bound to its CPUs: some ticks are theirs.
    let avoided: u64 = used[1..].iter().sum();
    assert!(avoided * 10 < used[0], "{used:?}");
    guest.avoid("").unwrap();
}

fn a_cpu_that_goes_offline_leaves_the_mask(guest: &Guest) {
    let set_online = |cpu: u32, online: u8| {
        guest
            .sh(&format!(
                "echo {online} >/sys/devices/system/cpu/cpu{cpu}/online"
            ))
            .unwrap();
    };
    guest.avoid("1,3").unwrap();
    set_online(3, 0);
    assert_eq!(guest.avoided_cpus().unwrap(), cpus("1"));
    assert!(guest.avoid("0-2").is_err(), "all that are online");
    assert!(guest.avoid("0-1,3-4").is_err(), "more than are online");
    set_online(3, 1);
    assert_eq!(guest.avoided_cpus().unwrap(), cpus("1"));

    guest.avoid("0-2").unwrap();
    set_online(3, 0);
    assert_eq!(
        guest.avoided_cpus().unwrap(),
        cpus(""),
        "none is left to prefer"
    );
    // Avoided from the moment it comes.
    guest.avoid("3").unwrap();
    set_online(3, 1);
    assert_eq!(guest.avoided_cpus().unwrap(), cpus("3"));
    guest.avoid("").unwrap();
}

/// With several levels of domains, groups that are avoided in part balance as well as whole ones.
#[test]
fn cores_and_nodes_that_are_avoided_in_part_share_the_load() {
    const NAME: &str = "cores_and_nodes_that_are_avoided_in_part_share_the_load";
    if !skip::can_run(NAME, &[Need::ParavirtGuests]) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let spec = GuestSpec {
        vcpus: 8,
        numa_nodes: 2,
        topology: Some(Topology {
            sockets: 2,
            cores: 2,
            threads: 2,
        }),
        ..mask_guest("domains")
    };
    let guest = Guest::boot(&spec).unwrap();
    let (_, pids) = spinners(&guest, 12, "");
    // The first CPU of a core, of a node, and all but one of a node among the avoided.
    for avoided in ["0,4-6", "1-3,5", "0,2,4,6", "1-6", ""] {
        guest.avoid(avoided).unwrap();
        let preferred = cpus("0-7").difference(&cpus(avoided));
        let share = pids.len() / preferred.len();
        let fair = |on: &[u32]| {
            preferred.iter().all(|cpu| {
                let there = count(on, cpu);
                share.saturating_sub(1) <= there && there <= share + 1
            })
        };
        let on = settled(&guest, &pids, fair);
        assert!(fair(&on), "{avoided} avoided, tasks on {on:?}");
    }
    assert_eq!(complaints(&guest), [""; 0]);
}

/// A shell script of random changes, each of which prints the mask and the online CPUs.
fn random_changes(random: &mut fastrand::Rng, first: usize) -> String {
    let mut script = "cd /sys/devices/system/cpu\n".to_owned();
    for number in first..first + BATCH {
        if number % HOTPLUG_EVERY == 0 {
            let (cpu, online) = (random.u32(1..4), random.u8(0..2));
            script += &format!("echo {online} >cpu{cpu}/online\n");
        }
        let mask: CpuSet = (0..4).filter(|_| random.bool()).collect();
        script +=
            &format!("echo {mask} 2>/dev/null >paravirt\necho \"$(cat paravirt);$(cat online)\"\n");
    }
    script
}

#[test]
fn random_masks_and_cpus_that_come_and_go_do_no_harm() {
    const NAME: &str = "random_masks_and_cpus_that_come_and_go_do_no_harm";
    if !skip::can_run(NAME, &[Need::ParavirtGuests]) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let guest = Guest::boot(&mask_guest("random")).unwrap();
    let load = [
        guest.spawn_work("while :; do hackbench -P -g 1 -l 50; done"),
        guest.spawn_spinners(4),
        guest.spawn_work("exec taskset -c 2 sh -c 'while :; do :; done'"),
        guest.spawn_work("while :; do cat /proc/self/stat >/dev/null; done"),
    ];
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let start = Instant::now();
    let mut seen = std::collections::BTreeSet::new();
    for first in (0..MASK_CHANGES).step_by(BATCH) {
        let script = random_changes(&mut random, first);
        let output = guest.run_within(&script, Duration::from_secs(180)).unwrap();
        let text = output.text();
        assert_eq!(text.lines().count(), BATCH, "seed {seed}:\n{text}");
        for line in text.lines() {
            let (mask, online) = line.split_once(';').unwrap();
            let (mask, online) = (cpus(mask), cpus(online));
            assert!(
                mask != online && mask.len() <= online.len(),
                "seed {seed}: mask {mask} of online {online}"
            );
            seen.insert((mask.to_string(), online.to_string()));
        }
        assert_eq!(complaints(&guest), [""; 0], "seed {seed}");
    }
    println!(
        "{MASK_CHANGES} changes in {:?}, {} pairs of mask and online CPUs",
        start.elapsed(),
        seen.len()
    );
    assert!(seen.len() > 20, "{seen:?}");
    for work in load {
        guest.kill_work(work.unwrap()).unwrap();
    }
    assert_eq!(complaints(&guest), [""; 0], "seed {seed}");
}

#[track_caller]
fn wait_for_mask(guest: &Guest, wanted: impl Fn(&CpuSet) -> bool, broker: &Broker) -> CpuSet {
    let mask = guest.wait_for(SOON, Guest::avoided_cpus, &wanted).unwrap();
    assert!(
        wanted(&mask),
        "{} avoids {mask}\nagent:\n{}\nbroker:\n{}",
        guest.name(),
        guest.agent_log().unwrap_or_default(),
        broker.log()
    );
    mask
}

#[track_caller]
fn wait_for_vm(broker: &Broker, name: &str, wanted: impl Fn(&v1::Vm) -> bool) -> v1::Vm {
    let end = Instant::now() + SOON;
    loop {
        if let Ok(vm) = broker.vm(name)
            && wanted(&vm)
        {
            return vm;
        }
        assert!(
            Instant::now() < end,
            "{:?}\n{}",
            broker.vm(name),
            broker.log()
        );
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn the_agent_picks_the_mask_and_leaves_none_behind() {
    const NAME: &str = "the_agent_picks_the_mask_and_leaves_none_behind";
    if !skip::can_run(NAME, &[Need::ParavirtGuests]) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let specs = ["left", "right"].map(|name| mask_guest(name).with_agent(AGENT));
    let guests = Guest::boot_all(&specs).unwrap();
    let left = &guests[0];
    let (_, pinned) = spinners(left, 1, "taskset -c 3");
    let pinned = pinned[0];
    let broker = Broker::start(&BrokerSpec::default()).unwrap();
    for guest in &guests {
        let vm = wait_for_vm(&broker, guest.name(), |vm| {
            vm.agent
                .as_ref()
                .is_some_and(|agent| agent.applied.is_some())
        });
        let agent = vm.agent.unwrap();
        assert_eq!(agent.actuator, "paravirt", "by itself");
        assert!(agent.kernel_release.ends_with("-hint-lab"), "{agent:?}");
    }

    for guest in &guests {
        guest.spawn_spinners(4).unwrap();
    }
    let folded = |guest: &Guest| wait_for_mask(guest, |mask| mask.len() == 3, &broker);
    assert_eq!(folded(left), cpus("1-3"));
    assert_eq!(folded(&guests[1]), cpus("1-3"));
    let vm = wait_for_vm(&broker, "left", |vm| {
        vm.agent
            .as_ref()
            .is_some_and(|agent| agent.applied == Some(1))
    });
    assert_eq!((vm.usable, vm.reason()), (Some(1), v1::Reason::Contention));
    let before = user_ticks(left, pinned);
    let ticks = left
        .wait_for(
            SOON,
            |guest| Ok(user_ticks(guest, pinned)),
            |ticks| *ticks > before + 50,
        )
        .unwrap();
    assert!(ticks > before + 50, "a pinned task goes on while folded");
    assert_eq!(cpus_of(left, &[pinned]), [3]);
    assert_eq!(left.cpus_allowed(pinned).unwrap(), cpus("3"));
    assert_eq!(
        left.work_cpus().unwrap(),
        cpus("0-3"),
        "no cpuset is touched"
    );

    // The kernel takes a CPU that goes out of the mask; it is folded again when it is back.
    left.sh("echo 0 >/sys/devices/system/cpu/cpu2/online")
        .unwrap();
    wait_for_mask(left, |mask| *mask == cpus("1,3"), &broker);
    left.sh("echo 1 >/sys/devices/system/cpu/cpu2/online")
        .unwrap();
    assert_eq!(folded(left), cpus("1-3"));

    left.signal_agent("KILL").unwrap();
    let none = |guest: &Guest| wait_for_mask(guest, CpuSet::is_empty, &broker);
    none(left);
    left.start_agent(AGENT).unwrap();
    folded(left);
    left.signal_agent("TERM").unwrap();
    none(left);
    let off = broker.set_mode(v1::Mode::Observe).unwrap();
    assert!(off.unconfirmed.is_empty(), "{off:?}");
    assert_eq!(guests[1].avoided_cpus().unwrap(), cpus(""), "confirmed");
    for guest in &guests {
        assert_eq!(complaints(guest), [""; 0]);
    }
}
