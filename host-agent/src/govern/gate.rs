//! Is something that gives CPU time, such as pCPUs of a class or a quota, contended? Pure: time is handed in.
//!
//! ```text
//!                more is wanted than there is, it is full, hold-off over
//!   ┌──────────┐ ─────────────────────────────────────────────────────► ┌───────────┐
//!   │   none   │                                                        │ contended │
//!   └──────────┘ ◄───────────────────────────────────────────────────── └───────────┘
//!                  idle over 2 s, and nobody folded who could use that
//! ```
//!
//! Entering and leaving are different tests on purpose. Run delay inflates demand while guests are unfolded and is gone once
//! they are folded, so a rule that leaves for lack of demand would swing for ever on constant load. And what was left soon
//! after it was entered, though its load went on, was entered too early: that makes the time before the next entry longer.

use std::collections::VecDeque;
use std::time::Duration;

use crate::model::{Contention, Cpus};

/// Full is what was busy for this part of the time.
const FULL: f64 = 0.97;
/// It is contended when it was full for so long, and over that time more than so many times the supply was wanted: the plainer
/// the want, the sooner. Demand is noisy, and what is exactly full is not contended.
const WANTED: [(Duration, f64); 2] = [
    (Duration::from_millis(200), 1.4),
    (Duration::from_millis(500), ALWAYS_WANTED),
];
const ALWAYS_WANTED: f64 = 1.05;
/// ... and in each tick of the last moment.
const SURE: Duration = Duration::from_millis(200);
/// It is idle when, over the idle window, more than this was: the larger of a part of the supply and an absolute, but of a
/// small supply no more than a quarter.
const IDLE_PART: f64 = 0.05;
const IDLE_LEAST: f64 = 0.25;
const IDLE_WINDOW: Duration = Duration::from_secs(2);
/// Idle time above this part, and this absolute, is given to guests that fill their vCPUs ...
const LOOSE_PART: f64 = 0.015;
const LOOSE_LEAST: f64 = 0.12;
/// ... so often, before contention ends for it.
const RAISES: u32 = 4;
/// Contention that was left sooner than this was undone.
const UNDONE: Duration = Duration::from_secs(15);
/// Below this part of the supply, in the last moment, the load itself has ended, and nothing was undone.
const LOAD_ENDED: f64 = 0.5;
const LAST_MOMENT: Duration = Duration::from_millis(200);
/// The hold-off after the first undone entry, how much longer the next is, the longest, and the time after the end of a
/// hold-off when it starts again from the first.
const HOLD_OFF: Duration = Duration::from_secs(2);
const HOLD_OFF_GROWS: u32 = 4;
const HOLD_OFF_MOST: Duration = Duration::from_secs(128);
const FORGIVEN: Duration = Duration::from_secs(120);

/// What one tick showed.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Figure {
    /// How long the tick was.
    pub(super) interval: Duration,
    /// The part that was busy, 0 to 1, of all that is competed for as one.
    pub(super) busy: f64,
    /// What was wanted of that, as a multiple of its supply.
    pub(super) wanted: f64,
    /// What was idle here.
    pub(super) idle: Cpus,
}

/// Idle time under contention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Idle {
    /// None to speak of.
    No,
    /// Some, for who can use it.
    Some,
    /// So much that there is no contention.
    Much,
}

/// How contention ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    /// The load has ended.
    LoadEnded,
    /// The load goes on, and leaves time idle.
    Idle,
}

/// State of one thing that gives CPU time.
#[derive(Debug, Clone, Default)]
pub(super) struct Gate {
    figures: VecDeque<Figure>,
    supply: Cpus,
    contention: Contention,
    entered_at: Duration,
    full_since: Duration,
    raised: u32,
    idle_counts_from: Duration,
    hold_off: Duration,
    hold_off_until: Duration,
}

impl Gate {
    /// Takes the figures of one tick. `supply` is what it can give here.
    pub(super) fn push(&mut self, supply: Cpus, figure: Figure) {
        self.supply = supply;
        self.figures.push_back(figure);
        let mut covered: Duration = self.figures.iter().map(|figure| figure.interval).sum();
        while let Some(first) = self.figures.front() {
            covered -= first.interval;
            if covered < IDLE_WINDOW {
                break;
            }
            self.figures.pop_front();
        }
        if self.contention == Contention::Unknown {
            self.contention = Contention::None;
        }
    }

    /// Figures are missing: nothing is known any more.
    pub(super) fn forget(&mut self) {
        self.figures.clear();
        self.contention = Contention::Unknown;
    }

    /// Takes the state on after one tick. Says whether it is contended and yet had idle time for long: that can be given to who can
    /// use it, or contention [ends](Gate::leave).
    pub(super) fn turn(&mut self, now: Duration) -> Idle {
        match self.contention {
            Contention::Contended => return self.idles(now),
            Contention::None if now >= self.hold_off_until => {
                if let Some(window) = self.is_wanted() {
                    self.contention = Contention::Contended;
                    self.entered_at = now;
                    self.full_since = now.saturating_sub(window);
                    self.raised = 0;
                    self.idle_counts_from = now;
                }
            }
            Contention::None | Contention::Unknown => {}
        }
        Idle::No
    }

    /// May guests that fill their vCPUs be given the idle time, vCPU by vCPU? Only so often; then all is given back.
    pub(super) fn may_raise(&self) -> bool {
        self.raised < RAISES
    }

    /// They were given it.
    pub(super) fn raised(&mut self, now: Duration) {
        self.raised += 1;
        self.restart_idle(now);
    }

    /// Idle time that nobody can use: no contention any more.
    pub(super) fn leave(&mut self, now: Duration) -> Left {
        self.contention = Contention::None;
        let used = self.mean(LAST_MOMENT, |figure| self.supply.0 - figure.idle.0);
        if used.is_none_or(|used| used < LOAD_ENDED * self.supply.0) {
            return Left::LoadEnded;
        }
        if now.saturating_sub(self.entered_at) < UNDONE {
            let again = now.saturating_sub(self.hold_off_until) < FORGIVEN;
            self.hold_off = if again && !self.hold_off.is_zero() {
                (HOLD_OFF_GROWS * self.hold_off).min(HOLD_OFF_MOST)
            } else {
                HOLD_OFF
            };
            self.hold_off_until = now + self.hold_off;
        }
        Left::Idle
    }

    /// A guest was just given more vCPUs and needs a moment to fill them: idle time before `now` says nothing any more.
    pub(super) fn restart_idle(&mut self, now: Duration) {
        self.idle_counts_from = now;
    }

    pub(super) fn contention(&self) -> Contention {
        self.contention
    }

    /// Since when it has been full, as far as the present contention knows.
    pub(super) fn full_since(&self) -> Duration {
        self.full_since
    }

    /// What was idle over the idle window.
    pub(super) fn idle(&self) -> Option<Cpus> {
        self.mean(IDLE_WINDOW, |figure| figure.idle.0).map(Cpus)
    }

    /// What was idle over so long.
    pub(super) fn idle_over(&self, window: Duration) -> Option<Cpus> {
        self.mean(window, |figure| figure.idle.0).map(Cpus)
    }

    /// Was it busier than this in the last tick?
    pub(super) fn was_busier(&self, part: f64) -> bool {
        self.figures.back().is_some_and(|figure| figure.busy > part)
    }

    /// More idle time than this is needed to leave.
    pub(super) fn idle_bound(&self) -> Cpus {
        bound(self.supply, IDLE_PART, IDLE_LEAST)
    }

    /// Over which window it was full and more was wanted, if any.
    fn is_wanted(&self) -> Option<Duration> {
        let found = WANTED.iter().find(|(window, least)| {
            let busy = self.mean(*window, |figure| figure.busy);
            let wanted = self.mean(*window, |figure| figure.wanted);
            // A tick may be late: nine tenths of the window are a window.
            self.covered(*window) >= window.mul_f64(0.9)
                && busy.is_some_and(|busy| busy >= FULL)
                && wanted.is_some_and(|wanted| wanted > *least)
                // While a load still begins, shares are not what they will be.
                && self.recent(SURE).all(|figure| figure.wanted > *least)
        });
        found.map(|(window, _)| *window)
    }

    fn idles(&self, now: Duration) -> Idle {
        let counted = now.saturating_sub(self.idle_counts_from) >= IDLE_WINDOW;
        match self.idle().filter(|_| counted) {
            Some(idle) if idle.0 > self.idle_bound().0 => Idle::Much,
            Some(idle) if idle.0 > bound(self.supply, LOOSE_PART, LOOSE_LEAST).0 => Idle::Some,
            _ => Idle::No,
        }
    }

    fn recent(&self, window: Duration) -> impl Iterator<Item = &Figure> {
        let mut age = Duration::ZERO;
        self.figures.iter().rev().take_while(move |figure| {
            // Ticks are a little longer or shorter than they should be.
            let within = age + figure.interval / 2 < window || age.is_zero();
            age += figure.interval;
            within
        })
    }

    fn covered(&self, window: Duration) -> Duration {
        self.recent(window).map(|figure| figure.interval).sum()
    }

    fn mean(&self, window: Duration, value: impl Fn(&Figure) -> f64) -> Option<f64> {
        let (mut sum, mut time) = (0.0, 0.0);
        for figure in self.recent(window) {
            let interval = figure.interval.as_secs_f64();
            sum += value(figure) * interval;
            time += interval;
        }
        (time > 0.0).then(|| sum / time)
    }
}

/// More is wanted than there is when it is more than this.
pub(super) fn wanted_bound(supply: Cpus) -> Cpus {
    Cpus(ALWAYS_WANTED * supply.0)
}

/// A part of the supply, or an absolute if that is larger, but no more than that part of a small supply.
fn bound(supply: Cpus, part: f64, least: f64) -> Cpus {
    Cpus((part * supply.0).max(least * supply.0.min(1.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(100);

    struct Pool {
        state: Gate,
        now: Duration,
    }

    impl Pool {
        fn new() -> Self {
            Self {
                state: Gate::default(),
                now: Duration::ZERO,
            }
        }

        /// `ticks` ticks with so much idle of 2 pCPUs; the state after the last.
        fn run(&mut self, ticks: u32, idle: f64, demand: f64) -> Contention {
            let mut contention = Contention::Unknown;
            for _ in 0..ticks {
                self.now += TICK;
                let figure = Figure {
                    interval: TICK,
                    busy: 1.0 - idle / 2.0,
                    wanted: demand / 2.0,
                    idle: Cpus(idle),
                };
                self.state.push(Cpus(2.0), figure);
                if self.state.turn(self.now) == Idle::Much {
                    self.state.leave(self.now);
                }
                contention = self.state.contention();
            }
            contention
        }
    }

    #[test]
    fn full_pcpus_and_unmet_demand_are_contention_the_sooner_the_plainer() {
        let mut pool = Pool::new();
        assert_eq!(pool.run(20, 1.0, 0.9), Contention::None);
        assert_eq!(pool.run(1, 0.0, 8.0), Contention::None);
        assert_eq!(pool.run(1, 0.0, 8.0), Contention::Contended);
        let mut pool = Pool::new();
        assert_eq!(pool.run(20, 1.0, 0.9), Contention::None);
        assert_eq!(pool.run(4, 0.0, 2.4), Contention::None);
        assert_eq!(pool.run(1, 0.0, 2.4), Contention::Contended);
    }

    #[test]
    fn a_load_that_still_begins_is_waited_for() {
        let mut pool = Pool::new();
        assert_eq!(pool.run(20, 0.0, 2.0), Contention::None);
        assert_eq!(
            pool.run(1, 0.0, 3.0),
            Contention::None,
            "began in this tick"
        );
        assert_eq!(pool.run(1, 0.0, 4.0), Contention::Contended);
        let mut pool = Pool::new();
        assert_eq!(pool.run(20, 0.0, 2.0), Contention::None);
        assert_eq!(pool.run(1, 0.0, 8.0), Contention::None);
        assert_eq!(pool.run(1, 0.0, 8.0), Contention::Contended);
    }

    #[test]
    fn demand_alone_or_full_pcpus_alone_are_none() {
        let mut pool = Pool::new();
        assert_eq!(pool.run(50, 0.2, 8.0), Contention::None, "90 % busy");
        let mut pool = Pool::new();
        assert_eq!(
            pool.run(50, 0.0, 2.0),
            Contention::None,
            "full, and nobody waits"
        );
    }

    #[test]
    fn contention_is_left_for_idle_pcpus_and_not_for_lack_of_demand() {
        let mut pool = Pool::new();
        assert_eq!(pool.run(10, 0.0, 8.0), Contention::Contended);
        assert_eq!(pool.run(600, 0.0, 2.0), Contention::Contended);
        assert_eq!(
            pool.run(600, 0.2, 1.8),
            Contention::Contended,
            "0.2 pCPUs idle is not idle"
        );
        assert_eq!(pool.run(30, 1.0, 0.5), Contention::None);
    }

    #[test]
    fn an_undone_entry_doubles_the_wait_for_the_next() {
        let mut pool = Pool::new();
        let mut entries = Vec::new();
        let mut before = Contention::None;
        // A load that fills the pool while unfolded and leaves 0.4 pCPUs idle while folded.
        for _ in 0..6000 {
            let (idle, demand) = if before == Contention::Contended {
                (0.4, 1.6)
            } else {
                (0.0, 3.0)
            };
            let now = pool.run(1, idle, demand);
            if now == Contention::Contended && before != now {
                entries.push(pool.now);
            }
            before = now;
        }
        let gaps: Vec<u64> = entries
            .windows(2)
            .map(|pair| (pair[1] - pair[0]).as_secs())
            .collect();
        assert!(
            gaps.windows(2).take(3).all(|pair| pair[1] > pair[0]),
            "{gaps:?}"
        );
        assert!(
            entries.len() <= 9,
            "{} entries in ten minutes",
            entries.len()
        );
    }

    #[test]
    fn a_load_that_ends_is_no_undone_entry() {
        let mut pool = Pool::new();
        for round in 0..5 {
            assert_eq!(
                pool.run(6, 0.0, 8.0),
                Contention::Contended,
                "round {round}"
            );
            assert_eq!(pool.run(40, 1.9, 0.1), Contention::None, "round {round}");
        }
    }

    #[test]
    fn a_guest_that_was_just_given_more_has_time_to_use_it() {
        let mut pool = Pool::new();
        assert_eq!(pool.run(25, 0.0, 8.0), Contention::Contended);
        pool.run(4, 1.0, 4.0);
        pool.state.restart_idle(pool.now);
        assert_eq!(pool.run(2, 1.0, 4.0), Contention::Contended);
        assert_eq!(pool.run(50, 0.0, 4.0), Contention::Contended);
    }

    #[test]
    fn without_figures_nothing_is_known() {
        let mut pool = Pool::new();
        assert_eq!(pool.run(10, 0.0, 8.0), Contention::Contended);
        pool.state.forget();
        assert_eq!(pool.state.contention(), Contention::Unknown);
        assert_eq!(pool.state.idle(), None);
        assert_eq!(pool.state.turn(pool.now + TICK), Idle::No);
    }
}
