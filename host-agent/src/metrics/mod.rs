//! The broker's metrics and its health, over HTTP/1.1.
//!
//! `GET /metrics` gives Prometheus' text format, `GET /healthz` tells whether the daemon still ticks. Nothing here can change
//! anything, and one scraper too many is turned away rather than served slowly.

mod page;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, timeout};

use crate::model::HostView;
pub use page::{CONTENT_TYPE as PAGE_TYPE, page};

/// Where metrics are served unless the configuration says otherwise.
pub const DEFAULT_ADDRESS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9737);

/// Connections at a time; others are closed at once.
const MAX_CONNECTIONS: usize = 16;
/// Bytes of a request's head.
const MAX_HEAD: usize = 8 * 1024;
/// How long a request's head may take.
const HEAD_TIME: Duration = Duration::from_secs(5);
/// How long a whole connection may take; it serves one request.
const CONNECTION_TIME: Duration = Duration::from_secs(30);
/// A daemon that has not ticked for so long is ill; it ticks at least once a second.
const TICK_TIME: Duration = Duration::from_secs(10);
/// Pause after the system refused to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why there are no metrics.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// No listener on the address.
    #[error(
        "metrics address {address}: can't listen on it: use another address, or stop who has it"
    )]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
}

/// The metrics' listener.
#[derive(Debug)]
pub struct MetricsServer {
    listener: TcpListener,
    address: SocketAddr,
}

impl MetricsServer {
    /// Listens on `address`; port 0 takes a free one.
    ///
    /// # Errors
    /// When the system refuses.
    pub async fn bind(address: SocketAddr) -> Result<Self, MetricsError> {
        let failed = |source| MetricsError::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, address })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop` ends.
    pub async fn serve(
        self,
        view: watch::Receiver<Arc<HostView>>,
        stop: impl Future<Output = ()> + Send,
    ) {
        let pulse = Arc::new(Pulse::new(view.borrow().ticks));
        let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        tokio::select! {
            () = stop => {}
            () = self.accept(&view, &pulse, &connections) => {}
            () = feel(view.clone(), &pulse) => {}
        }
    }

    async fn accept(
        &self,
        view: &watch::Receiver<Arc<HostView>>,
        pulse: &Arc<Pulse>,
        connections: &Arc<Semaphore>,
    ) {
        loop {
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::debug!(%error, "can't accept a scraper");
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Ok(permit) = Arc::clone(connections).try_acquire_owned() else {
                tracing::debug!("closed a scraper's connection: there are {MAX_CONNECTIONS}");
                continue;
            };
            let view = view.clone();
            let pulse = Arc::clone(pulse);
            tokio::spawn(async move {
                if timeout(CONNECTION_TIME, one(stream, view, pulse))
                    .await
                    .is_err()
                {
                    tracing::debug!("closed a scraper's connection: it took too long");
                }
                drop(permit);
            });
        }
    }
}

/// Serves one request on a connection.
async fn one(stream: TcpStream, view: watch::Receiver<Arc<HostView>>, pulse: Arc<Pulse>) {
    let service = service_fn(move |request| {
        let view = Arc::clone(&view.borrow());
        let well = pulse.is_felt(Instant::now());
        async move { Ok::<_, Infallible>(answer(&request, &view, well)) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(MAX_HEAD)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "a scraper's connection broke");
    }
}

fn answer(request: &Request<Incoming>, view: &HostView, well: bool) -> Response<Full<Bytes>> {
    let path = request.uri().path();
    if !matches!(path, "/metrics" | "/healthz") {
        return text(StatusCode::NOT_FOUND, "expected /metrics or /healthz\n");
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refusal = text(StatusCode::METHOD_NOT_ALLOWED, "expected GET or HEAD\n");
        refusal
            .headers_mut()
            .insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refusal;
    }
    if path == "/healthz" {
        return if well {
            text(StatusCode::OK, "ok\n")
        } else {
            text(
                StatusCode::SERVICE_UNAVAILABLE,
                "the broker has not looked at the host for 10 s: see its journal\n",
            )
        };
    }
    match page(view) {
        Ok(page) => {
            let mut response = Response::new(Full::new(Bytes::from(page)));
            response
                .headers_mut()
                .insert(CONTENT_TYPE, HeaderValue::from_static(PAGE_TYPE));
            response
        }
        Err(error) => {
            tracing::error!(%error, "can't write the metrics");
            text(
                StatusCode::INTERNAL_SERVER_ERROR,
                "can't write the metrics: see the journal\n",
            )
        }
    }
}

fn text(status: StatusCode, body: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from_static(body.as_bytes())));
    *response.status_mut() = status;
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}

/// When the daemon ticked last.
#[derive(Debug)]
struct Pulse(Mutex<(u64, Instant)>);

impl Pulse {
    fn new(ticks: u64) -> Self {
        Self(Mutex::new((ticks, Instant::now())))
    }

    fn see(&self, ticks: u64, now: Instant) {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if last.0 != ticks {
            *last = (ticks, now);
        }
    }

    fn is_felt(&self, now: Instant) -> bool {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        now.saturating_duration_since(last.1) < TICK_TIME
    }
}

/// Follows the ticks of the views until the daemon is gone.
async fn feel(mut view: watch::Receiver<Arc<HostView>>, pulse: &Pulse) {
    while view.changed().await.is_ok() {
        let ticks = view.borrow_and_update().ticks;
        pulse.see(ticks, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_without_new_ticks_are_no_pulse() {
        let pulse = Pulse::new(5);
        let start = Instant::now();
        assert!(pulse.is_felt(start));
        let later = start + Duration::from_secs(11);
        pulse.see(5, later);
        assert!(!pulse.is_felt(later));
        pulse.see(6, later);
        assert!(pulse.is_felt(later + Duration::from_secs(9)));
    }
}
