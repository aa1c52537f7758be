//! How much a VM wants, from what it was measured to do. Pure: state and time are handed in.
//!
//! A VM that runs on all its vCPUs shows its demand: what they would run if nothing made them wait. A folded one can't show demand
//! above the vCPUs it uses; when it fills those, it is *saturated* and taken to want all its vCPUs.

use std::collections::VecDeque;
use std::time::Duration;

use crate::model::{Cpus, VmRates};

/// Demand is a mean over so long.
const WINDOW: Duration = Duration::from_millis(500);
/// A load that ends or begins is plain after two ticks: those are below, or above, so many times the mean.
const FALLEN: f64 = 0.5;
const RISEN: f64 = 2.0;
/// A tick with so many times what the one before it showed is the first whole one of a load, or the one in which it began.
const GREW: f64 = 1.25;
/// A VM swings when it went from wanting less than the first part of its vCPUs in use to more than the second, so often in so long.
const RESTS: f64 = 0.25;
const WORKS: f64 = 0.75;
const SWINGS: usize = 4;
const SWINGS_OVER: Duration = Duration::from_secs(10);
/// For slower judgements (is it a sleeper, does it starve?) figures are kept for so long.
const LONG_WINDOW: Duration = Duration::from_secs(1);
/// A VM without figures for so long is not measured any more.
const STALE: Duration = Duration::from_secs(1);
/// Saturation begins and ends at these parts of the vCPUs in use.
const SATURATED_FROM: f64 = 0.90;
const SATURATED_UNTIL: f64 = 0.75;
/// After a change of the vCPUs in use, the window still tells of the time before.
const SETTLE: Duration = Duration::from_millis(600);
/// A VM that isn't saturated may want this much more in the next moment than it showed in the last.
const HEADROOM: f64 = 0.10;

#[derive(Debug, Clone, Copy)]
struct Figure {
    at: Duration,
    interval: Duration,
    run: Cpus,
    run_delay: Cpus,
    wanted: Cpus,
    variance: f64,
}

/// Measured use of one VM over the last second, and what follows from it.
#[derive(Debug, Default)]
pub struct Demand {
    figures: VecDeque<Figure>,
    saturated: bool,
    in_use: u32,
    settled_at: Duration,
    /// Means over the window, made anew with each tick.
    mean_wanted: Cpus,
    mean_run: Cpus,
    mean_run_delay: Cpus,
    load_since: Duration,
    rests: bool,
    starts: VecDeque<Duration>,
}

impl Demand {
    /// Takes the figures of one tick; `in_use` is the number of vCPUs that the guest really uses.
    pub fn push(&mut self, at: Duration, interval: Duration, rates: &VmRates, in_use: u32) {
        let before = self.latest();
        self.figures.push_back(Figure {
            at,
            interval,
            run: rates.run,
            run_delay: rates.run_delay,
            wanted: rates.wanted,
            variance: rates.variance,
        });
        while let Some(first) = self.figures.front()
            && at.saturating_sub(first.at) >= LONG_WINDOW
        {
            self.figures.pop_front();
        }
        self.mean_wanted = self.mean(WINDOW, |figure| figure.wanted);
        self.mean_run = self.mean(WINDOW, |figure| figure.run);
        self.mean_run_delay = self.mean(WINDOW, |figure| figure.run_delay);
        if self.latest_two() > RISEN * self.mean_wanted.0 {
            // The one before tells of the time before the load, too.
            let began = rates.wanted.0 > GREW * before.0;
            let ticks = if began { 1 } else { 2 };
            self.load_since = at.saturating_sub(ticks * interval);
        }
        self.note_start(at, rates.wanted.0 / f64::from(in_use.max(1)));
        if in_use != self.in_use {
            self.in_use = in_use;
            self.settled_at = at + SETTLE;
        }
        if at < self.settled_at && self.saturated {
            return;
        }
        let wanted = self.measured().0;
        let part = if self.saturated {
            SATURATED_UNTIL
        } else {
            SATURATED_FROM
        };
        self.saturated = wanted >= part * f64::from(in_use);
    }

    /// Does its load come and go, all of it, again and again?
    #[must_use]
    pub fn swings(&self) -> bool {
        self.starts.len() >= SWINGS
    }

    fn note_start(&mut self, at: Duration, part: f64) {
        while let Some(first) = self.starts.front()
            && at.saturating_sub(*first) >= SWINGS_OVER
        {
            self.starts.pop_front();
        }
        if part < RESTS {
            self.rests = true;
        } else if part > WORKS && std::mem::take(&mut self.rests) && self.starts.len() < SWINGS {
            self.starts.push_back(at);
        }
    }

    /// Are the figures recent enough to decide by?
    #[must_use]
    pub fn is_fresh(&self, now: Duration) -> bool {
        self.figures
            .back()
            .is_some_and(|last| now.saturating_sub(last.at) < STALE)
    }

    /// Does it fill the vCPUs it uses?
    #[must_use]
    pub fn is_saturated(&self) -> bool {
        self.saturated
    }

    /// What its vCPUs would run if nothing made them wait: the mean of the last half second, or that of the last two ticks once
    /// those fall below half of it, or rise above twice.
    #[must_use]
    pub fn measured(&self) -> Cpus {
        let mean = self.mean_wanted;
        let now = Cpus(self.latest_two());
        if now.0 < FALLEN * mean.0 || now.0 > RISEN * mean.0 {
            now
        } else {
            mean
        }
    }

    fn latest_two(&self) -> f64 {
        let latest = self.figures.iter().rev().take(2);
        let sum: f64 = latest.map(|figure| figure.wanted.0).sum();
        sum / self.figures.len().clamp(1, 2) as f64
    }

    /// What its vCPUs would have run in the last tick if nothing had made them wait.
    #[must_use]
    pub fn latest(&self) -> Cpus {
        let last = self.figures.back();
        last.map_or(Cpus::ZERO, |figure| figure.wanted)
    }

    /// Mean and standard deviation of the number of vCPUs that want to run, over the last second, and not before
    /// `since` or the plain start of its load.
    #[must_use]
    pub fn spread(&self, since: Duration) -> (Cpus, Cpus) {
        let window = self.long_window(since.max(self.load_since));
        let mean = self.mean(window, |figure| figure.wanted);
        let square = |figure: &Figure| {
            let off = figure.wanted.0 - mean.0;
            Cpus(figure.variance + off * off)
        };
        (mean, Cpus(self.mean(window, square).0.max(0.0).sqrt()))
    }

    /// Run in the last tick.
    #[must_use]
    pub fn latest_run(&self) -> Cpus {
        self.figures.back().map_or(Cpus::ZERO, |figure| figure.run)
    }

    /// What the VM is taken to want, for dividing the pool: at most `vcpus`.
    #[must_use]
    pub fn estimate(&self, vcpus: u32) -> Cpus {
        let all = Cpus::from(vcpus);
        if self.in_use < vcpus && self.saturated {
            return all;
        }
        Cpus((self.measured().0 * (1.0 + HEADROOM)).min(all.0))
    }

    /// Mean of what ran over the last half second.
    #[must_use]
    pub fn run(&self) -> Cpus {
        self.mean_run
    }

    /// Mean of what waited over the last half second.
    #[must_use]
    pub fn run_delay(&self) -> Cpus {
        self.mean_run_delay
    }

    /// Mean of what ran over the last second, and not before `since`.
    #[must_use]
    pub fn long_run(&self, since: Duration) -> Cpus {
        self.mean(self.long_window(since), |figure| figure.run)
    }

    fn long_window(&self, since: Duration) -> Duration {
        let last = self.figures.back().map_or(since, |figure| figure.at);
        LONG_WINDOW.min(last.saturating_sub(since))
    }

    fn mean(&self, window: Duration, value: impl Fn(&Figure) -> Cpus) -> Cpus {
        let Some(last) = self.figures.back() else {
            return Cpus::ZERO;
        };
        let recent = self
            .figures
            .iter()
            .rev()
            .take_while(|figure| last.at - figure.at < window);
        let (mut sum, mut time) = (0.0, 0.0);
        for figure in recent {
            sum += value(figure).0 * figure.interval.as_secs_f64();
            time += figure.interval.as_secs_f64();
        }
        if time > 0.0 {
            Cpus(sum / time)
        } else {
            Cpus::ZERO
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(100);

    fn rates(run: f64, run_delay: f64) -> VmRates {
        VmRates {
            run: Cpus(run),
            run_delay: Cpus(run_delay),
            wanted: Cpus(run + run_delay),
            ..VmRates::default()
        }
    }

    /// Pushes `ticks` equal figures after what `demand` has seen.
    fn feed(demand: &mut Demand, ticks: u32, run: f64, run_delay: f64, in_use: u32) {
        for _ in 0..ticks {
            let at = demand.figures.back().map_or(TICK, |last| last.at + TICK);
            demand.push(at, TICK, &rates(run, run_delay), in_use);
        }
    }

    #[test]
    fn an_unfolded_vm_shows_its_demand_and_gets_headroom() {
        let mut demand = Demand::default();
        feed(&mut demand, 10, 1.0, 1.0, 4);
        assert!((demand.measured().0 - 2.0).abs() < 1e-9);
        assert!((demand.estimate(4).0 - 2.2).abs() < 1e-9);
        assert!(!demand.is_saturated());
        feed(&mut demand, 10, 1.0, 3.0, 4);
        assert_eq!(demand.estimate(4), Cpus(4.0), "never above its vCPUs");
    }

    #[test]
    fn a_folded_vm_that_fills_its_vcpus_wants_all() {
        let mut demand = Demand::default();
        feed(&mut demand, 10, 0.9, 0.05, 1);
        assert!(demand.is_saturated());
        assert_eq!(demand.estimate(8), Cpus(8.0));
        feed(&mut demand, 10, 0.8, 0.0, 1);
        assert!(
            demand.is_saturated(),
            "saturation ends at 0.75, not at 0.90"
        );
        feed(&mut demand, 10, 0.7, 0.0, 1);
        assert!(!demand.is_saturated());
        assert!((demand.estimate(8).0 - 0.77).abs() < 1e-9);
    }

    #[test]
    fn a_fall_to_less_than_half_counts_after_two_ticks() {
        let mut demand = Demand::default();
        feed(&mut demand, 10, 2.0, 2.0, 4);
        feed(&mut demand, 1, 0.1, 0.0, 4);
        assert!(demand.measured().0 > 2.0);
        feed(&mut demand, 1, 0.1, 0.0, 4);
        assert!((demand.measured().0 - 0.1).abs() < 1e-9);
    }

    #[test]
    fn a_vm_that_was_just_given_more_vcpus_stays_saturated_while_it_fills_them() {
        let mut demand = Demand::default();
        feed(&mut demand, 10, 1.0, 0.0, 1);
        feed(&mut demand, 1, 1.0, 0.0, 2);
        assert!(demand.is_saturated());
        feed(&mut demand, 10, 2.0, 0.0, 2);
        assert!(demand.is_saturated());
        feed(&mut demand, 1, 2.0, 0.0, 4);
        feed(&mut demand, 10, 2.0, 0.0, 4);
        assert!(!demand.is_saturated(), "it was given four and fills two");
    }

    #[test]
    fn a_load_that_comes_and_goes_swings_and_a_constant_one_does_not() {
        let mut demand = Demand::default();
        feed(&mut demand, 300, 2.0, 2.0, 4);
        assert!(!demand.swings());
        for _ in 0..4 {
            feed(&mut demand, 10, 0.0, 0.0, 4);
            feed(&mut demand, 10, 2.0, 2.0, 4);
        }
        assert!(demand.swings());
        feed(&mut demand, 101, 2.0, 2.0, 4);
        assert!(!demand.swings(), "that was ten seconds ago");
    }

    #[test]
    fn the_tick_in_which_a_load_begins_is_no_rest_of_it() {
        let mut demand = Demand::default();
        feed(&mut demand, 10, 0.0, 0.0, 8);
        feed(&mut demand, 1, 1.0, 3.0, 8);
        feed(&mut demand, 1, 2.0, 6.0, 8);
        let (mean, deviation) = demand.spread(Duration::ZERO);
        assert_eq!((mean, deviation), (Cpus(8.0), Cpus(0.0)));
        feed(&mut demand, 1, 2.0, 6.0, 8);
        let (mean, deviation) = demand.spread(Duration::ZERO);
        assert_eq!((mean, deviation), (Cpus(8.0), Cpus(0.0)));
    }

    #[test]
    fn figures_grow_stale() {
        let mut demand = Demand::default();
        assert!(!demand.is_fresh(Duration::ZERO));
        feed(&mut demand, 1, 1.0, 0.0, 1);
        assert!(demand.is_fresh(TICK + Duration::from_millis(900)));
        assert!(!demand.is_fresh(TICK + Duration::from_millis(1000)));
        assert_eq!(Demand::default().measured(), Cpus::ZERO);
    }

    #[test]
    fn means_weigh_by_time() {
        let mut demand = Demand::default();
        demand.push(
            Duration::from_millis(300),
            Duration::from_millis(300),
            &rates(1.0, 0.0),
            4,
        );
        demand.push(
            Duration::from_millis(400),
            Duration::from_millis(100),
            &rates(3.0, 0.0),
            4,
        );
        assert!((demand.run().0 - 1.5).abs() < 1e-9);
    }
}
