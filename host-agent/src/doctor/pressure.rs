//! Probe: does the kernel keep pressure figures? Nothing depends on them; they show what a host suffers.

use super::{Notes, Patient};
use crate::procfs::pressure_of_a_minute;

pub(super) fn look(patient: &Patient<'_>, notes: &mut Notes) {
    let path = patient.root.path("proc/pressure/cpu");
    match patient.root.read_text("proc/pressure/cpu") {
        Ok(Some(text)) => match pressure_of_a_minute(&text) {
            Some(average) => notes.good(format!(
                "tasks waited for pCPUs during {average} % of the last minute"
            )),
            None => notes.warn(
                format!("{} has no average of a minute", path.display()),
                "nothing: the broker does without",
            ),
        },
        Ok(None) => notes.warn(
            format!("{} is not there", path.display()),
            "for pressure figures, boot with psi=1; the broker does without",
        ),
        Err(error) => notes.warn(
            error.to_string(),
            "for pressure figures, boot with psi=1; the broker does without",
        ),
    }
}
