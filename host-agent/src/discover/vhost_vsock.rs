//! vhost-device-vsock: the back end process that knows which hybrid socket belongs to which vhost-user socket.

use std::path::{Path, PathBuf};

use super::process::Process;
use super::vmm::{key, option};

/// The hybrid socket that a vhost-device-vsock process serves for `vhost_user`; `None` when it is none or serves others.
pub(super) fn hybrid_socket(process: &Process, vhost_user: &Path) -> Option<PathBuf> {
    if process.program() != "vhost-device-vsock" {
        return None;
    }
    let fits = |socket: Option<&str>, uds: Option<&str>| {
        (socket.map(Path::new) == Some(vhost_user))
            .then(|| uds.map(PathBuf::from))
            .flatten()
    };
    let one_vm = fits(
        option(&process.arguments, "--socket"),
        option(&process.arguments, "--uds-path"),
    );
    // The other form gives one `--vm guest-cid=3,socket=...,uds-path=...` a VM.
    one_vm.or_else(|| {
        process
            .arguments
            .iter()
            .enumerate()
            .find_map(|(index, argument)| {
                let list = match argument.strip_prefix("--vm=") {
                    Some(list) => list,
                    None if argument == "--vm" => process.arguments.get(index + 1)?,
                    None => return None,
                };
                fits(key(list, "socket"), key(list, "uds-path"))
            })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(line: &[&str]) -> Process {
        Process {
            pid: 1,
            arguments: line.iter().map(|argument| (*argument).to_owned()).collect(),
        }
    }

    #[test]
    fn both_forms_of_its_command_line_are_read() {
        let vu = Path::new("/run/vm1/vu");
        for line in [
            &[
                "/opt/vhost-device-vsock",
                "--guest-cid",
                "33",
                "--socket",
                "/run/vm1/vu",
                "--uds-path",
                "/run/vm1/v",
            ][..],
            &[
                "vhost-device-vsock",
                "--guest-cid=33",
                "--socket=/run/vm1/vu",
                "--uds-path=/run/vm1/v",
            ],
            &[
                "vhost-device-vsock",
                "--vm",
                "guest-cid=3,socket=/run/vm0/vu,uds-path=/run/vm0/v",
                "--vm",
                "guest-cid=4,socket=/run/vm1/vu,uds-path=/run/vm1/v",
            ],
            &[
                "vhost-device-vsock",
                "--vm=guest-cid=4,socket=/run/vm1/vu,uds-path=/run/vm1/v",
            ],
        ] {
            assert_eq!(
                hybrid_socket(&process(line), vu),
                Some(PathBuf::from("/run/vm1/v")),
                "{line:?}"
            );
        }
    }

    #[test]
    fn other_sockets_and_other_programs_give_nothing() {
        let line = [
            "vhost-device-vsock",
            "--socket",
            "/run/other",
            "--uds-path",
            "/run/v",
        ];
        assert_eq!(
            hybrid_socket(&process(&line), Path::new("/run/vm1/vu")),
            None
        );
        let line = [
            "virtiofsd",
            "--socket",
            "/run/vm1/vu",
            "--uds-path",
            "/run/v",
        ];
        assert_eq!(
            hybrid_socket(&process(&line), Path::new("/run/vm1/vu")),
            None
        );
        assert_eq!(
            hybrid_socket(
                &process(&["vhost-device-vsock", "--socket"]),
                Path::new("/run/vm1/vu")
            ),
            None
        );
    }
}
