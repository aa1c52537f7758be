//! The view as the control service's messages.

use hint_proto::v1;

use crate::model::{Agent, Cpus, HostView, Outcome, Vcpus, VmView};
use crate::wire;

/// The host's part of a view.
#[must_use]
pub fn host(view: &HostView) -> v1::Host {
    v1::Host {
        broker_version: env!("CARGO_PKG_VERSION").to_owned(),
        epoch: view.epoch,
        mode: wire::mode(view.mode).into(),
        pcpus: view.pcpus.to_string(),
        supply_milli_cpus: view.supply.map(Cpus::milli),
        used_milli_cpus: view.used.map(Cpus::milli),
        contention: wire::contention(view.contention).into(),
        degraded: view.degraded.clone(),
    }
}

/// All VMs of a view.
#[must_use]
pub fn vms(view: &HostView) -> Vec<v1::Vm> {
    view.vms.iter().map(vm).collect()
}

/// One VM.
#[must_use]
pub fn vm(view: &VmView) -> v1::Vm {
    v1::Vm {
        id: view.vm.id.to_string(),
        name: view.vm.name.clone(),
        uuid: view.vm.uuid.clone().unwrap_or_default(),
        pid: view.vm.id.pid,
        vcpus: match &view.vm.vcpus {
            Vcpus::Known(threads) => u32::try_from(threads.len()).ok(),
            Vcpus::Unclassified(_) => None,
        },
        usable: view.usable,
        run_milli_cpus: view.run.map(Cpus::milli),
        run_delay_milli_cpus: view.run_delay.map(Cpus::milli),
        demand_milli_cpus: view.demand.map(Cpus::milli),
        target_milli_cpus: view.target.map(Cpus::milli),
        weight: view.weight,
        mode: wire::mode(view.mode).into(),
        reason: wire::reason(view.reason).into(),
        explanation: explanation(view),
        agent: Some(view.agent.as_ref().map_or_else(absent, agent)),
    }
}

/// The decision in words.
fn explanation(view: &VmView) -> String {
    match (&view.vm.vcpus, &view.why) {
        (Vcpus::Unclassified(why), _) => format!("shown and never hinted: {why}"),
        (Vcpus::Known(_), Some(why)) => why.to_string(),
        (Vcpus::Known(_), None) => String::new(),
    }
}

/// Number of CPUs that a guest has in use, by its agent's word; `None` when the agent can't tell.
#[must_use]
pub fn applied(agent: &Agent) -> Option<u32> {
    if agent.preferred.is_empty() {
        return None;
    }
    u32::try_from(agent.online.intersection(&agent.preferred).len()).ok()
}

fn absent() -> v1::Agent {
    v1::Agent {
        state: v1::AgentState::Absent.into(),
        ..v1::Agent::default()
    }
}

fn agent(agent: &Agent) -> v1::Agent {
    let (state, error) = match &agent.outcome {
        Some(Outcome::Failed(error)) => (v1::AgentState::Failing, error.clone()),
        Some(Outcome::Applied | Outcome::Logged | Outcome::Restored) | None => {
            (v1::AgentState::Connected, String::new())
        }
    };
    v1::Agent {
        state: state.into(),
        version: agent.version.clone(),
        actuator: agent.actuator.clone(),
        applied: applied(agent),
        preferred: agent.preferred.to_string(),
        error,
        kernel_release: agent.kernel_release.clone(),
    }
}
