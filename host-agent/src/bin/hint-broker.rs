//! `hint-broker`: the host daemon.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use hint_broker::config::Config;
use hint_broker::daemon;
use hint_broker::doctor;
use hint_broker::replay::{ChangeJson, replay, table_head};
use hint_broker::root::Root;
use hint_broker::text::with_causes;
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
    /// Look at this host once and say whether the broker can work here. Exit code 0: enforcing would be safe; 2: it would not;
    /// 1: doctor could not look.
    Doctor {
        /// Configuration [default: /etc/hint-broker.toml, where it exists].
        #[arg(long)]
        config: Option<PathBuf>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
        /// Where proc and sys are.
        #[arg(long, default_value = "/", hide = true)]
        root: PathBuf,
    },
    /// Decide again on a recording, and print each change of usable.
    Replay {
        /// The recording, as `[record] path` names it; its older half is found beside it.
        file: PathBuf,
        /// Settings to decide by: mode, `[host]` and `[[vm]]` of this configuration [default: as recorded].
        #[arg(long)]
        config: Option<PathBuf>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

/// Exit code of a diagnosis with something bad.
const UNSAFE: u8 = 2;

fn main() -> ExitCode {
    // Not anyhow's own report: with RUST_BACKTRACE set, a typo in the configuration would bring a backtrace.
    match start() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("hint-broker: {}", with_causes(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn start() -> anyhow::Result<ExitCode> {
    match Arguments::parse().command {
        Command::Run { config, root } => run(Config::load(config.as_deref())?, Root::new(root))?,
        Command::CheckConfig { config } => {
            let config = Config::load(config.as_deref())?;
            print(&format!("{config:#?}\n")).context("can't print the configuration")?;
        }
        Command::Doctor { config, json, root } => {
            let config = Config::load(config.as_deref())?;
            let diagnosis = doctor::diagnose(&Root::new(root), &config);
            let text = match json {
                true => {
                    serde_json::to_string_pretty(&diagnosis).context("can't write JSON")? + "\n"
                }
                false => diagnosis.to_string(),
            };
            print(&text).context("can't print the diagnosis")?;
            if !diagnosis.enforce_is_safe {
                return Ok(ExitCode::from(UNSAFE));
            }
        }
        Command::Replay { file, config, json } => {
            let config = config.map(|path| Config::load(Some(&path))).transpose()?;
            replay_file(&file, config.as_ref(), json)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn replay_file(file: &Path, config: Option<&Config>, json: bool) -> anyhow::Result<()> {
    if json {
        let mut changes = Vec::new();
        let summary = replay(file, config, |change| {
            changes.push(ChangeJson::from(change));
            true
        })?;
        let document = serde_json::json!({ "schema": 1, "changes": changes, "summary": summary });
        let text = serde_json::to_string_pretty(&document).context("can't write JSON")?;
        return print(&(text + "\n")).context("can't print the changes");
    }
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let mut printed = writeln!(out, "{}", table_head());
    let summary = replay(file, config, |change| {
        if printed.is_ok() {
            printed = writeln!(out, "{change}");
        }
        printed.is_ok()
    })?;
    match printed.and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
        printed => printed.context("can't print the changes")?,
    }
    eprintln!("{summary}");
    Ok(())
}

/// A reader that has seen enough, like `head`, is no failure.
fn print(text: &str) -> std::io::Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
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
