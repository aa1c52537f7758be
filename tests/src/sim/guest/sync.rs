//! Locks, semaphores, barriers and the clock: whatever makes a task wait or go on.

use super::load::{Length, Op, random};
use super::{Doing, KERNEL_SPIN, On, PROGRAM_SPIN};
use crate::sim::clock::Nanos;
use crate::sim::world::{Event, World};

impl World {
    /// Does the next step of a task that runs on `vcpu`.
    pub(super) fn next_step(&mut self, task: usize, vcpu: usize) {
        let place = &mut self.tasks[task];
        let op = place.steps[place.step];
        match op {
            Op::Compute(length) => {
                place.left = length.sample(&mut place.rng);
                place.doing = Doing::Computing;
                place.advance();
            }
            Op::Sleep(length) => {
                place.advance();
                self.sleep(task, length);
            }
            Op::Lock(lock) => self.acquire(task, lock),
            Op::Unlock(lock) => {
                place.locked = false;
                place.advance();
                self.release(self.tasks[task].vm, lock, vcpu);
            }
            Op::Take(semaphore) => {
                place.advance();
                let semaphore = &mut self.vms[place.vm].semaphores[semaphore];
                if semaphore.count > 0 {
                    semaphore.count -= 1;
                } else {
                    semaphore.waiters.push_back(task);
                    place.doing = Doing::Asleep;
                }
            }
            Op::Give(semaphore) => {
                place.advance();
                let vm = place.vm;
                self.give(vm, semaphore, Some(vcpu));
            }
            Op::Meet(barrier) => {
                place.advance();
                self.meet(task, barrier, vcpu);
            }
            Op::Wave { on, off, phase } => self.wave(task, on, off, phase),
        }
    }

    fn sleep(&mut self, task: usize, length: Length) {
        let place = &mut self.tasks[task];
        let until = self.now + length.sample(&mut place.rng);
        place.doing = Doing::Asleep;
        self.schedule(until, Event::Wake(task));
    }

    /// The end of a sleep, or of the part of a square wave that is on.
    pub(in crate::sim) fn alarm(&mut self, task: usize) {
        let place = &mut self.tasks[task];
        match place.doing {
            Doing::Asleep => {
                place.doing = Doing::Ready;
                self.wake_task(task, None);
            }
            Doing::Computing => {
                place.left = 0;
                if let Some(pcpu) = self.host.runs_on(place.vcpu) {
                    self.host.due.insert(pcpu);
                }
            }
            _ => {}
        }
    }

    fn wave(&mut self, task: usize, on: Nanos, off: Nanos, phase: Nanos) {
        let period = on + off;
        let place = (self.now + period - phase % period) % period;
        let edge = self.now
            + if place < on {
                on - place
            } else {
                period - place
            };
        let task_place = &mut self.tasks[task];
        if place < on {
            task_place.doing = Doing::Computing;
            task_place.left = Nanos::MAX / 4;
        } else {
            task_place.doing = Doing::Asleep;
        }
        self.schedule(edge, Event::Wake(task));
    }

    fn acquire(&mut self, task: usize, lock: usize) {
        let place = &mut self.tasks[task];
        let lock_place = &mut self.vms[place.vm].locks[lock];
        if !lock_place.taken {
            lock_place.taken = true;
            place.locked = lock_place.kernel;
            place.advance();
            return;
        }
        place.spin(On::Lock(lock), lock_place.kernel);
        if lock_place.kernel {
            lock_place.waiters.push_back(task);
        } else {
            lock_place.spinners.push(task);
        }
    }

    /// A task that spins on a program's lock tries once more; true when it has it.
    pub(super) fn try_lock(&mut self, task: usize, lock: usize) -> bool {
        let place = &mut self.tasks[task];
        let lock = &mut self.vms[place.vm].locks[lock];
        if lock.taken {
            return false;
        }
        lock.taken = true;
        lock.spinners.retain(|other| *other != task);
        place.advance();
        place.doing = Doing::Ready;
        true
    }

    /// A task has spun long enough: one that waits for a kernel lock halts its vCPU, others sleep.
    pub(super) fn give_up(&mut self, task: usize, on: On) {
        let place = &mut self.tasks[task];
        place.doing = Doing::Asleep;
        if let On::Lock(lock) = on {
            let lock = &mut self.vms[place.vm].locks[lock];
            if lock.kernel {
                place.doing = Doing::Halted;
                return;
            }
            lock.spinners.retain(|other| *other != task);
            lock.waiters.push_back(task);
        }
    }

    /// A program's lock goes to a waiter that spins on a pCPU now, if there is one. Else it is free for whoever comes, and one
    /// that sleeps is woken to try.
    fn release(&mut self, vm: usize, lock: usize, by: usize) {
        if self.vms[vm].locks[lock].kernel {
            self.hand_over(vm, lock, by);
            return;
        }
        let place = &mut self.vms[vm].locks[lock];
        let (tasks, vcpus, host) = (&self.tasks, &self.vcpus, &self.host);
        let next = place.spinners.iter().position(|task| {
            let vcpu = tasks[*task].vcpu;
            vcpus[vcpu].current == Some(*task) && host.runs_on(vcpu).is_some()
        });
        if let Some(next) = next {
            let task = place.spinners.remove(next);
            self.grant(task, false);
            return;
        }
        place.taken = false;
        if let Some(task) = place.waiters.pop_front() {
            place.spinners.push(task);
            self.tasks[task].spin(On::Lock(lock), false);
            self.wake_task(task, Some(by));
        }
    }

    /// A kernel lock goes to who has waited longest, whether its vCPU runs or not.
    fn hand_over(&mut self, vm: usize, lock: usize, by: usize) {
        let place = &mut self.vms[vm].locks[lock];
        let Some(task) = place.waiters.pop_front() else {
            place.taken = false;
            return;
        };
        let halted = self.tasks[task].doing == Doing::Halted;
        self.grant(task, true);
        if halted {
            self.host.wake(self.tasks[task].vcpu, self.now);
            self.vcpus[by].overhead += super::KICK;
        }
    }

    fn grant(&mut self, task: usize, kernel: bool) {
        let place = &mut self.tasks[task];
        place.locked = kernel;
        place.advance();
        place.doing = Doing::Ready;
        if let Some(pcpu) = self.host.runs_on(place.vcpu) {
            self.host.due.insert(pcpu);
        }
    }

    pub(in crate::sim) fn give(&mut self, vm: usize, semaphore: usize, by: Option<usize>) {
        let place = &mut self.vms[vm].semaphores[semaphore];
        match place.waiters.pop_front() {
            Some(task) => {
                self.tasks[task].doing = Doing::Ready;
                self.wake_task(task, by);
            }
            None => place.count += 1,
        }
    }

    fn meet(&mut self, task: usize, barrier: usize, vcpu: usize) {
        let place = &mut self.tasks[task];
        let meeting = &mut self.vms[place.vm].barriers[barrier];
        if meeting.arrived.len() + 1 < meeting.members {
            meeting.arrived.push(task);
            place.doing = Doing::Spinning(On::Barrier);
            place.left = meeting.spin;
            return;
        }
        for other in std::mem::take(&mut meeting.arrived) {
            let place = &mut self.tasks[other];
            let asleep = place.doing == Doing::Asleep;
            place.doing = Doing::Ready;
            if asleep {
                self.wake_task(other, Some(vcpu));
            } else if let Some(pcpu) = self.host.runs_on(place.vcpu) {
                self.host.due.insert(pcpu);
            }
        }
    }

    /// A request comes in; gives the time until the next.
    pub(in crate::sim) fn arrive(&mut self, vm: usize) -> Option<Nanos> {
        let arrivals = self.vms[vm].arrivals.as_mut()?;
        let gap = random(arrivals.mean_gap, &mut arrivals.rng);
        let semaphore = arrivals.semaphore;
        self.give(vm, semaphore, None);
        Some(gap)
    }
}

impl super::Task {
    fn advance(&mut self) {
        self.step = (self.step + 1) % self.steps.len();
    }

    fn spin(&mut self, on: On, kernel: bool) {
        self.doing = Doing::Spinning(on);
        self.left = if kernel { KERNEL_SPIN } else { PROGRAM_SPIN };
    }
}
