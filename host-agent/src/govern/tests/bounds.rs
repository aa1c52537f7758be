//! What bounds and bends the rules: configuration, missing figures, CPU sets, quotas, time; and what holds whatever comes.

use super::super::*;
use super::rig::*;
use crate::model::{BoundBy, Classes, PcpuRates, Rule, Turn, VmRates};
use proptest::prelude::*;
use std::collections::BTreeMap;

#[test]
fn the_configuration_can_keep_a_guest_larger() {
    let mut kept = busy(4);
    kept.min_usable = 3;
    let mut rig = Rig::new(2, &[kept, busy(4)]);
    rig.run(5.0);
    assert_eq!(
        (rig.usable(), rig.reasons()[0]),
        (vec![3, 1], Reason::Policy)
    );
}

#[test]
fn what_can_not_be_judged_keeps_all_its_vcpus() {
    let mut unknown = input(0, &busy(4), 2.0);
    unknown.threads = None;
    let inputs = [unknown, input(1, &busy(4), 2.0)];
    let tick = Tick {
        at: TICK,
        interval: TICK,
        ..Tick::default()
    };
    let mut governor = Governor::default();
    let step = governor.step(&tick, &whole(&inputs));
    assert_eq!(
        (step.decisions[0].usable, step.decisions[0].reason()),
        (None, Reason::Unclassified)
    );
    assert_eq!(
        (step.decisions[1].usable, step.decisions[1].reason()),
        (Some(4), Reason::Unmeasured)
    );
    assert_eq!(
        (step.contention, step.supply, step.decisions[1].run),
        (Contention::Unknown, None, None)
    );
}

#[test]
fn figures_that_end_unfold_the_guest() {
    let mut rig = Rig::new(2, &[busy(4), busy(4)]);
    rig.until(&[1, 1]);
    rig.run(3.0);
    let inputs = rig.inputs();
    let busy = |pcpu| PcpuRates {
        pcpu,
        ..PcpuRates::default()
    };
    let mut step = Step::default();
    for _ in 0..30 {
        rig.now += TICK;
        let known = VmRates {
            run: Cpus(1.0),
            wanted: Cpus(1.0),
            ..VmRates::default()
        };
        let vms = BTreeMap::from([(id(0), None), (id(1), Some(known))]);
        let tick = Tick {
            at: rig.now,
            interval: TICK,
            pcpus: Some(vec![busy(0), busy(1)]),
            vms,
            rejected: 0,
        };
        step = rig.governor.step(&tick, &whole(&inputs)).clone();
    }
    assert_eq!(
        (step.decisions[0].usable, step.decisions[0].reason()),
        (Some(4), Reason::Unmeasured)
    );
    assert_eq!(
        step.decisions[1].usable,
        Some(1),
        "the other VM is judged as before"
    );
}

#[test]
fn nothing_is_folded_in_the_first_second() {
    let mut rig = Rig::new(2, &[busy(4), busy(4)]);
    rig.run(0.9);
    assert_eq!(
        (rig.usable(), rig.reasons()[0]),
        (vec![4, 4], Reason::WarmUp)
    );
}

#[test]
fn a_plain_overload_is_folded_within_300_ms() {
    let mut idle = busy(8);
    idle.threads = 0.0;
    let mut rig = Rig::new(8, &[idle; 4]);
    rig.run(10.0);
    rig.guests.iter_mut().for_each(|guest| guest.threads = 8.0);
    assert!(rig.until(&[2, 2, 2, 2]) <= 0.3);

    let (mut large, mut small) = (busy(96), busy(96));
    (large.weight, large.threads, small.threads) = (200, 0.0, 0.0);
    let mut rig = Rig::new(96, &[large, small]);
    rig.run(10.0);
    rig.guests.iter_mut().for_each(|guest| guest.threads = 96.0);
    assert!(rig.until(&[64, 32]) <= 0.3);
}

#[test]
fn one_guest_with_more_vcpus_than_its_pcpus_is_folded_to_them() {
    let mut rig = Rig::new(6, &[busy(8)]);
    rig.run(5.0);
    assert_eq!(rig.usable(), [6]);
}

#[test]
fn a_guest_with_as_many_vcpus_as_pcpus_gets_none_for_running_short() {
    let beside = Guest {
        agent: false,
        weight: 1,
        ..busy(1)
    };
    let mut rig = Rig::new(2, &[beside, busy(4)]);
    rig.skew = 0.1;
    for _ in 0..20 {
        rig.run(1.0);
        assert!(
            rig.usable()[1] == 2 || rig.now < Duration::from_secs(102),
            "{:?}",
            rig.last
        );
    }
}

#[test]
fn a_fold_after_other_loads_have_ended_comes_as_fast_as_the_first() {
    let mut rig = Rig::new(4, &[busy(4); 4]);
    for round in 0..4 {
        rig.guests.iter_mut().for_each(|guest| guest.threads = 4.0);
        assert!(rig.until(&[1; 4]) <= 1.3, "round {round}");
        rig.run(6.0);
        rig.guests.iter_mut().for_each(|guest| guest.threads = 0.0);
        rig.run(6.0);
        assert_eq!(rig.usable(), [4; 4], "round {round}");
    }
}

#[test]
fn each_set_of_pcpus_has_its_own_contention() {
    let on = |cpus, vcpus, threads| Guest {
        cpus: Some(cpus),
        threads,
        ..busy(vcpus)
    };
    let mut rig = Rig::new(
        8,
        &[
            on("0-3", 4, 4.0),
            on("0-3", 4, 4.0),
            on("4-7", 4, 1.0),
            on("4-7", 8, 0.5),
        ],
    );
    rig.run(20.0);
    assert_eq!(rig.usable(), [2, 2, 4, 8], "{:?}", rig.reasons());
    assert_eq!(rig.last.decisions[2].contention, Contention::None);
    assert_eq!(rig.last.decisions[0].contention, Contention::Contended);
    let before = rig.changes;
    rig.run(600.0);
    assert_eq!(rig.changes, before);
}

#[test]
fn a_chain_of_overlapping_sets_settles() {
    let on = |cpus, vcpus| Guest {
        cpus: Some(cpus),
        ..busy(vcpus)
    };
    let mut rig = Rig::new(6, &[on("0-1", 4), on("0-5", 8), on("4-5", 4)]);
    rig.run(20.0);
    assert_eq!(rig.usable(), [2, 2, 2]);
    let before = rig.changes;
    rig.run(600.0);
    assert_eq!(rig.changes, before);
}

#[test]
fn a_guest_that_uses_up_its_quota_is_folded_to_it_without_contention() {
    let mut capped = busy(8);
    capped.quota = Some(2.0);
    let mut resting = capped;
    resting.threads = 0.5;
    let mut rig = Rig::new(16, &[capped, resting]);
    rig.run(5.0);
    assert_eq!(rig.usable(), [2, 8]);
    assert_eq!(rig.reasons(), [Reason::Quota, Reason::Uncontended]);
    rig.guests[0].threads = 0.2;
    rig.run(5.0);
    assert_eq!(rig.usable(), [8, 8], "it rests");
    assert!(rig.changes <= 2);
}

#[test]
fn the_configuration_can_bound_and_fix_usable() {
    let mut bound = busy(8);
    bound.max_usable = Some(6);
    let mut fixed = busy(8);
    fixed.fixed = Some(3);
    let mut rig = Rig::new(64, &[bound, fixed]);
    rig.run(3.0);
    assert_eq!(rig.usable(), [6, 3]);
    assert_eq!(rig.reasons(), [Reason::Policy, Reason::Policy]);
    assert_eq!(rig.changes, 2);
    let mut rig = Rig::new(4, &[bound, busy(8)]);
    rig.run(5.0);
    assert_eq!(
        (rig.usable(), rig.reasons()[0]),
        (vec![2, 2], Reason::Contention)
    );
}

#[test]
fn a_guest_whose_load_comes_and_goes_is_named_and_its_neighbours_stay_folded() {
    let mut rig = Rig::new(8, &[busy(8), busy(8), busy(8)]);
    let mut changes = 0;
    for tick in 0..6000 {
        if tick == 1200 {
            changes = rig.changes;
        }
        rig.guests[2].threads = if tick % 3 == 0 {
            8.0
        } else if tick % 3 == 1 {
            4.0
        } else {
            0.0
        };
        rig.tick();
    }
    assert_eq!((rig.reasons()[2], rig.usable()[2]), (Reason::Sleeper, 8));
    assert!(
        rig.usable()[0] < 8 && rig.usable()[1] < 8,
        "{:?}",
        rig.usable()
    );
    assert!(
        rig.last.decisions[2]
            .why
            .to_string()
            .contains("comes and goes")
    );
    assert!(
        rig.changes - changes <= 16,
        "{} changes",
        rig.changes - changes
    );
}

#[test]
fn the_grounds_say_what_would_change_the_decision() {
    let mut rig = Rig::new(4, &[busy(4), busy(4)]);
    rig.run(5.0);
    let why = rig.last.decisions[0].why;
    assert_eq!(why.rule, Rule::Share { more: 0 });
    assert_eq!(why.target.unwrap().1, BoundBy::Others);
    let [
        Some(Turn::TargetFrom { target, usable: 3 }),
        Some(Turn::Idle(idle)),
    ] = why.turns
    else {
        panic!("{why:?}");
    };
    assert!((target.0 - 2.1).abs() < 0.01 && (idle.0 - 0.25).abs() < 0.01);
    assert!(
        why.to_string()
            .contains("It changes with a share of 2.10 or more (3 vCPUs)")
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_comes_usable_is_in_range_and_classes_add_up(
        pcpus in 1u32..40,
        one_cgroup: bool,
        host_work in 0.0..50.0f64,
        guests in proptest::collection::vec((1u32..40, 0.0..50.0f64, 1u32..10_000, any::<bool>(), 1u32..50), 0..12),
    ) {
        let guests: Vec<Guest> = guests.iter().map(|(vcpus, threads, weight, agent, min_usable)| Guest {
            threads: *threads, weight: *weight, agent: *agent, min_usable: *min_usable, ..busy(*vcpus)
        }).collect();
        let mut rig = Rig::new(pcpus, &guests);
        rig.one_cgroup = one_cgroup;
        rig.host_work = host_work;
        for _ in 0..100 {
            rig.tick();
            for (guest, decision) in rig.guests.iter().zip(&rig.last.decisions) {
                let usable = decision.usable.unwrap();
                prop_assert!((1..=guest.vcpus).contains(&usable));
                let Classes { full, partial, avoided } = decision.classes;
                prop_assert_eq!(full + partial + avoided, guest.vcpus);
                prop_assert_eq!(full + partial, usable);
                prop_assert!(guest.agent || usable == guest.vcpus);
            }
        }
    }

    #[test]
    fn constant_cpu_bound_load_settles_and_wastes_nothing(
        pcpus in 2u32..32,
        guests in proptest::collection::vec((1u32..16, 1u32..1000), 1..8),
    ) {
        let guests: Vec<Guest> = guests.iter().map(|(vcpus, weight)| Guest { weight: *weight, ..busy(*vcpus) }).collect();
        let mut rig = Rig::new(pcpus, &guests);
        rig.run(30.0);
        let before = rig.changes;
        rig.run(120.0);
        prop_assert!(rig.changes <= before, "{} changes on constant load: {:?}", rig.changes - before, rig.last);
        let wanted: f64 = guests.iter().map(|guest| guest.threads).sum();
        let busy = rig.pcpus - rig.last.idle.unwrap().0;
        prop_assert!(busy >= 0.98 * wanted.min(rig.pcpus), "{busy} of {} busy: {:?}", rig.pcpus, rig.last);
    }
}
