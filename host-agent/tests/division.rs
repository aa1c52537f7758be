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
    assert_sets_add_up(host, &division);
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
    #![proptest_config(ProptestConfig::with_cases(300))]

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
    fn everything(host in host(Kinds { groups: true, cpusets: true, pinning: true, quotas: true, floors: true, uneven_supply: true })) {
        assert_right(&host);
    }
}
