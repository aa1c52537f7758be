//! What discovery reads of a process: its start, its command line, its threads and its KVM files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use hint_proto::CpuSet;

use super::hybrid::socket_inode;
use super::vmm::after_prefix;
use crate::procfs::{self, number, status_value};
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
        .filter_map(|name| number(name.to_str()?))
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
    procfs::start_ticks(&text)
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
    let arguments = procfs::arguments(&bytes);
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
        let Some(fd) = name.to_str().and_then(number::<u32>) else {
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

/// The inodes of a process's open sockets; empty when it has none or is gone.
///
/// # Errors
/// When its descriptors can't be listed, for want of permission most often.
pub fn sockets(root: &Root, pid: u32) -> Result<BTreeSet<u64>, ReadError> {
    let directory = format!("proc/{pid}/fd");
    let mut inodes = BTreeSet::new();
    for name in root.list(&directory)?.unwrap_or_default() {
        let link = root.link(&format!("{directory}/{}", name.to_string_lossy()))?;
        inodes.extend(link.as_deref().and_then(socket_inode));
    }
    Ok(inodes)
}

/// The names of a process's threads, by thread id; empty when it is gone.
///
/// # Errors
/// When they can't be listed or read.
pub fn threads(root: &Root, pid: u32) -> Result<BTreeMap<u32, String>, ReadError> {
    let directory = format!("proc/{pid}/task");
    let mut threads = BTreeMap::new();
    for name in root.list(&directory)?.unwrap_or_default() {
        let Some(tid) = name.to_str().and_then(number::<u32>) else {
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
    from_status(root, &relative, "a line Cpus_allowed_list", cpus_in_status)
}

/// The number of the vCPU that a thread's cgroup says it is: libvirt gives each its own group `vcpuN`.
///
/// # Errors
/// When its `cgroup` can't be read.
pub fn vcpu_group(root: &Root, pid: u32, tid: u32) -> Result<Option<u32>, ReadError> {
    let text = root.read_text(&format!("proc/{pid}/task/{tid}/cgroup"))?;
    Ok(vcpu_in_groups(text.as_deref().unwrap_or_default()))
}

/// The number in a group `vcpuN` of a thread's `cgroup`.
pub(super) fn vcpu_in_groups(cgroup: &str) -> Option<u32> {
    let mut groups = cgroup.lines().filter_map(|line| line.rsplit_once('/'));
    groups.find_map(|(_, group)| after_prefix(group, "vcpu"))
}

/// The user whose rights a process has; `None` when it is gone.
///
/// # Errors
/// When its `status` can't be read or names none.
pub fn effective_uid(root: &Root, pid: u32) -> Result<Option<u32>, ReadError> {
    let relative = format!("proc/{pid}/status");
    from_status(
        root,
        &relative,
        "a line Uid with four numbers",
        uid_in_status,
    )
}

/// The CPUs that a `status` allows; none at all is no answer.
pub(super) fn cpus_in_status(status: &str) -> Option<CpuSet> {
    CpuSet::parse_list(status_value(status, "Cpus_allowed_list")?)
        .ok()
        .filter(|cpus| !cpus.is_empty())
}

/// The effective user in a `status`.
pub(super) fn uid_in_status(status: &str) -> Option<u32> {
    // Real, effective, saved and file system's.
    let mut ids = status_value(status, "Uid")?.split_ascii_whitespace();
    ids.nth(1).and_then(number)
}

/// A thread's name in the innermost PID namespace, in its `status`; kernels without PID namespaces tell none.
pub(super) fn innermost_pid(status: &str) -> Option<u32> {
    // This host's comes first.
    let names = status_value(status, "NSpid")?.split_ascii_whitespace();
    names.last().and_then(number)
}

/// What `parse` makes of a `status`.
fn from_status<T>(
    root: &Root,
    relative: &str,
    expected: &'static str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>, ReadError> {
    let Some(text) = root.read_text(relative)?.filter(|text| !text.is_empty()) else {
        return Ok(None);
    };
    parse(&text)
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
