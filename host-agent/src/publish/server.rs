//! The gRPC server that guests reach, with its bounds. Which VM a connection belongs to came with the connection.

use std::io;
use std::sync::Arc;

use hint_proto::v1;
use hint_proto::v1::guest_service_server::{GuestService, GuestServiceServer};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

use super::ChannelSettings;
use super::listen::{GuestStream, Peer};
use super::session::Session;
use crate::text::with_causes;

/// Largest message of a guest, in bytes.
const MAX_MESSAGE: usize = 64 * 1024;
/// Largest set of headers of a request, in bytes.
const MAX_HEADERS: u32 = 8 * 1024;
/// Largest HTTP/2 frame, in bytes; the smallest limit that HTTP/2 has.
const MAX_FRAME: u32 = 16 * 1024;
/// Streams of a connection: a session, and the one that replaces it.
const MAX_STREAMS: u32 = 2;
/// Bytes that a guest may send ahead of what was read.
const WINDOW: u32 = 64 * 1024;
/// Streams that a guest may reset before they were looked at.
const MAX_RESETS: usize = 8;

/// Serves connections until `stopped` ends, and then until they have closed.
pub(super) async fn serve(
    guests: Guests,
    connections: mpsc::Receiver<io::Result<GuestStream>>,
    stopped: oneshot::Receiver<()>,
) {
    let deadline = guests.settings.deadline;
    let served = Server::builder()
        .http2_keepalive_interval(Some(deadline))
        .http2_keepalive_timeout(Some(deadline))
        .max_concurrent_streams(MAX_STREAMS)
        .http2_max_header_list_size(MAX_HEADERS)
        .max_frame_size(MAX_FRAME)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .http2_max_pending_accept_reset_streams(Some(MAX_RESETS))
        .add_service(GuestServiceServer::new(guests).max_decoding_message_size(MAX_MESSAGE))
        .serve_with_incoming_shutdown(ReceiverStream::new(connections), async {
            // A dropped sender means the same as a message: the channel ends.
            let _ = stopped.await;
        })
        .await;
    if let Err(error) = served {
        tracing::error!("the guest channel has stopped: {}", with_causes(&error));
    }
}

/// The gRPC service that guests call.
#[derive(Debug)]
pub(super) struct Guests {
    /// The channel's times.
    pub(super) settings: ChannelSettings,
    /// The run of the broker.
    pub(super) epoch: u64,
    /// Becomes the broker's reason to leave.
    pub(super) leaving: watch::Receiver<Option<String>>,
    /// Sessions that go on.
    pub(super) sessions: watch::Sender<usize>,
}

#[tonic::async_trait]
impl GuestService for Guests {
    type SessionStream = ReceiverStream<Result<v1::SessionResponse, Status>>;

    async fn session(
        &self,
        request: Request<Streaming<v1::SessionRequest>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let slot = request
            .extensions()
            .get::<Peer>()
            .map(|peer| Arc::clone(&peer.slot))
            .ok_or_else(|| Status::internal("this connection belongs to no VM"))?;
        let session = Session {
            slot,
            settings: self.settings,
            epoch: self.epoch,
            leaving: self.leaving.clone(),
        };
        // Room for one message: the next is made when this one has gone out.
        let (out, messages) = mpsc::channel(1);
        let sessions = self.sessions.clone();
        sessions.send_modify(|count| *count += 1);
        tokio::spawn(async move {
            session.run(request.into_inner(), out).await;
            sessions.send_modify(|count| *count -= 1);
        });
        Ok(Response::new(ReceiverStream::new(messages)))
    }
}
