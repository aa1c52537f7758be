//! Probe: can guests with a CID reach the broker?

use super::{Notes, Patient, called};

/// Transports that take the host's side of vsock for themselves, so that `vhost_vsock` can't be loaded beside them.
const OTHERS: [&str; 2] = ["vmw_vsock_vmci_transport", "hv_sock"];

pub(super) fn look(patient: &Patient<'_>, notes: &mut Notes) {
    let with_cid: Vec<_> = patient.vms.iter().filter(|vm| vm.cid.is_some()).collect();
    if !patient.config.channel.vsock {
        if with_cid.is_empty() {
            notes.good("AF_VSOCK is not asked for, and no VM needs it");
        } else {
            notes.warn(
                format!(
                    "{} VMs have a CID, and the broker is told not to listen",
                    with_cid.len()
                ),
                "set [channel] vsock = true",
            );
        }
        return;
    }
    let there = patient.root.path("dev/vhost-vsock");
    if there.exists() {
        notes.good(format!("{} is there", there.display()));
        return;
    }
    let modules = patient.root.read_text("proc/modules");
    let modules = modules.ok().flatten().unwrap_or_default();
    let loaded = |name: &&str| {
        modules
            .lines()
            .any(|line| line.split(' ').next() == Some(*name))
    };
    let found = match with_cid.first() {
        Some(vm) => format!(
            "{} is not there, and guests like {} need it",
            there.display(),
            called(vm)
        ),
        None => format!(
            "{} is not there; guests with a CID could not connect",
            there.display()
        ),
    };
    match OTHERS.iter().find(|name| loaded(name)) {
        Some(owner) => notes.warn(
            format!("{found}: {owner} has taken vsock"),
            format!("modprobe -r {owner}, then modprobe vhost_vsock, and keep that order at boot"),
        ),
        None => notes.warn(found, "modprobe vhost_vsock"),
    }
}
