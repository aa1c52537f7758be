//! Helper processes that never outlive the test that started them, not even when it is killed.
//!
//! Each one is started through setpriv with a parent-death signal. The kernel sends that signal when the *thread* that
//! started the process ends, and tests boot guests from short-lived threads; so one thread that lives as long as the test
//! process starts them all.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::cgroup::CpuGroup;

const OWNED: &str = "hint-lab-";

/// What went wrong with a helper process.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// It did not start.
    #[error("cannot start {program} (through setpriv of util-linux): {source}; run `make setup`")]
    Start {
        /// The program.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// Its log file cannot be used.
    #[error("cannot write the log {path} of {program}: {source}")]
    Log {
        /// The program.
        program: String,
        /// The log.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Lets this thread, and all that it starts from now on, use so many pCPUs only, also on a larger machine. Call it before the first
/// process is started.
///
/// # Errors
/// The kernel's.
pub fn confine(pcpus: usize) -> rustix::io::Result<()> {
    let allowed = sched_getaffinity(None)?;
    let mut few = CpuSet::new();
    (0..CpuSet::MAX_CPU)
        .filter(|cpu| allowed.is_set(*cpu))
        .take(pcpus)
        .for_each(|cpu| few.set(cpu));
    sched_setaffinity(None, &few)
}

/// A running helper process; dropping it kills it and waits for its end.
#[derive(Debug)]
pub struct Process {
    child: Child,
}

impl Process {
    /// Starts a program with its output on a log file, in a CPU group when one is given.
    ///
    /// # Errors
    /// When the log cannot be written or the program does not start. A program that starts and fails at once is no error here:
    /// see [`Process::ended`].
    pub fn start(
        program: &Path,
        args: &[OsString],
        log: &Path,
        group: Option<&CpuGroup>,
    ) -> Result<Self, ProcessError> {
        let name = program.display().to_string();
        let log_error = |source| ProcessError::Log {
            program: name.clone(),
            path: log.to_owned(),
            source,
        };
        let out = File::create(log).map_err(log_error)?;
        let err = out.try_clone().map_err(log_error)?;

        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]);
        if let Some(group) = group {
            // The shell joins the group and then becomes the program: no thread of it is ever outside.
            command.args(["sh", "-c", r#"echo $$ >"$0" && exec "$@""#]);
            command.arg(group.procs());
        }
        command.arg(program).args(args);
        command.stdin(Stdio::null()).stdout(out).stderr(err);
        let child =
            start_from_the_lasting_thread(command).map_err(|source| ProcessError::Start {
                program: name.clone(),
                source,
            })?;
        Ok(Self { child })
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, or `None` while it runs.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// How it ended, waiting for it at most so long.
    pub fn ended_within(&mut self, patience: Duration) -> Option<ExitStatus> {
        let end = Instant::now() + patience;
        loop {
            let status = self.ended();
            if status.is_some() || Instant::now() > end {
                return status;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills it and waits for its end. Of a process that had ended already it gives that status.
    pub fn kill(&mut self) -> ExitStatus {
        // Both fail only for a child that is waited for already.
        let _ = self.child.kill();
        self.child
            .wait()
            .unwrap_or_else(|_| ExitStatus::from_raw(0))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

struct Order {
    command: Command,
    reply: Sender<io::Result<Child>>,
}

fn start_from_the_lasting_thread(command: Command) -> io::Result<Child> {
    static ORDERS: OnceLock<Sender<Order>> = OnceLock::new();
    let orders = ORDERS.get_or_init(|| {
        let (sender, orders) = channel::<Order>();
        thread::spawn(move || {
            for mut order in orders {
                let _ = order.reply.send(order.command.spawn());
            }
        });
        sender
    });
    let (reply, answer) = channel();
    let gone = || io::Error::other("the thread that starts processes is gone");
    orders.send(Order { command, reply }).map_err(|_| gone())?;
    answer.recv().map_err(|_| gone())?
}

/// Name of something that belongs to this process and that a later test may remove once this process is gone.
pub(crate) fn owned_name(rest: &str) -> String {
    format!("{OWNED}{}-{rest}", std::process::id())
}

/// Things in a folder whose [`owned_name`] names a process that is gone.
pub(crate) fn orphans(folder: &Path) -> Vec<PathBuf> {
    let is_orphan = |name: &str| {
        name.strip_prefix(OWNED)
            .and_then(|rest| rest.split('-').next()?.parse::<u32>().ok())
            .is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists())
    };
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .filter(|entry| entry.file_name().to_str().is_some_and(is_orphan))
        .map(|entry| entry.path())
        .collect()
}

/// Finds a program by name in `PATH` and in the system's own folders, which a user's `PATH` may lack.
#[must_use]
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/bin", "/usr/sbin", "/bin", "/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|file| is_program(file.as_os_str()))
}

fn is_program(file: &OsStr) -> bool {
    rustix::fs::access(file, rustix::fs::Access::EXEC_OK).is_ok() && Path::new(file).is_file()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_outlives_the_thread_that_asked_for_it_and_dies_on_drop() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let mut process = thread::spawn({
            let log = log.clone();
            move || Process::start(Path::new("sleep"), &["60".into()], &log, None).unwrap()
        })
        .join()
        .unwrap();
        thread::sleep(Duration::from_millis(200));
        assert_eq!(process.ended(), None);
        let proc_dir = PathBuf::from(format!("/proc/{}", process.pid()));
        assert!(proc_dir.exists());
        drop(process);
        assert!(!proc_dir.exists());
    }

    #[test]
    fn output_goes_to_the_log_and_the_end_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let args = ["-c", "echo out; echo err >&2; exit 3"].map(OsString::from);
        let mut process = Process::start(Path::new("sh"), &args, &log, None).unwrap();
        let status = process.ended_within(Duration::from_secs(20)).unwrap();
        assert_eq!(status.code(), Some(3));
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "out\nerr\n");
    }

    #[test]
    fn only_things_of_dead_processes_are_orphans() {
        let dir = tempfile::tempdir().unwrap();
        // Above the largest process id of Linux.
        let dead = dir.path().join("hint-lab-4194305-guest");
        let living = dir.path().join(owned_name("guest"));
        for folder in [&dead, &living, &dir.path().join("hint-lab-x")] {
            fs::create_dir(folder).unwrap();
        }
        assert_eq!(orphans(dir.path()), [dead]);
        assert!(orphans(&dir.path().join("none")).is_empty());
    }

    #[test]
    fn programs_are_found_by_name() {
        assert!(find_program("sh").unwrap().ends_with("sh"));
        assert_eq!(find_program("no-such-program-anywhere"), None);
    }
}
