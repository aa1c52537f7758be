//! The live view: the host and a bar for each VM, redrawn with each change.

use std::io::Write;
use std::time::Duration;

use hint_proto::v1;
use tokio::time::{Instant, sleep_until};
use tonic::Streaming;

use super::{CtlError, HostState, cpus, cut, host_line, shown};
use crate::text::printable;
use crate::wire;

/// Width of a bar.
const BAR: usize = 20;
/// Pause between two blocks where they pile up.
const BLOCK_PAUSE: Duration = Duration::from_secs(1);
/// Pause between two pictures on a terminal.
const PICTURE_PAUSE: Duration = Duration::from_millis(200);
/// Clears the screen and goes to its corner.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// The host in a line and each VM with a bar of its usable vCPUs, by name, in lines of at most `width` characters.
#[must_use]
pub fn render_top(state: &HostState, width: usize) -> String {
    let mut vms: Vec<&v1::Vm> = state.vms.iter().collect();
    vms.sort_by(|a, b| (&a.name, &a.id).cmp(&(&b.name, &b.id)));
    let names: Vec<String> = vms.iter().map(|vm| cut(&title(vm), 24)).collect();
    let name_width = names
        .iter()
        .map(|name| name.chars().count())
        .max()
        .unwrap_or_default();
    let mut text = cut(&host_line(&state.host), width);
    text.push('\n');
    for (vm, name) in vms.iter().zip(&names) {
        let counts = format!("{}/{}", shown(vm.usable), shown(vm.vcpus));
        let line = format!(
            "{name:<name_width$}  [{}] {counts:>9}  run {:>6}  delay {:>6}  {}",
            bar(vm.usable, vm.vcpus),
            cpus(vm.run_milli_cpus),
            cpus(vm.run_delay_milli_cpus),
            shown(wire::reason_word(vm.reason)),
        );
        text.push_str(&cut(&line, width));
        text.push('\n');
    }
    if vms.is_empty() {
        text.push_str("(no VMs)\n");
    }
    text
}

fn title(vm: &v1::Vm) -> String {
    let name = printable(&vm.name);
    if name.is_empty() { vm.id.clone() } else { name }
}

/// Usable vCPUs as `#`, avoided ones as `.`, all blank when one of the two is not known.
fn bar(usable: Option<u32>, vcpus: Option<u32>) -> String {
    match (usable, vcpus) {
        (Some(usable), Some(vcpus)) if vcpus > 0 => {
            let filled = (BAR as u64 * u64::from(usable.min(vcpus))).div_ceil(u64::from(vcpus));
            (0..BAR as u64)
                .map(|cell| if cell < filled { '#' } else { '.' })
                .collect()
        }
        _ => " ".repeat(BAR),
    }
}

/// Shows the host now and after each change until the broker ends the stream or `once` is done. On a terminal it redraws the
/// screen; else it prints a block at most once a second.
///
/// # Errors
/// When the broker is gone, or the output can't be written.
pub async fn follow(
    states: &mut Streaming<v1::WatchVmsResponse>,
    once: bool,
    terminal: bool,
    width: impl Fn() -> usize,
    out: &mut impl Write,
) -> Result<(), CtlError> {
    let pause = if terminal { PICTURE_PAUSE } else { BLOCK_PAUSE };
    let mut latest: Option<HostState> = None;
    let mut free = Instant::now();
    loop {
        tokio::select! {
            state = states.message() => match state? {
                Some(state) => latest = Some(HostState::from(state)),
                None => return Ok(()),
            },
            () = sleep_until(free), if latest.is_some() => {
                let Some(state) = latest.take() else { continue };
                if terminal && !once {
                    out.write_all(CLEAR.as_bytes())?;
                }
                out.write_all(render_top(&state, width()).as_bytes())?;
                if !terminal && !once {
                    out.write_all(b"\n")?;
                }
                out.flush()?;
                if once {
                    return Ok(());
                }
                free = Instant::now() + pause;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::state;
    use super::*;

    #[test]
    fn each_vm_has_a_bar_by_name() {
        let mut state = state();
        state.vms.reverse();
        assert_eq!(
            render_top(&state, usize::MAX),
            "mode enforce, pool 0-1, supply 2.00 CPUs, used 1.98, contended\n\
             db       [#####...............]       1/4  run   0.99  delay   0.02  contention\n\
             web?[2J  [                    ]       -/-  run      -  delay      -  unclassified\n"
        );
        assert!(
            render_top(&state, 60)
                .lines()
                .all(|line| line.chars().count() <= 60)
        );
    }

    #[test]
    fn a_bar_is_never_empty_while_a_vcpu_is_usable() {
        assert_eq!(bar(Some(1), Some(1000)), format!("#{}", ".".repeat(19)));
        assert_eq!(bar(Some(4), Some(4)), "#".repeat(20));
        assert_eq!(bar(Some(0), Some(0)), " ".repeat(20));
    }
}
