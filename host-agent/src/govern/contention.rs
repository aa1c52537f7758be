//! Is a pool contended? Pure: time is handed in.
//!
//! ```text
//!                demand > 1.05 supply and pCPUs full for 0.5 s, hold-off over
//!   ┌──────────┐ ─────────────────────────────────────────────────────► ┌───────────┐
//!   │   none   │                                                        │ contended │
//!   └──────────┘ ◄───────────────────────────────────────────────────── └───────────┘
//!                         pCPUs idle over 2 s
//! ```
//!
//! Entering and leaving are different tests on purpose. Run delay inflates demand while guests are unfolded and is gone once
//! they are folded, so a rule that leaves for lack of demand would swing for ever on constant load. And a pool that was left
//! soon after it was entered, though its load went on, was entered too early: that doubles the time before the next entry.

use std::collections::VecDeque;
use std::time::Duration;

use crate::model::{Contention, Cpus, PoolRates};

/// More is wanted than there is when demand exceeds this many times the supply: both are means with some noise, and a pool
/// that is exactly full is not contended.
const WANTED: f64 = 1.05;
/// pCPUs are full when they were busy for this part of the full window.
const FULL: f64 = 0.97;
const FULL_WINDOW: Duration = Duration::from_millis(500);
/// pCPUs are idle when, over the idle window, more than this was: the larger of a part of the supply and an absolute.
const IDLE_PART: f64 = 0.05;
const IDLE_LEAST: f64 = 0.25;
const IDLE_WINDOW: Duration = Duration::from_secs(2);
/// Contention that was left sooner than this was undone.
const UNDONE: Duration = Duration::from_secs(15);
/// Below this part of the supply, in the last moment, the load itself has ended, and nothing was undone.
const LOAD_ENDED: f64 = 0.5;
const LAST_MOMENT: Duration = Duration::from_millis(200);
/// The hold-off after the first undone entry, the longest, and the time after which it starts again from the first.
const HOLD_OFF: Duration = Duration::from_secs(2);
const HOLD_OFF_MOST: Duration = Duration::from_secs(64);
const FORGIVEN: Duration = Duration::from_secs(120);
/// Supply is a moving average with this time constant.
const SUPPLY_TIME: f64 = 1.0;

/// Measured state of a pool's pCPUs, and whether they are contended.
#[derive(Debug, Default)]
pub(super) struct PoolState {
    figures: VecDeque<(Duration, Duration, PoolRates)>,
    supply: Option<Cpus>,
    contention: Contention,
    entered_at: Duration,
    idle_counts_from: Duration,
    hold_off: Duration,
    hold_off_until: Duration,
    undone_at: Option<Duration>,
}

impl PoolState {
    /// Takes the figures of one tick.
    pub(super) fn push(&mut self, at: Duration, interval: Duration, rates: Option<PoolRates>) {
        let Some(rates) = rates else {
            self.figures.clear();
            self.supply = None;
            self.contention = Contention::Unknown;
            return;
        };
        self.figures.push_back((at, interval, rates));
        self.figures
            .retain(|(then, _, _)| at.saturating_sub(*then) < IDLE_WINDOW);
        let now = rates.cpus - rates.irq - rates.steal;
        let part = (interval.as_secs_f64() / SUPPLY_TIME).min(1.0);
        self.supply = Some(
            self.supply
                .map_or(now, |supply| Cpus(supply.0 + part * (now.0 - supply.0))),
        );
    }

    /// Decides whether the pool is contended, given what its claimants show that they want (without headroom).
    pub(super) fn judge(&mut self, now: Duration, demand: Cpus) -> Contention {
        let Some(supply) = self.supply else {
            return Contention::Unknown;
        };
        self.contention = match self.contention {
            Contention::Contended if self.idles(now, supply) => {
                self.leave(now, supply);
                Contention::None
            }
            Contention::Contended => Contention::Contended,
            _ if now >= self.hold_off_until && demand.0 > WANTED * supply.0 && self.is_full() => {
                self.entered_at = now;
                self.idle_counts_from = now;
                Contention::Contended
            }
            _ => Contention::None,
        };
        self.contention
    }

    /// A guest was just given more vCPUs and needs a moment to fill them: idle time before `now` says nothing any more.
    pub(super) fn restart_idle(&mut self, now: Duration) {
        self.idle_counts_from = now;
    }

    /// Since when the pCPUs have been full, as far as the present contention knows.
    pub(super) fn full_since(&self) -> Duration {
        self.entered_at.saturating_sub(FULL_WINDOW)
    }

    /// What the pool can give.
    pub(super) fn supply(&self) -> Option<Cpus> {
        self.supply
    }

    /// pCPUs that were idle, over the last half second.
    pub(super) fn idle(&self) -> Option<Cpus> {
        self.mean(FULL_WINDOW, |rates| rates.idle)
    }

    /// pCPUs that were busy with work, VMs' or other, over the last half second; interrupts and steal are not work.
    pub(super) fn used(&self) -> Option<Cpus> {
        self.mean(FULL_WINDOW, |rates| {
            rates.cpus - rates.idle - rates.irq - rates.steal
        })
    }

    /// Was the last tick busy enough for threads to wait?
    pub(super) fn may_queue(&self) -> bool {
        self.figures
            .back()
            .is_some_and(|(_, _, rates)| rates.idle.0 < 0.1 * rates.cpus.0)
    }

    fn is_full(&self) -> bool {
        let covered: Duration = self
            .recent(FULL_WINDOW)
            .map(|(_, interval, _)| *interval)
            .sum();
        let busy = self.mean(FULL_WINDOW, |rates| Cpus(1.0 - rates.idle.0 / rates.cpus.0));
        // A tick may be late: nine tenths of the window are a window.
        covered.as_secs_f64() >= 0.9 * FULL_WINDOW.as_secs_f64()
            && busy.is_some_and(|busy| busy.0 >= FULL)
    }

    fn idles(&self, now: Duration, supply: Cpus) -> bool {
        let counted = now.saturating_sub(self.idle_counts_from) >= IDLE_WINDOW;
        let idle = self.mean(IDLE_WINDOW, |rates| rates.idle);
        counted && idle.is_some_and(|idle| idle.0 > (IDLE_PART * supply.0).max(IDLE_LEAST))
    }

    fn leave(&mut self, now: Duration, supply: Cpus) {
        let used = self.mean(LAST_MOMENT, |rates| rates.cpus - rates.idle);
        let goes_on = used.is_some_and(|used| used.0 >= LOAD_ENDED * supply.0);
        if now.saturating_sub(self.entered_at) < UNDONE && goes_on {
            let again = self
                .undone_at
                .is_some_and(|then| now.saturating_sub(then) < FORGIVEN);
            self.hold_off = if again {
                (2 * self.hold_off).min(HOLD_OFF_MOST)
            } else {
                HOLD_OFF
            };
            self.hold_off_until = now + self.hold_off;
            self.undone_at = Some(now);
        }
    }

    fn recent(&self, window: Duration) -> impl Iterator<Item = &(Duration, Duration, PoolRates)> {
        let last = self.figures.back().map_or(Duration::ZERO, |(at, _, _)| *at);
        self.figures
            .iter()
            .filter(move |(at, _, _)| last.saturating_sub(*at) < window)
    }

    fn mean(&self, window: Duration, value: impl Fn(&PoolRates) -> Cpus) -> Option<Cpus> {
        let (mut sum, mut time) = (0.0, 0.0);
        for (_, interval, rates) in self.recent(window) {
            sum += value(rates).0 * interval.as_secs_f64();
            time += interval.as_secs_f64();
        }
        (time > 0.0).then(|| Cpus(sum / time))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(100);

    struct Pool {
        state: PoolState,
        now: Duration,
    }

    impl Pool {
        fn new() -> Self {
            Self {
                state: PoolState::default(),
                now: Duration::ZERO,
            }
        }

        /// `ticks` ticks with so much idle of 2 pCPUs; the state after the last.
        fn run(&mut self, ticks: u32, idle: f64, demand: f64) -> Contention {
            let mut contention = Contention::Unknown;
            for _ in 0..ticks {
                self.now += TICK;
                let rates = PoolRates {
                    cpus: Cpus(2.0),
                    idle: Cpus(idle),
                    ..PoolRates::default()
                };
                self.state.push(self.now, TICK, Some(rates));
                contention = self.state.judge(self.now, Cpus(demand));
            }
            contention
        }
    }

    #[test]
    fn full_pcpus_and_unmet_demand_are_contention_after_half_a_second() {
        let mut pool = Pool::new();
        assert_eq!(pool.run(20, 1.0, 0.9), Contention::None);
        assert_eq!(pool.run(4, 0.0, 8.0), Contention::None);
        assert_eq!(pool.run(1, 0.0, 8.0), Contention::Contended);
    }

    #[test]
    fn demand_alone_or_full_pcpus_alone_are_none() {
        let mut pool = Pool::new();
        assert_eq!(pool.run(50, 0.2, 8.0), Contention::None, "90 % busy");
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
            gaps.windows(2).take(5).all(|pair| pair[1] > pair[0]),
            "{gaps:?}"
        );
        assert!(
            entries.len() <= 14,
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
    fn irq_and_steal_lower_the_supply() {
        let mut state = PoolState::default();
        let rates = PoolRates {
            cpus: Cpus(4.0),
            idle: Cpus(1.0),
            irq: Cpus(0.25),
            steal: Cpus(0.75),
        };
        for tick in 1..100 {
            state.push(tick * TICK, TICK, Some(rates));
        }
        assert!((state.supply().unwrap().0 - 3.0).abs() < 1e-9);
        assert!((state.used().unwrap().0 - 2.0).abs() < 1e-9);
        assert!((state.idle().unwrap().0 - 1.0).abs() < 1e-9);
    }

    #[test]
    fn without_figures_nothing_is_known() {
        let mut pool = Pool::new();
        assert_eq!(pool.run(10, 0.0, 8.0), Contention::Contended);
        pool.state.push(pool.now + TICK, TICK, None);
        assert_eq!(
            pool.state.judge(pool.now + TICK, Cpus(8.0)),
            Contention::Unknown
        );
        assert_eq!((pool.state.supply(), pool.state.idle()), (None, None));
    }
}
