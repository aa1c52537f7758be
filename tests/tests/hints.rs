//! The whole job with real guests: what the broker decides, and what the guests' own kernels say of it.
//!
//! Each test boots its guests once and goes through many states. A state counts when the guest's real mask shows it, never by
//! the broker's word.

#![allow(
    clippy::unwrap_used,
    reason = "clippy exempts test functions but not the helpers of a test file"
)]

use std::thread;
use std::time::{Duration, Instant};

use hint_proto::v1;
use lab::load::OtherWork;
use lab::skip::{self, Need};
use lab::{Broker, BrokerSpec, Guest, GuestSpec, WorkId, lock};

/// For states that come within seconds: long enough for any machine.
const SOON: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(5);
const ROUNDS: usize = 3;
/// CPUs of other work, in the busiest second, beside which a round still proves something; how many rounds may be lost to more,
/// and how long to wait for less after each.
const QUIET: f64 = 0.4;
const DISTURBED: u32 = 8;
const QUIET_PATIENCE: Duration = Duration::from_secs(60);
const AGENT: &[&str] = &["run"];

fn guests_with_agents(names: [&str; 2]) -> Vec<GuestSpec> {
    names
        .iter()
        .map(|name| GuestSpec::named(name).with_agent(AGENT))
        .collect()
}

fn start_broker() -> Broker {
    Broker::start(&BrokerSpec {
        mode: "enforce",
        lease: LEASE,
        ..BrokerSpec::default()
    })
    .unwrap()
}

/// Waits until the guest's work may really use so many CPUs; says how long that took.
#[track_caller]
fn wait_for_cpus(guest: &Guest, wanted: usize, broker: &Broker) -> Duration {
    let start = Instant::now();
    let cpus = guest
        .wait_for(SOON, Guest::work_cpus, |cpus| cpus.len() == wanted)
        .unwrap();
    assert_eq!(
        cpus.len(),
        wanted,
        "{} may use CPUs {cpus}\nagent:\n{}\nbroker:\n{}",
        guest.name(),
        guest.agent_log().unwrap_or_default(),
        broker.log()
    );
    start.elapsed()
}

#[track_caller]
fn wait_for_agents(broker: &Broker, count: usize) {
    let end = Instant::now() + SOON;
    loop {
        let state = broker.list().unwrap();
        let applied = |vm: &&v1::Vm| {
            vm.agent
                .as_ref()
                .is_some_and(|agent| agent.applied.is_some())
        };
        if state.vms.iter().filter(applied).count() == count {
            return;
        }
        assert!(Instant::now() < end, "{state:?}\n{}", broker.log());
        thread::sleep(Duration::from_millis(100));
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

#[test]
fn guests_use_what_they_can_really_run() {
    if !skip::can_run("guests_use_what_they_can_really_run", &[Need::Guests]) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let mut specs = guests_with_agents(["left", "right"]);
    specs.push(GuestSpec::named("stranger"));
    let guests = Guest::boot_all(&specs).unwrap();
    let [left, right, _] = &guests[..] else {
        panic!("three guests")
    };
    // Pinned to the last CPU, which a guest of four folds away first; before there is a broker, since a folded guest lets nobody pin
    // himself to an avoided CPU.
    let pinned = left
        .spawn_work("exec taskset -c 3 sh -c 'while :; do sleep 1; done'")
        .unwrap();
    let pinned_pid = left.work_pids(pinned).unwrap()[0];
    assert_eq!(left.cpus_allowed(pinned_pid).unwrap().to_string(), "3");

    let broker = start_broker();
    wait_for_agents(&broker, 2);
    let mut times = Vec::new();
    let mut disturbed = 0;
    while times.len() < ROUNDS {
        let meter = OtherWork::start(&guests);
        let work = [
            left.spawn_spinners(4).unwrap(),
            right.spawn_spinners(4).unwrap(),
        ];
        let result = round(&broker, &guests, work, pinned_pid);
        left.kill_work(work[0]).unwrap();
        right.kill_work(work[1]).unwrap();
        match result {
            Ok(time) => times.push(time),
            // What the guests are due depends on what else runs here, so a round beside other work proves nothing.
            Err(what) if meter.peak() > QUIET && disturbed < DISTURBED => {
                disturbed += 1;
                println!(
                    "beside {:.2} CPUs of other work: {what}; once more",
                    meter.peak()
                );
                meter.wait_for_quiet(QUIET, QUIET_PATIENCE);
            }
            Err(what) => panic!(
                "{what}\nbeside {:.2} CPUs of other work\nagent:\n{}\nbroker:\n{}",
                meter.peak(),
                left.agent_log().unwrap(),
                broker.log()
            ),
        }
        // Each guest may be folded four times a minute, and the more seldom the sooner.
        thread::sleep(Duration::from_secs(15));
    }
    let (raised, opened): (Vec<Duration>, Vec<Duration>) = times.into_iter().unzip();
    println!("one idle, the other has the host: {raised:?}; both idle, both open: {opened:?}");
    let (raised, opened) = (median(raised), median(opened));
    assert!(
        raised <= Duration::from_secs(1),
        "median {raised:?}: {}",
        broker.log()
    );
    assert!(
        opened <= Duration::from_secs(5),
        "median {opened:?}: {}",
        broker.log()
    );
}

/// Both busy, one idle, both idle. Gives the times in which the other guest had all of the host, and both had all their vCPUs.
fn round(
    broker: &Broker,
    guests: &[Guest],
    [left_work, right_work]: [WorkId; 2],
    pinned: u32,
) -> Result<(Duration, Duration), String> {
    let [left, right, stranger] = guests else {
        panic!("three guests")
    };
    reach(left, 1)?;
    reach(right, 1)?;
    let vm = broker.vm("left").unwrap();
    check(
        "left's decision",
        &(vm.vcpus, vm.usable, vm.reason()),
        &(Some(4), Some(1), v1::Reason::Contention),
    )?;
    check(
        "left's answer",
        &vm.agent.and_then(|agent| agent.applied),
        &Some(1),
    )?;
    check(
        "a pinned task while folded",
        &left.cpus_allowed(pinned).unwrap(),
        &left.work_cpus().unwrap(),
    )?;
    check(
        "the stranger's CPUs",
        &stranger.work_cpus().unwrap().to_string().as_str(),
        &"0-3",
    )?;
    let vm = broker.vm("stranger").unwrap();
    check(
        "the stranger's decision",
        &(vm.usable, vm.reason()),
        &(Some(4), v1::Reason::NoAgent),
    )?;
    check(
        "the stranger's agent",
        &vm.agent.unwrap_or_default().state(),
        &v1::AgentState::Absent,
    )?;
    let metrics = broker.metrics().unwrap();
    let usable = format!(
        "hint_broker_vm_usable_vcpus{{vm=\"{}\"}} 1\n",
        broker.vm("left").unwrap().id
    );
    check(
        "metrics",
        &(
            metrics.starts_with("HTTP/1.1 200 "),
            metrics.contains(&usable),
        ),
        &(true, true),
    )?;

    // Steady for a while: what follows is then a change that this test has made.
    thread::sleep(Duration::from_secs(6));
    check(
        "steady",
        &(
            left.work_cpus().unwrap().len(),
            right.work_cpus().unwrap().len(),
        ),
        &(1, 1),
    )?;

    right.kill_work(right_work).unwrap();
    let raised = reach(left, 2)?;
    thread::sleep(Duration::from_secs(3));
    check(
        "all of the host, and no more",
        &left.work_cpus().unwrap().len(),
        &2,
    )?;

    left.kill_work(left_work).unwrap();
    let start = Instant::now();
    reach(left, 4)?;
    reach(right, 4)?;
    let opened = start.elapsed();
    check(
        "a pinned task after unfolding",
        &left.cpus_allowed(pinned).unwrap().to_string().as_str(),
        &"3",
    )?;
    Ok((raised, opened))
}

fn check<T: PartialEq + std::fmt::Debug>(what: &str, found: &T, wanted: &T) -> Result<(), String> {
    if found == wanted {
        Ok(())
    } else {
        Err(format!("{what}: {found:?}, not {wanted:?}"))
    }
}

/// Waits until the guest's work may really use so many CPUs; says how long that took.
fn reach(guest: &Guest, wanted: usize) -> Result<Duration, String> {
    let start = Instant::now();
    let cpus = guest
        .wait_for(SOON, Guest::work_cpus, |cpus| cpus.len() == wanted)
        .unwrap();
    check(guest.name(), &cpus.len(), &wanted).map(|()| start.elapsed())
}

#[test]
fn whatever_fails_guests_get_their_mask_back() {
    if !skip::can_run("whatever_fails_guests_get_their_mask_back", &[Need::Guests]) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let guests = Guest::boot_all(&guests_with_agents(["left", "right"])).unwrap();
    let [left, right] = &guests[..] else {
        panic!("two guests")
    };
    let mut broker = start_broker();
    wait_for_agents(&broker, 2);
    left.spawn_spinners(4).unwrap();
    right.spawn_spinners(4).unwrap();
    let folded = |broker: &Broker| {
        wait_for_cpus(left, 1, broker);
        wait_for_cpus(right, 1, broker);
    };
    folded(&broker);

    // The broker is killed: the leases run out.
    broker.kill();
    let killed = Instant::now();
    wait_for_cpus(left, 4, &broker);
    wait_for_cpus(right, 4, &broker);
    let back = killed.elapsed();
    println!("broker killed, both guests open after {back:?} at a lease of {LEASE:?}");
    assert!(
        back <= LEASE + Duration::from_secs(3),
        "{back:?} with a lease of {LEASE:?}: {}",
        left.agent_log().unwrap()
    );

    // It comes back: the agents find it by themselves and are hinted again.
    broker.start_again().unwrap();
    folded(&broker);

    // One agent is told to end, then started again.
    left.signal_agent("TERM").unwrap();
    wait_for_cpus(left, 4, &broker);
    let status = left
        .wait_for(SOON, Guest::agent_status, Option::is_some)
        .unwrap();
    assert_eq!(status, Some(0), "{}", left.agent_log().unwrap());
    let vm = wait_for_vm(&broker, "left", |vm| vm.reason() == v1::Reason::NoAgent);
    assert_eq!(vm.usable, Some(4));
    assert_eq!(
        right.work_cpus().unwrap().len(),
        1,
        "the other guest goes on"
    );
    left.start_agent(AGENT).unwrap();
    folded(&broker);

    // One agent is killed: its guardian puts the mask back.
    left.signal_agent("KILL").unwrap();
    wait_for_cpus(left, 4, &broker);
    wait_for_vm(&broker, "left", |vm| vm.reason() == v1::Reason::NoAgent);
    left.start_agent(AGENT).unwrap();
    folded(&broker);

    // One agent hangs for longer than its lease: its guardian does not.
    left.signal_agent("STOP").unwrap();
    wait_for_cpus(left, 4, &broker);
    left.signal_agent("CONT").unwrap();
    folded(&broker);

    // The way between guest and broker breaks: the lease runs out.
    left.kill_vsock();
    wait_for_cpus(left, 4, &broker);

    // The operator turns everything off.
    let off = broker.set_mode(v1::Mode::Observe).unwrap();
    assert!(off.unconfirmed.is_empty(), "{off:?}");
    assert_eq!(
        right.work_cpus().unwrap().to_string(),
        "0-3",
        "confirmed means done"
    );
    broker.set_mode(v1::Mode::Advise).unwrap();
    thread::sleep(Duration::from_secs(5));
    assert_eq!(
        right.work_cpus().unwrap().to_string(),
        "0-3",
        "advice is not applied"
    );
    broker.set_mode(v1::Mode::Enforce).unwrap();
    wait_for_cpus(right, 1, &broker);

    // The broker is told to end: it says goodbye, and nobody waits for a lease.
    let told = Instant::now();
    let status = broker.stop();
    assert!(status.success(), "{status}: {}", broker.log());
    wait_for_cpus(right, 4, &broker);
    println!("broker stopped, guest open after {:?}", told.elapsed());
}

#[track_caller]
fn wait_for_vm(broker: &Broker, name: &str, wanted: impl Fn(&v1::Vm) -> bool) -> v1::Vm {
    let end = Instant::now() + SOON;
    loop {
        let vm = broker.vm(name).unwrap();
        if wanted(&vm) {
            return vm;
        }
        assert!(Instant::now() < end, "{vm:?}\n{}", broker.log());
        thread::sleep(Duration::from_millis(100));
    }
}
