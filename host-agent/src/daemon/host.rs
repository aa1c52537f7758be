//! One tick: discover when it is due, observe, decide, publish, and draw the view.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hint_proto::CpuSet;

use super::decisions::Decisions;
use super::inputs::agent_state;
use super::view::{Drawing, draw};
use crate::config::Config;
use crate::discover::{Discovery, Found, Scan};
use crate::govern::{AgentState, Decision};
use crate::model::{Contention, Hint, HostView, Mode, Tick, Topology, Vcpus, Vm, VmId};
use crate::observe::cgroups::{Cgroups, GroupScan};
use crate::observe::{Observer, Sample, TopologyScan};
use crate::place::{Placed, Places};
use crate::publish::Publisher;
use crate::record::{Decided, Moment, Recorder, Scene, Settings};
use crate::root::Root;

/// How often CPU groups are read: `virsh` and systemd change them, and nobody does so often.
const GROUPS_EVERY: Duration = Duration::from_secs(1);

/// With this part of the supply idle, a host is calm.
const CALM_IDLE: f64 = 0.25;

/// A VM's counters since the broker saw it first.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Totals {
    pub(super) run: Duration,
    pub(super) run_delay: Duration,
}

/// All that the daemon keeps between ticks.
#[derive(Debug)]
pub(super) struct Host {
    config: Config,
    epoch: u64,
    started: Instant,
    discovery: Discovery,
    observer: Observer,
    cgroups: Cgroups,
    groups: GroupScan,
    next_groups: Duration,
    decisions: Decisions,
    places: Places,
    scan: Scan,
    next_scan: Duration,
    topology: TopologyScan,
    online: CpuSet,
    inputs_due: bool,
    totals: BTreeMap<VmId, Totals>,
    ticks: u64,
    rejected: u64,
    degraded: BTreeSet<String>,
    recorder: Option<Recorder>,
    scene: Option<Arc<Scene>>,
}

impl Host {
    pub(super) fn new(config: Config, root: Root, epoch: u64) -> Self {
        let recorder = config.record.path.as_ref().and_then(|path| {
            Recorder::start(path, config.record.most, epoch)
                .inspect_err(
                    |error| tracing::error!(%error, "nothing is recorded: no thread for it"),
                )
                .ok()
        });
        Self {
            epoch,
            started: Instant::now(),
            discovery: Discovery::new(root.clone(), config.discover.tcg),
            observer: Observer::new(root.clone()),
            cgroups: Cgroups::new(root),
            groups: GroupScan::default(),
            next_groups: Duration::ZERO,
            decisions: Decisions::default(),
            places: Places::default(),
            scan: Scan::default(),
            next_scan: Duration::ZERO,
            topology: TopologyScan::default(),
            online: CpuSet::new(),
            inputs_due: true,
            totals: BTreeMap::new(),
            ticks: 0,
            rejected: 0,
            degraded: BTreeSet::new(),
            recorder,
            scene: None,
            config,
        }
    }

    pub(super) fn interval(&self) -> Duration {
        self.config.observe.interval
    }

    /// Runs the pipeline once.
    pub(super) fn tick(&mut self, publisher: &Publisher) -> HostView {
        if self.started.elapsed() >= self.next_scan {
            self.discover(publisher);
        }
        let started = self.started;
        let vms: Vec<Vm> = self.scan.vms.iter().map(|found| found.vm.clone()).collect();
        if started.elapsed() >= self.next_groups {
            self.groups = self.cgroups.scan(&vms);
            self.inputs_due = true;
            self.next_groups = started.elapsed() + GROUPS_EVERY;
        }
        let sample = self
            .observer
            .sample(&vms, || started.elapsed(), self.decisions.may_queue());
        self.follow(&sample);
        let sampled = sample.degraded.clone();
        let agents = publisher.agents();
        let agent_of = |id| agent_state(agents.get(&id));
        let tick = self.decisions.step(sample, agent_of, &self.config);
        self.count(&tick);
        self.record(agent_of);
        let decided = self.decisions.last().decisions.iter();
        let placed: Vec<Option<Placed<'_>>> = (self.decisions.inputs().vms.iter().zip(decided))
            .map(|(vm, decision)| {
                Some(Placed {
                    threads: vm.threads.as_ref()?,
                    usable: decision.usable?,
                })
            })
            .collect();
        self.places.choose(&placed);
        self.report(publisher, &sampled);
        self.publish(&vms, publisher);
        self.view(publisher)
    }

    /// Time since the start.
    pub(super) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Could nothing that matters happen soon? There is idle pCPU time to spare, and no guest is folded.
    pub(super) fn is_calm(&self) -> bool {
        let step = self.decisions.last();
        let spare = step.idle.zip(step.supply);
        let spare = spare.is_some_and(|(idle, supply)| idle.0 >= CALM_IDLE * supply.0);
        let folded = |(found, decision): (&Found, &Decision)| {
            decision.usable.is_some() && decision.usable != vcpu_count(&found.vm)
        };
        let decided = self.scan.vms.iter().zip(&step.decisions);
        spare && step.contention == Contention::None && !decided.into_iter().any(folded)
    }

    /// Sets the mode, with which the hints at hand are published at once.
    pub(super) fn set_mode(&mut self, mode: Mode, publisher: &Publisher) -> HostView {
        tracing::info!(from = %self.config.mode, to = %mode, "mode set by the control API");
        self.config.mode = mode;
        self.inputs_due = true;
        let vms: Vec<Vm> = self.scan.vms.iter().map(|found| found.vm.clone()).collect();
        self.publish(&vms, publisher);
        self.view(publisher)
    }

    fn discover(&mut self, publisher: &Publisher) {
        let mut scan = self.discovery.scan();
        for found in &mut scan.vms {
            let socket = self.config.policy(&found.vm).hybrid_socket;
            if socket.is_some() {
                found.vm.hybrid_socket = socket;
            }
        }
        log_arrivals(&self.scan.vms, &scan.vms);
        let vms: Vec<Vm> = scan.vms.iter().map(|found| found.vm.clone()).collect();
        publisher.set_vms(&vms);
        self.topology = self.observer.topology().clone();
        self.scan = scan;
        self.inputs_due = true;
        self.next_scan = self.started.elapsed() + self.config.discover.rescan;
    }

    /// Brings the governor's input up to date.
    fn follow(&mut self, sample: &Sample) {
        let online = sample.pcpus.iter().flat_map(BTreeMap::keys);
        if !online.clone().copied().eq(self.online.iter()) {
            self.online = online.copied().collect();
            self.inputs_due = true;
        }
        if std::mem::take(&mut self.inputs_due) {
            let topology = self.topology.topology.as_ref();
            let common = topology.map_or_else(|| self.online.clone(), Topology::common);
            let found = &self.scan.vms;
            self.decisions.follow(
                found,
                &self.groups.tree,
                &self.config,
                &common,
                &self.online,
            );
            if self.recorder.is_some() {
                let scene = Scene {
                    found: found.clone(),
                    tree: self.groups.tree.clone(),
                    common,
                    online: self.online.clone(),
                    settings: Settings::from(&self.config),
                };
                if self.scene.as_deref() != Some(&scene) {
                    self.scene = Some(Arc::new(scene));
                }
            }
        }
    }

    /// Hands over what was decided and on what.
    fn record(&mut self, agent_of: impl Fn(VmId) -> AgentState) {
        let (Some(recorder), Some(scene)) = (&mut self.recorder, &self.scene) else {
            return;
        };
        let Some(sample) = self.decisions.rates().last() else {
            return;
        };
        let decisions = &self.decisions.last().decisions;
        recorder.take(Moment {
            number: self.ticks,
            scene: Arc::clone(scene),
            sample: Arc::clone(sample),
            agents: scene
                .found
                .iter()
                .map(|found| agent_of(found.vm.id))
                .collect(),
            decided: decisions.iter().map(Decided::from).collect(),
        });
    }

    fn count(&mut self, tick: &Tick) {
        self.ticks += 1;
        self.rejected += tick.rejected;
        self.totals.retain(|id, _| tick.vms.contains_key(id));
        for (id, rates) in &tick.vms {
            let total = self.totals.entry(*id).or_default();
            if let Some(rates) = rates {
                total.run += rates.run_time;
                total.run_delay += rates.run_delay_time;
            }
        }
    }

    fn publish(&self, vms: &[Vm], publisher: &Publisher) {
        let decisions = &self.decisions.last().decisions;
        for ((vm, decision), keep) in vms.iter().zip(decisions).zip(self.places.last()) {
            let mode = self.config.policy(vm).mode;
            publisher.publish(vm.id, hint(mode, vcpu_count(vm), decision, keep));
        }
    }

    /// Logs what changed, and what can't be read since this tick.
    fn report(&mut self, publisher: &Publisher, sampled: &[String]) {
        for (found, decision) in self.scan.vms.iter().zip(&self.decisions.last().decisions) {
            if decision.changed {
                tracing::info!(
                    vm = %decision.id,
                    name = found.vm.name.as_str(),
                    usable = decision.usable,
                    reason = %decision.reason(),
                    "{}", decision.why
                );
            }
        }
        let mut degraded: BTreeSet<String> = self
            .scan
            .degraded
            .iter()
            .chain(&self.groups.degraded)
            .chain(&self.topology.degraded)
            .chain(sampled)
            .cloned()
            .collect();
        degraded.extend(publisher.degraded());
        degraded.extend(self.recorder.as_ref().and_then(Recorder::failure));
        for message in degraded.difference(&self.degraded) {
            tracing::warn!("degraded: {message}");
        }
        for message in self.degraded.difference(&degraded) {
            tracing::info!("no longer degraded: {message}");
        }
        self.degraded = degraded;
    }

    fn view(&self, publisher: &Publisher) -> HostView {
        draw(&Drawing {
            config: &self.config,
            epoch: self.epoch,
            ticks: self.ticks,
            rejected: self.rejected,
            pcpus: &self.decisions.inputs().pcpus,
            degraded: &self.degraded,
            record: self.recorder.as_ref().map(Recorder::state),
            vms: &self.scan.vms,
            step: self.decisions.last(),
            totals: &self.totals,
            agents: publisher.agents(),
        })
    }
}

/// The number of a VM's vCPUs, where they are known.
fn vcpu_count(vm: &Vm) -> Option<u32> {
    match &vm.vcpus {
        Vcpus::Known(threads) => u32::try_from(threads.len()).ok(),
        Vcpus::Unclassified(_) => None,
    }
}

/// What to tell the guest; nothing in mode observe, or when its vCPUs are not known.
fn hint(mode: Mode, vcpus: Option<u32>, decision: &Decision, keep: &Arc<[u32]>) -> Option<Hint> {
    let (Some(vcpus), Some(usable)) = (vcpus, decision.usable) else {
        return None;
    };
    (mode > Mode::Observe).then_some(Hint {
        usable,
        vcpus,
        classes: decision.classes,
        entitlement: decision.target,
        spare: decision.spare,
        contention: decision.contention,
        reason: decision.reason(),
        mode,
        keep: Arc::clone(keep),
    })
}

fn log_arrivals(before: &[Found], now: &[Found]) {
    for found in now {
        let vm = &found.vm;
        match before.iter().find(|old| old.vm.id == vm.id) {
            Some(old) if old.vm.vcpus == vm.vcpus => {}
            Some(_) => {
                tracing::info!(vm = %vm.id, name = vm.name, vcpus = ?vm.vcpus, "the VM's vCPUs changed");
            }
            None => {
                tracing::info!(vm = %vm.id, name = vm.name, accelerator = ?vm.accelerator, vcpus = ?vm.vcpus, "VM found");
            }
        }
    }
    for old in before
        .iter()
        .filter(|old| !now.iter().any(|found| found.vm.id == old.vm.id))
    {
        tracing::info!(vm = %old.vm.id, name = old.vm.name, "VM gone");
    }
}

#[cfg(test)]
mod faults;
