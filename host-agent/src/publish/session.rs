//! One guest's session: the server side of `GuestService.Session`.
//!
//! ```text
//!            stream opens
//!                 │
//!           ┌─────▼─────┐  bad or no Hello, silence
//!           │ greeting  ├───────────────────────────────┐
//!           └─────┬─────┘                               │
//!      good Hello │ → Welcome                           │
//!           ┌─────▼─────┐  a bad message, too many,     │
//!           │           │  silence                      │
//!      ┌───►│ conversing├──────────────────────────────►│
//!      │    │           │  replaced, VM gone,           │
//!      └────┤           │  broker leaves     ┌─────────┐│
//!  hints,   │           ├───────────────────►│ Goodbye ├┤
//!  renewals,└─────┬─────┘                    └─────────┘│
//!  answers        │ Goodbye, or the connection is lost  │
//!           ┌─────▼─────┐                         ┌─────▼─────┐
//!           │   ended   │                         │  refused  │ with a status
//!           └───────────┘                         └───────────┘
//! ```
//!
//! While all is well the session sends each new hint at once and renews it each heartbeat; without a hint it sends a
//! heartbeat. The guest answers hints with Applied and says something each heartbeat.
//! A session that ends for whatever reason takes its agent out of the view; the hint that it sent ends with its lease.
//!
//! Whose session it is was decided when the connection was accepted: nothing in here asks the guest who it is.

use std::sync::Arc;

use hint_proto::v1;
use hint_proto::v1::session_request::Message as Said;
use hint_proto::v1::session_response::Message;
use tokio::sync::{mpsc, watch};
use tokio::time::{Duration, Instant, MissedTickBehavior, interval_at, sleep_until, timeout};
use tonic::{Code, Status, Streaming};

use super::ChannelSettings;
use super::claims;
use super::outbox::Outbox;
use super::slot::{Offer, Slot, Turn};
use crate::model::{Mode, Outcome};
use crate::text::printable;
use crate::wire;

/// How long a guest may take to read a session's last message, and then to answer it.
const LAST_WORD: Duration = Duration::from_secs(1);
/// How long an agent that was replaced should wait before it dials again: else two agents of one guest take turns for ever.
const RETRY_AFTER_REPLACED_MS: u32 = 10_000;

/// To the guest: the message, or the status that ends the stream.
pub(super) type Sender = mpsc::Sender<Result<v1::SessionResponse, Status>>;

/// What a session needs besides its stream.
#[derive(Debug)]
pub(super) struct Session {
    /// Its VM.
    pub(super) slot: Arc<Slot>,
    /// The channel's times.
    pub(super) settings: ChannelSettings,
    /// The run of the broker.
    pub(super) epoch: u64,
    /// Becomes the broker's reason to leave.
    pub(super) leaving: watch::Receiver<Option<String>>,
}

/// How a session ends.
#[derive(Debug)]
enum End {
    /// The guest left or the connection is gone: nobody is there to be told.
    Left(String),
    /// The guest did wrong.
    Refused(Status),
    /// The broker ends it, and the status says so to agents that don't know Goodbye.
    Goodbye(v1::Goodbye, Status),
    /// The broker leaves: the guest puts its mask back and says so.
    Leaving(v1::Goodbye),
}

impl Session {
    /// Runs the session to its end.
    pub(super) async fn run(self, mut inbound: Streaming<v1::SessionRequest>, out: Sender) {
        let end = match self.greet(&mut inbound).await {
            Ok(hello) => self.converse(&hello, &mut inbound, &out).await,
            Err(end) => end,
        };
        match end {
            End::Left(why) => self.slot.inform(&format!("agent left: {why}")),
            End::Refused(status) => {
                self.slot
                    .complain(&format!("session refused: {}", status.message()));
                last_word(&out, Err(status)).await;
            }
            End::Goodbye(goodbye, status) => {
                self.slot
                    .inform(&format!("session ended: {}", goodbye.reason));
                last_word(&out, Ok(response(Message::Goodbye(goodbye)))).await;
                last_word(&out, Err(status)).await;
            }
            End::Leaving(goodbye) => {
                last_word(&out, Ok(response(Message::Goodbye(goodbye)))).await;
                match timeout(LAST_WORD, last_answer(&mut inbound)).await {
                    Ok(Some(outcome)) => {
                        tracing::info!(vm = %self.slot.vm, ?outcome, "agent took the goodbye");
                    }
                    Ok(None) | Err(_) => {
                        tracing::info!(vm = %self.slot.vm, "agent gave no answer to the goodbye; its lease ends by itself");
                    }
                }
            }
        }
    }

    /// Waits for the Hello.
    async fn greet(&self, inbound: &mut Streaming<v1::SessionRequest>) -> Result<v1::Hello, End> {
        let first = timeout(self.settings.deadline, inbound.message())
            .await
            .map_err(|_| self.silent())?;
        if !self.slot.take_message() {
            return Err(too_many());
        }
        match heard(first)? {
            Some(Said::Hello(hello)) => Ok(hello),
            _ => Err(End::Refused(Status::invalid_argument(
                "expected a Hello as first message: say it before anything else",
            ))),
        }
    }

    async fn converse(
        &self,
        hello: &v1::Hello,
        inbound: &mut Streaming<v1::SessionRequest>,
        out: &Sender,
    ) -> End {
        let agent = match claims::agent(hello) {
            Ok(agent) => agent,
            Err(status) => return End::Refused(status),
        };
        self.slot.inform(&format!(
            "agent {} connected: kernel {}, actuator {}, CPUs {}",
            agent.version,
            agent.kernel_release,
            agent.actuator,
            printable(&agent.online.to_string())
        ));
        let mut turn = self.slot.turn.subscribe();
        let Some(number) = self.slot.begin(agent) else {
            return vm_gone();
        };
        let end = self.talk(number, &mut turn, inbound, out).await;
        self.slot.end(number);
        end
    }

    async fn talk(
        &self,
        number: u64,
        turn: &mut watch::Receiver<Turn>,
        inbound: &mut Streaming<v1::SessionRequest>,
        out: &Sender,
    ) -> End {
        let mut leaving = self.leaving.clone();
        let mut offers = self.slot.offer.subscribe();
        let mut offer = offers.borrow_and_update().clone();
        let mut outbox = Outbox::new(self.epoch, self.settings.lease, &offer);
        let mode = match offer.offer {
            Offer::Hint(ref hint) => hint.mode,
            Offer::Nothing | Offer::Withdrawn(_) => Mode::Observe,
        };
        if out.send(Ok(response(self.welcome(mode)))).await.is_err() {
            return lost();
        }
        let beat = self.settings.heartbeat;
        let mut beats = interval_at(Instant::now() + beat, beat);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut heard_at = Instant::now();
        loop {
            tokio::select! {
                room = out.reserve(), if outbox.is_due(&offer) => {
                    let Ok(room) = room else { return lost() };
                    offer = offers.borrow_and_update().clone();
                    room.send(Ok(response(outbox.next(&offer))));
                }
                () = out.closed() => return lost(),
                changed = offers.changed() => {
                    if changed.is_err() { return vm_gone() }
                    offer = offers.borrow_and_update().clone();
                }
                _ = beats.tick() => outbox.beat(),
                message = inbound.message() => {
                    heard_at = Instant::now();
                    if !self.slot.take_message() {
                        return too_many();
                    }
                    if let Err(end) = heard(message).and_then(|said| self.take(number, &mut outbox, said)) {
                        return end;
                    }
                }
                () = sleep_until(heard_at + self.settings.deadline) => return self.silent(),
                next = turn.wait_for(|turn| *turn != Turn::Session(number)) => {
                    let over = next.map_or(true, |turn| *turn == Turn::Over);
                    return if over { vm_gone() } else { replaced() };
                }
                reason = leaving.wait_for(Option::is_some) => {
                    let reason = reason.ok().and_then(|reason| reason.clone());
                    return End::Leaving(v1::Goodbye {
                        reason: reason.unwrap_or_else(|| "the broker leaves".to_owned()),
                        retry_after_ms: 0,
                    });
                }
            }
        }
    }

    /// Takes in what the guest said.
    fn take(&self, number: u64, outbox: &mut Outbox, said: Option<Said>) -> Result<(), End> {
        match said {
            Some(Said::Applied(applied)) => {
                let answer = claims::answer(&applied).map_err(End::Refused)?;
                if !outbox.answered(answer.epoch, answer.sequence) {
                    self.slot.complain(&format!(
                        "ignored an answer to hint {} of epoch {}, which was never sent to this guest",
                        answer.sequence, answer.epoch
                    ));
                    return Ok(());
                }
                self.slot.update(number, |agent| {
                    agent.preferred = answer.preferred;
                    if let Some(online) = answer.online {
                        agent.online = online;
                    }
                    agent.outcome = Some(answer.outcome);
                });
                Ok(())
            }
            Some(Said::Report(report)) => {
                let (tasks, online) = claims::report(&report).map_err(End::Refused)?;
                self.slot.update(number, |agent| {
                    agent.runnable_tasks = tasks;
                    if let Some(online) = online {
                        agent.online = online;
                    }
                });
                Ok(())
            }
            Some(Said::Goodbye(said)) => {
                let reason = claims::goodbye(&said).map_err(End::Refused)?;
                Err(End::Left(reason))
            }
            Some(Said::Hello(_)) => Err(End::Refused(Status::invalid_argument(
                "expected one Hello in a session, found a second: open another stream instead",
            ))),
            // A message of a later protocol shows at least that the agent is alive.
            Some(Said::Heartbeat(_)) | None => Ok(()),
        }
    }

    fn welcome(&self, mode: Mode) -> Message {
        let millis = |time: Duration| u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        Message::Welcome(v1::Welcome {
            protocol: hint_proto::PROTOCOL,
            broker_version: env!("CARGO_PKG_VERSION").to_owned(),
            epoch: self.epoch,
            mode: wire::mode(mode).into(),
            heartbeat_ms: millis(self.settings.heartbeat),
            deadline_ms: millis(self.settings.deadline),
        })
    }

    fn silent(&self) -> End {
        End::Refused(Status::deadline_exceeded(format!(
            "expected a message each {} ms, found none for {} ms",
            self.settings.heartbeat.as_millis(),
            self.settings.deadline.as_millis()
        )))
    }
}

/// What the stream gave: a message, of which `None` is of a kind unknown here.
fn heard(message: Result<Option<v1::SessionRequest>, Status>) -> Result<Option<Said>, End> {
    match message {
        Ok(Some(request)) => Ok(request.message),
        Ok(None) => Err(End::Left("it closed the stream".to_owned())),
        Err(status) => Err(match status.code() {
            // What was read is no message of this protocol, or too large.
            Code::Internal | Code::OutOfRange | Code::ResourceExhausted | Code::Unimplemented => {
                End::Refused(status)
            }
            _ => End::Left(printable(status.message())),
        }),
    }
}

fn lost() -> End {
    End::Left("the connection is gone".to_owned())
}

fn too_many() -> End {
    End::Refused(Status::resource_exhausted(
        "too many messages: expected at most 20 a second from a VM",
    ))
}

fn replaced() -> End {
    goodbye(
        "another session of this VM replaces this one",
        RETRY_AFTER_REPLACED_MS,
    )
}

fn vm_gone() -> End {
    goodbye("the VM that this connection belongs to is gone", 0)
}

fn goodbye(reason: &str, retry_after_ms: u32) -> End {
    let goodbye = v1::Goodbye {
        reason: reason.to_owned(),
        retry_after_ms,
    };
    End::Goodbye(goodbye, Status::aborted(reason))
}

fn response(message: Message) -> v1::SessionResponse {
    v1::SessionResponse {
        message: Some(message),
    }
}

/// Sends a session's last message if the guest reads it soon; a guest that doesn't is beyond telling.
async fn last_word(out: &Sender, word: Result<v1::SessionResponse, Status>) {
    if timeout(LAST_WORD, out.send(word)).await.is_err() {
        tracing::debug!("a guest did not read its session's last message");
    }
}

/// Listens until the guest closes the stream; what became of its hint, by its last answer.
async fn last_answer(inbound: &mut Streaming<v1::SessionRequest>) -> Option<Outcome> {
    let mut outcome = None;
    while let Ok(Some(request)) = inbound.message().await {
        if let Some(Said::Applied(applied)) = request.message {
            outcome = claims::answer(&applied).ok().map(|answer| answer.outcome);
        }
    }
    outcome
}
