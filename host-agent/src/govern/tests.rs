//! The governor in a closed loop with a fluid model of a host: VMs of CPU-bound threads, divided by weight among VMs (a cgroup
//! each) or by thread (all in one cgroup). Agents answer one tick late.

use super::*;
use crate::entitle::Engine;
use crate::model::{
    BoundBy, Claimant, Classes, Host, Pcpu, PcpuRates, Rule, Threads, Turn, VmRates,
};
use hint_proto::CpuSet;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;

const TICK: Duration = Duration::from_millis(100);

#[derive(Clone, Copy)]
struct Guest {
    vcpus: u32,
    threads: f64,
    weight: u32,
    agent: bool,
    min_usable: u32,
    enforced: bool,
    in_use: u32,
    usable: u32,
    /// It can't fold, and says so.
    fails: bool,
    /// What it says that it uses, if not the truth.
    claims: Option<u32>,
    /// pCPUs that it may use, if not all.
    cpus: Option<&'static str>,
    quota: Option<f64>,
    max_usable: Option<u32>,
    fixed: Option<u32>,
}

fn busy(vcpus: u32) -> Guest {
    Guest {
        vcpus,
        threads: f64::from(vcpus),
        weight: 100,
        agent: true,
        min_usable: 1,
        enforced: true,
        in_use: vcpus,
        usable: vcpus,
        fails: false,
        claims: None,
        cpus: None,
        quota: None,
        max_usable: None,
        fixed: None,
    }
}

struct Rig {
    governor: Governor,
    truth: Engine,
    now: Duration,
    pcpus: f64,
    host_work: f64,
    one_cgroup: bool,
    /// What the last guest loses to the first, of its share.
    skew: f64,
    guests: Vec<Guest>,
    last: Step,
    changes: u32,
}

impl Rig {
    fn new(pcpus: u32, guests: &[Guest]) -> Self {
        Self {
            governor: Governor::default(),
            truth: Engine::default(),
            now: Duration::from_secs(100),
            pcpus: f64::from(pcpus),
            host_work: 0.0,
            one_cgroup: false,
            skew: 0.0,
            guests: guests.to_vec(),
            last: Step::default(),
            changes: 0,
        }
    }

    fn tick(&mut self) {
        self.now += TICK;
        let wants: Vec<f64> = self
            .guests
            .iter()
            .map(|guest| guest.threads.min(f64::from(guest.in_use)))
            .collect();
        let (shares, idle) = self.share_out(&wants);
        let vms = wants
            .iter()
            .zip(&shares)
            .enumerate()
            .map(|(index, (wants, share))| {
                let rates = VmRates {
                    run: *share,
                    run_delay: Cpus(wants - share.0),
                    wanted: Cpus(*wants),
                    ..VmRates::default()
                };
                (id(index), Some(rates))
            });
        let tick = Tick {
            at: self.now,
            interval: TICK,
            pcpus: Some(idle),
            vms: vms.collect(),
            rejected: 0,
        };
        let inputs = self.inputs();
        self.last = self.governor.step(&tick, &whole(&inputs)).clone();
        for (guest, decision) in self.guests.iter_mut().zip(&self.last.decisions) {
            guest.in_use = if guest.fails {
                guest.vcpus
            } else {
                guest.usable
            };
            if guest.agent && guest.enforced {
                guest.usable = decision.usable.unwrap();
            }
            self.changes += u32::from(decision.changed);
        }
    }

    /// What each guest runs, and how idle the pCPUs are.
    fn share_out(&mut self, wants: &[f64]) -> (Vec<Cpus>, Vec<PcpuRates>) {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a small whole number
        let count = self.pcpus as u32;
        let mut host = Host {
            pcpus: (0..count)
                .map(|id| Pcpu {
                    id,
                    supply: Cpus(1.0),
                })
                .collect(),
            ..Host::default()
        };
        let claimant = |weight, wants, cap: Option<f64>, cpus: Option<&str>| Claimant {
            parent: None,
            weight,
            demand: Cpus(wants),
            shown: Cpus(wants),
            all: Cpus(wants),
            floor: Cpus::ZERO,
            cap: cap.map(Cpus),
            threads: Threads::Alike {
                count: 1000,
                cpus: cpus.map(|list| Arc::new(list.parse().unwrap())),
            },
        };
        for (wants, guest) in wants.iter().zip(&self.guests) {
            let weight = if self.one_cgroup {
                wants.max(0.001)
            } else {
                f64::from(guest.weight)
            };
            host.claimants
                .push(claimant(weight, *wants, guest.quota, guest.cpus));
        }
        host.claimants
            // Nothing, where it is nothing, connects no pCPUs.
            .push(claimant(
                100.0,
                self.host_work,
                None,
                (self.host_work == 0.0).then_some("0"),
            ));
        let division = self.truth.divide(&host);
        let mut shares: Vec<Cpus> = division
            .claimants
            .iter()
            .map(|found| found.map_or(Cpus::ZERO, |found| found.share))
            .collect();
        if let [first, .., last, _] = &mut shares[..] {
            let lost = (last.0 * self.skew).min(wants[0] - first.0);
            (*first, *last) = (Cpus(first.0 + lost), Cpus(last.0 - lost));
        }
        let mut idle: Vec<PcpuRates> = (0..count)
            .map(|pcpu| PcpuRates {
                pcpu,
                ..PcpuRates::default()
            })
            .collect();
        for class in &division.classes {
            let set = &division.sets[class.set];
            for pcpu in &class.pcpus {
                idle[*pcpu as usize].idle = Cpus((1.0 - set.given.0 / set.supply.0).max(0.0));
            }
        }
        (shares, idle)
    }

    fn inputs(&self) -> Vec<VmInput> {
        self.guests
            .iter()
            .enumerate()
            .map(|(index, guest)| input(index, guest, self.pcpus))
            .collect()
    }

    fn run(&mut self, seconds: f64) {
        let end = self.now + Duration::from_secs_f64(seconds);
        while self.now < end {
            self.tick();
        }
    }

    fn usable(&self) -> Vec<u32> {
        self.last
            .decisions
            .iter()
            .map(|decision| decision.usable.unwrap())
            .collect()
    }

    fn reasons(&self) -> Vec<Reason> {
        self.last.decisions.iter().map(Decision::reason).collect()
    }

    /// Seconds until all usable counts are as wanted.
    fn until(&mut self, wanted: &[u32]) -> f64 {
        for tick in 1..=100 {
            self.tick();
            if self.usable() == wanted {
                return f64::from(tick) / 10.0;
            }
        }
        panic!(
            "{:?} after 10 s, not {wanted:?}: {:?}",
            self.usable(),
            self.last
        );
    }
}

fn id(index: usize) -> VmId {
    VmId {
        pid: u32::try_from(index).unwrap() + 1,
        start_ticks: 7,
    }
}

fn input(index: usize, guest: &Guest, pcpus: f64) -> VmInput {
    // One that fails has the hint in `usable`, and could not do it.
    let agent = match guest {
        Guest { agent: false, .. } => AgentState::Absent,
        Guest { fails: true, .. } if guest.usable < guest.vcpus => AgentState::Fails,
        _ => AgentState::Works {
            in_use: Some(guest.claims.unwrap_or(guest.in_use)),
        },
    };
    let cpus: CpuSet = guest
        .cpus
        .map_or_else(|| format!("0-{}", pcpus - 1.0), str::to_owned)
        .parse()
        .unwrap();
    VmInput {
        id: id(index),
        threads: Some(Threads::Alike {
            count: guest.vcpus,
            cpus: Some(Arc::new(cpus)),
        }),
        parent: None,
        weight: f64::from(guest.weight),
        quota: guest.quota.map(Cpus),
        policy: Policy {
            min_usable: guest.min_usable,
            max_usable: guest.max_usable,
            fixed: guest.fixed,
            ..Policy::default()
        },
        enforced: guest.enforced,
        agent,
    }
}

fn whole(vms: &[VmInput]) -> Input<'_> {
    Input {
        groups: &[],
        vms,
        host_weight: 100.0,
    }
}

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
