//! Probe: are all VMs seen, with their vCPUs?

use super::{Notes, Patient, called};
use crate::model::Vcpus;

pub(super) fn look(patient: &Patient<'_>, notes: &mut Notes) {
    let known = |vm: &&crate::model::Vm| matches!(vm.vcpus, Vcpus::Known(_));
    let count = patient.vms.iter().filter(known).count();
    let found = format!("{} VMs, {count} with known vCPUs", patient.vms.len());
    if patient.vms.is_empty() {
        notes.warn(
            format!("{found}: neither their vCPUs nor their groups could be looked at"),
            "run this again beside VMs; those without KVM are looked for with [discover] tcg = true only",
        );
    } else {
        notes.good(found);
    }
    for (index, policy) in patient.config.vms.iter().enumerate() {
        if !patient.vms.iter().any(|vm| policy.fits(vm)) {
            notes.warn(
                format!(
                    "[[vm]] number {} of the configuration fits no VM that runs now",
                    index + 1
                ),
                "where it should fit one, compare its name and uuid with `hintctl list`",
            );
        }
    }
    for vm in &patient.vms {
        if let Vcpus::Unclassified(why) = &vm.vcpus {
            notes.warn(
                format!("{} is shown and never hinted: {why}", called(vm)),
                "mount debugfs, or start QEMU with -name debug-threads=on; a VMM process with one VM only",
            );
        }
    }
    for message in &patient.scan.degraded {
        // Debugfs has a probe of its own.
        if message.contains("/debug/kvm") {
            continue;
        }
        if message.contains("can't be found") || message.contains("no VM can be found") {
            notes.bad(message.clone(), "make /proc visible");
        } else {
            notes.warn(message.clone(), "as it says");
        }
    }
}
