//! `hint-agent`: parses, builds, runs, exits.

use std::env;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand};
use hint_agent::agent;
use hint_agent::apply::{self, Choice, Probed};
use hint_agent::clock::Moment;
use hint_agent::config::{Config, DEFAULT_STATE_DIR, Overrides};
use hint_agent::error::chain;
use hint_agent::files::Root;
use hint_agent::fold::Fold;
use hint_agent::guardian::{self, Guardian, Launch};
use hint_agent::lock;
use hint_agent::restore::{StateDir, restore_left_over};
use hint_agent::session::Endpoint;
use tracing::level_filters::LevelFilter;

/// How long a predecessor's guardian may take to finish.
const HANDOVER: Duration = Duration::from_secs(10);
/// A running program file, also when a newer one has replaced it on disk.
const SELF: &str = "/proc/self/exe";

/// Guest agent of the KVM hint broker: uses as many vCPUs as the host says can run.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Follow the broker's hints until SIGTERM; then put the mask back
    Run {
        /// Where the broker listens: vsock:CID:PORT or unix:PATH [default: vsock:2:737]
        #[arg(long)]
        endpoint: Option<Endpoint>,
        /// How to keep work off avoided CPUs [default: auto]
        #[arg(long, value_enum)]
        actuator: Option<Choice>,
        #[command(flatten)]
        common: Common,
    },
    /// Put back what an agent that was killed has left; nothing to put back is success
    Restore {
        #[command(flatten)]
        common: Common,
    },
}

#[derive(Debug, Args)]
struct Common {
    /// Configuration [default: /etc/hint-agent.toml if there is one]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Where /proc and /sys are found
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
    /// Where the restore record is kept [default: /run/hint-agent]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
}

fn main() -> ExitCode {
    // Before anything else: the guardian stays small because nothing of the agent is ever set up in it.
    let arguments: Vec<_> = env::args_os().collect();
    if let [_, argument, root, state] = arguments.as_slice()
        && argument == guardian::ARGUMENT
    {
        return guardian::run(Path::new(root), Path::new(state));
    }
    let result = match Cli::parse().command {
        Command::Run {
            endpoint,
            actuator,
            common,
        } => run(endpoint, actuator, common),
        Command::Restore { common } => restore(common),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(endpoint: Option<Endpoint>, actuator: Option<Choice>, common: Common) -> anyhow::Result<()> {
    start_log();
    let config = Config::load(
        common.config.as_deref(),
        Overrides {
            endpoint,
            actuator,
            state_dir: common.state_dir,
        },
    )?;
    let files = Root::new(&common.root);
    let state = StateDir::new(&config.state_dir);
    let Some(lock) = wait_for_lock(&files)? else {
        bail!(
            "another hint-agent or its guardian runs in this guest and has locked {}; stop it first",
            lock::PATH
        );
    };
    if let Some(restored) = restore_left_over(&files, &state)? {
        if let Some(aside) = &restored.damaged {
            tracing::error!("{}", damaged(aside));
        }
        tracing::warn!(
            files = restored.files.len() + restored.replaced.len(),
            "put back what an agent before this one had left"
        );
    }
    let Probed { actuator, rejected } =
        apply::probe(&files, config.actuator, config.allow_old_kernel)?;
    for (name, why) in rejected {
        tracing::info!("{name} is not used: {why}");
    }
    tracing::info!(actuator = actuator.name(), endpoint = %config.endpoint, "started");
    // Before tokio: the guardian must not depend on it.
    let launch = Launch {
        program: SELF.into(),
        root: common.root,
        state: state.clone(),
        lock,
    };
    let guardian = Guardian::start(launch, Moment::now())?;
    let fold = Fold::new(Box::new(files), actuator, state, guardian)?;
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("can't start the event loop")?
        .block_on(agent::run(fold, config.endpoint))?;
    Ok(())
}

fn restore(common: Common) -> anyhow::Result<()> {
    start_log();
    let flags = Overrides {
        state_dir: common.state_dir.clone(),
        ..Overrides::default()
    };
    // A configuration that was broken meanwhile must not keep the guest folded.
    let state_dir = match Config::load(common.config.as_deref(), flags) {
        Ok(config) => config.state_dir,
        Err(error) => {
            tracing::warn!("{}", chain(&error));
            common.state_dir.unwrap_or_else(|| DEFAULT_STATE_DIR.into())
        }
    };
    let state = StateDir::new(state_dir);
    if matches!(state.load(), Ok(None)) {
        println!("nothing to restore");
        return Ok(());
    }
    // The lock is not a condition: whoever calls this wants the mask back now.
    let files = Root::new(&common.root);
    let _lock = wait_for_lock(&files)?;
    match restore_left_over(&files, &state)? {
        None => println!("nothing to restore"),
        Some(restored) => {
            if let Some(aside) = &restored.damaged {
                println!("{}", damaged(aside));
            }
            for path in restored.files {
                println!("restored {}", path.display());
            }
            for (path, text) in restored.replaced {
                println!("restored {} as {text:?}", path.display());
            }
            for (path, why) in restored.left {
                println!("left {}: {why}", path.display());
            }
        }
    }
    Ok(())
}

/// What to tell when the record of what to put back can't be read.
fn damaged(aside: &Path) -> String {
    format!(
        "the restore record is damaged, so every mask is opened: all CPUs may be used. Where a top-level group had a cpuset.cpus of its own, set it again. The record is kept as {}",
        aside.display()
    )
}

/// The guest's lock, for which a predecessor's guardian gets some time.
fn wait_for_lock(files: &Root) -> anyhow::Result<Option<std::fs::File>> {
    let start = Instant::now();
    loop {
        let lock = lock::take(files)?;
        if lock.is_some() || start.elapsed() > HANDOVER {
            return Ok(lock);
        }
        thread::sleep(Duration::from_millis(50));
    }
}

fn start_log() {
    let level = env::var("HINT_AGENT_LOG")
        .ok()
        .and_then(|level| level.parse::<LevelFilter>().ok())
        .unwrap_or(LevelFilter::INFO);
    tracing_subscriber::fmt()
        .compact()
        .with_target(false)
        .with_max_level(level)
        // An error on stderr would be reported with a panic on stderr.
        .log_internal_errors(false)
        .with_writer(io::stderr)
        .init();
}
