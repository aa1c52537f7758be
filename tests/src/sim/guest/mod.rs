//! The guests' kernels as data: vCPUs, tasks, locks. What they do is in [`run`] and [`wake`]; what tasks are made of, in
//! [`load`].

pub mod load;
mod run;
mod sync;
mod wake;

use super::clock::{MS, Nanos, US};
use super::mask::Mask;
use load::Op;

/// A task runs for so long before another of its vCPU has its turn.
const ROUND: Nanos = 4 * MS;
/// A task that wakes interrupts one that has run for so long.
const INTERRUPTIBLE: Nanos = MS;
/// What it costs a vCPU to change its task, ...
const TASK_SWITCH: Nanos = 2 * US;
/// ... to wake a halted vCPU (an interrupt to it: an exit on both sides), ...
const KICK: Nanos = 3 * US;
const KICKED: Nanos = 3 * US;
/// ... and, for the caches, to be on a pCPU after another thread was.
pub(super) const PCPU_SWITCH: Nanos = 10 * US;
/// A waiter for a kernel lock spins for so long before its vCPU halts (`SPIN_THRESHOLD` of kernel/locking/qspinlock.c: 32768
/// pauses).
const KERNEL_SPIN: Nanos = 500 * US;
/// A waiter for a lock of a program spins for so long before it sleeps.
const PROGRAM_SPIN: Nanos = 50 * US;

/// What a task waits for while it spins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum On {
    Lock(usize),
    Barrier,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doing {
    /// Its next step is due.
    Ready,
    Computing,
    Spinning(On),
    /// It waits for a kernel lock and holds its vCPU, which halts.
    Halted,
    /// It sleeps until somebody wakes it.
    Asleep,
    Ended,
}

/// One task of a guest.
#[derive(Debug, Clone)]
pub(super) struct Task {
    vm: usize,
    /// The thread of its vCPU, or of its last one.
    vcpu: usize,
    pinned: bool,
    steps: Vec<Op>,
    step: usize,
    doing: Doing,
    /// What is left of a computation or of a spin.
    left: Nanos,
    /// It holds a kernel lock, so its vCPU may not turn to another task.
    locked: bool,
    rng: fastrand::Rng,
}

/// One vCPU: what the guest keeps of it. The thread is the host's.
#[derive(Debug, Clone, Default)]
pub(super) struct Vcpu {
    pub(super) vm: usize,
    current: Option<usize>,
    queue: std::collections::VecDeque<usize>,
    /// Run time of the current task in this turn.
    turn: Nanos,
    /// A task that woke goes before the current one.
    interrupted: bool,
    /// Time to lose before the task goes on.
    pub(super) overhead: Nanos,
}

impl Vcpu {
    pub(super) fn new(vm: usize) -> Self {
        Self {
            vm,
            ..Self::default()
        }
    }
}

#[derive(Debug, Clone, Default)]
struct Lock {
    kernel: bool,
    taken: bool,
    spinners: Vec<usize>,
    waiters: std::collections::VecDeque<usize>,
}

#[derive(Debug, Clone, Default)]
struct Semaphore {
    count: u64,
    waiters: std::collections::VecDeque<usize>,
}

#[derive(Debug, Clone, Default)]
struct Barrier {
    members: usize,
    spin: Nanos,
    arrived: Vec<usize>,
}

/// What became of a VM's run time, and of its wishes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Use {
    /// Time in which tasks got on: the useful work.
    pub work: Nanos,
    /// Time spent spinning for locks and barriers.
    pub spun: Nanos,
    /// Time lost to switches and interrupts.
    pub overhead: Nanos,
}

/// One guest.
#[derive(Debug, Clone)]
pub(super) struct Vm {
    /// Thread of vCPU 0; the others follow.
    pub(super) first: usize,
    pub(super) vcpus: usize,
    pub(super) preferred: Mask,
    idle: Mask,
    /// Tasks on queues, not running.
    queued: usize,
    locks: Vec<Lock>,
    semaphores: Vec<Semaphore>,
    barriers: Vec<Barrier>,
    tasks: Vec<usize>,
    pub(super) used: Use,
    arrivals: Option<Arrivals>,
    /// Counts loads; events of an earlier load are void.
    generation: u32,
}

/// Requests that come from outside.
#[derive(Debug, Clone)]
struct Arrivals {
    semaphore: usize,
    mean_gap: Nanos,
    rng: fastrand::Rng,
}

impl Vm {
    pub(super) fn new(first: usize, vcpus: usize) -> Self {
        Self {
            first,
            vcpus,
            preferred: Mask::first(vcpus),
            idle: Mask::first(vcpus),
            queued: 0,
            locks: Vec::new(),
            semaphores: Vec::new(),
            barriers: Vec::new(),
            tasks: Vec::new(),
            used: Use::default(),
            arrivals: None,
            generation: 0,
        }
    }

    /// Tasks that want a vCPU and have none.
    pub(super) fn waiting(&self) -> usize {
        self.queued
    }
}
