//! All that the channel keeps of one VM: the hint on offer, its agent, which session is its current one, and its limits.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::Instant;

use super::limit::{LogGate, RateLimit};
use crate::model::{Agent, Classes, Hint, Mode, VmId};

/// Connections that a VM may hold.
pub(super) const MAX_CONNECTIONS: usize = 4;
/// Messages that a VM may send at once, and the time in which it may send as many again.
const MESSAGES: (u32, Duration) = (60, Duration::from_secs(3));
/// Bytes that a VM may send at once, and the time in which it may send as many again. It bounds what HTTP/2 frames without
/// messages cost.
const BYTES: (u32, Duration) = (256 * 1024, Duration::from_secs(4));

/// What a VM's guest should hear.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Offer {
    /// No hint.
    Nothing,
    /// This hint.
    Hint(Hint),
    /// The hint that was on offer holds no more; this one undoes it.
    Withdrawn(Hint),
}

/// An offer and its number in this run of the broker, from 1; 0 before the first.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Numbered {
    pub(super) sequence: u64,
    pub(super) offer: Offer,
}

/// Which session speaks for the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// The session with this number; 0 before the first.
    Session(u64),
    /// None: the VM is gone.
    Over,
}

/// One VM's part of the channel.
#[derive(Debug)]
pub(super) struct Slot {
    /// The VM.
    pub(super) vm: VmId,
    /// The hint on offer: the latest replaces the older ones.
    pub(super) offer: watch::Sender<Numbered>,
    /// Which session speaks for it.
    pub(super) turn: watch::Sender<Turn>,
    /// Free connections.
    pub(super) connections: Arc<Semaphore>,
    changed: Arc<Notify>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    agent: Option<(u64, Agent)>,
    messages: RateLimit,
    bytes: RateLimit,
    log: LogGate,
}

impl Slot {
    /// A slot without agent or hint; `changed` is told of each change to the agent.
    pub(super) fn new(vm: VmId, changed: Arc<Notify>) -> Self {
        let now = Instant::now();
        Self {
            vm,
            offer: watch::Sender::new(Numbered {
                sequence: 0,
                offer: Offer::Nothing,
            }),
            turn: watch::Sender::new(Turn::Session(0)),
            connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            changed,
            inner: Mutex::new(Inner {
                agent: None,
                messages: RateLimit::new(MESSAGES.0, MESSAGES.1, now),
                bytes: RateLimit::new(BYTES.0, BYTES.1, now),
                log: LogGate::new(now),
            }),
        }
    }

    /// Puts a hint on offer. Sessions hear of it at once only when it asks something else of the guest than the one before;
    /// other figures wait for the next renewal.
    pub(super) fn publish(&self, hint: Option<Hint>) {
        let hint = hint.filter(|hint| hint.mode != Mode::Observe);
        self.offer.send_if_modified(|current| {
            let next = match (&current.offer, hint) {
                (Offer::Hint(old), Some(new)) if asks_the_same(old, &new) => {
                    current.offer = Offer::Hint(new);
                    return false;
                }
                (_, Some(new)) => Offer::Hint(new),
                (Offer::Hint(old), None) => Offer::Withdrawn(undone(old.clone())),
                (Offer::Nothing | Offer::Withdrawn(_), None) => return false,
            };
            current.sequence += 1;
            current.offer = next;
            true
        });
    }

    /// Makes a session of this agent the current one and gives its number; the one before ends. `None` when the VM is gone.
    pub(super) fn begin(&self, agent: Agent) -> Option<u64> {
        let mut number = None;
        let mut inner = self.lock();
        self.turn.send_if_modified(|turn| {
            if let Turn::Session(last) = *turn {
                number = Some(last + 1);
                *turn = Turn::Session(last + 1);
            }
            number.is_some()
        });
        if let Some(number) = number {
            inner.agent = Some((number, agent));
            drop(inner);
            self.changed.notify_one();
        }
        number
    }

    /// Changes what is known of the agent, while `session` is the current one.
    pub(super) fn update(&self, session: u64, change: impl FnOnce(&mut Agent)) {
        let mut inner = self.lock();
        let Some((_, agent)) = inner.agent.as_mut().filter(|(owner, _)| *owner == session) else {
            return;
        };
        let before = agent.clone();
        change(agent);
        let changed = *agent != before;
        drop(inner);
        if changed {
            self.changed.notify_one();
        }
    }

    /// Ends a session: its agent is gone unless another session has begun.
    pub(super) fn end(&self, session: u64) {
        let mut inner = self.lock();
        if inner
            .agent
            .as_ref()
            .is_some_and(|(owner, _)| *owner == session)
        {
            inner.agent = None;
            drop(inner);
            self.changed.notify_one();
        }
    }

    /// The VM is gone: ends its session and refuses others.
    pub(super) fn close(&self) {
        self.turn.send_replace(Turn::Over);
    }

    /// Is the VM gone?
    pub(super) fn is_over(&self) -> bool {
        *self.turn.borrow() == Turn::Over
    }

    /// The agent, when one is connected.
    pub(super) fn agent(&self) -> Option<Agent> {
        self.lock().agent.as_ref().map(|(_, agent)| agent.clone())
    }

    /// May the VM send another message now?
    pub(super) fn take_message(&self) -> bool {
        self.lock().messages.take(1, Instant::now())
    }

    /// May the VM send so many more bytes now?
    pub(super) fn take_bytes(&self, count: usize) -> bool {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        self.lock().bytes.take(count, Instant::now())
    }

    /// Logs a guest's fault, at a rate that the guest can't raise.
    pub(super) fn complain(&self, what: &str) {
        if let Some(held_back) = self.may_log() {
            tracing::warn!(vm = %self.vm, held_back, "{what}");
        }
    }

    /// Logs what a guest does, at the same rate: it may come and go as often as it likes.
    pub(super) fn inform(&self, what: &str) {
        if let Some(held_back) = self.may_log() {
            tracing::info!(vm = %self.vm, held_back, "{what}");
        }
    }

    fn may_log(&self) -> Option<u64> {
        self.lock().log.open(Instant::now())
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Do two hints ask the same of the guest? Classes are figures: a share close to a whole number moves them from tick to tick.
fn asks_the_same(old: &Hint, new: &Hint) -> bool {
    let asked = |hint: &Hint| {
        (
            hint.usable,
            hint.vcpus,
            hint.contention,
            hint.reason,
            hint.mode,
        )
    };
    asked(old) == asked(new)
}

/// The hint that takes another back: all vCPUs, and nothing to apply.
fn undone(hint: Hint) -> Hint {
    Hint {
        usable: hint.vcpus,
        classes: Classes {
            full: hint.vcpus,
            ..Classes::default()
        },
        mode: Mode::Observe,
        ..hint
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Contention, Cpus, Reason};

    fn hint(usable: u32) -> Hint {
        Hint {
            usable,
            vcpus: 4,
            classes: Classes {
                full: usable,
                partial: 0,
                avoided: 4 - usable,
            },
            entitlement: Some(Cpus(1.0)),
            spare: Some(Cpus(0.0)),
            contention: Contention::Contended,
            reason: Reason::Contention,
            mode: Mode::Enforce,
            keep: Arc::default(),
        }
    }

    fn slot() -> Slot {
        let id = VmId {
            pid: 1,
            start_ticks: 2,
        };
        Slot::new(id, Arc::new(Notify::new()))
    }

    #[test]
    fn figures_alone_make_no_new_sequence_but_are_kept() {
        let slot = slot();
        let mut watcher = slot.offer.subscribe();
        slot.publish(Some(hint(2)));
        assert!(watcher.has_changed().unwrap());
        assert_eq!(watcher.borrow_and_update().sequence, 1);
        let figures = Hint {
            spare: Some(Cpus(0.5)),
            classes: Classes {
                full: 1,
                partial: 1,
                avoided: 2,
            },
            ..hint(2)
        };
        slot.publish(Some(figures.clone()));
        assert!(!watcher.has_changed().unwrap());
        assert_eq!(watcher.borrow_and_update().offer, Offer::Hint(figures));
        for (sequence, change) in [
            (2, hint(1)),
            (
                3,
                Hint {
                    mode: Mode::Advise,
                    ..hint(1)
                },
            ),
            (
                4,
                Hint {
                    reason: Reason::Damped,
                    ..hint(1)
                },
            ),
        ] {
            slot.publish(Some(change));
            assert_eq!(watcher.borrow_and_update().sequence, sequence);
        }
    }

    #[test]
    fn a_withdrawal_gives_all_vcpus_back_once() {
        let slot = slot();
        slot.publish(None);
        assert_eq!(slot.offer.borrow().sequence, 0);
        slot.publish(Some(hint(1)));
        slot.publish(Some(Hint {
            mode: Mode::Observe,
            ..hint(1)
        }));
        let withdrawn = slot.offer.borrow().clone();
        let Offer::Withdrawn(undo) = withdrawn.offer.clone() else {
            panic!("{withdrawn:?}");
        };
        assert_eq!(
            (undo.usable, undo.classes.full, undo.mode),
            (4, 4, Mode::Observe)
        );
        slot.publish(None);
        assert_eq!(*slot.offer.borrow(), withdrawn);
    }

    #[test]
    fn the_end_of_a_replaced_session_leaves_its_successors_agent() {
        let slot = slot();
        let agent = super::super::claims::tests::some_agent();
        let first = slot.begin(agent.clone()).unwrap();
        let second = slot.begin(agent).unwrap();
        slot.end(first);
        assert!(slot.agent().is_some());
        slot.update(first, |agent| agent.runnable_tasks = Some(9));
        assert_eq!(slot.agent().unwrap().runnable_tasks, None);
        slot.end(second);
        assert!(slot.agent().is_none());
        slot.close();
        assert_eq!(slot.begin(super::super::claims::tests::some_agent()), None);
    }
}
