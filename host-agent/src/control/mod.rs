//! The control API: `ControlService` on a Unix socket, for orchestrators and hintctl.
//!
//! It shows the latest view and passes commands to the daemon; it changes nothing itself. Who may use it is decided by the
//! socket's permissions; who used it is logged by the kernel's word.

mod accept;
pub mod convert;
mod service;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hint_proto::v1::control_service_server::ControlServiceServer;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;

use crate::model::{HostView, Mode};
use crate::socket::{self, Access, Lock, SocketError, SocketFile};
use service::Control;

/// Where the control socket is unless the configuration says otherwise.
pub const DEFAULT_SOCKET: &str = "/run/hint-broker/control.sock";
/// Permission bits of the control socket unless the configuration says otherwise.
pub const DEFAULT_SOCKET_MODE: u32 = 0o660;

/// Largest request, in bytes.
const MAX_MESSAGE: usize = 64 * 1024;
/// Requests of one connection at a time.
const MAX_STREAMS: u32 = 64;
/// A connection whose client doesn't answer a ping for so long is dead.
const KEEPALIVE: Duration = Duration::from_secs(20);
/// How long connections have to close when the broker stops.
const CLOSING: Duration = Duration::from_secs(1);

/// What the daemon is asked to do.
#[derive(Debug)]
pub enum Command {
    /// Set the mode of the whole broker.
    SetMode {
        /// The mode.
        mode: Mode,
        /// To be told when the mode is set, the hints of that mode are on offer and a view with that mode is out.
        done: oneshot::Sender<()>,
    },
}

/// Why there is no control API.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No listener on the socket.
    #[error("control socket")]
    Socket(#[from] SocketError),
    /// The runtime can't watch the socket.
    #[error("control socket {path}: can't watch it")]
    Watch {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The server stopped by itself.
    #[error("control socket {path}: the server has stopped")]
    Serve {
        /// The socket.
        path: PathBuf,
        /// Tonic's error.
        source: tonic::transport::Error,
    },
}

/// The control socket, listening. It is removed on drop.
#[derive(Debug)]
pub struct ControlSocket {
    listener: UnixListener,
    file: SocketFile,
    _lock: Lock,
}

impl ControlSocket {
    /// Listens on `path` with permission bits `mode`; holds `<path>.lock`, so that one broker at a time has the path. Must be
    /// called in a tokio runtime.
    ///
    /// # Errors
    /// When another broker runs on the path, something else is there, or the system refuses.
    pub fn bind(path: &Path, mode: u32) -> Result<Self, ControlError> {
        let lock = socket::lock(path)?;
        let (listener, file) = socket::listen(path, Access { mode, owner: None })?;
        let listener = UnixListener::from_std(listener).map_err(|source| ControlError::Watch {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self {
            listener,
            file,
            _lock: lock,
        })
    }

    /// Serves until `stop` ends or the daemon drops the view.
    ///
    /// # Errors
    /// When the server stops by itself.
    pub async fn serve(
        self,
        view: watch::Receiver<Arc<HostView>>,
        commands: mpsc::Sender<Command>,
        stop: impl Future<Output = ()> + Send,
    ) -> Result<(), ControlError> {
        // Clients watch this copy: it ends when the service does, and so do their streams.
        let (copy, shown) = watch::channel(Arc::clone(&view.borrow()));
        let (drain, drained) = oneshot::channel::<()>();
        let path = self.file.path().to_owned();
        let (accepted, clients) = mpsc::channel(1);
        let accepting = accept::accept(self.listener, accepted);
        let server = Server::builder()
            .http2_keepalive_interval(Some(KEEPALIVE))
            .http2_keepalive_timeout(Some(KEEPALIVE))
            .max_concurrent_streams(MAX_STREAMS)
            .add_service(
                ControlServiceServer::new(Control::new(shown, commands))
                    .max_decoding_message_size(MAX_MESSAGE),
            )
            .serve_with_incoming_shutdown(ReceiverStream::new(clients), async {
                // A dropped sender means the same as a message: stop.
                let _ = drained.await;
            });
        tokio::pin!(server);
        tokio::select! {
            result = &mut server => {
                return result.map_err(|source| ControlError::Serve { path, source });
            }
            () = accepting => {}
            () = copy_views(view, &copy) => {}
            () = stop => {}
        }
        drop(copy);
        drop(drain);
        match timeout(CLOSING, server).await {
            Ok(result) => result.map_err(|source| ControlError::Serve { path, source }),
            // A client that holds its connection open does not hold up the broker.
            Err(_) => Ok(()),
        }
    }
}

/// Copies views until the daemon drops its end.
async fn copy_views(mut from: watch::Receiver<Arc<HostView>>, to: &watch::Sender<Arc<HostView>>) {
    while from.changed().await.is_ok() {
        to.send_replace(Arc::clone(&from.borrow_and_update()));
    }
}
