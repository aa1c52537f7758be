//! The view: what control API, metrics and journal show of a tick.

use std::collections::{BTreeMap, BTreeSet};

use hint_proto::CpuSet;

use super::host::Totals;
use crate::config::Config;
use crate::discover::Found;
use crate::govern::{Governor, Step};
use crate::model::{Agent, HostView, Reason, Vcpus, VmId, VmView};

/// What a view is drawn from.
pub(super) struct Drawing<'a> {
    pub(super) config: &'a Config,
    pub(super) epoch: u64,
    pub(super) ticks: u64,
    pub(super) rejected: u64,
    pub(super) pool: &'a CpuSet,
    pub(super) degraded: &'a BTreeSet<String>,
    pub(super) vms: &'a [Found],
    pub(super) step: &'a Step,
    pub(super) totals: &'a BTreeMap<VmId, Totals>,
    pub(super) governor: &'a Governor,
    pub(super) agents: BTreeMap<VmId, Agent>,
}

/// Draws the view.
pub(super) fn draw(drawing: &Drawing<'_>) -> HostView {
    let mut vms: Vec<VmView> = drawing
        .vms
        .iter()
        .map(|found| draw_vm(drawing, found))
        .collect();
    vms.sort_by(|a, b| (&a.vm.name, a.vm.id).cmp(&(&b.vm.name, b.vm.id)));
    HostView {
        epoch: drawing.epoch,
        mode: drawing.config.mode,
        pcpus: drawing.pool.clone(),
        supply: drawing.step.supply,
        used: drawing.step.used,
        contention: drawing.step.contention,
        ticks: drawing.ticks,
        rejected_samples: drawing.rejected,
        degraded: drawing.degraded.iter().cloned().collect(),
        vms,
    }
}

fn draw_vm(drawing: &Drawing<'_>, found: &Found) -> VmView {
    let id = found.vm.id;
    let policy = drawing.config.policy(&found.vm);
    let decision = drawing
        .step
        .decisions
        .iter()
        .find(|decision| decision.id == id);
    let totals = drawing.totals.get(&id).copied().unwrap_or_default();
    let (folds, unfolds) = drawing.governor.changes(id);
    let explanation = match &found.vm.vcpus {
        Vcpus::Unclassified(why) => format!("shown and never hinted: {why}"),
        Vcpus::Known(_) => decision
            .map(|decision| decision.explanation.clone())
            .unwrap_or_default(),
    };
    VmView {
        vm: found.vm.clone(),
        mode: policy.mode,
        weight: policy.weight,
        run: decision.and_then(|decision| decision.run),
        run_delay: decision.and_then(|decision| decision.run_delay),
        run_total: totals.run,
        run_delay_total: totals.run_delay,
        demand: decision.and_then(|decision| decision.demand),
        target: decision.and_then(|decision| decision.target),
        usable: decision.and_then(|decision| decision.usable),
        reason: decision.map_or(Reason::Unmeasured, |decision| decision.reason),
        explanation,
        folds,
        unfolds,
        agent: drawing.agents.get(&id).cloned(),
    }
}
