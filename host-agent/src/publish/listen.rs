//! Where guests connect: one AF_VSOCK listener for all of the host's CIDs, and a Unix socket for each VM with a hybrid vsock.
//!
//! Either way a connection gets its VM when it is accepted, from the CID or from the socket's path, and keeps it. What the
//! guest says later never changes it. A connection that belongs to no known VM is closed at once.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::AbortHandle;
use tokio::time::{Instant, Sleep, sleep};
use tokio_vsock::{VMADDR_CID_ANY, VsockAddr, VsockListener, VsockStream};
use tonic::transport::server::Connected;

use super::limit::LogGate;
use super::slot::Slot;
use crate::model::{Vm, VmId};
use crate::socket::{self, Access, Owner, SocketError, SocketFile};

/// What a connection costs of the bytes that its VM may send.
const CONNECTION_COST: usize = 4096;
/// Pause after a connection was refused, by the system (most likely for want of file descriptors) or by a limit of its VM.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// CIDs below this are the hypervisor's, the host's own and the loopback's.
const FIRST_GUEST_CID: u32 = 3;
/// A CID that is not known yet.
const CID_UNKNOWN: u32 = u32::MAX;

/// To the server: connections that have an identity.
pub(super) type Accepted = mpsc::Sender<io::Result<GuestStream>>;

/// Which VM has which CID.
#[derive(Debug, Default)]
pub(super) struct Cids {
    known: BTreeMap<u32, Arc<Slot>>,
}

impl Cids {
    /// The CIDs of `vms`, and a message for each CID that can't tell whose it is.
    pub(super) fn new(vms: &[Vm], slots: &BTreeMap<VmId, Arc<Slot>>) -> (Self, Vec<String>) {
        let mut owners: BTreeMap<u32, Vec<VmId>> = BTreeMap::new();
        for vm in vms {
            if let Some(cid) = vm
                .cid
                .filter(|cid| (FIRST_GUEST_CID..CID_UNKNOWN).contains(cid))
            {
                owners.entry(cid).or_default().push(vm.id);
            }
        }
        let mut known = BTreeMap::new();
        let mut unclear = Vec::new();
        for (cid, vms) in owners {
            match vms.as_slice() {
                [vm] => {
                    if let Some(slot) = slots.get(vm) {
                        known.insert(cid, Arc::clone(slot));
                    }
                }
                _ => unclear.push(format!(
                    "vsock CID {cid} belongs to several VMs ({}): none of them gets hints until one has it alone",
                    list(&vms)
                )),
            }
        }
        (Self { known }, unclear)
    }

    /// The VM that has this CID.
    pub(super) fn owner(&self, cid: u32) -> Option<&Arc<Slot>> {
        self.known.get(&cid)
    }
}

pub(super) fn list(vms: &[VmId]) -> String {
    let ids: Vec<String> = vms.iter().map(ToString::to_string).collect();
    ids.join(", ")
}

/// Where guest connections to `port` of a hybrid vsock arrive.
#[must_use]
pub(super) fn hybrid_path(socket: &Path, port: u32) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(format!("_{port}"));
    PathBuf::from(path)
}

/// The listener of one VM's hybrid vsock; closed and its file removed on drop.
#[derive(Debug)]
pub(super) struct HybridListener {
    file: SocketFile,
    task: AbortHandle,
}

impl HybridListener {
    /// Listens for `slot`'s VM on the path for `port`. The socket belongs to whoever owns the VMM's own one, so that a VMM
    /// without root's rights can connect, and nobody else.
    pub(super) fn open(
        socket: &Path,
        port: u32,
        slot: &Arc<Slot>,
        idle: Duration,
        accepted: &Accepted,
    ) -> Result<Self, SocketError> {
        let owner = fs::symlink_metadata(socket).ok().map(|found| Owner {
            uid: found.uid(),
            gid: found.gid(),
        });
        let path = hybrid_path(socket, port);
        let access = Access { mode: 0o600, owner };
        let (listener, file) = socket::listen(&path, access)?;
        let listener = UnixListener::from_std(listener).map_err(|source| SocketError::Io {
            path,
            what: "watch the socket",
            source,
        })?;
        let slot = Arc::clone(slot);
        let accepted = accepted.clone();
        let task = tokio::spawn(async move {
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => {
                        if !admit(&slot, Transport::Unix(stream), idle, &accepted).await {
                            sleep(ACCEPT_PAUSE).await;
                        }
                    }
                    Err(error) => {
                        slot.complain(&format!("can't accept its connection: {error}"));
                        sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        });
        Ok(Self {
            file,
            task: task.abort_handle(),
        })
    }

    /// Does it listen on this path still, with its file in place?
    pub(super) fn serves(&self, path: &Path) -> bool {
        self.file.path() == path && self.file.in_place()
    }
}

impl Drop for HybridListener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The listener for all CIDs; closed on drop.
#[derive(Debug)]
pub(super) struct CidListener {
    task: AbortHandle,
}

impl CidListener {
    /// Listens on `port` of any CID that this host has: which ones it has may change at any time.
    pub(super) fn open(
        port: u32,
        cids: Arc<Mutex<Cids>>,
        idle: Duration,
        accepted: Accepted,
    ) -> io::Result<Self> {
        let listener = VsockListener::bind(VsockAddr::new(VMADDR_CID_ANY, port))?;
        let task = tokio::spawn(async move {
            let mut strangers = LogGate::new(Instant::now());
            loop {
                match listener.accept().await {
                    Ok((stream, peer)) => {
                        let slot = cids
                            .lock()
                            .unwrap_or_else(PoisonError::into_inner)
                            .owner(peer.cid())
                            .cloned();
                        match slot {
                            Some(slot) => {
                                admit(&slot, Transport::Vsock(stream), idle, &accepted).await;
                            }
                            None => {
                                if let Some(held_back) = strangers.open(Instant::now()) {
                                    tracing::warn!(
                                        cid = peer.cid(),
                                        held_back,
                                        "closed a connection from a CID that no known VM has"
                                    );
                                }
                            }
                        }
                    }
                    Err(error) => {
                        if strangers.open(Instant::now()).is_some() {
                            tracing::warn!(%error, "can't accept on vsock");
                        }
                        sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        });
        Ok(Self {
            task: task.abort_handle(),
        })
    }
}

impl Drop for CidListener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What keeps the vsock listener from working, and how to mend it.
pub(super) fn vsock_trouble(port: u32, error: &io::Error) -> String {
    use rustix::io::Errno;
    let advice = match Errno::from_io_error(error) {
        Some(Errno::AFNOSUPPORT) => "this kernel has no vsock yet: modprobe vhost_vsock",
        Some(Errno::ADDRINUSE) => "another process listens on it: stop that one",
        Some(Errno::ACCESS | Errno::PERM) => "it takes CAP_NET_BIND_SERVICE: run as root",
        _ => "guests on AF_VSOCK can't connect until it works",
    };
    format!("vsock port {port}: can't listen: {error}: {advice}")
}

/// Hands a connection to the server; `false` when its VM is gone or has had enough of them.
async fn admit(
    slot: &Arc<Slot>,
    transport: Transport,
    idle: Duration,
    accepted: &Accepted,
) -> bool {
    if slot.is_over() {
        return false;
    }
    if !slot.take_bytes(CONNECTION_COST) {
        slot.complain("closed a connection: the VM opens too many in a short time");
        return false;
    }
    let Ok(permit) = Arc::clone(&slot.connections).try_acquire_owned() else {
        slot.complain("closed a connection: the VM holds as many as it may");
        return false;
    };
    let stream = GuestStream {
        transport,
        slot: Arc::clone(slot),
        idle_limit: idle,
        idle: Box::pin(sleep(idle)),
        _permit: permit,
    };
    // The server outlives the listeners except while the broker leaves, and then nobody wants the connection.
    accepted.send(Ok(stream)).await.is_ok()
}

/// Who is at the other end of a connection.
#[derive(Debug, Clone)]
pub(super) struct Peer {
    /// The VM's part of the channel.
    pub(super) slot: Arc<Slot>,
}

#[derive(Debug)]
enum Transport {
    Unix(UnixStream),
    Vsock(VsockStream),
}

/// A guest's connection: it knows whose it is, and breaks when the guest sends too much, or nothing for too long.
#[derive(Debug)]
pub(super) struct GuestStream {
    transport: Transport,
    slot: Arc<Slot>,
    idle_limit: Duration,
    idle: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl Connected for GuestStream {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        Peer {
            slot: Arc::clone(&self.slot),
        }
    }
}

impl AsyncRead for GuestStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let read = match &mut this.transport {
            Transport::Unix(stream) => Pin::new(stream).poll_read(context, buffer),
            Transport::Vsock(stream) => Pin::new(stream).poll_read(context, buffer),
        };
        if read.is_pending() {
            ready!(this.idle.as_mut().poll(context));
            let error = io::Error::new(io::ErrorKind::TimedOut, "the guest sends nothing");
            return Poll::Ready(Err(error));
        }
        if this.slot.is_over() {
            let error = io::Error::new(io::ErrorKind::ConnectionAborted, "the VM is gone");
            return Poll::Ready(Err(error));
        }
        let count = buffer.filled().len() - before;
        if count > 0 {
            this.idle.as_mut().reset(Instant::now() + this.idle_limit);
            if !this.slot.take_bytes(count) {
                this.slot
                    .complain("broke a connection: the VM sends more bytes than it may");
                let error = io::Error::new(io::ErrorKind::ConnectionAborted, "too many bytes");
                return Poll::Ready(Err(error));
            }
        }
        read
    }
}

impl AsyncWrite for GuestStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().transport {
            Transport::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
            Transport::Vsock(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().transport {
            Transport::Unix(stream) => Pin::new(stream).poll_flush(context),
            Transport::Vsock(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().transport {
            Transport::Unix(stream) => Pin::new(stream).poll_shutdown(context),
            Transport::Vsock(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Accelerator, Vcpus};
    use tokio::sync::Notify;

    fn vm(pid: u32, cid: Option<u32>) -> Vm {
        Vm {
            id: VmId {
                pid,
                start_ticks: 7,
            },
            name: String::new(),
            uuid: None,
            accelerator: Accelerator::Kvm,
            vcpus: Vcpus::Unclassified("test".to_owned()),
            cid,
            hybrid_socket: None,
        }
    }

    fn cids(vms: &[Vm]) -> (Cids, Vec<String>) {
        let slots = vms
            .iter()
            .map(|vm| (vm.id, Arc::new(Slot::new(vm.id, Arc::new(Notify::new())))))
            .collect();
        Cids::new(vms, &slots)
    }

    #[test]
    fn a_cid_belongs_to_the_vm_that_has_it_now() {
        let (map, unclear) = cids(&[vm(10, Some(33)), vm(11, Some(34)), vm(12, None)]);
        assert_eq!(map.owner(33).unwrap().vm.pid, 10);
        assert_eq!(map.owner(34).unwrap().vm.pid, 11);
        assert!(map.owner(35).is_none());
        assert!(unclear.is_empty());
        let (later, _) = cids(&[vm(20, Some(33))]);
        assert_eq!(later.owner(33).unwrap().vm.pid, 20);
        assert!(later.owner(34).is_none());
    }

    #[test]
    fn the_hosts_own_cids_and_the_unknown_one_belong_to_nobody() {
        let (map, unclear) = cids(&[
            vm(10, Some(0)),
            vm(11, Some(1)),
            vm(12, Some(2)),
            vm(13, Some(u32::MAX)),
            vm(14, Some(u32::MAX)),
        ]);
        for cid in [0, 1, 2, u32::MAX] {
            assert!(map.owner(cid).is_none(), "{cid}");
        }
        assert!(unclear.is_empty());
    }

    #[test]
    fn a_cid_of_two_vms_is_nobodys_and_both_are_named() {
        let (map, unclear) = cids(&[vm(10, Some(33)), vm(11, Some(33)), vm(12, Some(40))]);
        assert!(map.owner(33).is_none());
        assert_eq!(map.owner(40).unwrap().vm.pid, 12);
        assert_eq!(unclear.len(), 1);
        assert!(unclear[0].contains("CID 33") && unclear[0].contains("10-7, 11-7"));
    }

    #[test]
    fn trouble_with_vsock_says_what_to_do() {
        let missing = io::Error::from(rustix::io::Errno::AFNOSUPPORT);
        assert!(vsock_trouble(737, &missing).contains("modprobe vhost_vsock"));
        let taken = io::Error::from(rustix::io::Errno::ADDRINUSE);
        assert!(vsock_trouble(737, &taken).contains("another process"));
    }

    #[test]
    fn the_port_is_part_of_a_hybrid_sockets_name() {
        assert_eq!(
            hybrid_path(Path::new("/srv/v.sock"), 737),
            Path::new("/srv/v.sock_737")
        );
    }
}
