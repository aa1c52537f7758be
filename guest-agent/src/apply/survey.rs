//! What `hint-agent probe` tells: which actuators work here, why the others don't, and which one would be used.

use std::fmt;

use hint_proto::v1;
use serde::Serialize;

use super::{Actuator, ApplyError, Choice, Cpuset, Observe, Paravirt, no_other_writer, probe};
use crate::files::Files;
use crate::topology::Topology;

/// One actuator, as it would do here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Candidate {
    /// Its name.
    pub name: &'static str,
    /// Would it be used?
    pub used: bool,
    /// Why it does not work here; `None` when it does.
    pub why_not: Option<String>,
    /// What it does to tasks that are pinned to avoided CPUs: `stay` or `moved`.
    pub pinned_tasks: &'static str,
}

/// All actuators, and the CPUs that they would work on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Survey {
    /// The actuators, in the order of probing.
    pub actuators: Vec<Candidate>,
    /// Online CPUs, as a kernel cpulist.
    pub online: String,
    /// Isolated and nohz_full CPUs, which are never avoided, as a kernel cpulist.
    pub untouched: String,
    /// Number of cores.
    pub cores: usize,
    /// NUMA nodes that have CPUs.
    pub nodes: Vec<u32>,
}

impl Survey {
    /// Probes every actuator; writes nothing.
    ///
    /// # Errors
    /// When the topology can't be read.
    pub fn make(
        files: &dyn Files,
        choice: Choice,
        allow_old_kernel: bool,
    ) -> Result<Self, ApplyError> {
        let topology = Topology::read(files)?;
        let used = match probe(files, choice, allow_old_kernel) {
            Ok(probed) => Some(probed.actuator.name()),
            Err(ApplyError::Unavailable { .. }) => None,
            Err(error) => return Err(error),
        };
        let candidate = |name, pinned_tasks, result: Result<(), String>| Candidate {
            name,
            used: used == Some(name),
            why_not: result.err(),
            pinned_tasks: match pinned_tasks {
                v1::PinnedTasks::Moved => "moved",
                v1::PinnedTasks::Stay | v1::PinnedTasks::Unspecified => "stay",
            },
        };
        let free = || no_other_writer(files);
        let cpuset = || Cpuset::probe(files, &topology, allow_old_kernel).map(drop);
        let cpuset = free().and_then(|()| cpuset());
        let paravirt = free().and_then(|()| Paravirt::probe(files).map(drop));
        let mut nodes: Vec<u32> = topology.cores.iter().map(|core| core.node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        Ok(Self {
            actuators: vec![
                candidate(Paravirt.name(), Paravirt.pinned_tasks(), paravirt),
                candidate(super::cpuset::NAME, v1::PinnedTasks::Moved, cpuset),
                candidate(Observe.name(), Observe.pinned_tasks(), Ok(())),
            ],
            online: topology.online.to_string(),
            untouched: topology.untouched().to_string(),
            cores: topology.cores.len(),
            nodes,
        })
    }

    /// The exit status: 0 when hints would be applied, 3 when they would only be logged, 4 when the actuator of the configuration
    /// does not work here.
    #[must_use]
    pub fn exit(&self) -> u8 {
        match self.actuators.iter().find(|candidate| candidate.used) {
            None => 4,
            Some(candidate) if candidate.name == Observe.name() => 3,
            Some(_) => 0,
        }
    }
}

impl fmt::Display for Survey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for candidate in &self.actuators {
            let state = match (&candidate.why_not, candidate.used) {
                (Some(why), _) => format!("does not work here: {why}"),
                (None, true) => "works, and would be used".to_owned(),
                (None, false) => "works".to_owned(),
            };
            writeln!(f, "{}: {state}", candidate.name)?;
            let pinned = match candidate.pinned_tasks {
                "moved" => "are moved while folded, and have their affinity back afterwards",
                _ => "stay where they are",
            };
            writeln!(f, "    tasks pinned to avoided CPUs {pinned}")?;
        }
        if self.actuators.iter().all(|candidate| !candidate.used) {
            writeln!(
                f,
                "The actuator that the configuration names does not work."
            )?;
        }
        write!(f, "CPUs: {} in {} cores", self.online, self.cores)?;
        if let [_, _, ..] = self.nodes.as_slice() {
            write!(f, " on {} NUMA nodes", self.nodes.len())?;
        }
        if !self.untouched.is_empty() {
            write!(
                f,
                "; {} are isolated or nohz_full and never avoided",
                self.untouched
            )?;
        }
        writeln!(f)
    }
}
