//! A real Linux guest: boot, stop, and the way to its shell.
//!
//! ```text
//! boot ─► folder ─► CPU group ─► vhost-device-vsock ─► QEMU ─► /init ─► "ready" on the command port ─► agent, if asked
//! drop ─► QEMU and vhost-device-vsock killed ─► CPU group and folder removed; on failure the console log stays
//! ```
//! What a test does in a running guest is in [`commands`], work in [`work`].

mod commands;
mod error;
mod qemu;
mod qmp;
mod spec;
mod work;

use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::assets::Assets;
use crate::cgroup::CpuGroup;
use crate::channel::{Channel, ChannelError};
use crate::console;
use crate::initramfs::{self, Contents, Role};
use crate::process::{self, Process};
use crate::vsock::VhostVsock;

pub use error::GuestError;
pub use spec::{AgentSpec, GuestSpec, Topology};
pub use work::WorkId;

/// A boot takes some seconds; so many more only on a machine with much else to do.
const BOOT_DEADLINE: Duration = Duration::from_secs(180);

/// Lines of the console that errors and failed tests show.
const TAIL_LINES: usize = 60;

/// What a command in the guest gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Exit status as a shell has it: 128 + N after signal N.
    pub status: u8,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
}

impl Output {
    /// Standard output as text, without the white space at its ends.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim().to_owned()
    }
}

/// A running guest. It is stopped, and everything of it removed, when this is dropped.
///
/// It may be shared between threads; its commands run one after the other.
#[derive(Debug)]
pub struct Guest {
    // Fields are dropped in this order: processes before their group, the folder last.
    qemu: Mutex<Process>,
    vsock: Mutex<VhostVsock>,
    group: CpuGroup,
    channel: Mutex<Channel>,
    work: work::Events,
    name: String,
    uuid: String,
    cid: u32,
    pid: u32,
    vhost_pid: u32,
    boot_time: Duration,
    hybrid_socket: PathBuf,
    folder: TempDir,
}

impl Guest {
    /// Boots a guest and waits until it runs commands, and its agent until it was started.
    ///
    /// # Errors
    /// When a part of the lab is missing or the guest does not come up; then with the end of its console.
    pub fn boot(spec: &GuestSpec) -> Result<Self, GuestError> {
        spec.check()?;
        // It may be built first, which is no part of the boot.
        let agent = spec.agent_binary()?;
        let start = Instant::now();
        let assets = Assets::find(spec.kernel)?;
        let temporary = std::env::temp_dir();
        for orphan in process::orphans(&temporary) {
            // It may be another user's, or just be removed by another test.
            let _ = fs::remove_dir_all(orphan);
        }
        let folder = tempfile::Builder::new()
            .prefix(&process::owned_name(""))
            .tempdir()
            .map_err(|source| GuestError::io(&temporary, source))?;
        let path = folder.path();
        let programs = spec.programs()?;
        let contents = Contents {
            hostname: &spec.name,
            role: if spec.systemd {
                Role::Systemd
            } else {
                Role::Commanded
            },
            modules: &spec.modules,
            files: &spec.files,
            programs: &programs,
            agent: agent.as_deref(),
        };
        let files = qemu::Files::new(path);
        let root = path.join("root");
        initramfs::build(&assets, &contents, &root, &files.initramfs)?;
        fs::remove_dir_all(&root).map_err(|source| GuestError::io(&root, source))?;

        // QEMU connects to these, so that the guest finds its host side open from its first instruction on.
        let command_port = listen(&files.command_port)?;
        let event_port = listen(&files.event_port)?;

        let group = CpuGroup::create(&format!("{}-{}", spec.name, unique_number()))?;
        let cid = 3 + unique_number();
        let vsock = VhostVsock::start(&assets, cid, path, &group)?;
        let uuid = random_uuid()?;
        let args = qemu::arguments(spec, &assets, &uuid, &files, vsock.socket());
        let mut qemu = Process::start(&assets.qemu, &args, &files.qemu_log, Some(&group))?;

        let boot_error = |what: String| GuestError::Boot {
            guest: spec.name.clone(),
            what,
            qemu: console::tail(&files.qemu_log, 10),
            console: console::tail(&files.console, TAIL_LINES),
        };
        let ended = |qemu: &mut Process| {
            qemu.ended()
                .map(|status| boot_error(format!("QEMU ended: {status}")))
        };
        let mut channel = Channel::new(accept(&command_port, &mut qemu, &ended, &boot_error)?);
        let events = accept(&event_port, &mut qemu, &ended, &boot_error)?;
        loop {
            match channel.wait_ready(Duration::from_millis(200)) {
                Ok(()) => break,
                Err(ChannelError::Deadline(_)) => {
                    if let Some(error) = ended(&mut qemu) {
                        return Err(error);
                    }
                    if start.elapsed() > BOOT_DEADLINE {
                        return Err(boot_error(format!("no answer within {BOOT_DEADLINE:?}")));
                    }
                }
                Err(ChannelError::Closed) => {
                    let status = qemu.ended_within(Duration::from_secs(5));
                    let status = status.unwrap_or_else(|| qemu.kill());
                    return Err(boot_error(format!("QEMU ended: {status}")));
                }
                Err(error) => return Err(boot_error(error.to_string())),
            }
        }

        let guest = Self {
            pid: qemu.pid(),
            vhost_pid: vsock.pid(),
            hybrid_socket: vsock.uds_path().to_owned(),
            qemu: Mutex::new(qemu),
            vsock: Mutex::new(vsock),
            group,
            channel: Mutex::new(channel),
            work: work::Events::watch(events),
            name: spec.name.clone(),
            uuid,
            cid,
            boot_time: start.elapsed(),
            folder,
        };
        if let Some(agent) = &spec.agent
            && !spec.systemd
        {
            let args: Vec<&str> = agent.args.iter().map(String::as_str).collect();
            guest.start_agent(&args)?;
        }
        Ok(guest)
    }

    /// Boots several guests at once.
    ///
    /// # Errors
    /// The first error; the other guests are stopped.
    pub fn boot_all(specs: &[GuestSpec]) -> Result<Vec<Self>, GuestError> {
        thread::scope(|scope| {
            let boots: Vec<_> = specs
                .iter()
                .map(|spec| scope.spawn(|| Self::boot(spec)))
                .collect();
            boots
                .into_iter()
                .map(|boot| {
                    boot.join()
                        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                })
                .collect()
        })
    }

    /// Stops the guest and removes everything of it, like dropping it.
    pub fn stop(self) {
        drop(self);
    }

    /// The guest's name, also its host name and QEMU's.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The machine's UUID.
    #[must_use]
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// The guest's own CID.
    #[must_use]
    pub fn cid(&self) -> u32 {
        self.cid
    }

    /// QEMU's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The process id of its vhost-device-vsock.
    #[must_use]
    pub fn vhost_pid(&self) -> u32 {
        self.vhost_pid
    }

    /// From the call of [`Guest::boot`] to the first answer.
    #[must_use]
    pub fn boot_time(&self) -> Duration {
        self.boot_time
    }

    /// The hybrid vsock socket: what the guest sends to CID 2, port P arrives on `<this>_P`.
    #[must_use]
    pub fn hybrid_socket(&self) -> &Path {
        &self.hybrid_socket
    }

    /// QEMU's QMP socket, for one client at a time.
    #[must_use]
    pub fn qmp_socket(&self) -> PathBuf {
        qemu::Files::new(self.folder.path()).qmp
    }

    /// The console log, written while the guest runs.
    #[must_use]
    pub fn console_log(&self) -> PathBuf {
        qemu::Files::new(self.folder.path()).console
    }

    /// The guest's CPU group on the host.
    #[must_use]
    pub fn cpu_group(&self) -> &CpuGroup {
        &self.group
    }

    /// Kills vhost-device-vsock: every connection of the guest breaks, for good.
    pub fn kill_vsock(&self) {
        lock(&self.vsock).kill();
    }

    /// How the guest's QEMU ended by itself; `None` while it runs.
    pub fn ended(&self) -> Option<std::process::ExitStatus> {
        lock(&self.qemu).ended_within(Duration::from_secs(1))
    }

    /// The log of QEMU itself.
    #[must_use]
    pub fn qemu_log(&self) -> PathBuf {
        qemu::Files::new(self.folder.path()).qemu_log
    }

    fn keep_console(&self) -> Result<PathBuf, GuestError> {
        let log = self.console_log();
        console::keep(&log, &self.name).map_err(|source| GuestError::io(&log, source))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if thread::panicking() {
            let tail = console::tail(&self.console_log(), TAIL_LINES);
            eprintln!(
                "--- console of guest {}, last {TAIL_LINES} lines ---\n{tail}",
                self.name
            );
            match self.keep_console() {
                Ok(kept) => eprintln!("--- whole console log: {} ---", kept.display()),
                Err(error) => eprintln!("--- console log lost: {error} ---"),
            }
        }
        lock(&self.qemu).kill();
        lock(&self.vsock).kill();
    }
}

/// A test that failed in one thread must not hide the guest from the others.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unique_number() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn random_uuid() -> Result<String, GuestError> {
    let path = Path::new("/proc/sys/kernel/random/uuid");
    let text = fs::read_to_string(path).map_err(|source| GuestError::io(path, source))?;
    Ok(text.trim().to_owned())
}

fn listen(path: &Path) -> Result<UnixListener, GuestError> {
    let listener = UnixListener::bind(path).map_err(|source| GuestError::io(path, source))?;
    listener
        .set_nonblocking(true)
        .map_err(|source| GuestError::io(path, source))?;
    Ok(listener)
}

fn accept(
    listener: &UnixListener,
    qemu: &mut Process,
    ended: &impl Fn(&mut Process) -> Option<GuestError>,
    boot_error: &impl Fn(String) -> GuestError,
) -> Result<UnixStream, GuestError> {
    let end = Instant::now() + BOOT_DEADLINE;
    loop {
        if let Ok((stream, _)) = listener.accept() {
            stream
                .set_nonblocking(false)
                .map_err(|error| boot_error(format!("its port: {error}")))?;
            return Ok(stream);
        }
        if let Some(error) = ended(qemu) {
            return Err(error);
        }
        if Instant::now() > end {
            return Err(boot_error("QEMU did not open the guest's ports".to_owned()));
        }
        thread::sleep(Duration::from_millis(5));
    }
}
