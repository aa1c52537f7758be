//! The stream to the broker: dial, greet, listen, and dial again.
//!
//! ```text
//!        ┌──────────────────────── back-off over ───────────────────────┐
//!        ▼                                                              │
//!   ┌─────────┐ connected ┌──────────┐ Welcome  ┌─────────┐        ┌────┴─────┐
//!   │ dialling│──────────►│ greeting │─────────►│ talking │        │ waiting  │
//!   └────┬────┘           └────┬─────┘          └─┬─────┬─┘        └──────────┘
//!        │ error, 10 s         │ error, 10 s      │     │ Goodbye        ▲
//!        │                     │ wrong Welcome    │     ▼                │
//!        │                     │                  │  ┌─────────┐ closed, │
//!        │                     │                  │  │ leaving │ 1 s     │
//!        │                     │                  │  └────┬────┘─────────┤
//!        │                     │                  │ error, closed,       │
//!        ▼                     ▼                  ▼ silence > deadline   │
//!        └─────────────────────┴──────────────────┴──────────────────────┘
//! ```
//!
//! The happy path: the agent hands in its Hello, the Welcome gives heartbeat and deadline, hints go to the agent as
//! [`Event`]s, and what the agent has to say goes out through the [`Outbox`]. A stream on which nothing has come for longer
//! than the deadline is dead, whatever the socket says: reads on a socket from before a snapshot can hang for ever.
//! The back-off doubles from 100 ms to 5 s, with a random part of it as the pause, and starts anew only after a Welcome
//! with a further message behind it: a broker that accepts and closes is not hammered. After a Goodbye the pause is the
//! one that the broker asked for.
//!
//! This module applies nothing and knows nothing of leases; those run on while it waits.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use hint_proto::v1;
use hint_proto::v1::guest_service_client::GuestServiceClient;
use hint_proto::v1::session_request::Message as Request;
use hint_proto::v1::session_response::Message as Response;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{self, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_vsock::{VsockAddr, VsockStream};
use tonic::transport::{Channel, Endpoint as HttpEndpoint};

use self::backoff::Backoff;
use crate::clock::Moment;
use crate::error::chain;

pub mod backoff;

/// How long each step up to the Welcome may take.
const STEP: Duration = Duration::from_secs(10);
/// How long the broker may take to close a stream after its Goodbye.
const LEAVE: Duration = Duration::from_secs(1);
/// Largest message that a broker may send; a hint has less than 100 bytes.
const MAX_MESSAGE: usize = 64 * 1024;
/// Messages that may wait for a stream that does not take them.
const OUTBOX: usize = 32;
/// The longest heartbeat and deadline that make sense.
const LONGEST: u32 = 3_600_000;
/// The longest pause that a broker may ask for.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// Where the broker listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// An AF_VSOCK address; the host is CID 2.
    Vsock {
        /// The context id.
        cid: u32,
        /// The port.
        port: u32,
    },
    /// A Unix socket.
    Unix(PathBuf),
}

/// A text is no endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected vsock:CID:PORT (the host is vsock:2:737) or unix:PATH, found {0:?}")]
pub struct ParseEndpointError(String);

impl Default for Endpoint {
    fn default() -> Self {
        Self::Vsock {
            cid: 2,
            port: hint_proto::GUEST_PORT,
        }
    }
}

impl FromStr for Endpoint {
    type Err = ParseEndpointError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ParseEndpointError(text.to_owned());
        match text.split_once(':').ok_or_else(wrong)? {
            ("unix", path) if !path.is_empty() => Ok(Self::Unix(path.into())),
            ("vsock", address) => {
                let (cid, port) = address.split_once(':').ok_or_else(wrong)?;
                Ok(Self::Vsock {
                    cid: cid.parse().map_err(|_| wrong())?,
                    port: port.parse().map_err(|_| wrong())?,
                })
            }
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vsock { cid, port } => write!(f, "vsock:{cid}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Why a stream ended or did not come to be.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// Nobody listens there, or the transport is not there (yet).
    #[error("can't connect")]
    Dial(#[from] io::Error),
    /// HTTP/2 failed.
    #[error("can't speak HTTP/2")]
    Transport(#[from] tonic::transport::Error),
    /// The broker refused the call or the stream broke.
    #[error("the stream broke: {}", .0.message())]
    Status(Box<tonic::Status>),
    /// Something took too long.
    #[error("no {what} within {limit:?}")]
    Silence {
        /// What was waited for.
        what: &'static str,
        /// For how long.
        limit: Duration,
    },
    /// The broker closed the stream without a Goodbye.
    #[error("the broker closed the stream")]
    Closed,
    /// The broker does not speak this protocol.
    #[error("expected {expected}, found {found}")]
    Protocol {
        /// What should have come.
        expected: String,
        /// What came.
        found: String,
    },
    /// The agent could not say who it is, or is leaving.
    #[error("the agent has nothing to say")]
    NoHello,
}

impl From<tonic::Status> for SessionError {
    fn from(status: tonic::Status) -> Self {
        Self::Status(Box::new(status))
    }
}

/// What the agent hears of.
#[derive(Debug)]
pub enum Event {
    /// A stream is about to begin: the session waits for the Hello to send.
    Dialled(oneshot::Sender<v1::Hello>),
    /// The broker has answered the Hello.
    Welcomed(v1::Welcome, Outbox),
    /// A hint, and when it was received.
    Hint(v1::Hint, Moment),
    /// The broker leaves.
    Goodbye,
    /// The stream is gone; its outbox leads nowhere any more.
    Down,
}

/// The way out to the broker, as long as the stream lives.
#[derive(Debug, Clone)]
pub struct Outbox(mpsc::Sender<v1::SessionRequest>);

impl Outbox {
    /// Queues a message. On a stream that takes nothing any more it is dropped; the deadline will find that out.
    pub fn send(&self, message: Request) {
        let message = v1::SessionRequest {
            message: Some(message),
        };
        if self.0.try_send(message).is_err() {
            tracing::debug!("the stream takes no messages");
        }
    }
}

/// Keeps a stream to the broker for as long as the agent listens to `events`.
pub async fn run(endpoint: Endpoint, events: mpsc::Sender<Event>) {
    let mut backoff = Backoff::default();
    let mut last_error = String::new();
    while !events.is_closed() {
        let result = dialogue(&endpoint, &events, &mut backoff).await;
        if events.send(Event::Down).await.is_err() {
            return;
        }
        let asked = match result {
            Ok(asked) => {
                last_error.clear();
                asked.min(LONGEST_PAUSE)
            }
            Err(error) => {
                let error = chain(&error);
                if error == last_error {
                    tracing::debug!(%endpoint, error, "no stream to the broker");
                } else {
                    tracing::warn!(%endpoint, error, "no stream to the broker; trying again and again");
                    last_error = error;
                }
                Duration::ZERO
            }
        };
        let pause = if asked.is_zero() {
            backoff.pause()
        } else {
            backoff::spread(asked)
        };
        tokio::select! {
            () = time::sleep(pause) => {}
            () = events.closed() => return,
        }
    }
}

/// One stream, up to the broker's Goodbye; gives the pause that the broker asks for.
async fn dialogue(
    endpoint: &Endpoint,
    events: &mpsc::Sender<Event>,
    backoff: &mut Backoff,
) -> Result<Duration, SessionError> {
    let channel = dial(endpoint).await?;
    let (ask, answer) = oneshot::channel();
    tell(events, Event::Dialled(ask)).await?;
    let hello = answer.await.map_err(|_| SessionError::NoHello)?;

    let (sender, requests) = mpsc::channel(OUTBOX);
    let outbox = Outbox(sender);
    outbox.send(Request::Hello(hello));
    let mut client = GuestServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
    let mut stream = within("answer", client.session(ReceiverStream::new(requests)))
        .await??
        .into_inner();
    let welcome = match within("Welcome", stream.message()).await?? {
        Some(response) => check_welcome(response)?,
        None => return Err(SessionError::Closed),
    };
    tracing::info!(%endpoint, broker = welcome.broker_version, epoch = welcome.epoch, "connected to the broker");
    let mut heartbeat = time::interval(Duration::from_millis(u64::from(welcome.heartbeat_ms)));
    heartbeat.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
    heartbeat.reset();
    let deadline = Duration::from_millis(u64::from(welcome.deadline_ms));
    tell(events, Event::Welcomed(welcome, outbox.clone())).await?;

    let mut heard = time::Instant::now();
    loop {
        let message = tokio::select! {
            message = stream.message() => message?.ok_or(SessionError::Closed)?,
            _ = heartbeat.tick() => {
                outbox.send(Request::Heartbeat(v1::Heartbeat {}));
                continue;
            }
            () = time::sleep_until(heard + deadline) => {
                return Err(SessionError::Silence { what: "sign of life", limit: deadline });
            }
            () = events.closed() => return Err(SessionError::NoHello),
        };
        heard = time::Instant::now();
        match message.message {
            Some(Response::Hint(hint)) => {
                tell(events, Event::Hint(hint, Moment::now())).await?;
            }
            Some(Response::Heartbeat(_)) => {}
            Some(Response::Goodbye(goodbye)) => {
                tracing::info!(reason = goodbye.reason, "the broker says goodbye");
                tell(events, Event::Goodbye).await?;
                drop(outbox);
                // The agent's last answer goes out while the broker closes.
                let _ = timeout(LEAVE, async {
                    while let Ok(Some(_)) = stream.message().await {}
                })
                .await;
                return Ok(Duration::from_millis(u64::from(goodbye.retry_after_ms)));
            }
            Some(Response::Welcome(_)) => {
                return Err(SessionError::Protocol {
                    expected: "one Welcome".to_owned(),
                    found: "another".to_owned(),
                });
            }
            None => {
                tracing::debug!("a message of a kind that this agent does not know");
                continue;
            }
        }
        backoff.reset();
    }
}

async fn tell(events: &mpsc::Sender<Event>, event: Event) -> Result<(), SessionError> {
    events.send(event).await.map_err(|_| SessionError::NoHello)
}

async fn within<F: Future>(what: &'static str, future: F) -> Result<F::Output, SessionError> {
    timeout(STEP, future)
        .await
        .map_err(|_| SessionError::Silence { what, limit: STEP })
}

pub(crate) fn check_welcome(response: v1::SessionResponse) -> Result<v1::Welcome, SessionError> {
    let protocol = |expected: String, found: String| SessionError::Protocol { expected, found };
    let welcome = match response.message {
        Some(Response::Welcome(welcome)) => welcome,
        Some(Response::Goodbye(goodbye)) => {
            return Err(protocol(
                "a Welcome".to_owned(),
                format!("a Goodbye: {}", goodbye.reason),
            ));
        }
        other => return Err(protocol("a Welcome".to_owned(), format!("{other:?}"))),
    };
    if welcome.protocol != hint_proto::PROTOCOL {
        return Err(protocol(
            format!("protocol {}", hint_proto::PROTOCOL),
            format!("protocol {}", welcome.protocol),
        ));
    }
    let (heartbeat, deadline) = (welcome.heartbeat_ms, welcome.deadline_ms);
    if heartbeat == 0 || deadline <= heartbeat || deadline > LONGEST {
        return Err(protocol(
            format!("0 < heartbeat_ms < deadline_ms <= {LONGEST}"),
            format!("heartbeat_ms {heartbeat}, deadline_ms {deadline}"),
        ));
    }
    Ok(welcome)
}

async fn dial(endpoint: &Endpoint) -> Result<Channel, SessionError> {
    match endpoint {
        Endpoint::Vsock { cid, port } => {
            let address = VsockAddr::new(*cid, *port);
            let stream = within("connection", VsockStream::connect(address)).await??;
            speak_http(stream).await
        }
        Endpoint::Unix(path) => {
            let stream = within("connection", UnixStream::connect(path)).await??;
            speak_http(stream).await
        }
    }
}

async fn speak_http<S>(stream: S) -> Result<Channel, SessionError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    // One connection for one stream: a channel that dials again by itself would know nothing of the back-off.
    let mut stream = Some(TokioIo::new(stream));
    let connector = tower::service_fn(move |_| {
        let stream = stream.take();
        async move { stream.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)) }
    });
    let endpoint = HttpEndpoint::from_static("http://broker")
        .http2_keep_alive_interval(STEP)
        .keep_alive_timeout(STEP)
        .keep_alive_while_idle(true);
    Ok(within(
        "HTTP/2 settings",
        endpoint.connect_with_connector(connector),
    )
    .await??)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_and_written_back() {
        assert_eq!(Endpoint::default().to_string(), "vsock:2:737");
        for text in ["vsock:2:737", "unix:/run/broker.sock", "vsock:4294967295:1"] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "vsock",
            "vsock:2",
            "vsock:x:1",
            "unix:",
            "tcp:1:2",
            "vsock:2:-1",
        ] {
            let error = text.parse::<Endpoint>().unwrap_err().to_string();
            assert!(error.contains("vsock:CID:PORT"), "{error}");
        }
    }

    #[test]
    fn only_a_sane_welcome_is_taken() {
        let welcome = |protocol, heartbeat_ms, deadline_ms| v1::SessionResponse {
            message: Some(Response::Welcome(v1::Welcome {
                protocol,
                heartbeat_ms,
                deadline_ms,
                ..v1::Welcome::default()
            })),
        };
        assert!(check_welcome(welcome(1, 1000, 3000)).is_ok());
        for (wrong, says) in [
            (welcome(2, 1000, 3000), "protocol 2"),
            (welcome(1, 0, 3000), "heartbeat_ms 0"),
            (welcome(1, 3000, 3000), "deadline_ms 3000"),
            (welcome(1, 1, u32::MAX), "deadline_ms 4294967295"),
            (v1::SessionResponse { message: None }, "None"),
        ] {
            let error = check_welcome(wrong).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
