//! Which threads of a VMM are vCPUs: KVM's debugfs knows exactly. Where it can't be read, the VMM's thread names tell, else
//! libvirt's groups `vcpuN`, and at last QEMU itself, over a monitor that it may need for others.

use std::collections::{BTreeMap, BTreeSet};

use super::process;
use super::vmm::{Vmm, after_prefix};
use crate::model::Vcpus;
use crate::procfs::number;
use crate::root::{ReadError, Root};

const DEBUGFS_KVM: &str = "sys/kernel/debug/kvm";

/// Finds the vCPU threads of one VM. `kvm_fd` is the VM's file descriptor in its process, where it has one; `ask` asks the VMM,
/// which has the given threads, and says why where that fails.
///
/// # Errors
/// When the threads can't be listed. That debugfs can't be read is no error here: [`debugfs_problem`] reports it.
pub(super) fn find(
    root: &Root,
    pid: u32,
    kvm_fd: Option<u32>,
    vmm: Option<&dyn Vmm>,
    ask: impl FnOnce(&BTreeSet<u32>) -> Result<BTreeMap<u32, u32>, String>,
) -> Result<Vcpus, ReadError> {
    let debugfs = kvm_fd.map_or(Debugfs::Silent, |fd| from_debugfs(root, pid, fd));
    let silent = match debugfs {
        Debugfs::Known(vcpus) => return Ok(Vcpus::Known(vcpus)),
        Debugfs::NotRunYet(index) => format!("vCPU {index} has not run yet"),
        Debugfs::Silent => "KVM's debugfs does not tell".to_owned(),
    };
    let threads = process::threads(root, pid)?;
    let named = threads
        .iter()
        .filter_map(|(tid, name)| Some((vmm?.vcpu_index(name)?, *tid)));
    match numbered(named) {
        Ok(vcpus) if vcpus.is_empty() => {}
        Ok(vcpus) => return Ok(Vcpus::Known(vcpus)),
        Err([index, one, other]) => {
            let why = format!("threads {one} and {other} both call themselves vCPU {index}");
            return Ok(Vcpus::Unclassified(why));
        }
    }
    let mut grouped = Vec::new();
    for tid in threads.keys() {
        grouped.extend(process::vcpu_group(root, pid, *tid)?.map(|index| (index, *tid)));
    }
    match numbered(grouped) {
        Ok(vcpus) if vcpus.is_empty() => {}
        Ok(vcpus) => return Ok(Vcpus::Known(vcpus)),
        Err([index, one, other]) => {
            let why = format!("threads {one} and {other} are both in a group vcpu{index}");
            return Ok(Vcpus::Unclassified(why));
        }
    }
    if vmm.is_none() {
        let why = format!("{silent}, and this is no VMM whose thread names are known");
        return Ok(Vcpus::Unclassified(why));
    }
    Ok(match ask(&threads.into_keys().collect()) {
        Ok(vcpus) => Vcpus::Known(vcpus),
        Err(why) => Vcpus::Unclassified(format!(
            "{silent}, no thread is named like a vCPU or in a group vcpuN, and {why}; start QEMU with -name debug-threads=on, or mount debugfs"
        )),
    })
}

/// Threads by their numbers; the error is a number that two threads have, and those.
fn numbered(threads: impl IntoIterator<Item = (u32, u32)>) -> Result<BTreeMap<u32, u32>, [u32; 3]> {
    let mut vcpus = BTreeMap::new();
    for (index, tid) in threads {
        if let Some(other) = vcpus.insert(index, tid) {
            return Err([index, other, tid]);
        }
    }
    Ok(vcpus)
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
        let Some(index) = name.to_str().and_then(|name| after_prefix(name, "vcpu")) else {
            continue;
        };
        let text = root.read_text(&format!("{directory}/vcpu{index}/pid"));
        match text.ok().flatten().and_then(|text| number(text.trim())) {
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
    let effect = "vCPU threads are told by names, groups or QMP only";
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
    use crate::discover::process::Process;
    use crate::discover::vmm;
    use crate::fixture::Tree;

    fn nobody(_: &BTreeSet<u32>) -> Result<BTreeMap<u32, u32>, String> {
        Err("it has no monitor".to_owned())
    }

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
        let Vcpus::Unclassified(why) = find(&root, 7, Some(9), None, nobody).unwrap() else {
            panic!("known");
        };
        assert!(why.starts_with("vCPU 10 has not run yet"), "{why}");
        write("vcpu10", "");
        assert_eq!(from_debugfs(&root, 7, 9), Debugfs::Silent);
    }

    fn find_in(tree: &Tree, program: &str) -> Vcpus {
        let process = Process {
            pid: 7,
            arguments: vec![program.to_owned()],
        };
        find(&tree.root, 7, Some(9), vmm::of(&process), nobody).unwrap()
    }

    #[test]
    fn libvirts_groups_tell_where_names_do_not() {
        let group = |name: &str| format!(r"4:cpu:/machine/q/{name}\n0::/");
        let tree = Tree::new(&format!(
            "@thread 7 7 | qemu-system-x86 | 0 | {}\n@thread 7 8 | qemu-system-x86 | 0 | {}\n@thread 7 9 | qemu-system-x86 | 0 | {}\n",
            group("emulator"),
            group("vcpu0"),
            group("vcpu46"),
        ));
        let known = Vcpus::Known(BTreeMap::from([(0, 8), (46, 9)]));
        assert_eq!(find_in(&tree, "qemu-system-x86_64"), known);
        assert_eq!(find_in(&tree, "some-new-vmm"), known);
        tree.add(&format!(
            "@thread 7 10 | qemu-system-x86 | 0 | {}",
            group("vcpu0")
        ));
        let Vcpus::Unclassified(why) = find_in(&tree, "kvm") else {
            panic!("known");
        };
        assert_eq!(why, "threads 8 and 10 are both in a group vcpu0");
    }

    #[test]
    fn without_any_evidence_nothing_is_taken_for_a_vcpu() {
        let mut text = String::new();
        for tid in 7..12 {
            text.push_str(&format!("@thread 7 {tid} | qemu-system-x86 | 0 | 0::/\n"));
        }
        let Vcpus::Unclassified(why) = find_in(&Tree::new(&text), "/usr/bin/qemu-system-x86_64")
        else {
            panic!("known");
        };
        assert!(
            why.contains("it has no monitor") && why.contains("debug-threads=on"),
            "{why}"
        );
    }

    #[test]
    fn indices_come_from_names_and_may_have_gaps() {
        let mut text = String::new();
        for (tid, index) in [(20, 0), (19, 1), (15, 47), (16, 46)] {
            text.push_str(&format!("@thread 7 {tid} | CPU {index}/KVM | 0 | 0::/\n"));
        }
        let known = BTreeMap::from([(0, 20), (1, 19), (46, 16), (47, 15)]);
        assert_eq!(find_in(&Tree::new(&text), "kvm"), Vcpus::Known(known));
        for (program, names) in [
            ("firecracker", ["fc_vcpu 1", "fc_vcpu 0", "fc_vmm"]),
            ("cloud-hypervisor", ["vcpu1", "vcpu0", "vmm"]),
            ("crosvm", ["crosvm_vcpu1", "crosvm_vcpu0", "crosvm"]),
        ] {
            let lines = (8..)
                .zip(names)
                .map(|(tid, name)| format!("@thread 7 {tid} | {name} | 0 | 0::/\n"));
            let known = BTreeMap::from([(0, 9), (1, 8)]);
            let tree = Tree::new(&lines.collect::<String>());
            assert_eq!(find_in(&tree, program), Vcpus::Known(known), "{program}");
        }
    }
}
