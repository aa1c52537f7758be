//! From a sample to decisions: rates, the governor's input, the governor. Pure: the daemon runs it on what it has just read, and
//! `hint-broker replay` on what a daemon once wrote down.

use crate::config::Config;
use crate::discover::Found;
use crate::govern::{AgentState, Governor, Input, Step};
use crate::model::{GroupTree, Tick, VmId};
use crate::observe::Sample;
use crate::observe::rates::Rates;

use super::inputs::Inputs;

use hint_proto::CpuSet;

/// All that decisions remember from tick to tick.
#[derive(Debug, Default)]
pub(crate) struct Decisions {
    rates: Rates,
    inputs: Inputs,
    governor: Governor,
}

impl Decisions {
    /// Follows what was found. `common` is what is online and not isolated, `online` what has times in `/proc/stat`. With the same
    /// arguments again it changes nothing.
    pub(crate) fn follow(
        &mut self,
        found: &[Found],
        tree: &GroupTree,
        config: &Config,
        common: &CpuSet,
        online: &CpuSet,
    ) {
        self.inputs.follow(found, tree, config, common, online);
    }

    /// Decides on the next sample.
    pub(crate) fn step(
        &mut self,
        sample: Sample,
        agent_of: impl Fn(VmId) -> AgentState,
        config: &Config,
    ) -> Tick {
        let tick = self.rates.update(sample);
        for vm in &mut self.inputs.vms {
            vm.agent = agent_of(vm.id);
        }
        let input = Input {
            groups: &self.inputs.groups,
            vms: &self.inputs.vms,
            host_weight: f64::from(config.host.weight),
        };
        self.governor.step(&tick, &input);
        tick
    }

    /// What was decided last.
    pub(crate) fn last(&self) -> &Step {
        self.governor.last()
    }

    /// Can threads be waiting for a pCPU now? Where not, their states need not be read.
    pub(crate) fn may_queue(&self) -> bool {
        self.governor.may_queue()
    }

    /// What the governor was told last.
    pub(super) fn inputs(&self) -> &Inputs {
        &self.inputs
    }

    /// The sample that was decided on last.
    pub(super) fn rates(&self) -> &Rates {
        &self.rates
    }
}
