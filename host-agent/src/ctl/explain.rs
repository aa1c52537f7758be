//! One VM in words: what it has, why, and what its agent does.

use super::{cpus, shown, wrap};
use crate::text::printable;
use crate::wire;
use hint_proto::v1;

/// All that is known of a VM, in sentences of lines of `width` characters. Ends with a newline.
#[must_use]
pub fn render_explanation(vm: &v1::Vm, width: usize) -> String {
    let name = printable(&vm.name);
    let mut title = if name.is_empty() {
        vm.id.clone()
    } else {
        format!("{name} ({})", vm.id)
    };
    if !vm.uuid.is_empty() {
        title.push_str(&format!(", UUID {}", printable(&vm.uuid)));
    }
    let mode = shown(wire::mode_word(vm.mode));
    let reason = shown(wire::reason_word(vm.reason));
    let mut paragraphs = vec![
        format!("{title}, mode {mode}, weight {}", vm.weight),
        format!(
            "usable: {} of {} vCPUs, because: {reason}",
            shown(vm.usable),
            shown(vm.vcpus)
        ),
    ];
    paragraphs.extend(
        vm.explanation
            .lines()
            .filter(|line| !line.trim().is_empty())
            .map(str::to_owned),
    );
    paragraphs.push(format!(
        "CPUs: run {}, run delay {}, demand {}, target {}",
        cpus(vm.run_milli_cpus),
        cpus(vm.run_delay_milli_cpus),
        cpus(vm.demand_milli_cpus),
        cpus(vm.target_milli_cpus)
    ));
    paragraphs.push(agent(vm.agent.as_ref()));
    paragraphs
        .iter()
        .map(|paragraph| wrap(paragraph, width) + "\n")
        .collect()
}

fn agent(agent: Option<&v1::Agent>) -> String {
    let absent = v1::AgentState::Absent;
    let Some(agent) = agent.filter(|agent| agent.state != i32::from(absent)) else {
        return "agent: none is connected".to_owned();
    };
    let mut text = format!(
        "agent: {}, version {}, actuator {}, kernel {}, CPUs in use {} ({})",
        shown(wire::agent_state_word(agent.state)),
        printable(&agent.version),
        printable(&agent.actuator),
        printable(&agent.kernel_release),
        if agent.preferred.is_empty() {
            "-"
        } else {
            &agent.preferred
        },
        shown(agent.applied)
    );
    if !agent.error.is_empty() {
        text.push_str(&format!(", error: {}", printable(&agent.error)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::tests::state;
    use super::*;

    #[test]
    fn a_hinted_vm_is_explained_whole() {
        let text = render_explanation(&state().vms[0], usize::MAX);
        assert_eq!(
            text,
            "db (100-7), UUID 6f1d, mode enforce, weight 100\n\
             usable: 1 of 4 vCPUs, because: contention\n\
             its share of 2.00 CPUs is 1.00\n\
             CPUs: run 0.99, run delay 0.02, demand 4.00, target 1.00\n\
             agent: connected, version 0.1.0, actuator cpuset, kernel 6.12.0, CPUs in use 0 (1)\n"
        );
    }

    #[test]
    fn what_is_not_known_is_a_dash_and_no_agent_is_said() {
        let text = render_explanation(&state().vms[1], 80);
        assert!(
            text.contains("usable: - of - vCPUs, because: unclassified"),
            "{text}"
        );
        assert!(text.contains("agent: none is connected"), "{text}");
        assert!(!text.contains('\u{1b}'));
    }
}
