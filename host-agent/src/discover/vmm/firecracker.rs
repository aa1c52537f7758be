//! Firecracker, started by itself or by its jailer.

use std::path::PathBuf;

use serde_json::Value;

use super::{Elsewhere, Identity, Vmm, after_prefix, option};
use crate::discover::process::Process;

/// Where its API listens when nothing else is said.
const API_SOCKET: &str = "/run/firecracker.socket";

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

    /// Its vsock is set up over its API or in a file.
    fn identify(&self, process: &Process) -> Identity {
        Identity {
            name: option(&process.arguments, "--id")
                .unwrap_or_default()
                .to_owned(),
            elsewhere: Some(Elsewhere {
                config_file: option(&process.arguments, "--config-file").map(PathBuf::from),
                api_socket: Some(PathBuf::from(
                    option(&process.arguments, "--api-sock").unwrap_or(API_SOCKET),
                )),
            }),
            ..Identity::default()
        }
    }

    /// `fc_vcpu 3`; older ones had no blank.
    fn vcpu_index(&self, thread_name: &str) -> Option<u32> {
        after_prefix(thread_name, "fc_vcpu ").or_else(|| after_prefix(thread_name, "fc_vcpu"))
    }
}

/// Where the vsock of a configuration file (`--config-file`) is: `{"vsock": {"guest_cid": 3, "uds_path": "/v.sock"}, ...}`
pub(in crate::discover) fn vsock_in_config(json: &[u8]) -> Option<PathBuf> {
    let config: Value = serde_json::from_slice(json).ok()?;
    let path = config.get("vsock")?.get("uds_path")?.as_str()?;
    Some(path)
        .filter(|path| !path.is_empty() && !path.contains('\0'))
        .map(PathBuf::from)
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
    fn its_files_are_on_the_command_line() {
        let elsewhere = |line: &[&str]| {
            let arguments = line.iter().map(|argument| (*argument).to_owned()).collect();
            let identity = Firecracker.identify(&Process { pid: 1, arguments });
            let found = identity.elsewhere.unwrap();
            (found.config_file, found.api_socket.unwrap())
        };
        assert_eq!(
            elsewhere(&[
                "firecracker",
                "--config-file=vm.json",
                "--api-sock",
                "a.sock"
            ]),
            (Some(PathBuf::from("vm.json")), PathBuf::from("a.sock"))
        );
        assert_eq!(
            elsewhere(&["firecracker", "--no-api"]),
            (None, PathBuf::from("/run/firecracker.socket"))
        );
    }

    #[test]
    fn a_configuration_names_the_vsock_or_does_not() {
        let found = vsock_in_config(
            br#"{"boot-source":{},"vsock":{"vsock_id":"1","guest_cid":3,"uds_path":"./v.sock"}}"#,
        );
        assert_eq!(found, Some(PathBuf::from("./v.sock")));
        for none in [
            "",
            "{}",
            "[]",
            r#"{"vsock":null}"#,
            r#"{"vsock":{"uds_path":7}}"#,
        ] {
            assert_eq!(vsock_in_config(none.as_bytes()), None, "{none}");
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
