//! Runs a scenario with one who decides, and keeps what came of it.

use super::arms::{Arm, Broker, Fixed, Guests, Name, StealGovernor, StealMon, best_static};
use super::clock::{MS, Nanos, nanos, seconds};
use super::guest::Use;
use super::scenario::{Plan, Scenario, ScenarioError};
use super::sight::Observer;
use super::world::World;

/// Whoever decides may do so this often, and usable is recorded this often.
pub const TICK: Nanos = 100 * MS;

/// What became of one VM.
#[derive(Debug, Clone)]
pub struct VmOutcome {
    /// Its name.
    pub name: String,
    /// Its vCPUs.
    pub vcpus: usize,
    /// What its group weighs against the VMs and work outside it: its weight, or its part of the weight of the group that it
    /// is in.
    pub weight: f64,
    /// What it would run if it had the host to itself, in CPUs; known in runs without hints.
    pub wants: Option<f64>,
    /// Useful work, in CPUs.
    pub work: f64,
    /// Run, in CPUs.
    pub run: f64,
    /// Run delay, in CPUs.
    pub run_delay: f64,
    /// Run time spent spinning, in CPUs.
    pub spun: f64,
    /// Run time lost to switches and interrupts, in CPUs.
    pub overhead: f64,
    /// Usable at the start and after each change: seconds, vCPUs.
    pub usable: Vec<(f64, usize)>,
}

/// What became of a scenario.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The scenario.
    pub scenario: String,
    /// Who decided.
    pub arm: String,
    /// The VMs.
    pub vms: Vec<VmOutcome>,
    /// Do all VMs have the same load?
    pub alike: bool,
    /// May all VMs run on all pCPUs?
    pub one_pool: bool,
    /// pCPUs of the host.
    pub pcpus: usize,
    /// Idle pCPUs, in CPUs.
    pub idle: f64,
    /// Idle pCPUs while guests had tasks that waited, in CPUs.
    pub idle_wanted: f64,
    /// Changes count from here on, in seconds.
    pub settled: f64,
    /// The end, in seconds.
    pub end: f64,
}

impl Outcome {
    /// Useful work of all VMs, in CPUs.
    #[must_use]
    pub fn work(&self) -> f64 {
        self.vms.iter().map(|vm| vm.work).sum()
    }
}

/// Runs a scenario with the arm of this name.
///
/// # Errors
/// When the scenario can't be used.
pub fn simulate(scenario: &Scenario, name: Name) -> Result<Outcome, ScenarioError> {
    let mut arm: Box<dyn Arm> = match name {
        Name::None => return without_hints(scenario),
        Name::StealGovernor => Box::new(Guests::<StealGovernor<false>>::default()),
        Name::StealGovernor2025 => Box::new(Guests::<StealGovernor<true>>::default()),
        Name::Stealmon => Box::new(Guests::<StealMon>::default()),
        Name::Broker => Box::new(Broker::default()),
        Name::BestStatic => Box::new(best_static(scenario)?),
    };
    simulate_with(scenario, name.as_str(), arm.as_mut())
}

/// How long each VM is given the host to itself, in seconds.
const ALONE: f64 = 5.0;

/// The run that others are compared with, and what each VM would run alone.
fn without_hints(scenario: &Scenario) -> Result<Outcome, ScenarioError> {
    let mut outcome = simulate_with(scenario, Name::None.as_str(), &mut Fixed::default())?;
    let mut wants = Vec::new();
    for spec in &scenario.vms {
        let mut alone = scenario.clone();
        let mut only = spec.clone();
        only.count = 1;
        if let Some(last) = std::mem::take(&mut only.steps).pop() {
            only.load = last.load;
        }
        alone.vms = vec![only];
        alone.hogs.clear();
        alone.from = 0.5;
        alone.seconds = ALONE;
        let alone = simulate_with(&alone, "", &mut Fixed::default())?;
        wants.extend(std::iter::repeat_n(alone.vms[0].run, spec.count));
    }
    for (vm, wants) in outcome.vms.iter_mut().zip(wants) {
        vm.wants = Some(wants);
    }
    Ok(outcome)
}

#[derive(Clone, Copy, Default)]
struct Totals {
    run: Nanos,
    run_delay: Nanos,
    used: Use,
}

/// Runs a scenario with any arm.
///
/// # Errors
/// When the scenario can't be used.
pub fn simulate_with(
    scenario: &Scenario,
    name: &str,
    arm: &mut dyn Arm,
) -> Result<Outcome, ScenarioError> {
    let (mut world, plan) = scenario.build()?;
    let mut observer = Observer::new(scenario.noise, scenario.seed);
    let mut usable: Vec<Vec<(f64, usize)>> =
        plan.vms.iter().map(|vm| vec![(0.0, vm.vcpus)]).collect();
    let end = nanos(scenario.seconds);
    let from = nanos(scenario.from).min(end - 1);
    let mut steps = plan.steps.iter().peekable();
    let mut before = None;
    let mut due: Vec<(Nanos, Vec<usize>)> = Vec::new();
    let mut now = 0;
    loop {
        while let Some((_, vm, load)) = steps.next_if(|step| nanos(step.0) <= now) {
            world.set_load(*vm, load);
        }
        if now >= from && before.is_none() {
            before = Some(totals(&world, &plan));
        }
        if now >= end {
            break;
        }
        // What was decided a while ago is carried out before the next look: a guest's answer is as old as its last change.
        due.retain(|(at, counts)| {
            let ready = *at <= now;
            if ready {
                apply(&mut world, &plan, counts, now, &mut usable);
            }
            !ready
        });
        let period = arm.period();
        let decides = if period == 0 {
            now == 0
        } else {
            now % period == 0
        };
        if decides {
            let counts = arm.decide(&observer.look(&world, &plan));
            if arm.delay() == 0 {
                apply(&mut world, &plan, &counts, now, &mut usable);
            } else {
                due.push((now + arm.delay(), counts));
            }
        }
        let step = steps.peek().map_or(Nanos::MAX, |step| nanos(step.0));
        let count_from = if before.is_none() { from } else { Nanos::MAX };
        now = (now / TICK * TICK + TICK)
            .min(step)
            .min(count_from)
            .min(end);
        world.run_until(now);
    }
    let before = before.unwrap_or_default();
    let after = totals(&world, &plan);
    Ok(outcome(scenario, name, &plan, &before, &after, usable))
}

fn apply(
    world: &mut World,
    plan: &Plan,
    counts: &[usize],
    now: Nanos,
    usable: &mut [Vec<(f64, usize)>],
) {
    for ((vm, count), history) in plan.vms.iter().zip(counts).zip(usable) {
        if !vm.agent || *count == world.usable(vm.index) {
            continue;
        }
        world.set_usable(vm.index, *count);
        history.push((seconds(now), world.usable(vm.index)));
    }
}

/// Idle time, idle time that was wanted, and each VM.
type Counters = (Nanos, Nanos, Vec<Totals>);

fn totals(world: &World, plan: &Plan) -> Counters {
    let idle = (0..world.host().pcpus())
        .map(|pcpu| world.host().idle_time(pcpu))
        .sum();
    let vms = plan.vms.iter().map(|vm| {
        let mut totals = Totals {
            used: world.used(vm.index),
            ..Totals::default()
        };
        for vcpu in 0..vm.vcpus {
            let times = world.vcpu_times(vm.index, vcpu);
            totals.run += times.run;
            totals.run_delay += times.run_delay;
        }
        totals
    });
    (idle, world.idle_wanted(), vms.collect())
}

fn outcome(
    scenario: &Scenario,
    name: &str,
    plan: &Plan,
    before: &Counters,
    after: &Counters,
    usable: Vec<Vec<(f64, usize)>>,
) -> Outcome {
    let length = scenario.seconds - scenario.from.min(scenario.seconds);
    let cpus = |before: Nanos, after: Nanos| seconds(after - before) / length;
    let vms = plan.vms.iter().zip(&before.2).zip(&after.2).zip(usable);
    let vms = vms
        .map(|(((vm, before), after), usable)| VmOutcome {
            name: vm.name.clone(),
            vcpus: vm.vcpus,
            weight: plan.effective_weight(vm),
            wants: None,
            work: cpus(before.used.work, after.used.work),
            run: cpus(before.run, after.run),
            run_delay: cpus(before.run_delay, after.run_delay),
            spun: cpus(before.used.spun, after.used.spun),
            overhead: cpus(before.used.overhead, after.used.overhead),
            usable,
        })
        .collect();
    Outcome {
        scenario: scenario.name.clone(),
        arm: name.to_owned(),
        vms,
        alike: scenario
            .vms
            .windows(2)
            .all(|pair| pair[0].load == pair[1].load),
        one_pool: scenario.vms.iter().all(|vm| vm.cpus.is_none()),
        pcpus: scenario.pcpus,
        idle: cpus(before.0, after.0),
        idle_wanted: cpus(before.1, after.1),
        settled: scenario.settled,
        end: scenario.seconds,
    }
}
