//! Probe: may this process do what the daemon does?

use super::{Notes, Patient};
use crate::procfs::status_value;

/// The bit of CAP_SYS_PTRACE, which opens other users' processes (linux/capability.h).
const SYS_PTRACE: u32 = 19;

pub(super) fn look(patient: &Patient<'_>, notes: &mut Notes) {
    let status = patient.root.read_text("proc/self/status");
    let status = status.ok().flatten().unwrap_or_default();
    let capabilities =
        status_value(&status, "CapEff").and_then(|set| u64::from_str_radix(set, 16).ok());
    match capabilities {
        Some(set) if set >> SYS_PTRACE & 1 == 1 => {
            notes.good("processes of all users can be looked into");
        }
        Some(_) => notes.bad(
            "without CAP_SYS_PTRACE VMs of other users are not seen",
            "run doctor and broker as root, or with that capability",
        ),
        None => notes.warn(
            format!(
                "{} does not tell which rights there are",
                patient.root.path("proc/self/status").display()
            ),
            "make the whole of /proc visible",
        ),
    }
}
