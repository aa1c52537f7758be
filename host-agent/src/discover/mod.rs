//! Discover: which VMs run here, who they are, and which of their threads are vCPUs.
//!
//! A VM is a process with a KVM VM file, or, where the configuration counts those too, a VMM without KVM. This stage reads
//! `/proc` and KVM's debugfs; it measures nothing.

#[cfg(feature = "fuzz")]
pub(crate) mod fuzz;
mod hybrid;
pub mod process;
mod qmp;
mod scope;
mod vcpus;
mod vhost_vsock;
pub mod vmm;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use hint_proto::CpuSet;

use self::process::Process;
use self::qmp::Monitors;
use self::vmm::Identity;
use crate::model::{Accelerator, Vcpus, Vm, VmId};
use crate::root::{ReadError, Root};
use crate::text::printable;

/// A process is looked at in each of its first scans, since it may open its VM a while after its start, and then once in so
/// many scans.
const YOUNG_SCANS: u32 = 10;
const OLD_EVERY: u32 = 30;

/// What a scan found.
#[derive(Debug, Clone, Default)]
pub struct Scan {
    /// The VMs, by identity.
    pub vms: Vec<Found>,
    /// What could not be read, with what it means and how to mend it.
    pub degraded: Vec<String>,
}

/// A VM and where it may run.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// The VM.
    pub vm: Vm,
    /// CPUs that all of its vCPU threads may run on; `None` when not known, or when its vCPUs may run on different ones.
    pub allowed: Option<CpuSet>,
    /// CPUs that any of its vCPU threads may run on; empty when not known.
    pub reach: CpuSet,
    /// CPUs that the thread of each vCPU may run on, by vCPU index; cpusets are in them already. A vCPU that is missing is not
    /// known.
    pub affinity: BTreeMap<u32, CpuSet>,
}

/// Finds VMs, again and again; keeps what it knows of processes so that a scan of a host with many is cheap.
#[derive(Debug)]
pub struct Discovery {
    root: Root,
    count_tcg: bool,
    seen: BTreeMap<VmId, Seen>,
    monitors: Monitors,
}

#[derive(Debug, Default)]
struct Seen {
    scans: u32,
    is_vm: bool,
    kvm_fds: Vec<u32>,
    hybrid_socket: Option<PathBuf>,
    /// Why its hybrid socket could not be looked for.
    no_channel: Option<ReadError>,
    /// Why its last examination failed; kept until the next, since a process that is old is examined seldom.
    failed: Option<Failure>,
}

impl Seen {
    /// Looks for the hybrid vsock where it is not known, or not what it was.
    fn find_hybrid_socket(
        &mut self,
        root: &Root,
        pid: u32,
        identity: &Identity,
        back_ends: &mut Option<Vec<Process>>,
    ) {
        if let Some(path) = &identity.hybrid_socket {
            // On the command line; not there yet, maybe.
            self.hybrid_socket = hybrid::named(root, pid, path);
        } else if !identity.vhost_user_sockets.is_empty() {
            if self.hybrid_socket.is_none() {
                let back_ends = back_ends.get_or_insert_with(|| vhost_vsock_processes(root));
                self.hybrid_socket =
                    hybrid::of_back_end(root, back_ends, &identity.vhost_user_sockets);
            }
        } else if let Some(elsewhere) = &identity.elsewhere {
            self.hybrid_socket
                .take_if(|path| !hybrid::is_its_own(root, pid, path));
            // All sockets of the host may have to be looked through.
            if self.hybrid_socket.is_none() && self.is_due() {
                let found = hybrid::of_vmm(root, pid, elsewhere);
                (self.hybrid_socket, self.no_channel) = match found {
                    Ok(found) => (found, None),
                    Err(error) => (None, Some(error)),
                };
            }
        }
    }

    fn is_due(&self) -> bool {
        self.scans <= YOUNG_SCANS || self.scans.is_multiple_of(OLD_EVERY)
    }
}

/// A process that could not be examined.
#[derive(Debug)]
struct Failure {
    error: ReadError,
    looks_like_a_vmm: bool,
}

impl Discovery {
    /// Reads below `root`; counts QEMU guests without KVM when `count_tcg`.
    #[must_use]
    pub fn new(root: Root, count_tcg: bool) -> Self {
        Self {
            root,
            count_tcg,
            seen: BTreeMap::new(),
            monitors: Monitors::default(),
        }
    }

    /// Looks for VMs now. A process that can't be read or ends meanwhile takes no other with it.
    pub fn scan(&mut self) -> Scan {
        let mut scan = Scan::default();
        let pids = match process::pids(&self.root) {
            Ok(pids) => pids,
            Err(error) => {
                scan.degraded.push(format!("{error}: no VM can be found"));
                return scan;
            }
        };
        let mut alive = BTreeSet::new();
        let mut back_ends = None;
        for pid in pids {
            let Ok(Some(start_ticks)) = process::start_ticks(&self.root, pid) else {
                continue;
            };
            let id = VmId { pid, start_ticks };
            alive.insert(id);
            match self.examine(id, &mut back_ends) {
                Ok(Some(found)) => scan.vms.push(found),
                Ok(None) => {}
                Err(error) => self.note_failure(id, error),
            }
        }
        self.seen.retain(|id, _| alive.contains(id));
        self.monitors.retain(|id| alive.contains(id));
        scan.degraded.extend(shared_uuids(&scan.vms));
        let failed = self.seen.values().filter_map(|seen| seen.failed.as_ref());
        let (denied, broken): (Vec<_>, Vec<_>) =
            failed.partition(|failure| failure.error.is_denied());
        scan.degraded.extend(
            broken
                .iter()
                .map(|failure| format!("{}: its VM, if it has one, is left out", failure.error)),
        );
        let no_channel = self
            .seen
            .values()
            .filter_map(|seen| seen.no_channel.as_ref());
        scan.degraded.extend(
            no_channel.map(|error| format!("{error}: if its VM has a vsock, that is not known")),
        );
        // Numbers would make each process that comes or goes a new message. A few processes are closed even to root.
        let what = if denied.iter().any(|failure| failure.looks_like_a_vmm) {
            Some("some processes that look like VMMs")
        } else if 2 * denied.len() > alive.len() {
            Some("most processes")
        } else {
            None
        };
        if let Some(what) = what {
            scan.degraded.push(format!(
                "{what} may not be looked into: VMs among them are not seen; run the broker as root, without hidepid or ProtectProc"
            ));
        }
        if self.seen.values().any(|seen| !seen.kvm_fds.is_empty()) {
            scan.degraded.extend(vcpus::debugfs_problem(&self.root));
        }
        scan
    }

    fn note_failure(&mut self, id: VmId, error: ReadError) {
        // Command lines are open to all where processes are seen at all.
        let process = process::read(&self.root, id.pid).ok().flatten();
        let looks_like_a_vmm = process.is_some_and(|process| vmm::of(&process).is_some());
        if let Some(seen) = self.seen.get_mut(&id) {
            seen.failed = Some(Failure {
                error,
                looks_like_a_vmm,
            });
        }
    }

    fn examine(
        &mut self,
        id: VmId,
        back_ends: &mut Option<Vec<Process>>,
    ) -> Result<Option<Found>, ReadError> {
        let seen = self.seen.entry(id).or_default();
        seen.scans = seen.scans.saturating_add(1);
        if !seen.is_vm && !seen.is_due() {
            return Ok(None);
        }
        seen.failed = None;
        let Some(process) =
            process::read(&self.root, id.pid)?.filter(|process| !process.arguments.is_empty())
        else {
            return Ok(None);
        };
        if seen.kvm_fds.is_empty() {
            seen.kvm_fds = process::kvm_vm_fds(&self.root, id.pid)?;
        }
        let vmm = vmm::of(&process);
        let accelerator = match vmm {
            _ if !seen.kvm_fds.is_empty() => Accelerator::Kvm,
            Some(vmm) if self.count_tcg && vmm.may_run_without_kvm() => Accelerator::Tcg,
            _ => return Ok(None),
        };
        seen.is_vm = true;
        let mut identity = vmm.map(|vmm| vmm.identify(&process)).unwrap_or_default();
        let ask = |threads: &BTreeSet<u32>| {
            self.monitors
                .vcpus(&self.root, id, &identity.monitors, threads)
        };
        let vcpus = match seen.kvm_fds.as_slice() {
            [] => vcpus::find(&self.root, id.pid, None, vmm, ask)?,
            [fd] => vcpus::find(&self.root, id.pid, Some(*fd), vmm, ask)?,
            several => {
                let why = format!(
                    "one process holds {} KVM VMs; the broker needs one process a VM",
                    several.len()
                );
                Vcpus::Unclassified(why)
            }
        };
        if identity.name.is_empty() {
            // A VM that systemd-machined knows has its name there.
            let groups = self.root.read_text(&format!("proc/{}/cgroup", id.pid));
            identity.name = groups
                .ok()
                .flatten()
                .and_then(|groups| scope::name(&groups))
                .unwrap_or_default();
        }
        seen.find_hybrid_socket(&self.root, id.pid, &identity, back_ends);
        let hybrid_socket = seen.hybrid_socket.clone();
        let affinity = self.affinity(id.pid, &vcpus)?;
        let vm = Vm {
            id,
            name: identity.name,
            uuid: identity.uuid,
            accelerator,
            vcpus,
            cid: identity.cid,
            hybrid_socket,
        };
        let first = affinity.values().next();
        Ok(Some(Found {
            vm,
            allowed: first
                .filter(|first| affinity.values().all(|set| set == *first))
                .cloned(),
            reach: affinity
                .values()
                .fold(CpuSet::new(), |reach, set| reach.union(set)),
            affinity,
        }))
    }

    fn affinity(&self, pid: u32, vcpus: &Vcpus) -> Result<BTreeMap<u32, CpuSet>, ReadError> {
        let mut affinity = BTreeMap::new();
        let Vcpus::Known(threads) = vcpus else {
            return Ok(affinity);
        };
        for (index, tid) in threads {
            if let Some(cpus) = process::allowed_cpus(&self.root, pid, *tid)? {
                affinity.insert(*index, cpus);
            }
        }
        Ok(affinity)
    }
}

/// Two VMs with one UUID are shown as two; the one that a migration brings or leaves behind runs nothing.
fn shared_uuids(vms: &[Found]) -> Vec<String> {
    let mut by_uuid: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for found in vms {
        if let Some(uuid) = &found.vm.uuid {
            by_uuid
                .entry(uuid)
                .or_default()
                .push(found.vm.id.to_string());
        }
    }
    let shared = by_uuid.into_iter().filter(|(_, ids)| ids.len() > 1);
    let messages = shared.map(|(uuid, ids)| {
        format!(
            "VMs {} have the same UUID {}: if no migration is under way, one of them should not run",
            ids.join(" and "),
            printable(uuid)
        )
    });
    messages.collect()
}

fn vhost_vsock_processes(root: &Root) -> Vec<Process> {
    let pids = process::pids(root).unwrap_or_default();
    let processes = pids
        .into_iter()
        .filter_map(|pid| process::read(root, pid).ok().flatten());
    processes
        .filter(|process| process.program() == "vhost-device-vsock")
        .collect()
}
