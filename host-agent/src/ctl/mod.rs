//! What hintctl is made of: calls to the broker, and texts made from its answers.
//!
//! The texts are pure functions of a [`HostState`], so other programs can show a host in the same way.

mod client;
mod explain;
mod json;
mod table;
mod top;

pub use client::{Client, CtlError};
pub use explain::render_explanation;
pub use json::{AgentJson, HostJson, ListJson, SCHEMA, VmDocument, VmJson};
pub use table::render_table;
pub use top::{follow, render_top};

use hint_proto::v1;

use crate::control::convert;
use crate::model::HostView;
use crate::wire;

/// A host and its VMs at one moment, as the control service tells it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct HostState {
    /// The host.
    pub host: v1::Host,
    /// The VMs, by name, then id.
    pub vms: Vec<v1::Vm>,
}

impl From<v1::ListVmsResponse> for HostState {
    fn from(response: v1::ListVmsResponse) -> Self {
        Self {
            host: response.host.unwrap_or_default(),
            vms: response.vms,
        }
    }
}

impl From<v1::WatchVmsResponse> for HostState {
    fn from(response: v1::WatchVmsResponse) -> Self {
        Self {
            host: response.host.unwrap_or_default(),
            vms: response.vms,
        }
    }
}

impl From<&HostView> for HostState {
    fn from(view: &HostView) -> Self {
        Self {
            host: convert::host(view),
            vms: convert::vms(view),
        }
    }
}

/// A value for people: `-` when it is not known.
fn shown<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// Thousandths of a pCPU for people: `1.25`.
fn cpus(milli: Option<u64>) -> String {
    #[allow(clippy::cast_precision_loss)] // two decimals are shown
    shown(milli.map(|milli| format!("{:.2}", milli as f64 / 1000.0)))
}

/// The text cut to `width` characters, with a `~` where something is missing.
fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut cut: String = text.chars().take(width.saturating_sub(1)).collect();
    cut.push('~');
    cut
}

/// The text broken at blanks into lines of at most `width` characters, where its words allow; all but the first indented.
fn wrap(text: &str, width: usize) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is always a line");
        if !line.trim().is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            lines.push(format!("  {word}"));
        } else {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines.join("\n")
}

/// The host in one line.
fn host_line(host: &v1::Host) -> String {
    format!(
        "mode {}, pool {}, supply {} CPUs, used {}, {}",
        shown(wire::mode_word(host.mode)),
        if host.pcpus.is_empty() {
            "-"
        } else {
            &host.pcpus
        },
        cpus(host.supply_milli_cpus),
        cpus(host.used_milli_cpus),
        match wire::contention_word(host.contention).as_deref() {
            Some("none") => "no contention".to_owned(),
            Some(word) => word.to_owned(),
            None => "contention not known".to_owned(),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two VMs: one hinted, and one of which little is known.
    pub(super) fn state() -> HostState {
        HostState {
            host: v1::Host {
                broker_version: "0.1.0".to_owned(),
                epoch: 1 << 60,
                mode: v1::Mode::Enforce.into(),
                pcpus: "0-1".to_owned(),
                supply_milli_cpus: Some(2000),
                used_milli_cpus: Some(1980),
                contention: v1::Contention::Contended.into(),
                degraded: vec!["cpu.pressure can't be read: boot with psi=1".to_owned()],
            },
            vms: vec![
                v1::Vm {
                    id: "100-7".to_owned(),
                    name: "db".to_owned(),
                    uuid: "6f1d".to_owned(),
                    pid: 100,
                    vcpus: Some(4),
                    usable: Some(1),
                    run_milli_cpus: Some(995),
                    run_delay_milli_cpus: Some(20),
                    demand_milli_cpus: Some(4000),
                    target_milli_cpus: Some(1000),
                    weight: 100,
                    mode: v1::Mode::Enforce.into(),
                    reason: v1::Reason::Contention.into(),
                    explanation: "its share of 2.00 CPUs is 1.00".to_owned(),
                    agent: Some(v1::Agent {
                        state: v1::AgentState::Connected.into(),
                        version: "0.1.0".to_owned(),
                        actuator: "cpuset".to_owned(),
                        applied: Some(1),
                        preferred: "0".to_owned(),
                        error: String::new(),
                        kernel_release: "6.12.0".to_owned(),
                    }),
                },
                v1::Vm {
                    id: "200-9".to_owned(),
                    name: "web\u{1b}[2J".to_owned(),
                    pid: 200,
                    weight: 100,
                    reason: v1::Reason::Unclassified.into(),
                    ..v1::Vm::default()
                },
            ],
        }
    }

    #[test]
    fn long_texts_are_cut_or_broken() {
        assert_eq!(cut("abcdef", 6), "abcdef");
        assert_eq!(cut("abcdefg", 6), "abcde~");
        assert_eq!(wrap("one two three", 9), "one two\n  three");
        assert_eq!(wrap("toolongaword x", 4), "toolongaword\n  x");
    }
}
