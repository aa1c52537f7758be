//! The broker on a KVM host: real KVM guests, KVM's debugfs, and the AF_VSOCK of a real kernel on both sides. All in one boot of
//! a virtual host, since nothing of it can be had faster.

#![allow(
    clippy::unwrap_used,
    reason = "clippy exempts test functions but not the helpers of a test file"
)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;
use std::time::{Duration, Instant};

use hint_proto::CpuSet;
use lab::skip::{self, Need};
use lab::{InnerGuest, VirtualHost, lock};
use serde_json::Value;

/// Software emulation of hardware virtualisation is slow, and this machine may have much else to do.
const PATIENCE: Duration = Duration::from_secs(300);

/// Boots of the virtual host, which the emulator may lose.
const ATTEMPTS: u32 = 5;

/// Ticks are dear under emulation.
const CONFIG: &str =
    "mode = \"enforce\"\n[observe]\ninterval_ms = 500\n[metrics]\nenabled = false\n";

struct Watch {
    host: VirtualHost,
    started: Instant,
}

impl Watch {
    fn say(&self, what: &str) {
        println!("{:6.1} s: {what}", self.started.elapsed().as_secs_f64());
    }

    /// Asks until the answer is as wanted.
    fn until<T: std::fmt::Debug>(
        &self,
        what: &str,
        question: impl Fn(&VirtualHost) -> T,
        wanted: impl Fn(&T) -> bool,
    ) -> T {
        let end = Instant::now() + PATIENCE;
        loop {
            let answer = question(&self.host);
            if wanted(&answer) {
                self.say(what);
                return answer;
            }
            assert!(
                Instant::now() < end,
                "not {what}: {answer:?}\n--- broker ---\n{}\n--- left ---\n{}\n--- right ---\n{}",
                self.host.broker_log().unwrap_or_default(),
                self.host.console("left").unwrap_or_default(),
                self.host.console("right").unwrap_or_default(),
            );
            thread::sleep(Duration::from_secs(1));
        }
    }

    /// Waits until the work of both guests may use so many CPUs, by reports that were made after this call.
    fn until_work_has(&self, what: &str, left: usize, right: usize) {
        for (name, count) in [("left", left), ("right", right)] {
            let before = self.number(name);
            self.until(
                &format!("{what}: {name} works on {count}"),
                |host| host.work_cpus(name).unwrap(),
                |report| {
                    matches!(report, Some((number, cpus)) if *number > before && cpus.len() == count)
                },
            );
        }
    }

    /// Did a guest end by itself, or does the report of one that runs stand still? The report is made at real-time priority and waits for nobody.
    fn lost_guest(&self) -> Option<&'static str> {
        let runs = |name: &str| {
            let qemu = format!(
                "pidof qemu-system-x86_64 | tr ' ' '\\n' | while read pid; do cat /proc/$pid/cmdline; done | grep -qa guest={name}"
            );
            self.host
                .guest()
                .run(&qemu)
                .is_ok_and(|output| output.status == 0)
        };
        // The test ends left, but never right.
        if !runs("right") {
            return Some("the end of a guest");
        }
        let numbers = || ["left", "right"].map(|name| self.number(name));
        let before = numbers();
        thread::sleep(Duration::from_secs(30));
        let now = numbers();
        ["left", "right"]
            .into_iter()
            .zip(before.iter().zip(now))
            .any(|(name, (before, now))| *before == now && runs(name))
            .then_some("a hang of a guest")
    }

    fn number(&self, name: &str) -> u64 {
        let report = self.host.work_cpus(name).unwrap();
        report.map_or(0, |(number, _)| number)
    }
}

fn list(host: &VirtualHost) -> Value {
    let output = host.guest().run("hintctl list --json").unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
}

fn vm<'a>(list: &'a Value, name: &str) -> Option<&'a Value> {
    list["vms"].as_array()?.iter().find(|vm| vm["name"] == name)
}

fn both(list: &Value, wanted: impl Fn(&Value) -> bool) -> bool {
    ["left", "right"]
        .iter()
        .all(|name| vm(list, name).is_some_and(&wanted))
}

#[test]
#[ignore = "takes 2 to 25 minutes, since QEMU's emulation of AMD-V gets lost at times; `make test-full` runs it"]
fn a_kvm_host_folds_its_guests_over_the_kernels_vsock() {
    const TEST: &str = "a_kvm_host_folds_its_guests_over_the_kernels_vsock";
    if !skip::can_run(TEST, &[Need::Guests]) {
        return;
    }
    if let Some(missing) = VirtualHost::missing() {
        skip::skipped(TEST, &missing.to_string());
        return;
    }
    let _cores = lock::cores().unwrap();
    for attempt in 1.. {
        let started = Instant::now();
        let host = VirtualHost::boot("host", 2).unwrap();
        let watch = Watch { host, started };
        watch.say("the virtual host runs");
        let Err(panic) = catch_unwind(AssertUnwindSafe(|| folds_and_unfolds(&watch))) else {
            return;
        };
        let lost = watch.host.lost_to_emulation();
        match lost.or_else(|| watch.lost_guest()) {
            Some(how) if attempt < ATTEMPTS => {
                watch.say(&format!("{how} of the emulated machine: once more"));
            }
            _ => resume_unwind(panic),
        }
    }
}

fn folds_and_unfolds(watch: &Watch) {
    let host = &watch.host;
    let broker = host.start_broker(CONFIG).unwrap();
    watch.until("the broker answers", list, |list| {
        list["host"]["mode"] == "enforce"
    });

    // Different numbers of vCPUs, so that a hint that went to the wrong guest would show.
    let [left, _] = [("left", 33, 4), ("right", 34, 5)].map(|(name, cid, vcpus)| {
        let name = name.to_owned();
        host.start_guest(&InnerGuest { name, cid, vcpus }).unwrap()
    });
    let seen = watch.until("both VMs are seen", list, |list| {
        both(list, |vm| vm["vcpus"].is_u64())
    });
    assert_eq!(seen["vms"].as_array().unwrap().len(), 2, "{seen}");
    assert_eq!(vm(&seen, "left").unwrap()["vcpus"], 4, "{seen}");
    assert_eq!(vm(&seen, "right").unwrap()["vcpus"], 5, "{seen}");
    assert_eq!(seen["host"]["degraded"], Value::Array(vec![]), "{seen}");
    // Without names of vCPU threads and without counting emulated guests, only KVM and its debugfs can have told.
    let names = host
        .guest()
        .sh("cat /proc/[0-9]*/task/*/comm | grep '^CPU ' || true")
        .unwrap();
    assert_eq!(names, "");
    assert_eq!(
        host.broker_log()
            .unwrap()
            .matches("accelerator=Kvm")
            .count(),
        2
    );

    let connected = watch.until("both agents are connected", list, |list| {
        both(list, |vm| vm["agent"]["state"] == "connected")
    });
    for name in ["left", "right"] {
        let agent = &vm(&connected, name).unwrap()["agent"];
        assert_eq!(agent["actuator"], "cpuset", "{agent}");
    }

    watch.until_work_has("folded", 1, 1);
    let folded = watch.until("both VMs are folded to 1", list, |list| {
        both(list, |vm| {
            vm["usable_vcpus"] == 1 && vm["agent"]["applied_cpus"] == 1
        })
    });
    for name in ["left", "right"] {
        let (_, cpus) = host.work_cpus(name).unwrap().unwrap();
        let told = vm(&folded, name).unwrap()["agent"]["preferred_cpus"].clone();
        assert_eq!(CpuSet::parse_list(told.as_str().unwrap()).unwrap(), cpus);
    }

    host.guest().sh(&format!("kill -KILL {broker}")).unwrap();
    watch.until_work_has("the broker is killed", 4, 5);

    let broker = host.start_broker(CONFIG).unwrap();
    watch.until_work_has("the broker runs again", 1, 1);

    // A stopped broker keeps its connections, so that only the lease can end the fold.
    host.guest().sh(&format!("kill -STOP {broker}")).unwrap();
    watch.until_work_has("the broker is stopped", 4, 5);
    host.guest().sh(&format!("kill -CONT {broker}")).unwrap();
    watch.until_work_has("the broker goes on", 1, 1);

    let off = host.guest().sh("hintctl off").unwrap();
    watch.until_work_has("off", 4, 5);
    assert!(off.contains("off: no hint is in force"), "{off}");
    let off = list(host);
    assert_eq!(off["host"]["mode"], "observe", "{off}");

    host.guest().sh("hintctl mode enforce").unwrap();
    watch.until_work_has("on again", 1, 1);
    host.guest().kill_work(left).unwrap();
    watch.until(
        "the neighbour is gone: right has room for more than 1",
        |host| host.work_cpus("right").unwrap(),
        |report| report.as_ref().is_some_and(|(_, cpus)| cpus.len() > 1),
    );
    watch.until("left is gone", list, |list| {
        vm(list, "left").is_none() && vm(list, "right").is_some()
    });

    // The CID belongs to whoever has it now.
    let name = "third".to_owned();
    let (cid, vcpus) = (33, 3);
    host.start_guest(&InnerGuest { name, cid, vcpus }).unwrap();
    let third = watch.until("a new VM has the old CID", list, |list| {
        vm(list, "third").is_some_and(|vm| vm["agent"]["state"] == "connected")
    });
    assert_eq!(vm(&third, "third").unwrap()["vcpus"], 3, "{third}");
    watch.until(
        "it is folded too",
        |host| host.work_cpus("third").unwrap(),
        |report| report.as_ref().is_some_and(|(_, cpus)| cpus.len() == 1),
    );
    let log = host.broker_log().unwrap();
    assert!(!log.contains("panicked"), "{log}");
    println!("{log}");
}
