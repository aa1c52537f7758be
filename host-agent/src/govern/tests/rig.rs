//! The governor in a closed loop with a fluid model of a host: VMs of CPU-bound threads, divided by weight among VMs (a cgroup
//! each) or by thread (all in one cgroup). Agents answer one tick late.

use std::sync::Arc;
use std::time::Duration;

use super::super::*;
use crate::entitle::Engine;
use crate::model::{Claimant, Host, Pcpu, PcpuRates, Threads, VmRates};
use hint_proto::CpuSet;

pub(super) const TICK: Duration = Duration::from_millis(100);

#[derive(Clone, Copy)]
pub(super) struct Guest {
    pub(super) vcpus: u32,
    pub(super) threads: f64,
    pub(super) weight: u32,
    pub(super) agent: bool,
    pub(super) min_usable: u32,
    pub(super) enforced: bool,
    pub(super) in_use: u32,
    pub(super) usable: u32,
    /// It can't fold, and says so.
    pub(super) fails: bool,
    /// What it says that it uses, if not the truth.
    pub(super) claims: Option<u32>,
    /// pCPUs that it may use, if not all.
    pub(super) cpus: Option<&'static str>,
    pub(super) quota: Option<f64>,
    pub(super) max_usable: Option<u32>,
    pub(super) fixed: Option<u32>,
}

pub(super) fn busy(vcpus: u32) -> Guest {
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

pub(super) struct Rig {
    pub(super) governor: Governor,
    pub(super) truth: Engine,
    pub(super) now: Duration,
    pub(super) pcpus: f64,
    pub(super) host_work: f64,
    pub(super) one_cgroup: bool,
    /// What the last guest loses to the first, of its share.
    pub(super) skew: f64,
    pub(super) guests: Vec<Guest>,
    pub(super) last: Step,
    pub(super) changes: u32,
}

impl Rig {
    pub(super) fn new(pcpus: u32, guests: &[Guest]) -> Self {
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

    pub(super) fn tick(&mut self) {
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
    pub(super) fn share_out(&mut self, wants: &[f64]) -> (Vec<Cpus>, Vec<PcpuRates>) {
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

    pub(super) fn inputs(&self) -> Vec<VmInput> {
        self.guests
            .iter()
            .enumerate()
            .map(|(index, guest)| input(index, guest, self.pcpus))
            .collect()
    }

    pub(super) fn run(&mut self, seconds: f64) {
        let end = self.now + Duration::from_secs_f64(seconds);
        while self.now < end {
            self.tick();
        }
    }

    pub(super) fn usable(&self) -> Vec<u32> {
        self.last
            .decisions
            .iter()
            .map(|decision| decision.usable.unwrap())
            .collect()
    }

    pub(super) fn reasons(&self) -> Vec<Reason> {
        self.last.decisions.iter().map(Decision::reason).collect()
    }

    /// Seconds until all usable counts are as wanted.
    pub(super) fn until(&mut self, wanted: &[u32]) -> f64 {
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

pub(super) fn id(index: usize) -> VmId {
    VmId {
        pid: u32::try_from(index).unwrap() + 1,
        start_ticks: 7,
    }
}

pub(super) fn input(index: usize, guest: &Guest, pcpus: f64) -> VmInput {
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

pub(super) fn whole(vms: &[VmInput]) -> Input<'_> {
    Input {
        groups: &[],
        vms,
        host_weight: 100.0,
    }
}
