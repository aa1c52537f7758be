//! Publish: the channel between the broker and the agents in the guests.
//!
//! It knows which connection belongs to which VM, offers each VM its latest hint, renews it, and says who is connected and
//! what became of the hints. It decides nothing about hints.

mod claims;
#[cfg(feature = "fuzz")]
pub(crate) mod fuzz;
mod limit;
mod listen;
mod outbox;
mod server;
mod session;
mod slot;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::model::{Agent, Hint, Vm, VmId};
use crate::text::with_causes;
use listen::{Accepted, CidListener, Cids, HybridListener, hybrid_path, vsock_trouble};
use server::Guests;
use slot::Slot;

/// How long agents have to take the broker's Goodbye.
const GOODBYES: Duration = Duration::from_secs(2);
/// How long connections have to close after that.
const CLOSING: Duration = Duration::from_secs(1);
/// What gives guests a vsock device on this host.
const VHOST_VSOCK: &str = "/dev/vhost-vsock";

/// How the channel listens, and its times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChannelSettings {
    /// Listen on AF_VSOCK, for VMs that have a CID.
    pub vsock: bool,
    /// Port, on AF_VSOCK and in the names of hybrid sockets.
    pub vsock_port: u32,
    /// How often each side says something.
    pub heartbeat: Duration,
    /// Silence after which a session is dead; longer than `heartbeat`.
    pub deadline: Duration,
    /// How long a hint holds without renewal; longer than `heartbeat`.
    pub lease: Duration,
}

impl Default for ChannelSettings {
    fn default() -> Self {
        Self {
            vsock: true,
            vsock_port: hint_proto::GUEST_PORT,
            heartbeat: Duration::from_secs(1),
            deadline: Duration::from_secs(5),
            lease: Duration::from_secs(5),
        }
    }
}

/// Why the channel can't start.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The times make no sense together.
    #[error(
        "channel times: expected 0 < heartbeat < {what} <= 1 day, found heartbeat {heartbeat:?} and {what} {found:?}"
    )]
    Times {
        /// Which time is wrong.
        what: &'static str,
        /// The heartbeat.
        heartbeat: Duration,
        /// The time.
        found: Duration,
    },
}

/// The channel. Dropping it closes the listeners and removes the socket files; [`Publisher::shutdown`] also says goodbye.
#[derive(Debug)]
pub struct Publisher {
    settings: ChannelSettings,
    slots: Mutex<BTreeMap<VmId, Arc<Slot>>>,
    cids: Arc<Mutex<Cids>>,
    doors: Mutex<Doors>,
    accepted: Accepted,
    changed: Arc<Notify>,
    leaving: watch::Sender<Option<String>>,
    sessions: watch::Sender<usize>,
    server: Mutex<Option<(oneshot::Sender<()>, JoinHandle<()>)>>,
}

/// The open listeners, and what keeps others shut.
#[derive(Debug, Default)]
struct Doors {
    hybrid: BTreeMap<VmId, HybridListener>,
    vsock: Option<CidListener>,
    troubles: BTreeMap<Option<VmId>, String>,
    unclear: Vec<String>,
}

impl Publisher {
    /// Starts the channel for the broker's run `epoch`. Must be called in a tokio runtime.
    ///
    /// Nothing listens before the first [`Publisher::set_vms`]: a guest that dials earlier would be one that nobody knows. A missing
    /// vsock is no error: [`Publisher::degraded`] tells of it, and each [`Publisher::set_vms`] tries again.
    ///
    /// # Errors
    /// When the settings make no sense.
    pub fn start(settings: ChannelSettings, epoch: u64) -> Result<Self, PublishError> {
        check(&settings)?;
        let (accepted, incoming) = mpsc::channel(16);
        let (stop, stopped) = oneshot::channel::<()>();
        let leaving = watch::Sender::new(None);
        let sessions = watch::Sender::new(0);
        let guests = Guests {
            settings,
            epoch,
            leaving: leaving.subscribe(),
            sessions: sessions.clone(),
        };
        let server = tokio::spawn(server::serve(guests, incoming, stopped));
        Ok(Self {
            settings,
            slots: Mutex::default(),
            cids: Arc::default(),
            doors: Mutex::default(),
            accepted,
            changed: Arc::new(Notify::new()),
            leaving,
            sessions,
            server: Mutex::new(Some((stop, server))),
        })
    }

    /// Tells the channel which VMs there are. Call it after each discovery, in a tokio runtime.
    ///
    /// It opens and closes the VMs' listeners; one that can't be opened harms no other, is told of by
    /// [`Publisher::degraded`] and tried again next time. Sessions of departed VMs end.
    pub fn set_vms(&self, vms: &[Vm]) {
        let slots = self.renew_slots(vms);
        let (cids, mut unclear) = Cids::new(vms, &slots);
        *lock(&self.cids) = cids;
        let mut doors = lock(&self.doors);
        self.open_vsock(&mut doors);
        let paths = self.hybrid_paths(vms, &mut unclear);
        if self.settings.vsock
            && vms.iter().any(|vm| vm.cid.is_some())
            && !Path::new(VHOST_VSOCK).exists()
        {
            unclear.push(format!(
                "{VHOST_VSOCK} is missing, so another transport owns vsock here and no VM's CID can reach the broker: modprobe vhost_vsock before any other vsock module"
            ));
        }
        doors.unclear = unclear;
        doors
            .hybrid
            .retain(|vm, door| paths.get(vm).is_some_and(|(_, path)| door.serves(path)));
        doors
            .troubles
            .retain(|vm, _| vm.is_none_or(|vm| paths.contains_key(&vm)));
        for (vm, (socket, _)) in paths {
            if let (false, Some(slot)) = (doors.hybrid.contains_key(&vm), slots.get(&vm)) {
                self.open_hybrid(&mut doors, &socket, slot);
            }
        }
    }

    /// Puts a VM's hint on offer; the latest replaces the older ones. `None`, or a hint of mode observe, takes the last one
    /// back. A VM that [`Publisher::set_vms`] has not named is left out.
    pub fn publish(&self, vm: VmId, hint: Option<Hint>) {
        if let Some(slot) = lock(&self.slots).get(&vm) {
            slot.publish(hint);
        }
    }

    /// The connected agents.
    #[must_use]
    pub fn agents(&self) -> BTreeMap<VmId, Agent> {
        lock(&self.slots)
            .iter()
            .filter_map(|(vm, slot)| Some((*vm, slot.agent()?)))
            .collect()
    }

    /// What keeps guests from connecting, each with how to mend it.
    #[must_use]
    pub fn degraded(&self) -> Vec<String> {
        let doors = lock(&self.doors);
        doors
            .troubles
            .values()
            .chain(&doors.unclear)
            .cloned()
            .collect()
    }

    /// Waits until an agent has connected, left or said something new since the last call. For one waiter.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Says goodbye to all agents, waits for them for at most three seconds, and removes the socket files.
    pub async fn shutdown(&self, reason: &str) {
        *lock(&self.doors) = Doors::default();
        self.leaving.send_replace(Some(reason.to_owned()));
        let mut sessions = self.sessions.subscribe();
        let said = timeout(GOODBYES, sessions.wait_for(|count| *count == 0)).await;
        if said.is_err() {
            let count = *self.sessions.borrow();
            tracing::warn!(
                count,
                "agents have not taken the goodbye; their leases end by themselves"
            );
        }
        let server = lock(&self.server).take();
        if let Some((stop, server)) = server {
            drop(stop);
            let abort = server.abort_handle();
            if timeout(CLOSING, server).await.is_err() {
                abort.abort();
            }
        }
        for slot in lock(&self.slots).values() {
            slot.close();
        }
    }

    /// Slots for exactly these VMs; those of others are closed.
    fn renew_slots(&self, vms: &[Vm]) -> BTreeMap<VmId, Arc<Slot>> {
        let here: BTreeSet<VmId> = vms.iter().map(|vm| vm.id).collect();
        let mut slots = lock(&self.slots);
        slots.retain(|vm, slot| {
            let stays = here.contains(vm);
            if !stays {
                slot.close();
            }
            stays
        });
        for vm in here {
            slots
                .entry(vm)
                .or_insert_with(|| Arc::new(Slot::new(vm, Arc::clone(&self.changed))));
        }
        slots.clone()
    }

    /// Each VM's hybrid socket and the path to listen on; a path of several VMs is nobody's.
    fn hybrid_paths(
        &self,
        vms: &[Vm],
        unclear: &mut Vec<String>,
    ) -> BTreeMap<VmId, (PathBuf, PathBuf)> {
        let mut owners: BTreeMap<&PathBuf, Vec<VmId>> = BTreeMap::new();
        for vm in vms {
            if let Some(socket) = &vm.hybrid_socket {
                owners.entry(socket).or_default().push(vm.id);
            }
        }
        let mut paths = BTreeMap::new();
        for (socket, vms) in owners {
            match vms.as_slice() {
                [vm] => {
                    let path = hybrid_path(socket, self.settings.vsock_port);
                    paths.insert(*vm, (socket.clone(), path));
                }
                _ => unclear.push(format!(
                    "{} is the vsock of several VMs ({}): none of them gets hints until one has it alone",
                    socket.display(),
                    listen::list(&vms)
                )),
            }
        }
        paths
    }

    fn open_hybrid(&self, doors: &mut Doors, socket: &Path, slot: &Arc<Slot>) {
        let opened = HybridListener::open(
            socket,
            self.settings.vsock_port,
            slot,
            self.idle(),
            &self.accepted,
        );
        match opened {
            Ok(door) => {
                doors.hybrid.insert(slot.vm, door);
                doors.troubles.remove(&Some(slot.vm));
            }
            Err(error) => {
                let trouble = format!("VM {} can't connect: {}", slot.vm, with_causes(&error));
                note(doors, Some(slot.vm), trouble);
            }
        }
    }

    fn open_vsock(&self, doors: &mut Doors) {
        if !self.settings.vsock || doors.vsock.is_some() {
            return;
        }
        let port = self.settings.vsock_port;
        match CidListener::open(
            port,
            Arc::clone(&self.cids),
            self.idle(),
            self.accepted.clone(),
        ) {
            Ok(door) => {
                doors.vsock = Some(door);
                doors.troubles.remove(&None);
            }
            Err(error) => note(doors, None, vsock_trouble(port, &error)),
        }
    }

    /// Silence after which a connection is broken; HTTP/2 pings make any live one speak sooner.
    fn idle(&self) -> Duration {
        self.settings.deadline * 3
    }
}

/// Keeps a trouble, and logs it when it is new.
fn note(doors: &mut Doors, whose: Option<VmId>, trouble: String) {
    if doors.troubles.get(&whose) != Some(&trouble) {
        tracing::warn!("{trouble}");
        doors.troubles.insert(whose, trouble);
    }
}

fn check(settings: &ChannelSettings) -> Result<(), PublishError> {
    let heartbeat = settings.heartbeat;
    for (what, found) in [("deadline", settings.deadline), ("lease", settings.lease)] {
        let sound =
            !heartbeat.is_zero() && heartbeat < found && found <= Duration::from_secs(24 * 60 * 60);
        if !sound {
            return Err(PublishError::Times {
                what,
                heartbeat,
                found,
            });
        }
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_that_make_no_sense_are_refused() {
        let good = ChannelSettings::default();
        assert!(check(&good).is_ok());
        let none = Duration::ZERO;
        for bad in [
            ChannelSettings {
                heartbeat: none,
                ..good
            },
            ChannelSettings {
                deadline: good.heartbeat,
                ..good
            },
            ChannelSettings {
                lease: none,
                ..good
            },
            ChannelSettings {
                lease: Duration::MAX,
                ..good
            },
        ] {
            let error = check(&bad).unwrap_err().to_string();
            assert!(error.starts_with("channel times: expected"), "{error}");
        }
    }
}
