//! The table of VMs.

use super::{HostState, cpus, cut, host_line, shown, wrap};
use crate::text::printable;
use crate::wire;
use hint_proto::v1;

const HEAD: [&str; 10] = [
    "NAME", "ID", "VCPUS", "USABLE", "APPLIED", "RUN", "DELAY", "TARGET", "REASON", "AGENT",
];
/// Columns of numbers stand to the right.
const NUMBERS: std::ops::Range<usize> = 2..8;
/// Names are not cut shorter than this.
const MIN_NAME: usize = 8;

/// The host in a line, its VMs in a table, and what is degraded below. Names are cut so that the table fits `width`
/// characters; where that is not enough, so are lines. Unknown values show as `-`. Ends with a newline.
#[must_use]
pub fn render_table(state: &HostState, width: usize) -> String {
    let mut rows = vec![HEAD.map(str::to_owned)];
    rows.extend(state.vms.iter().map(row));
    let mut widths: [usize; HEAD.len()] = std::array::from_fn(|column| {
        rows.iter()
            .map(|row| row[column].chars().count())
            .max()
            .unwrap_or_default()
    });
    let min_name = MIN_NAME.min(widths[0]);
    let others: usize = widths[1..].iter().sum();
    let roomy = min_name + others + 2 * widths[1..].len() <= width;
    let gap = if roomy { "  " } else { " " };
    let rest = others + gap.len() * widths[1..].len();
    widths[0] = widths[0].min(width.saturating_sub(rest).max(min_name));

    let mut text = cut(&host_line(&state.host), width);
    text.push_str("\n\n");
    for row in &rows {
        text.push_str(&cut(&line(row, &widths, gap), width));
        text.push('\n');
    }
    if state.vms.is_empty() {
        text.push_str("(no VMs)\n");
    }
    if !state.host.degraded.is_empty() {
        text.push('\n');
    }
    for source in &state.host.degraded {
        let source: String = source.split_whitespace().collect::<Vec<_>>().join(" ");
        text.push_str(&wrap(&format!("degraded: {source}"), width));
        text.push('\n');
    }
    text
}

fn row(vm: &v1::Vm) -> [String; HEAD.len()] {
    let name = printable(&vm.name);
    [
        if name.is_empty() {
            "-".to_owned()
        } else {
            name
        },
        vm.id.clone(),
        shown(vm.vcpus),
        shown(vm.usable),
        shown(vm.agent.as_ref().and_then(|agent| agent.applied)),
        cpus(vm.run_milli_cpus),
        cpus(vm.run_delay_milli_cpus),
        cpus(vm.target_milli_cpus),
        shown(wire::reason_word(vm.reason)),
        agent(vm.agent.as_ref()),
    ]
}

/// The actuator of a connected agent, and whether it fails.
fn agent(agent: Option<&v1::Agent>) -> String {
    match agent {
        Some(agent) if agent.state == i32::from(v1::AgentState::Failing) => {
            format!("{} failing", printable(&agent.actuator))
        }
        Some(agent) if agent.state == i32::from(v1::AgentState::Connected) => {
            printable(&agent.actuator)
        }
        Some(_) | None => "-".to_owned(),
    }
}

fn line(row: &[String; HEAD.len()], widths: &[usize; HEAD.len()], gap: &str) -> String {
    let mut line = String::new();
    for (column, (cell, &width)) in row.iter().zip(widths).enumerate() {
        let cell = cut(cell, width);
        if column > 0 {
            line.push_str(gap);
        }
        if NUMBERS.contains(&column) {
            line.push_str(&format!("{cell:>width$}"));
        } else {
            line.push_str(&format!("{cell:<width$}"));
        }
    }
    line.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::tests::state;
    use super::*;

    #[test]
    fn the_table_is_aligned_and_unknown_is_a_dash() {
        let expected = "\
mode enforce, pool 0-1, supply 2.00 CPUs, used 1.98, contended

NAME     ID     VCPUS  USABLE  APPLIED   RUN  DELAY  TARGET  REASON        AGENT
db       100-7      4       1        1  0.99  0.02    1.00  contention    cpuset
web?[2J  200-9      -       -        -     -      -       -  unclassified  -

degraded: cpu.pressure can't be read: boot with psi=1
";
        let expected = expected.replace("0.99  0.02  ", "0.99   0.02  ");
        assert_eq!(render_table(&state(), usize::MAX), expected);
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        let mut state = state();
        state.vms[0].name = "a-very-long-name-of-a-database".to_owned();
        for width in [40, 80, 90] {
            let table = render_table(&state, width);
            assert!(
                table.lines().all(|line| line.chars().count() <= width),
                "{table}"
            );
        }
        assert!(render_table(&state, 90).contains("a-very-long-nam~"));
    }

    #[test]
    fn a_narrow_terminal_gets_narrow_gaps() {
        let table = render_table(&state(), 75);
        assert!(
            table.contains(
                "\ndb      100-7     4      1       1 0.99  0.02   1.00 contention   cpuset\n"
            ),
            "{table}"
        );
    }

    #[test]
    fn a_host_without_vms_or_measurements_says_so() {
        let table = render_table(&HostState::default(), 80);
        assert!(table.starts_with("mode -, pool -, supply - CPUs, used -, contention not known\n"));
        assert!(table.ends_with("(no VMs)\n"));
    }

    #[test]
    fn a_failing_agent_shows() {
        let mut state = state();
        if let Some(agent) = &mut state.vms[0].agent {
            agent.state = v1::AgentState::Failing.into();
        }
        assert!(render_table(&state, 200).contains("cpuset failing"));
    }
}
