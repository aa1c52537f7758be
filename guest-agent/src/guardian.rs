//! The guardian: a second, small process that restores the mask when the agent can't.
//!
//! ```text
//!              lease / hold (restarts the clock)
//!                    ┌───┐
//!   ┌──────┐  hold   │   ▼─────────┐  end of file ┌───────────┐
//!   │ idle │────────►│  holding    │─────────────►│ restore,  │
//!   │      │◄────────│             │              │ then exit │
//!   └──────┘ release └─────────────┘              └───────────┘
//!      ▲                    │ lease + 2 s passed: the agent hangs or is stopped
//!      └────── restore ◄────┘
//! ```
//!
//! The agent writes one line for each message to the guardian's standard input: `hold <record as JSON>`,
//! `lease <milliseconds>`, `release`. The pipe ends when the agent dies, however it dies. The guardian ignores the signals
//! that end an agent, has its own process group and another name, so that what kills the one by name spares the other.
//! Its standard output is no output: it is the guest's lock, which a new agent waits for.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::clock::Moment;
use crate::error::chain;
use crate::files::Root;
use crate::restore::{Record, StateDir, restore};

/// The name of the process, as `ps` and `pkill` see it.
pub const NAME: &str = "hint-guardian";
/// The program's argument that makes it a guardian.
pub const ARGUMENT: &str = "guardian";
/// How long after the lease's end the guardian still waits for the agent.
const GRACE: Duration = Duration::from_secs(2);
/// How long the agent waits for a guardian that does not read.
const PATIENCE: Duration = Duration::from_millis(500);
/// At most one new guardian in this time.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
const RETRIES: u32 = 50;
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Why there is no guardian.
#[derive(Debug, thiserror::Error)]
pub enum GuardianError {
    /// It can't be started.
    #[error("no hint is applied without a guardian, and {program} does not start")]
    Start {
        /// The program.
        program: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// It does not take messages.
    #[error("no hint is applied without a guardian, and PID {pid} does not listen")]
    Tell {
        /// Its process.
        pid: u32,
        /// The kernel's error.
        source: io::Error,
    },
}

/// How to start a guardian.
#[derive(Debug)]
pub struct Launch {
    /// The agent's own program.
    pub program: PathBuf,
    /// The root of the kernel's files.
    pub root: PathBuf,
    /// The state directory.
    pub state: StateDir,
    /// The guest's lock; the guardian keeps it too.
    pub lock: File,
}

/// The agent's end of the guardian.
#[derive(Debug)]
pub struct Guardian {
    launch: Launch,
    process: Option<(Child, ChildStdin)>,
    started: Moment,
    held: Option<String>,
    lease_ends: Option<Moment>,
}

impl Guardian {
    /// Starts the guardian.
    ///
    /// # Errors
    /// When the process can't be made.
    pub fn start(launch: Launch, now: Moment) -> Result<Self, GuardianError> {
        let mut guardian = Self {
            launch,
            process: None,
            started: now,
            held: None,
            lease_ends: None,
        };
        guardian.spawn(now)?;
        Ok(guardian)
    }

    /// Its process; `None` while there is none.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|(child, _)| child.id())
    }

    /// From now on it restores `record` when the agent dies.
    ///
    /// # Errors
    /// When no guardian takes it.
    pub fn hold(&mut self, record: &Record, now: Moment) -> Result<(), GuardianError> {
        let json = serde_json::to_string(record).expect("a record is always JSON");
        let line = format!("hold {json}\n");
        self.held = Some(line.clone());
        self.tell(&line, now)
    }

    /// The hint in force holds until `ends`.
    ///
    /// # Errors
    /// When no guardian takes it.
    pub fn lease(&mut self, ends: Moment, now: Moment) -> Result<(), GuardianError> {
        self.lease_ends = Some(ends);
        self.tell(&lease_line(ends, now), now)
    }

    /// Everything is restored.
    ///
    /// # Errors
    /// When no guardian takes it; the next one then starts with nothing to hold.
    pub fn release(&mut self, now: Moment) -> Result<(), GuardianError> {
        self.held = None;
        self.lease_ends = None;
        self.tell("release\n", now)
    }

    /// Has the guardian died? Then a new one is started and told everything. `Some` is when to look again.
    ///
    /// # Errors
    /// When there is no new one yet.
    pub fn tend(&mut self, now: Moment) -> Result<Option<Moment>, GuardianError> {
        if let Some((child, _)) = &mut self.process {
            match child.try_wait() {
                Ok(None) => return Ok(None),
                Ok(Some(status)) => {
                    tracing::warn!(pid = child.id(), %status, "the guardian died; starting another");
                }
                Err(error) => tracing::warn!(pid = child.id(), %error, "the guardian is lost"),
            }
            self.process = None;
        }
        let due = self.started + RESTART_PAUSE;
        if now < due {
            return Ok(Some(due));
        }
        self.spawn(now)?;
        self.brief(now)?;
        Ok(None)
    }

    fn spawn(&mut self, now: Moment) -> Result<(), GuardianError> {
        self.started = now;
        let fail = |source| GuardianError::Start {
            program: self.launch.program.clone(),
            source,
        };
        let lock = self.launch.lock.try_clone().map_err(fail)?;
        let mut child = Command::new(&self.launch.program)
            .arg0(NAME)
            .arg(ARGUMENT)
            .arg(&self.launch.root)
            .arg(self.launch.state.path())
            .stdin(Stdio::piped())
            .stdout(lock)
            .process_group(0)
            .spawn()
            .map_err(fail)?;
        let pipe = child.stdin.take().expect("stdin was asked for");
        rustix::io::ioctl_fionbio(&pipe, true).map_err(|errno| fail(errno.into()))?;
        self.process = Some((child, pipe));
        Ok(())
    }

    /// Tells a new guardian what the one before knew.
    fn brief(&mut self, now: Moment) -> Result<(), GuardianError> {
        let lease = self.lease_ends.map(|ends| lease_line(ends, now));
        let lines: Vec<String> = lease.into_iter().chain(self.held.clone()).collect();
        for line in lines {
            self.send(&line)?;
        }
        Ok(())
    }

    fn tell(&mut self, line: &str, now: Moment) -> Result<(), GuardianError> {
        if self.process.is_some() && self.send(line).is_ok() {
            return Ok(());
        }
        if let Some((mut child, _)) = self.process.take() {
            tracing::warn!(
                pid = child.id(),
                "the guardian does not listen; starting another"
            );
            // It may be stopped: with its pipe closed it would restore what the next one holds.
            let _ = child.kill();
            let _ = child.wait();
        }
        self.spawn(now)?;
        self.brief(now)
    }

    fn send(&mut self, line: &str) -> Result<(), GuardianError> {
        let Some((child, pipe)) = &mut self.process else {
            return Ok(());
        };
        write_patiently(pipe, line.as_bytes()).map_err(|source| GuardianError::Tell {
            pid: child.id(),
            source,
        })
    }
}

fn lease_line(ends: Moment, now: Moment) -> String {
    format!(
        "lease {}\n",
        ends.saturating_duration_since(now).as_millis()
    )
}

fn write_patiently(pipe: &mut ChildStdin, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match pipe.write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                match wait_for(pipe, PollFlags::OUT, Some(PATIENCE)) {
                    Ok(false) => return Err(io::ErrorKind::TimedOut.into()),
                    Ok(true) | Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Waits for an event; `false` when there was none in time.
fn wait_for(
    fd: &impl AsFd,
    flags: PollFlags,
    timeout: Option<Duration>,
) -> rustix::io::Result<bool> {
    let timeout = timeout.map(|timeout| Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(timeout.subsec_nanos()),
    });
    rustix::event::poll(&mut [PollFd::new(fd, flags)], timeout.as_ref()).map(|count| count > 0)
}

/// What the guardian knows.
struct Watch {
    files: Root,
    state: StateDir,
    held: Option<Record>,
    lease_ends: Option<Instant>,
    /// Said already.
    last_error: String,
}

impl Watch {
    fn line(&mut self, line: &str, now: Instant) {
        match line.split_once(' ').unwrap_or((line, "")) {
            ("hold", json) => match serde_json::from_str(json) {
                Ok(record) => self.held = Some(record),
                Err(error) => say(&format!("not a record: {error}")),
            },
            ("lease", length) => match length.parse() {
                Ok(length) => self.lease_ends = Some(now + Duration::from_millis(length)),
                Err(error) => say(&format!("not a lease: {length:?}: {error}")),
            },
            ("release", _) => {
                self.held = None;
                self.lease_ends = None;
            }
            _ => say(&format!("unknown message {line:?}")),
        }
    }

    /// When to stop waiting for the agent.
    fn due(&self) -> Option<Instant> {
        self.held.as_ref()?;
        Some(self.lease_ends? + GRACE)
    }

    fn restore(&mut self, why: &str) -> bool {
        let Some(record) = &self.held else {
            return true;
        };
        match restore(&self.files, &self.state, record) {
            Ok(restored) => {
                for path in &restored.files {
                    say(&format!("{why}: restored {}", path.display()));
                }
                for (path, text) in &restored.replaced {
                    say(&format!("{why}: restored {} as {text:?}", path.display()));
                }
                for (path, reason) in &restored.left {
                    say(&format!("{why}: left {}: {reason}", path.display()));
                }
                self.held = None;
                true
            }
            Err(error) => {
                let error = format!("{why}: {}", chain(&error));
                if error != self.last_error {
                    say(&error);
                    self.last_error = error;
                }
                false
            }
        }
    }
}

/// The guardian's program: watches over the agent at the other end of standard input until that ends.
#[must_use]
pub fn run(root: &Path, state: &Path) -> ExitCode {
    if let Err(error) = set_up() {
        say(&format!("{error}"));
        return ExitCode::FAILURE;
    }
    let mut watch = Watch {
        files: Root::new(root),
        state: StateDir::new(state),
        held: None,
        lease_ends: None,
        last_error: String::new(),
    };
    if let Err(error) = listen(&mut watch) {
        say(&format!("can't read from the agent: {error}"));
    }
    for _ in 0..RETRIES {
        if watch.restore("the agent is gone") {
            return ExitCode::SUCCESS;
        }
        thread::sleep(RETRY_PAUSE);
    }
    ExitCode::FAILURE
}

fn set_up() -> io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        // The flag is never looked at: a handler that does nothing else is how to ignore a signal without unsafe code.
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
    }
    rustix::thread::set_name(c"hint-guardian")?;
    Ok(())
}

fn listen(watch: &mut Watch) -> rustix::io::Result<()> {
    // Not std's stdin: its buffer would hide lines from poll.
    let input = rustix::stdio::stdin();
    let mut pending = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let now = Instant::now();
        let left = watch.due().map(|due| due.saturating_duration_since(now));
        if left.is_some_and(|left| left.is_zero()) {
            if !watch.restore("the agent does not answer") {
                watch.lease_ends = Some(now);
            }
            continue;
        }
        match wait_for(&input, PollFlags::IN, left) {
            Ok(true) => {}
            Ok(false) | Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno),
        }
        match rustix::io::read(input, &mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => pending.extend_from_slice(&buffer[..count]),
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno),
        }
        while let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = pending.drain(..=end).collect();
            watch.line(String::from_utf8_lossy(&line).trim_end(), Instant::now());
        }
    }
}

/// Logs a line; a broken log must not stop the restoration, as it would with `eprintln!`.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{NAME}: {text}");
}
