//! A running `hint-broker`: its process, its configuration and its control API, for tests and the demonstration.
//!
//! It counts guests without KVM, since the lab's are such, and opens no AF_VSOCK: the lab's guests come in by hybrid sockets.

use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::thread;
use std::time::{Duration, Instant};

use hint_broker::ctl::{Client, CtlError, HostState};
use hint_proto::v1;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::assets::{self, AssetError};
use crate::console;
use crate::process::{Process, ProcessError};

/// Much longer than a start takes on a busy machine.
const START_DEADLINE: Duration = Duration::from_secs(60);
const STOP_DEADLINE: Duration = Duration::from_secs(60);

/// What a broker shall be.
#[derive(Debug, Clone)]
pub struct BrokerSpec {
    /// `observe`, `advise` or `enforce`.
    pub mode: &'static str,
    /// How long a hint holds without renewal.
    pub lease: Duration,
    /// More of the configuration, as TOML sections.
    pub more: String,
}

impl Default for BrokerSpec {
    fn default() -> Self {
        Self {
            mode: "enforce",
            lease: Duration::from_secs(5),
            more: String::new(),
        }
    }
}

/// What went wrong with a broker.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// It isn't built.
    #[error(transparent)]
    Asset(#[from] AssetError),
    /// Its process did not start.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// A file of it can't be written.
    #[error("can't write {path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// It ended, or did not answer, after its start.
    #[error("the broker {what}; its log ends with:\n{log}")]
    Start {
        /// What it did.
        what: String,
        /// End of its log.
        log: String,
    },
    /// Its control API refused.
    #[error(transparent)]
    Control(#[from] CtlError),
    /// It does not see a VM.
    #[error("the broker sees no VM {name:?}, only {seen:?}")]
    Unseen {
        /// The VM.
        name: String,
        /// The VMs that it sees.
        seen: Vec<String>,
    },
}

/// A running broker; dropping it kills it.
#[derive(Debug)]
pub struct Broker {
    process: Process,
    folder: TempDir,
}

impl Broker {
    /// Starts a broker and waits until it answers.
    ///
    /// # Errors
    /// When it isn't built, ends, or does not answer; then with the end of its log.
    pub fn start(spec: &BrokerSpec) -> Result<Self, BrokerError> {
        let folder = tempfile::Builder::new()
            .prefix("hint-broker-")
            .tempdir()
            .map_err(|source| BrokerError::File {
                path: std::env::temp_dir(),
                source,
            })?;
        let config = folder.path().join("broker.toml");
        let text = format!(
            "mode = \"{}\"\n[discover]\ntcg = true\n[channel]\nvsock = false\nlease_ms = {}\n[control]\nsocket = \"{}\"\n[metrics]\nlisten = \"127.0.0.1:0\"\n{}\n",
            spec.mode,
            spec.lease.as_millis(),
            control(folder.path()).display(),
            spec.more
        );
        fs::write(&config, text).map_err(|source| BrokerError::File {
            path: config.clone(),
            source,
        })?;
        let process = launch(folder.path(), &config)?;
        let mut broker = Self { process, folder };
        broker.wait_until_it_answers()?;
        Ok(broker)
    }

    /// Starts it again with the same configuration after it was killed or stopped.
    ///
    /// # Errors
    /// As [`Broker::start`].
    pub fn start_again(&mut self) -> Result<(), BrokerError> {
        self.process = launch(self.folder.path(), &self.folder.path().join("broker.toml"))?;
        self.wait_until_it_answers()
    }

    /// Kills it with SIGKILL.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Sends it SIGTERM, waits for its end, and kills it when that does not come.
    pub fn stop(&mut self) -> ExitStatus {
        let pid = i32::try_from(self.process.pid())
            .ok()
            .and_then(Pid::from_raw);
        if let Some(pid) = pid {
            // It fails only for a process that has ended.
            let _ = kill_process(pid, Signal::TERM);
        }
        self.process
            .ended_within(STOP_DEADLINE)
            .unwrap_or_else(|| self.process.kill())
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Its log since its last start.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Its control socket.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        control(self.folder.path())
    }

    /// The page that Prometheus would get.
    ///
    /// # Errors
    /// When the broker does not say where it serves metrics, or serves none there.
    pub fn metrics(&self) -> io::Result<String> {
        let log = self.log();
        let address = log
            .split_once("metrics=\"")
            .and_then(|(_, rest)| rest.split_once('"'));
        let (address, _) =
            address.ok_or_else(|| io::Error::other("the broker's log names no metrics address"))?;
        let mut stream = TcpStream::connect(address)?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: lab\r\nConnection: close\r\n\r\n")?;
        let mut page = String::new();
        stream.read_to_string(&mut page)?;
        Ok(page)
    }

    /// Host and VMs now.
    ///
    /// # Errors
    /// When its control API does not answer.
    pub fn list(&self) -> Result<HostState, BrokerError> {
        Ok(self.ask(async |client| client.list().await)?)
    }

    /// One VM now, by name.
    ///
    /// # Errors
    /// When its control API does not answer or it sees no such VM.
    pub fn vm(&self, name: &str) -> Result<v1::Vm, BrokerError> {
        let vms = self.list()?.vms;
        let seen = vms.iter().map(|vm| vm.name.clone()).collect();
        let found = vms.into_iter().find(|vm| vm.name == name);
        found.ok_or_else(|| BrokerError::Unseen {
            name: name.to_owned(),
            seen,
        })
    }

    /// Sets its mode; with observe, waits until the agents have said that their masks are back.
    ///
    /// # Errors
    /// When its control API does not answer.
    pub fn set_mode(&self, mode: v1::Mode) -> Result<v1::SetModeResponse, BrokerError> {
        Ok(self.ask(async |client| client.set_mode(mode).await)?)
    }

    fn ask<T>(
        &self,
        question: impl AsyncFnOnce(&mut Client) -> Result<T, CtlError>,
    ) -> Result<T, CtlError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime needs only file descriptors");
        runtime.block_on(async {
            let mut client = Client::connect(&self.control_socket()).await?;
            question(&mut client).await
        })
    }

    fn wait_until_it_answers(&mut self) -> Result<(), BrokerError> {
        let end = Instant::now() + START_DEADLINE;
        loop {
            let answer = self.list();
            if answer.is_ok() {
                return Ok(());
            }
            let what = match (self.process.ended(), answer) {
                (Some(status), _) => format!("ended: {status}"),
                (None, Err(error)) if Instant::now() > end => format!("does not answer: {error}"),
                _ => {
                    thread::sleep(Duration::from_millis(20));
                    continue;
                }
            };
            let log = console::tail(&self.folder.path().join("log"), 30);
            return Err(BrokerError::Start { what, log });
        }
    }
}

fn control(folder: &Path) -> PathBuf {
    folder.join("control.sock")
}

fn launch(folder: &Path, config: &Path) -> Result<Process, BrokerError> {
    let broker = assets::broker()?;
    let arguments = ["run".into(), "--config".into(), config.into()];
    Ok(Process::start(
        &broker,
        &arguments,
        &folder.join("log"),
        None,
    )?)
}
