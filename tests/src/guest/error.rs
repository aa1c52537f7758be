//! What can go wrong with a guest.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hint_proto::ParseCpuSetError;

use crate::assets::AssetError;
use crate::cgroup::CgroupError;
use crate::initramfs::InitramfsError;
use crate::process::ProcessError;
use crate::vsock::VsockError;

use super::WorkId;

/// What can go wrong with a guest.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The spec asks for something impossible.
    #[error("guest {guest:?}: expected {expected}, found {found}")]
    Spec {
        /// The guest.
        guest: String,
        /// What is possible.
        expected: &'static str,
        /// What was asked.
        found: String,
    },
    /// A part of the lab is missing.
    #[error(transparent)]
    Asset(#[from] AssetError),
    /// No initramfs.
    #[error(transparent)]
    Initramfs(#[from] InitramfsError),
    /// No CPU group.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// No vsock.
    #[error(transparent)]
    Vsock(#[from] VsockError),
    /// QEMU did not start.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// A file of the guest cannot be used.
    #[error("cannot use {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The guest did not come up.
    #[error(
        "guest {guest} did not come up: {what}\n--- QEMU ---\n{qemu}\n--- end of the console ---\n{console}"
    )]
    Boot {
        /// The guest.
        guest: String,
        /// What happened.
        what: String,
        /// What QEMU said.
        qemu: String,
        /// The last lines of its console.
        console: String,
    },
    /// A command did not end in time; the guest killed it.
    #[error(
        "guest {guest}: expected {command:?} to end within {deadline:?}; its output so far: {output}"
    )]
    Deadline {
        /// The guest.
        guest: String,
        /// The command.
        command: String,
        /// The deadline.
        deadline: Duration,
        /// What it printed.
        output: String,
    },
    /// The guest does not answer as it should.
    #[error(
        "guest {guest}: {command:?} has no answer: {what}\n--- end of the console ---\n{console}"
    )]
    Channel {
        /// The guest.
        guest: String,
        /// The command.
        command: String,
        /// What happened.
        what: String,
        /// The last lines of its console.
        console: String,
    },
    /// A command that must succeed failed.
    #[error("guest {guest}: expected {command:?} to exit with 0, found {status}: {output}")]
    Status {
        /// The guest.
        guest: String,
        /// The command.
        command: String,
        /// Its status.
        status: u8,
        /// What it printed.
        output: String,
    },
    /// Work did not end in time; it goes on.
    #[error("guest {guest}: expected work {id:?} to end within {deadline:?}; it still runs")]
    WorkDeadline {
        /// The guest.
        guest: String,
        /// The work.
        id: WorkId,
        /// The deadline.
        deadline: Duration,
    },
    /// A CPU list of the guest cannot be read.
    #[error("guest {guest}: {path}: {source}")]
    CpuSet {
        /// The guest.
        guest: String,
        /// The file in the guest.
        path: String,
        /// What is wrong.
        source: ParseCpuSetError,
    },
    /// A program in the guest printed something else than expected.
    #[error("guest {guest}: expected {expected}, found {found:?}")]
    Unexpected {
        /// The guest.
        guest: String,
        /// What was expected.
        expected: &'static str,
        /// What it printed.
        found: String,
    },
}

impl GuestError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io {
            path: path.to_owned(),
            source,
        }
    }
}
