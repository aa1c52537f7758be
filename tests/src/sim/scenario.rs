//! Scenarios: a host, its groups and VMs, their loads over time. From TOML files or made by [`super::families`].

use std::fs;
use std::path::{Path, PathBuf};

use hint_proto::CpuSet;
use serde::{Deserialize, Serialize};

use super::clock::nanos;
use super::guest::load::Load;
use super::mask::Mask;
use super::world::World;

/// Why a scenario can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// The file can't be read.
    #[error("{path}: can't read the scenario")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no scenario.
    #[error("{path}: not a scenario; docs/simulator.md lists the keys")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// What it describes can't be.
    #[error("scenario {name}: {problem}")]
    Content {
        /// The scenario.
        name: String,
        /// What was expected and what was found.
        problem: String,
    },
}

/// One scenario.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Its name.
    pub name: String,
    /// What it is for.
    #[serde(default)]
    pub about: String,
    /// pCPUs of the host, 1 to 128.
    pub pcpus: usize,
    /// How long, in simulated seconds.
    #[serde(default = "minute")]
    pub seconds: f64,
    /// Figures count from here on, in seconds.
    #[serde(default = "two")]
    pub from: f64,
    /// Changes of usable count from here on, in seconds.
    #[serde(default = "thirty")]
    pub settled: f64,
    /// The seed of all that is random.
    #[serde(default)]
    pub seed: u64,
    /// What the host measures is off by up to this part, to either side.
    #[serde(default = "noise")]
    pub noise: f64,
    /// CPU groups.
    #[serde(default, rename = "group")]
    pub groups: Vec<GroupSpec>,
    /// VMs.
    #[serde(default, rename = "vm")]
    pub vms: Vec<VmSpec>,
    /// The host's own work.
    #[serde(default, rename = "hog")]
    pub hogs: Vec<HogSpec>,
}

/// A CPU group that others are in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupSpec {
    /// Its name.
    pub name: String,
    /// The group it is in, one that stands before it; the root if there is none.
    #[serde(default)]
    pub parent: Option<String>,
    /// Its weight among its siblings.
    #[serde(default = "hundred")]
    pub weight: u32,
    /// Its quota, in CPUs.
    #[serde(default)]
    pub quota: Option<f64>,
    /// The quota's period, in milliseconds.
    #[serde(default = "period")]
    pub period_ms: f64,
}

/// VMs of one kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// Its name; numbered where there are several.
    pub name: String,
    /// How many of them.
    #[serde(default = "one")]
    pub count: usize,
    /// vCPUs of each, 1 to 128.
    pub vcpus: usize,
    /// Weight of its group among the siblings.
    #[serde(default = "hundred")]
    pub weight: u32,
    /// The group that its own group is in; the root if there is none.
    #[serde(default)]
    pub group: Option<String>,
    /// Has it a group of its own? Else its threads are in `group`, with those of others.
    #[serde(default = "yes")]
    pub own_group: bool,
    /// Its own group's quota, in CPUs.
    #[serde(default)]
    pub quota: Option<f64>,
    /// The quota's period, in milliseconds.
    #[serde(default = "period")]
    pub period_ms: f64,
    /// pCPUs that its vCPUs may run on, as a list like `0-3,8`; all if there is none.
    #[serde(default)]
    pub cpus: Option<String>,
    /// Has it a working agent?
    #[serde(default = "yes")]
    pub agent: bool,
    /// What runs in it.
    pub load: Load,
    /// What runs in it later.
    #[serde(default, rename = "step")]
    pub steps: Vec<StepSpec>,
}

/// A change of load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepSpec {
    /// When, in seconds.
    pub at: f64,
    /// What runs from then on.
    pub load: Load,
}

/// Threads of the host in a group of their own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HogSpec {
    /// Its name.
    pub name: String,
    /// How many threads.
    pub threads: usize,
    /// Weight of its group among the siblings.
    #[serde(default = "hundred")]
    pub weight: u32,
    /// The group that its own group is in; the root if there is none.
    #[serde(default)]
    pub group: Option<String>,
    /// Milliseconds of work ...
    #[serde(default = "always")]
    pub on_ms: f64,
    /// ... and of rest, in turn.
    #[serde(default)]
    pub off_ms: f64,
}

fn minute() -> f64 {
    60.0
}

fn two() -> f64 {
    2.0
}

fn thirty() -> f64 {
    30.0
}

fn noise() -> f64 {
    0.03
}

fn hundred() -> u32 {
    100
}

fn period() -> f64 {
    100.0
}

fn one() -> usize {
    1
}

fn yes() -> bool {
    true
}

fn always() -> f64 {
    1e9
}

/// A group as it was made.
#[derive(Debug, Clone)]
pub(super) struct PlannedGroup {
    pub(super) index: usize,
    pub(super) parent: Option<usize>,
    pub(super) weight: u32,
    pub(super) quota: Option<f64>,
}

/// A VM as it was made.
#[derive(Debug, Clone)]
pub(super) struct PlannedVm {
    pub(super) name: String,
    pub(super) index: usize,
    pub(super) vcpus: usize,
    pub(super) group: usize,
    pub(super) weight: u32,
    pub(super) allowed: Mask,
    pub(super) agent: bool,
}

/// What a scenario made of a world, and what is still to come.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) groups: Vec<PlannedGroup>,
    pub(super) vms: Vec<PlannedVm>,
    /// Changes of load by time: seconds, VM, load.
    pub(super) steps: Vec<(f64, usize, Load)>,
}

impl Plan {
    /// The weight of a VM against all other threads of the host, if all of them want to run.
    pub(super) fn effective_weight(&self, vm: &PlannedVm) -> f64 {
        let peers = self.vms.iter().filter(|peer| peer.group == vm.group);
        let mut part = 1.0 / peers.count() as f64;
        let mut group = &self.groups[vm.group];
        while let Some(parent) = group.parent.filter(|parent| *parent != 0) {
            let siblings = self
                .groups
                .iter()
                .filter(|other| other.parent == Some(parent));
            let all: u32 = siblings.map(|sibling| sibling.weight).sum();
            part *= f64::from(group.weight) / f64::from(all);
            group = &self.groups[parent];
        }
        part * f64::from(group.weight)
    }
}

impl Scenario {
    /// Reads a scenario file.
    ///
    /// # Errors
    /// When it can't be read, or is no scenario.
    pub fn read(path: &Path) -> Result<Self, ScenarioError> {
        let text = fs::read_to_string(path).map_err(|source| ScenarioError::Read {
            path: path.to_owned(),
            source,
        })?;
        toml::from_str(&text).map_err(|source| ScenarioError::Parse {
            path: path.to_owned(),
            source: Box::new(source),
        })
    }

    fn bad(&self, problem: String) -> ScenarioError {
        ScenarioError::Content {
            name: self.name.clone(),
            problem,
        }
    }

    fn cpus(&self, list: Option<&String>) -> Result<Mask, ScenarioError> {
        let all = Mask::first(self.pcpus);
        let Some(list) = list else {
            return Ok(all);
        };
        let set = CpuSet::parse_list(list)
            .map_err(|error| self.bad(format!("cpus = {list:?}: {error}")))?;
        let mask = Mask::from_set(&set).and(all);
        if mask.is_empty() {
            let problem = format!("cpus = {list:?}: none of them is below {}", self.pcpus);
            return Err(self.bad(problem));
        }
        Ok(mask)
    }

    /// Makes the world.
    pub(super) fn build(&self) -> Result<(World, Plan), ScenarioError> {
        if !(1..=Mask::MOST).contains(&self.pcpus) {
            let problem = format!("pcpus must be 1 to {}, found {}", Mask::MOST, self.pcpus);
            return Err(self.bad(problem));
        }
        let mut world = World::new(self.pcpus, self.seed);
        let mut plan = Plan::default();
        plan.groups.push(PlannedGroup {
            index: 0,
            parent: None,
            weight: 100,
            quota: None,
        });
        for group in &self.groups {
            let parent = self.group(&group.parent)?;
            let quota = group.quota.map(|cpus| (cpus, group.period_ms));
            add_group(&mut world, &mut plan, parent, group.weight, quota);
        }
        for spec in &self.vms {
            self.add_vms(&mut world, &mut plan, spec)?;
        }
        for hog in &self.hogs {
            let parent = self.group(&hog.group)?;
            let group = add_group(&mut world, &mut plan, parent, hog.weight, None);
            let all = Mask::first(self.pcpus);
            let index = world.add_vm(group, hog.threads, all);
            let load = Load::Burst {
                threads: hog.threads,
                on_ms: hog.on_ms,
                off_ms: hog.off_ms,
                phase_ms: 0.0,
            };
            world.set_load(index, &load);
        }
        plan.steps.sort_by(|a, b| a.0.total_cmp(&b.0));
        Ok((world, plan))
    }

    fn add_vms(
        &self,
        world: &mut World,
        plan: &mut Plan,
        spec: &VmSpec,
    ) -> Result<(), ScenarioError> {
        if !(1..=Mask::MOST).contains(&spec.vcpus) {
            let problem = format!("vcpus must be 1 to {}, found {}", Mask::MOST, spec.vcpus);
            return Err(self.bad(problem));
        }
        let parent = self.group(&spec.group)?;
        let allowed = self.cpus(spec.cpus.as_ref())?;
        for number in 0..spec.count {
            let quota = spec.quota.map(|cpus| (cpus, spec.period_ms));
            let group = if spec.own_group {
                add_group(world, plan, parent, spec.weight, quota)
            } else {
                parent
            };
            let index = world.add_vm(group, spec.vcpus, allowed);
            world.set_load(index, &spec.load);
            for step in &spec.steps {
                plan.steps.push((step.at, index, step.load.clone()));
            }
            let name = if spec.count == 1 {
                spec.name.clone()
            } else {
                format!("{}{}", spec.name, number + 1)
            };
            plan.vms.push(PlannedVm {
                name,
                index,
                vcpus: spec.vcpus,
                group,
                weight: spec.weight,
                allowed,
                agent: spec.agent,
            });
        }
        Ok(())
    }

    /// The place of a named group in the plan, where it has the same number as in the world.
    fn group(&self, name: &Option<String>) -> Result<usize, ScenarioError> {
        let Some(name) = name else {
            return Ok(0);
        };
        let place = self.groups.iter().position(|group| group.name == *name);
        place
            .map(|place| place + 1)
            .ok_or_else(|| self.bad(format!("there is no group {name:?}")))
    }
}

fn add_group(
    world: &mut World,
    plan: &mut Plan,
    parent: usize,
    weight: u32,
    quota: Option<(f64, f64)>,
) -> usize {
    let limits = quota.map(|(cpus, period_ms)| {
        let period = nanos(period_ms / 1e3);
        (nanos(cpus * period_ms / 1e3), period)
    });
    let index = world.add_group(parent, f64::from(weight), limits);
    plan.groups.push(PlannedGroup {
        index,
        parent: Some(parent),
        weight,
        quota: quota.map(|(cpus, _)| cpus),
    });
    index
}
