//! What folding by the kernel's mask is worth beside folding by cpusets: the same guests, the same load, in one run.
//!
//! Each round has guests of its own, so that no single boot decides. What a broker has seen makes it slower to fold, so each arm of a
//! round has a broker of its own.

#![allow(
    clippy::unwrap_used,
    reason = "clippy exempts test functions but not the helpers of a test file"
)]

use std::thread;
use std::time::{Duration, Instant};

use hint_proto::v1;
use lab::skip::{self, Need};
use lab::{Broker, BrokerSpec, Guest, GuestSpec, Kernel, assets, lock, process};

const SOON: Duration = Duration::from_secs(60);
const PCPUS: usize = 2;
const ROUNDS: usize = 5;
/// As in `make demo`: long enough that the half second before a fold counts for little.
const LOOPS: u32 = 1500;
/// A guest that runs less than this has nothing left of the last round to do.
const QUIET_MILLI_CPUS: u64 = 300;
/// Medians of so few rounds on a machine with other work differ by so much for no reason.
const NOISE: f64 = 0.1;

/// One way to run hackbench in both guests at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arm {
    WithoutHints,
    Cpuset,
    Mask,
}

const ARMS: [Arm; 3] = [Arm::WithoutHints, Arm::Cpuset, Arm::Mask];

impl Arm {
    fn actuator(self) -> &'static str {
        match self {
            Self::Cpuset => "cpuset",
            Self::WithoutHints | Self::Mask => "paravirt",
        }
    }

    fn mode(self) -> v1::Mode {
        match self {
            Self::WithoutHints => v1::Mode::Observe,
            Self::Cpuset | Self::Mask => v1::Mode::Enforce,
        }
    }
}

fn agents(broker: &Broker) -> Vec<v1::Agent> {
    let vms = broker.list().unwrap().vms;
    vms.into_iter().filter_map(|vm| vm.agent).collect()
}

#[track_caller]
fn wait_until(broker: &Broker, what: &str, mut done: impl FnMut(&Broker) -> bool) {
    let end = Instant::now() + SOON;
    while !done(broker) {
        assert!(Instant::now() < end, "{what}: {}", broker.log());
        thread::sleep(Duration::from_millis(100));
    }
}

/// Both guests have an agent with the arm's actuator, all their vCPUs, and nothing to do.
fn settle(broker: &Broker, guests: &[Guest], arm: Arm) {
    for guest in guests {
        guest
            .start_agent(&["run", "--actuator", arm.actuator()])
            .unwrap();
    }
    wait_until(broker, "both agents connect", |broker| {
        let ready =
            |agent: &&v1::Agent| agent.actuator == arm.actuator() && agent.applied == Some(4);
        agents(broker).iter().filter(ready).count() == guests.len()
    });
    for guest in guests {
        assert_eq!(guest.work_cpus().unwrap().len(), 4);
        assert!(guest.avoided_cpus().unwrap().is_empty());
    }
    wait_until(broker, "the guests become quiet", |broker| {
        let idle = |vm: &v1::Vm| vm.run_milli_cpus.is_some_and(|run| run < QUIET_MILLI_CPUS);
        broker.list().unwrap().vms.iter().all(idle)
    });
}

/// The mean of both guests' hackbench, in seconds. The agents have ended when this returns.
fn run(guests: &[Guest], arm: Arm) -> f64 {
    let broker = Broker::start(&BrokerSpec {
        mode: "observe",
        ..BrokerSpec::default()
    })
    .unwrap();
    settle(&broker, guests, arm);
    broker.set_mode(arm.mode()).unwrap();
    let seconds: Vec<f64> = thread::scope(|scope| {
        let loads: Vec<_> = guests
            .iter()
            .map(|guest| scope.spawn(|| guest.hackbench(LOOPS).unwrap()))
            .collect();
        let folded = both_fold(&broker, guests, arm);
        assert!(folded, "{arm:?}: {}", broker.log());
        loads.into_iter().map(|load| load.join().unwrap()).collect()
    });
    for guest in guests {
        guest.signal_agent("TERM").unwrap();
        let status = guest
            .wait_for(SOON, Guest::agent_status, Option::is_some)
            .unwrap();
        assert_eq!(status, Some(0), "{}", guest.agent_log().unwrap());
    }
    seconds.iter().sum::<f64>() / 2.0
}

/// Waits until both guests use one vCPU at the same time where the arm folds. The guests are asked only when their agents say so, so
/// that the load is not disturbed; a load that still begins may be given one more for a moment.
fn both_fold(broker: &Broker, guests: &[Guest], arm: Arm) -> bool {
    if arm == Arm::WithoutHints {
        return true;
    }
    let folded = |agent: &v1::Agent| agent.applied == Some(1);
    let really = |guest: &Guest| match arm {
        Arm::Cpuset => guest.work_cpus().unwrap().len() == 1,
        _ => guest.avoided_cpus().unwrap().len() == 3 && guest.work_cpus().unwrap().len() == 4,
    };
    let end = Instant::now() + Duration::from_secs(10);
    while Instant::now() < end {
        if agents(broker).iter().all(folded) && guests.iter().all(really) {
            return true;
        }
        thread::sleep(Duration::from_millis(200));
    }
    false
}

fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

#[test]
#[ignore = "takes 4 minutes and a machine with nothing else to do"]
fn the_mask_is_worth_as_much_as_a_cpuset() {
    const NAME: &str = "the_mask_is_worth_as_much_as_a_cpuset";
    if !skip::can_run(NAME, &[Need::ParavirtGuests]) {
        return;
    }
    process::confine(PCPUS).unwrap();
    let _cores = lock::cores().unwrap();
    let specs = ["vm1", "vm2"].map(|name| {
        let spec = GuestSpec::named(name).with_kernel(Kernel::Paravirt);
        GuestSpec {
            files: vec![(assets::agent().unwrap(), "/bin/hint-agent".into())],
            ..spec
        }
    });
    let mut times: [Vec<f64>; ARMS.len()] = Default::default();
    for number in 0..ROUNDS {
        let guests = Guest::boot_all(&specs).unwrap();
        // Another arm is the first in each round, so that none gains by a machine that grows slower or faster.
        for offset in 0..ARMS.len() {
            let arm = (number + offset) % ARMS.len();
            let seconds = run(&guests, ARMS[arm]);
            println!("round {} {:?}: {seconds:.2} s", number + 1, ARMS[arm]);
            times[arm].push(seconds);
        }
    }
    let [without, cpuset, mask] = times.each_ref().map(|times| median(times));
    println!(
        "medians of {ROUNDS}: without hints {without:.2} s, cpuset {cpuset:.2} s ({:.2}x), mask {mask:.2} s ({:.2}x)",
        without / cpuset,
        without / mask
    );
    assert!(mask <= cpuset * (1.0 + NOISE), "{times:?}");
    assert!(mask < without, "{times:?}");
}
