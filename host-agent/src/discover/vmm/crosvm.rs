//! crosvm.

use super::{Identity, Vmm, after_prefix, key, option};
use crate::discover::process::Process;

/// crosvm.
#[derive(Debug)]
pub(super) struct Crosvm;

impl Vmm for Crosvm {
    fn recognises(&self, process: &Process) -> bool {
        process.program() == "crosvm"
    }

    fn may_run_without_kvm(&self) -> bool {
        false
    }

    /// Its vsock is the host kernel's: `--vsock cid=33` or `--vsock 33`, earlier `--cid 33`.
    fn identify(&self, process: &Process) -> Identity {
        let arguments = &process.arguments;
        let cid = option(arguments, "--cid").or_else(|| option(arguments, "-c"));
        let cid = option(arguments, "--vsock")
            .map(|vsock| key(vsock, "cid").unwrap_or_else(|| vsock.split(',').next().unwrap_or("")))
            .or(cid);
        Identity {
            name: option(arguments, "--name").unwrap_or_default().to_owned(),
            cid: cid.and_then(|cid| cid.parse().ok()),
            ..Identity::default()
        }
    }

    /// `crosvm_vcpu3`
    fn vcpu_index(&self, thread_name: &str) -> Option<u32> {
        after_prefix(thread_name, "crosvm_vcpu")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identify(line: &[&str]) -> Identity {
        let arguments = line.iter().map(|argument| (*argument).to_owned()).collect();
        Crosvm.identify(&Process { pid: 1, arguments })
    }

    #[test]
    fn name_and_cid_are_on_the_command_line() {
        for vsock in [
            &["--cid", "33"][..],
            &["--vsock", "cid=33,device=/dev/vhost-vsock"],
            &["--vsock=33"],
            &["-c", "33"],
        ] {
            let line = [&["crosvm", "run", "--name", "arcvm"], vsock].concat();
            let identity = identify(&line);
            assert_eq!(
                (identity.name.as_str(), identity.cid),
                ("arcvm", Some(33)),
                "{line:?}"
            );
        }
        assert_eq!(
            identify(&["crosvm", "run", "--vsock", "device=x"]),
            Identity::default()
        );
    }

    #[test]
    fn vcpu_threads_are_told_by_their_full_name() {
        for (name, index) in [
            ("crosvm_vcpu0", Some(0)),
            ("crosvm_vcpu17", Some(17)),
            ("crosvm_vcpu", None),
            ("crosvm_vcpux", None),
            ("crosvm_balloon", None),
        ] {
            assert_eq!(Crosvm.vcpu_index(name), index, "{name}");
        }
    }
}
