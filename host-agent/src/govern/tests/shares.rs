//! Shares, and whose they are: folding, unfolding, agents that don't, loads that come and go.

use super::super::*;
use super::rig::*;
use crate::model::Classes;

#[test]
fn two_busy_guests_fold_to_their_halves_and_stay() {
    let mut rig = Rig::new(2, &[busy(4), busy(4)]);
    assert!(rig.until(&[1, 1]) <= 1.2);
    assert_eq!(rig.reasons(), [Reason::Contention, Reason::Contention]);
    assert_eq!(
        rig.last.decisions[0].classes,
        Classes {
            full: 1,
            partial: 0,
            avoided: 3
        }
    );
    rig.run(600.0);
    assert_eq!((rig.usable(), rig.changes), (vec![1, 1], 2));
    let explanation = rig.last.decisions[0].why.to_string();
    assert!(
        explanation.contains(
            "its share gives 1 of 4 vCPUs; CPUs wanted 8.00 of 2.00, share 1.00 at weight 100"
        ),
        "{explanation}"
    );
}

#[test]
fn classes_do_not_tremble_with_the_host_s_own_work() {
    let mut rig = Rig::new(2, &[busy(4), busy(4)]);
    rig.until(&[1, 1]);
    rig.run(5.0);
    let before = rig.last.decisions[0].classes;
    for tick in 0..300 {
        rig.host_work = if tick % 3 == 0 { 0.06 } else { 0.01 };
        rig.tick();
        assert_eq!(rig.last.decisions[0].classes, before, "tick {tick}");
    }
}

#[test]
fn a_guest_takes_what_its_neighbour_leaves_and_gives_it_back() {
    let mut rig = Rig::new(2, &[busy(4), busy(4)]);
    rig.until(&[1, 1]);
    rig.run(5.0);
    rig.guests[1].threads = 0.05;
    assert!(rig.until(&[2, 1]) <= 0.5);
    rig.run(20.0);
    assert_eq!(
        rig.usable(),
        [2, 4],
        "the pool is still full, and who rests is left alone"
    );
    rig.guests[1].threads = 4.0;
    assert!(rig.until(&[1, 1]) <= 1.5);
    rig.guests[0].threads = 0.05;
    rig.guests[1].threads = 0.05;
    assert!(rig.until(&[4, 4]) <= 4.0);
    assert_eq!(rig.reasons(), [Reason::Uncontended, Reason::Uncontended]);
}

#[test]
fn no_pcpu_idles_for_the_sake_of_rounding() {
    // 8 pCPUs for 7 guests are 1.14 each: one each would leave a pCPU idle.
    let mut rig = Rig::new(8, &[busy(8); 7]);
    rig.run(20.0);
    assert_eq!(rig.usable(), [2; 7]);
    assert!(rig.last.idle.unwrap().0 < 0.01);
    let mut rig = Rig::new(15, &[busy(8); 7]);
    rig.run(20.0);
    assert_eq!(rig.usable(), [3; 7]);
}

#[test]
fn weights_count() {
    let mut heavy = busy(8);
    heavy.weight = 300;
    let mut rig = Rig::new(10, &[heavy, busy(8), busy(8)]);
    rig.run(10.0);
    assert_eq!(rig.usable(), [6, 2, 2]);
}

#[test]
fn a_pool_that_holds_all_vcpus_is_not_contended() {
    let mut rig = Rig::new(8, &[busy(4), busy(4)]);
    rig.run(30.0);
    assert_eq!((rig.usable(), rig.changes), (vec![4, 4], 0));
    assert_eq!(rig.last.contention, Contention::None);
}

#[test]
fn an_exactly_full_pool_is_not_folded() {
    // A loop on each of two vCPUs of each guest: all pCPUs are busy and hardly anybody waits.
    let mut guests = [busy(4), busy(4)];
    guests.iter_mut().for_each(|guest| guest.threads = 2.05);
    let mut rig = Rig::new(4, &guests);
    rig.run(60.0);
    assert_eq!((rig.usable(), rig.changes), (vec![4, 4], 0));
}

#[test]
fn a_guest_without_an_agent_is_counted_and_left_alone() {
    let mut stranger = busy(4);
    stranger.agent = false;
    let mut rig = Rig::new(3, &[busy(4), busy(4), stranger]);
    rig.run(10.0);
    assert_eq!(rig.usable(), [1, 1, 4]);
    assert_eq!(
        rig.reasons(),
        [Reason::Contention, Reason::Contention, Reason::NoAgent]
    );
    let explanation = rig.last.decisions[2].why.to_string();
    assert!(
        explanation.contains("no agent is connected") && explanation.contains("share 1.00"),
        "{explanation}"
    );
}

#[test]
fn an_agent_that_fails_is_left_alone_for_longer_and_longer() {
    let mut rig = Rig::new(2, &[busy(4), busy(4)]);
    rig.guests[0].fails = true;
    rig.run(600.0);
    assert_eq!(rig.usable()[1], 1);
    let Decision { folds, unfolds, .. } = rig.last.decisions[0];
    assert!(
        (2..=5).contains(&folds),
        "{folds} folds and {unfolds} unfolds in ten minutes"
    );
    assert_eq!((rig.usable()[0], rig.reasons()[0]), (4, Reason::NoAgent));
    let explanation = rig.last.decisions[0].why.to_string();
    assert!(explanation.contains("could not apply"), "{explanation}");
}

#[test]
fn a_guest_that_claims_to_use_few_vcpus_gets_no_more_for_it() {
    // Due 7 of 8 pCPUs, and a neighbour that wants one and says that it may use only that one.
    let mut heavy = busy(8);
    heavy.weight = 700;
    let mut liar = busy(8);
    liar.threads = 1.0;
    let mut rig = Rig::new(8, &[heavy, liar]);
    rig.guests[1].claims = Some(1);
    rig.run(120.0);
    assert!(rig.usable()[0] >= 7, "{:?}", rig.last);
    assert!(rig.changes <= 6, "{} changes", rig.changes);
    let ran = rig.last.decisions[0].run.unwrap();
    assert!(ran.0 > 6.99, "its neighbour ran {ran} of 7");
}

#[test]
fn work_of_the_host_takes_its_share_and_no_more() {
    let mut rig = Rig::new(4, &[busy(4), busy(4), busy(4)]);
    rig.host_work = 4.0;
    rig.run(60.0);
    assert_eq!(rig.usable(), [1, 1, 1], "a quarter each");
}

#[test]
fn a_guest_that_loses_by_folding_is_unfolded_again() {
    let mut greedy = busy(8);
    greedy.agent = false;
    let mut rig = Rig::new(4, &[busy(8), greedy]);
    rig.one_cgroup = true;
    rig.run(1.2);
    assert_eq!(rig.usable()[0], 2);
    rig.run(4.0);
    assert_eq!((rig.usable()[0], rig.reasons()[0]), (8, Reason::Starved));
    let before = rig.changes;
    rig.run(50.0);
    assert_eq!(rig.changes, before, "spared for a minute");
    rig.run(600.0);
    assert!(
        rig.changes <= before + 10,
        "{} changes in ten minutes",
        rig.changes - before
    );
}

#[test]
fn a_folded_guest_that_runs_a_little_less_than_it_is_due_gets_a_vcpu_more() {
    // One that does not fold comes in between.
    let mut other = busy(8);
    other.agent = false;
    let mut rig = Rig::new(8, &[other, busy(8)]);
    rig.run(3.0);
    assert_eq!(rig.usable(), [8, 4]);
    rig.skew = 0.05;
    rig.run(5.0);
    assert_eq!(rig.usable(), [8, 5]);
    rig.run(60.0);
    assert_eq!(rig.usable(), [8, 5], "once, though it did not help");
    let mut rig = Rig::new(2, &[other, busy(4)]);
    rig.skew = 0.15;
    rig.run(60.0);
    assert_eq!(rig.usable(), [8, 1], "one vCPU stays one");
}

#[test]
fn a_guest_that_wants_less_than_its_share_is_not_folded() {
    let mut sleeper = busy(4);
    sleeper.threads = 0.8;
    let mut rig = Rig::new(4, &[sleeper, busy(8), busy(8)]);
    rig.run(30.0);
    assert_eq!(rig.reasons()[0], Reason::ShareCovers);
    assert_eq!(rig.usable()[0], 4);
}

#[test]
fn a_load_that_just_began_is_no_sleeper() {
    let mut guest = busy(4);
    guest.threads = 0.0;
    let mut rig = Rig::new(2, &[guest, guest]);
    rig.run(5.0);
    // Never at nine tenths of its vCPUs, so only what it ran tells it from a sleeper.
    rig.guests.iter_mut().for_each(|guest| guest.threads = 3.4);
    assert!(rig.until(&[1, 1]) <= 0.7);
}

#[test]
fn an_idle_guest_gets_its_share_when_it_wakes() {
    let mut idle = busy(8);
    idle.threads = 0.02;
    let mut rig = Rig::new(8, &[busy(8), busy(8), idle]);
    rig.run(10.0);
    assert_eq!(rig.usable()[0], 4);
    rig.guests[2].threads = 8.0;
    rig.run(1.0);
    assert!(rig.usable()[2] >= 3);
    rig.run(3.0);
    assert_eq!(rig.usable(), [3, 3, 3]);
}

#[test]
fn what_was_only_shown_counts_against_no_budget() {
    let mut guests = [busy(4), busy(4)];
    guests.iter_mut().for_each(|guest| guest.enforced = false);
    let mut rig = Rig::new(2, &guests);
    for _ in 0..5 {
        rig.guests.iter_mut().for_each(|guest| guest.threads = 4.0);
        rig.run(4.0);
        rig.guests.iter_mut().for_each(|guest| guest.threads = 0.0);
        rig.run(4.0);
    }
    rig.guests
        .iter_mut()
        .for_each(|guest| (guest.threads, guest.enforced) = (4.0, true));
    assert!(rig.until(&[1, 1]) <= 1.0);
}

#[test]
fn a_guest_that_wants_its_vcpus_and_gets_little_is_no_sleeper() {
    // The host lets it run half its share, as real schedulers do for seconds at a time.
    let mut rig = Rig::new(2, &[busy(4), busy(4)]);
    rig.skew = 0.5;
    rig.run(3.0);
    assert_eq!(rig.usable(), [1, 1]);
}
