//! Results as a table and as JSON.

use std::fmt::Write;

use super::measure::Summary;

/// Columns of the table, as docs/simulator.md explains them.
const HEADER: &str = "scenario                       arm                   work   pool  worst    due   jain   chg  most  steal  waste  usable";

/// One line for each run.
#[must_use]
pub fn table(summaries: &[Summary]) -> String {
    let mut text = format!("{HEADER}\n");
    for run in summaries {
        let jain = run
            .jain
            .map_or_else(|| "-".to_owned(), |jain| format!("{jain:.3}"));
        // Writing to a string can't fail.
        let _ = writeln!(
            text,
            "{:30} {:19} {:6.2} {:6.3} {:6.3} {:6.3} {jain:>6} {:5.1} {:5.1} {:5.1}% {:5.1}%  {}",
            run.scenario,
            run.arm,
            run.work,
            run.pool,
            run.worst_vm,
            run.worst_due,
            run.changes_mean,
            run.changes_most,
            100.0 * run.steal,
            100.0 * run.wasted,
            counts(&run.usable),
        );
    }
    text
}

/// One line for each VM of a run.
#[must_use]
pub fn vms(run: &Summary) -> String {
    let mut text = String::new();
    for vm in &run.vms {
        let _ = writeln!(
            text,
            "  {:16} {:2} vCPUs  share {:5.2}  work {:5.2} -> {:5.2} ({:.3})  run {:5.2}  delay {:5.2}  spun {:4.2}  changes {:4.1}  usable {}",
            vm.name,
            vm.vcpus,
            vm.share,
            vm.work_without,
            vm.work,
            vm.work / vm.work_without.max(1e-9),
            vm.run,
            vm.run_delay,
            vm.spun,
            vm.changes,
            vm.usable,
        );
    }
    text
}

/// `4 4 4 2` as `3×4 2`.
fn counts(usable: &[usize]) -> String {
    let mut text = String::new();
    for group in usable.chunk_by(|a, b| a == b) {
        let times = group.len();
        let _ = if times > 1 {
            write!(text, "{times}×{} ", group[0])
        } else {
            write!(text, "{} ", group[0])
        };
    }
    text.trim_end().to_owned()
}

/// The same as a JSON array.
///
/// # Errors
/// When a figure is no number that JSON knows.
pub fn json(summaries: &[Summary]) -> Result<String, serde_json::Error> {
    serde_json::to_string_pretty(summaries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_counts_stand_together() {
        assert_eq!(counts(&[4, 4, 4, 2]), "3×4 2");
        assert_eq!(counts(&[]), "");
    }
}
