//! Rates from two samples. Pure: the samples carry their times.
//!
//! The kernel credits run delay only when a thread gets its pCPU, in one step. A thread that was seen waiting is therefore
//! counted at once, and what was counted ahead is taken off the step when it comes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::{Sample, ThreadTimes, VmTimes};
use crate::model::{Cpus, PcpuRates, Tick, VmId, VmRates};

/// Two samples further apart than this say nothing of now: the host slept, or the broker was stopped.
const LONGEST_INTERVAL: Duration = Duration::from_secs(5);

/// A thread that seems to have rested for less than this part of the time did not: run, run delay and the time between samples are
/// read one after the other.
const NO_REST: f64 = 0.05;

/// Makes [`Tick`]s; holds the last sample.
#[derive(Debug, Default)]
pub struct Rates {
    last: Option<Arc<Sample>>,
    counted_ahead: BTreeMap<(VmId, u32), Duration>,
}

impl Rates {
    /// Takes the next sample.
    pub fn update(&mut self, sample: Sample) -> Tick {
        let mut tick = Tick {
            at: sample.at,
            ..Tick::default()
        };
        let last = self.last.take().filter(|last| {
            sample
                .at
                .checked_sub(last.at)
                .is_some_and(|interval| !interval.is_zero() && interval <= LONGEST_INTERVAL)
        });
        if let Some(last) = &last {
            tick.interval = sample.at - last.at;
            tick.pcpus = pcpu_rates(last, &sample, tick.interval, &mut tick.rejected);
        }
        let mut ahead = BTreeMap::new();
        for (id, times) in &sample.vms {
            let before = last.as_ref().and_then(|last| last.vms.get(id));
            let rates = before.and_then(|before| {
                self.vm_rates(*id, before, times, &mut ahead, &mut tick.rejected)
            });
            tick.vms.insert(*id, rates);
        }
        self.counted_ahead = ahead;
        self.last = Some(Arc::new(sample));
        tick
    }

    /// The last sample; before the first there is none.
    #[must_use]
    pub fn last(&self) -> Option<&Arc<Sample>> {
        self.last.as_ref()
    }

    fn vm_rates(
        &self,
        id: VmId,
        before: &VmTimes,
        times: &VmTimes,
        ahead: &mut BTreeMap<(VmId, u32), Duration>,
        rejected: &mut u64,
    ) -> Option<VmRates> {
        let interval = times
            .at
            .checked_sub(before.at)
            .filter(|interval| !interval.is_zero())?;
        let mut rates = VmRates::default();
        for (tid, now) in &times.threads {
            let (old, now) = (before.threads.get(tid).copied().flatten()?, (*now)?);
            let Some((run, run_delay)) = grown(old, now) else {
                *rejected += 1;
                return None;
            };
            rates.run_time += run;
            rates.run_delay_time += run_delay;
            let run = run.min(interval);
            let counted = self
                .counted_ahead
                .get(&(id, *tid))
                .copied()
                .unwrap_or_default();
            let waited = if now.waiting {
                ahead.insert((id, *tid), counted + interval);
                interval
            } else {
                run_delay.saturating_sub(counted).min(interval - run)
            };
            let (run, waited) = (
                Cpus::from_time(run, interval)?,
                Cpus::from_time(waited, interval)?,
            );
            let wanted = wanted(run, waited);
            rates.run = rates.run + run;
            rates.run_delay = rates.run_delay + waited;
            rates.wanted = rates.wanted + wanted;
            rates.variance += wanted.0 * (1.0 - wanted.0);
        }
        Some(rates)
    }
}

/// What a thread would run if nothing made it wait: of the time that it did not wait, the part that it ran. A thread that rests a
/// while after each piece of work has its rests later when it waits, and not less often.
fn wanted(run: Cpus, waited: Cpus) -> Cpus {
    let rested = (1.0 - run.0 - waited.0 - NO_REST).max(0.0);
    if run > Cpus::ZERO {
        Cpus(run.0 / (run.0 + rested))
    } else {
        waited
    }
}

fn grown(old: ThreadTimes, now: ThreadTimes) -> Option<(Duration, Duration)> {
    Some((
        now.run.checked_sub(old.run)?,
        now.run_delay.checked_sub(old.run_delay)?,
    ))
}

fn pcpu_rates(
    last: &Sample,
    now: &Sample,
    interval: Duration,
    rejected: &mut u64,
) -> Option<Vec<PcpuRates>> {
    let (last, now) = (last.pcpus.as_ref()?, now.pcpus.as_ref()?);
    let share = |time: Duration| Cpus::from_time(time.min(interval), interval);
    let mut rates = Vec::with_capacity(now.len());
    for (pcpu, new) in now {
        // A pCPU that came online in between gets a new baseline.
        let Some(old) = last.get(pcpu) else {
            continue;
        };
        let fell = new.idle < old.idle || new.irq < old.irq || new.steal < old.steal;
        *rejected += u64::from(fell);
        // The kernel lets idle times fall by a few hundredths now and then; such a step is no time at all.
        rates.push(PcpuRates {
            pcpu: *pcpu,
            idle: share(new.idle.saturating_sub(old.idle))?,
            irq: share(new.irq.saturating_sub(old.irq))?,
            steal: share(new.steal.saturating_sub(old.steal))?,
        });
    }
    (!rates.is_empty()).then_some(rates)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::CpuTimes;

    const ID: VmId = VmId {
        pid: 10,
        start_ticks: 1,
    };

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Run and run delay in milliseconds, and whether it waits.
    type Figures = Option<(u64, u64, bool)>;

    fn sample(at: u64, threads: &[(u32, Figures)]) -> Sample {
        let threads = threads.iter().map(|(tid, times)| {
            let times = times.map(|(run, delay, waiting)| ThreadTimes {
                run: ms(run),
                run_delay: ms(delay),
                waiting,
            });
            (*tid, times)
        });
        let times = VmTimes {
            at: ms(at),
            threads: threads.collect(),
        };
        Sample {
            at: ms(at),
            vms: BTreeMap::from([(ID, times)]),
            ..Sample::default()
        }
    }

    fn rates(tick: &Tick) -> (f64, f64) {
        let rates = tick.vms[&ID].unwrap();
        (rates.run.0, rates.run_delay.0)
    }

    fn close(found: (f64, f64), wanted: (f64, f64)) {
        let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert!(
            near(found.0, wanted.0) && near(found.1, wanted.1),
            "{found:?}, not {wanted:?}"
        );
    }

    #[test]
    fn run_and_run_delay_add_up_over_the_threads() {
        let mut rates_of = Rates::default();
        let first = rates_of.update(sample(
            1000,
            &[(1, Some((0, 0, false))), (2, Some((50, 10, false)))],
        ));
        assert_eq!(first.vms[&ID], None, "one sample is no rate");
        let tick = rates_of.update(sample(
            1100,
            &[(1, Some((100, 0, false))), (2, Some((75, 60, false)))],
        ));
        close(rates(&tick), (1.25, 0.5));
        assert_eq!(tick.interval, ms(100));
    }

    #[test]
    fn a_starved_thread_counts_while_it_waits_and_not_again_when_credited() {
        let mut rates_of = Rates::default();
        rates_of.update(sample(0, &[(1, Some((0, 0, false)))]));
        let tick = rates_of.update(sample(100, &[(1, Some((0, 0, true)))]));
        close(rates(&tick), (0.0, 1.0));
        let tick = rates_of.update(sample(200, &[(1, Some((0, 0, true)))]));
        close(rates(&tick), (0.0, 1.0));
        // It ran for the last 60 of these 100 ms; the kernel credits all 240 ms of waiting now.
        let tick = rates_of.update(sample(300, &[(1, Some((60, 240, false)))]));
        close(rates(&tick), (0.6, 0.4));
        assert_eq!(tick.vms[&ID].unwrap().run_delay_time, ms(240));
        let tick = rates_of.update(sample(400, &[(1, Some((160, 240, false)))]));
        close(rates(&tick), (1.0, 0.0));
    }

    #[test]
    fn waiting_is_no_work_for_who_rests_and_all_for_who_does_not() {
        let near = |found: Cpus, wanted: f64| assert!((found.0 - wanted).abs() < 0.01, "{found}");
        near(wanted(Cpus(1.0), Cpus(0.0)), 1.0);
        near(wanted(Cpus(0.1), Cpus(0.88)), 1.0);
        near(wanted(Cpus(0.0), Cpus(1.0)), 1.0);
        near(wanted(Cpus(0.0), Cpus(0.0)), 0.0);
        // It ran and rested for as long; that it waited as long again changes nothing.
        near(wanted(Cpus(0.3), Cpus(0.35)), 0.5);
    }

    #[test]
    fn one_thread_never_wants_more_than_one_cpu() {
        let mut rates_of = Rates::default();
        rates_of.update(sample(0, &[(1, Some((0, 0, false)))]));
        let tick = rates_of.update(sample(100, &[(1, Some((30, 900, false)))]));
        close(rates(&tick), (0.3, 0.7));
    }

    #[test]
    fn a_thread_that_is_not_known_makes_its_vm_unknown() {
        let mut rates_of = Rates::default();
        rates_of.update(sample(0, &[(1, Some((0, 0, false))), (2, None)]));
        let tick = rates_of.update(sample(
            100,
            &[(1, Some((100, 0, false))), (2, Some((1, 1, false)))],
        ));
        assert_eq!(tick.vms[&ID], None);
        let tick = rates_of.update(sample(
            200,
            &[(1, Some((150, 0, false))), (2, Some((51, 1, false)))],
        ));
        close(rates(&tick), (1.0, 0.0));
    }

    #[test]
    fn a_counter_that_falls_is_left_out_and_counted() {
        let mut rates_of = Rates::default();
        rates_of.update(sample(0, &[(1, Some((500, 500, false)))]));
        let tick = rates_of.update(sample(100, &[(1, Some((100, 600, false)))]));
        assert_eq!((tick.vms[&ID], tick.rejected), (None, 1));
        let tick = rates_of.update(sample(200, &[(1, Some((150, 650, false)))]));
        close(rates(&tick), (0.5, 0.5));
    }

    #[test]
    fn samples_far_apart_start_anew() {
        let mut rates_of = Rates::default();
        rates_of.update(sample(0, &[(1, Some((0, 0, false)))]));
        let tick = rates_of.update(sample(60_000, &[(1, Some((100, 0, false)))]));
        assert_eq!((tick.vms[&ID], tick.interval), (None, Duration::ZERO));
    }

    #[test]
    fn each_pcpu_counts_and_a_new_one_gets_a_baseline() {
        let mut rates_of = Rates::default();
        let sample = |at: u64, idle: &[(u32, u64)]| {
            let times = |idle| CpuTimes {
                idle: ms(idle),
                irq: ms(at / 10),
                steal: Duration::ZERO,
            };
            let pcpus = idle
                .iter()
                .map(|(cpu, idle)| (*cpu, times(*idle)))
                .collect();
            Sample {
                at: ms(at),
                pcpus: Some(pcpus),
                ..Sample::default()
            }
        };
        let idle = |tick: &Tick| {
            let pcpus = tick.pcpus.as_ref().unwrap();
            let idle: Vec<(u32, f64)> = pcpus
                .iter()
                .map(|rates| (rates.pcpu, rates.idle.0))
                .collect();
            idle
        };
        rates_of.update(sample(0, &[(0, 0), (7, 0)]));
        let tick = rates_of.update(sample(100, &[(0, 50), (1, 900), (7, 100)]));
        assert_eq!(idle(&tick), [(0, 0.5), (7, 1.0)]);
        let tick = rates_of.update(sample(200, &[(0, 40), (1, 1000), (7, 150)]));
        assert_eq!(idle(&tick), [(0, 0.0), (1, 1.0), (7, 0.5)]);
        assert_eq!(tick.rejected, 1);
        let first = tick.pcpus.unwrap()[0];
        assert!((first.supply().0 - 0.9).abs() < 1e-9 && (first.used().0 - 0.9).abs() < 1e-9);
    }

    /// What old guest and nested kernels do: steal, and now and then idle, is less than it was.
    #[test]
    fn steal_that_falls_is_no_time_and_counted_and_the_next_sample_counts_again() {
        let mut rates_of = Rates::default();
        let sample = |second: u64, steal: u64, idle: u64| {
            let times = CpuTimes {
                idle: ms(idle),
                irq: Duration::ZERO,
                steal: ms(steal),
            };
            Sample {
                at: Duration::from_secs(second),
                pcpus: Some(BTreeMap::from([(0, times)])),
                ..Sample::default()
            }
        };
        let mut shares = Vec::new();
        let mut rejected = 0;
        for (second, steal, idle) in [
            (0, 9_000_000_000, 1000),
            (1, 675_425_670, 1900),
            (2, 279_017_360, 1890),
            // More than the time that passed is all of it.
            (3, 279_517_360, 2890),
            (4, 279_517_360, 3390),
        ] {
            let tick = rates_of.update(sample(second, steal, idle));
            shares.extend(tick.pcpus.map(|pcpus| (pcpus[0].steal.0, pcpus[0].idle.0)));
            rejected += tick.rejected;
        }
        assert_eq!(shares, [(0.0, 0.9), (0.0, 0.0), (1.0, 1.0), (0.0, 0.5)]);
        assert_eq!(rejected, 2);
    }

    #[test]
    fn a_pcpu_that_left_and_came_back_has_a_new_baseline() {
        let mut rates_of = Rates::default();
        let sample = |second: u64, idle: &[(u32, u64)]| {
            let times = |idle| CpuTimes {
                idle: ms(idle),
                ..CpuTimes::default()
            };
            let pcpus = idle.iter().map(|(cpu, idle)| (*cpu, times(*idle)));
            Sample {
                at: Duration::from_secs(second),
                pcpus: Some(pcpus.collect()),
                ..Sample::default()
            }
        };
        rates_of.update(sample(1, &[(0, 0), (1, 9000)]));
        rates_of.update(sample(2, &[(0, 500)]));
        let back = rates_of.update(sample(3, &[(0, 1000), (1, 10)]));
        let seen = |tick: &Tick| {
            tick.pcpus
                .as_ref()
                .unwrap()
                .iter()
                .map(|rates| rates.pcpu)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            (seen(&back), back.rejected),
            (vec![0], 0),
            "nothing to compare it with"
        );
        let next = rates_of.update(sample(4, &[(0, 1500), (1, 260)]));
        assert_eq!(seen(&next), [0, 1]);
        assert_eq!(next.pcpus.unwrap()[1].idle.0, 0.25);
    }
}
