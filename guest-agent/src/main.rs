//! `hint-agent`: parses, builds, runs, exits.

use std::env;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand};
use hint_agent::agent;
use hint_agent::apply::{self, Choice, Probed, Survey};
use hint_agent::clock::Moment;
use hint_agent::config::{Config, DEFAULT_STATE_DIR, Overrides};
use hint_agent::error::chain;
use hint_agent::files::Root;
use hint_agent::fold::Fold;
use hint_agent::guardian::{self, Guardian, Launch};
use hint_agent::lock;
use hint_agent::restore::{StateDir, restore_left_over};
use hint_agent::session::Endpoint;
use hint_agent::status::Status;
use serde::Serialize;
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
    /// Put back what an agent that was killed has left
    ///
    /// Nothing to put back is success. Where the record of what to put back is damaged, every mask is opened.
    #[command(
        after_help = "Exit status: 0 all is back, 1 not everything is back yet (run it again), 2 wrong usage."
    )]
    Restore {
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Is an agent there, is the guest folded, and what would be put back?
    #[command(
        after_help = "Exit status: 0 an agent runs, 3 none runs, 4 none runs and the guest needs `hint-agent restore`,\n1 that can't be found out, 2 wrong usage."
    )]
    Status {
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        common: Common,
    },
    /// Which actuator would be used here, and why not the others? Changes nothing
    #[command(
        after_help = "Exit status: 0 hints would be applied, 3 they would only be logged, 4 the actuator asked for does not work here,\n1 that can't be found out, 2 wrong usage."
    )]
    Probe {
        /// As in `run` [default: auto]
        #[arg(long, value_enum)]
        actuator: Option<Choice>,
        /// Print JSON
        #[arg(long)]
        json: bool,
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
        Command::Restore { json, common } => restore(json, &common),
        Command::Status { json, common } => status(json, &common),
        Command::Probe {
            actuator,
            json,
            common,
        } => probe(actuator, json, common),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            tracing::error!("{}", chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run(
    endpoint: Option<Endpoint>,
    actuator: Option<Choice>,
    common: Common,
) -> anyhow::Result<ExitCode> {
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
    Ok(ExitCode::SUCCESS)
}

fn restore(json: bool, common: &Common) -> anyhow::Result<ExitCode> {
    start_log();
    let files = Root::new(&common.root);
    let (state, known) = state_dir(common);
    let restored = if matches!(state.load(), Ok(None)) {
        None
    } else {
        // The lock is not a condition: whoever calls this wants the mask back now.
        let _lock = wait_for_lock(&files)?;
        restore_left_over(&files, &state)?
    };
    if json {
        known?;
        return print_json(&restored.unwrap_or_default(), 0);
    }
    let Some(restored) = restored else {
        known?;
        print("nothing to restore\n")?;
        return Ok(ExitCode::SUCCESS);
    };
    if let Some(aside) = &restored.damaged {
        print(&format!("{}\n", damaged(aside)))?;
    }
    for path in restored.files {
        print(&format!("restored {}\n", path.display()))?;
    }
    for (path, text) in restored.replaced {
        print(&format!("restored {} as {text:?}\n", path.display()))?;
    }
    for (path, why) in restored.left {
        print(&format!("left {}: {why}\n", path.display()))?;
    }
    known?;
    Ok(ExitCode::SUCCESS)
}

fn status(json: bool, common: &Common) -> anyhow::Result<ExitCode> {
    start_log();
    let files = Root::new(&common.root);
    let (state, known) = state_dir(common);
    known?;
    let status = Status::read(&files, &state)?;
    if json {
        return print_json(&status, status.exit());
    }
    print(&status.to_string())?;
    Ok(status.exit().into())
}

fn probe(actuator: Option<Choice>, json: bool, common: Common) -> anyhow::Result<ExitCode> {
    start_log();
    let flags = Overrides {
        actuator,
        ..Overrides::default()
    };
    let config = Config::load(common.config.as_deref(), flags)?;
    let files = Root::new(common.root);
    let survey = Survey::make(&files, config.actuator, config.allow_old_kernel)?;
    if json {
        return print_json(&survey, survey.exit());
    }
    print(&survey.to_string())?;
    Ok(survey.exit().into())
}

/// A configuration that was broken meanwhile must not keep the guest folded: what it says of the state directory holds, whatever else
/// is wrong in it, and where it says nothing that can be read, the usual directory is worth a look. The error says that the record may
/// be elsewhere.
fn state_dir(common: &Common) -> (StateDir, anyhow::Result<()>) {
    let path = common.config.as_deref();
    let flags = Overrides {
        state_dir: common.state_dir.clone(),
        ..Overrides::default()
    };
    let error = match Config::load(path, flags) {
        Ok(config) => return (StateDir::new(config.state_dir), Ok(())),
        Err(error) => error,
    };
    let found = common
        .state_dir
        .clone()
        .or_else(|| Config::state_dir_of_refused(path));
    let sure = found.is_some();
    let dir = found.unwrap_or_else(|| DEFAULT_STATE_DIR.into());
    tracing::warn!("{}; looking into {}", chain(&error), dir.display());
    let known = match sure {
        true => Ok(()),
        false => Err(error).context(
            "the agent's state may be in another directory than the usual one; name it by --state-dir",
        ),
    };
    (StateDir::new(dir), known)
}

fn print_json(value: &impl Serialize, exit: u8) -> anyhow::Result<ExitCode> {
    let text = serde_json::to_string_pretty(value).context("can't write JSON")?;
    print(&format!("{text}\n"))?;
    Ok(exit.into())
}

/// Not `println!`, which panics when nobody reads: what it tells of is done by then.
fn print(text: &str) -> anyhow::Result<()> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).context("can't write to standard output")
        }
        _ => Ok(()),
    }
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
