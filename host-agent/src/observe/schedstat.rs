//! The scheduler's figures of one thread: `/proc/<pid>/task/<tid>/schedstat` on a file that stays open.

use std::time::Duration;

use crate::procfs::{self, stat_fields};
use crate::root::{KeptFile, ReadError, Root};

/// What the scheduler says of one thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ThreadTimes {
    /// Time on a pCPU.
    pub run: Duration,
    /// Time runnable without a pCPU, as far as the kernel has credited it.
    pub run_delay: Duration,
    /// It waits for a pCPU now, and the kernel has not credited that yet.
    pub waiting: bool,
}

/// An open `schedstat`.
#[derive(Debug)]
pub(super) struct ThreadReader {
    pid: u32,
    tid: u32,
    file: KeptFile,
    last: Option<ThreadTimes>,
}

impl ThreadReader {
    pub(super) fn open(root: &Root, pid: u32, tid: u32) -> Result<Self, ReadError> {
        let file = KeptFile::open(root, format!("proc/{pid}/task/{tid}/schedstat"))?;
        Ok(Self {
            pid,
            tid,
            file,
            last: None,
        })
    }

    /// The thread's times; `None` when it is gone or the kernel keeps no such figures.
    pub(super) fn read(
        &mut self,
        root: &Root,
        find_waiting: bool,
    ) -> Result<Option<ThreadTimes>, ReadError> {
        let text = self.file.read(root)?;
        let Some(text) = text.filter(|text| !text.trim().is_empty()) else {
            return Ok(None);
        };
        let Some(figures) = parse(&text) else {
            let path = self.file.path(root);
            return Err(ReadError::content(
                &path,
                "three numbers (run, run delay, slices)",
                &text,
            ));
        };
        let Figures {
            run,
            run_delay,
            slices,
        } = figures;
        if slices == 0 && run.is_zero() {
            let path = self.file.path(root);
            let expected = "figures of a thread that has run (0 0 0 is what a kernel without sched_info says of all)";
            return Err(ReadError::content(&path, expected, &text));
        }
        let still = self
            .last
            .is_some_and(|last| last.run == run && last.run_delay == run_delay);
        let waiting = still && find_waiting && self.is_runnable(root)?;
        let times = ThreadTimes {
            run,
            run_delay,
            waiting,
        };
        self.last = Some(times);
        Ok(Some(times))
    }

    fn is_runnable(&self, root: &Root) -> Result<bool, ReadError> {
        let stat = root.read_text(&format!("proc/{}/task/{}/stat", self.pid, self.tid))?;
        Ok(stat.is_some_and(|text| stat_fields(&text).next() == Some("R")))
    }
}

pub(super) struct Figures {
    pub(super) run: Duration,
    pub(super) run_delay: Duration,
    pub(super) slices: u64,
}

/// The three numbers of a `schedstat`.
pub(super) fn parse(text: &str) -> Option<Figures> {
    let [run, run_delay, slices] = procfs::schedstat(text)?;
    let (run, run_delay) = (Duration::from_nanos(run), Duration::from_nanos(run_delay));
    Some(Figures {
        run,
        run_delay,
        slices,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn tree(schedstat: &str, state: &str) -> (tempfile::TempDir, Root) {
        let directory = tempfile::tempdir().unwrap();
        let task = directory.path().join("proc/7/task/8");
        fs::create_dir_all(&task).unwrap();
        fs::write(task.join("schedstat"), schedstat).unwrap();
        fs::write(task.join("stat"), format!("8 (CPU 0/KVM) {state} 1 1 1")).unwrap();
        let root = Root::new(directory.path());
        (directory, root)
    }

    #[test]
    fn figures_are_read_and_a_still_runnable_thread_waits() {
        for (state, waiting) in [("R", true), ("S", false)] {
            let (_directory, root) = tree("1000 2000 3\n", state);
            let mut reader = ThreadReader::open(&root, 7, 8).unwrap();
            let times = |waiting| ThreadTimes {
                run: Duration::from_nanos(1000),
                run_delay: Duration::from_nanos(2000),
                waiting,
            };
            assert_eq!(
                reader.read(&root, true).unwrap(),
                Some(times(false)),
                "first read: nothing to compare"
            );
            assert_eq!(
                reader.read(&root, true).unwrap(),
                Some(times(waiting)),
                "state {state}"
            );
            assert_eq!(
                reader.read(&root, false).unwrap(),
                Some(times(false)),
                "not asked"
            );
        }
    }

    #[test]
    fn a_kernel_without_figures_is_an_error_and_not_idle() {
        let (_directory, root) = tree("0 0 0\n", "R");
        let mut reader = ThreadReader::open(&root, 7, 8).unwrap();
        let error = reader.read(&root, true).unwrap_err().to_string();
        assert!(
            error.contains("proc/7/task/8/schedstat") && error.contains("sched_info"),
            "{error}"
        );
    }

    #[test]
    fn garbage_is_an_error_with_its_path() {
        for text in ["1000 x 3\n", "12", "-1 2 3", "99999999999999999999999 1 1"] {
            let (_directory, root) = tree(text, "R");
            let error = ThreadReader::open(&root, 7, 8)
                .unwrap()
                .read(&root, true)
                .unwrap_err()
                .to_string();
            assert!(error.contains("proc/7/task/8/schedstat"), "{error}");
        }
    }

    #[test]
    fn a_thread_that_ended_is_gone() {
        let (_directory, root) = tree("", "R");
        assert_eq!(
            ThreadReader::open(&root, 7, 8)
                .unwrap()
                .read(&root, true)
                .unwrap(),
            None
        );
        assert_eq!(
            ThreadReader::open(&root, 7, 9)
                .unwrap()
                .read(&root, true)
                .unwrap(),
            None
        );
    }
}
