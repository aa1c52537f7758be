//! What a test does in a running guest: commands, its CPUs, its agent.

use std::time::{Duration, Instant};

use hint_proto::CpuSet;

use crate::channel::ChannelError;
use crate::console;

use super::{Guest, GuestError, Output, TAIL_LINES, lock};

/// Long enough for any small command in a loaded guest on a loaded machine.
const COMMAND_DEADLINE: Duration = Duration::from_secs(60);

const MASK: &str = "/sys/devices/system/cpu/paravirt";

/// Status of a command that the guest killed.
const KILLED: u8 = 128 + 9;

impl Guest {
    /// Runs shell text in the guest's root group, at real-time priority so that a loaded guest still answers: keep it short,
    /// and use [`Guest::spawn_work`] for everything that computes. Standard output and standard error take at most 1 MiB each.
    ///
    /// # Errors
    /// When it does not end within 60 s, prints too much, or the guest does not answer. A status other than 0 is no error.
    pub fn run(&self, command: &str) -> Result<Output, GuestError> {
        self.run_within(command, COMMAND_DEADLINE)
    }

    /// [`Guest::run`] with another deadline, in whole seconds and at least one.
    ///
    /// # Errors
    /// As [`Guest::run`].
    pub fn run_within(&self, command: &str, deadline: Duration) -> Result<Output, GuestError> {
        let mut channel = lock(&self.channel);
        let start = Instant::now();
        let output = channel
            .call(command.as_bytes(), deadline)
            .map_err(|error| {
                let what = match error {
                    ChannelError::Closed => {
                        match lock(&self.qemu).ended_within(Duration::from_secs(5)) {
                            Some(status) => format!("QEMU ended: {status}"),
                            None => error.to_string(),
                        }
                    }
                    _ => error.to_string(),
                };
                GuestError::Channel {
                    guest: self.name.clone(),
                    command: shortened(command),
                    what,
                    console: console::tail(&self.console_log(), TAIL_LINES),
                }
            })?;
        if output.status == KILLED && start.elapsed() >= deadline {
            return Err(GuestError::Deadline {
                guest: self.name.clone(),
                command: shortened(command),
                deadline,
                output: printed(&output),
            });
        }
        Ok(output)
    }

    /// Runs a command that must succeed, and gives its trimmed standard output.
    ///
    /// # Errors
    /// As [`Guest::run`], and when the status is not 0.
    pub fn sh(&self, command: &str) -> Result<String, GuestError> {
        let output = self.run(command)?;
        if output.status == 0 {
            Ok(output.text())
        } else {
            Err(GuestError::Status {
                guest: self.name.clone(),
                command: shortened(command),
                status: output.status,
                output: printed(&output),
            })
        }
    }

    /// The guest's online CPUs.
    ///
    /// # Errors
    /// As [`Guest::sh`].
    pub fn online(&self) -> Result<CpuSet, GuestError> {
        self.cpu_list("/sys/devices/system/cpu/online")
    }

    /// The CPUs that work may use now: what the kernel applies, not what was asked.
    ///
    /// # Errors
    /// As [`Guest::sh`].
    pub fn work_cpus(&self) -> Result<CpuSet, GuestError> {
        self.cpu_list("/sys/fs/cgroup/workload/cpuset.cpus.effective")
    }

    /// The CPUs that tasks avoid, by the kernel's mask.
    ///
    /// # Errors
    /// As [`Guest::sh`]; also with a kernel without a mask.
    pub fn avoided_cpus(&self) -> Result<CpuSet, GuestError> {
        self.cpu_list(MASK)
    }

    /// Has tasks avoid these CPUs, given as a list; none with an empty one.
    ///
    /// # Errors
    /// As [`Guest::sh`]; also with a kernel without a mask, and when the kernel refuses the list.
    pub fn avoid(&self, list: &str) -> Result<(), GuestError> {
        self.sh(&format!("echo {} >{MASK}", quoted(list))).map(drop)
    }

    /// The CPUs that a task of the guest may use now.
    ///
    /// # Errors
    /// As [`Guest::sh`]; also when there is no such task.
    pub fn cpus_allowed(&self, pid: u32) -> Result<CpuSet, GuestError> {
        let path = format!("/proc/{pid}/status");
        let list = self.sh(&format!("grep ^Cpus_allowed_list: {path}"))?;
        let list = list.trim_start_matches("Cpus_allowed_list:");
        self.parse_cpus(&path, list)
    }

    fn cpu_list(&self, path: &str) -> Result<CpuSet, GuestError> {
        let list = self.sh(&format!("cat {path}"))?;
        self.parse_cpus(path, &list)
    }

    fn parse_cpus(&self, path: &str, list: &str) -> Result<CpuSet, GuestError> {
        CpuSet::parse_list(list).map_err(|source| GuestError::CpuSet {
            guest: self.name.clone(),
            path: path.to_owned(),
            source,
        })
    }

    /// Starts the agent with these arguments, in the root group and at normal priority. Nothing starts it again when it ends.
    ///
    /// # Errors
    /// As [`Guest::sh`]; not when the agent starts and fails: see [`Guest::agent_status`].
    pub fn start_agent(&self, args: &[&str]) -> Result<(), GuestError> {
        let quoted: Vec<String> = args.iter().map(|arg| quoted(arg)).collect();
        self.sh(&format!("/lab/agent {}", quoted.join(" ")))
            .map(drop)
    }

    /// Sends the agent a signal: `TERM`, `KILL`, `STOP`, ...
    ///
    /// # Errors
    /// As [`Guest::sh`]; also when there is no agent.
    pub fn signal_agent(&self, signal: &str) -> Result<(), GuestError> {
        self.sh(&format!(
            "kill -{} $(cat /run/lab/agent.pid)",
            quoted(signal)
        ))
        .map(drop)
    }

    /// The process id of the agent that was started last; it may have ended.
    ///
    /// # Errors
    /// As [`Guest::sh`]; also when none was started.
    pub fn agent_pid(&self) -> Result<u32, GuestError> {
        let text = self.sh("cat /run/lab/agent.pid")?;
        text.parse().map_err(|_| GuestError::Unexpected {
            guest: self.name.clone(),
            expected: "a process id in /run/lab/agent.pid",
            found: text,
        })
    }

    /// The exit status of the agent that was started last, as a shell has it; `None` while it runs.
    ///
    /// # Errors
    /// As [`Guest::sh`].
    pub fn agent_status(&self) -> Result<Option<u8>, GuestError> {
        let text = self.sh("cat /run/lab/agent.status 2>/dev/null || true")?;
        if text.is_empty() {
            return Ok(None);
        }
        text.parse().map(Some).map_err(|_| GuestError::Unexpected {
            guest: self.name.clone(),
            expected: "a status in /run/lab/agent.status",
            found: text,
        })
    }

    /// What agents printed since boot.
    ///
    /// # Errors
    /// As [`Guest::sh`].
    pub fn agent_log(&self) -> Result<String, GuestError> {
        self.sh("cat /tmp/agent.log")
    }

    /// Asks again and again until the answer is wanted, at most so long; gives the last answer either way.
    ///
    /// # Errors
    /// Those of the question.
    pub fn wait_for<T>(
        &self,
        patience: Duration,
        mut question: impl FnMut(&Self) -> Result<T, GuestError>,
        wanted: impl Fn(&T) -> bool,
    ) -> Result<T, GuestError> {
        let end = Instant::now() + patience;
        loop {
            let answer = question(self)?;
            if wanted(&answer) || Instant::now() > end {
                return Ok(answer);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// A word as the shell takes it literally.
pub(super) fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// A command for a message.
fn shortened(command: &str) -> String {
    const LONGEST: usize = 200;
    if command.chars().count() <= LONGEST {
        return command.to_owned();
    }
    let start: String = command.chars().take(LONGEST).collect();
    format!("{start}...")
}

fn printed(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    format!("{} {}", output.text(), stderr.trim())
        .trim()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_the_shell() {
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's $HOME"), r"'it'\''s $HOME'");
    }
}
