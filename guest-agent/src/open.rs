//! What to do when it is not known any more what a guest's mask was: open every mask that an agent may have narrowed.
//!
//! The kernel's mask of CPUs to avoid is cleared. Top-level groups with a `cpuset.cpus` of their own get a blank one, or all
//! possible CPUs where the kernel takes no blank. That may undo a setting of the administrator's, which is the lesser harm: a guest
//! that stays folded is slow for no reason that anybody sees. Threaded groups and partitions, which no agent writes, stay.

use std::io;
use std::path::{Path, PathBuf};

use crate::apply::{Cpuset, paravirt};
use crate::files::{Files, is_gone};
use crate::restore::{RestoreError, Restored, put_back};

/// Opens every mask. What is open already is not written.
///
/// # Errors
/// When a mask can't be opened; the others are open nevertheless.
pub fn open_all(files: &dyn Files) -> Result<Restored, RestoreError> {
    let mut done = Restored::default();
    let mut failed = Vec::new();
    let mut open = |path: PathBuf, instead: &[String]| {
        let result = match is_open(files, &path, instead) {
            Ok(true) => return,
            Ok(false) => put_back(files, &path, "\n", instead),
            Err(error) => Err(error),
        };
        match result {
            Ok(None) => done.replaced.push((path, String::new())),
            Ok(Some(text)) => done.replaced.push((path, text)),
            Err(error) if is_gone(&error) => {}
            Err(error) => failed.push((path, "\n".to_owned(), error)),
        }
    };
    open(paravirt::PATH.into(), &[]);
    if let Some(cpuset) = Cpuset::find(files) {
        let everything = cpuset.everything(files).unwrap_or_default();
        for group in cpuset.ordinary_groups(files).unwrap_or_default() {
            open(group.join("cpuset.cpus"), &everything);
        }
    }
    if failed.is_empty() {
        Ok(done)
    } else {
        Err(RestoreError::Files(failed))
    }
}

fn is_open(files: &dyn Files, path: &Path, everything: &[String]) -> io::Result<bool> {
    let text = files.read(path)?;
    let text = text.trim();
    Ok(text.is_empty() || everything.iter().any(|all| all == text))
}
