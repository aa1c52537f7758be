//! The host and its guests in simulated time: events, and what follows from each.
//!
//! A pCPU has one time at which it must be looked at again; everything else that is to come (sleeps, requests, quota periods,
//! balancing) stands in a heap. Whatever happens marks the pCPUs that it concerns as due, and each of them then accounts the
//! time that has passed, lets its vCPU go on, and decides which thread it runs.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::clock::{MS, Nanos};
use super::guest::{PCPU_SWITCH, Task, Use, Vcpu, Vm};
use super::host::{Host, Times};
use super::mask::Mask;

/// Each pCPU looks for a more loaded one so often.
const BALANCE: Nanos = 16 * MS;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// The alarm of a task.
    Wake(usize),
    /// A request for a VM, of the load with this number.
    Arrival(usize, u32),
    /// A new period of a group with a quota.
    Period(usize),
    /// Time for a pCPU to look at the others' load.
    Balance(usize),
}

/// A host with guests.
#[derive(Debug)]
pub struct World {
    pub(super) now: Nanos,
    pub(super) host: Host,
    pub(super) vms: Vec<Vm>,
    pub(super) vcpus: Vec<Vcpu>,
    pub(super) tasks: Vec<Task>,
    pub(super) rng: fastrand::Rng,
    timers: Vec<Nanos>,
    events: BinaryHeap<Reverse<(Nanos, u64, Event)>>,
    sequence: u64,
    /// pCPU time that was idle while guests had tasks that waited.
    pub(super) idle_wanted: Nanos,
    looked_at: u64,
}

impl World {
    /// An empty host of so many pCPUs, at most 128.
    #[must_use]
    pub fn new(pcpus: usize, seed: u64) -> Self {
        let mut world = Self {
            now: 0,
            host: Host::new(pcpus, !seed),
            vms: Vec::new(),
            vcpus: Vec::new(),
            tasks: Vec::new(),
            rng: fastrand::Rng::with_seed(seed),
            timers: vec![Nanos::MAX; pcpus],
            events: BinaryHeap::new(),
            sequence: 0,
            idle_wanted: 0,
            looked_at: 0,
        };
        for pcpu in 0..pcpus {
            let first = BALANCE * (pcpu as u64 + 1) / pcpus as u64;
            world.schedule(first, Event::Balance(pcpu));
        }
        world
    }

    /// Adds a group below `parent`, 0 for the root. `quota` is time in each period, and the period.
    pub fn add_group(
        &mut self,
        parent: usize,
        weight: f64,
        quota: Option<(Nanos, Nanos)>,
    ) -> usize {
        let group = self.host.add_group(parent, weight, quota);
        if let Some((_, period)) = quota {
            self.schedule(self.now + period, Event::Period(group));
        }
        group
    }

    /// Adds a VM without load whose vCPU threads are in `group` and may run on `allowed`; gives its number.
    pub fn add_vm(&mut self, group: usize, vcpus: usize, allowed: Mask) -> usize {
        let vm = self.vms.len();
        self.vms.push(Vm::new(self.vcpus.len(), vcpus));
        for _ in 0..vcpus {
            self.host.add_thread(group, allowed);
            self.vcpus.push(Vcpu::new(vm));
        }
        vm
    }

    /// Simulates until then.
    pub fn run_until(&mut self, until: Nanos) {
        self.settle_due();
        loop {
            let (pcpu, timer) = self.next_timer();
            let event = self.events.peek().map_or(Nanos::MAX, |next| next.0.0);
            let next = timer.min(event);
            if next > until {
                break;
            }
            self.now = next;
            if event <= timer {
                if let Some(Reverse((_, _, event))) = self.events.pop() {
                    self.handle(event);
                }
            } else {
                self.timers[pcpu] = Nanos::MAX;
                self.host.due.insert(pcpu);
            }
            self.settle_due();
        }
        self.now = until;
        for pcpu in 0..self.timers.len() {
            self.account(pcpu);
        }
    }

    /// How often a pCPU was looked at: the work that the simulation was.
    #[must_use]
    pub fn looked_at(&self) -> u64 {
        self.looked_at
    }

    /// Simulated time.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// The host.
    #[must_use]
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Counters of a vCPU's thread.
    #[must_use]
    pub fn vcpu_times(&self, vm: usize, vcpu: usize) -> Times {
        self.host.times(self.vms[vm].first + vcpu)
    }

    /// The number of a VM's vCPUs.
    #[must_use]
    pub fn vcpus(&self, vm: usize) -> usize {
        self.vms[vm].vcpus
    }

    /// What became of a VM's run time.
    #[must_use]
    pub fn used(&self, vm: usize) -> Use {
        self.vms[vm].used
    }

    /// pCPU time that was idle while guests had tasks that waited.
    #[must_use]
    pub fn idle_wanted(&self) -> Nanos {
        self.idle_wanted
    }

    fn next_timer(&self) -> (usize, Nanos) {
        let least = self.timers.iter().copied().min().unwrap_or(Nanos::MAX);
        let pcpu = self.timers.iter().position(|timer| *timer == least);
        (pcpu.unwrap_or(0), least)
    }

    pub(super) fn schedule(&mut self, at: Nanos, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((at, self.sequence, event)));
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Wake(task) => self.alarm(task),
            Event::Arrival(vm, generation) if self.is_current_load(vm, generation) => {
                if let Some(gap) = self.arrive(vm) {
                    self.schedule(self.now + gap, event);
                }
            }
            Event::Arrival(..) => {}
            Event::Period(group) => {
                let period = self.host.refill(group, self.now);
                self.schedule(self.now + period, event);
            }
            Event::Balance(pcpu) => {
                self.host.balance(pcpu, self.now);
                self.count_wanted();
                self.schedule(self.now + BALANCE, event);
            }
        }
    }

    fn count_wanted(&mut self) {
        let idle = self.host.idle_pcpus();
        if idle > 0 {
            let waiting = self.vms.iter().map(Vm::waiting).sum::<usize>();
            let step = BALANCE / self.timers.len() as u64;
            self.idle_wanted += step * idle.min(waiting) as u64;
        }
    }

    fn account(&mut self, pcpu: usize) {
        if let Some((vcpu, time)) = self.host.charge(pcpu, self.now) {
            self.progress(vcpu, time);
        }
    }

    /// Lets every pCPU that is due decide.
    fn settle_due(&mut self) {
        while let Some(pcpu) = self.host.due.next_from(0) {
            self.host.due.remove(pcpu);
            self.look_at(pcpu);
        }
    }

    fn look_at(&mut self, pcpu: usize) {
        self.looked_at += 1;
        self.account(pcpu);
        loop {
            self.host.preempt(pcpu, self.now);
            let Some(vcpu) = self.host.current(pcpu) else {
                match self.host.pick(pcpu, self.now) {
                    Some(switched) => {
                        if switched && let Some(vcpu) = self.host.current(pcpu) {
                            self.vcpus[vcpu].overhead += PCPU_SWITCH;
                        }
                        continue;
                    }
                    None => {
                        self.timers[pcpu] = Nanos::MAX;
                        return;
                    }
                }
            };
            match self.go_on(vcpu) {
                Some(time) => {
                    let horizon = self.host.horizon(pcpu, self.now);
                    self.timers[pcpu] = horizon.min(self.now + time);
                    return;
                }
                None => self.host.sleep_current(pcpu, self.now),
            }
        }
    }
}
