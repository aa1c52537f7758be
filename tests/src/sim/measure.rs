//! What runs are judged by.

use hint_broker::entitle::{Claim, max_min};
use hint_broker::model::Cpus;
use serde::Serialize;

use super::run::{Outcome, VmOutcome};

/// VMs that did less than this without any hint, in CPUs, are compared with nothing: their figures are chance.
const LITTLE: f64 = 0.02;
/// A VM that wants more than this many times its share is saturated.
const SATURATED: f64 = 1.05;

/// One run against the same scenario without hints.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// The scenario.
    pub scenario: String,
    /// Who decided.
    pub arm: String,
    /// Useful work of all VMs, in CPUs.
    pub work: f64,
    /// ... over that without hints.
    pub pool: f64,
    /// The least of the same for one VM; 1 where no VM did anything.
    pub worst_vm: f64,
    /// The VM that it is.
    pub worst_vm_name: String,
    /// The same as [`Summary::worst_vm`], but what a VM did beyond its share without hints doesn't count.
    pub worst_due: f64,
    /// Jain's index of throughput for each unit of entitlement, of the saturated VMs; none where there are not two.
    pub jain: Option<f64>,
    /// Changes of usable for each VM and minute once settled: the mean over the VMs.
    pub changes_mean: f64,
    /// ... and of the VM with the most.
    pub changes_most: f64,
    /// Run delay as a part of run and run delay.
    pub steal: f64,
    /// pCPU time that spun, was lost to switches, or idled while tasks waited, as a part of all.
    pub wasted: f64,
    /// Usable at the end.
    pub usable: Vec<usize>,
    /// Each VM.
    pub vms: Vec<VmSummary>,
}

/// One VM in a [`Summary`]; all times in CPUs.
#[derive(Debug, Clone, Serialize)]
pub struct VmSummary {
    /// Its name.
    pub name: String,
    /// Its vCPUs.
    pub vcpus: usize,
    /// What it was due.
    pub share: f64,
    /// Its useful work without hints.
    pub work_without: f64,
    /// Its useful work.
    pub work: f64,
    /// Its run time.
    pub run: f64,
    /// Its run delay.
    pub run_delay: f64,
    /// Run time spent spinning.
    pub spun: f64,
    /// Changes of its usable count in a minute, once settled.
    pub changes: f64,
    /// Usable at the end.
    pub usable: usize,
}

/// Changes of usable of a VM in each minute once settled.
#[must_use]
pub fn changes_a_minute(outcome: &Outcome, vm: &VmOutcome) -> f64 {
    let minutes = (outcome.end - outcome.settled) / 60.0;
    if minutes <= 0.0 {
        return 0.0;
    }
    let changes = vm.usable.iter().skip(1);
    changes.filter(|change| change.0 >= outcome.settled).count() as f64 / minutes
}

/// Usable of a VM at some time, in seconds.
#[must_use]
pub fn usable_at(vm: &VmOutcome, at: f64) -> usize {
    let changes = vm.usable.iter().rev();
    changes
        .clone()
        .find(|change| change.0 <= at)
        .map_or(vm.vcpus, |change| change.1)
}

/// Seconds from `at` until every VM first had the count that it had at `until`.
#[must_use]
pub fn settling_time(outcome: &Outcome, at: f64, until: f64) -> f64 {
    let times = outcome.vms.iter().map(|vm| {
        let last = usable_at(vm, until);
        if usable_at(vm, at) == last {
            return 0.0;
        }
        let reached = vm
            .usable
            .iter()
            .find(|change| change.0 > at && change.1 == last);
        reached.map_or(0.0, |change| change.0 - at)
    });
    times.fold(0.0, f64::max)
}

/// Jain's index: 1 when all values are the same.
#[must_use]
pub fn jain(values: &[f64]) -> f64 {
    let (sum, squares) = values.iter().fold((0.0, 0.0), |(sum, squares), value| {
        (sum + value, squares + value * value)
    });
    if squares > 0.0 {
        sum * sum / (values.len() as f64 * squares)
    } else {
        1.0
    }
}

/// What each VM was due by weight, given what all of them want, and whether it wanted more.
fn shares(none: &Outcome) -> Vec<(f64, bool)> {
    let wants = |vm: &VmOutcome| vm.wants.unwrap_or(vm.run + vm.run_delay);
    let claims: Vec<Claim> = none
        .vms
        .iter()
        .map(|vm| Claim {
            weight: vm.weight,
            demand: Cpus(wants(vm)),
        })
        .collect();
    // What work of the host takes is none of theirs.
    let supply = none.vms.iter().map(|vm| vm.run).sum::<f64>() + none.idle;
    let shares = max_min(Cpus(supply), &claims);
    let vms = shares.iter().zip(&none.vms);
    vms.map(|(share, vm)| (share.0, wants(vm) > SATURATED * share.0))
        .collect()
}

/// Compares a run with the one without hints.
#[must_use]
pub fn summary(outcome: &Outcome, none: &Outcome) -> Summary {
    let ratios = outcome.vms.iter().zip(&none.vms);
    let worst = ratios
        .filter(|(_, before)| before.work > LITTLE)
        .map(|(vm, before)| (vm.work / before.work, vm.name.clone()))
        .min_by(|a, b| a.0.total_cmp(&b.0));
    let (worst_vm, worst_vm_name) = worst.unwrap_or((1.0, String::new()));
    // Work of different kinds can't be compared, but the time for it can.
    let throughput = |vm: &VmOutcome| if outcome.alike { vm.work } else { vm.run };
    let shares = shares(none);
    let due = outcome.vms.iter().zip(&none.vms).zip(&shares);
    let due = due
        .filter(|((_, before), _)| before.work > LITTLE)
        .map(|((vm, before), (share, _))| vm.work / (before.work * (share / before.run).min(1.0)));
    let worst_due = due.fold(f64::INFINITY, f64::min).min(1e3);
    let fair: Vec<f64> = shares
        .iter()
        .zip(&outcome.vms)
        .filter(|((_, saturated), _)| *saturated)
        .map(|((share, _), vm)| throughput(vm) / share)
        .collect();
    let changes: Vec<f64> = outcome
        .vms
        .iter()
        .map(|vm| changes_a_minute(outcome, vm))
        .collect();
    let sum = |figure: fn(&VmOutcome) -> f64| outcome.vms.iter().map(figure).sum::<f64>();
    let (run, run_delay) = (sum(|vm| vm.run), sum(|vm| vm.run_delay));
    let wasted = sum(|vm| vm.spun + vm.overhead) + outcome.idle_wanted;
    Summary {
        scenario: outcome.scenario.clone(),
        arm: outcome.arm.clone(),
        work: outcome.work(),
        pool: outcome.work() / none.work().max(f64::MIN_POSITIVE),
        worst_vm,
        worst_vm_name,
        worst_due,
        jain: (fair.len() >= 2 && outcome.one_pool).then(|| jain(&fair)),
        changes_mean: changes.iter().sum::<f64>() / changes.len().max(1) as f64,
        changes_most: changes.iter().copied().fold(0.0, f64::max),
        steal: run_delay / (run + run_delay).max(f64::MIN_POSITIVE),
        wasted: wasted / outcome.pcpus as f64,
        usable: outcome
            .vms
            .iter()
            .map(|vm| usable_at(vm, outcome.end))
            .collect(),
        vms: vms(outcome, none, &shares),
    }
}

fn vms(outcome: &Outcome, none: &Outcome, shares: &[(f64, bool)]) -> Vec<VmSummary> {
    let vms = outcome.vms.iter().zip(&none.vms).zip(shares);
    vms.map(|((vm, before), (share, _))| VmSummary {
        name: vm.name.clone(),
        vcpus: vm.vcpus,
        share: *share,
        work_without: before.work,
        work: vm.work,
        run: vm.run,
        run_delay: vm.run_delay,
        spun: vm.spun,
        changes: changes_a_minute(outcome, vm),
        usable: usable_at(vm, outcome.end),
    })
    .collect()
}

/// Geometric mean; 1 of nothing.
#[must_use]
pub fn geometric_mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (mut logs, mut count) = (0.0, 0.0);
    for value in values {
        logs += value.max(f64::MIN_POSITIVE).ln();
        count += 1.0;
    }
    if count > 0.0 {
        f64::exp(logs / count)
    } else {
        1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jain_and_means() {
        assert!((jain(&[2.0, 2.0, 2.0]) - 1.0).abs() < 1e-12);
        assert!((jain(&[1.0, 0.0]) - 0.5).abs() < 1e-12);
        assert!((geometric_mean([1.0, 4.0]) - 2.0).abs() < 1e-12);
        assert!((geometric_mean([]) - 1.0).abs() < 1e-12);
    }
}
