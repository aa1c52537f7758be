//! Record: all that decisions are made of, written to a file of bounded size, so that `hint-broker replay` can make them again, with
//! other settings if asked. It holds samples, what was found, groups, settings, the agents' states, and what was decided. It decides
//! nothing.
//!
//! ```text
//! daemon ──moments──► bounded queue ──► writer thread ──blocks──► FILE ──half full──► FILE.old
//! ```
//!
//! A tick never waits for the file: what does not fit into the queue is lost and counted. A file is a head and then blocks, each
//! compressed, with a check sum, and readable without the others: of a damaged or cut file all other blocks remain.

mod block;
mod counters;
mod format;
mod reader;
mod scene;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use self::reader::{Loss, Reader};
pub use self::scene::{Scene, Settings};
pub use self::writer::Recorder;
use crate::govern::{AgentState, Decision};
use crate::observe::Sample;

/// One tick of the daemon.
#[derive(Debug, Clone, PartialEq)]
pub struct Moment {
    /// Its number in the daemon's run, from 1 on.
    pub number: u64,
    /// What the sample is about: the same `Arc` for as long as it stays the same.
    pub scene: Arc<Scene>,
    /// The counters.
    pub sample: Arc<Sample>,
    /// Each VM's agent, in the order of [`Scene::found`].
    pub agents: Vec<AgentState>,
    /// What the daemon decided for each VM, in that order.
    pub decided: Vec<Decided>,
}

/// A decision, as far as a replay is compared with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decided {
    /// vCPUs to use; `None` when its vCPUs are not known.
    pub usable: Option<u32>,
    /// Name of what bound it, since a recording outlives the list of reasons.
    pub reason: String,
}

impl From<&Decision> for Decided {
    fn from(decision: &Decision) -> Self {
        Self {
            usable: decision.usable,
            reason: decision.reason().to_string(),
        }
    }
}

/// Why a recording can't be written or read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The system refuses.
    #[error("can't {what} {path}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Another kind of file.
    #[error("{0} is no recording of hint-broker: name another file")]
    NoRecording(PathBuf),
    /// A recording in another format.
    #[error(
        "{path} is a recording of format {found}, and this hint-broker reads format {expected}: replay it with the version that wrote it"
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// The format that it has.
        found: u16,
        /// The format that is expected.
        expected: u16,
    },
    /// Another process writes there.
    #[error("another process records to {0}: name another file")]
    Taken(PathBuf),
    /// A block that can't be made: a fault of this program.
    #[error("can't encode a block for {path}: {source}; report this")]
    Encode {
        /// The file.
        path: PathBuf,
        /// The encoder's error.
        source: postcard::Error,
    },
}

impl RecordError {
    fn io(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io {
            what,
            path: path.to_owned(),
            source,
        }
    }
}

/// Where the older half of a recording is.
#[must_use]
pub fn old_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".old");
    PathBuf::from(name)
}

#[cfg(test)]
mod tests;
