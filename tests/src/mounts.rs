//! Other views of this host: mounts of a test's own, which no other process sees and which end with the test.

use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::console;
use crate::process::{Process, ProcessError};

/// Why there is no such view.
#[derive(Debug, thiserror::Error)]
pub enum MountsError {
    /// Its keeper did not start.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// No folder for its log.
    #[error("can't make a folder in {path}: {source}")]
    Folder {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A mount was refused.
    #[error("can't mount /sys/kernel/debug for a test alone ({found}); it needs root: {log}")]
    Refused {
        /// How its keeper is.
        found: String,
        /// What it said.
        log: String,
    },
}

/// This host with another `/sys/kernel/debug`. A process that sleeps keeps it; it goes when this is dropped, or when the test
/// is killed.
#[derive(Debug)]
pub struct HostView {
    keeper: Process,
    _folder: TempDir,
}

impl HostView {
    /// The host with debugfs.
    ///
    /// # Errors
    /// When it can't be mounted.
    pub fn with_debugfs() -> Result<Self, MountsError> {
        // Debugfs over debugfs would be refused where the host has it mounted.
        Self::start("mount -t tmpfs none $at && mount -t debugfs none $at")
    }

    /// The host with nothing in `/sys/kernel/debug`, whatever is mounted there.
    ///
    /// # Errors
    /// When it can't be hidden.
    pub fn without_debugfs() -> Result<Self, MountsError> {
        Self::start("mount -t tmpfs none $at")
    }

    fn start(mount: &str) -> Result<Self, MountsError> {
        let folder = tempfile::tempdir().map_err(|source| MountsError::Folder {
            path: std::env::temp_dir(),
            source,
        })?;
        let log = folder.path().join("log");
        let script =
            format!("at=/sys/kernel/debug; {mount} && echo mounted && exec sleep infinity");
        let arguments = ["--mount", "--propagation", "private", "sh", "-c", &script];
        let mut keeper =
            Process::start(Path::new("unshare"), &arguments.map(Into::into), &log, None)?;
        let end = Instant::now() + Duration::from_secs(60);
        while console::tail(&log, 1).trim() != "mounted" {
            let found = match keeper.ended() {
                Some(status) => status.to_string(),
                None if Instant::now() > end => "no end in sight".to_owned(),
                None => {
                    thread::sleep(Duration::from_millis(5));
                    continue;
                }
            };
            let log = console::tail(&log, 10);
            return Err(MountsError::Refused { found, log });
        }
        Ok(Self {
            keeper,
            _folder: folder,
        })
    }

    /// The root of this view, with `proc` and `sys` in it.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.keeper.pid()))
    }
}
