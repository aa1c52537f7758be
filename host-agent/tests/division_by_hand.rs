//! The division of pCPU time on small hosts, computed by hand.

use std::sync::Arc;

use hint_broker::entitle::{Bound, ClassId, Division, Engine, Fault, FaultKind, Place};
use hint_broker::model::{Claimant, Cpus, Group, Host, Pcpu, Threads};
use hint_proto::CpuSet;

fn set(list: &str) -> Arc<CpuSet> {
    Arc::new(list.parse().expect("a CPU list"))
}

/// A VM that wants all its vCPUs.
fn vm(weight: f64, vcpus: u32, cpus: Option<&str>) -> Claimant {
    Claimant {
        parent: None,
        weight,
        demand: Cpus::from(vcpus),
        shown: Cpus::from(vcpus),
        all: Cpus::from(vcpus),
        floor: Cpus::ZERO,
        cap: None,
        threads: Threads::Alike {
            count: vcpus,
            cpus: cpus.map(set),
        },
    }
}

fn wants(demand: f64, vm: Claimant) -> Claimant {
    Claimant {
        demand: Cpus(demand),
        shown: Cpus(demand),
        ..vm
    }
}

fn below(parent: usize, vm: Claimant) -> Claimant {
    Claimant {
        parent: Some(parent),
        ..vm
    }
}

fn host(pcpus: u32, groups: Vec<Group>, claimants: Vec<Claimant>) -> Host {
    let supply = Cpus(1.0);
    Host {
        pcpus: (0..pcpus).map(|id| Pcpu { id, supply }).collect(),
        groups,
        claimants,
    }
}

fn divide(host: &Host) -> Division {
    Engine::default().divide(host).clone()
}

fn shares(division: &Division) -> Vec<f64> {
    let share = |found: &Option<hint_broker::entitle::Entitlement>| {
        found.map_or(-1.0, |found| found.share.0)
    };
    division.claimants.iter().map(share).collect()
}

#[track_caller]
fn assert_shares(host: &Host, wanted: &[f64]) -> Division {
    let division = divide(host);
    let found = shares(&division);
    let near = found.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-9);
    assert!(
        near && found.len() == wanted.len(),
        "{found:?}, not {wanted:?}"
    );
    division
}

fn target(division: &Division, index: usize) -> f64 {
    division.claimants[index].expect("takes part").target.0
}

fn bounds(division: &Division, index: usize) -> (Bound, Bound) {
    let found = division.claimants[index].expect("takes part");
    (found.share_bound, found.target_bound)
}

#[test]
fn more_vcpus_than_pcpus_are_demand_above_supply() {
    let division = assert_shares(&host(4, vec![], vec![vm(100.0, 8, None)]), &[4.0]);
    assert_eq!(bounds(&division, 0).0, Bound::Cpuset(Cpus(4.0)));
    assert!(division.sets[0].demand_exceeds_supply());
}

#[test]
fn weights_divide_one_pool() {
    let claimants = vec![vm(300.0, 8, None), vm(100.0, 8, None), vm(100.0, 8, None)];
    let division = assert_shares(&host(8, vec![], claimants), &[4.8, 1.6, 1.6]);
    assert!(
        matches!(bounds(&division, 1).0, Bound::Level { level } if (level - 0.016).abs() < 1e-12)
    );
    assert_eq!(division.sets.len(), 1);
    assert!(division.sets[0].demand_exceeds_supply());
}

#[test]
fn a_weight_that_one_vcpu_can_not_use_goes_to_the_others() {
    let claimants = vec![vm(10_000.0, 1, None), vm(1.0, 4, None), vm(1.0, 4, None)];
    let division = assert_shares(&host(4, vec![], claimants), &[1.0, 1.5, 1.5]);
    assert_eq!(bounds(&division, 0).0, Bound::Threads(Cpus(1.0)));
}

#[test]
fn a_target_is_what_an_idle_neighbour_leaves() {
    let claimants = vec![vm(100.0, 4, None), wants(0.1, vm(100.0, 4, None))];
    let division = assert_shares(&host(2, vec![], claimants), &[1.9, 0.1]);
    assert!((target(&division, 0) - 1.9).abs() < 1e-9);
    assert!((target(&division, 1) - 1.0).abs() < 1e-9);
    assert_eq!(bounds(&division, 1).0, Bound::Demand(Cpus(0.1)));
    assert!(matches!(bounds(&division, 1).1, Bound::Level { .. }));
}

#[test]
fn groups_share_by_their_own_weights() {
    // One tenant with one VM and one with three, beside a service that wants little.
    let groups = vec![Group::default(), Group::default()];
    let claimants = vec![
        below(0, vm(100.0, 8, None)),
        below(1, vm(100.0, 8, None)),
        below(1, vm(200.0, 8, None)),
        below(1, wants(0.5, vm(100.0, 8, None))),
        wants(1.0, vm(100.0, 8, None)),
    ];
    // 8 - 1 is left for the tenants, 3.5 each; of the second's, 0.5 is taken and 3 is divided 1 : 2.
    let division = assert_shares(&host(8, groups, claimants), &[3.5, 1.0, 2.0, 0.5, 1.0]);
    // The third of the second tenant's VMs would get a quarter of 3.5; the service a third of 8.
    assert!((target(&division, 3) - 3.5 / 4.0).abs() < 1e-9);
    assert!((target(&division, 4) - 8.0 / 3.0).abs() < 1e-9);
}

#[test]
fn a_group_stops_at_its_quota() {
    let groups = vec![Group {
        cap: Some(Cpus(1.0)),
        ..Group::default()
    }];
    let claimants = vec![
        below(0, vm(300.0, 4, None)),
        below(0, vm(100.0, 4, None)),
        vm(100.0, 4, None),
    ];
    let division = assert_shares(&host(4, groups, claimants), &[0.75, 0.25, 3.0]);
    let quota = Bound::GroupQuota {
        group: 0,
        cap: Cpus(1.0),
    };
    assert_eq!(bounds(&division, 0), (quota, quota));
}

#[test]
fn what_a_member_can_not_use_of_a_groups_quota_goes_to_the_others() {
    // Both members may have 2 of 4, but the first has half of pCPU 0 only.
    let groups = vec![Group {
        cap: Some(Cpus(4.0)),
        ..Group::default()
    }];
    let claimants = vec![
        below(0, vm(100.0, 4, Some("0-1"))),
        below(0, vm(100.0, 8, Some("2-7"))),
        vm(100.0, 8, Some("0-1")),
        vm(100.0, 8, Some("0-1")),
        vm(100.0, 8, Some("0-1")),
    ];
    let division = divide(&host(8, groups, claimants));
    let shares = shares(&division);
    assert!((shares[0] + shares[1] - 4.0).abs() < 1e-9, "{shares:?}");
    assert!(shares[0] < 0.5, "{shares:?}");
}

#[test]
fn a_vm_is_bound_by_its_own_quota_or_cpuset() {
    let capped = Claimant {
        cap: Some(Cpus(2.0)),
        ..vm(100.0, 8, None)
    };
    let claimants = vec![capped, vm(100.0, 8, Some("0-2"))];
    let division = assert_shares(&host(8, vec![], claimants), &[2.0, 3.0]);
    assert_eq!(bounds(&division, 0).1, Bound::Quota(Cpus(2.0)));
    assert_eq!(bounds(&division, 1).1, Bound::Cpuset(Cpus(3.0)));
    assert!(division.sets.iter().all(|set| set.level.is_none()));
}

#[test]
fn full_pcpus_hold_up_only_those_confined_to_them() {
    // A and B crowd 0-3; C has 4-7 and D everything.
    let claimants = vec![
        vm(100.0, 8, Some("0-3")),
        vm(100.0, 8, Some("0-3")),
        wants(1.0, vm(100.0, 8, Some("4-7"))),
        wants(2.0, vm(100.0, 8, None)),
    ];
    let division = assert_shares(&host(8, vec![], claimants), &[2.0, 2.0, 1.0, 2.0]);
    assert_eq!(division.classes.len(), 2);
    let (full, idle) = (&division.sets[0], &division.sets[1]);
    assert_eq!((&full.classes, &idle.classes), (&vec![0], &vec![1]));
    assert!(full.level.is_some() && full.demand_exceeds_supply());
    assert!((full.demand.0 - 16.0).abs() < 1e-9);
    assert!(idle.level.is_none() && !idle.demand_exceeds_supply());
    assert!((idle.demand.0 - 3.0).abs() < 1e-9 && (idle.given.0 - 3.0).abs() < 1e-9);
    let set = |index: usize| division.claimants[index].unwrap().set;
    assert_eq!([set(0), set(1), set(2), set(3)], [0, 0, 1, 1]);
    // C and D could both take what is idle; D would not get more of 0-3 than the others there.
    assert!(
        (target(&division, 2) - 2.0).abs() < 1e-9,
        "{}",
        target(&division, 2)
    );
    assert!(
        (target(&division, 3) - 3.0).abs() < 1e-9,
        "{}",
        target(&division, 3)
    );
}

#[test]
fn overlapping_sets_even_out_as_far_as_they_can() {
    // A {0,1}, B {0-5}, C {4,5}, all with six vCPUs: two each. With B twice as heavy, A and C are full at 2 and B has 2.
    let claimants = vec![
        vm(100.0, 6, Some("0,1")),
        vm(100.0, 6, Some("0-5")),
        vm(100.0, 6, Some("4,5")),
    ];
    assert_shares(&host(6, vec![], claimants.clone()), &[2.0, 2.0, 2.0]);
    let mut heavier = claimants;
    heavier[1].weight = 400.0;
    // Level 0.01: A and C one each, B four.
    assert_shares(&host(6, vec![], heavier), &[1.0, 4.0, 1.0]);
}

#[test]
fn vcpus_pinned_one_by_one_get_no_more_than_their_pcpus() {
    let pinned = |lists: &[&str]| Claimant {
        threads: Threads::Pinned(lists.iter().map(|list| set(list)).collect()),
        ..vm(100.0, u32::try_from(lists.len()).unwrap(), None)
    };
    // Two vCPUs on pCPU 0 and one on pCPU 1, where another VM is too.
    let claimants = vec![pinned(&["0", "0", "1"]), pinned(&["1"])];
    let division = assert_shares(&host(2, vec![], claimants), &[1.0, 1.0]);
    assert_eq!(division.classes.len(), 2);
    let claimants = vec![
        pinned(&["0", "0", "1"]),
        pinned(&["1", "1"]),
        pinned(&["0"]),
    ];
    let division = assert_shares(&host(2, vec![], claimants), &[2.0 / 3.0; 3]);
    assert_eq!(division.sets.len(), 1);
    let split: Vec<(usize, Cpus)> = division.split(0).to_vec();
    assert!((split.iter().map(|part| part.1.0).sum::<f64>() - 2.0 / 3.0).abs() < 1e-9);
}

#[test]
fn reservations_come_first_and_are_scaled_where_they_can_not_be_kept() {
    let reserved = |floor: f64, vm: Claimant| Claimant {
        floor: Cpus(floor),
        ..vm
    };
    let claimants = vec![
        reserved(3.0, vm(100.0, 4, None)),
        vm(100.0, 4, None),
        reserved(2.0, wants(0.0, vm(100.0, 4, None))),
    ];
    let division = assert_shares(&host(4, vec![], claimants), &[3.0, 1.0, 0.0]);
    assert_eq!(bounds(&division, 0).0, Bound::Reservation(Cpus(3.0)));
    assert!(division.faults.is_empty());
    assert!((target(&division, 2) - 4.0 * 2.0 / 5.0).abs() < 1e-9);
    let claimants = vec![
        reserved(4.0, vm(100.0, 4, None)),
        reserved(2.0, vm(100.0, 4, None)),
        vm(100.0, 4, None),
    ];
    let division = assert_shares(&host(4, vec![], claimants), &[8.0 / 3.0, 4.0 / 3.0, 0.0]);
    let fault = division.faults[0];
    assert_eq!(fault.place, Place::Claimant(0));
    assert!(
        matches!(fault.kind, FaultKind::Reservation { promised, kept } if promised == 4.0 && (kept - 8.0 / 3.0).abs() < 1e-9),
        "{fault}"
    );
}

#[test]
fn bad_input_harms_nobody_else() {
    let good = vec![vm(100.0, 4, None), wants(0.5, vm(100.0, 4, None))];
    let bad: Vec<(Claimant, FaultKind)> = vec![
        (vm(100.0, 0, None), FaultKind::NoThreads),
        (vm(100.0, 4, Some("8-11")), FaultKind::NoPcpus),
        (vm(100.0, 4, Some("")), FaultKind::NoPcpus),
        (below(9, vm(100.0, 4, None)), FaultKind::Parent(9)),
        (below(0, vm(100.0, 4, None)), FaultKind::Cut(0)),
        (below(2, vm(100.0, 4, None)), FaultKind::Cut(2)),
    ];
    let groups = vec![
        Group {
            parent: Some(1),
            ..Group::default()
        },
        Group {
            parent: Some(0),
            ..Group::default()
        },
        Group {
            parent: Some(7),
            ..Group::default()
        },
    ];
    for (claimant, kind) in bad {
        let mut claimants = good.clone();
        claimants.push(claimant);
        let division = assert_shares(&host(2, groups.clone(), claimants), &[1.5, 0.5, -1.0]);
        let fault = Fault {
            place: Place::Claimant(2),
            kind,
        };
        assert!(division.faults.contains(&fault), "{:?}", division.faults);
        for (place, kind) in [
            (Place::Group(0), FaultKind::Cycle),
            (Place::Group(1), FaultKind::Cycle),
            (Place::Group(2), FaultKind::Parent(7)),
        ] {
            assert!(
                division.faults.contains(&Fault { place, kind }),
                "{:?}",
                division.faults
            );
        }
    }
}

#[test]
fn figures_that_are_none_count_as_not_given() {
    for bad in [f64::NAN, -1.0, f64::NEG_INFINITY] {
        let strange = Claimant {
            demand: Cpus(bad),
            floor: Cpus(bad),
            cap: Some(Cpus(bad)),
            shown: Cpus(bad),
            ..vm(100.0, 4, None)
        };
        let claimants = vec![vm(100.0, 4, None), strange];
        let division = assert_shares(&host(2, vec![], claimants), &[2.0, 0.0]);
        assert_eq!(division.faults.len(), 3);
        assert!((target(&division, 1) - 1.0).abs() < 1e-9);
        assert!((division.sets[0].demand.0 - 4.0).abs() < 1e-9);
    }
    for bad in [f64::NAN, 0.0, -3.0, f64::INFINITY] {
        let claimants = vec![vm(1.0, 4, None), vm(bad, 4, None)];
        let division = assert_shares(&host(2, vec![], claimants), &[1.0, 1.0]);
        assert!(matches!(division.faults[0].kind, FaultKind::Weight(_)));
    }
    let mut dead = host(2, vec![], vec![vm(100.0, 4, None)]);
    dead.pcpus[0].supply = Cpus(f64::NAN);
    dead.pcpus[1].supply = Cpus(7.0);
    let division = assert_shares(&dead, &[1.0]);
    assert_eq!(division.faults[0].place, Place::Pcpu(0));
    dead.pcpus[1].id = 0;
    let division = assert_shares(&dead, &[0.0]);
    assert_eq!(division.faults[0].kind, FaultKind::Twice);
    assert_eq!(divide(&Host::default()), Division::default());
}

#[test]
fn classes_keep_their_identity_while_demands_change() {
    let mut now = host(
        8,
        vec![],
        vec![vm(100.0, 4, Some("2-5")), vm(100.0, 4, Some("4-7"))],
    );
    let mut engine = Engine::default();
    let ids = |division: &Division| -> Vec<ClassId> {
        division.classes.iter().map(|class| class.id).collect()
    };
    let before = ids(engine.divide(&now));
    assert_eq!(before, [ClassId(0), ClassId(2), ClassId(4), ClassId(6)]);
    now.claimants[0].demand = Cpus(0.1);
    let division = engine.divide(&now);
    assert_eq!(ids(division), before);
    assert_eq!(division.classes[2].pcpus, [4, 5]);
    assert_eq!(division.split(1).len(), 2);
}
