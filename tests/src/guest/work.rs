//! Work in a guest: background commands in the work group, whose end the guest reports by itself, so that waiting for them
//! costs the guest nothing.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::commands::quoted;
use super::{Guest, GuestError, Output, lock};

/// One piece of work in one guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WorkId(u32);

/// The guest's reports of ended work.
#[derive(Debug)]
pub(super) struct Events {
    ended: Arc<Ended>,
    next_id: AtomicU32,
}

#[derive(Debug, Default)]
struct Ended {
    statuses: Mutex<HashMap<u32, u8>>,
    changed: Condvar,
}

impl Events {
    /// Reads reports until the guest ends.
    pub(super) fn watch(stream: UnixStream) -> Self {
        let ended = Arc::new(Ended::default());
        let shared = Arc::clone(&ended);
        thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                if let Some((id, status)) = parse_report(&line) {
                    lock(&shared.statuses).insert(id, status);
                    shared.changed.notify_all();
                }
            }
        });
        Self {
            ended,
            next_id: AtomicU32::new(1),
        }
    }

    fn wait(&self, id: WorkId, deadline: Duration) -> Option<u8> {
        let end = Instant::now() + deadline;
        let mut statuses = lock(&self.ended.statuses);
        loop {
            if let Some(status) = statuses.get(&id.0) {
                return Some(*status);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            statuses = match self.ended.changed.wait_timeout(statuses, left) {
                Ok((statuses, _)) => statuses,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }
}

fn parse_report(line: &str) -> Option<(u32, u8)> {
    let (id, status) = line.split_once(' ')?;
    Some((id.parse().ok()?, status.parse().ok()?))
}

impl Guest {
    /// Starts shell text in the background, in a group of its own below `/sys/fs/cgroup/workload` and at normal priority. When this
    /// returns, the work is in its group.
    ///
    /// # Errors
    /// As [`Guest::sh`].
    pub fn spawn_work(&self, command: &str) -> Result<WorkId, GuestError> {
        let id = WorkId(self.work.next_id.fetch_add(1, Ordering::Relaxed));
        self.sh(&format!("/lab/work {} {}", id.0, quoted(command)))?;
        Ok(id)
    }

    /// Waits for work to end, without any cost to the guest, and gives its status and what it printed.
    ///
    /// # Errors
    /// When it still runs after the deadline (it goes on), and as [`Guest::run`].
    pub fn wait_work(&self, id: WorkId, deadline: Duration) -> Result<Output, GuestError> {
        let status = self
            .work
            .wait(id, deadline)
            .ok_or_else(|| GuestError::WorkDeadline {
                guest: self.name.clone(),
                id,
                deadline,
            })?;
        let dir = format!("/run/lab/jobs/{}", id.0);
        let printed = self.run(&format!("cat {dir}/stdout; cat {dir}/stderr >&2"))?;
        Ok(Output { status, ..printed })
    }

    /// Kills work with all its processes, and waits for its end. Work that has ended already is left as it is.
    ///
    /// # Errors
    /// As [`Guest::sh`].
    pub fn kill_work(&self, id: WorkId) -> Result<(), GuestError> {
        self.sh(&format!(
            "echo 1 >/sys/fs/cgroup/workload/{}/cgroup.kill",
            id.0
        ))?;
        self.wait_work(id, Duration::from_secs(60)).map(drop)
    }

    /// The processes of work that run now, rising.
    ///
    /// # Errors
    /// As [`Guest::sh`].
    pub fn work_pids(&self, id: WorkId) -> Result<Vec<u32>, GuestError> {
        let text = self.sh(&format!(
            "cat /sys/fs/cgroup/workload/{}/cgroup.procs",
            id.0
        ))?;
        let mut pids = text
            .lines()
            .map(str::parse)
            .collect::<Result<Vec<u32>, _>>()
            .map_err(|_| GuestError::Unexpected {
                guest: self.name.clone(),
                expected: "process ids in cgroup.procs",
                found: text,
            })?;
        pids.sort_unstable();
        Ok(pids)
    }

    /// Starts so many endless loops as one piece of work.
    ///
    /// # Errors
    /// As [`Guest::sh`].
    pub fn spawn_spinners(&self, count: u32) -> Result<WorkId, GuestError> {
        self.spawn_work(&format!(
            "for i in $(seq {count}); do while :; do :; done & done; wait"
        ))
    }

    /// Runs hackbench with so many loops as work, and gives the time that it reports, in seconds: one of its usual groups, where 20
    /// processes send to 20 others, each to all of them, so that every receiver's lock is wanted by many.
    ///
    /// # Errors
    /// When it does not end within 10 minutes or prints no time, and as [`Guest::run`].
    pub fn hackbench(&self, loops: u32) -> Result<f64, GuestError> {
        let id = self.spawn_work(&format!("hackbench -P -g 1 -f 20 -l {loops}"))?;
        let output = self.wait_work(id, Duration::from_secs(600))?;
        parse_hackbench(&output.text()).ok_or_else(|| GuestError::Unexpected {
            guest: self.name.clone(),
            expected: "a line \"Time: <seconds>\" from hackbench",
            found: format!(
                "{} {}",
                output.text(),
                String::from_utf8_lossy(&output.stderr)
            ),
        })
    }
}

fn parse_hackbench(text: &str) -> Option<f64> {
    text.lines()
        .find_map(|line| line.trim().strip_prefix("Time:"))
        .and_then(|seconds| seconds.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn the_time_of_hackbench_is_read() {
        let text = "Running in process mode with 1 groups using 80 file descriptors each (== 80 tasks)\n\
            Each sender will pass 300 messages of 100 bytes\nTime: 4.123\n";
        assert_eq!(parse_hackbench(text), Some(4.123));
        assert_eq!(parse_hackbench("Time: \n"), None);
        assert_eq!(parse_hackbench(""), None);
    }

    #[test]
    fn waiting_ends_with_the_report_or_the_deadline() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let events = Events::watch(ours);
        assert_eq!(events.wait(WorkId(1), Duration::from_millis(50)), None);
        theirs.write_all(b"2 0\nnonsense\n1 137\n").unwrap();
        let soon = Duration::from_secs(20);
        assert_eq!(events.wait(WorkId(1), soon), Some(137));
        assert_eq!(events.wait(WorkId(2), soon), Some(0));
    }
}
