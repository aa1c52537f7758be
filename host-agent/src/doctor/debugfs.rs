//! Probe: does KVM say which threads are vCPUs?

use super::{Notes, Patient};

pub(super) fn look(patient: &Patient<'_>, notes: &mut Notes) {
    let path = patient.root.path("sys/kernel/debug/kvm");
    let path = path.display();
    match patient.root.list("sys/kernel/debug/kvm") {
        Ok(Some(_)) => notes.good(format!("{path} tells vCPU threads exactly")),
        Ok(None) => notes.warn(
            format!("{path} is not there: vCPU threads are told by names, groups or QMP"),
            "mount -t debugfs none /sys/kernel/debug (with KVM loaded)",
        ),
        Err(error) => notes.warn(
            format!("{error}: vCPU threads are told by names, groups or QMP"),
            "run doctor and broker as root",
        ),
    }
}
