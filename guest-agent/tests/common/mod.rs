//! What the agent's tests share: a guest as a tree of files, a broker on a real Unix socket, the real program.

#![allow(dead_code)] // each test file uses its own part

pub(crate) mod fold;
pub(crate) mod kernel;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use hint_proto::v1;
use hint_proto::v1::guest_service_server::{GuestService, GuestServiceServer};
use hint_proto::v1::session_request::Message as Request;
use hint_proto::v1::session_response::Message as Response;
use rustix::process::{Pid, Signal, kill_process};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Status, Streaming};

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_hint-agent");
pub(crate) const PARAVIRT: &str = "sys/devices/system/cpu/paravirt";
pub(crate) const ONLINE: &str = "sys/devices/system/cpu/online";
/// Far more than anything here takes, even on a machine that does other work.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A guest's files, and room for state and sockets beside them.
#[derive(Debug)]
pub(crate) struct Guest {
    dir: tempfile::TempDir,
}

impl Guest {
    /// A guest without an actuator.
    pub(crate) fn bare(cpus: u32) -> Self {
        let guest = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        guest.put(ONLINE, &format!("0-{}\n", cpus - 1));
        guest.put("proc/sys/kernel/osrelease", "6.12.0-test\n");
        guest.put("proc/sys/kernel/random/boot_id", "b00t\n");
        guest.put("proc/loadavg", "0.10 0.20 0.30 3/412 9876\n");
        guest.put("proc/stat", "cpu  1 2 3 4 5 6 7 85 9 10\n");
        guest
    }

    /// A guest whose kernel has the mask of CPUs to avoid.
    pub(crate) fn paravirt(cpus: u32) -> Self {
        let guest = Self::bare(cpus);
        guest.put(PARAVIRT, "\n");
        guest
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("broker.sock")
    }

    pub(crate) fn put(&self, path: &str, text: &str) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(crate) fn get(&self, path: &str) -> String {
        fs::read_to_string(self.root().join(path)).unwrap()
    }

    /// The CPUs to avoid, as the kernel has them.
    pub(crate) fn avoided(&self) -> String {
        self.get(PARAVIRT).trim().to_owned()
    }

    pub(crate) fn has_record(&self) -> bool {
        self.state().join("restore.json").exists()
    }
}

/// Waits until something is so.
pub(crate) fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "not in time: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// The real program, killed with the test if it is still there.
#[derive(Debug)]
pub(crate) struct Agent {
    child: Child,
}

impl Agent {
    pub(crate) fn start(guest: &Guest) -> Self {
        Self::start_with(guest, Stdio::inherit())
    }

    pub(crate) fn start_with(guest: &Guest, stderr: Stdio) -> Self {
        let child = Command::new(PROGRAM)
            .arg("run")
            .arg("--endpoint")
            .arg(format!("unix:{}", guest.socket().display()))
            .arg("--root")
            .arg(guest.root())
            .arg("--state-dir")
            .arg(guest.state())
            .stderr(stderr)
            .spawn()
            .unwrap();
        Self { child }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        send(self.pid(), signal);
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Its exit; fails the test when it does not end.
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let mut status = None;
        eventually("the agent ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    /// Its guardian's PID.
    pub(crate) fn guardian(&self) -> u32 {
        let mut found = None;
        eventually("there is a guardian", || {
            found = child_of(self.pid());
            found.is_some()
        });
        found.unwrap()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn send(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

/// State letter and parent of a process; `None` when it is gone.
pub(crate) fn state_of(pid: u32) -> Option<(char, u32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// Does the process run (zombies don't)?
pub(crate) fn lives(pid: u32) -> bool {
    state_of(pid).is_some_and(|(state, _)| state != 'Z')
}

/// A child that has got its guardian's name.
fn child_of(parent: u32) -> Option<u32> {
    fs::read_dir("/proc").unwrap().find_map(|entry| {
        let pid: u32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
        let (state, its_parent) = state_of(pid)?;
        let comm = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        (its_parent == parent && state != 'Z' && comm == "hint-guardian\n").then_some(pid)
    })
}

/// One stream of an agent, from the broker's side.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) hello: v1::Hello,
    requests: Streaming<v1::SessionRequest>,
    responses: mpsc::Sender<Result<v1::SessionResponse, Status>>,
}

impl Stream {
    pub(crate) async fn say(&self, message: Response) {
        let message = v1::SessionResponse {
            message: Some(message),
        };
        self.responses.send(Ok(message)).await.unwrap();
    }

    pub(crate) async fn hint(&self, hint: v1::Hint) {
        self.say(Response::Hint(hint)).await;
    }

    /// The next message, whatever it is; `None` when the agent has closed.
    pub(crate) async fn next(&mut self) -> Option<Request> {
        tokio::time::timeout(PATIENCE, self.requests.message())
            .await
            .expect("a message in time")
            .ok()?
            .and_then(|request| request.message)
    }

    /// The next answer; heartbeats and reports are passed over.
    pub(crate) async fn applied(&mut self) -> v1::Applied {
        loop {
            match self.next().await {
                Some(Request::Applied(applied)) => return applied,
                Some(Request::Heartbeat(_) | Request::Report(_)) => {}
                other => panic!("expected an answer, found {other:?}"),
            }
        }
    }
}

/// A broker that greets; the test plays the rest.
#[derive(Debug)]
pub(crate) struct Broker {
    streams: mpsc::Receiver<Stream>,
    server: JoinHandle<()>,
}

#[derive(Debug)]
struct Service {
    welcome: v1::Welcome,
    streams: mpsc::Sender<Stream>,
}

#[tonic::async_trait]
impl GuestService for Service {
    type SessionStream = ReceiverStream<Result<v1::SessionResponse, Status>>;

    async fn session(
        &self,
        request: tonic::Request<Streaming<v1::SessionRequest>>,
    ) -> Result<tonic::Response<Self::SessionStream>, Status> {
        let mut requests = request.into_inner();
        let first = requests.message().await?.and_then(|first| first.message);
        let Some(Request::Hello(hello)) = first else {
            return Err(Status::invalid_argument("expected a Hello"));
        };
        let (responses, stream) = mpsc::channel(16);
        let stream_of_test = Stream {
            hello,
            requests,
            responses,
        };
        stream_of_test
            .say(Response::Welcome(self.welcome.clone()))
            .await;
        let _ = self.streams.send(stream_of_test).await;
        Ok(tonic::Response::new(ReceiverStream::new(stream)))
    }
}

impl Broker {
    /// A broker with a deadline that no test reaches.
    pub(crate) fn start(guest: &Guest, epoch: u64) -> Self {
        Self::start_with(guest, epoch, Duration::from_secs(120))
    }

    pub(crate) fn start_with(guest: &Guest, epoch: u64, deadline: Duration) -> Self {
        let deadline_ms = u32::try_from(deadline.as_millis()).unwrap();
        let welcome = v1::Welcome {
            protocol: hint_proto::PROTOCOL,
            broker_version: "test".to_owned(),
            epoch,
            mode: v1::Mode::Enforce.into(),
            heartbeat_ms: deadline_ms / 4,
            deadline_ms,
        };
        let listener = listen(&guest.socket());
        let (sender, streams) = mpsc::channel(16);
        let service = Service {
            welcome,
            streams: sender,
        };
        let server = tokio::spawn(async move {
            let _ = tonic::transport::Server::builder()
                .add_service(GuestServiceServer::new(service))
                .serve_with_incoming(UnixListenerStream::new(listener))
                .await;
        });
        Self { streams, server }
    }

    /// The next agent that says hello.
    pub(crate) async fn accept(&mut self) -> Stream {
        tokio::time::timeout(PATIENCE, self.streams.recv())
            .await
            .expect("an agent in time")
            .expect("the server runs")
    }

    /// Nobody listens any more; streams that the test holds stay open.
    pub(crate) fn stop(self) {
        self.server.abort();
    }
}

/// Listens at `path`; a socket of a broker before is replaced.
pub(crate) fn listen(path: &Path) -> UnixListener {
    let _ = fs::remove_file(path);
    UnixListener::bind(path).unwrap()
}

/// A hint to enforce with a lease that no test reaches.
pub(crate) fn hint(epoch: u64, sequence: u64, usable: u32) -> v1::Hint {
    v1::Hint {
        epoch,
        sequence,
        usable,
        vcpus: 4,
        lease_ms: 120_000,
        mode: v1::Mode::Enforce.into(),
        ..v1::Hint::default()
    }
}
