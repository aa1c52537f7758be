//! The demonstration: two real guests on two pCPUs, hackbench in both at once, with and without hints in turn.
//!
//! Rounds are short and many, since the machine below may change its speed by half from one second to the next (docs/results.md).
//! Half of them have guests of their own, so that no single boot decides. Each measurement has a broker of its own: one that saw the
//! same load come and go before folds later, and the measurements would not be alike.
//!
//! It ends with a line `speed-up with hints: 2.13x (...)`, from the times that the guests' own hackbench reports, and fails when
//! the guests were not folded to one vCPU each.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use hint_broker::ctl::{HostState, render_table};
use hint_proto::v1;
use lab::{Broker, BrokerSpec, Guest, GuestSpec, lock, process};

const PCPUS: usize = 2;
const BOOTS: usize = 2;
/// With each boot's guests.
const ROUNDS: usize = 4;
const GUESTS: [&str; 2] = ["vm1", "vm2"];
/// Messages that each of hackbench's senders passes to each receiver: ten to twenty seconds without hints, so that the half second
/// before a fold counts for little.
const LOOPS: u32 = 1500;
/// A guest that runs less than this has nothing left of the last round to do.
const QUIET_MILLI_CPUS: u64 = 300;
const LIVE: Duration = Duration::from_millis(500);
/// Where nobody watches, so often is enough.
const BLOCKS: Duration = Duration::from_secs(5);
const TABLE_WIDTH: usize = 120;

/// One way to run a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arm {
    Without,
    With,
}

impl Arm {
    fn mode(self) -> v1::Mode {
        match self {
            Self::Without => v1::Mode::Observe,
            Self::With => v1::Mode::Enforce,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Without => "without hints",
            Self::With => "with hints",
        }
    }
}

/// What one arm of a round gave.
#[derive(Debug)]
struct Run {
    seconds: [f64; 2],
    /// Both guests really used one vCPU, for reason of contention, at the same time.
    folded: bool,
}

impl Run {
    fn mean(&self) -> f64 {
        self.seconds.iter().sum::<f64>() / 2.0
    }
}

fn main() -> anyhow::Result<()> {
    process::confine(PCPUS).context("can't confine the demonstration to two pCPUs")?;
    let _cores = lock::cores()?;
    println!(
        "Two guests with 4 vCPUs each on {PCPUS} pCPUs, hackbench in both at once: {} rounds, each without and with hints.\n\
         RUN, DELAY (waiting for a pCPU) and TARGET (the guest's share) are in CPUs. USABLE is what the broker wants, APPLIED what\n\
         the guest really uses; without hints it is not told.\n",
        BOOTS * ROUNDS
    );
    let mut measured: Vec<(Arm, Run)> = Vec::new();
    for boot in 0..BOOTS {
        measured.extend(rounds(boot)?);
    }
    report(&measured)
}

/// Boots the guests and measures both arms in each round; the order changes, so that neither arm gains by a machine that grows slower
/// or faster.
fn rounds(boot: usize) -> anyhow::Result<Vec<(Arm, Run)>> {
    println!("Booting the guests ({} of {BOOTS}) ...", boot + 1);
    let specs = GUESTS.map(|name| GuestSpec::named(name).with_agent(&["run"]));
    let guests = Guest::boot_all(&specs)?;
    let mut measured = Vec::new();
    for number in boot * ROUNDS + 1..=(boot + 1) * ROUNDS {
        let order = if number % 2 == 1 {
            [Arm::Without, Arm::With]
        } else {
            [Arm::With, Arm::Without]
        };
        for arm in order {
            let broker = Broker::start(&BrokerSpec {
                mode: "observe",
                ..BrokerSpec::default()
            })?;
            let run = run(&broker, &guests, arm, number)
                .with_context(|| format!("the broker's log:\n{}", broker.log()))?;
            println!(
                "round {number} {:<14} {} {:.2} s   {} {:.2} s\n",
                arm.name(),
                GUESTS[0],
                run.seconds[0],
                GUESTS[1],
                run.seconds[1]
            );
            measured.push((arm, run));
        }
    }
    Ok(measured)
}

fn wait_for_agents(broker: &Broker) -> anyhow::Result<()> {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let state = broker.list()?;
        let connected = state
            .vms
            .iter()
            .filter(|vm| {
                vm.agent
                    .as_ref()
                    .is_some_and(|agent| agent.applied.is_some())
            })
            .count();
        if connected == GUESTS.len() {
            return Ok(());
        }
        ensure!(
            Instant::now() < end,
            "the agents did not connect:\n{}\n{}",
            render_table(&state, TABLE_WIDTH),
            broker.log()
        );
        thread::sleep(Duration::from_millis(100));
    }
}

fn run(broker: &Broker, guests: &[Guest], arm: Arm, number: usize) -> anyhow::Result<Run> {
    wait_for_agents(broker)?;
    settle(broker, guests)?;
    broker.set_mode(arm.mode())?;
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(broker, arm, number, &done));
        let loads: Vec<_> = guests
            .iter()
            .map(|guest| scope.spawn(|| guest.hackbench(LOOPS)))
            .collect();
        let seconds: Result<Vec<f64>, _> = loads
            .into_iter()
            .map(|load| {
                load.join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect();
        done.store(true, Ordering::Relaxed);
        let folded = watcher
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let seconds = seconds?;
        Ok(Run {
            seconds: [seconds[0], seconds[1]],
            folded,
        })
    })
}

/// Waits until both guests use all their vCPUs, hints being off, and are quiet.
fn settle(broker: &Broker, guests: &[Guest]) -> anyhow::Result<()> {
    for guest in guests {
        let patience = Duration::from_secs(30);
        let cpus = guest.wait_for(patience, Guest::work_cpus, |cpus| cpus.len() == 4)?;
        ensure!(
            cpus.len() == 4,
            "{} uses CPUs {cpus} of 0-3 with hints off",
            guest.name()
        );
    }
    let quiet = |state: &HostState| {
        let idle = |vm: &v1::Vm| vm.run_milli_cpus.is_some_and(|run| run < QUIET_MILLI_CPUS);
        state.vms.iter().all(idle)
    };
    let end = Instant::now() + Duration::from_secs(60);
    while !quiet(&broker.list()?) {
        ensure!(Instant::now() < end, "the guests do not become quiet");
        thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

/// Shows the table until the round ends; says whether both guests were folded to one vCPU by contention.
fn watch(broker: &Broker, arm: Arm, number: usize, done: &AtomicBool) -> anyhow::Result<bool> {
    let terminal = std::io::stdout().is_terminal();
    let mut folded = false;
    let mut lines = 0;
    let mut shown: Option<Instant> = None;
    while !done.load(Ordering::Relaxed) {
        let state = broker.list()?;
        folded |= both_folded(&state);
        if terminal || shown.is_none_or(|then| then.elapsed() >= BLOCKS) {
            let table = format!(
                "round {number} of {}, {}\n{}",
                BOOTS * ROUNDS,
                arm.name(),
                render_table(&state, TABLE_WIDTH)
            );
            let back = if terminal && lines > 0 {
                format!("\x1b[{lines}A\x1b[J")
            } else {
                String::new()
            };
            println!("{back}{table}");
            std::io::stdout().flush()?;
            lines = table.lines().count() + usize::from(table.ends_with('\n'));
            shown = Some(Instant::now());
        }
        thread::sleep(LIVE);
    }
    Ok(folded)
}

fn both_folded(state: &HostState) -> bool {
    let folded = |vm: &&v1::Vm| {
        let applied = vm.agent.as_ref().and_then(|agent| agent.applied);
        applied == Some(1) && vm.usable == Some(1) && vm.reason() == v1::Reason::Contention
    };
    state.vms.iter().filter(folded).count() == GUESTS.len()
}

fn report(runs: &[(Arm, Run)]) -> anyhow::Result<()> {
    let of = |arm: Arm| {
        runs.iter()
            .filter(move |(of, _)| *of == arm)
            .map(|(_, run)| run)
    };
    for arm in [Arm::Without, Arm::With] {
        let times: Vec<String> = of(arm).map(|run| format!("{:.2}", run.mean())).collect();
        println!(
            "{:<14} {} s, median {:.2} s (mean of both guests, each round)",
            arm.name(),
            times.join(" "),
            median(of(arm))
        );
    }
    let folded = of(Arm::With).filter(|run| run.folded).count();
    println!(
        "folded to 1 vCPU each for contention: {folded} of {} rounds with hints",
        BOOTS * ROUNDS
    );
    if of(Arm::Without).any(|run| run.folded) {
        bail!("guests were folded in a round without hints");
    }
    ensure!(
        folded == BOOTS * ROUNDS,
        "expected every round with hints to fold both guests to one vCPU"
    );
    let speed_up = median(of(Arm::Without)) / median(of(Arm::With));
    println!("speed-up with hints: {speed_up:.2}x (2 VMs x 4 vCPUs on {PCPUS} pCPUs, hackbench)");
    Ok(())
}

fn median<'a>(runs: impl Iterator<Item = &'a Run>) -> f64 {
    let mut times: Vec<f64> = runs.map(Run::mean).collect();
    times.sort_by(f64::total_cmp);
    let (low, high) = ((times.len() - 1) / 2, times.len() / 2);
    f64::midpoint(times[low], times[high])
}
