//! Which threads of a VMM are vCPUs: KVM's debugfs knows exactly; where it can't be read, the VMM's thread names tell.

use std::collections::BTreeMap;

use super::process;
use super::vmm::Vmm;
use crate::model::Vcpus;
use crate::root::{ReadError, Root};

const DEBUGFS_KVM: &str = "sys/kernel/debug/kvm";

/// Finds the vCPU threads of one VM. `kvm_fd` is the VM's file descriptor in its process, where it has one.
///
/// # Errors
/// When the threads can't be listed. That debugfs can't be read is no error here: [`debugfs_problem`] reports it.
pub(super) fn find(
    root: &Root,
    pid: u32,
    kvm_fd: Option<u32>,
    vmm: Option<&dyn Vmm>,
) -> Result<Vcpus, ReadError> {
    let debugfs = kvm_fd.map_or(Debugfs::Silent, |fd| from_debugfs(root, pid, fd));
    let silent = match debugfs {
        Debugfs::Known(vcpus) => return Ok(Vcpus::Known(vcpus)),
        Debugfs::NotRunYet(index) => format!("vCPU {index} has not run yet"),
        Debugfs::Silent => "KVM's debugfs does not tell".to_owned(),
    };
    let Some(vmm) = vmm else {
        let why = format!("{silent}, and this is no VMM whose thread names are known");
        return Ok(Vcpus::Unclassified(why));
    };
    let mut vcpus = BTreeMap::new();
    for (tid, name) in process::threads(root, pid)? {
        let Some(index) = vmm.vcpu_index(&name) else {
            continue;
        };
        if let Some(other) = vcpus.insert(index, tid) {
            let why =
                format!("threads {other} and {tid} both call themselves vCPU {index} ({name:?})");
            return Ok(Vcpus::Unclassified(why));
        }
    }
    if vcpus.is_empty() {
        let why = format!(
            "{silent}, and no thread is named like a vCPU; start QEMU with -name debug-threads=on, or mount debugfs"
        );
        return Ok(Vcpus::Unclassified(why));
    }
    Ok(Vcpus::Known(vcpus))
}

/// What KVM's debugfs tells of a VM's vCPUs.
#[derive(Debug, PartialEq, Eq)]
enum Debugfs {
    /// All of them.
    Known(BTreeMap<u32, u32>),
    /// Not all: this one has no thread yet.
    NotRunYet(u32),
    /// Nothing, or a part of it can't be read.
    Silent,
}

/// `vcpu<N>/pid` in the VM's directory. Half a VM is never taken for a whole one.
fn from_debugfs(root: &Root, pid: u32, fd: u32) -> Debugfs {
    let directory = format!("{DEBUGFS_KVM}/{pid}-{fd}");
    let mut vcpus = BTreeMap::new();
    for name in root.list(&directory).ok().flatten().unwrap_or_default() {
        let Some(index) = name
            .to_str()
            .and_then(|name| name.strip_prefix("vcpu")?.parse().ok())
        else {
            continue;
        };
        let text = root.read_text(&format!("{directory}/vcpu{index}/pid"));
        match text
            .ok()
            .flatten()
            .and_then(|text| text.trim().parse().ok())
        {
            None => return Debugfs::Silent,
            Some(0) => return Debugfs::NotRunYet(index),
            Some(tid) => vcpus.insert(index, tid),
        };
    }
    if vcpus.is_empty() {
        Debugfs::Silent
    } else {
        Debugfs::Known(vcpus)
    }
}

/// Why KVM's debugfs can't be used, and how to mend it; `None` when it can.
pub(super) fn debugfs_problem(root: &Root) -> Option<String> {
    let path = root.path(DEBUGFS_KVM);
    let path = path.display();
    let effect = "vCPU threads are told by their names only";
    match root.list(DEBUGFS_KVM) {
        Ok(Some(_)) => None,
        Ok(None) => Some(format!(
            "{path} is not there: {effect}; mount it with: mount -t debugfs none /sys/kernel/debug"
        )),
        Err(error) if error.is_denied() => {
            Some(format!("{error}: {effect}; run the broker as root"))
        }
        Err(error) => Some(format!("{error}: {effect}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debugfs_tells_all_vcpus_or_none() {
        let directory = tempfile::tempdir().unwrap();
        let root = Root::new(directory.path());
        assert_eq!(from_debugfs(&root, 7, 9), Debugfs::Silent);
        let vm = directory.path().join(DEBUGFS_KVM).join("7-9");
        let write = |vcpu: &str, pid: &str| {
            std::fs::create_dir_all(vm.join(vcpu)).unwrap();
            std::fs::write(vm.join(vcpu).join("pid"), pid).unwrap();
        };
        write("vcpu0", "70\n");
        write("vcpu10", "71\n");
        std::fs::write(vm.join("halt_exits"), "5\n").unwrap();
        let known = BTreeMap::from([(0, 70), (10, 71)]);
        assert_eq!(from_debugfs(&root, 7, 9), Debugfs::Known(known));
        write("vcpu10", "0\n");
        assert_eq!(from_debugfs(&root, 7, 9), Debugfs::NotRunYet(10));
        let Vcpus::Unclassified(why) = find(&root, 7, Some(9), None).unwrap() else {
            panic!("known");
        };
        assert!(why.starts_with("vCPU 10 has not run yet"), "{why}");
        write("vcpu10", "");
        assert_eq!(from_debugfs(&root, 7, 9), Debugfs::Silent);
    }
}
