//! Which CPUs to use: from the topology, the set in use and the hint's number to a set. Pure.
//!
//! The rules, the strongest first:
//! 1. Isolated and nohz_full CPUs are never avoided. Somebody placed work on them by hand, so they don't count against
//!    usable either: usable bounds the housekeeping CPUs. With usable at or above the number of housekeeping CPUs, or no
//!    housekeeping CPU at all, every online CPU is used. A usable of 0 counts as 1.
//! 2. The lowest housekeeping CPU is always used: kernel work that can't move sits there.
//! 3. A set in use that has the right size, obeys rules 1, 2 and 5 and is online stays: moving work costs something.
//! 4. Cores in use come before others, those that are used whole before one that is split.
//! 5. Cores are used whole; at most one is split.
//! 6. NUMA nodes get shares in proportion to their housekeeping CPUs (Sainte-Laguë's divisors, which never take from a
//!    node when the total grows). A fold begins with all CPUs in use, so that its set is in proportion.
//! 7. Inside a node, and between nodes that are served alike, those come first that the host would rather keep; then the lowest.
//!
//! All this is one order of all housekeeping CPUs, of which the first so many are used. So on cores of equal size,
//! folding gives a subset of the set in use and unfolding a superset.

use std::collections::BTreeMap;

use hint_proto::CpuSet;

use crate::topology::Topology;

/// The host's preference among the guest's CPUs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Preference(BTreeMap<u32, usize>);

impl Preference {
    /// From a hint's `keep`: vCPUs by number, the best first. There is none where host and guest don't count the same CPUs, as for a
    /// moment after hotplug: numbers could then mean others.
    #[must_use]
    pub fn new(topology: &Topology, vcpus: u32, keep: &[u32]) -> Self {
        if usize::try_from(vcpus).ok() != Some(topology.by_vcpu.len()) {
            return Self::default();
        }
        let cpu = |vcpu: &u32| topology.by_vcpu.get(usize::try_from(*vcpu).ok()?).copied();
        let mut ranks = BTreeMap::new();
        for (rank, cpu) in keep.iter().filter_map(cpu).enumerate() {
            ranks.entry(cpu).or_insert(rank);
        }
        Self(ranks)
    }

    /// Place of the best of these CPUs; those that the host does not name come last.
    fn rank(&self, cpus: &[u32]) -> usize {
        let ranks = cpus.iter().filter_map(|cpu| self.0.get(cpu));
        ranks.min().copied().unwrap_or(usize::MAX)
    }
}

/// The CPUs to use when `usable` CPUs can run and `in_use` are used now.
///
/// The result is a part of the online CPUs, never empty, and holds all untouched ones.
#[must_use]
pub fn choose(
    topology: &Topology,
    in_use: &CpuSet,
    usable: u32,
    preference: &Preference,
) -> CpuSet {
    let housekeeping = topology.housekeeping();
    let count = usize::try_from(usable.max(1)).unwrap_or(usize::MAX);
    let Some(first) = housekeeping.first() else {
        return topology.online.clone();
    };
    if count >= housekeeping.len() {
        return topology.online.clone();
    }
    let kept = in_use.intersection(&housekeeping);
    if kept.len() == count && kept.contains(first) && split_cores(topology, &kept) <= 1 {
        return kept.union(&topology.untouched());
    }
    let chosen: CpuSet = order(topology, &housekeeping, in_use, first, preference)
        .into_iter()
        .take(count)
        .collect();
    chosen.union(&topology.untouched())
}

/// Number of cores of which some housekeeping CPUs are chosen and some are not.
fn split_cores(topology: &Topology, chosen: &CpuSet) -> usize {
    let housekeeping = topology.housekeeping();
    let split = topology.cores.iter().filter(|core| {
        let used = core.cpus.intersection(chosen).len();
        used != 0 && used != core.cpus.intersection(&housekeeping).len()
    });
    split.count()
}

/// How much of a core is in use; what is used most comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    Whole,
    Split,
    Unused,
}

/// Cores of one node that are not placed yet, and how far the node is served.
struct Node {
    /// Cores to place with their standing, the best last.
    cores: Vec<(Standing, Vec<u32>)>,
    /// CPUs of the node.
    size: u64,
    /// CPUs placed.
    placed: u64,
}

impl Node {
    /// The node's next core: its standing, its price by the divisor method as a fraction (price, size), and the host's rank of it; the
    /// lowest goes first.
    fn next(&self, preference: &Preference) -> Option<(Standing, u64, u64, usize)> {
        let (standing, cpus) = self.cores.last()?;
        let core = u64::try_from(cpus.len()).unwrap_or(u64::MAX);
        let rank = preference.rank(cpus);
        Some((*standing, 2 * self.placed + core, self.size, rank))
    }

    fn place(&mut self, order: &mut Vec<u32>) {
        if let Some((_, core)) = self.cores.pop() {
            self.placed += u64::try_from(core.len()).unwrap_or(u64::MAX);
            order.extend(core);
        }
    }
}

/// All housekeeping CPUs, the one to keep longest first.
fn order(
    topology: &Topology,
    housekeeping: &CpuSet,
    in_use: &CpuSet,
    first: u32,
    preference: &Preference,
) -> Vec<u32> {
    let mut by_node: BTreeMap<u32, Vec<(Standing, Vec<u32>)>> = BTreeMap::new();
    for core in &topology.cores {
        let mut cpus: Vec<u32> = core.cpus.intersection(housekeeping).iter().collect();
        if cpus.is_empty() {
            continue;
        }
        cpus.sort_by_key(|cpu| {
            let rank = preference.rank(&[*cpu]);
            (*cpu != first, !in_use.contains(*cpu), rank, *cpu)
        });
        let standing = match cpus.iter().filter(|cpu| in_use.contains(**cpu)).count() {
            0 => Standing::Unused,
            used if used == cpus.len() => Standing::Whole,
            _ => Standing::Split,
        };
        by_node.entry(core.node).or_default().push((standing, cpus));
    }
    let mut nodes: Vec<Node> = by_node
        .into_values()
        .map(|mut cores| {
            cores.sort_by_key(|(standing, core)| {
                (
                    !core.contains(&first),
                    *standing,
                    preference.rank(core),
                    core.iter().min().copied(),
                )
            });
            cores.reverse();
            let size = cores.iter().map(|(_, core)| core.len()).sum::<usize>();
            Node {
                cores,
                size: u64::try_from(size).unwrap_or(u64::MAX),
                placed: 0,
            }
        })
        .collect();

    let mut order = Vec::with_capacity(housekeeping.len());
    let is_home = |node: &&mut Node| {
        node.cores
            .last()
            .is_some_and(|(_, core)| core.contains(&first))
    };
    if let Some(home) = nodes.iter_mut().find(is_home) {
        home.place(&mut order);
    }
    while let Some((_, node)) = nodes
        .iter_mut()
        .filter_map(|node| Some((node.next(preference)?, node)))
        .min_by(
            |((standing, price, size, rank), _),
             ((other, other_price, other_size, other_rank), _)| {
                let prices = (u128::from(*price) * u128::from(*other_size))
                    .cmp(&(u128::from(*other_price) * u128::from(*size)));
                standing.cmp(other).then(prices).then(rank.cmp(other_rank))
            },
        )
    {
        node.place(&mut order);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Core;
    use proptest::prelude::*;

    /// Without a preference of the host.
    fn choose(topology: &Topology, in_use: &CpuSet, usable: u32) -> CpuSet {
        super::choose(topology, in_use, usable, &Preference::default())
    }

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    /// Cores of `threads` CPUs with consecutive numbers; one entry a node, with its number of cores.
    fn topology(nodes: &[u32], threads: u32, isolated: &str) -> Topology {
        let mut cores = Vec::new();
        let mut next = 0;
        for (node, count) in (0..).zip(nodes) {
            for _ in 0..*count {
                cores.push(Core {
                    cpus: (next..next + threads).collect(),
                    node,
                });
                next += threads;
            }
        }
        Topology {
            online: (0..next).collect(),
            cores,
            isolated: set(isolated),
            nohz_full: CpuSet::new(),
            by_vcpu: (0..next).collect(),
        }
    }

    #[test]
    fn one_node_keeps_the_lowest_cpus_and_whole_cores() {
        let flat = topology(&[8], 1, "");
        assert_eq!(choose(&flat, &flat.online, 3), set("0-2"));
        let smt = topology(&[4], 2, "");
        assert_eq!(choose(&smt, &smt.online, 4), set("0-3"));
        assert_eq!(choose(&smt, &smt.online, 3), set("0-2"));
        assert_eq!(choose(&smt, &set("0-1,6-7"), 4), set("0-1,6-7"));
        assert_eq!(choose(&smt, &set("0-1,6-7"), 3), set("0-1,6"));
    }

    #[test]
    fn siblings_with_distant_numbers_stay_together() {
        let mut smt = topology(&[4], 2, "");
        for (core, cpu) in smt.cores.iter_mut().zip(0..) {
            core.cpus = [cpu, cpu + 4].into_iter().collect();
        }
        assert_eq!(choose(&smt, &smt.online, 4), set("0-1,4-5"));
        assert_eq!(choose(&smt, &smt.online, 2), set("0,4"));
    }

    #[test]
    fn nodes_get_their_share() {
        let even = topology(&[8, 8], 1, "");
        assert_eq!(choose(&even, &even.online, 4), set("0-1,8-9"));
        let uneven = topology(&[6, 2], 1, "");
        assert_eq!(choose(&uneven, &uneven.online, 4), set("0-2,6"));
    }

    #[test]
    fn what_is_in_use_stays_before_nodes_are_balanced() {
        let uneven = topology(&[2, 4, 5], 1, "");
        assert_eq!(choose(&uneven, &set("0-5"), 2), set("0,2"));
        assert_eq!(choose(&uneven, &set("0,2-3"), 4), set("0,2-3,6"));
    }

    #[test]
    fn no_fewer_than_one_and_no_more_than_all() {
        let flat = topology(&[4], 1, "");
        assert_eq!(choose(&flat, &flat.online, 0), set("0"));
        assert_eq!(
            choose(&flat, &set("1"), 1),
            set("0"),
            "the housekeeping CPU"
        );
        for usable in [4, 5, u32::MAX] {
            assert_eq!(choose(&flat, &set("0"), usable), set("0-3"));
        }
    }

    #[test]
    fn isolated_cpus_stay_and_do_not_count() {
        let isolated = topology(&[8], 1, "0,6-7");
        assert_eq!(choose(&isolated, &isolated.online, 2), set("0-2,6-7"));
        assert_eq!(choose(&isolated, &isolated.online, 5), set("0-7"));
        let all = topology(&[4], 1, "0-3");
        assert_eq!(choose(&all, &all.online, 1), set("0-3"));
    }

    #[test]
    fn a_cpu_that_goes_offline_disturbs_no_other() {
        let mut flat = topology(&[8], 1, "");
        let before = set("0,5-7");
        assert_eq!(choose(&flat, &before, 4), before);
        flat.online.remove(6);
        flat.cores.remove(6);
        assert_eq!(choose(&flat, &before, 4), set("0-1,5,7"));
    }

    #[test]
    fn the_hosts_preference_counts_among_cpus_that_are_alike() {
        let flat = topology(&[8], 1, "");
        let keep = |keep: &[u32]| Preference::new(&flat, 8, keep);
        let fold = |in_use: &str, usable, order: &[u32]| {
            super::choose(&flat, &set(in_use), usable, &keep(order)).to_string()
        };
        assert_eq!(
            fold("0-7", 3, &[5, 4, 7, 6]),
            "0,4-5",
            "CPU 0 is housekeeping"
        );
        assert_eq!(fold("0-7", 2, &[5, 4, 7, 6]), "0,5");
        assert_eq!(fold("0-2", 3, &[5, 4, 7, 6]), "0-2", "stability first");
        assert_eq!(fold("0-2", 4, &[5, 4, 7, 6]), "0-2,5");
        assert_eq!(fold("0-7", 3, &[9, 5, 5, 3, u32::MAX]), "0,3,5");
        let smt = topology(&[2, 2], 2, "");
        let preference = Preference::new(&smt, 8, &[7, 3]);
        let fold = |usable| super::choose(&smt, &smt.online, usable, &preference).to_string();
        assert_eq!(fold(4), "0-1,6-7", "whole cores, one on each node");
        assert_eq!(fold(3), "0-1,7", "of the split core the better thread");
    }

    #[test]
    fn vcpus_and_cpus_that_are_counted_otherwise_are_mapped_or_not_used() {
        let mut flat = topology(&[4], 1, "");
        flat.by_vcpu = vec![0, 1, 3, 2];
        let preference = Preference::new(&flat, 4, &[2]);
        assert_eq!(
            super::choose(&flat, &flat.online, 2, &preference),
            set("0,3")
        );
        let preference = Preference::new(&flat, 5, &[2]);
        assert_eq!(
            preference,
            Preference::default(),
            "the host counts another CPU"
        );
    }

    /// The rules once more, read literally: for each place the best of all cores that are left.
    fn reference(
        topology: &Topology,
        in_use: &CpuSet,
        usable: u32,
        rank: &dyn Fn(u32) -> usize,
    ) -> CpuSet {
        let house = topology.housekeeping();
        let count = (usable.max(1) as usize).min(house.len());
        if count == house.len() {
            return topology.online.clone();
        }
        let first = house.iter().min().unwrap();
        let of = |core: &Core| -> Vec<u32> {
            core.cpus
                .iter()
                .filter(|cpu| house.contains(*cpu))
                .collect()
        };
        let kept: Vec<u32> = in_use.iter().filter(|cpu| house.contains(*cpu)).collect();
        let split = topology.cores.iter().filter(|core| {
            let used = of(core).iter().filter(|cpu| kept.contains(cpu)).count();
            used > 0 && used < of(core).len()
        });
        if kept.len() == count && kept.contains(&first) && split.count() <= 1 {
            return kept
                .into_iter()
                .chain(topology.untouched().iter())
                .collect();
        }
        let mut left: Vec<&Core> = topology
            .cores
            .iter()
            .filter(|core| !of(core).is_empty())
            .collect();
        let mut placed: Vec<u32> = Vec::new();
        while placed.len() < count {
            let key = |core: &&Core| {
                let node: Vec<u32> = topology
                    .cores
                    .iter()
                    .filter(|other| other.node == core.node)
                    .flat_map(of)
                    .collect();
                let served = node.iter().filter(|cpu| placed.contains(cpu)).count();
                let used = of(core).iter().filter(|cpu| in_use.contains(**cpu)).count();
                let standing = match used {
                    0 => 2,
                    used if used == of(core).len() => 0,
                    _ => 1,
                };
                // Fractions of numbers below 100 that are equal are equal as floats too.
                let price = (2 * served + of(core).len()) as f64 / node.len() as f64;
                let best = of(core).into_iter().map(rank).min().unwrap();
                (
                    !of(core).contains(&first),
                    standing,
                    price,
                    best,
                    core.node,
                    core.cpus.first(),
                )
            };
            let inside = |core: &&Core| {
                let (not_home, standing, _, best, _, lowest) = key(core);
                (not_home, standing, best, lowest)
            };
            // The best core of each node, then the best of those.
            let best_of_node = |core: &&&Core| {
                let beside = left.iter().filter(|other| other.node == core.node);
                beside.min_by_key(|core| inside(core)) == Some(*core)
            };
            let next = left
                .iter()
                .filter(best_of_node)
                .min_by(|a, b| key(a).partial_cmp(&key(b)).unwrap())
                .copied()
                .unwrap();
            left.retain(|core| core != &next);
            let mut cpus = of(next);
            cpus.sort_by_key(|cpu| (*cpu != first, !in_use.contains(*cpu), rank(*cpu), *cpu));
            placed.extend(cpus);
        }
        placed.truncate(count);
        placed
            .into_iter()
            .chain(topology.untouched().iter())
            .collect()
    }

    #[derive(Debug, Clone)]
    struct Case {
        topology: Topology,
        in_use: CpuSet,
    }

    /// Cores of equal size, all online, none isolated; any set in use.
    fn regular_cases() -> impl Strategy<Value = Case> {
        (
            prop::collection::vec(1u32..7, 1..5),
            1u32..5,
            prop::collection::btree_set(0u32..96, 0..96),
        )
            .prop_map(|(nodes, threads, in_use)| Case {
                topology: topology(&nodes, threads, ""),
                in_use: in_use.into_iter().collect(),
            })
    }

    /// The same with some CPUs isolated and some offline.
    fn cases() -> impl Strategy<Value = Case> {
        (
            regular_cases(),
            prop::collection::btree_set(0u32..96, 0..6),
            prop::collection::btree_set(1u32..96, 0..6),
        )
            .prop_map(|(mut case, isolated, offline)| {
                let topology = &mut case.topology;
                let offline: CpuSet = offline.into_iter().collect();
                topology.isolated = isolated.into_iter().collect();
                topology.online = topology.online.difference(&offline);
                for core in &mut topology.cores {
                    core.cpus = core.cpus.difference(&offline);
                }
                topology.cores.retain(|core| !core.cpus.is_empty());
                case
            })
    }

    proptest! {
        #[test]
        fn size_bounds_and_housekeeping(case in cases(), usable in 0u32..120) {
            let Case { topology, in_use } = case;
            let chosen = choose(&topology, &in_use, usable);
            let housekeeping = topology.housekeeping();
            let untouched = topology.untouched();
            prop_assert!(chosen.is_subset(&topology.online));
            prop_assert!(!chosen.is_empty());
            prop_assert!(untouched.is_subset(&chosen));
            let expected = (usable.max(1) as usize).min(housekeeping.len()) + untouched.len();
            prop_assert_eq!(chosen.len(), expected);
            if let Some(first) = housekeeping.first() {
                prop_assert!(chosen.contains(first));
            }
        }

        #[test]
        fn it_is_what_the_rules_say(
            case in cases(),
            usable in 0u32..120,
            keep in prop::collection::vec(0u32..96, 0..20),
        ) {
            let Case { topology, in_use } = case;
            prop_assume!(!topology.housekeeping().is_empty());
            let vcpus = u32::try_from(topology.by_vcpu.len()).unwrap();
            let preference = Preference::new(&topology, vcpus, &keep);
            let rank = |cpu| keep.iter().filter(|vcpu| **vcpu < vcpus).position(|kept| *kept == cpu).unwrap_or(usize::MAX);
            prop_assert_eq!(
                super::choose(&topology, &in_use, usable, &preference),
                reference(&topology, &in_use, usable, &rank)
            );
        }

        #[test]
        fn at_most_one_core_is_split(case in cases(), usable in 0u32..120) {
            let Case { topology, in_use } = case;
            let chosen = choose(&topology, &in_use, usable).intersection(&topology.housekeeping());
            prop_assert!(split_cores(&topology, &chosen) <= 1);
        }

        #[test]
        fn asking_again_changes_nothing(case in cases(), usable in 0u32..120) {
            let chosen = choose(&case.topology, &case.in_use, usable);
            prop_assert_eq!(choose(&case.topology, &chosen, usable), chosen);
        }

        #[test]
        fn folding_gives_a_subset_and_unfolding_a_superset(case in regular_cases(), a in 1u32..120, b in 1u32..120) {
            let (low, high) = (a.min(b), a.max(b));
            let large = choose(&case.topology, &case.in_use, high);
            prop_assert!(choose(&case.topology, &large, low).is_subset(&large));
            let small = choose(&case.topology, &case.in_use, low);
            prop_assert!(small.is_subset(&choose(&case.topology, &small, high)));
        }

        #[test]
        fn nodes_are_served_in_proportion(case in regular_cases(), before in 1u32..120, usable in 1u32..120) {
            let topology = case.topology;
            let in_use = choose(&topology, &topology.online, before);
            let chosen = choose(&topology, &in_use, usable);
            let core = topology.cores.iter().map(|core| core.cpus.len()).max().unwrap();
            let mut nodes: BTreeMap<u32, (usize, usize)> = BTreeMap::new();
            for core in &topology.cores {
                let node = nodes.entry(core.node).or_default();
                node.0 += core.cpus.intersection(&chosen).len();
                node.1 += core.cpus.len();
            }
            for (used, size) in nodes.values() {
                // used / size against chosen / online, two cores off at most
                let due = chosen.len() * size;
                let has = used * topology.online.len();
                prop_assert!(has.abs_diff(due) <= 2 * core * topology.online.len(), "{has} {due}");
            }
        }
    }
}
