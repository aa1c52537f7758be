//! Which pCPUs the VMs compete for. Pure.
//!
//! The broker divides one pool: the pCPUs that most of the VMs may all run on. That is every common pCPU on a plain host, and
//! the shared set on one that keeps some for itself. VMs with another set are counted where they reach into the pool and not
//! governed.

use hint_proto::CpuSet;

use crate::model::Placement;

/// Where one VM may run, as discovery tells it.
#[derive(Debug, Clone, Copy)]
pub struct Affinity<'a> {
    /// CPUs that each of its vCPUs may run on; `None` when they differ or are not known.
    pub allowed: Option<&'a CpuSet>,
    /// CPUs that any of its vCPUs may run on; empty when not known.
    pub reach: &'a CpuSet,
}

/// The pool and each VM's place. `common` is what is online and not isolated, `online` what has times in `/proc/stat`.
#[must_use]
pub fn choose(common: &CpuSet, online: &CpuSet, vms: &[Affinity<'_>]) -> (CpuSet, Vec<Placement>) {
    // CPUs that are offline are in most affinities and mean nothing; a VM that nobody pinned may use isolated CPUs, and its
    // vCPUs never get there by themselves.
    let effective = |set: &CpuSet| {
        let usual = set.intersection(common);
        if usual.is_empty() {
            set.intersection(online)
        } else {
            usual
        }
    };
    let sets: Vec<Option<CpuSet>> = vms.iter().map(|vm| vm.allowed.map(effective)).collect();
    let votes = |set: &CpuSet| sets.iter().flatten().filter(|other| *other == set).count();
    let mut pool = common.clone();
    let mut most = 0;
    for set in sets.iter().flatten().filter(|set| !set.is_empty()) {
        let count = votes(set);
        if count > most || (count == most && set.len() > pool.len()) {
            (pool, most) = (set.clone(), count);
        }
    }
    let placements = vms.iter().zip(&sets).map(|(vm, set)| {
        if set.as_ref() == Some(&pool) {
            Placement::Pool
        } else if vm.reach.intersection(&pool).is_empty() {
            Placement::Elsewhere
        } else {
            Placement::Overlapping
        }
    });
    let placements = placements.collect();
    (pool, placements)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(list: &str) -> CpuSet {
        list.parse().unwrap()
    }

    fn place(common: &str, allowed: &[&str]) -> (String, Vec<Placement>) {
        let sets: Vec<CpuSet> = allowed.iter().map(|list| set(list)).collect();
        let vms: Vec<Affinity<'_>> = sets
            .iter()
            .map(|set| Affinity {
                allowed: Some(set),
                reach: set,
            })
            .collect();
        let (pool, placements) = choose(&set(common), &set("0-7"), &vms);
        (pool.to_string(), placements)
    }

    #[test]
    fn vms_that_nobody_pinned_share_all_common_cpus() {
        use Placement::Pool;
        assert_eq!(
            place("0-7", &["0-63", "0-7"]),
            ("0-7".to_owned(), vec![Pool, Pool])
        );
        assert_eq!(
            place("0-5", &["0-7", "0-7"]),
            ("0-5".to_owned(), vec![Pool, Pool]),
            "6 and 7 are isolated"
        );
        assert_eq!(place("0-7", &[]), ("0-7".to_owned(), vec![]));
    }

    #[test]
    fn a_host_that_keeps_cpus_for_itself_has_a_smaller_pool() {
        use Placement::{Elsewhere, Overlapping, Pool};
        let (pool, placements) = place("0-7", &["2-7", "2-7", "0-1", "0-3"]);
        assert_eq!(
            (pool.as_str(), placements),
            ("2-7", vec![Pool, Pool, Elsewhere, Overlapping])
        );
    }

    #[test]
    fn vms_on_isolated_cpus_only_are_a_pool_too() {
        let (pool, placements) = place("0-3", &["4-7", "4-7"]);
        assert_eq!(
            (pool.as_str(), placements),
            ("4-7", vec![Placement::Pool; 2])
        );
    }

    #[test]
    fn a_vm_with_different_vcpus_is_counted_and_not_governed() {
        let reach = set("0-3");
        let (all, nothing) = (set("0-7"), CpuSet::new());
        let vms = [
            Affinity {
                allowed: None,
                reach: &reach,
            },
            Affinity {
                allowed: Some(&all),
                reach: &all,
            },
            Affinity {
                allowed: None,
                reach: &nothing,
            },
        ];
        let (pool, placements) = choose(&set("0-7"), &set("0-7"), &vms);
        assert_eq!(pool, all);
        assert_eq!(
            placements,
            [
                Placement::Overlapping,
                Placement::Pool,
                Placement::Elsewhere
            ]
        );
    }
}
