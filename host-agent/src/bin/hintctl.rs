//! hintctl: shows what the hint broker sees and decides, and turns it on and off.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use hint_broker::control::DEFAULT_SOCKET;
use hint_broker::ctl::{
    Client, CtlError, ListJson, VmDocument, follow, render_explanation, render_table,
};
use hint_broker::text::{printable, with_causes};
use hint_broker::wire;
use hint_proto::v1;

/// Shows what the hint broker sees and decides, and turns it on and off.
///
/// Exit codes: 0 done; 1 `off` or `mode observe`: some agents have not confirmed; 2 wrong arguments; 3 the broker can't be reached; 4 the VM is
/// unknown, or several match; 5 anything else failed.
#[derive(Debug, Parser)]
#[command(name = "hintctl", version)]
struct Args {
    /// The broker's control socket.
    #[arg(long, global = true, env = "HINT_BROKER_SOCKET", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// All VMs, in a table.
    List {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// One VM, by id, UUID or name.
    Get {
        /// Its id, UUID or name.
        vm: String,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Why a VM's usable is what it is.
    Explain {
        /// Its id, UUID or name.
        vm: String,
    },
    /// All VMs, live.
    Top {
        /// Show them once and end.
        #[arg(long)]
        once: bool,
    },
    /// Set the mode of the whole broker until it is set again or the broker restarts.
    Mode {
        /// The mode.
        mode: Mode,
    },
    /// Turn everything off, and show that it is off.
    Off,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Mode {
    /// Compute and export; send no hint.
    Observe,
    /// Send hints; the agents log them.
    Advise,
    /// Send hints; the agents apply them.
    Enforce,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is_broken_pipe() => ExitCode::SUCCESS,
        Err(error) => {
            // Nothing is left to tell the user by when stderr is gone too.
            let _ = writeln!(io::stderr(), "hintctl: {}", with_causes(&error));
            ExitCode::from(error.exit_code())
        }
    }
}

async fn run(args: &Args) -> Result<(), CtlError> {
    let mut client = Client::connect(&args.socket).await?;
    let mut out = io::stdout();
    match &args.command {
        Command::List { json } => {
            let state = client.list().await?;
            if *json {
                print_json(&mut out, &ListJson::from(&state))?;
            } else {
                out.write_all(render_table(&state, width()).as_bytes())?;
            }
        }
        Command::Get { vm, json } => {
            let vm = client.get(vm).await?;
            if *json {
                print_json(&mut out, &VmDocument::from(&vm))?;
            } else {
                out.write_all(render_explanation(&vm, width()).as_bytes())?;
            }
        }
        Command::Explain { vm } => {
            let vm = client.get(vm).await?;
            out.write_all(render_explanation(&vm, width()).as_bytes())?;
        }
        Command::Top { once } => {
            let mut states = client.watch().await?;
            let terminal = out.is_terminal();
            tokio::select! {
                followed = follow(&mut states, *once, terminal, width, &mut out) => followed?,
                _ = tokio::signal::ctrl_c() => {}
            }
        }
        Command::Mode { mode } => set_mode(&mut client, *mode, &mut out).await?,
        Command::Off => set_mode(&mut client, Mode::Observe, &mut out).await?,
    }
    out.flush()?;
    Ok(())
}

/// Sets the mode and, for observe, shows VM by VM that it is off.
async fn set_mode(client: &mut Client, mode: Mode, out: &mut impl Write) -> Result<(), CtlError> {
    let mode = match mode {
        Mode::Observe => v1::Mode::Observe,
        Mode::Advise => v1::Mode::Advise,
        Mode::Enforce => v1::Mode::Enforce,
    };
    let set = client.set_mode(mode).await?;
    let word = wire::mode_word(set.mode).unwrap_or_else(|| "unknown".to_owned());
    writeln!(out, "mode {word}")?;
    if !set.restored.is_empty() || !set.unconfirmed.is_empty() {
        // Names are a comfort only: without them it is done all the same.
        let vms = client
            .list()
            .await
            .map(|state| state.vms)
            .unwrap_or_default();
        let named = |id: &String| match vms.iter().find(|vm| vm.id == *id) {
            Some(vm) if !vm.name.is_empty() => format!("{} ({id})", printable(&vm.name)),
            _ => id.clone(),
        };
        for id in &set.restored {
            writeln!(out, "{}: off, as its agent confirms", named(id))?;
        }
        for id in &set.unconfirmed {
            writeln!(out, "{}: not confirmed", named(id))?;
        }
    }
    if set.unconfirmed.is_empty() {
        if mode == v1::Mode::Observe {
            writeln!(out, "off: no hint is in force")?;
        }
        return Ok(());
    }
    out.flush()?;
    Err(CtlError::Unconfirmed {
        vms: set.unconfirmed,
    })
}

fn print_json(out: &mut impl Write, document: &impl serde::Serialize) -> Result<(), CtlError> {
    serde_json::to_writer_pretty(&mut *out, document).map_err(io::Error::from)?;
    out.write_all(b"\n")?;
    Ok(())
}

/// Columns of the terminal; all the room there is when the output goes elsewhere.
fn width() -> usize {
    let out = io::stdout();
    if !out.is_terminal() {
        return usize::MAX;
    }
    rustix::termios::tcgetwinsize(&out)
        .ok()
        .filter(|size| size.ws_col > 0)
        .map_or(80, |size| usize::from(size.ws_col))
}
