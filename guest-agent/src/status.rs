//! What `hint-agent status` tells: is an agent there, is the guest folded, and what would be put back. It changes nothing.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use crate::files::{Files, Root};
use crate::lock::{self, LockError};
use crate::restore::{RestoreError, StateDir};
use crate::system;
use crate::topology::{self, TopologyError};

/// Why the status is not known.
#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    /// Whether an agent is there can't be found out.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The record can't be read.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// The online CPUs are not known.
    #[error(transparent)]
    Topology(#[from] TopologyError),
}

/// How the guest is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// All CPUs that the guest had are in use.
    Unfolded,
    /// An agent has folded it.
    Folded,
    /// No agent is there, and what one has written is still there: `hint-agent restore` puts it back.
    LeftOver,
    /// The record can't be read: the next agent, or `hint-agent restore`, opens every mask.
    Damaged,
}

/// One file that the fold has written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Written {
    /// The file.
    pub path: PathBuf,
    /// What it has to have again.
    pub found: String,
    /// What it has now; `None` when it can't be read.
    pub now: Option<String>,
}

/// The status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Does an agent, or its guardian, run?
    pub running: bool,
    /// How the guest is.
    pub state: State,
    /// The actuator of the fold.
    pub actuator: Option<String>,
    /// Online CPUs, as a kernel cpulist.
    pub online: String,
    /// CPUs that the fold prefers, as a kernel cpulist.
    pub preferred: Option<String>,
    /// What the fold has written.
    pub files: Vec<Written>,
}

impl Status {
    /// Looks.
    ///
    /// # Errors
    /// When sysfs or the state directory can't be read.
    pub fn read(files: &Root, state: &StateDir) -> Result<Self, StatusError> {
        // The lock goes back at once; an agent that starts meanwhile waits for it.
        let running = lock::take(files)?.is_none();
        let (record, damaged) = match state.load() {
            Ok(record) => (record, false),
            Err(RestoreError::Record { .. }) => (None, true),
            Err(error) => return Err(error.into()),
        };
        // What another boot has left is no mask any more.
        let record = record.filter(|record| {
            let now = system::boot_id(files);
            record.boot_id.is_none() || now.is_none() || record.boot_id == now
        });
        let how = match (&record, running) {
            _ if damaged => State::Damaged,
            (None, _) => State::Unfolded,
            (Some(_), true) => State::Folded,
            (Some(_), false) => State::LeftOver,
        };
        let written = record.iter().flat_map(|record| &record.files);
        Ok(Self {
            running,
            state: how,
            actuator: record.as_ref().map(|record| record.actuator.clone()),
            online: topology::online(files)?.to_string(),
            preferred: state.published(),
            files: written
                .map(|entry| Written {
                    path: entry.path.clone(),
                    found: entry.found.trim().to_owned(),
                    now: files
                        .read(&entry.path)
                        .ok()
                        .map(|text| text.trim().to_owned()),
                })
                .collect(),
        })
    }

    /// The exit status: 0 with an agent, 3 without one, 4 when the guest needs `hint-agent restore`.
    #[must_use]
    pub fn exit(&self) -> u8 {
        match (self.running, self.state) {
            (false, State::LeftOver | State::Damaged) => 4,
            (true, _) => 0,
            (false, State::Unfolded | State::Folded) => 3,
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let agent = if self.running { "runs" } else { "does not run" };
        writeln!(f, "agent: {agent}")?;
        let state = match self.state {
            State::Unfolded => "unfolded",
            State::Folded => "folded",
            State::LeftOver => "folded, and nobody is there to unfold it: run `hint-agent restore`",
            State::Damaged => {
                "the restore record is damaged: run `hint-agent restore`, which opens every mask"
            }
        };
        writeln!(f, "state: {state}")?;
        writeln!(f, "online: {}", self.online)?;
        if let Some(preferred) = &self.preferred {
            writeln!(f, "preferred: {preferred}")?;
        }
        if let Some(actuator) = &self.actuator {
            writeln!(f, "actuator: {actuator}")?;
        }
        for file in &self.files {
            let now = file.now.as_deref().unwrap_or("gone");
            writeln!(
                f,
                "{}: {now:?} now, {:?} to be put back",
                file.path.display(),
                file.found
            )?;
        }
        Ok(())
    }
}
