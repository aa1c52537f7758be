//! Holds KVM VMs whose vCPUs spin, until SIGTERM or until standard input ends. It prints `ready` when they run; a line `add` on
//! standard input gives the first VM one more vCPU, which is answered with `added`; a line `steal` is answered with the steal
//! time of each of its vCPUs, in nanoseconds, as it stands in guest memory.

use std::io::{BufRead, Write};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use anyhow::Context;
use clap::Parser;
use lab::kvm::SpinningVm;
use signal_hook::consts::SIGTERM;
use signal_hook::iterator::Signals;

/// Holds KVM VMs whose vCPUs spin.
#[derive(Debug, Parser)]
struct Arguments {
    /// vCPUs of each VM.
    #[arg(long, default_value_t = 1)]
    vcpus: u32,
    /// VMs in this one process.
    #[arg(long, default_value_t = 1)]
    vms: u32,
    /// Name vCPU threads as QEMU does.
    #[arg(long)]
    named: bool,
    /// Ignored: they are here for whoever reads this process's command line.
    #[arg(last = true)]
    shown: Vec<String>,
}

enum Event {
    Add,
    Steal,
    End,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let mut signals = Signals::new([SIGTERM]).context("can't handle SIGTERM")?;
    let (sender, events) = channel();
    let on_signal = sender.clone();
    thread::spawn(move || {
        if signals.forever().next().is_some() {
            send(&on_signal, Event::End);
        }
    });
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            match line.as_str() {
                "add" => send(&sender, Event::Add),
                "steal" => send(&sender, Event::Steal),
                _ => {}
            }
        }
        send(&sender, Event::End);
    });

    let mut vms = Vec::new();
    for _ in 0..arguments.vms {
        let mut vm = SpinningVm::new(arguments.named)?;
        for _ in 0..arguments.vcpus {
            vm.add_vcpu()?;
        }
        vms.push(vm);
    }
    say("ready")?;
    for event in events {
        match event {
            Event::Add => {
                let vm = vms.first_mut().context("there is no VM to add a vCPU to")?;
                vm.add_vcpu()?;
                say("added")?;
            }
            Event::Steal => {
                let vm = vms.first().context("there is no VM with a steal time")?;
                let times: Vec<String> = vm.steal_ns().iter().map(u64::to_string).collect();
                say(&times.join(" "))?;
            }
            Event::End => break,
        }
    }
    for vm in vms {
        vm.stop()?;
    }
    Ok(())
}

/// The main thread may have ended the program meanwhile.
fn send(sender: &Sender<Event>, event: Event) {
    let _ = sender.send(event);
}

fn say(word: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{word}").and_then(|()| out.flush())?;
    Ok(())
}
