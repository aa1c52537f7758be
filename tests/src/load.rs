//! What else runs on this machine: tests that count on two idle cores ask here whether they had them.

use std::fs;
use std::time::Instant;

use crate::guest::Guest;

/// `/proc` counts in hundredths of a second.
const TICKS_A_SECOND: f64 = 100.0;

/// Measures work outside the guests from its start on.
#[derive(Debug)]
pub struct OtherWork {
    guests: Vec<u32>,
    started: Instant,
    busy: u64,
    of_guests: u64,
}

impl OtherWork {
    /// Starts to measure; what these guests do is no other work.
    #[must_use]
    pub fn start(guests: &[Guest]) -> Self {
        let guests = guests
            .iter()
            .flat_map(|guest| [guest.pid(), guest.vhost_pid()])
            .collect::<Vec<u32>>();
        Self {
            started: Instant::now(),
            busy: busy_ticks(),
            of_guests: guests.iter().copied().map(process_ticks).sum(),
            guests,
        }
    }

    /// CPUs that other work took since the start, as a mean.
    #[must_use]
    pub fn cpus(&self) -> f64 {
        let of_guests: u64 = self.guests.iter().copied().map(process_ticks).sum();
        let busy = busy_ticks().saturating_sub(self.busy);
        let other = busy.saturating_sub(of_guests.saturating_sub(self.of_guests));
        #[allow(clippy::cast_precision_loss, reason = "ticks of a test's run")]
        let other = other as f64;
        other / TICKS_A_SECOND / self.started.elapsed().as_secs_f64()
    }
}

/// Ticks in which this machine's CPUs were neither idle nor waiting for I/O.
fn busy_ticks() -> u64 {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let all = text.lines().next().unwrap_or_default();
    let ticks: Vec<u64> = all
        .split_ascii_whitespace()
        .skip(1)
        .map_while(|field| field.parse().ok())
        .collect();
    // user, nice, system, irq, softirq, steal
    [0, 1, 2, 5, 6, 7]
        .iter()
        .filter_map(|column| ticks.get(*column))
        .sum()
}

/// Ticks of a process with all its threads; 0 when it is gone.
fn process_ticks(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = text
        .rsplit_once(')')
        .map_or("", |(_, rest)| rest)
        .split_ascii_whitespace();
    // utime and stime are the 14th and 15th field, and the first here is the third.
    fields
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_busy_process_is_other_work_unless_it_is_a_guest() {
        let mut spinner = std::process::Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        let measure = |guests: Vec<u32>| OtherWork {
            started: Instant::now(),
            busy: busy_ticks(),
            of_guests: guests.iter().copied().map(process_ticks).sum(),
            guests,
        };
        let (with, without) = (measure(vec![]), measure(vec![spinner.id()]));
        std::thread::sleep(Duration::from_secs(1));
        let spun = with.cpus() - without.cpus();
        spinner.kill().unwrap();
        spinner.wait().unwrap();
        assert!((0.1..=1.2).contains(&spun), "a spinner counts {spun} CPUs");
    }
}
