//! The harness itself, with real guests: what it promises to every other test.

#![allow(
    clippy::unwrap_used,
    reason = "clippy exempts test functions but not the helpers of a test file"
)]

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use hint_proto::CpuSet;
use lab::skip::{self, Need};
use lab::{Guest, GuestError, GuestSpec, Topology, lock};

const SOON: Duration = Duration::from_secs(60);

fn cpus(list: &str) -> CpuSet {
    CpuSet::parse_list(list).unwrap()
}

fn allowed(guest: &Guest, pid: u32) -> String {
    guest.cpus_allowed(pid).unwrap().to_string()
}

#[test]
fn commands_give_their_status_and_exact_output() {
    if !skip::can_run(
        "commands_give_their_status_and_exact_output",
        &[Need::Guests],
    ) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let guest = Guest::boot(&GuestSpec::named("commands")).unwrap();
    println!("boot: {:?}", guest.boot_time());
    assert_eq!(guest.online().unwrap(), cpus("0-3"));
    assert_eq!(guest.sh("hostname").unwrap(), "commands");

    let output = guest
        .run(r"printf 'a\000\377\nb'; echo bad >&2; exit 7")
        .unwrap();
    assert_eq!(output.status, 7);
    assert_eq!(output.stdout, b"a\0\xff\nb");
    assert_eq!(output.stderr, b"bad\n");
    assert_eq!(guest.run("kill -TERM $$").unwrap().status, 128 + 15);

    let mebibyte = guest.run("head -c 1048576 /dev/zero").unwrap();
    assert_eq!(mebibyte.stdout, vec![0; 1 << 20]);
    let long_command = format!("echo {} | wc -c", "x".repeat(100_000));
    assert_eq!(guest.sh(&long_command).unwrap(), "100001");

    let error = guest.run("head -c 1048577 /dev/zero").unwrap_err();
    assert!(error.to_string().contains("found 1048577"), "{error}");
    let error = guest
        .run_within("echo early; sleep 1000", Duration::from_secs(1))
        .unwrap_err();
    assert!(matches!(error, GuestError::Deadline { .. }), "{error}");
    assert!(error.to_string().contains("early"), "{error}");
    let error = guest.sh("ls /no/such/file").unwrap_err().to_string();
    assert!(error.contains("found 1: ls: /no/such/file"), "{error}");

    for number in 0..20 {
        assert_eq!(
            guest.sh(&format!("echo {number}")).unwrap(),
            number.to_string()
        );
    }
}

#[test]
fn work_runs_in_its_group_and_follows_the_groups_cpus() {
    if !skip::can_run(
        "work_runs_in_its_group_and_follows_the_groups_cpus",
        &[Need::Guests],
    ) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let guest = Guest::boot(&GuestSpec::named("work")).unwrap();

    let spinners = guest.spawn_spinners(8).unwrap();
    let pinned = guest
        .spawn_work("exec taskset -c 2 sh -c 'while :; do :; done'")
        .unwrap();
    let pid = guest.work_pids(spinners).unwrap()[0];
    let pinned_pid = guest.work_pids(pinned).unwrap()[0];
    let group = guest.sh(&format!("cat /proc/{pid}/cgroup")).unwrap();
    assert!(group.starts_with("0::/workload/"), "{group}");
    assert_eq!(guest.sh("cat /proc/self/cgroup").unwrap(), "0::/");

    // Work is normal, commands are real-time: field 41 of stat is the policy, 0 and 1.
    let policy = |pid: &str| {
        let stat = guest.sh(&format!("cat /proc/{pid}/stat")).unwrap();
        let (_, fields) = stat.rsplit_once(") ").unwrap();
        fields.split(' ').nth(38).unwrap().to_owned()
    };
    assert_eq!(policy(&pid.to_string()), "0");
    assert_eq!(policy("self"), "1");

    assert_eq!(guest.work_cpus().unwrap(), cpus("0-3"));
    assert_eq!(allowed(&guest, pid), "0-3");
    let is_pinned = guest
        .wait_for(SOON, |g| g.cpus_allowed(pinned_pid), |set| set.len() == 1)
        .unwrap();
    assert_eq!(is_pinned, cpus("2"));

    guest
        .sh("echo 0-1 >/sys/fs/cgroup/workload/cpuset.cpus")
        .unwrap();
    assert_eq!(guest.work_cpus().unwrap(), cpus("0-1"));
    assert_eq!(allowed(&guest, pid), "0-1");
    assert_eq!(allowed(&guest, pinned_pid), "0-1");
    assert_eq!(allowed(&guest, 1), "0-3");

    // An empty list would be refused (ENOSPC) while the group has tasks.
    guest
        .sh("echo 0-3 >/sys/fs/cgroup/workload/cpuset.cpus")
        .unwrap();
    assert_eq!(guest.work_cpus().unwrap(), cpus("0-3"));
    assert_eq!(allowed(&guest, pid), "0-3");
    assert_eq!(allowed(&guest, pinned_pid), "2");

    let brief = guest
        .spawn_work("echo out; echo err >&2; sleep 1; exit 9")
        .unwrap();
    let output = guest.wait_work(brief, SOON).unwrap();
    assert_eq!(
        (output.status, &output.stdout[..], &output.stderr[..]),
        (9, &b"out\n"[..], &b"err\n"[..])
    );

    let error = guest
        .wait_work(spinners, Duration::from_millis(100))
        .unwrap_err();
    assert!(matches!(error, GuestError::WorkDeadline { .. }), "{error}");
    guest.kill_work(spinners).unwrap();
    assert_eq!(guest.work_pids(spinners).unwrap(), Vec::<u32>::new());
    assert_eq!(guest.wait_work(spinners, SOON).unwrap().status, 128 + 9);
    assert_eq!(guest.work_pids(pinned).unwrap(), [pinned_pid]);
}

#[test]
fn the_guests_vsock_arrives_on_the_hybrid_socket() {
    if !skip::can_run(
        "the_guests_vsock_arrives_on_the_hybrid_socket",
        &[Need::Guests],
    ) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let spec = GuestSpec {
        programs: vec!["socat".to_owned()],
        topology: Some(Topology {
            sockets: 1,
            cores: 2,
            threads: 2,
        }),
        numa_nodes: 2,
        ..GuestSpec::named("vsock")
    };
    let guest = Guest::boot(&spec).unwrap();
    let siblings = "/sys/devices/system/cpu/cpu3/topology/thread_siblings_list";
    assert_eq!(guest.sh(&format!("cat {siblings}")).unwrap(), "2-3");
    let node = "/sys/devices/system/node/node1/cpulist";
    assert_eq!(guest.sh(&format!("cat {node}")).unwrap(), "2-3");

    let mut socket = guest.hybrid_socket().as_os_str().to_owned();
    socket.push("_737");
    let listener = UnixListener::bind(PathBuf::from(socket)).unwrap();
    let broker = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut greeting = [0; 6];
        stream.read_exact(&mut greeting).unwrap();
        stream.write_all(b"welcome\n").unwrap();
        greeting
    });
    let answer = guest
        .sh("(echo hello; sleep 1) | socat -t 20 - VSOCK-CONNECT:2:737")
        .unwrap();
    assert_eq!(answer, "welcome");
    assert_eq!(&broker.join().unwrap(), b"hello\n");

    guest.kill_vsock();
    let broken = guest
        .run("echo hello | socat -t 5 - VSOCK-CONNECT:2:737")
        .unwrap();
    assert_ne!(broken.status, 0);
}

#[test]
fn guests_compete_in_groups_of_their_own_and_leave_nothing() {
    if !skip::can_run(
        "guests_compete_in_groups_of_their_own_and_leave_nothing",
        &[Need::Guests],
    ) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let specs = [GuestSpec::named("left"), GuestSpec::named("right")];
    let guests = Guest::boot_all(&specs).unwrap();
    assert_ne!(guests[0].cid(), guests[1].cid());

    let mut left_behind: Vec<PathBuf> = Vec::new();
    for guest in &guests {
        let group = guest.cpu_group();
        let members = fs::read_to_string(group.procs()).unwrap();
        for pid in [guest.pid(), guest.vhost_pid()] {
            assert!(
                members.lines().any(|line| line == pid.to_string()),
                "{members}"
            );
            left_behind.push(format!("/proc/{pid}").into());
        }
        left_behind.push(group.path().to_owned());
        left_behind.push(guest.console_log().parent().unwrap().to_owned());

        let tasks = format!("/proc/{}/task", guest.pid());
        let vcpus = fs::read_dir(tasks)
            .unwrap()
            .filter_map(|task| fs::read_to_string(task.unwrap().path().join("comm")).ok())
            .filter(|name| name.starts_with("CPU ") && name.ends_with("/TCG\n"))
            .count();
        assert_eq!(vcpus, 4);
        let command_line = fs::read_to_string(format!("/proc/{}/cmdline", guest.pid())).unwrap();
        assert!(command_line.contains(&format!("guest={},", guest.name())));
        assert!(command_line.contains(guest.uuid()));
        group.set_weight(200).unwrap();
        group.set_quota(Some(2_000)).unwrap();
        group.set_quota(None).unwrap();
        group.set_weight(100).unwrap();
    }

    // Together, so that they compete; the times are for the reader, a noisy machine proves nothing.
    let times: Vec<f64> = thread::scope(|scope| {
        let runs: Vec<_> = guests
            .iter()
            .map(|guest| scope.spawn(|| guest.hackbench(200).unwrap()))
            .collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    });
    println!("hackbench, 50 loops, two guests at once: {times:?} s");
    assert!(times.iter().all(|time| *time > 0.0));

    assert!(left_behind.iter().all(|path| path.exists()));
    drop(guests);
    for path in left_behind {
        assert!(!path.exists(), "{}", path.display());
    }
}

#[test]
fn a_failure_shows_and_keeps_the_console() {
    if !skip::can_run("a_failure_shows_and_keeps_the_console", &[Need::Guests]) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let spec = GuestSpec {
        kernel_args: vec!["rdinit=/no/such/init".to_owned(), "init=/none".to_owned()],
        ..GuestSpec::named("no-init")
    };
    let error = Guest::boot(&spec).unwrap_err();
    assert!(matches!(error, GuestError::Boot { .. }), "{error}");
    let message = error.to_string();
    assert!(message.contains("Kernel panic"), "{message}");

    let spec = GuestSpec {
        qemu_args: vec!["-no-such-option".to_owned()],
        ..GuestSpec::named("no-qemu")
    };
    let message = Guest::boot(&spec).unwrap_err().to_string();
    assert!(
        message.contains("-no-such-option: invalid option"),
        "{message}"
    );

    let guest = Guest::boot(&GuestSpec::named("fails")).unwrap();
    guest.sh("echo 'the last words' >/dev/console").unwrap();
    wait_for_text(&guest.console_log(), "the last words");
    let failing_test = thread::spawn(move || {
        let _guest = guest;
        panic!("on purpose: this test looks at what a failing test leaves");
    });
    failing_test.join().unwrap_err();
    let kept = lab::assets::target_dir()
        .join("lab/logs")
        .join(format!("fails-{}.log", std::process::id()));
    let log = fs::read_to_string(&kept).unwrap();
    assert!(log.contains("the last words"));
    fs::remove_file(kept).unwrap();

    let guest = Guest::boot(&GuestSpec::named("dies")).unwrap();
    let error = guest.run("poweroff -f; sleep 60").unwrap_err().to_string();
    assert!(error.contains("QEMU ended"), "{error}");
}

fn wait_for_text(file: &Path, text: &str) {
    let end = Instant::now() + SOON;
    while !fs::read_to_string(file).unwrap_or_default().contains(text) {
        assert!(
            Instant::now() < end,
            "{text:?} is not in {}",
            file.display()
        );
        thread::sleep(Duration::from_millis(50));
    }
}
