//! What the governor keeps of one VM between steps.

use std::time::Duration;

use super::damping::Damper;
use super::gate::{Figure, Gate, Idle, Left};
use super::input::{AgentState, VmInput};
use crate::entitle::demand::Demand;
use crate::model::{Cpus, VmId};

/// A folded VM that wants its vCPUs and runs less than this part of what it is due, for so long, starves.
const STARVED: f64 = 0.70;
/// A folded VM that runs between these parts of what it ran before, but for its share, has lost by it.
const LOST: (f64, f64) = (0.50, 0.90);
/// A folded VM that wants less than this part of its target, for so long, is served without folding.
const SATISFIED: f64 = 0.80;
const SATISFIED_FOR: Duration = Duration::from_secs(2);
/// After a fold, means still tell of the time before.
const SETTLE: Duration = Duration::from_millis(700);
const STARVED_FOR: Duration = Duration::from_secs(2);
/// A folded VM that wants its vCPUs and runs less than it is due by more than this part, and this absolute, for so long, has
/// too few of them to get it: what others run comes in between.
const SHORT_PART: f64 = 0.025;
const SHORT_LEAST: f64 = 0.10;
const SHORT_FOR: Duration = Duration::from_secs(2);
/// A VM that starved, or whose agent failed, is left unfolded for so long at first, and no longer than the second.
const SPARED: Duration = Duration::from_secs(60);
const SPARED_MOST: Duration = Duration::from_secs(960);
/// A load has ended when a VM did not fill its vCPUs for so long: bursts are one load.
const RESTED: Duration = Duration::from_secs(1);
/// vCPUs beyond the share are tried without for the first time after so long.
const HELD: Duration = Duration::from_secs(120);
/// A quota is used up from this part of it on: the kernel deals it out in slices, of which some are lost.
const QUOTA_USED: f64 = 0.97;

/// One VM's history, as far as decisions need it.
#[derive(Debug)]
pub(super) struct VmState {
    pub(super) id: VmId,
    pub(super) first_seen: Duration,
    pub(super) enforced: bool,
    pub(super) demand: Demand,
    pub(super) damper: Damper,
    pub(super) quota: Gate,
    pub(super) more: Spare,
    /// vCPUs beyond its rounded share that it was left with, since its vCPUs rest now and then.
    pub(super) room: u32,
    ran_before: Cpus,
    settled_at: Duration,
    satisfied_since: Option<Duration>,
    starves_since: Option<Duration>,
    short_since: Option<Duration>,
    /// When it filled its vCPUs in use last.
    filled_at: Option<Duration>,
    pub(super) starved: Spared,
    pub(super) failed: Spared,
}

impl VmState {
    pub(super) fn new(id: VmId, now: Duration) -> Self {
        Self {
            id,
            first_seen: now,
            enforced: false,
            demand: Demand::default(),
            damper: Damper::default(),
            quota: Gate::default(),
            more: Spare::default(),
            room: 0,
            ran_before: Cpus::ZERO,
            settled_at: Duration::ZERO,
            satisfied_since: None,
            starves_since: None,
            short_since: None,
            filled_at: None,
            starved: Spared::default(),
            failed: Spared::default(),
        }
    }

    /// How many vCPUs the guest uses, of those that it was told to: all of them until its agent has said otherwise. What it
    /// avoids beyond that is its own choice and hides no demand.
    pub(super) fn in_use(&self, vm: &VmInput, vcpus: u32) -> u32 {
        let told = self.damper.usable().unwrap_or(vcpus);
        match vm.agent {
            AgentState::Works {
                in_use: Some(in_use),
            } => in_use.max(told).clamp(1, vcpus.max(1)),
            _ => vcpus,
        }
    }

    /// Is it folded, and fills what it has?
    pub(super) fn is_hungry(&self, vm: &VmInput, vcpus: u32) -> bool {
        self.in_use(vm, vcpus) < vcpus && self.demand.is_saturated()
    }

    /// Does it fill what it was folded to, as figures show that are all later than the fold?
    pub(super) fn fills(&self, now: Duration) -> bool {
        now >= self.settled_at && self.demand.is_saturated()
    }

    /// Does a load begin that fills its vCPUs? What was idle before was not kept from it.
    pub(super) fn begins_to_fill(&mut self, now: Duration) -> bool {
        if !self.demand.is_saturated() {
            return false;
        }
        let before = self.filled_at.replace(now);
        before.is_none_or(|before| now.saturating_sub(before) >= RESTED)
    }

    /// What it shows that it wants in the last tick, without headroom.
    pub(super) fn shown(&self, vm: &VmInput, vcpus: u32) -> Cpus {
        if self.is_hungry(vm, vcpus) {
            Cpus::from(vcpus)
        } else {
            self.demand.latest()
        }
    }

    /// Takes what one tick said of its quota.
    pub(super) fn push_quota(&mut self, interval: Duration, quota: Option<Cpus>, wanted: Cpus) {
        let run = self.demand.latest_run();
        push_quota(&mut self.quota, interval, quota, run, wanted);
    }

    /// Takes the state of its quota on.
    pub(super) fn turn_quota(&mut self, now: Duration) {
        if self.quota.turn(now) == Idle::Much && self.quota.leave(now) == Left::LoadEnded {
            self.damper.load_ended(now);
        }
    }

    /// It was just folded, and ran so much before.
    pub(super) fn folded(&mut self, now: Duration, ran: Cpus) {
        self.ran_before = ran;
        self.settled_at = now + SETTLE;
        self.starves_since = None;
    }

    /// Has a folded VM shown for long that it wants less than its share, while its vCPUs in use could show more?
    pub(super) fn is_satisfied(&mut self, now: Duration, target: Cpus) -> bool {
        let little = !self.demand.is_saturated() && self.demand.measured().0 < SATISFIED * target.0;
        if !little {
            self.satisfied_since = None;
            return false;
        }
        now - *self.satisfied_since.get_or_insert(now) >= SATISFIED_FOR
    }

    /// Does a folded VM fill its vCPUs, and yet run a little less than it is due, for some time? One vCPU alone is as many as two
    /// threads that wait for each other can use.
    pub(super) fn is_short(
        &mut self,
        now: Duration,
        in_use: u32,
        vcpus: u32,
        target: Cpus,
    ) -> bool {
        let due = target.0.min(f64::from(in_use));
        let short = due - self.demand.run().0 > SHORT_LEAST.max(SHORT_PART * due);
        let folded = in_use > 1 && in_use < vcpus && now >= self.settled_at;
        if !(folded && short && self.demand.is_saturated()) {
            self.short_since = None;
            return false;
        }
        let since = *self.short_since.get_or_insert(now);
        let is_short = now - since >= SHORT_FOR;
        if is_short {
            self.short_since = None;
        }
        is_short
    }

    /// Has a folded VM lost by it, for some time? Either it wants its vCPUs and runs much less than it is due, so its peers take
    /// what it gave up; or it runs less than before, and not as much less as if its load had ended.
    pub(super) fn starves(&mut self, now: Duration, in_use: u32, vcpus: u32, target: Cpus) -> bool {
        let due = target.0.min(f64::from(in_use));
        let ran = self.demand.run().0;
        let starved = self.demand.is_saturated() && ran < STARVED * due;
        let before = self.ran_before.0.min(target.0);
        let lost = ran < LOST.1 * before && ran > LOST.0 * before;
        let folded = in_use < vcpus && now >= self.settled_at;
        if !(folded && (starved || lost)) {
            self.starves_since = None;
            return false;
        }
        let since = *self.starves_since.get_or_insert(now);
        let starves = now - since >= STARVED_FOR;
        if starves {
            self.starves_since = None;
        }
        starves
    }
}

/// Takes what one tick said of a quota.
pub(super) fn push_quota(
    gate: &mut Gate,
    interval: Duration,
    quota: Option<Cpus>,
    run: Cpus,
    wanted: Cpus,
) {
    let Some(quota) = quota.filter(|quota| quota.0 > 0.0) else {
        *gate = Gate::default();
        return;
    };
    let figure = Figure {
        interval,
        busy: (run.0 / (QUOTA_USED * quota.0)).min(1.0),
        wanted: wanted.0 / quota.0,
        idle: Cpus((quota.0 - run.0).max(0.0)),
    };
    gate.push(quota, figure);
}

/// How long something is left alone that went wrong: twice as long each time.
#[derive(Debug, Default)]
pub(super) struct Spared {
    until: Duration,
    last: Duration,
}

impl Spared {
    pub(super) fn begin(&mut self, now: Duration) {
        self.last = if self.last.is_zero() {
            SPARED
        } else {
            (2 * self.last).min(SPARED_MOST)
        };
        self.until = now + self.last;
    }

    pub(super) fn holds(&self, now: Duration) -> bool {
        now < self.until
    }

    /// So much longer.
    pub(super) fn left(&self, now: Duration) -> Duration {
        self.until.saturating_sub(now)
    }
}

/// vCPUs that a folded VM has beyond its share, since pCPUs were idle with the share alone: its neighbours rest so often that
/// the share is less than what it can use. They are tried without again after a while, and each time later.
#[derive(Debug, Default)]
pub(super) struct Spare {
    vcpus: u32,
    /// What the last raise added.
    step: u32,
    /// What was needed before the last try without.
    needed: u32,
    until: Duration,
    hold: Duration,
}

impl Spare {
    /// So many more, and each time at least twice as many as the time before.
    pub(super) fn raise(&mut self, now: Duration, by: u32) {
        if self.vcpus == 0 {
            self.hold = (2 * self.hold).clamp(HELD, SPARED_MOST);
            self.step = by.max(self.needed).max(1);
        } else {
            self.step = by.max(2 * self.step);
        }
        self.vcpus = self.vcpus.saturating_add(self.step);
        self.until = now + self.hold;
    }

    /// How many now.
    pub(super) fn vcpus(&mut self, now: Duration) -> u32 {
        if now >= self.until && self.vcpus > 0 {
            self.needed = self.vcpus;
            self.vcpus = 0;
        }
        self.vcpus
    }

    /// The load has ended: all begins anew.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}
