//! Runs scenarios in the simulator and prints what came of them. See docs/simulator.md.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

use lab::sim::batch::on_all_cores;
use lab::sim::families::{Features, matrix, random};
use lab::sim::measure::{Summary, geometric_mean, summary};
use lab::sim::{Name, Outcome, Scenario, plot, report, simulate};

/// Simulates hosts and guests with and without hints.
#[derive(Debug, Parser)]
struct Options {
    #[command(subcommand)]
    command: Command,
    /// Arms to run; all if none is named. `none` is always run, since the others are compared with it.
    #[arg(long = "arm", value_enum, global = true)]
    arms: Vec<Name>,
    /// Write the results to this file as JSON.
    #[arg(long, global = true)]
    json: Option<PathBuf>,
    /// Draw usable over time into this folder, an SVG for each scenario.
    #[arg(long, global = true)]
    plot: Option<PathBuf>,
    /// Print only the worst runs, so many of each arm.
    #[arg(long, global = true)]
    worst: Option<usize>,
    /// Print each VM too.
    #[arg(long, global = true)]
    vms: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Scenario files.
    Run {
        /// The files.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// Simulate so many seconds instead of what the file says.
        #[arg(long)]
        seconds: Option<f64>,
        /// Seed instead of the file's.
        #[arg(long)]
        seed: Option<u64>,
    },
    /// The public matrix: 2 to 16 VMs of 4 to 32 vCPUs, four loads.
    Matrix {
        /// Sizes of the host.
        #[arg(long, default_values_t = [16, 32])]
        pcpus: Vec<usize>,
        /// Simulated seconds of each.
        #[arg(long, default_value_t = 10.0)]
        seconds: f64,
    },
    /// Random hosts with loads that don't change.
    Random {
        /// How many.
        #[arg(long, default_value_t = 50)]
        count: u64,
        /// The first one's seed.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Simulated seconds of each.
        #[arg(long, default_value_t = 120.0)]
        seconds: f64,
        /// VMs and pCPUs only: no groups, quotas, cpusets, and no work of the host.
        #[arg(long)]
        plain: bool,
    },
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab-sim: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let scenarios = scenarios(&options.command)?;
    let mut arms = options.arms.clone();
    if arms.is_empty() {
        arms = Name::ALL.to_vec();
    }
    arms.retain(|arm| *arm != Name::None);
    arms.insert(0, Name::None);
    let runs: Vec<(&Scenario, Name)> = scenarios
        .iter()
        .flat_map(|scenario| arms.iter().map(move |arm| (scenario, *arm)))
        .collect();
    let outcomes: Vec<Outcome> = on_all_cores(&runs, |(scenario, arm)| simulate(scenario, *arm))
        .into_iter()
        .collect::<Result<_, _>>()?;
    let summaries: Vec<Summary> = outcomes
        .chunks(arms.len())
        .flat_map(|group| group.iter().map(|outcome| summary(outcome, &group[0])))
        .collect();
    match options.worst {
        Some(count) => print_worst(&summaries, &arms, count),
        None if options.vms => print_vms(&scenarios, &summaries, arms.len()),
        None => print!("{}", report::table(&summaries)),
    }
    println!();
    for arm in &arms {
        print_arm(&summaries, *arm);
    }
    if let Some(folder) = &options.plot {
        fs::create_dir_all(folder).with_context(|| format!("can't make {}", folder.display()))?;
        for runs in outcomes.chunks(arms.len()) {
            let file = format!("{}.svg", runs[0].scenario.replace(' ', "-"));
            plot::usable_over_time(runs, &folder.join(file))?;
        }
    }
    if let Some(path) = &options.json {
        fs::write(path, report::json(&summaries)?)
            .with_context(|| format!("can't write {}", path.display()))?;
    }
    Ok(())
}

fn scenarios(command: &Command) -> Result<Vec<Scenario>> {
    Ok(match command {
        Command::Run {
            files,
            seconds,
            seed,
        } => {
            let mut all = Vec::new();
            for file in files {
                let mut scenario = Scenario::read(file)?;
                scenario.seconds = seconds.unwrap_or(scenario.seconds);
                scenario.seed = seed.unwrap_or(scenario.seed);
                all.push(scenario);
            }
            all
        }
        Command::Matrix { pcpus, seconds } => pcpus
            .iter()
            .flat_map(|pcpus| matrix(*pcpus, *seconds))
            .collect(),
        Command::Random {
            count,
            seed,
            seconds,
            plain,
        } => {
            let features = Features {
                groups: !plain,
                quotas: !plain,
                cpusets: !plain,
                hogs: !plain,
            };
            (*seed..seed + count)
                .map(|seed| random(seed, *seconds, features))
                .collect()
        }
    })
}

fn of(summaries: &[Summary], arm: Name) -> impl Iterator<Item = &Summary> {
    summaries.iter().filter(move |run| run.arm == arm.as_str())
}

fn print_worst(summaries: &[Summary], arms: &[Name], count: usize) {
    for arm in arms.iter().filter(|arm| **arm != Name::None) {
        let mut runs: Vec<Summary> = of(summaries, *arm).cloned().collect();
        runs.sort_by(|a, b| a.worst_vm.total_cmp(&b.worst_vm));
        runs.truncate(count);
        print!("{}", report::table(&runs));
        let mut runs: Vec<Summary> = of(summaries, *arm).cloned().collect();
        runs.sort_by(|a, b| b.changes_most.total_cmp(&a.changes_most));
        runs.truncate(count);
        print!("{}", report::table(&runs));
    }
}

fn print_vms(scenarios: &[Scenario], summaries: &[Summary], arms: usize) {
    for (scenario, runs) in scenarios.iter().zip(summaries.chunks(arms)) {
        println!("\n{} on {} pCPUs", scenario.name, scenario.pcpus);
        for vm in &scenario.vms {
            println!(
                "  {} {}x{} weight {} group {:?} quota {:?} cpus {:?} {:?}",
                vm.name, vm.count, vm.vcpus, vm.weight, vm.group, vm.quota, vm.cpus, vm.load
            );
        }
        for run in runs {
            print!(
                "{}{}",
                report::table(std::slice::from_ref(run)),
                report::vms(run)
            );
        }
    }
}

fn print_arm(summaries: &[Summary], arm: Name) {
    let least =
        |figure: fn(&Summary) -> f64| of(summaries, arm).map(figure).fold(f64::MAX, f64::min);
    let most = |figure: fn(&Summary) -> f64| of(summaries, arm).map(figure).fold(0.0, f64::max);
    println!(
        "{:19} pool: geometric mean {:.3}, worst {:.3}, best {:.3}; worst VM {:.3}, of its due {:.3}; least Jain {:.3}; most changes {:.1}",
        arm.as_str(),
        geometric_mean(of(summaries, arm).map(|run| run.pool)),
        least(|run| run.pool),
        most(|run| run.pool),
        least(|run| run.worst_vm),
        least(|run| run.worst_due),
        least(|run| run.jain.unwrap_or(1.0)),
        most(|run| run.changes_most),
    );
}
