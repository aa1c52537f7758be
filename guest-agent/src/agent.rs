//! The agent's loop: follow hints, keep the lease, answer the broker.
//!
//! ```text
//!                 hint: usable < all
//!   ┌──────────┐──────────────────────►┌────────┐──┐ renewal: lease anew,
//!   │ unfolded │                       │ folded │  │ look at the mask again
//!   │          │◄──────────────────────│        │◄─┘
//!   └──────────┘ hint: usable = all,   └────────┘
//!                lease over, Goodbye,       │ ▲ 1 s, or a hint
//!                mode below enforce,        ▼ │
//!                SIGTERM               restoring failed
//! ```
//!
//! A lost stream changes nothing: the lease decides. It runs on a
//! [clock](crate::clock) of its own in this loop, which waits for no socket.

use std::io;
use std::time::Duration;

use hint_proto::v1;
use hint_proto::v1::session_request::Message as Request;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{self, MissedTickBehavior};

use crate::clock::{Alarm, Moment};
use crate::error::chain;
use crate::fold::{Ask, Change, Fold, FoldError};
use crate::hint;
use crate::lease::Lease;
use crate::session::{self, Endpoint, Event, Outbox};
use crate::{system, topology};

/// How often the guest reports on itself.
const REPORT: Duration = Duration::from_secs(10);
/// The least time between two tries of what failed.
const RETRY: Duration = Duration::from_secs(1);
/// How long the last words may take.
const FAREWELL: Duration = Duration::from_millis(500);

/// Why the agent ended otherwise than it was told to.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Signals can't be received, or the clock has no alarm.
    #[error("can't listen to signals or to the clock")]
    Wait(#[from] io::Error),
    /// The mask could not be put back at the end.
    #[error("the mask is not back")]
    Restore(#[from] FoldError),
}

/// The hint that the broker's last word was about.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct HintId {
    epoch: u64,
    sequence: u64,
}

struct Agent {
    fold: Fold,
    lease: Lease,
    outbox: Option<Outbox>,
    /// Of the stream's Welcome.
    epoch: u64,
    /// The last hint of this stream; sequence 0 for none yet.
    last: HintId,
    /// Don't try to apply the same hint again before this.
    apply_again: Option<Moment>,
    /// Restoring failed and is due then.
    restore_again: Option<Moment>,
    /// The guardian wants to be looked at then.
    tend_again: Option<Moment>,
    /// Why the last hint was not applied; empty when it was.
    trouble: String,
}

/// Runs until a signal ends it; the mask as found is then back.
///
/// # Errors
/// When signals or the clock's alarm can't be received, or the mask can't be put back in the end.
pub async fn run(fold: Fold, endpoint: Endpoint) -> Result<(), AgentError> {
    let mut children = signal(SignalKind::child())?;
    let mut ends = [
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
        signal(SignalKind::hangup())?,
    ];
    let (sender, mut events) = mpsc::channel(4);
    let session = tokio::spawn(session::run(endpoint, sender));
    let mut alarm = Alarm::new()?;
    let mut reports = time::interval(REPORT);
    reports.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut agent = Agent {
        fold,
        lease: Lease::default(),
        outbox: None,
        epoch: 0,
        last: HintId::default(),
        apply_again: None,
        restore_again: None,
        tend_again: None,
        trouble: String::new(),
    };
    loop {
        let due = agent.due();
        tokio::select! {
            biased;
            rang = alarm.wait(due) => {
                rang?;
                agent.on_time(Moment::now());
            }
            name = any(&mut ends) => {
                tracing::info!("{name}: leaving");
                break;
            }
            _ = children.recv() => agent.tend(Moment::now()),
            event = events.recv() => match event {
                Some(event) => agent.on_event(event),
                None => break,
            },
            _ = reports.tick(), if agent.outbox.is_some() => agent.report(),
        }
    }
    let result = agent.leave();
    // The Goodbye goes out while the stream still lives.
    let _ = time::timeout(FAREWELL, async {
        while let Some(event) = events.recv().await {
            if matches!(event, Event::Down) {
                break;
            }
        }
    })
    .await;
    session.abort();
    result
}

async fn any(signals: &mut [Signal; 3]) -> &'static str {
    let [terminate, interrupt, hangup] = signals;
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
        _ = hangup.recv() => "SIGHUP",
    }
}

impl Agent {
    /// When [`Agent::on_time`] has something to do.
    fn due(&self) -> Option<Moment> {
        [self.lease.ends(), self.restore_again, self.tend_again]
            .into_iter()
            .flatten()
            .min()
    }

    fn on_time(&mut self, now: Moment) {
        if self.lease.is_over(now) {
            if self.fold.is_folded() {
                tracing::warn!("the lease is over: unfolding");
            }
            self.restore(now);
        } else if self.restore_again.is_some_and(|due| now >= due) {
            self.restore(now);
        }
        if self.tend_again.is_some_and(|due| now >= due) {
            self.tend(now);
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Dialled(answer) => match self.fold.hello() {
                Ok(hello) => drop(answer.send(hello)),
                Err(error) => tracing::warn!("can't say hello: {}", chain(&error)),
            },
            Event::Welcomed(welcome, outbox) => {
                self.epoch = welcome.epoch;
                self.last = HintId::default();
                self.apply_again = None;
                self.outbox = Some(outbox);
            }
            Event::Hint(hint, received) => self.on_hint(&hint, received),
            Event::Goodbye => self.on_goodbye(Moment::now()),
            Event::Down => self.outbox = None,
        }
    }

    /// The broker waits for the answer, and for the end of what this side has to say.
    fn on_goodbye(&mut self, now: Moment) {
        let folded = self.fold.is_folded();
        self.restore(now);
        if !folded {
            self.answer(v1::Outcome::Restored, String::new());
        }
        self.outbox = None;
    }

    fn on_hint(&mut self, hint: &v1::Hint, received: Moment) {
        let lease = match hint::check(hint, self.epoch, self.last.sequence) {
            Ok(lease) => lease,
            Err(why) => {
                tracing::warn!("hint ignored: {why}");
                return;
            }
        };
        let renewal = hint.sequence == self.last.sequence;
        self.last = HintId {
            epoch: hint.epoch,
            sequence: hint.sequence,
        };
        if !renewal {
            self.apply_again = None;
            tracing::info!(
                sequence = hint.sequence,
                usable = hint.usable,
                reason = hint.reason().as_str_name(),
                mode = hint.mode().as_str_name(),
                "hint"
            );
        }
        if hint.mode() == v1::Mode::Enforce {
            let ask = Ask {
                usable: hint.usable,
                vcpus: hint.vcpus,
                keep: hint.keep.clone(),
            };
            self.enforce(&ask, renewal, received, lease);
        } else if self.fold.is_folded() {
            self.restore(Moment::now());
        } else if !renewal {
            self.answer(v1::Outcome::Logged, String::new());
        }
    }

    fn enforce(&mut self, ask: &Ask, renewal: bool, received: Moment, lease: Duration) {
        let now = Moment::now();
        self.lease.grant(received, lease);
        self.restore_again = None;
        if self.apply_again.is_some_and(|due| now < due) {
            return;
        }
        self.apply_again = None;
        match self.fold.follow(ask, received + lease, now) {
            Ok(Change::None) if renewal => {}
            Ok(Change::None) if !self.fold.is_folded() => {
                self.answer(v1::Outcome::Applied, String::new());
            }
            Ok(_) => {
                self.trouble.clear();
                self.answer(self.success(), String::new());
            }
            Err(error) => {
                let text = chain(&error);
                tracing::error!("the hint is not applied: {text}");
                self.apply_again = Some(now + RETRY);
                self.trouble.clone_from(&text);
                self.answer(v1::Outcome::Failed, text);
                if matches!(error, FoldError::Guardian(_) | FoldError::Governor) {
                    self.restore(now);
                }
            }
        }
        if !self.fold.is_folded() {
            self.lease.end();
        }
    }

    fn success(&self) -> v1::Outcome {
        match self.fold.actuator().kind() {
            v1::Actuator::Observe => v1::Outcome::Logged,
            _ => v1::Outcome::Applied,
        }
    }

    /// Ends the lease and puts the mask back; when that fails, again in a second.
    fn restore(&mut self, now: Moment) {
        self.lease.end();
        self.restore_again = None;
        match self.fold.unfold(now) {
            Ok(None) => {}
            Ok(Some(_)) => {
                tracing::info!("unfolded: the mask is as it was found");
                self.answer(v1::Outcome::Restored, String::new());
            }
            Err(error) => {
                let text = chain(&error);
                tracing::error!("can't unfold, trying again: {text}");
                self.restore_again = Some(now + RETRY);
                self.answer(v1::Outcome::Failed, text);
            }
        }
    }

    fn tend(&mut self, now: Moment) {
        self.tend_again = match self.fold.guardian().tend(now) {
            Ok(again) => again,
            Err(error) => {
                tracing::error!("no guardian: {}", chain(&error));
                Some(now + RETRY)
            }
        };
    }

    fn answer(&self, outcome: v1::Outcome, error: String) {
        let Some(outbox) = &self.outbox else {
            return;
        };
        let preferred = self.fold.current().map(|cpus| cpus.to_string());
        outbox.send(Request::Applied(v1::Applied {
            epoch: self.last.epoch,
            sequence: self.last.sequence,
            outcome: outcome.into(),
            preferred: preferred.unwrap_or_default(),
            online: self.online(),
            error,
        }));
    }

    fn report(&self) {
        if let Some(outbox) = &self.outbox {
            outbox.send(Request::Report(v1::Report {
                runnable_tasks: system::runnable_tasks(self.fold.files()),
                steal_ms: system::steal_ms(self.fold.files()),
                online: self.online(),
                pressure_us: system::pressure_us(self.fold.files()),
                preferred: self
                    .fold
                    .current()
                    .map(|cpus| cpus.to_string())
                    .unwrap_or_default(),
                pinned_outside: self.fold.pinned_outside(),
                trouble: self.trouble(),
            }));
        }
    }

    /// Why hints are not applied; empty when they are.
    fn trouble(&self) -> String {
        if system::steal_governor(self.fold.files()) {
            system::GOVERNOR_ADVICE.to_owned()
        } else {
            self.trouble.clone()
        }
    }

    fn online(&self) -> String {
        topology::online(self.fold.files())
            .map(|cpus| cpus.to_string())
            .unwrap_or_default()
    }

    fn leave(&mut self) -> Result<(), AgentError> {
        let result = self.fold.unfold(Moment::now());
        if let Some(outbox) = self.outbox.take() {
            outbox.send(Request::Goodbye(v1::Goodbye {
                reason: match &result {
                    Ok(_) => "the agent was told to end".to_owned(),
                    Err(error) => chain(error),
                },
                retry_after_ms: 0,
            }));
        }
        result?;
        Ok(())
    }
}
