//! One agent for each guest. What is locked is the kernel's list of CPUs, which every actuator's mask is about: two agents with
//! different state directories would each take the other's mask for the guest's own.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use crate::files::Root;

/// The file that stands for the guest.
pub const PATH: &str = "/sys/devices/system/cpu/online";

/// The lock can't be taken for another reason than that somebody has it.
#[derive(Debug, thiserror::Error)]
#[error("can't lock {path}, which keeps a second agent out; sysfs must be mounted")]
pub struct LockError {
    /// The file.
    path: PathBuf,
    /// The kernel's error.
    source: io::Error,
}

/// Takes the guest's lock without waiting; `None` when an agent or its guardian has it. It is held until the last copy of the file,
/// in whatever process, is closed.
///
/// # Errors
/// When the file can't be opened or locked.
pub fn take(files: &Root) -> Result<Option<File>, LockError> {
    let path = Path::new(PATH);
    let fail = |source| LockError {
        path: path.to_owned(),
        source,
    };
    let file = files.open(path).map_err(fail)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(errno) => Err(fail(errno.into())),
    }
}
