//! Clients of the control socket: a bounded number, and no haste where the system has no more file descriptors.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::sleep;
use tonic::transport::server::{Connected, UdsConnectInfo};

/// So many clients at once; another one is hung up on.
pub(super) const MAX_CONNECTIONS: usize = 128;
/// An error that stays, as of too many open files, must not keep a core busy.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A client's connection, which counts while it is open.
#[derive(Debug)]
pub(super) struct Client {
    stream: UnixStream,
    _permit: OwnedSemaphorePermit,
}

/// Accepts clients until nobody takes them any more.
pub(super) async fn accept(listener: UnixListener, accepted: mpsc::Sender<io::Result<Client>>) {
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let stream = tokio::select! {
            () = accepted.closed() => return,
            found = listener.accept() => match found {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "can't accept a client of the control socket");
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
        };
        let Ok(permit) = Arc::clone(&connections).try_acquire_owned() else {
            tracing::debug!(
                "hung up on a client of the control socket: there are {MAX_CONNECTIONS}"
            );
            continue;
        };
        let client = Client {
            stream,
            _permit: permit,
        };
        if accepted.send(Ok(client)).await.is_err() {
            return;
        }
    }
}

impl Connected for Client {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> UdsConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Client {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Client {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
