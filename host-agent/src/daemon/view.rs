//! The view: what control API, metrics and journal show of a tick.

use std::collections::{BTreeMap, BTreeSet};

use hint_proto::CpuSet;

use super::host::Totals;
use crate::config::{Config, DEFAULT_WEIGHT};
use crate::discover::Found;
use crate::govern::{Decision, Step};
use crate::model::{Agent, Contention, HostView, Reason, RecordState, VmId, VmView};

/// What a view is drawn from.
pub(super) struct Drawing<'a> {
    pub(super) config: &'a Config,
    pub(super) epoch: u64,
    pub(super) ticks: u64,
    pub(super) rejected: u64,
    pub(super) pcpus: &'a CpuSet,
    pub(super) degraded: &'a BTreeSet<String>,
    pub(super) record: Option<RecordState>,
    pub(super) vms: &'a [Found],
    pub(super) step: &'a Step,
    pub(super) totals: &'a BTreeMap<VmId, Totals>,
    pub(super) agents: BTreeMap<VmId, Agent>,
}

/// Draws the view.
pub(super) fn draw(drawing: &Drawing<'_>) -> HostView {
    let mut vms: Vec<VmView> = drawing
        .vms
        .iter()
        .enumerate()
        .map(|(index, found)| draw_vm(drawing, found, drawing.step.decisions.get(index)))
        .collect();
    vms.sort_by(|a, b| (&a.vm.name, a.vm.id).cmp(&(&b.vm.name, b.vm.id)));
    HostView {
        epoch: drawing.epoch,
        mode: drawing.config.mode,
        pcpus: drawing.pcpus.clone(),
        supply: drawing.step.supply,
        used: drawing.step.used,
        contention: drawing.step.contention,
        ticks: drawing.ticks,
        rejected_samples: drawing.rejected,
        degraded: drawing.degraded.iter().cloned().collect(),
        record: drawing.record,
        vms,
    }
}

fn draw_vm(drawing: &Drawing<'_>, found: &Found, decision: Option<&Decision>) -> VmView {
    let id = found.vm.id;
    // Decisions come in the order of the scan; one that has just found another VM has none for it yet.
    let decision = decision.filter(|decision| decision.id == id);
    let policy = drawing.config.policy(&found.vm);
    let totals = drawing.totals.get(&id).copied().unwrap_or_default();
    VmView {
        vm: found.vm.clone(),
        mode: policy.mode,
        weight: decision.map_or(DEFAULT_WEIGHT, |decision| whole(decision.why.weight)),
        run: decision.and_then(|decision| decision.run),
        run_delay: decision.and_then(|decision| decision.run_delay),
        run_total: totals.run,
        run_delay_total: totals.run_delay,
        demand: decision.and_then(|decision| decision.demand),
        target: decision.and_then(|decision| decision.target),
        usable: decision.and_then(|decision| decision.usable),
        reason: decision.map_or(Reason::Unmeasured, Decision::reason),
        why: decision.map(|decision| decision.why),
        contention: decision.map_or(Contention::Unknown, |decision| decision.contention),
        folds: decision.map_or(0, |decision| decision.folds),
        unfolds: decision.map_or(0, |decision| decision.unfolds),
        agent: drawing.agents.get(&id).cloned(),
    }
}

/// A weight as it is shown; cgroup v1's shares give fractions.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // the cast saturates, and NaN gives 0
fn whole(weight: f64) -> u32 {
    (weight.round() as u32).max(1)
}
