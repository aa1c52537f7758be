//! What else runs on this machine: tests that count on two idle cores ask here whether they had them.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::guest::Guest;

/// `/proc` counts in hundredths of a second.
const TICKS_A_SECOND: f64 = 100.0;
const SECOND: Duration = Duration::from_secs(1);

/// Measures work outside the guests, second by second, from its start on.
#[derive(Debug)]
pub struct OtherWork {
    seconds: Arc<Mutex<Vec<f64>>>,
    stop: Arc<AtomicBool>,
}

impl OtherWork {
    /// Starts to measure; what these guests do is no other work.
    #[must_use]
    pub fn start(guests: &[Guest]) -> Self {
        Self::beside(
            guests
                .iter()
                .flat_map(|guest| [guest.pid(), guest.vhost_pid()])
                .collect(),
        )
    }

    fn beside(processes: Vec<u32>) -> Self {
        let meter = Self {
            seconds: Arc::default(),
            stop: Arc::default(),
        };
        let (seconds, stop) = (Arc::clone(&meter.seconds), Arc::clone(&meter.stop));
        thread::spawn(move || {
            let mut before = Counters::read(&processes);
            while !stop.load(Ordering::Relaxed) {
                thread::sleep(SECOND);
                let now = Counters::read(&processes);
                seconds
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(now.other_since(&before));
                before = now;
            }
        });
        meter
    }

    /// The most CPUs that other work took in any second so far.
    #[must_use]
    pub fn peak(&self) -> f64 {
        let seconds = self.seconds.lock().unwrap_or_else(PoisonError::into_inner);
        seconds.iter().copied().fold(0.0, f64::max)
    }

    /// Waits until other work took less than so many CPUs for three seconds on end, at most so long.
    pub fn wait_for_quiet(&self, cpus: f64, patience: Duration) {
        let end = Instant::now() + patience;
        let quiet = || {
            let seconds = self.seconds.lock().unwrap_or_else(PoisonError::into_inner);
            seconds.len() >= 3 && seconds.iter().rev().take(3).all(|second| *second < cpus)
        };
        while !quiet() && Instant::now() < end {
            thread::sleep(SECOND);
        }
    }
}

impl Drop for OtherWork {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

struct Counters {
    at: Instant,
    busy: u64,
    of_guests: u64,
}

impl Counters {
    fn read(processes: &[u32]) -> Self {
        Self {
            at: Instant::now(),
            busy: busy_ticks(),
            of_guests: processes.iter().copied().map(process_ticks).sum(),
        }
    }

    fn other_since(&self, before: &Self) -> f64 {
        let busy = self.busy.saturating_sub(before.busy);
        let other = busy.saturating_sub(self.of_guests.saturating_sub(before.of_guests));
        #[allow(clippy::cast_precision_loss, reason = "ticks of a second")]
        let other = other as f64;
        other / TICKS_A_SECOND / (self.at - before.at).as_secs_f64()
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
    use std::process::Command;

    #[test]
    fn a_busy_process_is_other_work_unless_it_is_a_guest() {
        let mut spinner = Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        let (without, with) = (Counters::read(&[spinner.id()]), Counters::read(&[]));
        thread::sleep(SECOND);
        let (without, with) = (
            Counters::read(&[spinner.id()]).other_since(&without),
            Counters::read(&[]).other_since(&with),
        );
        spinner.kill().unwrap();
        spinner.wait().unwrap();
        assert!(
            (0.1..=1.2).contains(&(with - without)),
            "with the spinner {with}, without {without}"
        );
    }

    #[test]
    fn the_peak_is_that_of_the_busiest_second() {
        let meter = OtherWork::beside(Vec::new());
        *meter.seconds.lock().unwrap() = vec![0.1, 0.9, 0.2];
        assert!(meter.peak() >= 0.9);
    }
}
