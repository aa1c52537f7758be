//! `hint-broker`: the host daemon.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use hint_broker::config::Config;
use hint_broker::daemon;
use hint_broker::root::Root;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

/// Tells each KVM guest of this host how many vCPUs it can really run.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the daemon until SIGTERM, SIGINT or SIGHUP; then all guests use all their vCPUs again.
    Run {
        /// Configuration [default: /etc/hint-broker.toml, where it exists].
        #[arg(long)]
        config: Option<PathBuf>,
        /// Where proc and sys are.
        #[arg(long, default_value = "/", hide = true)]
        root: PathBuf,
    },
    /// Read a configuration, say what is wrong with it or what holds, and end.
    CheckConfig {
        /// Configuration [default: /etc/hint-broker.toml, where it exists].
        config: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    // Not anyhow's own report: with RUST_BACKTRACE set, a typo in the configuration would bring a backtrace.
    match start() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hint-broker: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Command::Run { config, root } => run(Config::load(config.as_deref())?, Root::new(root)),
        Command::CheckConfig { config } => {
            let config = Config::load(config.as_deref())?;
            // A reader that has seen enough, like `head`, is no failure.
            match writeln!(std::io::stdout(), "{config:#?}") {
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
                written => written.context("can't print the configuration"),
            }
        }
    }
}

fn run(config: Config, root: Root) -> anyhow::Result<()> {
    let filter =
        EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info,h2=error"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        // An error on stderr would be reported with a panic on stderr.
        .log_internal_errors(false)
        .init();
    // The main thread measures and decides; these answer guests and operators meanwhile.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("can't start the runtime")?;
    runtime.block_on(async {
        let mut terminated = signal(SignalKind::terminate()).context("can't wait for SIGTERM")?;
        let mut interrupted = signal(SignalKind::interrupt()).context("can't wait for SIGINT")?;
        let mut hung_up = signal(SignalKind::hangup()).context("can't wait for SIGHUP")?;
        let stop = async {
            tokio::select! {
                _ = terminated.recv() => {}
                _ = interrupted.recv() => {}
                _ = hung_up.recv() => {}
            }
            tracing::info!("stopping: guests get all their vCPUs back");
        };
        daemon::run(config, root, stop).await?;
        Ok(())
    })
}
