//! The host side of one guest's vsock: a vhost-device-vsock process.
//!
//! The guest's connection to CID 2, port P arrives raw on the Unix socket `<uds path>_P`; whoever wants it listens there. No
//! AF_VSOCK socket of the host takes part.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::assets::Assets;
use crate::cgroup::CpuGroup;
use crate::console;
use crate::process::{Process, ProcessError};

/// Why there is no vsock for a guest.
#[derive(Debug, thiserror::Error)]
pub enum VsockError {
    /// The process did not start.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// It started and made no socket for QEMU.
    #[error("vhost-device-vsock made no socket {socket} ({found}); its last words:\n{log}")]
    NotReady {
        /// The socket for QEMU.
        socket: PathBuf,
        /// How the process is.
        found: String,
        /// End of its log.
        log: String,
    },
}

/// A running vhost-device-vsock.
#[derive(Debug)]
pub struct VhostVsock {
    process: Process,
    socket: PathBuf,
    uds_path: PathBuf,
}

impl VhostVsock {
    /// Starts it with its sockets in `folder`, and waits until QEMU can connect.
    ///
    /// # Errors
    /// When the process does not start or does not get ready within 30 s.
    pub fn start(
        assets: &Assets,
        cid: u32,
        folder: &Path,
        group: &CpuGroup,
    ) -> Result<Self, VsockError> {
        let socket = folder.join("vhost.sock");
        let uds_path = folder.join("vsock");
        let log = folder.join("vhost-device-vsock.log");
        let args = [
            "--guest-cid".into(),
            cid.to_string().into(),
            "--socket".into(),
            socket.clone().into(),
            "--uds-path".into(),
            uds_path.clone().into(),
        ];
        let mut process = Process::start(&assets.vhost_vsock, &args, &log, Some(group))?;
        let end = Instant::now() + Duration::from_secs(30);
        while !socket.exists() {
            let found = match process.ended() {
                Some(status) => format!("it ended: {status}"),
                None if Instant::now() > end => "it still runs".to_owned(),
                None => {
                    thread::sleep(Duration::from_millis(5));
                    continue;
                }
            };
            return Err(VsockError::NotReady {
                socket,
                found,
                log: console::tail(&log, 20),
            });
        }
        Ok(Self {
            process,
            socket,
            uds_path,
        })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The vhost-user socket for QEMU.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The hybrid socket's path: connections to port P arrive on `<path>_P`.
    #[must_use]
    pub fn uds_path(&self) -> &Path {
        &self.uds_path
    }

    /// Kills it: the guest's connections break.
    pub fn kill(&mut self) {
        self.process.kill();
    }
}
