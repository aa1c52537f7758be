//! The daemon: runs the pipeline tick by tick, and the servers beside it. It decides nothing itself.

mod cadence;
pub(crate) mod decisions;
mod host;
mod inputs;
mod view;

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use self::cadence::{Cadence, Pressure};
use self::host::Host;
use crate::config::Config;
use crate::control::{Command, ControlError, ControlSocket};
use crate::metrics::{MetricsError, MetricsServer};
use crate::model::HostView;
use crate::publish::{ChannelSettings, PublishError, Publisher};
use crate::root::Root;

/// Owner and group may ask the broker; nobody else.
const CONTROL_MODE: u32 = 0o660;
/// Commands that wait for the next tick.
const COMMANDS: usize = 16;
/// A tick that is later than this is late.
const LATE: Duration = Duration::from_millis(5);

/// Why the daemon can't run.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// No control API.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// No metrics.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// No channel to the guests.
    #[error(transparent)]
    Publish(#[from] PublishError),
}

/// Runs until `stop` ends, then says goodbye to all guests, so that they use all their vCPUs again.
///
/// # Errors
/// When a listener can't be opened or the control API stops by itself.
pub async fn run(
    config: Config,
    root: Root,
    stop: impl Future<Output = ()>,
) -> Result<(), DaemonError> {
    let epoch = new_epoch();
    raise_file_limit();
    let control = ControlSocket::bind(&config.control.socket, CONTROL_MODE)?;
    let metrics = match config.metrics.enabled {
        true => Some(MetricsServer::bind(config.metrics.listen).await?),
        false => None,
    };
    let channel = ChannelSettings {
        vsock: config.channel.vsock,
        vsock_port: config.channel.port,
        heartbeat: config.channel.heartbeat,
        deadline: config.channel.lease,
        lease: config.channel.lease,
    };
    let publisher = Publisher::start(channel, epoch)?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        epoch,
        mode = %config.mode,
        control = %config.control.socket.display(),
        metrics = metrics.as_ref().map(|metrics| metrics.address().to_string()),
        "hint-broker runs"
    );
    let (view, shown) = watch::channel(Arc::new(HostView {
        epoch,
        mode: config.mode,
        ..HostView::default()
    }));
    let (commands, orders) = mpsc::channel(COMMANDS);
    let (ending, ended) = watch::channel(());
    let metrics = metrics
        .map(|metrics| tokio::spawn(metrics.serve(shown.clone(), until_closed(ended.clone()))));
    let control = tokio::spawn(control.serve(shown, commands, until_closed(ended)));
    let pressure = Pressure::open(&root)
        .inspect_err(|error| {
            tracing::info!(%error, "the kernel doesn't tell when tasks wait for pCPUs: a quiet host is looked at as often as a busy one");
        })
        .ok();
    let mut host = Host::new(config, root, epoch);
    let result = tokio::select! {
        () = pipeline(&mut host, pressure, &publisher, &view, orders) => Ok(()),
        () = stop => Ok(()),
        // The task ends by itself only when its server does.
        result = control => result.unwrap_or(Ok(())),
    };
    publisher.shutdown("the broker stops").await;
    drop(ending);
    // The guests come first: the last of a recording may wait for a disk.
    drop(host);
    if let Some(metrics) = metrics {
        // It was told to stop and owes no answer.
        let _ = metrics.await;
    }
    Ok(result?)
}

/// Ticks for ever.
async fn pipeline(
    host: &mut Host,
    pressure: Option<Pressure>,
    publisher: &Publisher,
    view: &watch::Sender<Arc<HostView>>,
    mut orders: mpsc::Receiver<Command>,
) {
    let mut cadence = Cadence::new(host.interval(), pressure.is_some());
    let mut last = Instant::now();
    let mut next = last;
    loop {
        let order = tokio::select! {
            () = sleep_until(next) => None,
            () = rises(pressure.as_ref()), if cadence.is_quiet() => {
                // Two samples too close to each other say nothing.
                cadence.pressed();
                next = Instant::now().max(last + cadence.interval());
                continue;
            }
            order = orders.recv() => order,
        };
        match order {
            None => {
                // After a late tick the next is a whole interval later.
                let now = Instant::now();
                last = if now > next + LATE { now } else { next };
                view.send_replace(Arc::new(host.tick(publisher)));
                let was_quiet = cadence.is_quiet();
                cadence.looked(host.elapsed(), host.is_calm());
                if let Some(pressure) = &pressure
                    && cadence.is_quiet()
                    && !was_quiet
                {
                    pressure.forget().await;
                }
                next = last + cadence.interval();
            }
            Some(Command::SetMode { mode, done }) => {
                let now = host.set_mode(mode, publisher);
                view.send_replace(Arc::new(now));
                // Whoever asked may have gone meanwhile; the mode is set all the same.
                let _ = done.send(());
            }
        }
    }
}

async fn rises(pressure: Option<&Pressure>) {
    match pressure {
        Some(pressure) => pressure.rises().await,
        None => std::future::pending().await,
    }
}

async fn until_closed(mut channel: watch::Receiver<()>) {
    // Nothing is ever sent: the error says that the daemon ends.
    while channel.changed().await.is_ok() {}
}

/// Another number for each run: microseconds since 1970. Guests only compare it.
fn new_epoch() -> u64 {
    let since_1970 = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since_1970.as_micros())
        .unwrap_or(u64::MAX)
        .max(1)
}

/// One file stays open for each vCPU thread; the usual soft limit is for programs that use `select`.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let most = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, most) {
        tracing::warn!(%error, current = limit.current, "can't raise the limit of open files: about as many vCPUs can be measured");
    }
}
