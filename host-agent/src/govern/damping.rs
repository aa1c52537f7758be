//! When a change may be made. Pure: time is handed in.
//!
//! Raising is quick, since it harms nobody for long; folding waits for its turn and has a budget; over budget the larger
//! value stays.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::time::Duration;

use super::rounding::Rounding;
use crate::model::{Cpus, Wait};

/// Least time between a change and the next fold, and time that a raise must be wanted where nothing shows that it is needed.
const DWELL: Duration = Duration::from_secs(1);
/// Folds of one VM in any minute.
const FOLDS_A_MINUTE: usize = 4;
/// The first fold of a load comes at once, the second when it was wanted for so long, each further one for three times as long as
/// the one before, as long as folds are remembered: a share that goes up and down with uneven neighbours settles at its larger
/// value.
const FOLD_PATIENCE: Duration = Duration::from_millis(500);
const FOLD_PATIENCE_MOST: Duration = Duration::from_secs(240);
const REMEMBERED: Duration = Duration::from_secs(600);
/// Folds for a load that went on for so long and then ended count for nothing.
const LEAST_LOAD: Duration = Duration::from_secs(4);
const MINUTE: Duration = Duration::from_secs(60);
/// A target that moved by less than this, or by less than this part of itself, moves nothing: noise grows with the pool.
const DEAD_BAND: f64 = 0.1;
const DEAD_PART: f64 = 0.03;

/// The usable count of one VM over time.
#[derive(Debug, Default)]
pub(super) struct Damper {
    usable: Option<u32>,
    last_change: Option<Duration>,
    raise_wanted_since: Option<Duration>,
    fold_wanted_since: Option<Duration>,
    recent_folds: VecDeque<Duration>,
    anchor: Option<Anchor>,
    folds: u64,
    unfolds: u64,
}

#[derive(Debug, Clone, Copy)]
struct Anchor {
    target: Cpus,
    rounding: Rounding,
    rounded: u32,
}

impl Anchor {
    fn holds(&self, target: Cpus) -> bool {
        (self.target.0 - target.0).abs() < self.band()
    }

    fn band(&self) -> f64 {
        DEAD_BAND.max(DEAD_PART * self.target.0)
    }
}

/// What became of a wanted count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Move {
    /// It is as it was.
    Stays(u32),
    /// Fewer from now on.
    Folded(u32),
    /// More from now on.
    Unfolded(u32),
    /// A change was wanted and has to wait.
    PutOff(u32, Wait),
}

impl Move {
    pub(super) fn usable(self) -> u32 {
        match self {
            Self::Stays(usable)
            | Self::Folded(usable)
            | Self::Unfolded(usable)
            | Self::PutOff(usable, _) => usable,
        }
    }
}

impl Damper {
    /// The target rounded up, or what an earlier target within the dead band was rounded to.
    pub(super) fn steady(&mut self, target: Cpus, rounding: Rounding) -> u32 {
        match self.anchor {
            Some(anchor) if anchor.rounding == rounding && anchor.holds(target) => anchor.rounded,
            _ => {
                let rounded = rounding.up(target);
                self.anchor = Some(Anchor {
                    target,
                    rounding,
                    rounded,
                });
                rounded
            }
        }
    }

    /// Targets between these two are rounded as the last one was.
    pub(super) fn steady_bound(&self) -> Option<(Cpus, Cpus)> {
        self.anchor.map(|anchor| {
            let band = Cpus(anchor.band());
            (anchor.target - band, anchor.target + band)
        })
    }

    /// The target that was rounded last: it stays the same while targets tremble.
    pub(super) fn steady_target(&self) -> Option<Cpus> {
        self.anchor.map(|anchor| anchor.target)
    }

    /// Moves to `wanted` where that may be now. `at_once` lets a raise pass without waiting.
    pub(super) fn settle(&mut self, now: Duration, vcpus: u32, wanted: u32, at_once: bool) -> Move {
        let current = self.usable.unwrap_or(vcpus).min(vcpus);
        self.recent_folds
            .retain(|then| now.saturating_sub(*then) < REMEMBERED);
        if wanted <= current {
            self.raise_wanted_since = None;
        }
        if wanted >= current {
            self.fold_wanted_since = None;
        }
        if wanted == current {
            self.usable = Some(current);
            return Move::Stays(current);
        }
        if wanted > current {
            let since = *self.raise_wanted_since.get_or_insert(now);
            if !at_once && now - since < DWELL {
                return Move::PutOff(current, Wait::For(since + DWELL - now));
            }
            self.raise_wanted_since = None;
            self.unfolds += 1;
            self.change(now, wanted);
            return Move::Unfolded(wanted);
        }
        let since = *self.fold_wanted_since.get_or_insert(now);
        let dwells = self.last_change.map_or(now, |then| then + DWELL);
        let patient = since + patience(self.recent_folds.len());
        let in_minute = self
            .recent_folds
            .iter()
            .filter(|then| now.saturating_sub(**then) < MINUTE)
            .count();
        let wait = if in_minute >= FOLDS_A_MINUTE {
            Some(Wait::Budget)
        } else {
            let left = dwells.max(patient).saturating_sub(now);
            (!left.is_zero()).then_some(Wait::For(left))
        };
        if let Some(wait) = wait {
            self.usable = Some(current);
            return Move::PutOff(current, wait);
        }
        self.fold_wanted_since = None;
        self.recent_folds.push_back(now);
        self.folds += 1;
        self.change(now, wanted);
        Move::Folded(wanted)
    }

    /// The count that holds; `None` before the first.
    pub(super) fn usable(&self) -> Option<u32> {
        self.usable
    }

    /// Moves to `wanted` now, on somebody's word; no budget counts it.
    pub(super) fn set(&mut self, vcpus: u32, wanted: u32) -> Move {
        let current = self.usable.unwrap_or(vcpus).min(vcpus);
        self.start_anew();
        self.usable = Some(wanted);
        match wanted.cmp(&current) {
            Ordering::Less => {
                self.folds += 1;
                Move::Folded(wanted)
            }
            Ordering::Equal => Move::Stays(wanted),
            Ordering::Greater => {
                self.unfolds += 1;
                Move::Unfolded(wanted)
            }
        }
    }

    /// The load that the folds were for has ended: they were right, and the next load is another matter.
    pub(super) fn load_ended(&mut self, now: Duration) {
        self.recent_folds
            .retain(|then| now.saturating_sub(*then) < LEAST_LOAD);
    }

    /// Forgets all but the totals: the guest uses all its vCPUs, and no change of it was felt.
    pub(super) fn start_anew(&mut self) {
        let Self { folds, unfolds, .. } = *self;
        *self = Self {
            folds,
            unfolds,
            ..Self::default()
        };
    }

    pub(super) fn folds(&self) -> u64 {
        self.folds
    }

    pub(super) fn unfolds(&self) -> u64 {
        self.unfolds
    }

    fn change(&mut self, now: Duration, usable: u32) {
        self.usable = Some(usable);
        self.last_change = Some(now);
    }
}

/// How long a fold must be wanted after so many that are remembered.
fn patience(recent_folds: usize) -> Duration {
    let Some(further) = recent_folds.checked_sub(1) else {
        return Duration::ZERO;
    };
    let times = u32::try_from(further)
        .ok()
        .and_then(|further| 3u32.checked_pow(further));
    times
        .and_then(|times| FOLD_PATIENCE.checked_mul(times))
        .map_or(FOLD_PATIENCE_MOST, |patience| {
            patience.min(FOLD_PATIENCE_MOST)
        })
}

#[cfg(test)]
mod tests {
    use super::super::rounding::Rounding::{Coarse, Fine};
    use super::*;

    fn is_put_off(moved: Move, usable: u32) -> bool {
        matches!(moved, Move::PutOff(found, _) if found == usable)
    }

    fn s(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn it_folds_at_once_and_then_dwells() {
        let mut damper = Damper::default();
        assert_eq!(damper.settle(s(10.0), 8, 2, false), Move::Folded(2));
        assert!(is_put_off(damper.settle(s(10.1), 8, 1, false), 2));
        assert!(is_put_off(damper.settle(s(10.9), 8, 1, false), 2));
        assert_eq!(damper.settle(s(11.0), 8, 1, false), Move::Folded(1));
        assert_eq!(damper.settle(s(11.1), 8, 1, false), Move::Stays(1));
    }

    #[test]
    fn each_further_fold_must_be_wanted_for_longer() {
        let mut damper = Damper::default();
        let mut patience = Vec::new();
        for round in 0..4 {
            let start = f64::from(round) * 10.0;
            let mut waited = 0.0;
            while is_put_off(damper.settle(s(start + waited), 4, 1, false), 4) {
                waited += 0.1;
            }
            patience.push((waited * 10.0).round() / 10.0);
            damper.settle(s(start + 9.0), 4, 4, true);
        }
        assert_eq!(patience, [0.0, 0.5, 1.5, 4.5]);
    }

    #[test]
    fn a_share_that_goes_up_and_down_settles_at_its_larger_value() {
        let mut damper = Damper::default();
        let mut moves = 0;
        for tick in 0..3000 {
            // Two seconds at one, two at two, for five minutes.
            let wanted = if tick / 20 % 2 == 0 { 1 } else { 2 };
            let moved = damper.settle(s(f64::from(tick) / 10.0), 4, wanted, true);
            moves += u32::from(matches!(moved, Move::Folded(_) | Move::Unfolded(_)));
        }
        assert!(moves <= 12, "{moves} moves in five minutes");
        assert_eq!(damper.settle(s(300.0), 4, 2, true).usable(), 2);
    }

    #[test]
    fn a_needed_raise_comes_at_once_and_another_after_a_second() {
        let mut damper = Damper::default();
        damper.settle(s(0.0), 8, 1, false);
        assert_eq!(damper.settle(s(0.1), 8, 3, true), Move::Unfolded(3));
        assert!(is_put_off(damper.settle(s(0.2), 8, 5, false), 3));
        assert!(is_put_off(damper.settle(s(0.9), 8, 4, false), 3));
        assert_eq!(damper.settle(s(1.2), 8, 4, false), Move::Unfolded(4));
        damper.settle(s(1.3), 8, 6, false);
        damper.settle(s(1.4), 8, 4, false);
        assert!(
            is_put_off(damper.settle(s(2.5), 8, 6, false), 4),
            "the wish was broken off in between"
        );
    }

    #[test]
    fn folds_that_were_not_for_a_load_that_ended_are_remembered() {
        let mut damper = Damper::default();
        // Tries to fold for so long, then is raised for good reason.
        let round = |damper: &mut Damper, start: f64, seconds: u32| {
            let folded = (0..seconds * 10).any(|tick| {
                damper.settle(s(start + f64::from(tick) / 10.0), 4, 1, false) == Move::Folded(1)
            });
            damper.settle(s(start + f64::from(seconds) + 1.0), 4, 4, true);
            folded
        };
        let folded: Vec<bool> = [0.0, 10.0, 20.0, 30.0, 45.0]
            .map(|start| round(&mut damper, start, 5))
            .to_vec();
        assert_eq!(folded, [true, true, true, true, false]);
        assert!(!round(&mut damper, 100.0, 13));
        assert!(round(&mut damper, 120.0, 14));
        damper.load_ended(s(140.0));
        assert!(
            round(&mut damper, 141.0, 1),
            "all were for loads that ended"
        );
        assert!(round(&mut damper, 1000.0, 1), "that was long ago");
        assert_eq!((damper.folds(), damper.unfolds()), (7, 7));
    }

    #[test]
    fn a_target_that_trembles_moves_nothing() {
        let mut damper = Damper::default();
        assert_eq!(damper.steady(Cpus(1.12), Fine), 2);
        assert_eq!(damper.steady(Cpus(1.03), Coarse), 1);
        assert_eq!(damper.steady(Cpus(1.10), Coarse), 1);
        assert_eq!(damper.steady(Cpus(1.30), Coarse), 2);
        assert_eq!(damper.steady(Cpus(1.25), Fine), 2);
        assert_eq!(damper.steady(Cpus(20.0), Fine), 20);
        assert_eq!(
            damper.steady(Cpus(20.5), Fine),
            20,
            "noise grows with the pool"
        );
        assert_eq!(damper.steady(Cpus(20.7), Fine), 21);
        assert_eq!(
            damper.steady(Cpus(1.01), Coarse),
            1,
            "another rounding is another question"
        );
    }

    #[test]
    fn a_vm_that_lost_vcpus_uses_no_more_than_it_has() {
        let mut damper = Damper::default();
        damper.settle(s(0.0), 8, 6, false);
        assert_eq!(damper.settle(s(1.0), 4, 4, false), Move::Stays(4));
    }
}
