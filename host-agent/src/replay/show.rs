//! How a change is shown: a line of a table, or JSON.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::{Change, Summary};
use crate::model::{Contention, Cpus};
use crate::text::printable;

/// The table's first line.
#[must_use]
pub fn table_head() -> String {
    line([
        "TIME", "VM", "USABLE", "RUN", "DELAY", "DEMAND", "TARGET", "REASON",
    ])
}

fn line([time, vm, usable, run, delay, demand, target, reason]: [&str; 8]) -> String {
    format!(
        "{time:<24}  {vm:<24}  {usable:<9}  {run:>6}  {delay:>6}  {demand:>6}  {target:>6}  {reason}"
    )
}

fn figure(cpus: Option<Cpus>) -> String {
    cpus.map_or_else(|| "-".to_owned(), |cpus| cpus.to_string())
}

fn count(usable: Option<u32>) -> String {
    usable.map_or_else(|| "-".to_owned(), |usable| usable.to_string())
}

impl Change {
    /// The time as RFC 3339 has it, in UTC, with milliseconds.
    #[must_use]
    pub fn time_text(&self) -> String {
        // What the formatter can tell ends with the year 9999; only a damaged file goes beyond.
        const LAST: Duration = Duration::from_secs(253_402_300_799);
        let time: SystemTime = UNIX_EPOCH + self.time.min(LAST);
        humantime::format_rfc3339_millis(time).to_string()
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let decision = &self.decision;
        let vm = match self.vm.name.as_str() {
            "" => self.vm.id.to_string(),
            name => format!("{} ({})", printable(name), self.vm.id),
        };
        let usable = format!("{} → {}", count(self.from), count(decision.usable));
        let text = line([
            &self.time_text(),
            &vm,
            &usable,
            &figure(decision.run),
            &figure(decision.run_delay),
            &figure(decision.demand),
            &figure(decision.target),
            &decision.reason().to_string(),
        ]);
        write!(f, "{text}: {}", decision.why)
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ticks of {} VMs in {} runs of the broker, {} changes; ",
            self.ticks, self.vms, self.runs, self.changes
        )?;
        match self.other_than_recorded {
            0 => f.write_str("decided as the broker did at each tick")?,
            other => write!(f, "decided otherwise than the broker did at {other} ticks")?,
        }
        if self.ticks_missing_before > 0 {
            write!(
                f,
                "\nthe first {} ticks are not in the recording: decisions of the first minutes may differ",
                self.ticks_missing_before
            )?;
        }
        if self.ticks_missing > 0 {
            write!(
                f,
                "\n{} ticks in between are not in the recording",
                self.ticks_missing
            )?;
        }
        for loss in &self.losses {
            write!(f, "\n{loss}")?;
        }
        Ok(())
    }
}

/// A change as JSON has it. Units stand in the names, and what is not known is `null`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChangeJson {
    /// RFC 3339, UTC.
    pub time: String,
    /// The VM's identity.
    pub vm: String,
    /// Its name.
    pub name: String,
    /// Usable before.
    pub from: Option<u32>,
    /// Usable from then on.
    pub to: Option<u32>,
    /// Why.
    pub reason: String,
    /// In words.
    pub explanation: String,
    /// `none` or `contended`.
    pub contention: Option<String>,
    /// What ran.
    pub run_milli_cpus: Option<u64>,
    /// What waited.
    pub run_delay_milli_cpus: Option<u64>,
    /// The demand estimate.
    pub demand_milli_cpus: Option<u64>,
    /// What it would get if it wanted all its vCPUs.
    pub target_milli_cpus: Option<u64>,
    /// What the daemon had decided at that tick.
    pub recorded_usable: Option<u32>,
}

impl From<&Change> for ChangeJson {
    fn from(change: &Change) -> Self {
        let decision = &change.decision;
        Self {
            time: change.time_text(),
            vm: change.vm.id.to_string(),
            name: change.vm.name.clone(),
            from: change.from,
            to: decision.usable,
            reason: decision.reason().to_string(),
            explanation: decision.why.to_string(),
            contention: match decision.contention {
                Contention::Unknown => None,
                Contention::None => Some("none".to_owned()),
                Contention::Contended => Some("contended".to_owned()),
            },
            run_milli_cpus: decision.run.map(Cpus::milli),
            run_delay_milli_cpus: decision.run_delay.map(Cpus::milli),
            demand_milli_cpus: decision.demand.map(Cpus::milli),
            target_milli_cpus: decision.target.map(Cpus::milli),
            recorded_usable: change
                .recorded
                .as_ref()
                .and_then(|recorded| recorded.usable),
        }
    }
}
