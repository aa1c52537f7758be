//! How the guest is made to use only some CPUs. An actuator plans writes to kernel files; [`carry_out`] makes them, all
//! or none. What to put back is the plan's [`Record`]; putting it back is [`crate::restore`]'s.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use hint_proto::{CpuSet, ParseCpuSetError, v1};
use serde::Deserialize;

use crate::error::chain;
use crate::files::{Files, is_gone};
use crate::restore::{Record, put_back};
use crate::system;
use crate::topology::{Topology, TopologyError};

mod cpuset;
mod observe;
pub(crate) mod paravirt;
mod survey;

pub use cpuset::Cpuset;
pub use observe::Observe;
pub use paravirt::Paravirt;
pub use survey::{Candidate, Survey};

/// Which actuator the operator wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Choice {
    /// The first that works here: paravirt, cpuset, observe.
    #[default]
    Auto,
    /// The kernel's mask of CPUs to avoid.
    Paravirt,
    /// `cpuset.cpus` of the top-level cgroups.
    Cpuset,
    /// Nothing is applied.
    Observe,
}

/// Why a hint is not applied.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// A kernel file can't be read.
    #[error("can't read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A kernel file is no CPU list.
    #[error("{path} is no CPU list")]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: ParseCpuSetError,
    },
    /// The kernel refused a write; what was written before it is undone.
    #[error("the mask is as it was, since {path} does not take {text:?}")]
    Write {
        /// The file.
        path: PathBuf,
        /// The text.
        text: String,
        /// The kernel's error, with its errno.
        source: io::Error,
    },
    /// The kernel refused a write and also to undo what was written before it.
    #[error("{}; and {path} does not take {text:?} back", chain(.cause.as_ref()))]
    Undo {
        /// Why the writes had to be undone.
        cause: Box<ApplyError>,
        /// The file.
        path: PathBuf,
        /// The text.
        text: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The topology is not known.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The actuator that the operator asked for does not work here.
    #[error("the actuator {name} does not work here: {why}; use --actuator auto or another one")]
    Unavailable {
        /// The actuator's name.
        name: &'static str,
        /// Why not, and what would help.
        why: String,
    },
}

/// What the mask should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    /// CPUs to use: a part of `online`, not empty, not all.
    pub preferred: CpuSet,
    /// CPUs that are online.
    pub online: CpuSet,
}

/// One write to a kernel file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Write {
    /// The file.
    pub path: PathBuf,
    /// The text to write.
    pub text: String,
    /// The text to write when a later write fails.
    pub undo: String,
    /// Texts to try when the kernel refuses that one, as in [`crate::restore::Entry`].
    pub undo_instead: Vec<String>,
    /// Is it no error when the file is gone? True for groups, which come and go.
    pub may_vanish: bool,
}

/// How to get from the state now to the wish.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// What must be put back in the end, these writes included.
    pub record: Record,
    /// The writes; none when the mask is already right.
    pub writes: Vec<Write>,
    /// Files of a former plan that somebody else has changed: they are left to them.
    pub lost: Vec<PathBuf>,
}

/// A way to make the guest use only some CPUs.
pub trait Actuator: fmt::Debug {
    /// Its name, as in the configuration.
    fn name(&self) -> &'static str;

    /// Its name in the protocol.
    fn kind(&self) -> v1::Actuator;

    /// What becomes of a task that is pinned to an avoided CPU.
    fn pinned_tasks(&self) -> v1::PinnedTasks;

    /// Plans the writes for `wish`. `record` is the last plan's record, or an empty one: files that are not yet in it
    /// are read and added. Nothing is written.
    ///
    /// # Errors
    /// When kernel files can't be read.
    fn plan(&self, files: &dyn Files, record: &Record, wish: &Wish) -> Result<Plan, ApplyError>;

    /// CPUs really in use now, as the kernel's files show it.
    ///
    /// # Errors
    /// When kernel files can't be read.
    fn current(&self, files: &dyn Files, online: &CpuSet) -> Result<CpuSet, ApplyError>;
}

/// The actuator to use, and why those before it in the order of probing don't work here.
#[derive(Debug)]
pub struct Probed {
    /// The actuator.
    pub actuator: Box<dyn Actuator>,
    /// Names of those that don't work, each with the reason.
    pub rejected: Vec<(&'static str, String)>,
}

/// Looks for an actuator: paravirt, cpuset, observe.
///
/// # Errors
/// When the operator asked for one that does not work here, or the topology can't be read.
pub fn probe(
    files: &dyn Files,
    choice: Choice,
    allow_old_kernel: bool,
) -> Result<Probed, ApplyError> {
    let paravirt = || -> Result<Box<dyn Actuator>, String> {
        no_other_writer(files)?;
        Ok(Box::new(Paravirt::probe(files)?))
    };
    let topology = Topology::read(files)?;
    let cpuset = || -> Result<Box<dyn Actuator>, String> {
        no_other_writer(files)?;
        Ok(Box::new(Cpuset::probe(files, &topology, allow_old_kernel)?))
    };
    let only = |name, found: Result<Box<dyn Actuator>, String>| match found {
        Ok(actuator) => Ok(Probed {
            actuator,
            rejected: Vec::new(),
        }),
        Err(why) => Err(ApplyError::Unavailable { name, why }),
    };
    match choice {
        Choice::Paravirt => only(paravirt::NAME, paravirt()),
        Choice::Cpuset => only(cpuset::NAME, cpuset()),
        Choice::Observe => only(observe::NAME, Ok(Box::new(Observe))),
        Choice::Auto => {
            let mut rejected = Vec::new();
            let found = paravirt()
                .map_err(|why| rejected.push((paravirt::NAME, why)))
                .or_else(|()| cpuset().map_err(|why| rejected.push((cpuset::NAME, why))));
            Ok(Probed {
                actuator: found.unwrap_or_else(|()| Box::new(Observe)),
                rejected,
            })
        }
    }
}

/// Does nobody else choose the guest's CPUs?
fn no_other_writer(files: &dyn Files) -> Result<(), String> {
    if system::steal_governor(files) {
        Err(system::GOVERNOR_ADVICE.to_owned())
    } else {
        Ok(())
    }
}

/// Makes the writes in order. When one fails, those before it are undone, the last first.
///
/// # Errors
/// [`ApplyError::Write`] when the mask is as it was, [`ApplyError::Undo`] when not even that could be had.
pub fn carry_out(files: &dyn Files, writes: &[Write]) -> Result<(), ApplyError> {
    for (index, write) in writes.iter().enumerate() {
        let source = match files.write(&write.path, &write.text) {
            Ok(()) => continue,
            Err(error) if write.may_vanish && is_gone(&error) => continue,
            Err(error) => error,
        };
        let cause = ApplyError::Write {
            path: write.path.clone(),
            text: write.text.trim().to_owned(),
            source,
        };
        return Err(undo(files, &writes[..index], cause));
    }
    Ok(())
}

/// Undoes what it can; gives `cause`, or the first failure with it.
fn undo(files: &dyn Files, done: &[Write], cause: ApplyError) -> ApplyError {
    let mut failure = None;
    for write in done.iter().rev() {
        match put_back(files, &write.path, &write.undo, &write.undo_instead) {
            Err(error) if failure.is_none() && !is_gone(&error) => {
                failure = Some((write, error));
            }
            _ => {}
        }
    }
    match failure {
        None => cause,
        Some((write, source)) => ApplyError::Undo {
            cause: Box::new(cause),
            path: write.path.clone(),
            text: write.undo.trim().to_owned(),
            source,
        },
    }
}

fn read(files: &dyn Files, path: &Path) -> Result<String, ApplyError> {
    files.read(path).map_err(|source| ApplyError::Read {
        path: path.to_owned(),
        source,
    })
}

fn read_list(files: &dyn Files, path: &Path) -> Result<CpuSet, ApplyError> {
    parse(&read(files, path)?, path)
}

fn parse(text: &str, path: &Path) -> Result<CpuSet, ApplyError> {
    CpuSet::parse_list(text).map_err(|source| ApplyError::Parse {
        path: path.to_owned(),
        source,
    })
}
