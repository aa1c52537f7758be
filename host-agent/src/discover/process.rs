//! What discovery reads of a process: its start, its command line, its threads and its KVM files.

use std::collections::BTreeMap;
use std::path::Path;

use hint_proto::CpuSet;

use super::vmm::after_prefix;
use crate::procfs::stat_fields;
use crate::root::{ReadError, Root};

/// A process that may be a VMM.
#[derive(Debug, Clone)]
pub struct Process {
    /// Its PID.
    pub pid: u32,
    /// Its command line, argument by argument; empty for kernel threads.
    pub arguments: Vec<String>,
}

impl Process {
    /// The file name of the program that was started, from its first argument.
    #[must_use]
    pub fn program(&self) -> &str {
        let first = self.arguments.first().map_or("", String::as_str);
        first.rsplit('/').next().unwrap_or(first)
    }
}

/// All PIDs, rising.
///
/// # Errors
/// When `/proc` can't be listed.
pub fn pids(root: &Root) -> Result<Vec<u32>, ReadError> {
    let names = root.list("proc")?.unwrap_or_default();
    let mut pids: Vec<u32> = names
        .iter()
        .filter_map(|name| name.to_str()?.parse().ok())
        .collect();
    pids.sort_unstable();
    Ok(pids)
}

/// When a process started, in clock ticks since boot; `None` when it is gone.
///
/// # Errors
/// When its `stat` can't be read or isn't one.
pub fn start_ticks(root: &Root, pid: u32) -> Result<Option<u64>, ReadError> {
    let relative = format!("proc/{pid}/stat");
    let Some(text) = root.read_text(&relative)?.filter(|text| !text.is_empty()) else {
        return Ok(None);
    };
    // Field 22; after the command, which may itself hold blanks and parentheses, the fields count from 3.
    let field = stat_fields(&text)
        .nth(19)
        .and_then(|field| field.parse().ok());
    field
        .map(Some)
        .ok_or_else(|| ReadError::content(&root.path(&relative), "a start time in field 22", &text))
}

/// Reads a process's command line; `None` when it is gone.
///
/// # Errors
/// When it can't be read.
pub fn read(root: &Root, pid: u32) -> Result<Option<Process>, ReadError> {
    let Some(bytes) = root.read(&format!("proc/{pid}/cmdline"))? else {
        return Ok(None);
    };
    let arguments = bytes
        .split(|byte| *byte == 0)
        .filter(|argument| !argument.is_empty())
        .map(|argument| String::from_utf8_lossy(argument).into_owned())
        .collect();
    Ok(Some(Process { pid, arguments }))
}

/// The file descriptors of a process that are KVM VMs; empty when it has none or is gone.
///
/// # Errors
/// When its descriptors can't be listed, for want of permission most often.
pub fn kvm_vm_fds(root: &Root, pid: u32) -> Result<Vec<u32>, ReadError> {
    let directory = format!("proc/{pid}/fd");
    let mut fds = Vec::new();
    for name in root.list(&directory)?.unwrap_or_default() {
        let Some(fd) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        if root.link(&format!("{directory}/{fd}"))?.as_deref()
            == Some(Path::new("anon_inode:kvm-vm"))
        {
            fds.push(fd);
        }
    }
    fds.sort_unstable();
    Ok(fds)
}

/// The names of a process's threads, by thread id; empty when it is gone.
///
/// # Errors
/// When they can't be listed or read.
pub fn threads(root: &Root, pid: u32) -> Result<BTreeMap<u32, String>, ReadError> {
    let directory = format!("proc/{pid}/task");
    let mut threads = BTreeMap::new();
    for name in root.list(&directory)?.unwrap_or_default() {
        let Some(tid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        if let Some(name) = root.read_text(&format!("{directory}/{tid}/comm"))? {
            threads.insert(tid, name.trim_end_matches('\n').to_owned());
        }
    }
    Ok(threads)
}

/// The CPUs that a thread may run on; `None` when it is gone.
///
/// # Errors
/// When its `status` can't be read or names none.
pub fn allowed_cpus(root: &Root, pid: u32, tid: u32) -> Result<Option<CpuSet>, ReadError> {
    let relative = format!("proc/{pid}/task/{tid}/status");
    from_status(root, &relative, "a line Cpus_allowed_list", |line| {
        CpuSet::parse_list(line.strip_prefix("Cpus_allowed_list:")?).ok()
    })
}

/// The number of the vCPU that a thread's cgroup says it is: libvirt gives each its own group `vcpuN`.
///
/// # Errors
/// When its `cgroup` can't be read.
pub fn vcpu_group(root: &Root, pid: u32, tid: u32) -> Result<Option<u32>, ReadError> {
    let text = root.read_text(&format!("proc/{pid}/task/{tid}/cgroup"))?;
    let text = text.unwrap_or_default();
    let mut groups = text.lines().filter_map(|line| line.rsplit_once('/'));
    Ok(groups.find_map(|(_, group)| after_prefix(group, "vcpu")))
}

/// The user whose rights a process has; `None` when it is gone.
///
/// # Errors
/// When its `status` can't be read or names none.
pub fn effective_uid(root: &Root, pid: u32) -> Result<Option<u32>, ReadError> {
    let relative = format!("proc/{pid}/status");
    from_status(root, &relative, "a line Uid with four numbers", |line| {
        // Real, effective, saved and file system's.
        line.strip_prefix("Uid:")?
            .split_ascii_whitespace()
            .nth(1)?
            .parse()
            .ok()
    })
}

/// What the first line says that `parse` understands.
fn from_status<T>(
    root: &Root,
    relative: &str,
    expected: &'static str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>, ReadError> {
    let Some(text) = root.read_text(relative)?.filter(|text| !text.is_empty()) else {
        return Ok(None);
    };
    let value = text.lines().find_map(parse);
    value
        .map(Some)
        .ok_or_else(|| ReadError::content(&root.path(relative), expected, &text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_named_without_its_path() {
        let process = |first: &str| Process {
            pid: 1,
            arguments: vec![first.to_owned()],
        };
        assert_eq!(
            process("/usr/bin/qemu-system-x86_64").program(),
            "qemu-system-x86_64"
        );
        assert_eq!(process("qemu-kvm").program(), "qemu-kvm");
        assert_eq!(
            Process {
                pid: 1,
                arguments: Vec::new()
            }
            .program(),
            ""
        );
    }

    #[test]
    fn this_process_is_found_with_its_start_and_threads() {
        let root = Root::new("/");
        let me = std::process::id();
        assert!(pids(&root).unwrap().contains(&me));
        assert!(start_ticks(&root, me).unwrap().unwrap() > 0);
        assert!(threads(&root, me).unwrap().contains_key(&me));
        assert!(!allowed_cpus(&root, me, me).unwrap().unwrap().is_empty());
        let uid = rustix::process::geteuid().as_raw();
        assert_eq!(effective_uid(&root, me).unwrap(), Some(uid));
        assert!(!read(&root, me).unwrap().unwrap().arguments.is_empty());
    }

    #[test]
    fn a_process_that_never_was_is_gone_and_not_an_error() {
        let root = Root::new("/");
        let never = 4_194_304 + 1;
        assert!(start_ticks(&root, never).unwrap().is_none());
        assert!(read(&root, never).unwrap().is_none());
        assert!(kvm_vm_fds(&root, never).unwrap().is_empty());
        assert!(allowed_cpus(&root, never, never).unwrap().is_none());
    }
}
