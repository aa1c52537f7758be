//! What can be seen of a simulated host from its own kernel, and of a guest from the guest's. Whoever decides sees this and
//! nothing else.

use super::clock::Nanos;
use super::host::Times;
use super::mask::Mask;
use super::scenario::Plan;
use super::world::World;

/// All counters at one moment.
#[derive(Debug, Clone, Default)]
pub struct Sight {
    /// Simulated time.
    pub at: Nanos,
    /// From the host's kernel.
    pub host: HostSight,
    /// From each guest's kernel, in the order of the VMs.
    pub guests: Vec<GuestSight>,
}

/// What the host's kernel and its cgroup files tell, and the agents.
#[derive(Debug, Clone, Default)]
pub struct HostSight {
    /// Idle time of each pCPU.
    pub idle: Vec<Nanos>,
    /// The tree of groups; a parent stands before its children, the root is first.
    pub groups: Vec<GroupSight>,
    /// The VMs.
    pub vms: Vec<VmSight>,
}

/// One CPU group.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GroupSight {
    /// The group it is in; `None` for the root.
    pub parent: Option<usize>,
    /// `cpu.weight`.
    pub weight: u32,
    /// `cpu.max`, in CPUs.
    pub quota: Option<f64>,
    /// `cpu.stat`: run time of its own threads.
    pub usage: Nanos,
}

/// One VM, from the host.
#[derive(Debug, Clone, Default)]
pub struct VmSight {
    /// Counters of each vCPU thread.
    pub vcpus: Vec<Times>,
    /// Where they may run.
    pub allowed: Mask,
    /// Their group.
    pub group: usize,
    /// The configured weight of the VM.
    pub weight: u32,
    /// Has it an agent?
    pub agent: bool,
    /// vCPUs in use, by the agent's word.
    pub in_use: usize,
}

/// What a guest knows of itself.
#[derive(Debug, Clone, Default)]
pub struct GuestSight {
    /// Steal time of each vCPU, as the host credited it.
    pub steal: Vec<Nanos>,
    /// vCPUs in use.
    pub in_use: usize,
}

/// Looks at a world, tick by tick, with some noise on what the host measures.
#[derive(Debug)]
pub(super) struct Observer {
    noise: f64,
    rng: fastrand::Rng,
    last: Vec<Nanos>,
    noisy: Vec<Nanos>,
}

impl Observer {
    pub(super) fn new(noise: f64, seed: u64) -> Self {
        Self {
            noise,
            rng: fastrand::Rng::with_seed(seed ^ 0x5eed),
            last: Vec::new(),
            noisy: Vec::new(),
        }
    }

    pub(super) fn look(&mut self, world: &World, plan: &Plan) -> Sight {
        let mut place = 0;
        let mut host = HostSight::default();
        for pcpu in 0..world.host().pcpus() {
            host.idle
                .push(self.blur(&mut place, world.host().idle_time(pcpu)));
        }
        for group in &plan.groups {
            host.groups.push(GroupSight {
                parent: group.parent,
                weight: group.weight,
                quota: group.quota,
                usage: self.blur(&mut place, world.host().usage(group.index)),
            });
        }
        let mut guests = Vec::new();
        for vm in &plan.vms {
            let exact: Vec<Times> = (0..vm.vcpus)
                .map(|vcpu| world.vcpu_times(vm.index, vcpu))
                .collect();
            guests.push(GuestSight {
                steal: exact.iter().map(|times| times.run_delay).collect(),
                in_use: world.usable(vm.index),
            });
            let vcpus = exact
                .iter()
                .map(|times| Times {
                    run: self.blur(&mut place, times.run),
                    run_delay: self.blur(&mut place, times.run_delay),
                    runnable: times.runnable,
                })
                .collect();
            host.vms.push(VmSight {
                vcpus,
                allowed: vm.allowed,
                group: vm.group,
                weight: vm.weight,
                agent: vm.agent,
                in_use: world.usable(vm.index),
            });
        }
        Sight {
            at: world.now(),
            host,
            guests,
        }
    }

    /// A counter that grows by a little more or less than the true one; it never falls, and stands where that stands.
    fn blur(&mut self, place: &mut usize, value: Nanos) -> Nanos {
        if *place == self.last.len() {
            self.last.push(0);
            self.noisy.push(0);
        }
        let step = (value - self.last[*place]) as f64;
        let factor = 1.0 + self.noise * (2.0 * self.rng.f64() - 1.0);
        self.last[*place] = value;
        self.noisy[*place] += super::clock::nanos(step * factor / 1e9);
        *place += 1;
        self.noisy[*place - 1]
    }
}
