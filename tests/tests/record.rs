//! A replay decides as the daemon did: the real daemon, on real vCPU threads that compete, with agents that do as they are told.

#![allow(
    clippy::unwrap_used,
    reason = "clippy exempts test functions but not the helpers of a test file"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use hint_proto::v1;
use hint_proto::v1::guest_service_client::GuestServiceClient;
use hint_proto::v1::session_request::Message as Said;
use hint_proto::v1::session_response::Message;
use lab::broker::{Broker, BrokerSpec};
use lab::cgroup::CpuGroup;
use lab::skip::{self, Need};
use lab::vm_process::VmProcess;
use lab::{assets, lock};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;

const SOON: Duration = Duration::from_secs(60);
const VCPUS: u32 = 4;

fn start_vm(name: &str) -> VmProcess {
    let path = Path::new(env!("CARGO_BIN_EXE_lab-kvm-vm"));
    let count = VCPUS.to_string();
    let arguments = ["--vcpus", &count, "--named", "--", "-name", name];
    VmProcess::start(path, "qemu-system-x86_64", &arguments).unwrap()
}

/// An agent that says it did whatever it was told, for as long as the broker lives.
async fn agent(socket: PathBuf) -> Result<(), tonic::Status> {
    let end = Instant::now() + SOON;
    let channel = loop {
        let connected = Endpoint::from_shared(format!("unix:{}", socket.display()))
            .unwrap()
            .connect()
            .await;
        match connected {
            Ok(channel) => break channel,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let all = format!("0-{}", VCPUS - 1);
    let (say, requests) = mpsc::channel(16);
    let send = async |message| {
        let request = v1::SessionRequest {
            message: Some(message),
        };
        // Whoever reads it may have gone; then the stream ends too.
        let _ = say.send(request).await;
    };
    send(Said::Hello(v1::Hello {
        protocol: 1,
        agent_version: "0.1.0".to_owned(),
        kernel_release: "6.12.0".to_owned(),
        boot_id: "b".to_owned(),
        actuator: v1::Actuator::Cpuset.into(),
        pinned_tasks: v1::PinnedTasks::Moved.into(),
        online: all.clone(),
        untouched: String::new(),
        cores: Vec::new(),
        preferred: all.clone(),
    }))
    .await;
    let response = GuestServiceClient::new(channel)
        .session(ReceiverStream::new(requests))
        .await?;
    let mut hear = response.into_inner();
    while let Some(said) = hear.message().await? {
        send(Said::Heartbeat(v1::Heartbeat {})).await;
        if let Some(Message::Hint(hint)) = said.message {
            send(Said::Applied(v1::Applied {
                epoch: hint.epoch,
                sequence: hint.sequence,
                outcome: v1::Outcome::Applied.into(),
                preferred: format!("0-{}", hint.usable.max(1) - 1),
                online: all.clone(),
                error: String::new(),
            }))
            .await;
        }
    }
    Ok(())
}

fn wait_for(broker: &Broker, wanted: impl Fn(&[v1::Vm]) -> bool) {
    let end = Instant::now() + SOON;
    loop {
        let vms = broker.list().unwrap().vms;
        if wanted(&vms) {
            return;
        }
        assert!(Instant::now() < end, "{vms:?}\n{}", broker.log());
        thread::sleep(Duration::from_millis(50));
    }
}

fn replay(arguments: &[&str]) -> serde_json::Value {
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new(assets::broker().unwrap())
        .args(["replay", "--json"])
        .args(arguments)
        .output()
        .unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    serde_json::from_slice(&stdout).unwrap()
}

/// VM, usable, and the whole explanation with its figures, of each change that the journal tells.
fn changes_logged(log: &str) -> Vec<(String, u64, String)> {
    let field = |line: &str, name: &str| {
        let (_, rest) = line.split_once(name)?;
        rest.split_ascii_whitespace().next().map(str::to_owned)
    };
    let changes = log.lines().filter_map(|line| {
        let (_, text) = line.split_once(" INFO ")?;
        // The explanation stands first, then the fields.
        let (explanation, fields) = text.split_once(" vm=")?;
        let fields = format!("vm={fields}");
        let usable = field(&fields, "usable=")?.parse().ok()?;
        field(&fields, "reason=")?;
        Some((field(&fields, "vm=")?, usable, explanation.to_owned()))
    });
    changes.collect()
}

#[test]
fn a_replay_decides_as_the_daemon_did() {
    let test = "a_replay_decides_as_the_daemon_did";
    if !skip::can_run(test, &[Need::Kvm, Need::Root]) {
        return;
    }
    // It may have to be built, which is better done without VMs that spin.
    assets::broker().unwrap();
    let _cores = lock::cores().unwrap();
    let groups = ["a", "b"].map(CpuGroup::create);
    let groups = match groups {
        [Ok(a), Ok(b)] => [a, b],
        [Err(error), _] | [_, Err(error)] => {
            skip::skipped(test, &error.to_string());
            return;
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("record");
    let path = path.to_str().unwrap();
    let mut more = format!("[record]\npath = \"{path}\"\n");
    for name in ["a", "b"] {
        let socket = folder.path().join(name);
        let section = format!(
            "[[vm]]\nname = \"{name}\"\nhybrid_socket = \"{}\"\n",
            socket.display()
        );
        more.push_str(&section);
    }
    let vms = ["a", "b"].map(start_vm);
    for (vm, group) in vms.iter().zip(&groups) {
        fs::write(group.procs(), vm.pid().to_string()).unwrap();
    }
    let mut broker = Broker::start(&BrokerSpec {
        more,
        ..BrokerSpec::default()
    })
    .unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    for name in ["a", "b"] {
        runtime.spawn(agent(folder.path().join(format!("{name}_737"))));
    }
    let folded = |vm: &v1::Vm| vm.usable.is_some_and(|usable| usable < VCPUS);
    wait_for(&broker, |vms| vms.len() == 2 && vms.iter().all(folded));
    let [a, b] = vms;
    assert!(b.terminate().unwrap().success());
    wait_for(&broker, |vms| vms.len() == 1);
    groups[0].set_quota(Some(1000)).unwrap();
    // What comes meanwhile is compared, whatever it is.
    thread::sleep(Duration::from_secs(5));
    assert!(broker.stop().success(), "{}", broker.log());
    drop(a);
    drop(runtime);

    let told = changes_logged(&broker.log());
    let document = replay(&[path]);
    let summary = &document["summary"];
    assert_eq!(
        (
            &summary["other_than_recorded"],
            &summary["ticks_missing"],
            &summary["ticks_missing_before"]
        ),
        (&0.into(), &0.into(), &0.into()),
        "{summary}"
    );
    assert_eq!((&summary["runs"], &summary["vms"]), (&1.into(), &2.into()));
    assert!(summary["ticks"].as_u64().unwrap() >= 10, "{summary}");
    let changes = document["changes"].as_array().unwrap();
    let replayed: Vec<(String, u64, String)> = changes
        .iter()
        .filter(|change| !change["from"].is_null() && change["from"] != change["to"])
        .map(|change| {
            let text = |name: &str| change[name].as_str().unwrap().to_owned();
            (
                text("vm"),
                change["to"].as_u64().unwrap(),
                text("explanation"),
            )
        })
        .collect();
    assert_eq!(replayed, told, "{}", broker.log());
    assert!(told.len() >= 2, "{told:?}");

    let other = folder.path().join("other.toml");
    fs::write(
        &other,
        "mode = \"enforce\"\n[[vm]]\nname = \"a\"\nusable = 3\n",
    )
    .unwrap();
    let document = replay(&[path, "--config", other.to_str().unwrap()]);
    assert_ne!(document["summary"]["other_than_recorded"], 0);
    let changes = document["changes"].as_array().unwrap();
    let of_a = changes.iter().filter(|change| change["name"] == "a");
    assert!(
        of_a.clone()
            .all(|change| change["to"] == 3 || change["to"] == 4),
        "{changes:?}"
    );
    assert!(of_a.clone().any(|change| change["to"] == 3), "{changes:?}");
}
