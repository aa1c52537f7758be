//! The JSON form, which scripts may rely on. Fields are only ever added; a change of meaning raises [`SCHEMA`].
//! Units stand in the names, and what is not known is `null`.

use serde::Serialize;

use super::HostState;
use crate::wire;
use hint_proto::v1;

/// Number of this form.
pub const SCHEMA: u32 = 1;

/// `hintctl list --json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ListJson {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The host.
    pub host: HostJson,
    /// The VMs, by name, then id.
    pub vms: Vec<VmJson>,
}

/// `hintctl get --json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VmDocument {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The VM.
    pub vm: VmJson,
}

/// The host.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HostJson {
    /// The broker's version.
    pub broker_version: String,
    /// The broker's run; a text, because many readers of JSON can't hold 64 bits in a number.
    pub epoch: String,
    /// `observe`, `advise` or `enforce`.
    pub mode: Option<String>,
    /// pCPUs of the pool, as a kernel cpulist.
    pub pcpus: String,
    /// What the pool can give.
    pub supply_milli_cpus: Option<u64>,
    /// How busy it is.
    pub used_milli_cpus: Option<u64>,
    /// `none` or `contended`.
    pub contention: Option<String>,
    /// Sources that can't be read now.
    pub degraded: Vec<String>,
}

/// A VM.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VmJson {
    /// Its identity on this host.
    pub id: String,
    /// Its name; not unique.
    pub name: Option<String>,
    /// Its UUID.
    pub uuid: Option<String>,
    /// PID of the VMM.
    pub pid: u32,
    /// `observe`, `advise` or `enforce`.
    pub mode: Option<String>,
    /// Its weight.
    pub weight: u32,
    /// Its vCPUs.
    pub vcpus: Option<u32>,
    /// vCPUs to use now.
    pub usable_vcpus: Option<u32>,
    /// The word for why, as `hintctl list` shows it.
    pub reason: Option<String>,
    /// The decision in words.
    pub explanation: String,
    /// Time that its vCPUs ran.
    pub run_milli_cpus: Option<u64>,
    /// Time that they waited for a pCPU.
    pub run_delay_milli_cpus: Option<u64>,
    /// Its demand estimate.
    pub demand_milli_cpus: Option<u64>,
    /// What it would get if it wanted all its vCPUs.
    pub target_milli_cpus: Option<u64>,
    /// Its agent; `null` when none is connected.
    pub agent: Option<AgentJson>,
}

/// A connected agent, by its own word.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AgentJson {
    /// `connected` or `failing`.
    pub state: Option<String>,
    /// Its version.
    pub version: String,
    /// Its actuator: `paravirt`, `cpuset` or `observe`.
    pub actuator: String,
    /// The guest kernel's release.
    pub kernel_release: String,
    /// Number of CPUs in use.
    pub applied_cpus: Option<u32>,
    /// Those CPUs, as a kernel cpulist of the guest's numbers.
    pub preferred_cpus: Option<String>,
    /// Its last error.
    pub error: Option<String>,
}

impl From<&HostState> for ListJson {
    fn from(state: &HostState) -> Self {
        Self {
            schema: SCHEMA,
            host: HostJson::from(&state.host),
            vms: state.vms.iter().map(VmJson::from).collect(),
        }
    }
}

impl From<&v1::Vm> for VmDocument {
    fn from(vm: &v1::Vm) -> Self {
        Self {
            schema: SCHEMA,
            vm: VmJson::from(vm),
        }
    }
}

impl From<&v1::Host> for HostJson {
    fn from(host: &v1::Host) -> Self {
        Self {
            broker_version: host.broker_version.clone(),
            epoch: host.epoch.to_string(),
            mode: wire::mode_word(host.mode),
            pcpus: host.pcpus.clone(),
            supply_milli_cpus: host.supply_milli_cpus,
            used_milli_cpus: host.used_milli_cpus,
            contention: wire::contention_word(host.contention),
            degraded: host.degraded.clone(),
        }
    }
}

impl From<&v1::Vm> for VmJson {
    fn from(vm: &v1::Vm) -> Self {
        let absent = i32::from(v1::AgentState::Absent);
        Self {
            id: vm.id.clone(),
            name: said(&vm.name),
            uuid: said(&vm.uuid),
            pid: vm.pid,
            mode: wire::mode_word(vm.mode),
            weight: vm.weight,
            vcpus: vm.vcpus,
            usable_vcpus: vm.usable,
            reason: wire::reason_word(vm.reason),
            explanation: vm.explanation.clone(),
            run_milli_cpus: vm.run_milli_cpus,
            run_delay_milli_cpus: vm.run_delay_milli_cpus,
            demand_milli_cpus: vm.demand_milli_cpus,
            target_milli_cpus: vm.target_milli_cpus,
            agent: vm
                .agent
                .as_ref()
                .filter(|agent| agent.state != absent)
                .map(AgentJson::from),
        }
    }
}

impl From<&v1::Agent> for AgentJson {
    fn from(agent: &v1::Agent) -> Self {
        Self {
            state: wire::agent_state_word(agent.state),
            version: agent.version.clone(),
            actuator: agent.actuator.clone(),
            kernel_release: agent.kernel_release.clone(),
            applied_cpus: agent.applied,
            preferred_cpus: said(&agent.preferred),
            error: said(&agent.error),
        }
    }
}

/// In the protocol an empty text means not known.
fn said(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::tests::state;
    use super::*;
    use serde_json::json;

    #[test]
    fn the_form_is_as_documented() {
        let list = serde_json::to_value(ListJson::from(&state())).unwrap();
        assert_eq!(
            list["host"],
            json!({
                "broker_version": "0.1.0", "epoch": "1152921504606846976", "mode": "enforce", "pcpus": "0-1",
                "supply_milli_cpus": 2000, "used_milli_cpus": 1980, "contention": "contended",
                "degraded": ["cpu.pressure can't be read: boot with psi=1"],
            })
        );
        assert_eq!(
            list["vms"][0],
            json!({
                "id": "100-7", "name": "db", "uuid": "6f1d", "pid": 100, "mode": "enforce", "weight": 100,
                "vcpus": 4, "usable_vcpus": 1, "reason": "contention",
                "explanation": "its share of 2.00 CPUs is 1.00",
                "run_milli_cpus": 995, "run_delay_milli_cpus": 20, "demand_milli_cpus": 4000,
                "target_milli_cpus": 1000,
                "agent": {
                    "state": "connected", "version": "0.1.0", "actuator": "cpuset", "kernel_release": "6.12.0",
                    "applied_cpus": 1, "preferred_cpus": "0", "error": null,
                },
            })
        );
    }

    #[test]
    fn what_is_not_known_is_null_and_never_left_out() {
        let vm = serde_json::to_value(VmDocument::from(&state().vms[1])).unwrap();
        assert_eq!(vm["schema"], 1);
        for field in [
            "uuid",
            "mode",
            "vcpus",
            "usable_vcpus",
            "run_milli_cpus",
            "run_delay_milli_cpus",
            "demand_milli_cpus",
            "target_milli_cpus",
            "agent",
        ] {
            assert_eq!(vm["vm"].get(field), Some(&json!(null)), "{field}");
        }
    }
}
