//! Probe: does the kernel keep pressure figures? Nothing depends on them; they show what a host suffers.

use super::{Notes, Patient};

pub(super) fn look(patient: &Patient<'_>, notes: &mut Notes) {
    let path = patient.root.path("proc/pressure/cpu");
    match patient.root.read_text("proc/pressure/cpu") {
        Ok(Some(text)) => match average(&text) {
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

/// `some avg10=0.00 avg60=1.25 ...`
fn average(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let field = line
        .split(' ')
        .find_map(|field| field.strip_prefix("avg60="))?;
    field.parse().ok()
}
