//! What is particular to each VMM, one file each: how to recognise it, what its command line says, and how it names its vCPU
//! threads. To add one, add its file and a line in [`KNOWN`].

mod cloud_hypervisor;
mod crosvm;
mod firecracker;
mod qemu;

use std::path::PathBuf;

pub(super) use self::firecracker::vsock_in_config;

use super::process::Process;
use crate::procfs::number;

/// What a VMM's command line says of its VM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// Name; empty when it has none.
    pub name: String,
    /// UUID.
    pub uuid: Option<String>,
    /// CID of a vsock device that the host kernel serves.
    pub cid: Option<u32>,
    /// Hybrid vsock that the VMM itself serves: guest connections to host port P arrive on `<path>_P`.
    pub hybrid_socket: Option<PathBuf>,
    /// Sockets of vhost-user back ends; one of them may be a vsock back end, which knows the hybrid socket.
    pub vhost_user_sockets: Vec<PathBuf>,
    /// Where the hybrid vsock is named when the command line does not.
    pub elsewhere: Option<Elsewhere>,
    /// Sockets of QEMU's monitor protocol (QMP).
    pub monitors: Vec<PathBuf>,
}

/// Where else than on its command line a VMM names its hybrid vsock. All paths are as the VMM sees them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Elsewhere {
    /// Its configuration file.
    pub config_file: Option<PathBuf>,
    /// The socket of its API, over which it may have been told of the vsock: the other one that it listens on is that.
    pub api_socket: Option<PathBuf>,
}

/// A kind of VMM.
pub trait Vmm: Sync {
    /// Is this process one?
    fn recognises(&self, process: &Process) -> bool;

    /// Does it run guests without KVM too?
    fn may_run_without_kvm(&self) -> bool;

    /// What its command line says.
    fn identify(&self, process: &Process) -> Identity;

    /// The vCPU index that a thread name stands for, or `None` when the thread is no vCPU.
    fn vcpu_index(&self, thread_name: &str) -> Option<u32>;
}

/// All VMMs that discovery knows.
pub const KNOWN: &[&dyn Vmm] = &[
    &qemu::Qemu,
    &firecracker::Firecracker,
    &cloud_hypervisor::CloudHypervisor,
    &crosvm::Crosvm,
];

/// The VMM that a process is.
#[must_use]
pub fn of(process: &Process) -> Option<&'static dyn Vmm> {
    KNOWN.iter().copied().find(|vmm| vmm.recognises(process))
}

/// The value of a long option: `--name value` or `--name=value`.
pub(super) fn option<'a>(arguments: &'a [String], name: &str) -> Option<&'a str> {
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.strip_prefix(name) {
            Some("") => return arguments.next().map(String::as_str),
            Some(rest) if rest.starts_with('=') => return rest.get(1..),
            _ => {}
        }
    }
    None
}

/// The value of one key in `key=value,...`.
pub(super) fn key<'a>(list: &'a str, wanted: &str) -> Option<&'a str> {
    list.split(',').find_map(|pair| {
        let (key, value) = pair.split_once('=')?;
        (key == wanted).then_some(value)
    })
}

/// The number that is all that follows a prefix.
pub(super) fn after_prefix(name: &str, prefix: &str) -> Option<u32> {
    name.strip_prefix(prefix).and_then(number)
}
