//! What each pCPU can give and what it gave, as means over ticks. Pure.

use std::collections::VecDeque;
use std::time::Duration;

use crate::model::{Cpus, PcpuRates};

/// What pCPUs gave is a mean over so long.
const WINDOW: Duration = Duration::from_millis(500);
/// Supply is a moving average with this time constant, in seconds.
const SUPPLY_TIME: f64 = 1.0;

/// The host's online pCPUs.
#[derive(Debug, Default)]
pub(super) struct Pcpus {
    ids: Vec<u32>,
    supply: Vec<f64>,
    used: Vec<f64>,
    latest: Vec<PcpuRates>,
    ticks: VecDeque<(Duration, Vec<f64>)>,
}

impl Pcpus {
    /// Takes the figures of one tick; says whether they are known.
    pub(super) fn push(&mut self, interval: Duration, rates: Option<&[PcpuRates]>) -> bool {
        let Some(rates) = rates else {
            *self = Self::default();
            return false;
        };
        if !self
            .ids
            .iter()
            .copied()
            .eq(rates.iter().map(|rates| rates.pcpu))
        {
            self.follow(rates);
        }
        self.latest.clear();
        self.latest.extend_from_slice(rates);
        let part = (interval.as_secs_f64() / SUPPLY_TIME).min(1.0);
        for (supply, rates) in self.supply.iter_mut().zip(rates) {
            *supply += part * (rates.supply().0 - *supply);
        }
        let covered: Duration = self.ticks.iter().map(|(interval, _)| *interval).sum();
        let mut tick = if covered + interval / 2 > WINDOW {
            self.ticks.pop_front().unwrap_or_default().1
        } else {
            Vec::new()
        };
        tick.clear();
        tick.extend(rates.iter().map(|rates| rates.used().0));
        self.ticks.push_back((interval, tick));
        self.mean_used();
        true
    }

    /// Their numbers, rising; places in this list are what the other methods take.
    pub(super) fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// What one can give.
    pub(super) fn supply(&self, place: usize) -> Cpus {
        Cpus(self.supply[place])
    }

    /// What one gave to somebody over the last half second.
    pub(super) fn used(&self, place: usize) -> Cpus {
        Cpus(self.used[place])
    }

    /// What one did in the last tick.
    pub(super) fn latest(&self, place: usize) -> &PcpuRates {
        &self.latest[place]
    }

    /// The place of a pCPU.
    pub(super) fn place(&self, id: u32) -> Option<usize> {
        self.ids.binary_search(&id).ok()
    }

    /// Other pCPUs than before: supplies of those that stayed are kept, the short history is not.
    fn follow(&mut self, rates: &[PcpuRates]) {
        let supply = rates
            .iter()
            .map(|rates| {
                self.place(rates.pcpu)
                    .map_or(rates.supply().0, |place| self.supply[place])
            })
            .collect();
        self.supply = supply;
        self.ids.clear();
        self.ids.extend(rates.iter().map(|rates| rates.pcpu));
        self.ticks.clear();
    }

    fn mean_used(&mut self) {
        self.used.clear();
        self.used.resize(self.ids.len(), 0.0);
        let covered: f64 = self
            .ticks
            .iter()
            .map(|(interval, _)| interval.as_secs_f64())
            .sum();
        for (interval, tick) in &self.ticks {
            let part = interval.as_secs_f64() / covered;
            for (mean, used) in self.used.iter_mut().zip(tick) {
                *mean += part * used;
            }
        }
    }
}
