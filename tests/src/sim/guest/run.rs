//! What a vCPU does while it has a pCPU: its tasks in turn.

use super::load::Load;
use super::{Doing, On, ROUND, TASK_SWITCH, Task};
use crate::sim::clock::Nanos;
use crate::sim::world::{Event, World};

impl World {
    /// Accounts run time of a vCPU to its current task.
    pub(in crate::sim) fn progress(&mut self, vcpu: usize, time: Nanos) {
        let place = &mut self.vcpus[vcpu];
        let used = &mut self.vms[place.vm].used;
        let lost = place.overhead.min(time);
        place.overhead -= lost;
        used.overhead += lost;
        let time = time - lost;
        place.turn += time;
        let Some(task) = place.current else {
            used.overhead += time;
            return;
        };
        let task = &mut self.tasks[task];
        match task.doing {
            Doing::Spinning(_) => used.spun += time,
            _ => used.work += time,
        }
        task.left = task.left.saturating_sub(time);
    }

    /// Lets a vCPU that has a pCPU go on; gives the time until it must be looked at again, or `None` when it halts.
    pub(in crate::sim) fn go_on(&mut self, vcpu: usize) -> Option<Nanos> {
        loop {
            let Some(task) = self.vcpus[vcpu].current else {
                self.next_task(vcpu)?;
                continue;
            };
            if self.must_leave(vcpu, task) {
                self.vcpus[vcpu].current = None;
                self.wake_task(task, Some(vcpu));
                continue;
            }
            let doing = self.tasks[task].doing;
            match doing {
                Doing::Ready => self.next_step(task, vcpu),
                Doing::Computing if self.tasks[task].left == 0 => {
                    self.tasks[task].doing = Doing::Ready;
                }
                Doing::Spinning(On::Lock(lock)) if self.try_lock(task, lock) => {}
                Doing::Spinning(on) if self.tasks[task].left == 0 => self.give_up(task, on),
                Doing::Asleep | Doing::Ended => self.vcpus[vcpu].current = None,
                Doing::Halted => return None,
                Doing::Computing | Doing::Spinning(_) => {
                    if !self.change_turns(vcpu, task) {
                        break;
                    }
                }
            }
        }
        let place = &self.vcpus[vcpu];
        let current = place.current?;
        let task = &self.tasks[current];
        let turn = if place.queue.is_empty() || !self.may_change(current) {
            Nanos::MAX / 4
        } else {
            ROUND.saturating_sub(place.turn)
        };
        Some(place.overhead + task.left.min(turn).max(1))
    }

    fn next_task(&mut self, vcpu: usize) -> Option<()> {
        let index = self.vcpus[vcpu].vm;
        let task = match self.vcpus[vcpu].queue.pop_front() {
            Some(task) => {
                self.vms[index].queued -= 1;
                task
            }
            None => match self.pull_task(vcpu) {
                Some(task) => task,
                None => {
                    let vm = &mut self.vms[index];
                    vm.idle.insert(vcpu - vm.first);
                    self.vcpus[vcpu].turn = 0;
                    return None;
                }
            },
        };
        self.tasks[task].vcpu = vcpu;
        let place = &mut self.vcpus[vcpu];
        place.current = Some(task);
        place.turn = 0;
        place.overhead += TASK_SWITCH;
        Some(())
    }

    fn must_leave(&self, vcpu: usize, task: usize) -> bool {
        let vm = &self.vms[self.vcpus[vcpu].vm];
        !vm.preferred.has(vcpu - vm.first) && self.may_change(task) && !self.tasks[task].pinned
    }

    /// A task that holds a kernel lock or spins for one can't be interrupted.
    fn may_change(&self, task: usize) -> bool {
        let task = &self.tasks[task];
        match task.doing {
            Doing::Computing | Doing::Ready | Doing::Spinning(On::Barrier) => !task.locked,
            Doing::Spinning(On::Lock(lock)) => !self.vms[task.vm].locks[lock].kernel,
            Doing::Halted | Doing::Asleep | Doing::Ended => false,
        }
    }

    /// The turn of a task ends: after its time, or when one that woke goes before it. True when another task is current.
    fn change_turns(&mut self, vcpu: usize, task: usize) -> bool {
        let place = &self.vcpus[vcpu];
        if place.queue.is_empty() || !self.may_change(task) {
            return false;
        }
        let interrupted = place.interrupted;
        if place.turn < ROUND && !interrupted {
            return false;
        }
        if !interrupted {
            self.vcpus[vcpu].turn = 0;
            self.spread(vcpu);
        }
        let place = &mut self.vcpus[vcpu];
        place.interrupted = false;
        let Some(next) = place.queue.pop_front() else {
            return false;
        };
        place.queue.push_back(task);
        place.current = Some(next);
        place.turn = 0;
        place.overhead += TASK_SWITCH;
        true
    }

    /// Replaces what runs in a guest.
    pub fn set_load(&mut self, vm: usize, load: &Load) {
        for task in std::mem::take(&mut self.vms[vm].tasks) {
            self.end_task(task);
        }
        let mut rng = self.rng.fork();
        let built = load.build(&mut rng);
        let place = &mut self.vms[vm];
        place.locks = built.locks;
        place.semaphores = built.semaphores;
        place.barriers = built.barriers;
        place.arrivals = built.arrivals;
        place.generation += 1;
        let generation = place.generation;
        let (first, vcpus) = (place.first, place.vcpus);
        for (index, steps) in built.tasks.into_iter().enumerate() {
            let task = self.tasks.len();
            self.tasks.push(Task {
                vm,
                vcpu: first + index % vcpus,
                pinned: built.pinned,
                steps,
                step: 0,
                doing: Doing::Ready,
                left: 0,
                locked: false,
                rng: rng.fork(),
            });
            self.vms[vm].tasks.push(task);
            self.wake_task(task, None);
        }
        if self.vms[vm].arrivals.is_some() {
            self.schedule(self.now, Event::Arrival(vm, generation));
        }
    }

    /// Is this the load that an event was made for?
    pub(in crate::sim) fn is_current_load(&self, vm: usize, generation: u32) -> bool {
        self.vms[vm].generation == generation
    }
}
