//! Firecracker, started by itself or by its jailer.

use super::{Identity, Vmm, after_prefix, option};
use crate::discover::process::Process;

/// Firecracker.
#[derive(Debug)]
pub(super) struct Firecracker;

impl Vmm for Firecracker {
    fn recognises(&self, process: &Process) -> bool {
        let program = process.program();
        program == "firecracker" || program.starts_with("firecracker-v")
    }

    fn may_run_without_kvm(&self) -> bool {
        false
    }

    /// Its vsock is set up over its API or in a file, so the command line says nothing of it.
    fn identify(&self, process: &Process) -> Identity {
        Identity {
            name: option(&process.arguments, "--id")
                .unwrap_or_default()
                .to_owned(),
            ..Identity::default()
        }
    }

    /// `fc_vcpu 3`; older ones had no blank.
    fn vcpu_index(&self, thread_name: &str) -> Option<u32> {
        after_prefix(thread_name, "fc_vcpu ").or_else(|| after_prefix(thread_name, "fc_vcpu"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_jailers_id_is_the_name() {
        for (line, name) in [
            (
                &["/firecracker", "--id", "551e7604", "--start-time-us", "1"][..],
                "551e7604",
            ),
            (&["./firecracker-v1.7.0-x86_64", "--id=a-b"], "a-b"),
            (&["firecracker", "--api-sock", "/run/f.sock"], ""),
            (&["firecracker", "--id"], ""),
        ] {
            let process = Process {
                pid: 1,
                arguments: line.iter().map(|argument| (*argument).to_owned()).collect(),
            };
            assert!(Firecracker.recognises(&process), "{line:?}");
            assert_eq!(Firecracker.identify(&process).name, name, "{line:?}");
        }
    }

    #[test]
    fn vcpu_threads_have_a_blank_or_none() {
        for (name, index) in [
            ("fc_vcpu 0", Some(0)),
            ("fc_vcpu 31", Some(31)),
            ("fc_vcpu0", Some(0)),
            ("fc_vcpu", None),
            ("fc_vcpu  1", None),
            ("fc_vcpu 1x", None),
            ("fc_vmm", None),
            ("fc_api", None),
            ("firecracker", None),
        ] {
            assert_eq!(Firecracker.vcpu_index(name), index, "{name}");
        }
    }
}
