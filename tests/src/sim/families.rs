//! Scenarios that are made, not written: the matrix of the public tests, and random hosts.

use super::guest::load::Load;
use super::scenario::{GroupSpec, HogSpec, Scenario, VmSpec};

/// Loads of the matrix; what they stand for is in [`Load`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixLoad {
    /// hackbench, ten groups.
    Hackbench,
    /// sysbench cpu, a thread for each vCPU.
    Sysbench,
    /// schbench: requests at two thirds of what the VM is due, and no lock.
    Schbench,
    /// pgbench, a client for each vCPU.
    Pgbench,
}

impl MatrixLoad {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::Hackbench,
        Self::Sysbench,
        Self::Schbench,
        Self::Pgbench,
    ];

    /// As in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hackbench => "hackbench",
            Self::Sysbench => "sysbench",
            Self::Schbench => "schbench",
            Self::Pgbench => "pgbench",
        }
    }

    fn load(self, vcpus: usize) -> Load {
        match self {
            Self::Hackbench => Load::Hackbench {
                groups: vcpus.div_ceil(4),
                pairs: 4,
                work_us: 240.0,
                lock_us: 60.0,
            },
            Self::Sysbench => Load::Cpu {
                threads: vcpus,
                pinned: false,
            },
            // Each worker waits for its next request about as long as it works: 400 requests a second and vCPU, 1.2 ms each.
            Self::Schbench => Load::Clients {
                clients: 2 * vcpus,
                think_us: 1200.0,
                work_us: 1200.0,
                lock_us: 0.0,
            },
            Self::Pgbench => Load::Clients {
                clients: vcpus,
                think_us: 100.0,
                work_us: 600.0,
                lock_us: 40.0,
            },
        }
    }
}

/// VMs of the public tests, and their vCPUs.
const VMS: [usize; 5] = [2, 4, 8, 12, 16];
const VCPUS: [usize; 5] = [4, 8, 16, 24, 32];

/// The public matrix on so many pCPUs: each number of VMs with each number of vCPUs and each load, alike in all VMs.
#[must_use]
pub fn matrix(pcpus: usize, seconds: f64) -> Vec<Scenario> {
    let mut all = Vec::new();
    for load in MatrixLoad::ALL {
        for vms in VMS {
            for vcpus in VCPUS {
                let name = format!("{} {vms}x{vcpus} on {pcpus}", load.name());
                let mut scenario = empty(&name, pcpus, seconds, 1);
                scenario.vms.push(vm("vm", vms, vcpus, load.load(vcpus)));
                all.push(scenario);
            }
        }
    }
    all
}

/// What random hosts may have beside VMs of equal standing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Features {
    /// Groups of VMs with weights of their own.
    pub groups: bool,
    /// Quotas.
    pub quotas: bool,
    /// VMs that may not run on all pCPUs.
    pub cpusets: bool,
    /// Work of the host.
    pub hogs: bool,
}

/// A random host of 2 to 12 pCPUs with 1 to 8 VMs and loads that don't change.
#[must_use]
pub fn random(seed: u64, seconds: f64, features: Features) -> Scenario {
    let mut rng = fastrand::Rng::with_seed(seed);
    let pcpus = rng.usize(2..=12);
    let mut scenario = empty(&format!("random {seed}"), pcpus, seconds, seed);
    scenario.noise = 0.01 + 0.04 * rng.f64();
    let vms = rng.usize(1..=8);
    let in_groups = features.groups && rng.f64() < 0.3;
    if in_groups {
        for name in ["gold", "silver"] {
            scenario.groups.push(GroupSpec {
                name: name.to_owned(),
                parent: None,
                weight: [100, 200, 300][rng.usize(0..3)],
                quota: None,
                period_ms: 100.0,
            });
        }
    }
    for number in 0..vms {
        let vcpus = [1, 2, 2, 4, 4, 4, 8, 8, 12, 16][rng.usize(0..10)].min(2 * pcpus);
        let mut spec = vm(
            &format!("vm{number}"),
            1,
            vcpus,
            random_load(&mut rng, vcpus),
        );
        if rng.f64() < 0.3 {
            spec.weight = [50, 200, 300][rng.usize(0..3)];
        }
        if in_groups {
            spec.group = Some(["gold", "silver"][rng.usize(0..2)].to_owned());
        }
        if features.quotas && rng.f64() < 0.15 {
            spec.quota = Some(0.5 * rng.usize(1..=2 * vcpus) as f64);
        }
        if features.cpusets && rng.f64() < 0.15 {
            let first = rng.usize(0..pcpus);
            spec.cpus = Some(format!("{first}-{}", rng.usize(first..pcpus)));
        }
        scenario.vms.push(spec);
    }
    if features.hogs && rng.f64() < 0.2 {
        scenario.hogs.push(HogSpec {
            name: "build".to_owned(),
            threads: rng.usize(1..=pcpus),
            weight: 100,
            group: None,
            on_ms: 1e9,
            off_ms: 0.0,
        });
    }
    scenario
}

fn random_load(rng: &mut fastrand::Rng, vcpus: usize) -> Load {
    let threads = rng.usize(1..=2 * vcpus);
    match rng.usize(0..9) {
        0 => Load::Idle {},
        1 | 2 => Load::Cpu {
            threads,
            pinned: false,
        },
        3 | 4 => Load::Duty {
            threads,
            run_ms: 1.0 + 15.0 * rng.f64(),
            sleep_ms: 0.5 + 10.0 * rng.f64(),
        },
        5 => Load::Hackbench {
            groups: threads.div_ceil(4),
            pairs: 4,
            work_us: 480.0,
            lock_us: 120.0,
        },
        6 => Load::Barrier {
            threads: vcpus,
            work_us: 500.0 + 4000.0 * rng.f64(),
            uneven: 0.3,
            spin_us: [50.0, 1000.0][rng.usize(0..2)],
        },
        7 => Load::Clients {
            clients: threads,
            think_us: 3000.0 * rng.f64(),
            work_us: 1000.0 + 2000.0 * rng.f64(),
            lock_us: 150.0 * rng.f64(),
        },
        _ => {
            let work_us = 1000.0 + 5000.0 * rng.f64();
            Load::Requests {
                workers: threads,
                per_second: vcpus as f64 * (0.1 + 0.8 * rng.f64()) * 1e6 / work_us,
                work_us,
            }
        }
    }
}

/// A scenario without VMs.
#[must_use]
pub fn empty(name: &str, pcpus: usize, seconds: f64, seed: u64) -> Scenario {
    Scenario {
        name: name.to_owned(),
        about: String::new(),
        pcpus,
        seconds,
        from: 2.0,
        settled: 30.0,
        seed,
        noise: 0.03,
        groups: Vec::new(),
        vms: Vec::new(),
        hogs: Vec::new(),
    }
}

/// VMs with nothing special.
#[must_use]
pub fn vm(name: &str, count: usize, vcpus: usize, load: Load) -> VmSpec {
    VmSpec {
        name: name.to_owned(),
        count,
        vcpus,
        weight: 100,
        group: None,
        own_group: true,
        quota: None,
        period_ms: 100.0,
        cpus: None,
        agent: true,
        load,
        steps: Vec::new(),
    }
}
