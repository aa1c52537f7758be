//! vCPU threads by QEMU's own word: `query-cpus-fast` over its monitor protocol (QMP), for QEMUs whose vCPUs nothing else tells.
//!
//! A monitor serves one client at a time, and that is the management tool's place. So nobody is asked while somebody is
//! connected, the whole conversation has half a second, each VM is asked seldom, and it all happens on a thread of its own:
//! no tick waits for it. A socket counts only if the VMM itself listens on it, since a command line can say anything.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::Value;

use super::process;
use crate::model::VmId;
use crate::procfs::unix_sockets;
use crate::root::{ReadError, Root};

/// So long the monitor is held at most.
const PATIENCE: Duration = Duration::from_millis(500);
/// Scans until a VM is asked again.
const ASK_AGAIN: u32 = 30;
/// An answer is a few hundred bytes for each vCPU.
const LONGEST_ANSWER: u64 = 1 << 20;

/// Why QEMU didn't tell.
#[derive(Debug, thiserror::Error)]
pub(super) enum QmpError {
    /// Somebody else is connected.
    #[error("its monitor {0} is in use, and serves one client at a time")]
    Busy(PathBuf),
    /// The VMM is not the one that listens.
    #[error("its monitor {path} is not its own: process {found} listens there")]
    Foreign { path: PathBuf, found: i32 },
    /// The socket can't be used.
    #[error("its monitor {path} can't be asked: {source}")]
    Io { path: PathBuf, source: io::Error },
    /// It says something else than QMP.
    #[error("its monitor {path} was asked for {expected} and said {found:?}")]
    Answer {
        path: PathBuf,
        expected: &'static str,
        found: String,
    },
    /// What `/proc` says of it can't be read.
    #[error(transparent)]
    Proc(#[from] ReadError),
}

/// Thread ids on this host, by vCPU index.
pub(super) type Threads = BTreeMap<u32, u32>;

/// What QEMUs have said.
#[derive(Debug, Default)]
pub(super) struct Monitors {
    asked: BTreeMap<VmId, Asked>,
}

#[derive(Debug)]
struct Asked {
    scans_ago: u32,
    /// The process's threads when it was asked: with others, there may be other vCPUs.
    threads: BTreeSet<u32>,
    running: Option<Receiver<Result<Threads, QmpError>>>,
    answer: Result<Threads, String>,
}

impl Monitors {
    /// The vCPU threads of a VM; its first call, and a few others, only ask, and the answer is there for a later one. `Err` says
    /// why there is none yet. To be called once a scan.
    pub(super) fn vcpus(
        &mut self,
        root: &Root,
        id: VmId,
        monitors: &[PathBuf],
        threads: &BTreeSet<u32>,
    ) -> Result<Threads, String> {
        let Some(path) = monitors.first() else {
            return Err("it has no QMP socket that others can reach".to_owned());
        };
        let asked = self.asked.entry(id).or_insert_with(|| Asked {
            scans_ago: ASK_AGAIN,
            threads: BTreeSet::new(),
            running: None,
            answer: Err("its monitor was asked and has not answered yet".to_owned()),
        });
        asked.scans_ago = asked.scans_ago.saturating_add(1);
        if let Some(running) = &asked.running {
            match running.try_recv() {
                Ok(answer) => {
                    asked.answer = answer.map_err(|error| error.to_string());
                    asked.running = None;
                }
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => asked.running = None,
            }
        }
        let changed = asked.answer.is_err() || asked.threads != *threads;
        if asked.running.is_none() && changed && asked.scans_ago >= ASK_AGAIN {
            asked.scans_ago = 0;
            asked.threads.clone_from(threads);
            asked.running = ask_aside(root, id.pid, path);
        }
        match &asked.answer {
            Ok(vcpus) if !vcpus.values().all(|tid| threads.contains(tid)) => {
                Err("a vCPU that its monitor told of is gone".to_owned())
            }
            answer => answer.clone(),
        }
    }

    /// Forgets VMs that are gone.
    pub(super) fn retain(&mut self, is_alive: impl Fn(&VmId) -> bool) {
        self.asked.retain(|id, _| is_alive(id));
    }
}

fn ask_aside(root: &Root, pid: u32, path: &Path) -> Option<Receiver<Result<Threads, QmpError>>> {
    let (sender, receiver) = channel();
    let (root, path) = (root.clone(), path.to_owned());
    let thread = thread::Builder::new().name("qmp".to_owned());
    // Without a thread to spare nobody is asked this time.
    let started = thread.spawn(move || {
        // Whoever asked may have gone.
        let _ = sender.send(ask(&root, pid, &path));
    });
    started.is_ok().then_some(receiver)
}

/// Asks the QEMU with this PID, on the socket that its command line names.
pub(super) fn ask(root: &Root, pid: u32, path: &Path) -> Result<Threads, QmpError> {
    if in_use(root, pid, path)? {
        return Err(QmpError::Busy(path.to_owned()));
    }
    let end = Instant::now() + PATIENCE;
    let failed = |source: io::Error| match source.kind() {
        // With somebody in front of us, a connection waits for its turn.
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => QmpError::Busy(path.to_owned()),
        _ => QmpError::Io {
            path: path.to_owned(),
            source,
        },
    };
    let stream = connect(root, pid, path).map_err(failed)?;
    let listener =
        rustix::net::sockopt::socket_peercred(&stream).map_err(|errno| failed(errno.into()))?;
    let listener = listener.pid.as_raw_nonzero().get();
    if u32::try_from(listener) != Ok(pid) {
        return Err(QmpError::Foreign {
            path: path.to_owned(),
            found: listener,
        });
    }
    let mut monitor = Monitor {
        path,
        input: BufReader::new(stream.try_clone().map_err(failed)?.take(LONGEST_ANSWER)),
        output: stream,
        end,
    };
    let greeting = |value: &Value| value.get("QMP").map(|_| Value::Null);
    monitor
        .read("a greeting", greeting)
        .map_err(|error| error.or(&failed))?;
    monitor
        .command("qmp_capabilities")
        .map_err(|error| error.or(&failed))?;
    let answer = monitor
        .command("query-cpus-fast")
        .map_err(|error| error.or(&failed))?;
    let inner = parse(&answer).ok_or_else(|| QmpError::Answer {
        path: path.to_owned(),
        expected: "its vCPUs",
        found: shortened(&answer.to_string()),
    })?;
    drop(monitor);
    translate(root, pid, &inner)?.ok_or_else(|| QmpError::Answer {
        path: path.to_owned(),
        expected: "threads of its process",
        found: shortened(&answer.to_string()),
    })
}

/// Is somebody connected? An accepted connection has a line with its listener's path.
fn in_use(root: &Root, pid: u32, path: &Path) -> Result<bool, ReadError> {
    // The table of the VMM's own network namespace.
    let table = root.read_text(&format!("proc/{pid}/net/unix"))?;
    let table = table.unwrap_or_default();
    let path = path.to_string_lossy();
    Ok(unix_sockets(&table).any(|socket| socket.connected && socket.path == path))
}

/// Connects without waiting: the path is the VMM's, which may see other files than this process does.
fn connect(root: &Root, pid: u32, path: &Path) -> io::Result<UnixStream> {
    let from = if path.is_absolute() { "root" } else { "cwd" };
    let seen = root
        .path(format!("proc/{pid}/{from}"))
        .join(path.strip_prefix("/").unwrap_or(path));
    let (Some(folder), Some(name)) = (seen.parent(), seen.file_name()) else {
        return Err(io::ErrorKind::NotFound.into());
    };
    // An address has 107 bytes, and a path may have more.
    let folder = File::open(folder)?;
    let short = format!("/proc/self/fd/{}", folder.as_raw_fd());
    let address = SocketAddrUnix::new(Path::new(&short).join(name).as_path())?;
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::net::connect(&socket, &address)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

struct Monitor<'a> {
    path: &'a Path,
    input: BufReader<io::Take<UnixStream>>,
    output: UnixStream,
    end: Instant,
}

/// What goes wrong in a conversation.
enum Trouble {
    Socket(io::Error),
    Said(QmpError),
}

impl Trouble {
    fn or(self, failed: &dyn Fn(io::Error) -> QmpError) -> QmpError {
        match self {
            Self::Socket(error) => failed(error),
            Self::Said(error) => error,
        }
    }
}

impl Monitor<'_> {
    fn command(&mut self, name: &'static str) -> Result<Value, Trouble> {
        let line = format!("{{\"execute\":\"{name}\"}}\n");
        self.output
            .set_write_timeout(Some(self.left()?))
            .and_then(|()| self.output.write_all(line.as_bytes()))
            .map_err(Trouble::Socket)?;
        self.read(name, |value| value.get("return").cloned())
    }

    /// Reads until `wanted` comes; events may come before it.
    fn read(
        &mut self,
        expected: &'static str,
        wanted: impl Fn(&Value) -> Option<Value>,
    ) -> Result<Value, Trouble> {
        loop {
            let mut line = Vec::new();
            // Each piece of a line has what is left of the time.
            while !line.ends_with(b"\n") {
                self.output
                    .set_read_timeout(Some(self.left()?))
                    .map_err(Trouble::Socket)?;
                let piece = self.input.fill_buf().map_err(Trouble::Socket)?;
                let length = match piece.iter().position(|byte| *byte == b'\n') {
                    Some(end) => end + 1,
                    None => piece.len(),
                };
                if length == 0 {
                    return Err(self.said(expected, &line));
                }
                line.extend_from_slice(&piece[..length]);
                self.input.consume(length);
            }
            let value: Option<Value> = serde_json::from_slice(&line).ok();
            let Some(value) = value.filter(|value| value.get("error").is_none()) else {
                return Err(self.said(expected, &line));
            };
            if let Some(value) = wanted(&value) {
                return Ok(value);
            }
            if value.get("event").is_none() {
                return Err(self.said(expected, &line));
            }
        }
    }

    fn said(&self, expected: &'static str, line: &[u8]) -> Trouble {
        Trouble::Said(QmpError::Answer {
            path: self.path.to_owned(),
            expected,
            found: shortened(&String::from_utf8_lossy(line)),
        })
    }

    fn left(&self) -> Result<Duration, Trouble> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            Err(Trouble::Socket(io::ErrorKind::TimedOut.into()))
        } else {
            Ok(left)
        }
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(80).collect()
}

/// `[{"cpu-index": 0, "thread-id": 17, ...}, ...]`
pub(super) fn parse(answer: &Value) -> Option<Threads> {
    let number = |cpu: &Value, key: &str| u32::try_from(cpu.get(key)?.as_u64()?).ok();
    let cpus = answer.as_array().filter(|cpus| !cpus.is_empty())?;
    let threads: Option<Threads> = cpus
        .iter()
        .map(|cpu| Some((number(cpu, "cpu-index")?, number(cpu, "thread-id")?)))
        .collect();
    threads.filter(|threads| threads.len() == cpus.len())
}

/// QEMU names its threads as its own PID namespace does; `NSpid` has all names of a thread, this host's first. `None` when one of
/// them is not a thread of the process.
fn translate(root: &Root, pid: u32, inner: &Threads) -> Result<Option<Threads>, ReadError> {
    let mut by_inner = BTreeMap::new();
    for tid in process::threads(root, pid)?.into_keys() {
        let status = root.read_text(&format!("proc/{pid}/task/{tid}/status"))?;
        let innermost = status.as_deref().and_then(process::innermost_pid);
        by_inner.insert(innermost.unwrap_or(tid), tid);
    }
    Ok(inner
        .iter()
        .map(|(index, thread)| Some((*index, *by_inner.get(thread)?)))
        .collect())
}

#[cfg(test)]
mod tests;
