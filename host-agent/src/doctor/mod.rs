//! Doctor: looks at a host once and says whether the broker could work there, and how to mend what stands in the way.
//!
//! Each probe is a file. A probe reads and never changes anything. *Bad* means that enforcing would be unsafe or in vain for
//! all VMs; a warning is about some of them, or about less than all that the broker could do.

mod debugfs;
mod groups;
mod pcpus;
mod pressure;
mod proc;
mod rights;
mod vms;
mod vsock;

use std::fmt;

use serde::Serialize;

use crate::config::Config;
use crate::discover::{Discovery, Scan};
use crate::model::Vm;
use crate::observe::cgroups::{Cgroups, GroupScan};
use crate::root::Root;
use crate::text::printable;

/// How a finding weighs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Weight {
    /// As it should be.
    Good,
    /// Something works less well than it could.
    Warning,
    /// Enforcing is unsafe, or does nothing.
    Bad,
}

impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Good => "good",
            Self::Warning => "warning",
            Self::Bad => "bad",
        })
    }
}

/// One thing that a probe found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The probe.
    pub probe: &'static str,
    /// How it weighs.
    pub weight: Weight,
    /// What is there, and what it means.
    pub found: String,
    /// What to do; empty where nothing need be done.
    pub mend: String,
}

/// All findings, in the order of the probes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Diagnosis {
    /// Would enforcing be safe, and of use?
    pub enforce_is_safe: bool,
    /// The findings.
    pub findings: Vec<Finding>,
}

/// What the probes look at; VMs and groups are read once for all of them.
struct Patient<'a> {
    root: &'a Root,
    config: &'a Config,
    scan: Scan,
    vms: Vec<Vm>,
    groups: GroupScan,
}

type Probe = (&'static str, fn(&Patient<'_>, &mut Notes));

const PROBES: &[Probe] = &[
    ("rights", rights::look),
    ("proc", proc::look),
    ("pressure", pressure::look),
    ("debugfs", debugfs::look),
    ("pcpus", pcpus::look),
    ("vms", vms::look),
    ("groups", groups::look),
    ("vsock", vsock::look),
];

/// What one probe writes down.
#[derive(Default)]
struct Notes(Vec<(Weight, String, String)>);

impl Notes {
    fn good(&mut self, found: impl Into<String>) {
        self.0.push((Weight::Good, found.into(), String::new()));
    }

    fn warn(&mut self, found: impl Into<String>, mend: impl Into<String>) {
        self.0.push((Weight::Warning, found.into(), mend.into()));
    }

    fn bad(&mut self, found: impl Into<String>, mend: impl Into<String>) {
        self.0.push((Weight::Bad, found.into(), mend.into()));
    }
}

/// Looks at the host below `root`.
#[must_use]
pub fn diagnose(root: &Root, config: &Config) -> Diagnosis {
    let scan = Discovery::new(root.clone(), config.discover.tcg).scan();
    let vms: Vec<Vm> = scan.vms.iter().map(|found| found.vm.clone()).collect();
    let patient = Patient {
        root,
        config,
        groups: Cgroups::new(root.clone()).scan(&vms),
        scan,
        vms,
    };
    let mut findings = Vec::new();
    for (probe, look) in PROBES {
        let mut notes = Notes::default();
        look(&patient, &mut notes);
        findings.extend(notes.0.into_iter().map(|(weight, found, mend)| Finding {
            probe,
            weight,
            found,
            mend,
        }));
    }
    Diagnosis {
        enforce_is_safe: findings.iter().all(|finding| finding.weight < Weight::Bad),
        findings,
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(
                f,
                "{:8} {:9} {}",
                finding.weight, finding.probe, finding.found
            )?;
            if !finding.mend.is_empty() {
                writeln!(f, "{:18} to do: {}", "", finding.mend)?;
            }
        }
        f.write_str(match self.enforce_is_safe {
            true => "enforcing would be safe\n",
            false => "do not enforce before what is bad has been mended\n",
        })
    }
}

/// A VM in words for a finding.
fn called(vm: &Vm) -> String {
    match printable(&vm.name) {
        name if name.is_empty() => vm.id.to_string(),
        name => format!("{name} ({})", vm.id),
    }
}

/// Several VMs in words; the first few of many.
fn all_called<'a>(vms: impl IntoIterator<Item = &'a Vm>) -> String {
    let names: Vec<String> = vms.into_iter().map(called).collect();
    let more = names.len().saturating_sub(5);
    let first = names[..names.len() - more].join(", ");
    match more {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

#[cfg(test)]
mod tests;
