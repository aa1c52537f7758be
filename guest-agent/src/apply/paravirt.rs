//! The kernel's mask of CPUs to avoid, `/sys/devices/system/cpu/paravirt` (paravirt-CPU patch series).
//!
//! The file takes the CPUs to *avoid*; a newline clears it. The kernel refuses a mask of all online CPUs or of more CPUs
//! than are online with EINVAL. Pinned tasks stay where they are. The file has one owner: this agent. But the kernel may take
//! a CPU that goes offline out of the mask, and clears the mask when nothing else would be left.

use std::path::Path;

use hint_proto::{CpuSet, v1};

use super::{Actuator, ApplyError, Plan, Wish, Write, parse, read, read_list};
use crate::files::{Files, is_gone};
use crate::restore::{Author, Entry, Record, writable_text};

pub(super) const NAME: &str = "paravirt";
pub(crate) const PATH: &str = "/sys/devices/system/cpu/paravirt";

/// Writes the mask of CPUs to avoid.
#[derive(Debug, Clone, Copy)]
pub struct Paravirt;

impl Paravirt {
    /// Does it work here?
    ///
    /// # Errors
    /// Why not.
    pub fn probe(files: &dyn Files) -> Result<Self, String> {
        match files.writable(Path::new(PATH)) {
            Ok(()) => Ok(Self),
            Err(error) if is_gone(&error) => Err(format!(
                "{PATH} is missing: this kernel lacks the paravirt-CPU patches"
            )),
            Err(error) => Err(format!("{PATH} is not writable: {error}")),
        }
    }
}

impl Actuator for Paravirt {
    fn name(&self) -> &'static str {
        NAME
    }

    fn kind(&self) -> v1::Actuator {
        v1::Actuator::Paravirt
    }

    fn pinned_tasks(&self) -> v1::PinnedTasks {
        v1::PinnedTasks::Stay
    }

    fn plan(&self, files: &dyn Files, record: &Record, wish: &Wish) -> Result<Plan, ApplyError> {
        let path = Path::new(PATH);
        let current = read(files, path)?;
        let avoided = wish.online.difference(&wish.preferred);
        let text = writable_text(&avoided.to_string()).to_owned();
        let mut record = record.clone();
        let mut writes = Vec::new();
        if parse(&current, path)? != avoided {
            if record.files.is_empty() {
                record.files.push(Entry {
                    path: path.to_owned(),
                    found: current.clone(),
                    // The mask as found can become impossible when CPUs go offline; no mask is the nearest.
                    instead: vec!["\n".to_owned()],
                    wrote: Vec::new(),
                    shared: false,
                });
            }
            for entry in &mut record.files {
                if entry.author(&current) == Author::Other {
                    tracing::warn!(
                        found = current.trim(),
                        "{PATH} is not as it was left: a CPU went offline, or somebody else writes it too"
                    );
                }
                entry.will_write(&current, &text);
            }
            writes.push(Write {
                path: path.to_owned(),
                text,
                undo: current.clone(),
                undo_instead: Vec::new(),
                may_vanish: false,
            });
        }
        Ok(Plan {
            record,
            writes,
            lost: Vec::new(),
        })
    }

    fn current(&self, files: &dyn Files, online: &CpuSet) -> Result<CpuSet, ApplyError> {
        Ok(online.difference(&read_list(files, Path::new(PATH))?))
    }
}
