//! Cloud Hypervisor.

use std::path::PathBuf;

use super::{Identity, Vmm, after_prefix, key, option};
use crate::discover::process::Process;

/// Cloud Hypervisor.
#[derive(Debug)]
pub(super) struct CloudHypervisor;

impl Vmm for CloudHypervisor {
    fn recognises(&self, process: &Process) -> bool {
        process.program() == "cloud-hypervisor"
    }

    fn may_run_without_kvm(&self) -> bool {
        false
    }

    /// Guests have no names here. What is set up over its API is not on the command line.
    fn identify(&self, process: &Process) -> Identity {
        let of = |name: &str, wanted: &str| key(option(&process.arguments, name)?, wanted);
        Identity {
            uuid: of("--platform", "uuid").map(str::to_owned),
            // The CID is what the guest calls itself; the host sees the socket alone.
            hybrid_socket: of("--vsock", "socket").map(PathBuf::from),
            ..Identity::default()
        }
    }

    /// `vcpu3`
    fn vcpu_index(&self, thread_name: &str) -> Option<u32> {
        after_prefix(thread_name, "vcpu")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_vsock_and_uuid_are_on_the_command_line() {
        let line = [
            "/usr/bin/cloud-hypervisor",
            "--cpus",
            "boot=4,max=8",
            "--vsock",
            "cid=3,socket=/run/ch/v.sock,id=v",
            "--platform=num_pci_segments=1,uuid=6c9a5bd2-2e19-4f8c-9a3f-0a4f4b1a7b10",
        ];
        let process = Process {
            pid: 1,
            arguments: line.iter().map(|argument| (*argument).to_owned()).collect(),
        };
        assert!(CloudHypervisor.recognises(&process));
        let identity = CloudHypervisor.identify(&process);
        assert_eq!(
            identity.hybrid_socket,
            Some(PathBuf::from("/run/ch/v.sock"))
        );
        assert_eq!(
            identity.uuid.as_deref(),
            Some("6c9a5bd2-2e19-4f8c-9a3f-0a4f4b1a7b10")
        );
        assert_eq!((identity.name.as_str(), identity.cid), ("", None));
    }

    #[test]
    fn vcpu_threads_are_told_by_their_full_name() {
        for (name, index) in [
            ("vcpu0", Some(0)),
            ("vcpu12", Some(12)),
            ("vcpu", None),
            ("vcpu 1", None),
            ("vcpu1-signal", None),
            ("_vcpu1", None),
            ("vmm", None),
        ] {
            assert_eq!(CloudHypervisor.vcpu_index(name), index, "{name}");
        }
    }
}
