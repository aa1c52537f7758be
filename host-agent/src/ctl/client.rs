//! Calls to the broker's control socket.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hint_proto::v1;
use hint_proto::v1::control_service_client::ControlServiceClient;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use super::HostState;
use crate::text::{printable, with_causes};

/// How long the broker may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// How long it may take to answer; longer than setting the mode takes at worst.
const ANSWER: Duration = Duration::from_secs(15);
/// How often a broker that says nothing is asked whether it lives, and how long it may take to say so: `top` shows no figures of
/// one that hangs.
const KEEPALIVE: Duration = Duration::from_secs(5);
/// Largest answer: some thousands of VMs.
const MAX_MESSAGE: usize = 16 * 1024 * 1024;

/// Why a command of hintctl failed.
#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    /// Nobody answers on the socket.
    #[error("can't reach the broker on {socket}: {why}: {advice}")]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// What went wrong.
        why: String,
        /// What to do.
        advice: &'static str,
    },
    /// The broker gave no answer.
    #[error("the broker on {socket} gave no answer for {}s: see its journal", ANSWER.as_secs())]
    Silent {
        /// The socket.
        socket: PathBuf,
    },
    /// The connection broke, or what answers speaks something else.
    #[error(
        "the broker gave no answer to the end: {}: does it still run? See its journal",
        printable(why)
    )]
    Lost {
        /// What went wrong.
        why: String,
    },
    /// The broker refused.
    #[error("{}", printable(status.message()))]
    Refused {
        /// Its answer.
        status: Box<Status>,
    },
    /// Some agents have not confirmed.
    #[error("not confirmed by: {}; their leases end by themselves within seconds", vms.join(", "))]
    Unconfirmed {
        /// The VMs.
        vms: Vec<String>,
    },
    /// The output could not be written.
    #[error("can't write the output")]
    Output(#[from] io::Error),
}

impl CtlError {
    /// The exit code of hintctl: 1 for what was done in part only, 3 for a broker out of reach, 4 for a VM that is unknown or
    /// not clear, 5 for everything else that fails. (2 is for wrong arguments.)
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Unconfirmed { .. } => 1,
            Self::Connect { .. } | Self::Silent { .. } | Self::Lost { .. } => 3,
            Self::Refused { status } => match status.code() {
                Code::NotFound | Code::FailedPrecondition => 4,
                Code::Unavailable => 3,
                _ => 5,
            },
            Self::Output(_) => 5,
        }
    }

    /// Has the reader of the output gone away, like `head` does?
    #[must_use]
    pub fn is_broken_pipe(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }
}

impl From<Status> for CtlError {
    fn from(status: Status) -> Self {
        // A status of the broker's own has no cause on this side.
        match status.source() {
            Some(cause) => Self::Lost {
                why: with_causes(cause),
            },
            None => Self::Refused {
                status: Box::new(status),
            },
        }
    }
}

/// A connection to the broker.
#[derive(Debug)]
pub struct Client {
    inner: ControlServiceClient<Channel>,
    socket: PathBuf,
}

impl Client {
    /// Connects to the broker on `socket`.
    ///
    /// # Errors
    /// [`CtlError::Connect`] with what to do.
    pub async fn connect(socket: &Path) -> Result<Self, CtlError> {
        let failed = |why: String, advice| CtlError::Connect {
            socket: socket.to_owned(),
            why,
            advice,
        };
        let path = socket
            .to_str()
            .ok_or_else(|| failed("its path is not UTF-8".to_owned(), "use another path"))?;
        let channel = Endpoint::from_shared(format!("unix:{path}"))
            .map_err(|error| failed(with_causes(&error), "use another path"))?
            .connect_timeout(CONNECT)
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE)
            .connect()
            .await
            .map_err(|error| {
                let cause = io_cause(&error);
                let why = cause.map_or_else(|| with_causes(&error), ToString::to_string);
                failed(why, advice(cause.map(io::Error::kind)))
            })?;
        Ok(Self {
            inner: ControlServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE),
            socket: socket.to_owned(),
        })
    }

    /// The host and its VMs.
    ///
    /// # Errors
    /// When the broker is gone or refuses.
    pub async fn list(&mut self) -> Result<HostState, CtlError> {
        let call = self.inner.list_vms(v1::ListVmsRequest {});
        Ok(answer(&self.socket, call).await?.into())
    }

    /// One VM, by id, UUID or name.
    ///
    /// # Errors
    /// When no VM or several match, or the broker is gone.
    pub async fn get(&mut self, vm: &str) -> Result<v1::Vm, CtlError> {
        let call = self.inner.get_vm(v1::GetVmRequest { vm: vm.to_owned() });
        Ok(answer(&self.socket, call).await?.vm.unwrap_or_default())
    }

    /// The host and its VMs, now and after each change.
    ///
    /// # Errors
    /// When the broker is gone or refuses.
    pub async fn watch(&mut self) -> Result<Streaming<v1::WatchVmsResponse>, CtlError> {
        let call = self.inner.watch_vms(v1::WatchVmsRequest {});
        answer(&self.socket, call).await
    }

    /// Sets the mode of the whole broker.
    ///
    /// # Errors
    /// When the broker is gone or refuses.
    pub async fn set_mode(&mut self, mode: v1::Mode) -> Result<v1::SetModeResponse, CtlError> {
        let call = self
            .inner
            .set_mode(v1::SetModeRequest { mode: mode.into() });
        answer(&self.socket, call).await
    }
}

async fn answer<T>(
    socket: &Path,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, CtlError> {
    match timeout(ANSWER, call).await {
        Ok(answer) => Ok(answer?.into_inner()),
        Err(_) => Err(CtlError::Silent {
            socket: socket.to_owned(),
        }),
    }
}

fn io_cause<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a io::Error> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref() {
            return Some(io);
        }
        cause = error.source();
    }
    None
}

fn advice(kind: Option<io::ErrorKind>) -> &'static str {
    match kind {
        Some(io::ErrorKind::PermissionDenied) => {
            "run as root, or as a member of the group that owns the socket"
        }
        Some(io::ErrorKind::NotFound) => {
            "is hint-broker running? Another socket is named by --socket or HINT_BROKER_SOCKET"
        }
        Some(io::ErrorKind::ConnectionRefused) => {
            "the socket was left behind by a broker that has ended: start hint-broker"
        }
        _ => "is hint-broker running there?",
    }
}
