//! Replay: runs what a daemon recorded through the daemon's own decisions, with the recorded settings or others. What the guests did is
//! as it was: a replay shows what would have been decided on the same figures, not how guests would have answered.

mod show;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

pub use self::show::{ChangeJson, table_head};
use crate::config::Config;
use crate::daemon::decisions::Decisions;
use crate::govern::{AgentState, Decision};
use crate::model::{Vm, VmId};
use crate::record::{Decided, Moment, Reader, RecordError, Scene};

/// A usable count that was set.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// When, since 1970.
    pub time: Duration,
    /// The VM.
    pub vm: Vm,
    /// Usable before; `None` for a VM that is new.
    pub from: Option<u32>,
    /// The decision.
    pub decision: Decision,
    /// What the daemon had decided then.
    pub recorded: Option<Decided>,
}

/// What a replay came to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Runs of the daemon.
    pub runs: u64,
    /// Ticks replayed.
    pub ticks: u64,
    /// VMs seen.
    pub vms: u64,
    /// Changes of usable.
    pub changes: u64,
    /// Ticks of which some usable or reason was another than the daemon's.
    pub other_than_recorded: u64,
    /// Ticks between those replayed that are not in the recording.
    pub ticks_missing: u64,
    /// Ticks before the first of the first run: its decisions begin without what came before.
    pub ticks_missing_before: u64,
    /// Parts of files that can't be used.
    pub losses: Vec<String>,
}

/// Replays the recording at `path`, with the settings of `config` or, without, as they were. Each change of usable goes to `show`;
/// it ends early when that says `false`.
///
/// # Errors
/// When the file can't be read, is no recording, or one of another format. Damage is no error: see [`Summary::losses`].
pub fn replay(
    path: &Path,
    config: Option<&Config>,
    mut show: impl FnMut(&Change) -> bool,
) -> Result<Summary, RecordError> {
    let mut reader = Reader::open(path)?;
    let mut summary = Summary::default();
    let mut vms = BTreeSet::new();
    let mut run: Option<Run> = None;
    'all: while let Some((epoch, moment)) = reader.next_moment()? {
        let run = match &mut run {
            Some(run) if run.follows(epoch, &moment) => {
                summary.ticks_missing = summary
                    .ticks_missing
                    .saturating_add(moment.number - run.last.0 - 1);
                run
            }
            other => {
                if summary.runs == 0 {
                    summary.ticks_missing_before = moment.number.saturating_sub(1);
                } else {
                    summary.ticks_missing = summary
                        .ticks_missing
                        .saturating_add(moment.number.saturating_sub(1));
                }
                summary.runs += 1;
                other.insert(Run::new(epoch))
            }
        };
        run.step(&moment, config);
        summary.ticks += 1;
        vms.extend(moment.scene.found.iter().map(|found| found.vm.id));
        summary.other_than_recorded += u64::from(!run.is_as(&moment.decided));
        for change in run.changes(&moment) {
            summary.changes += 1;
            if !show(&change) {
                break 'all;
            }
        }
    }
    summary.vms = vms.len() as u64;
    summary.losses = reader.losses().iter().map(ToString::to_string).collect();
    Ok(summary)
}

/// One run of the daemon.
struct Run {
    epoch: u64,
    /// Number and time of the last moment.
    last: (u64, Duration),
    scene: Option<Arc<Scene>>,
    recorded: Config,
    decisions: Decisions,
    usable: BTreeMap<VmId, Option<u32>>,
}

impl Run {
    fn new(epoch: u64) -> Self {
        Self {
            epoch,
            last: (0, Duration::ZERO),
            scene: None,
            recorded: Config::default(),
            decisions: Decisions::default(),
            usable: BTreeMap::new(),
        }
    }

    fn follows(&self, epoch: u64, moment: &Moment) -> bool {
        self.epoch == epoch && self.last.0 < moment.number && self.last.1 <= moment.sample.at
    }

    fn step(&mut self, moment: &Moment, config: Option<&Config>) {
        let scene = &moment.scene;
        let is_new = self
            .scene
            .as_ref()
            .is_none_or(|last| !Arc::ptr_eq(last, scene));
        if is_new {
            self.recorded = scene.settings.config();
        }
        let config = config.unwrap_or(&self.recorded);
        if is_new {
            self.decisions.follow(
                &scene.found,
                &scene.tree,
                config,
                &scene.common,
                &scene.online,
            );
            self.scene = Some(Arc::clone(scene));
        }
        let ids = scene.found.iter().map(|found| found.vm.id);
        let agents: BTreeMap<VmId, AgentState> = ids.zip(moment.agents.iter().copied()).collect();
        let agent_of = |id: VmId| agents.get(&id).copied().unwrap_or(AgentState::Absent);
        self.decisions
            .step(moment.sample.as_ref().clone(), agent_of, config);
        self.last = (moment.number, moment.sample.at);
    }

    fn is_as(&self, recorded: &[Decided]) -> bool {
        let now = self.decisions.last().decisions.iter().map(Decided::from);
        now.eq(recorded.iter().cloned())
    }

    /// What is other than in the moment before.
    fn changes(&mut self, moment: &Moment) -> Vec<Change> {
        let decisions = &self.decisions.last().decisions;
        let mut changes = Vec::new();
        let mut now = BTreeMap::new();
        for (index, (found, decision)) in moment.scene.found.iter().zip(decisions).enumerate() {
            let before = self.usable.get(&decision.id).copied();
            now.insert(decision.id, decision.usable);
            if decision.changed || before != Some(decision.usable) {
                changes.push(Change {
                    time: Duration::from_micros(self.epoch).saturating_add(moment.sample.at),
                    vm: found.vm.clone(),
                    from: before.flatten(),
                    decision: *decision,
                    recorded: moment.decided.get(index).cloned(),
                });
            }
        }
        self.usable = now;
        changes
    }
}
