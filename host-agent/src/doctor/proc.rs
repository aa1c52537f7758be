//! Probe: does the kernel tell how long threads run and wait, and pCPUs idle?

use super::{Notes, Patient};
use crate::observe::Observer;
use crate::procfs::schedstat;
use std::time::Duration;

pub(super) fn look(patient: &Patient<'_>, notes: &mut Notes) {
    let root = patient.root;
    let sample = Observer::new(root.clone()).sample(&patient.vms, || Duration::ZERO, false);
    match sample.pcpus {
        Some(times) => notes.good(format!("times of {} pCPUs", times.len())),
        None => notes.bad(
            format!("{}: contention can't be judged", sample.degraded.join("; ")),
            "give the broker the whole of /proc: no ProcSubset=pid, no container's own /proc",
        ),
    }
    // This thread has run: nothing but zeros means that nobody counts.
    let relative = "proc/self/schedstat";
    let path = root.path(relative);
    match root.read_text(relative) {
        Ok(Some(text)) if schedstat(&text).is_some_and(|figures| figures != [0; 3]) => {
            notes.good("run and run delay of threads");
        }
        Ok(Some(text)) => notes.bad(
            format!(
                "{} says {:?}: how long vCPUs wait is unknown, not zero",
                path.display(),
                text.trim()
            ),
            "take a kernel with CONFIG_SCHED_INFO, as distributions have it",
        ),
        Ok(None) => notes.bad(
            format!(
                "{} is not there: how long vCPUs wait is unknown",
                path.display()
            ),
            "take a kernel with CONFIG_SCHED_INFO, and make /proc visible",
        ),
        Err(error) => notes.bad(error.to_string(), "make /proc readable"),
    }
}
