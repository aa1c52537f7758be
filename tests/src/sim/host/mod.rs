//! The host's scheduler: threads on pCPUs. It knows nothing of guests; whoever drives it tells which threads want to run.
//!
//! After the kernel's: a queue for each pCPU, the thread that ran least for its weight goes first, in slices; a thread that
//! wakes goes to an idle pCPU if there is one; a pCPU that runs out of threads pulls one; loads are balanced now and then, with
//! some patience for small differences. Run delay is credited when a thread gets its pCPU.

mod group;

use self::group::Groups;
use super::clock::{MS, Nanos, US};
use super::mask::Mask;

/// A thread runs for so long before another may have its turn: 3 ms, seen at a timer tick of which nobody knows the phase. Were
/// all slices the same, the vCPUs of a guest would run in step, as no real ones do.
const SLICE: std::ops::Range<Nanos> = 2_500 * US..4 * MS;
/// A thread that wakes may be ahead of the others by so much of its own run time ...
const WAKE_CREDIT: f64 = 1.5 * MS as f64;
/// ... or behind by so much, and it must be ahead by so much to interrupt who runs.
const WAKE_DEBT: f64 = 6.0 * MS as f64;
const WAKE_GRAIN: f64 = MS as f64;
/// Loads that differ by less than this factor are even.
const UNEVEN: f64 = 1.17;
/// Each vain try doubles the weight of a thread that may be moved for the same surplus, up to this many times
/// (`nr_balance_failed` in `detach_tasks`): so no thread stays on a crowded pCPU for long, though moving it evens out nothing.
const VAIN_TRIES: i32 = 3;
/// A quota that is nearly used up is looked at no more often than this.
const QUOTA_GRAIN: Nanos = 50 * US;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Sleeping,
    Queued,
    Running,
    Throttled,
}

/// One thread of the host.
#[derive(Debug, Clone)]
struct Thread {
    group: usize,
    allowed: Mask,
    state: State,
    pcpu: usize,
    /// Run time over weight, comparable among the threads of one pCPU.
    virtual_time: f64,
    waits_since: Nanos,
    run: Nanos,
    run_delay: Nanos,
}

/// One pCPU.
#[derive(Debug, Clone)]
struct Pcpu {
    number: usize,
    current: Option<usize>,
    queue: Vec<usize>,
    /// The least virtual time of its threads, from which one that comes starts; never falls.
    base: f64,
    charged_at: Nanos,
    slice_end: Nanos,
    interrupted: bool,
    idle: Nanos,
    last: Option<usize>,
    vain_tries: i32,
}

/// What the kernel tells of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// On pCPUs.
    pub run: Nanos,
    /// Waiting for one, as far as it is credited.
    pub run_delay: Nanos,
    /// Runnable now, running or not.
    pub runnable: bool,
}

/// Threads, pCPUs, groups.
#[derive(Debug)]
pub struct Host {
    groups: Groups,
    threads: Vec<Thread>,
    pcpus: Vec<Pcpu>,
    idle: Mask,
    queued: usize,
    rng: fastrand::Rng,
    /// pCPUs that must decide anew.
    pub(super) due: Mask,
}

impl Host {
    /// A host of so many pCPUs, all idle; at most 128.
    #[must_use]
    pub fn new(pcpus: usize, seed: u64) -> Self {
        let pcpu = |number| Pcpu {
            number,
            current: None,
            queue: Vec::new(),
            base: 0.0,
            charged_at: 0,
            slice_end: 0,
            interrupted: false,
            idle: 0,
            last: None,
            vain_tries: 0,
        };
        Self {
            groups: Groups::new(),
            threads: Vec::new(),
            pcpus: (0..pcpus).map(pcpu).collect(),
            idle: Mask::first(pcpus),
            queued: 0,
            rng: fastrand::Rng::with_seed(seed),
            due: Mask::default(),
        }
    }

    /// Adds a group below `parent`; 0 is the root. `quota` is time in each period, and the period.
    pub fn add_group(
        &mut self,
        parent: usize,
        weight: f64,
        quota: Option<(Nanos, Nanos)>,
    ) -> usize {
        self.groups.add(parent, weight, quota)
    }

    /// Adds a sleeping thread.
    pub fn add_thread(&mut self, group: usize, allowed: Mask) -> usize {
        let index = self.threads.len();
        self.threads.push(Thread {
            group,
            allowed,
            state: State::Sleeping,
            pcpu: allowed.next_from(index % self.pcpus.len()).unwrap_or(0),
            virtual_time: 0.0,
            waits_since: 0,
            run: 0,
            run_delay: 0,
        });
        index
    }

    /// The number of pCPUs.
    #[must_use]
    pub fn pcpus(&self) -> usize {
        self.pcpus.len()
    }

    /// How long a pCPU has been idle in all, as of when it was charged last.
    #[must_use]
    pub fn idle_time(&self, pcpu: usize) -> Nanos {
        self.pcpus[pcpu].idle
    }

    /// pCPUs without a thread.
    #[must_use]
    pub fn idle_pcpus(&self) -> usize {
        self.idle.len()
    }

    /// Run time of the threads of a group.
    #[must_use]
    pub fn usage(&self, group: usize) -> Nanos {
        self.groups.all[group].usage
    }

    /// Counters of a thread, as of when its pCPU was charged last.
    #[must_use]
    pub fn times(&self, thread: usize) -> Times {
        let thread = &self.threads[thread];
        Times {
            run: thread.run,
            run_delay: thread.run_delay,
            runnable: thread.state != State::Sleeping,
        }
    }

    /// The pCPU that runs the thread.
    pub(super) fn runs_on(&self, thread: usize) -> Option<usize> {
        let thread = &self.threads[thread];
        (thread.state == State::Running).then_some(thread.pcpu)
    }

    pub(super) fn sleeps(&self, thread: usize) -> bool {
        self.threads[thread].state == State::Sleeping
    }

    pub(super) fn current(&self, pcpu: usize) -> Option<usize> {
        self.pcpus[pcpu].current
    }

    /// Accounts the time since the last call; gives the running thread and its time.
    pub(super) fn charge(&mut self, pcpu: usize, now: Nanos) -> Option<(usize, Nanos)> {
        let place = &mut self.pcpus[pcpu];
        let time = now - place.charged_at;
        place.charged_at = now;
        let Some(current) = place.current else {
            place.idle += time;
            return None;
        };
        if time > 0 {
            let thread = &mut self.threads[current];
            thread.run += time;
            thread.virtual_time += time as f64 / self.groups.all[thread.group].thread_weight;
            let (group, running) = (thread.group, thread.virtual_time);
            let first = self
                .first(pcpu)
                .map_or(running, |(_, first)| first.min(running));
            let place = &mut self.pcpus[pcpu];
            place.base = place.base.max(first);
            if self.groups.charge(group, time) {
                self.interrupt_throttled();
            }
        }
        Some((current, time))
    }

    fn interrupt_throttled(&mut self) {
        for pcpu in 0..self.pcpus.len() {
            let Some(current) = self.pcpus[pcpu].current else {
                continue;
            };
            if self
                .groups
                .throttling(self.threads[current].group)
                .is_some()
            {
                self.due.insert(pcpu);
            }
        }
    }

    /// A sleeping thread wants to run.
    pub(super) fn wake(&mut self, thread: usize, now: Nanos) {
        debug_assert!(self.sleeps(thread), "only sleeping threads wake");
        self.groups
            .set_runnable(self.threads[thread].group, true, now);
        self.threads[thread].waits_since = now;
        self.enqueue(thread, now);
    }

    /// Puts a runnable thread on a queue, or where throttled threads wait.
    fn enqueue(&mut self, thread: usize, now: Nanos) {
        if let Some(limit) = self.groups.throttling(self.threads[thread].group) {
            self.park(thread, limit);
            return;
        }
        let from = self.threads[thread].pcpu;
        let pcpu = self.choose(thread);
        let weight = self.weight(thread);
        let lag = (self.threads[thread].virtual_time - self.pcpus[from].base)
            .clamp(-WAKE_CREDIT / weight, WAKE_DEBT / weight);
        let virtual_time = self.pcpus[pcpu].base + lag;
        self.put(thread, pcpu, virtual_time);
        let place = &self.pcpus[pcpu];
        match place.current {
            None => self.due.insert(pcpu),
            Some(current) => {
                let running = &self.threads[current];
                let ran = (now - place.charged_at) as f64 / self.weight(current);
                let interrupts = virtual_time + WAKE_GRAIN / weight < running.virtual_time + ran;
                self.pcpus[pcpu].interrupted |= interrupts;
                // Even if it doesn't interrupt, the running thread's slice has an end from now on.
                self.due.insert(pcpu);
            }
        }
    }

    fn choose(&self, thread: usize) -> usize {
        let Thread { allowed, pcpu, .. } = self.threads[thread];
        // A pCPU that is idle and has a thread on its queue is taken.
        let mut idle = self.idle.and(allowed);
        while let Some(free) = idle.next_from(pcpu) {
            if self.pcpus[free].queue.is_empty() {
                return free;
            }
            idle.remove(free);
        }
        if allowed.has(pcpu) {
            return pcpu;
        }
        let shortest = allowed
            .iter()
            .filter(|cpu| *cpu < self.pcpus.len())
            .min_by_key(|cpu| self.pcpus[*cpu].queue.len());
        shortest.expect("a thread may run on some pCPU")
    }

    fn put(&mut self, thread: usize, pcpu: usize, virtual_time: f64) {
        let place = &mut self.threads[thread];
        place.state = State::Queued;
        place.pcpu = pcpu;
        place.virtual_time = virtual_time;
        self.pcpus[pcpu].queue.push(thread);
        self.queued += 1;
    }

    fn park(&mut self, thread: usize, limit: usize) {
        self.threads[thread].state = State::Throttled;
        if let Some(quota) = &mut self.groups.all[limit].quota {
            quota.waiting.push(thread);
        }
    }

    fn weight(&self, thread: usize) -> f64 {
        self.groups.all[self.threads[thread].group].thread_weight
    }

    /// Starts the next period of a group with a quota; gives the time until the one after it.
    pub(super) fn refill(&mut self, group: usize, now: Nanos) -> Nanos {
        for thread in self.groups.refill(group) {
            self.enqueue(thread, now);
        }
        self.groups.all[group]
            .quota
            .as_ref()
            .map_or(Nanos::MAX, |quota| quota.period)
    }

    /// The running thread sleeps from now on.
    pub(super) fn sleep_current(&mut self, pcpu: usize, now: Nanos) {
        let Some(thread) = self.stop(pcpu) else {
            return;
        };
        self.threads[thread].state = State::Sleeping;
        self.groups
            .set_runnable(self.threads[thread].group, false, now);
    }

    fn stop(&mut self, pcpu: usize) -> Option<usize> {
        let thread = self.pcpus[pcpu].current.take()?;
        self.groups.count_running(self.threads[thread].group, false);
        self.idle.insert(pcpu);
        Some(thread)
    }

    /// Puts the running thread back where its time is up: its quota is used, or another has the better claim.
    pub(super) fn preempt(&mut self, pcpu: usize, now: Nanos) {
        let Some(thread) = self.pcpus[pcpu].current else {
            return;
        };
        if let Some(limit) = self.groups.throttling(self.threads[thread].group) {
            self.stop(pcpu);
            self.threads[thread].waits_since = now;
            self.park(thread, limit);
            return;
        }
        let place = &mut self.pcpus[pcpu];
        let ends = now >= place.slice_end || place.interrupted;
        place.interrupted = false;
        if !ends || place.queue.is_empty() {
            return;
        }
        let virtual_time = self.threads[thread].virtual_time;
        let other = self.first(pcpu);
        if other.is_some_and(|(_, other)| other < virtual_time) {
            self.stop(pcpu);
            self.threads[thread].waits_since = now;
            self.put(thread, pcpu, virtual_time);
        } else {
            self.pcpus[pcpu].slice_end = now + self.rng.u64(SLICE);
        }
    }

    /// Place in the queue and virtual time of the thread whose turn it is.
    fn first(&self, pcpu: usize) -> Option<(usize, f64)> {
        let queue = self.pcpus[pcpu].queue.iter().enumerate();
        queue
            .map(|(place, thread)| (place, self.threads[*thread].virtual_time))
            .min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Gives an idle pCPU its next thread. True when another thread ran on it before.
    pub(super) fn pick(&mut self, pcpu: usize, now: Nanos) -> Option<bool> {
        loop {
            if self.pcpus[pcpu].queue.is_empty() && !self.pull(pcpu) {
                return None;
            }
            let (place, virtual_time) = self.first(pcpu)?;
            let thread = self.pcpus[pcpu].queue.swap_remove(place);
            self.queued -= 1;
            if let Some(limit) = self.groups.throttling(self.threads[thread].group) {
                self.park(thread, limit);
                continue;
            }
            let slice = self.rng.u64(SLICE);
            let place = &mut self.pcpus[pcpu];
            place.current = Some(thread);
            place.base = place.base.max(virtual_time);
            place.slice_end = now + slice;
            place.interrupted = false;
            let switched = place.last.replace(thread) != Some(thread);
            self.idle.remove(pcpu);
            let running = &mut self.threads[thread];
            running.state = State::Running;
            running.run_delay += now - running.waits_since;
            self.groups.count_running(running.group, true);
            return Some(switched);
        }
    }

    /// When the running thread must stop at the latest.
    pub(super) fn horizon(&self, pcpu: usize, now: Nanos) -> Nanos {
        let place = &self.pcpus[pcpu];
        let Some(current) = place.current else {
            return Nanos::MAX;
        };
        let slice = if place.queue.is_empty() {
            Nanos::MAX
        } else {
            place.slice_end
        };
        let quota = self.groups.may_run(self.threads[current].group);
        slice.min(quota.map_or(Nanos::MAX, |left| now + left.max(QUOTA_GRAIN)))
    }

    /// Moves a queued thread from the longest queue to an idle pCPU.
    fn pull(&mut self, pcpu: usize) -> bool {
        if self.queued == 0 {
            return false;
        }
        let Some((from, _)) = self.fullest(pcpu, |place| place.queue.len() as f64) else {
            return false;
        };
        let queue = &self.pcpus[from].queue;
        let place = (0..queue.len())
            .filter(|place| self.may_move(queue[*place], pcpu))
            .min_by(|a, b| {
                let time = |place: usize| self.threads[queue[place]].virtual_time;
                time(*a).total_cmp(&time(*b))
            });
        if let Some(place) = place {
            self.migrate(from, place, pcpu);
        }
        place.is_some()
    }

    /// The pCPU with the most of something that has a thread to give to `to`, and how much that is. Of equals any: always the
    /// first one would favour its threads.
    fn fullest(&mut self, to: usize, much: impl Fn(&Pcpu) -> f64) -> Option<(usize, f64)> {
        let start = self.rng.usize(..self.pcpus.len());
        let mut best: Option<(usize, f64)> = None;
        for from in (start..self.pcpus.len()).chain(0..start) {
            let place = &self.pcpus[from];
            if from == to || place.queue.is_empty() {
                continue;
            }
            let found = much(place);
            if found > best.map_or(0.0, |(_, most)| most)
                && place.queue.iter().any(|thread| self.may_move(*thread, to))
            {
                best = Some((from, found));
            }
        }
        best
    }

    fn may_move(&self, thread: usize, to: usize) -> bool {
        let thread = &self.threads[thread];
        thread.allowed.has(to) && self.groups.throttling(thread.group).is_none()
    }

    fn migrate(&mut self, from: usize, place: usize, to: usize) {
        let thread = self.pcpus[from].queue.swap_remove(place);
        self.queued -= 1;
        let lag = self.threads[thread].virtual_time - self.pcpus[from].base;
        let virtual_time = self.pcpus[to].base + lag;
        self.put(thread, to, virtual_time);
        self.due.insert(to);
    }

    /// Evens out loads for one pCPU: pulls a thread from the most loaded one where that helps.
    pub(super) fn balance(&mut self, to: usize, now: Nanos) {
        if to == 0 {
            self.groups.weigh(now);
        }
        // Real loads tremble; exact ones that differ by a hair would favour the same thread for ever.
        let loads: Vec<f64> = (0..self.pcpus.len())
            .map(|pcpu| self.load(pcpu) * (0.97 + 0.06 * self.rng.f64()))
            .collect();
        let here = loads[to];
        let best = self.fullest(to, |place| loads[place.number]);
        let Some((from, most)) = best.filter(|(_, most)| *most > UNEVEN * here) else {
            self.pcpus[to].vain_tries = 0;
            return;
        };
        let surplus = most - here;
        let most_weight = 0.525 * surplus * f64::from(1 << self.pcpus[to].vain_tries);
        let queue = &self.pcpus[from].queue;
        let off_half = |place: usize| (self.weight(queue[place]) - surplus / 2.0).abs();
        let place = (0..queue.len())
            .filter(|place| self.may_move(queue[*place], to))
            .filter(|place| self.weight(queue[*place]) <= most_weight)
            .min_by(|a, b| off_half(*a).total_cmp(&off_half(*b)));
        match place {
            Some(place) => {
                self.pcpus[to].vain_tries = 0;
                self.migrate(from, place, to);
            }
            None => {
                let tries = &mut self.pcpus[to].vain_tries;
                *tries = (*tries + 1).min(VAIN_TRIES);
            }
        }
    }

    fn load(&self, pcpu: usize) -> f64 {
        let place = &self.pcpus[pcpu];
        let threads = place.queue.iter().chain(&place.current);
        threads.map(|thread| self.weight(*thread)).sum()
    }
}
