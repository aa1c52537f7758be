//! What a session says next. It holds no message: each is made when it can be sent, from the offer of that moment.
//!
//! A hint that asks something new goes out at once, unless the guest has not answered the one before: then the newest of all
//! that came meanwhile goes out with the answer or with the next heartbeat. So a guest that reads slowly finds at most one
//! hint for each heartbeat, and never a queue.

use std::time::Duration;

use hint_proto::v1;
use hint_proto::v1::session_response::Message;

use super::slot::{Numbered, Offer};
use crate::model::{Cpus, Hint};
use crate::wire;

/// What a session has said and has to say.
#[derive(Debug)]
pub(super) struct Outbox {
    epoch: u64,
    lease_ms: u32,
    /// Sequence of the last hint that was sent, or that lay withdrawn before the session began.
    sent: u64,
    /// Sequence of a hint that the guest has not answered.
    unanswered: Option<u64>,
    /// A heartbeat is due.
    beat: bool,
}

impl Outbox {
    /// The outbox of a session that begins with `offer`.
    pub(super) fn new(epoch: u64, lease: Duration, offer: &Numbered) -> Self {
        let sent = match offer.offer {
            Offer::Nothing | Offer::Withdrawn(_) => offer.sequence,
            Offer::Hint(_) => 0,
        };
        Self {
            epoch,
            lease_ms: u32::try_from(lease.as_millis()).unwrap_or(u32::MAX),
            sent,
            unanswered: None,
            beat: false,
        }
    }

    /// A heartbeat interval has passed.
    pub(super) fn beat(&mut self) {
        self.beat = true;
    }

    /// Takes the guest's answer to a hint; `false` when no such hint was sent in this session or an earlier one.
    pub(super) fn answered(&mut self, epoch: u64, sequence: u64) -> bool {
        if (epoch, sequence) == (0, 0) {
            return true;
        }
        if epoch != self.epoch || sequence > self.sent {
            return false;
        }
        if self.unanswered.is_some_and(|asked| sequence >= asked) {
            self.unanswered = None;
        }
        true
    }

    /// Is there something to say, with this offer?
    pub(super) fn is_due(&self, offer: &Numbered) -> bool {
        self.beat || (offer.sequence > self.sent && self.unanswered.is_none())
    }

    /// What to say now, with this offer.
    pub(super) fn next(&mut self, offer: &Numbered) -> Message {
        self.beat = false;
        let new = offer.sequence > self.sent;
        match &offer.offer {
            Offer::Hint(hint) => {
                if new {
                    self.unanswered = Some(offer.sequence);
                }
                self.sent = offer.sequence;
                Message::Hint(self.hint(offer.sequence, hint, wire::reason(hint.reason)))
            }
            Offer::Withdrawn(hint) if new => {
                self.unanswered = Some(offer.sequence);
                self.sent = offer.sequence;
                Message::Hint(self.hint(offer.sequence, hint, v1::Reason::Unspecified))
            }
            Offer::Withdrawn(_) | Offer::Nothing => Message::Heartbeat(v1::Heartbeat {}),
        }
    }

    fn hint(&self, sequence: u64, hint: &Hint, reason: v1::Reason) -> v1::Hint {
        v1::Hint {
            epoch: self.epoch,
            sequence,
            usable: hint.usable,
            vcpus: hint.vcpus,
            classes: Some(v1::Classes {
                full: hint.classes.full,
                partial: hint.classes.partial,
                avoided: hint.classes.avoided,
            }),
            entitlement_milli_cpus: hint.entitlement.map(Cpus::milli),
            spare_milli_cpus: hint.spare.map(Cpus::milli),
            contention: wire::contention(hint.contention).into(),
            reason: reason.into(),
            lease_ms: self.lease_ms,
            keep: hint.keep.to_vec(),
            mode: wire::mode(hint.mode).into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Classes, Contention, Mode, Reason};

    fn offer(sequence: u64, usable: u32) -> Numbered {
        Numbered {
            sequence,
            offer: Offer::Hint(Hint {
                usable,
                vcpus: 4,
                classes: Classes::default(),
                entitlement: Some(Cpus(1.0)),
                spare: Some(Cpus(0.0)),
                contention: Contention::Contended,
                reason: Reason::Contention,
                mode: Mode::Enforce,
                keep: std::sync::Arc::default(),
            }),
        }
    }

    fn outbox(begin: &Numbered) -> Outbox {
        Outbox::new(42, Duration::from_secs(5), begin)
    }

    fn sequence(message: &Message) -> Option<u64> {
        match message {
            Message::Hint(hint) => Some(hint.sequence),
            _ => None,
        }
    }

    #[test]
    fn one_hint_is_under_way_until_the_answer_or_the_next_beat() {
        let mut outbox = outbox(&offer(1, 1));
        assert!(outbox.is_due(&offer(1, 1)));
        assert_eq!(sequence(&outbox.next(&offer(1, 1))), Some(1));
        assert!(!outbox.is_due(&offer(2, 2)));
        assert!(outbox.answered(42, 1));
        assert!(outbox.is_due(&offer(3, 3)));
        assert_eq!(sequence(&outbox.next(&offer(3, 3))), Some(3));
        assert!(!outbox.is_due(&offer(9, 1)));
        outbox.beat();
        assert!(outbox.is_due(&offer(9, 1)));
        assert_eq!(sequence(&outbox.next(&offer(9, 1))), Some(9));
    }

    #[test]
    fn an_old_answer_does_not_release_the_next_hint() {
        let mut outbox = outbox(&offer(1, 1));
        outbox.next(&offer(1, 1));
        outbox.beat();
        outbox.next(&offer(2, 2));
        assert!(outbox.answered(42, 1));
        assert!(!outbox.is_due(&offer(3, 3)));
        assert!(outbox.answered(42, 2));
        assert!(outbox.is_due(&offer(3, 3)));
    }

    #[test]
    fn answers_to_nothing_are_news_and_answers_to_the_future_are_not_taken() {
        let mut outbox = outbox(&offer(1, 1));
        outbox.next(&offer(1, 1));
        assert!(outbox.answered(0, 0));
        assert!(!outbox.answered(42, 2));
        assert!(!outbox.answered(41, 1));
        assert!(!outbox.answered(0, 1));
    }

    #[test]
    fn a_withdrawal_is_said_once_and_not_to_a_session_that_begins_with_it() {
        let Offer::Hint(hint) = offer(2, 4).offer else {
            panic!("an offer");
        };
        let withdrawn = Numbered {
            sequence: 2,
            offer: Offer::Withdrawn(hint),
        };
        let mut old = outbox(&offer(1, 1));
        old.next(&offer(1, 1));
        old.answered(42, 1);
        assert!(old.is_due(&withdrawn));
        assert_eq!(sequence(&old.next(&withdrawn)), Some(2));
        old.beat();
        assert_eq!(sequence(&old.next(&withdrawn)), None);
        let mut fresh = outbox(&withdrawn);
        assert!(!fresh.is_due(&withdrawn));
        fresh.beat();
        assert_eq!(sequence(&fresh.next(&withdrawn)), None);
    }
}
