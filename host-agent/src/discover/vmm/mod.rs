//! What is particular to each VMM, one file each: how to recognise it, what its command line says, and how it names its vCPU
//! threads. To add one, add its file and a line in [`KNOWN`].

mod qemu;

use std::path::PathBuf;

use super::process::Process;

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
pub const KNOWN: &[&dyn Vmm] = &[&qemu::Qemu];

/// The VMM that a process is.
#[must_use]
pub fn of(process: &Process) -> Option<&'static dyn Vmm> {
    KNOWN.iter().copied().find(|vmm| vmm.recognises(process))
}
