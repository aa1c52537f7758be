//! The division of pCPU time against its definition, on thousands of random hosts, and by hand.

#[path = "division/reference.rs"]
mod reference;

use std::sync::Arc;

use hint_broker::entitle::{Division, Engine};
use hint_broker::model::{Claimant, Cpus, Group, Host, Pcpu, Threads};
use hint_proto::CpuSet;
use proptest::prelude::*;

use self::reference::Reference;

const NEAR: f64 = 1e-6;

fn cpus(bits: u32) -> Arc<CpuSet> {
    Arc::new((0..32).filter(|bit| bits & 1 << bit != 0).collect())
}

#[derive(Debug, Clone, Copy, Default)]
struct Kinds {
    groups: bool,
    cpusets: bool,
    pinning: bool,
    quotas: bool,
    floors: bool,
    uneven_supply: bool,
}

fn weight() -> impl Strategy<Value = f64> {
    prop_oneof![
        4 => Just(100.0),
        1 => Just(1.0),
        1 => Just(10_000.0),
        4 => (1_u32..1000).prop_map(f64::from),
    ]
}

fn amount(most: f64) -> impl Strategy<Value = f64> {
    prop_oneof![
        1 => Just(0.0),
        2 => (0_u32..8).prop_map(|eighths| f64::from(eighths) / 2.0),
        4 => 0.0..most,
    ]
}

fn maybe<T: Strategy>(wanted: bool, value: T) -> impl Strategy<Value = Option<T::Value>>
where
    T::Value: Clone,
{
    proptest::option::weighted(if wanted { 0.4 } else { 1e-12 }, value)
        .prop_map(move |value| if wanted { value } else { None })
}

fn group(kinds: Kinds, pcpus: u32, index: usize) -> impl Strategy<Value = Group> {
    let parent = prop_oneof![
        Just(None),
        (0..index.max(1)).prop_map(move |parent| (index > 0).then_some(parent))
    ];
    (
        parent,
        weight(),
        maybe(kinds.floors, amount(2.0)),
        maybe(kinds.quotas, amount(4.0)),
        maybe(kinds.cpusets, 1_u32..1 << pcpus),
    )
        .prop_map(|(parent, weight, floor, cap, set)| Group {
            parent,
            weight,
            floor: Cpus(floor.unwrap_or(0.0)),
            cap: cap.map(Cpus),
            cpus: set.map(cpus),
        })
}

fn claimant(kinds: Kinds, pcpus: u32, groups: usize) -> impl Strategy<Value = Claimant> {
    let alike = (1_u32..6, maybe(kinds.cpusets, 1_u32..1 << pcpus)).prop_map(|(count, set)| {
        Threads::Alike {
            count,
            cpus: set.map(cpus),
        }
    });
    let pinned = proptest::collection::vec(1_u32..1 << pcpus, 1..4)
        .prop_map(|sets| Threads::Pinned(sets.into_iter().map(cpus).collect()));
    let threads = if kinds.pinning {
        prop_oneof![alike, pinned].boxed()
    } else {
        alike.boxed()
    };
    (
        proptest::option::of(0..groups.max(1))
            .prop_map(move |parent| parent.filter(|parent| *parent < groups)),
        weight(),
        amount(6.0),
        maybe(kinds.floors, amount(2.0)),
        maybe(kinds.quotas, amount(4.0)),
        threads,
    )
        .prop_map(|(parent, weight, demand, floor, cap, threads)| Claimant {
            parent,
            weight,
            demand: Cpus(demand),
            shown: Cpus(demand),
            all: Cpus(threads.count() as f64),
            floor: Cpus(floor.unwrap_or(0.0)),
            cap: cap.map(Cpus),
            threads,
        })
}

fn host(kinds: Kinds) -> impl Strategy<Value = Host> {
    (
        1_u32..6,
        0..if kinds.groups { 5_usize } else { 1 },
        1_usize..7,
    )
        .prop_flat_map(move |(pcpus, groups, claimants)| {
            let supply = if kinds.uneven_supply {
                prop_oneof![3 => Just(1.0), 1 => 0.0..1.0].boxed()
            } else {
                Just(1.0).boxed()
            };
            let groups_of: Vec<_> = (0..groups)
                .map(|index| group(kinds, pcpus, index))
                .collect();
            (
                proptest::collection::vec(supply, pcpus as usize),
                groups_of,
                proptest::collection::vec(claimant(kinds, pcpus, groups), claimants),
            )
                .prop_map(|(supplies, groups, claimants)| Host {
                    pcpus: (0..)
                        .zip(supplies)
                        .map(|(id, supply)| Pcpu {
                            id,
                            supply: Cpus(supply),
                        })
                        .collect(),
                    groups,
                    claimants,
                })
        })
}

fn divide(host: &Host) -> Division {
    Engine::default().divide(host).clone()
}

fn shares(division: &Division) -> Vec<f64> {
    division
        .claimants
        .iter()
        .map(|found| found.map_or(0.0, |found| found.share.0))
        .collect()
}

fn assert_right(host: &Host) {
    let division = divide(host);
    let reference = Reference::new(host);
    let wanted = reference.shares(&reference.limits);
    let found = shares(&division);
    for index in 0..wanted.len() {
        assert!(
            (found[index] - wanted[index]).abs() < NEAR,
            "shares {found:?}, not {wanted:?}, of {host:#?}"
        );
        let Some(entitlement) = division.claimants[index] else {
            assert!(!reference.takes_part(index));
            continue;
        };
        let target = reference.target(index);
        assert!(
            (entitlement.target.0 - target).abs() < NEAR,
            "target {:?} of {index}, not {target}, of {host:#?}",
            entitlement.target
        );
        let split: f64 = division.split(index).iter().map(|part| part.1.0).sum();
        assert!((split - entitlement.target.0).abs() < NEAR);
    }
    assert!(reference.feasible(&found, NEAR));
    assert_nothing_idles(host, &reference, &found);
    assert_sets_add_up(host, &division);
}

/// Who wants more can't have it without taking it from another or breaking a quota.
fn assert_nothing_idles(host: &Host, reference: &Reference<'_>, found: &[f64]) {
    for index in 0..found.len() {
        if !reference.takes_part(index) || found[index] + 1e-4 > reference.limits[index] {
            continue;
        }
        let mut more = found.to_vec();
        more[index] += 1e-4;
        assert!(
            !reference.feasible(&more, NEAR) || !within_quotas(host, &more),
            "{index} could have more than {found:?} of {host:#?}"
        );
    }
}

fn within_quotas(host: &Host, shares: &[f64]) -> bool {
    let mut totals = vec![0.0; host.groups.len()];
    for (claimant, share) in host.claimants.iter().zip(shares) {
        let mut at = claimant.parent;
        while let Some(group) = at {
            totals[group] += share;
            at = host.groups[group].parent;
        }
    }
    host.groups
        .iter()
        .zip(totals)
        .all(|(group, total)| group.cap.is_none_or(|cap| total <= cap.0 + NEAR))
}

fn assert_sets_add_up(host: &Host, division: &Division) {
    let supply: f64 = host.pcpus.iter().map(|pcpu| pcpu.supply.0).sum();
    let of_sets: f64 = division.sets.iter().map(|set| set.supply.0).sum();
    let given: f64 = division.sets.iter().map(|set| set.given.0).sum();
    let shared: f64 = shares(division).iter().sum();
    assert!((supply - of_sets).abs() < NEAR && (given - shared).abs() < NEAR);
    for set in &division.sets {
        assert!(set.given.0 <= set.supply.0 + NEAR);
        if set.level.is_some() {
            assert!((set.given.0 - set.supply.0).abs() < NEAR, "{division:#?}");
        }
    }
}

proptest! {
    #[test]
    fn flat(host in host(Kinds::default())) {
        assert_right(&host);
    }

    #[test]
    fn trees(host in host(Kinds { groups: true, ..Kinds::default() })) {
        assert_right(&host);
    }

    #[test]
    fn cpusets(host in host(Kinds { cpusets: true, uneven_supply: true, ..Kinds::default() })) {
        assert_right(&host);
    }

    #[test]
    fn cpusets_in_trees(host in host(Kinds { groups: true, cpusets: true, ..Kinds::default() })) {
        assert_right(&host);
    }

    #[test]
    fn pinning(host in host(Kinds { groups: true, cpusets: true, pinning: true, ..Kinds::default() })) {
        assert_right(&host);
    }

    #[test]
    fn quotas(host in host(Kinds { groups: true, quotas: true, ..Kinds::default() })) {
        assert_right(&host);
    }

    #[test]
    fn reservations(host in host(Kinds { groups: true, floors: true, cpusets: true, ..Kinds::default() })) {
        assert_right(&host);
    }

    #[test]
    fn everything(host in host(EVERYTHING)) {
        assert_right(&host);
    }

    #[test]
    fn one_pool_is_filled_by_rates(host in host(Kinds { groups: true, quotas: true, ..Kinds::default() })) {
        let (found, wanted) = (shares(&divide(&host)), filled_by_rates(&host));
        for (a, b) in found.iter().zip(&wanted) {
            prop_assert!((a - b).abs() < NEAR, "{:?}, not {:?}", found, wanted);
        }
    }

    #[test]
    fn the_order_of_claimants_does_not_matter(host in host(EVERYTHING), by in 0_usize..6) {
        let mut turned = host.clone();
        let by = by % host.claimants.len();
        turned.claimants.rotate_left(by);
        let (mut before, after) = (divide(&host).claimants, divide(&turned).claimants);
        before.rotate_left(by);
        for (a, b) in before.iter().zip(&after) {
            let (Some(a), Some(b)) = (a, b) else {
                prop_assert_eq!(a, b);
                continue;
            };
            prop_assert!((a.share.0 - b.share.0).abs() < NEAR && (a.target.0 - b.target.0).abs() < NEAR);
        }
    }

    #[test]
    fn more_weight_never_means_less(host in host(Kinds { quotas: false, ..EVERYTHING }), index in 0_usize..6, factor in 1.0..10.0) {
        let mut heavier = host.clone();
        let index = index % host.claimants.len();
        heavier.claimants[index].weight *= factor;
        let (before, after) = (divide(&host).claimants[index], divide(&heavier).claimants[index]);
        if let (Some(before), Some(after)) = (before, after) {
            prop_assert!(after.share.0 >= before.share.0 - NEAR && after.target.0 >= before.target.0 - NEAR);
        }
    }

    #[test]
    fn an_engine_remembers_nothing_that_counts(hosts in proptest::collection::vec(host(EVERYTHING), 4)) {
        let mut engine = Engine::default();
        for host in hosts.iter().chain(&hosts) {
            prop_assert_eq!(engine.divide(host), &divide(host));
        }
    }
}

const EVERYTHING: Kinds = Kinds {
    groups: true,
    cpusets: true,
    pinning: true,
    quotas: true,
    floors: true,
    uneven_supply: true,
};

/// A host of one pool without floors, filled in small events: who still grows does so with the product, over its groups, of its
/// weight over that of the siblings that still grow.
fn filled_by_rates(host: &Host) -> Vec<f64> {
    let supply: f64 = host.pcpus.iter().map(|pcpu| pcpu.supply.0).sum();
    let reference = Reference::new(host);
    let mut shares = vec![0.0; host.claimants.len()];
    loop {
        let mut totals = vec![0.0; host.groups.len()];
        let above = |index: usize| {
            std::iter::successors(host.claimants[index].parent, |group| {
                host.groups[*group].parent
            })
        };
        for (index, share) in shares.iter().enumerate() {
            above(index).for_each(|group| totals[group] += share);
        }
        let full = |group: usize| {
            host.groups[group]
                .cap
                .is_some_and(|cap| totals[group] + 1e-12 >= cap.0)
        };
        let grows: Vec<bool> = (0..shares.len())
            .map(|index| {
                shares[index] + 1e-12 < reference.limits[index] && !above(index).any(&full)
            })
            .collect();
        let group_grows = |group: usize| {
            (0..shares.len()).any(|index| grows[index] && above(index).any(|at| at == group))
        };
        let weights_at = |parent: Option<usize>| -> f64 {
            let groups = (0..host.groups.len())
                .filter(|group| host.groups[*group].parent == parent && group_grows(*group))
                .map(|group| host.groups[group].weight);
            let claimants = (0..shares.len())
                .filter(|index| host.claimants[*index].parent == parent && grows[*index])
                .map(|index| host.claimants[index].weight);
            groups.chain(claimants).sum()
        };
        let rates: Vec<f64> = (0..shares.len())
            .map(|index| {
                if !grows[index] {
                    return 0.0;
                }
                let claimant = &host.claimants[index];
                let own = claimant.weight / weights_at(claimant.parent);
                above(index)
                    .map(|group| host.groups[group].weight / weights_at(host.groups[group].parent))
                    .product::<f64>()
                    * own
            })
            .collect();
        let rate: f64 = rates.iter().sum();
        let left = supply - shares.iter().sum::<f64>();
        if rate == 0.0 || left < 1e-12 {
            return shares;
        }
        let mut time = left / rate;
        for (index, rate) in rates.iter().enumerate().filter(|(_, rate)| **rate > 0.0) {
            time = time.min((reference.limits[index] - shares[index]) / rate);
        }
        for (group, inner) in host.groups.iter().enumerate() {
            let rate: f64 = (0..shares.len())
                .filter(|index| above(*index).any(|at| at == group))
                .map(|index| rates[index])
                .sum();
            if let Some(cap) = inner.cap.filter(|_| rate > 0.0) {
                time = time.min((cap.0 - totals[group]) / rate);
            }
        }
        for (share, rate) in shares.iter_mut().zip(&rates) {
            *share += rate * time;
        }
    }
}
