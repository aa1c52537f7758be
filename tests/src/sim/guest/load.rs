//! What runs in a guest. Every load is a set of tasks that go round a list of steps.

use serde::{Deserialize, Serialize};

use super::{Arrivals, Barrier, Lock, Semaphore};
use crate::sim::clock::{MS, Nanos, US, nanos};

/// A load of one guest, as scenario files name it. Times are those of an undisturbed pCPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Load {
    /// A timer now and then.
    Idle {},
    /// Threads that compute without end, each for itself (sysbench).
    Cpu {
        /// How many.
        threads: usize,
        /// Each bound to a vCPU of its own.
        #[serde(default)]
        pinned: bool,
    },
    /// Threads that compute for some time and then sleep, whoever waits.
    Duty {
        /// How many.
        threads: usize,
        /// Computing, in milliseconds of run time.
        run_ms: f64,
        /// Asleep, in milliseconds.
        sleep_ms: f64,
    },
    /// All threads compute for some time, and then none: a square wave by the clock.
    Burst {
        /// How many.
        threads: usize,
        /// Milliseconds on.
        on_ms: f64,
        /// Milliseconds off.
        off_ms: f64,
        /// When it is on first, in milliseconds.
        #[serde(default)]
        phase_ms: f64,
    },
    /// Senders and receivers in pairs, with a kernel lock for each group of pairs (hackbench).
    Hackbench {
        /// Groups.
        groups: usize,
        /// Pairs in each.
        #[serde(default = "four")]
        pairs: usize,
        /// Work of each side for one message, outside the lock, in microseconds.
        #[serde(default = "message_us")]
        work_us: f64,
        /// Work of each side under the lock, in microseconds.
        #[serde(default = "message_lock_us")]
        lock_us: f64,
    },
    /// Threads that meet after each piece of work (OpenMP).
    Barrier {
        /// How many.
        threads: usize,
        /// A piece of work, in microseconds.
        work_us: f64,
        /// How uneven the pieces are, as a part of them.
        #[serde(default)]
        uneven: f64,
        /// Who waits spins for so long before sleeping, in microseconds.
        spin_us: f64,
    },
    /// Clients, each with a server task: think, work, a database lock (pgbench).
    Clients {
        /// How many.
        clients: usize,
        /// Mean time to think, in microseconds.
        think_us: f64,
        /// Mean work of a request outside the lock, in microseconds.
        work_us: f64,
        /// Work under the lock, in microseconds.
        lock_us: f64,
    },
    /// Requests that come at random from outside, whoever waits (schbench).
    Requests {
        /// Workers.
        workers: usize,
        /// Mean requests in a second.
        per_second: f64,
        /// Mean work of one, in microseconds.
        work_us: f64,
    },
}

fn four() -> usize {
    4
}

fn message_us() -> f64 {
    240.0
}

fn message_lock_us() -> f64 {
    60.0
}

/// How long a computation takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Length {
    Fixed(Nanos),
    /// Evenly between the two.
    Between(Nanos, Nanos),
    /// Exponential, with this mean.
    Random(Nanos),
}

impl Length {
    pub(super) fn sample(self, rng: &mut fastrand::Rng) -> Nanos {
        match self {
            Self::Fixed(length) => length,
            Self::Between(least, most) => rng.u64(least..=most),
            Self::Random(mean) => random(mean, rng),
        }
    }
}

/// Exponentially distributed; at most twenty times the mean.
pub(super) fn random(mean: Nanos, rng: &mut fastrand::Rng) -> Nanos {
    let part = -(1.0 - rng.f64()).ln();
    nanos(part.min(20.0) * mean as f64 / 1e9).max(1)
}

/// One step of a task.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Op {
    Compute(Length),
    Sleep(Length),
    Lock(usize),
    Unlock(usize),
    /// Takes one from a semaphore, or waits for one.
    Take(usize),
    Give(usize),
    Meet(usize),
    /// Computes while the square wave is on, and sleeps while it is off.
    Wave {
        on: Nanos,
        off: Nanos,
        phase: Nanos,
    },
}

/// A load made ready to run.
#[derive(Debug, Default)]
pub(super) struct Built {
    pub(super) tasks: Vec<Vec<Op>>,
    pub(super) pinned: bool,
    pub(super) locks: Vec<Lock>,
    pub(super) semaphores: Vec<Semaphore>,
    pub(super) barriers: Vec<Barrier>,
    pub(super) arrivals: Option<Arrivals>,
}

fn us(count: f64) -> Nanos {
    nanos(count / 1e6)
}

fn ms(count: f64) -> Nanos {
    nanos(count / 1e3)
}

/// Around the mean, so that tasks don't march in step.
fn around(mean: Nanos) -> Length {
    Length::Between(mean / 2, mean + mean / 2)
}

impl Load {
    pub(super) fn build(&self, rng: &mut fastrand::Rng) -> Built {
        let mut built = Built::default();
        match *self {
            Self::Idle {} => built.tasks.push(vec![
                Op::Compute(Length::Fixed(50 * US)),
                Op::Sleep(Length::Random(20 * MS)),
            ]),
            Self::Cpu { threads, pinned } => {
                let steps = vec![Op::Compute(Length::Fixed(Nanos::MAX / 4))];
                built.tasks = vec![steps; threads];
                built.pinned = pinned;
            }
            Self::Duty {
                threads,
                run_ms,
                sleep_ms,
            } => {
                let steps = vec![
                    Op::Compute(Length::Fixed(ms(run_ms))),
                    Op::Sleep(Length::Fixed(ms(sleep_ms))),
                ];
                built.tasks = vec![steps; threads];
            }
            Self::Burst {
                threads,
                on_ms,
                off_ms,
                phase_ms,
            } => {
                let steps = vec![Op::Wave {
                    on: ms(on_ms),
                    off: ms(off_ms),
                    phase: ms(phase_ms),
                }];
                built.tasks = vec![steps; threads];
            }
            Self::Hackbench {
                groups,
                pairs,
                work_us,
                lock_us,
            } => hackbench(&mut built, groups, pairs, us(work_us), us(lock_us)),
            Self::Barrier {
                threads,
                work_us,
                uneven,
                spin_us,
            } => {
                let (least, most) = (us(work_us * (1.0 - uneven)), us(work_us * (1.0 + uneven)));
                built.barriers.push(Barrier {
                    members: threads,
                    spin: us(spin_us),
                    arrived: Vec::new(),
                });
                let steps = vec![Op::Compute(Length::Between(least, most)), Op::Meet(0)];
                built.tasks = vec![steps; threads];
            }
            Self::Clients {
                clients,
                think_us,
                work_us,
                lock_us,
            } => {
                built.locks.push(Lock::default());
                let mut steps = vec![Op::Compute(Length::Random(us(work_us)))];
                if lock_us > 0.0 {
                    let locked = Op::Compute(around(us(lock_us)));
                    steps.extend([Op::Lock(0), locked, Op::Unlock(0)]);
                }
                if think_us > 0.0 {
                    steps.push(Op::Sleep(Length::Random(us(think_us))));
                }
                built.tasks = vec![steps; clients];
            }
            Self::Requests {
                workers,
                per_second,
                work_us,
            } => {
                built.semaphores.push(Semaphore::default());
                built.arrivals = Some(Arrivals {
                    semaphore: 0,
                    mean_gap: nanos(1.0 / per_second),
                    rng: rng.fork(),
                });
                let steps = vec![Op::Take(0), Op::Compute(Length::Random(us(work_us)))];
                built.tasks = vec![steps; workers];
            }
        }
        built
    }
}

/// Each pair has a pipe of ten messages; the lock is what all ends of a group share in the kernel.
fn hackbench(built: &mut Built, groups: usize, pairs: usize, work: Nanos, locked: Nanos) {
    for group in 0..groups {
        built.locks.push(Lock {
            kernel: true,
            ..Lock::default()
        });
        for _ in 0..pairs {
            let (space, messages) = (built.semaphores.len(), built.semaphores.len() + 1);
            built.semaphores.push(Semaphore {
                count: 10,
                ..Semaphore::default()
            });
            built.semaphores.push(Semaphore::default());
            for (take, give) in [(space, messages), (messages, space)] {
                built.tasks.push(vec![
                    Op::Take(take),
                    Op::Compute(around(work)),
                    Op::Lock(group),
                    Op::Compute(around(locked)),
                    Op::Unlock(group),
                    Op::Give(give),
                ]);
            }
        }
    }
}
