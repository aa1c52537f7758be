//! Samples as differences from the sample before, column by column: most counters stand still or move by little, and columns of small
//! numbers pack well. Exact: what is read is what was written.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::model::VmId;
use crate::observe::{CpuTimes, Sample, ThreadTimes, VmTimes};

const UNKNOWN: u8 = 0;
const KNOWN: u8 = 1;
const WAITING: u8 = 2;

/// Whose counters the columns are.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Shape {
    pcpus: Option<Vec<u32>>,
    vms: Vec<(u32, u64, Vec<u32>)>,
}

impl Shape {
    fn of(sample: &Sample) -> Self {
        Self {
            pcpus: sample
                .pcpus
                .as_ref()
                .map(|pcpus| pcpus.keys().copied().collect()),
            vms: sample
                .vms
                .iter()
                .map(|(id, vm)| (id.pid, id.start_ticks, vm.threads.keys().copied().collect()))
                .collect(),
        }
    }

    fn pcpus(&self) -> usize {
        self.pcpus.as_ref().map_or(0, Vec::len)
    }

    fn threads(&self) -> usize {
        self.vms.iter().map(|(_, _, threads)| threads.len()).sum()
    }
}

/// One sample.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Counters {
    shape: Option<Shape>,
    at: i64,
    vm_at: Vec<i64>,
    idle: Vec<i64>,
    irq: Vec<i64>,
    steal: Vec<i64>,
    state: Vec<u8>,
    run: Vec<i64>,
    run_delay: Vec<i64>,
}

/// A column's last values.
#[derive(Debug, Default)]
struct Column(Vec<u64>);

impl Column {
    fn restart(&mut self, length: usize) {
        self.0.clear();
        self.0.resize(length, 0);
    }

    fn take(&mut self, values: impl Iterator<Item = Duration>) -> Vec<i64> {
        let changes = self.0.iter_mut().zip(values).map(|(last, value)| {
            let value = nanoseconds(value);
            value
                .wrapping_sub(std::mem::replace(last, value))
                .cast_signed()
        });
        changes.collect()
    }

    fn give(&mut self, changes: &[i64]) -> Option<&[u64]> {
        if changes.len() != self.0.len() {
            return None;
        }
        for (last, change) in self.0.iter_mut().zip(changes) {
            *last = last.wrapping_add(change.cast_unsigned());
        }
        Some(&self.0)
    }
}

/// Turns samples into differences, or differences into samples.
#[derive(Debug, Default)]
pub(super) struct Differences {
    shape: Shape,
    at: u64,
    idle: Column,
    irq: Column,
    steal: Column,
    run: Column,
    run_delay: Column,
}

impl Differences {
    pub(super) fn take(&mut self, sample: &Sample) -> Counters {
        let shape = Shape::of(sample);
        let changed = shape != self.shape;
        if changed {
            self.restart(shape);
        }
        let at = nanoseconds(sample.at);
        let pcpus = || sample.pcpus.iter().flat_map(BTreeMap::values);
        let threads = || sample.vms.values().flat_map(|vm| vm.threads.values());
        // A thread that is not known keeps no value; the next difference is from zero again.
        let run = |times: &Option<ThreadTimes>| times.map_or(Duration::ZERO, |times| times.run);
        let run_delay =
            |times: &Option<ThreadTimes>| times.map_or(Duration::ZERO, |times| times.run_delay);
        Counters {
            shape: changed.then(|| self.shape.clone()),
            at: at
                .wrapping_sub(std::mem::replace(&mut self.at, at))
                .cast_signed(),
            vm_at: (sample.vms.values())
                .map(|vm| nanoseconds(vm.at).wrapping_sub(at).cast_signed())
                .collect(),
            idle: self.idle.take(pcpus().map(|times| times.idle)),
            irq: self.irq.take(pcpus().map(|times| times.irq)),
            steal: self.steal.take(pcpus().map(|times| times.steal)),
            state: threads()
                .map(|times| match times {
                    None => UNKNOWN,
                    Some(times) if times.waiting => WAITING,
                    Some(_) => KNOWN,
                })
                .collect(),
            run: self.run.take(threads().map(run)),
            run_delay: self.run_delay.take(threads().map(run_delay)),
        }
    }

    /// The sample; `None` for columns that don't fit together.
    pub(super) fn give(&mut self, counters: Counters) -> Option<Sample> {
        if let Some(shape) = counters.shape {
            self.restart(shape);
        }
        self.at = self.at.wrapping_add(counters.at.cast_unsigned());
        let idle = self.idle.give(&counters.idle)?;
        let irq = self.irq.give(&counters.irq)?;
        let steal = self.steal.give(&counters.steal)?;
        let pcpus = self.shape.pcpus.as_ref().map(|pcpus| {
            let times = idle.iter().zip(irq).zip(steal);
            let times = times.map(|((idle, irq), steal)| CpuTimes {
                idle: Duration::from_nanos(*idle),
                irq: Duration::from_nanos(*irq),
                steal: Duration::from_nanos(*steal),
            });
            pcpus.iter().copied().zip(times).collect()
        });
        let run = self.run.give(&counters.run)?;
        let run_delay = self.run_delay.give(&counters.run_delay)?;
        if counters.vm_at.len() != self.shape.vms.len() || counters.state.len() != run.len() {
            return None;
        }
        let mut times = counters.state.iter().zip(run).zip(run_delay);
        let mut vms = BTreeMap::new();
        for ((pid, start_ticks, threads), at) in self.shape.vms.iter().zip(&counters.vm_at) {
            let mut vm = VmTimes {
                at: Duration::from_nanos(self.at.wrapping_add(at.cast_unsigned())),
                threads: BTreeMap::new(),
            };
            for tid in threads {
                let ((state, run), run_delay) = times.next()?;
                let known = ThreadTimes {
                    run: Duration::from_nanos(*run),
                    run_delay: Duration::from_nanos(*run_delay),
                    waiting: *state == WAITING,
                };
                vm.threads
                    .insert(*tid, (*state != UNKNOWN).then_some(known));
            }
            let id = VmId {
                pid: *pid,
                start_ticks: *start_ticks,
            };
            vms.insert(id, vm);
        }
        Some(Sample {
            at: Duration::from_nanos(self.at),
            pcpus,
            vms,
            degraded: Vec::new(),
        })
    }

    fn restart(&mut self, shape: Shape) {
        for column in [&mut self.idle, &mut self.irq, &mut self.steal] {
            column.restart(shape.pcpus());
        }
        for column in [&mut self.run, &mut self.run_delay] {
            column.restart(shape.threads());
        }
        self.shape = shape;
    }
}

/// Counters of more than 584 years stay at that.
fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
