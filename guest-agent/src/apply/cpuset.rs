//! `cpuset.cpus` of every top-level cgroup (cgroup v2, kernel 6.2 or later).
//!
//! Not covered: tasks in the root group and kernel threads. Pinned tasks are moved while folded; the kernel remembers the
//! affinity that they asked for and gives it back afterwards (before 6.2 it forgot it: such kernels are refused).
//! A group that has a `cpuset.cpus` of its own keeps within it, and is left alone where nothing of it is preferred.
//! The kernel does not let a group with tasks go back to a blank `cpuset.cpus` (ENOSPC, `validate_change` in
//! kernel/cgroup/cpuset.c); all possible CPUs are the same mask and are written instead.
//! Threaded groups and partitions are left alone. Where the cpuset controller is not enabled for the top-level groups,
//! the agent enables it and takes it out again in the end.

use std::path::{Path, PathBuf};

use hint_proto::{CpuSet, v1};

use super::{Actuator, ApplyError, Plan, Wish, Write, parse, read, read_list};
use crate::files::{Files, is_gone};
use crate::restore::{Author, Entry, Record};
use crate::system;
use crate::topology::Topology;

pub(super) const NAME: &str = "cpuset";
/// The first kernel that keeps a task's own affinity over a cpuset's changes.
const FIRST_KERNEL: (u32, u32) = (6, 2);
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";
const MOUNTS: &str = "/proc/self/mountinfo";

/// Writes `cpuset.cpus` of the top-level groups.
#[derive(Debug, Clone)]
pub struct Cpuset {
    root: PathBuf,
}

impl Cpuset {
    /// Does it work here?
    ///
    /// # Errors
    /// Why not, and what would help.
    pub fn probe(
        files: &dyn Files,
        topology: &Topology,
        allow_old_kernel: bool,
    ) -> Result<Self, String> {
        let mounts = files
            .read(Path::new(MOUNTS))
            .map_err(|error| format!("can't read {MOUNTS}: {error}"))?;
        let root = cgroup2_root(&mounts)
            .ok_or_else(|| format!("{MOUNTS} shows no mount of the cgroup v2 root"))?;
        let controllers = root.join("cgroup.controllers");
        let names = files
            .read(&controllers)
            .map_err(|error| format!("can't read {}: {error}", controllers.display()))?;
        if !has_cpuset(&names) {
            return Err(format!(
                "{} lacks cpuset: the kernel has none, or cgroup v1 holds it",
                controllers.display()
            ));
        }
        let control = root.join("cgroup.subtree_control");
        files
            .writable(&control)
            .map_err(|error| format!("{} is not writable: {error}", control.display()))?;
        if !allow_old_kernel
            && system::kernel_version(files).is_none_or(|version| version < FIRST_KERNEL)
        {
            return Err(format!(
                "the kernel is {}, and before 6.2 a cpuset destroys the affinity of pinned tasks for good; allow_old_kernel = true in the configuration accepts that",
                system::kernel_release(files).unwrap_or_else(|| "of unknown release".to_owned())
            ));
        }
        let isolated = topology.isolated.intersection(&topology.online);
        if !isolated.is_empty() {
            // The kernel moves displaced tasks to any CPU of the new mask, and from an isolated one nothing moves them on.
            return Err(format!(
                "CPUs {isolated} are isolated, and a cpuset would put ordinary tasks on them"
            ));
        }
        Ok(Self { root })
    }

    /// Where groups are, whether the actuator works there or not.
    pub(crate) fn find(files: &dyn Files) -> Option<Self> {
        let mounts = files.read(Path::new(MOUNTS)).ok()?;
        cgroup2_root(&mounts).map(|root| Self { root })
    }

    /// The top-level groups that are folded: neither threaded nor partitions.
    pub(crate) fn ordinary_groups(&self, files: &dyn Files) -> Result<Vec<PathBuf>, ApplyError> {
        let mut groups = self.groups(files)?;
        groups.retain(|group| is_ordinary(files, group).unwrap_or(true));
        Ok(groups)
    }

    fn control(&self) -> PathBuf {
        self.root.join("cgroup.subtree_control")
    }

    fn is_enabled(&self, files: &dyn Files) -> Result<bool, ApplyError> {
        Ok(has_cpuset(&read(files, &self.control())?))
    }

    /// Texts that mean the same as a blank `cpuset.cpus`: all possible CPUs, or, where a partition beside the group owns
    /// some of them, those that the root group has left.
    pub(crate) fn everything(&self, files: &dyn Files) -> Result<Vec<String>, ApplyError> {
        let mut texts = Vec::new();
        for path in [
            PathBuf::from(POSSIBLE),
            self.root.join("cpuset.cpus.effective"),
        ] {
            match read_list(files, &path) {
                Ok(cpus) => texts.push(cpus.to_string()),
                Err(ApplyError::Read { source, .. }) if is_gone(&source) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(texts)
    }

    fn groups(&self, files: &dyn Files) -> Result<Vec<PathBuf>, ApplyError> {
        let names = files
            .directories(&self.root)
            .map_err(|source| ApplyError::Read {
                path: self.root.clone(),
                source,
            })?;
        Ok(names.iter().map(|name| self.root.join(name)).collect())
    }
}

impl Actuator for Cpuset {
    fn name(&self) -> &'static str {
        NAME
    }

    fn kind(&self) -> v1::Actuator {
        v1::Actuator::Cpuset
    }

    fn pinned_tasks(&self) -> v1::PinnedTasks {
        v1::PinnedTasks::Moved
    }

    fn plan(&self, files: &dyn Files, record: &Record, wish: &Wish) -> Result<Plan, ApplyError> {
        let mut plan = Plan {
            record: Record {
                files: Vec::new(),
                ..record.clone()
            },
            ..Plan::default()
        };
        let enabled = self.is_enabled(files)?;
        if !enabled {
            plan.record.enabled_cpuset = Some(self.control());
            plan.writes.push(Write {
                path: self.control(),
                text: "+cpuset".to_owned(),
                undo: "-cpuset".to_owned(),
                undo_instead: Vec::new(),
                may_vanish: false,
            });
        }
        let everything = self.everything(files)?;
        for group in self.groups(files)? {
            let path = group.join("cpuset.cpus");
            let known = record.files.iter().find(|entry| entry.path == path);
            if !is_ordinary(files, &group)? {
                plan.record.files.extend(known.cloned());
                continue;
            }
            let current = match files.read(&path) {
                Ok(text) => text,
                // The file appears with the controller, and blank.
                Err(error) if is_gone(&error) && !enabled => "\n".to_owned(),
                Err(error) if is_gone(&error) => continue,
                Err(source) => return Err(ApplyError::Read { path, source }),
            };
            let entry = known.cloned().unwrap_or_else(|| Entry {
                path,
                instead: if current.trim().is_empty() {
                    everything.clone()
                } else {
                    Vec::new()
                },
                found: current.clone(),
                wrote: Vec::new(),
                shared: true,
            });
            add_group(&mut plan, entry, &current, wish)?;
        }
        Ok(plan)
    }

    fn current(&self, files: &dyn Files, online: &CpuSet) -> Result<CpuSet, ApplyError> {
        if !self.is_enabled(files)? {
            return Ok(online.clone());
        }
        let mut used = CpuSet::new();
        for group in self.groups(files)? {
            match read_list(files, &group.join("cpuset.cpus.effective")) {
                Ok(effective) => used = used.union(&effective),
                Err(ApplyError::Read { source, .. }) if is_gone(&source) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(if used.is_empty() {
            online.clone()
        } else {
            used.intersection(online)
        })
    }
}

fn add_group(
    plan: &mut Plan,
    mut entry: Entry,
    current: &str,
    wish: &Wish,
) -> Result<(), ApplyError> {
    let author = entry.author(current);
    if author == Author::Other {
        // Fighting over the file would help nobody; the record keeps it so that the end of the fold can say so.
        plan.lost.push(entry.path.clone());
        plan.record.files.push(entry);
        return Ok(());
    }
    let found = parse(&entry.found, &entry.path)?;
    let allowed = if found.is_empty() {
        wish.preferred.clone()
    } else {
        found.intersection(&wish.preferred)
    };
    // Where nothing of the group's own set is preferred, it gets back what it had.
    let wanted = if allowed.is_empty() { found } else { allowed };
    if wanted != parse(current, &entry.path)? {
        let text = wanted.to_string();
        entry.will_write(current, &text);
        plan.writes.push(Write {
            path: entry.path.clone(),
            text,
            undo: current.to_owned(),
            undo_instead: if author == Author::Found {
                entry.instead.clone()
            } else {
                Vec::new()
            },
            may_vanish: true,
        });
    }
    if !entry.wrote.is_empty() {
        plan.record.files.push(entry);
    }
    Ok(())
}

/// Is the group one to fold: neither threaded nor a partition?
fn is_ordinary(files: &dyn Files, group: &Path) -> Result<bool, ApplyError> {
    for (file, ordinary) in [
        ("cgroup.type", "domain"),
        ("cpuset.cpus.partition", "member"),
    ] {
        let path = group.join(file);
        match files.read(&path) {
            // "domain threaded" has threaded groups below it and is a normal one itself.
            Ok(text) if !text.trim().starts_with(ordinary) => return Ok(false),
            Ok(_) => {}
            Err(error) if is_gone(&error) => {}
            Err(source) => return Err(ApplyError::Read { path, source }),
        }
    }
    Ok(true)
}

fn has_cpuset(controllers: &str) -> bool {
    controllers
        .split_ascii_whitespace()
        .any(|name| name == "cpuset")
}

/// The mount point of the root of the cgroup v2 hierarchy.
fn cgroup2_root(mountinfo: &str) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        (file_system.split(' ').next() == Some("cgroup2") && root == "/")
            .then(|| PathBuf::from(unescape(point)))
    })
}

/// The kernel writes blanks in paths as `\040`.
fn unescape(text: &str) -> String {
    ["\\040 ", "\\011\t", "\\012\n", "\\134\\"]
        .iter()
        .fold(text.to_owned(), |text, pair| {
            let (code, character) = pair.split_at(4);
            text.replace(code, character)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_is_told_by_its_type_and_not_by_its_name() {
        let mounts = "\
30 24 0:26 / /cgroups/cpuset rw,relatime shared:9 - cgroup none rw,cpuset
31 24 0:27 /machine /mnt/part rw - cgroup2 none rw
32 24 0:27 / /cgroups/my\\040cpu rw,relatime shared:10 - cgroup2 none rw
";
        assert_eq!(cgroup2_root(mounts), Some(PathBuf::from("/cgroups/my cpu")));
        assert_eq!(cgroup2_root("30 24 0:26 / /a rw - cgroup none rw\n"), None);
        assert_eq!(cgroup2_root("\n- cgroup2"), None);
    }
}
