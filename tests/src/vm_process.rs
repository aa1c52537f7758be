//! A process that holds KVM VMs for a test: `lab-kvm-vm` under the name of any program.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// A running `lab-kvm-vm`. Dropping it kills it.
#[derive(Debug)]
pub struct VmProcess {
    child: Child,
    answers: BufReader<ChildStdout>,
}

impl VmProcess {
    /// Starts `program` (of `lab-kvm-vm`) under the name `name`, with its vCPUs running.
    ///
    /// # Errors
    /// When it can't be started or says something else than that its vCPUs run.
    pub fn start(program: &Path, name: &str, arguments: &[&str]) -> io::Result<Self> {
        let mut child = Command::new(program)
            .arg0(name)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let answers = child.stdout.take().expect("it was asked for");
        let mut vm = Self {
            child,
            answers: BufReader::new(answers),
        };
        vm.expect("ready")?;
        Ok(vm)
    }

    /// Gives its first VM one more vCPU.
    ///
    /// # Errors
    /// When it doesn't answer that it did.
    pub fn add_vcpu(&mut self) -> io::Result<()> {
        self.say(b"add\n")?;
        self.expect("added")
    }

    /// The steal time of each vCPU of its first VM in nanoseconds, as it stands in guest memory.
    ///
    /// # Errors
    /// When it doesn't answer with numbers.
    pub fn steal_ns(&mut self) -> io::Result<Vec<u64>> {
        self.say(b"steal\n")?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        let times = line.split_ascii_whitespace().map(str::parse);
        times.collect::<Result<_, _>>().map_err(|error| {
            let text = format!("lab-kvm-vm should say steal times and said {line:?}: {error}");
            io::Error::new(io::ErrorKind::InvalidData, text)
        })
    }

    /// Its PID.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends it by SIGTERM.
    ///
    /// # Errors
    /// When it can't be signalled or waited for.
    pub fn terminate(mut self) -> io::Result<ExitStatus> {
        kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        self.child.wait()
    }

    /// Ends it by the end of its input.
    ///
    /// # Errors
    /// When it can't be waited for.
    pub fn close_input(mut self) -> io::Result<ExitStatus> {
        drop(self.child.stdin.take());
        self.child.wait()
    }

    fn say(&mut self, line: &[u8]) -> io::Result<()> {
        let input = self.child.stdin.as_mut();
        input.expect("it is open until the end").write_all(line)
    }

    fn expect(&mut self, word: &str) -> io::Result<()> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        if line.trim_end() == word {
            return Ok(());
        }
        let text = format!("lab-kvm-vm should say {word:?} and said {line:?}");
        Err(io::Error::new(io::ErrorKind::InvalidData, text))
    }
}

impl Drop for VmProcess {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
