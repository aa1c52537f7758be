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
    if let Some(vcpus) = kvm_fd.and_then(|fd| from_debugfs(root, pid, fd)) {
        return Ok(Vcpus::Known(vcpus));
    }
    let Some(vmm) = vmm else {
        let why =
            "not a VMM whose thread names are known, and KVM's debugfs does not tell its vCPUs";
        return Ok(Vcpus::Unclassified(why.to_owned()));
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
        let why = "no thread is named like a vCPU and KVM's debugfs does not tell; start QEMU with -name debug-threads=on, or mount debugfs";
        return Ok(Vcpus::Unclassified(why.to_owned()));
    }
    Ok(Vcpus::Known(vcpus))
}

/// `vcpu<N>/pid` in the VM's directory; `None` when there is none or a part can't be read, so that half a VM is never taken
/// for a whole one.
fn from_debugfs(root: &Root, pid: u32, fd: u32) -> Option<BTreeMap<u32, u32>> {
    let directory = format!("{DEBUGFS_KVM}/{pid}-{fd}");
    let mut vcpus = BTreeMap::new();
    for name in root.list(&directory).ok()?? {
        let Some(index) = name
            .to_str()
            .and_then(|name| name.strip_prefix("vcpu")?.parse().ok())
        else {
            continue;
        };
        let tid: u32 = root
            .read_text(&format!("{directory}/vcpu{index}/pid"))
            .ok()??
            .trim()
            .parse()
            .ok()?;
        // A vCPU that has not run yet has no thread: its file says 0.
        if tid == 0 {
            return None;
        }
        vcpus.insert(index, tid);
    }
    (!vcpus.is_empty()).then_some(vcpus)
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
