//! What the tests of the outward half share: VMs, views, and an agent that is a real gRPC client on a real Unix socket.
#![allow(dead_code, unreachable_pub)] // each test program uses some of it
#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use std::path::{Path, PathBuf};
use std::time::Duration;

use hint_broker::model::{
    Accelerator, Agent, BoundBy, Classes, Contention, Cpus, Hint, HostView, Mode, Reason, Rule,
    Vcpus, Vm, VmId, VmView, Why,
};
use hint_proto::v1;
use hint_proto::v1::guest_service_client::GuestServiceClient;
use hint_proto::v1::session_request::Message as Said;
use hint_proto::v1::session_response::Message;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};

/// Longer than anything here takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub fn id(pid: u32) -> VmId {
    VmId {
        pid,
        start_ticks: 7,
    }
}

pub fn vm(pid: u32, name: &str) -> Vm {
    Vm {
        id: id(pid),
        name: name.to_owned(),
        uuid: None,
        accelerator: Accelerator::Kvm,
        vcpus: Vcpus::Known((0..4).map(|vcpu| (vcpu, pid + vcpu + 1)).collect()),
        cid: None,
        hybrid_socket: None,
    }
}

/// A VM with a hybrid vsock at `<dir>/<pid>.vsock`.
pub fn vm_in(dir: &Path, pid: u32) -> Vm {
    Vm {
        hybrid_socket: Some(dir.join(format!("{pid}.vsock"))),
        ..vm(pid, &format!("vm{pid}"))
    }
}

/// Where the agent of such a VM arrives.
pub fn door(dir: &Path, pid: u32) -> PathBuf {
    dir.join(format!("{pid}.vsock_737"))
}

pub fn hint(usable: u32) -> Hint {
    Hint {
        usable,
        vcpus: 4,
        classes: Classes {
            full: usable,
            partial: 0,
            avoided: 4 - usable,
        },
        entitlement: Some(Cpus(1.5)),
        spare: Some(Cpus(0.25)),
        contention: Contention::Contended,
        reason: Reason::Contention,
        mode: Mode::Enforce,
        keep: std::sync::Arc::default(),
    }
}

pub fn agent(preferred: &str) -> Agent {
    Agent {
        version: "0.1.0".to_owned(),
        kernel_release: "6.12.0".to_owned(),
        actuator: "cpuset".to_owned(),
        online: "0-3".parse().unwrap(),
        preferred: preferred.parse().unwrap(),
        outcome: None,
        runnable_tasks: None,
    }
}

pub fn vm_view(vm: Vm, agent: Option<Agent>) -> VmView {
    VmView {
        vm,
        mode: Mode::Enforce,
        weight: 100,
        run: Some(Cpus(0.995)),
        run_delay: Some(Cpus(0.02)),
        run_total: Duration::from_millis(2500),
        run_delay_total: Duration::from_millis(750),
        demand: Some(Cpus(4.0)),
        target: Some(Cpus(1.0)),
        usable: Some(1),
        reason: Reason::Contention,
        why: Some(Why {
            rule: Rule::Share { more: 0 },
            usable: 1,
            vcpus: 4,
            in_use: None,
            weight: 100.0,
            target: Some((Cpus(1.0), BoundBy::Others)),
            pool: None,
            turns: [None; 2],
        }),
        contention: Contention::Contended,
        folds: 3,
        unfolds: 2,
        agent,
    }
}

pub fn host_view(vms: Vec<VmView>) -> HostView {
    HostView {
        epoch: 42,
        mode: Mode::Enforce,
        pcpus: "0-1".parse().unwrap(),
        supply: Some(Cpus(2.0)),
        used: Some(Cpus(1.98)),
        contention: Contention::Contended,
        ticks: 10,
        rejected_samples: 1,
        degraded: vec![],
        record: None,
        vms,
    }
}

pub fn hello() -> v1::Hello {
    v1::Hello {
        protocol: 1,
        agent_version: "0.1.0".to_owned(),
        kernel_release: "6.12.0".to_owned(),
        boot_id: "b".to_owned(),
        actuator: v1::Actuator::Cpuset.into(),
        pinned_tasks: v1::PinnedTasks::Moved.into(),
        online: "0-3".to_owned(),
        untouched: String::new(),
        cores: vec![],
        preferred: "0-3".to_owned(),
    }
}

/// An agent in the middle of a session.
pub struct Guest {
    pub say: mpsc::Sender<v1::SessionRequest>,
    pub hear: Streaming<v1::SessionResponse>,
}

pub async fn channel(socket: &Path) -> Channel {
    try_channel(socket).await.unwrap()
}

pub async fn try_channel(socket: &Path) -> Result<Channel, tonic::transport::Error> {
    Endpoint::from_shared(format!("unix:{}", socket.display()))?
        .connect()
        .await
}

impl Guest {
    /// Opens a stream and says `first`.
    pub async fn open(channel: Channel, first: Said) -> Result<Self, Status> {
        let (say, requests) = mpsc::channel(256);
        let guest = v1::SessionRequest {
            message: Some(first),
        };
        say.send(guest).await.unwrap();
        let response = GuestServiceClient::new(channel)
            .session(ReceiverStream::new(requests))
            .await?;
        Ok(Self {
            say,
            hear: response.into_inner(),
        })
    }

    /// A session that was welcomed.
    pub async fn join(socket: &Path) -> (Self, v1::Welcome) {
        let mut guest = Self::open(channel(socket).await, Said::Hello(hello()))
            .await
            .unwrap();
        match guest.next().await {
            Ok(Some(Message::Welcome(welcome))) => (guest, welcome),
            other => panic!("expected a Welcome, got {other:?}"),
        }
    }

    pub async fn send(&self, message: Said) {
        // The other side may have ended the session, and then says so.
        let _ = self
            .say
            .send(v1::SessionRequest {
                message: Some(message),
            })
            .await;
    }

    pub async fn applied(&self, epoch: u64, sequence: u64, preferred: &str) {
        self.send(Said::Applied(v1::Applied {
            epoch,
            sequence,
            outcome: v1::Outcome::Applied.into(),
            preferred: preferred.to_owned(),
            online: "0-3".to_owned(),
            error: String::new(),
        }))
        .await;
    }

    /// The next message; the agent shows that it lives.
    pub async fn next(&mut self) -> Result<Option<Message>, Status> {
        let _ = self.say.try_send(v1::SessionRequest {
            message: Some(Said::Heartbeat(v1::Heartbeat {})),
        });
        let next = timeout(PATIENCE, self.hear.message()).await;
        Ok(next
            .expect("a message in time")?
            .and_then(|response| response.message))
    }

    /// The next hint that `wanted` accepts.
    pub async fn hint(&mut self, wanted: impl Fn(&v1::Hint) -> bool) -> v1::Hint {
        loop {
            match self.next().await.expect("a session that goes on") {
                Some(Message::Hint(hint)) if wanted(&hint) => return hint,
                Some(_) => {}
                None => panic!("the session ended"),
            }
        }
    }

    /// The status that the session ends with.
    pub async fn status(&mut self) -> Status {
        loop {
            match timeout(PATIENCE, self.hear.message())
                .await
                .expect("an end in time")
            {
                Ok(Some(_)) => {}
                Ok(None) => panic!("the session ended without a status"),
                Err(status) => return status,
            }
        }
    }
}

/// Waits until `ready` gives something.
pub async fn until<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let start = tokio::time::Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "waited too long for: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
