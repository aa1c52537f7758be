//! Where a guest's tasks go: waking, idle vCPUs that pull, the set of preferred vCPUs.

use super::{Doing, INTERRUPTIBLE, KICK, KICKED};
use crate::sim::mask::Mask;
use crate::sim::world::World;

impl World {
    /// A task that slept, or is new, goes to a vCPU. `by` is the thread of the vCPU that woke it, if one did.
    pub(in crate::sim) fn wake_task(&mut self, task: usize, by: Option<usize>) {
        let vcpu = self.choose_vcpu(task);
        self.tasks[task].vcpu = vcpu;
        let place = &mut self.vcpus[vcpu];
        if place.current.is_some() && place.turn >= INTERRUPTIBLE {
            place.interrupted = true;
            place.queue.push_front(task);
        } else {
            place.queue.push_back(task);
        }
        self.vms[place.vm].queued += 1;
        let halted = self.stir(vcpu);
        if let (true, Some(by)) = (halted && by != Some(vcpu), by) {
            self.vcpus[by].overhead += KICK;
        }
    }

    /// Makes a vCPU look at its queue; true when it had to be woken for it.
    pub(super) fn stir(&mut self, vcpu: usize) -> bool {
        let place = &mut self.vcpus[vcpu];
        let vm = &mut self.vms[place.vm];
        if place.current.is_some() {
            // One that runs has to share from now on; one that halts on a kernel lock doesn't even notice.
            if let Some(pcpu) = self.host.runs_on(vcpu) {
                self.host.due.insert(pcpu);
            }
            return false;
        }
        vm.idle.remove(vcpu - vm.first);
        if self.host.sleeps(vcpu) {
            place.overhead += KICKED;
            self.host.wake(vcpu, self.now);
            return true;
        }
        if let Some(pcpu) = self.host.runs_on(vcpu) {
            self.host.due.insert(pcpu);
        }
        false
    }

    fn choose_vcpu(&self, task: usize) -> usize {
        let task = &self.tasks[task];
        if task.pinned {
            return task.vcpu;
        }
        let vm = &self.vms[task.vm];
        let last = task.vcpu - vm.first;
        if let Some(idle) = vm.idle.and(vm.preferred).next_from(last) {
            return vm.first + idle;
        }
        if vm.preferred.has(last) {
            return task.vcpu;
        }
        self.shortest(task.vm)
    }

    /// The preferred vCPU with the fewest tasks.
    fn shortest(&self, vm: usize) -> usize {
        let vm = &self.vms[vm];
        let threads = vm.preferred.iter().map(|vcpu| vm.first + vcpu);
        threads
            .min_by_key(|thread| self.tasks_on(*thread))
            .expect("a guest prefers at least one vCPU")
    }

    pub(super) fn tasks_on(&self, vcpu: usize) -> usize {
        let vcpu = &self.vcpus[vcpu];
        vcpu.queue.len() + usize::from(vcpu.current.is_some())
    }

    /// Takes a waiting task from the vCPU with the longest queue.
    pub(super) fn pull_task(&mut self, vcpu: usize) -> Option<usize> {
        let vm = &self.vms[self.vcpus[vcpu].vm];
        if vm.queued == 0 || !vm.preferred.has(vcpu - vm.first) {
            return None;
        }
        let from = (vm.first..vm.first + vm.vcpus)
            .filter(|from| *from != vcpu && self.movable(*from).is_some())
            .max_by_key(|from| self.vcpus[*from].queue.len())?;
        self.take_task(from)
    }

    fn movable(&self, vcpu: usize) -> Option<usize> {
        let queue = &self.vcpus[vcpu].queue;
        queue.iter().position(|task| !self.tasks[*task].pinned)
    }

    fn take_task(&mut self, from: usize) -> Option<usize> {
        let place = self.movable(from)?;
        let task = self.vcpus[from].queue.remove(place)?;
        self.vms[self.vcpus[from].vm].queued -= 1;
        Some(task)
    }

    /// Puts a task that was taken from a queue on another vCPU.
    pub(super) fn send_task(&mut self, task: usize, to: usize) {
        self.tasks[task].vcpu = to;
        self.vcpus[to].queue.push_back(task);
        self.vms[self.vcpus[to].vm].queued += 1;
        self.stir(to);
    }

    /// The tick of a vCPU with waiting tasks: idle vCPUs are given some, crowded ones give to others.
    pub(super) fn spread(&mut self, vcpu: usize) {
        let index = self.vcpus[vcpu].vm;
        let vm = &self.vms[index];
        let to = match vm.idle.and(vm.preferred).next_from(vcpu - vm.first) {
            Some(idle) => vm.first + idle,
            None => self.shortest(index),
        };
        if self.tasks_on(to) + 2 <= self.tasks_on(vcpu)
            && let Some(task) = self.take_task(vcpu)
        {
            self.send_task(task, to);
        }
    }

    /// The guest prefers vCPUs 0 to `usable` - 1 from now on, all of them at most and one at least.
    pub fn set_usable(&mut self, vm: usize, usable: usize) {
        let place = &mut self.vms[vm];
        let (first, vcpus) = (place.first, place.vcpus);
        let preferred = Mask::first(usable.clamp(1, vcpus));
        if preferred == place.preferred {
            return;
        }
        place.preferred = preferred;
        for vcpu in Mask::first(vcpus).without(preferred).iter() {
            while let Some(task) = self.take_task(first + vcpu) {
                let to = self.shortest(vm);
                self.send_task(task, to);
            }
            // What runs there is sent on by the vCPU itself, once it runs.
            if let Some(pcpu) = self.host.runs_on(first + vcpu) {
                self.host.due.insert(pcpu);
            }
        }
        for vcpu in preferred.and(self.vms[vm].idle).iter() {
            if let Some(task) = self.pull_task(first + vcpu) {
                self.send_task(task, first + vcpu);
            }
        }
    }

    /// How many vCPUs a guest prefers.
    #[must_use]
    pub fn usable(&self, vm: usize) -> usize {
        self.vms[vm].preferred.len()
    }

    /// Takes a task off, for good.
    pub(super) fn end_task(&mut self, task: usize) {
        self.tasks[task].doing = Doing::Ended;
        let vcpu = self.tasks[task].vcpu;
        let place = &mut self.vcpus[vcpu];
        let before = place.queue.len();
        place.queue.retain(|other| *other != task);
        self.vms[place.vm].queued -= before - place.queue.len();
        if place.current == Some(task) {
            place.current = None;
            // A vCPU that halted for a lock is idle now; one that runs finds out by itself.
            if self.host.sleeps(vcpu) {
                let vm = &mut self.vms[place.vm];
                vm.idle.insert(vcpu - vm.first);
            } else if let Some(pcpu) = self.host.runs_on(vcpu) {
                self.host.due.insert(pcpu);
            }
        }
    }
}
