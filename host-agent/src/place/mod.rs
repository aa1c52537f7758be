//! Place: which of its vCPUs the host would rather see a guest use, where pinning makes a difference. Pure. How many is `govern`'s
//! matter, and the guest has the last word, since only it knows its topology.
//!
//! A vCPU on a pCPU that others crowd goes first. VMs choose one after the other and count what those before them have chosen, so
//! that two VMs pinned to the same pCPUs end up on different halves of them when both are folded.

use std::sync::Arc;

use hint_proto::CpuSet;

use crate::model::Threads;

/// Another pCPU must be less crowded by so much before a vCPU in use gives way to one that is not.
const BETTER_BY: f64 = 0.5;

/// One VM that is to be placed.
#[derive(Debug, Clone, Copy)]
pub struct Placed<'a> {
    /// Its vCPUs, and where they may run.
    pub threads: &'a Threads,
    /// How many of them it should use.
    pub usable: u32,
}

/// The preferences of all VMs, kept from time to time so that they stay as they are while nothing much changes.
#[derive(Debug, Default)]
pub struct Places {
    crowd: Vec<f64>,
    keep: Vec<Arc<[u32]>>,
}

impl Places {
    /// For each VM its vCPUs by number, those first that the host would rather keep in use; empty where it makes no difference.
    /// VMs come in the same order each time, or the old preferences count for nothing.
    /// `None` is a VM whose vCPUs are not known.
    pub fn choose(&mut self, vms: &[Option<Placed<'_>>]) -> &[Arc<[u32]>] {
        self.crowd.clear();
        self.keep.resize(vms.len(), Arc::default());
        for vm in vms.iter().flatten() {
            if let Threads::Alike {
                count,
                cpus: Some(cpus),
            } = vm.threads
            {
                // The kernel spreads these.
                add(&mut self.crowd, cpus, f64::from(vm.usable.min(*count)));
            }
        }
        for (vm, keep) in vms.iter().zip(&mut self.keep) {
            let Some(Placed {
                threads: Threads::Pinned(sets),
                usable,
            }) = vm
            else {
                *keep = Arc::default();
                continue;
            };
            let order = order(sets, *usable, keep, &mut self.crowd);
            if **keep != *order {
                *keep = order.into();
            }
        }
        &self.keep
    }

    /// What was chosen last.
    #[must_use]
    pub fn last(&self) -> &[Arc<[u32]>] {
        &self.keep
    }
}

/// One VM's vCPUs, the best first; adds those that it will use to the crowd.
fn order(sets: &[Arc<CpuSet>], usable: u32, before: &[u32], crowd: &mut Vec<f64>) -> Vec<u32> {
    let used_before = |vcpu: &u32| before.iter().take(usable as usize).any(|kept| kept == vcpu);
    let mut left: Vec<u32> = (0u32..).take(sets.len()).collect();
    let mut order = Vec::with_capacity(left.len());
    while !left.is_empty() {
        // vCPUs of one VM may share pCPUs too, so each choice counts for the next.
        let price = |vcpu: &u32| {
            let stays = if used_before(vcpu) { BETTER_BY } else { 0.0 };
            mean(crowd, &sets[*vcpu as usize]) - stays
        };
        let best = (0..left.len())
            .min_by(|a, b| price(&left[*a]).total_cmp(&price(&left[*b])))
            .expect("something is left");
        let vcpu = left.remove(best);
        if order.len() < usable as usize {
            add(crowd, &sets[vcpu as usize], 1.0);
        }
        order.push(vcpu);
    }
    order
}

/// The mean crowd of a set's pCPUs, as the kernel balances among them.
fn mean(crowd: &[f64], set: &CpuSet) -> f64 {
    let of = |cpu: u32| crowd.get(cpu as usize).copied().unwrap_or(0.0);
    let sum: f64 = set.iter().map(of).sum();
    sum / (set.len().max(1) as f64)
}

fn add(crowd: &mut Vec<f64>, set: &CpuSet, vcpus: f64) {
    let each = vcpus / (set.len().max(1) as f64);
    for cpu in set.iter() {
        let cpu = cpu as usize;
        if cpu >= crowd.len() {
            crowd.resize(cpu + 1, 0.0);
        }
        crowd[cpu] += each;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pinned(pcpus: &[u32]) -> Threads {
        let sets = pcpus
            .iter()
            .map(|cpu| Arc::new([*cpu].into_iter().collect()));
        Threads::Pinned(sets.collect())
    }

    fn placed(threads: &Threads, usable: u32) -> Option<Placed<'_>> {
        Some(Placed { threads, usable })
    }

    #[test]
    fn vcpus_on_crowded_pcpus_go_first() {
        let mut places = Places::default();
        let guest = pinned(&[0, 1, 2, 3]);
        let neighbour = Threads::Alike {
            count: 4,
            cpus: Some(Arc::new("0-1".parse().unwrap())),
        };
        let keep = places.choose(&[placed(&guest, 2), placed(&neighbour, 4)]);
        assert_eq!(*keep[0], [2, 3, 0, 1]);
        assert!(keep[1].is_empty(), "its vCPUs are all alike");
    }

    #[test]
    fn folded_vms_on_the_same_pcpus_take_different_halves() {
        let mut places = Places::default();
        let (one, two) = (pinned(&[0, 1, 2, 3]), pinned(&[0, 1, 2, 3]));
        let keep = places.choose(&[placed(&one, 2), placed(&two, 2)]);
        assert_eq!(keep[0][..2], [0, 1]);
        assert_eq!(keep[1][..2], [2, 3]);
    }

    #[test]
    fn what_is_in_use_stays_while_nothing_is_much_better() {
        let mut places = Places::default();
        let guest = pinned(&[0, 1]);
        let on = |cpu: &str, count| Threads::Alike {
            count,
            cpus: Some(Arc::new(cpu.parse().unwrap())),
        };
        let first = on("0", 1);
        assert_eq!(
            *places.choose(&[placed(&guest, 1), placed(&first, 1)])[0],
            [1, 0]
        );
        let both = on("0-1", 1);
        assert_eq!(
            *places.choose(&[placed(&guest, 1), placed(&both, 1)])[0],
            [1, 0]
        );
        let other = on("1", 1);
        assert_eq!(
            *places.choose(&[placed(&guest, 1), placed(&other, 1)])[0],
            [0, 1]
        );
    }
}
