//! The control API over a real Unix socket.
#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use common::{PATIENCE, agent, host_view, id, vm, vm_view};
use hint_broker::control::{Command, ControlError, ControlSocket};
use hint_broker::ctl::{Client, HostState};
use hint_broker::model::{HostView, Mode};
use hint_proto::v1;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::Code;

/// A served control socket and the daemon's ends of it.
struct Served {
    path: PathBuf,
    view: watch::Sender<Arc<HostView>>,
    commands: mpsc::Receiver<Command>,
    stop: oneshot::Sender<()>,
    server: JoinHandle<Result<(), ControlError>>,
}

fn serve(dir: &Path, view: HostView) -> Served {
    let path = dir.join("control.sock");
    let socket = ControlSocket::bind(&path, 0o660).unwrap();
    let (view, shown) = watch::channel(Arc::new(view));
    let (sender, commands) = mpsc::channel(4);
    let (stop, stopped) = oneshot::channel::<()>();
    let server = tokio::spawn(socket.serve(shown, sender, async {
        let _ = stopped.await;
    }));
    Served {
        path,
        view,
        commands,
        stop,
        server,
    }
}

/// Does what the daemon does on a command, with these agents afterwards.
async fn obey(served: &mut Served, after: HostView) -> Mode {
    let command = timeout(PATIENCE, served.commands.recv())
        .await
        .unwrap()
        .unwrap();
    let Command::SetMode { mode, done } = command;
    served.view.send_replace(Arc::new(after));
    done.send(()).unwrap();
    mode
}

fn refused(error: hint_broker::ctl::CtlError) -> tonic::Status {
    match error {
        hint_broker::ctl::CtlError::Refused { status } => *status,
        other => panic!("expected a refusal, got {other}"),
    }
}

#[tokio::test]
async fn all_vms_are_listed_as_in_the_view() {
    let dir = tempfile::tempdir().unwrap();
    let mut unknown = vm_view(vm(20, "web"), None);
    unknown.usable = None;
    unknown.run = None;
    let view = host_view(vec![vm_view(vm(10, "db"), Some(agent("0"))), unknown]);
    let served = serve(dir.path(), view.clone());
    let state = Client::connect(&served.path)
        .await
        .unwrap()
        .list()
        .await
        .unwrap();
    assert_eq!(state, HostState::from(&view));
    assert_eq!(state.host.epoch, 42);
    assert_eq!(state.host.supply_milli_cpus, Some(2000));
    let db = &state.vms[0];
    assert_eq!(
        (db.id.as_str(), db.vcpus, db.usable),
        ("10-7", Some(4), Some(1))
    );
    assert_eq!(
        (db.run_milli_cpus, db.target_milli_cpus),
        (Some(995), Some(1000))
    );
    let agent = db.agent.as_ref().unwrap();
    assert_eq!(
        (agent.state(), agent.applied),
        (v1::AgentState::Connected, Some(1))
    );
    let web = &state.vms[1];
    assert_eq!((web.usable, web.run_milli_cpus), (None, None));
    assert_eq!(web.agent.as_ref().unwrap().state(), v1::AgentState::Absent);
}

#[tokio::test]
async fn a_vm_is_found_by_id_uuid_or_name() {
    let dir = tempfile::tempdir().unwrap();
    let mut db = vm_view(vm(10, "db"), None);
    db.vm.uuid = Some("6F1D0000-0000-4000-8000-000000000001".to_owned());
    let view = host_view(vec![
        db,
        vm_view(vm(20, "web"), None),
        vm_view(vm(21, "web"), None),
    ]);
    let served = serve(dir.path(), view);
    let mut client = Client::connect(&served.path).await.unwrap();
    for wanted in ["10-7", "db", "6f1d0000-0000-4000-8000-000000000001"] {
        assert_eq!(client.get(wanted).await.unwrap().pid, 10, "{wanted}");
    }
    let status = refused(client.get("web").await.unwrap_err());
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(
        status.message().contains("20-7, 21-7"),
        "{}",
        status.message()
    );
    let status = refused(client.get("nothing").await.unwrap_err());
    assert_eq!(status.code(), Code::NotFound);
    assert!(
        status
            .message()
            .contains("there are 10-7 (db), 20-7 (web), 21-7 (web)"),
        "{}",
        status.message()
    );
    assert_eq!(
        refused(client.get("").await.unwrap_err()).code(),
        Code::NotFound
    );
}

#[tokio::test]
async fn a_watcher_sees_now_and_each_change_but_never_an_old_state_last() {
    let dir = tempfile::tempdir().unwrap();
    let served = serve(dir.path(), host_view(vec![]));
    let mut client = Client::connect(&served.path).await.unwrap();
    let mut states = client.watch().await.unwrap();
    let first = timeout(PATIENCE, states.message())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert!(first.vms.is_empty());
    for pid in 1..=200 {
        served
            .view
            .send_replace(Arc::new(host_view(vec![vm_view(vm(pid, "v"), None)])));
    }
    loop {
        let state = timeout(PATIENCE, states.message())
            .await
            .unwrap()
            .unwrap()
            .unwrap();
        if state.vms[0].pid == 200 {
            break;
        }
    }
    // A tick that changes nothing that is shown is no change.
    let mut same = host_view(vec![vm_view(vm(200, "v"), None)]);
    same.ticks += 1;
    served.view.send_replace(Arc::new(same));
    served.view.send_replace(Arc::new(host_view(vec![])));
    let next = timeout(PATIENCE, states.message())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert!(next.vms.is_empty());
    drop(served.view);
    let end = timeout(PATIENCE, states.message()).await.unwrap();
    assert!(matches!(end, Ok(None)), "{end:?}");
}

#[tokio::test]
async fn the_mode_reaches_the_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let mut served = serve(dir.path(), host_view(vec![]));
    let mut client = Client::connect(&served.path).await.unwrap();
    let call = tokio::spawn(async move { client.set_mode(v1::Mode::Advise).await });
    assert_eq!(obey(&mut served, host_view(vec![])).await, Mode::Advise);
    let set = call.await.unwrap().unwrap();
    assert_eq!(set.mode(), v1::Mode::Advise);
    assert!(set.restored.is_empty() && set.unconfirmed.is_empty());
    let mut client = Client::connect(&served.path).await.unwrap();
    let status = refused(client.set_mode(v1::Mode::Unspecified).await.unwrap_err());
    assert_eq!(status.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn off_waits_until_every_mask_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let off = |agents: [Option<&str>; 2]| {
        let vms = [(10, agents[0]), (20, agents[1])]
            .map(|(pid, preferred)| vm_view(vm(pid, "v"), preferred.map(agent)));
        HostView {
            mode: Mode::Observe,
            ..host_view(vms.to_vec())
        }
    };
    let folded = HostView {
        mode: Mode::Enforce,
        ..off([Some("0"), Some("0-1")])
    };
    let mut served = serve(dir.path(), folded);
    let mut client = Client::connect(&served.path).await.unwrap();
    let call = tokio::spawn(async move { client.set_mode(v1::Mode::Observe).await });
    obey(&mut served, off([Some("0"), Some("0-1")])).await;
    served
        .view
        .send_replace(Arc::new(off([Some("0-3"), Some("0-1")])));
    assert!(!call.is_finished());
    served
        .view
        .send_replace(Arc::new(off([Some("0-3"), Some("0-3")])));
    let set = call.await.unwrap().unwrap();
    assert_eq!(set.restored, ["10-7", "20-7"]);
    assert!(set.unconfirmed.is_empty());
}

#[tokio::test]
async fn off_names_who_did_not_confirm() {
    let dir = tempfile::tempdir().unwrap();
    let with = |mode, agents: [Option<&str>; 3]| HostView {
        mode,
        ..host_view(
            [10, 20, 30]
                .iter()
                .zip(agents)
                .map(|(pid, preferred)| vm_view(vm(*pid, "v"), preferred.map(agent)))
                .collect(),
        )
    };
    let mut served = serve(
        dir.path(),
        with(Mode::Enforce, [Some("0"), Some("0"), Some("0-3")]),
    );
    let mut client = Client::connect(&served.path).await.unwrap();
    let call = tokio::spawn(async move { client.set_mode(v1::Mode::Observe).await });
    // One stays folded, one left while it was folded, one had nothing to restore.
    obey(
        &mut served,
        with(Mode::Observe, [Some("0"), None, Some("0-3")]),
    )
    .await;
    let set = timeout(PATIENCE, call).await.unwrap().unwrap().unwrap();
    assert_eq!(set.unconfirmed, ["10-7", "20-7"]);
    assert_eq!(set.restored, ["30-7"]);
}

#[tokio::test]
async fn a_daemon_that_does_not_answer_is_told_of() {
    let dir = tempfile::tempdir().unwrap();
    let mut served = serve(dir.path(), host_view(vec![]));
    let mut client = Client::connect(&served.path).await.unwrap();
    let call = tokio::spawn(async move { client.set_mode(v1::Mode::Enforce).await });
    let command = timeout(PATIENCE, served.commands.recv()).await.unwrap();
    let status = refused(timeout(PATIENCE, call).await.unwrap().unwrap().unwrap_err());
    assert_eq!(status.code(), Code::DeadlineExceeded);
    drop(command);
}

#[tokio::test]
async fn a_second_broker_is_refused_and_a_crashed_ones_socket_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let served = serve(dir.path(), host_view(vec![]));
    assert_eq!(fs::metadata(&served.path).unwrap().mode() & 0o777, 0o660);
    let error = ControlSocket::bind(&served.path, 0o660).unwrap_err();
    let error = hint_broker::text::with_causes(&error);
    assert!(
        error.contains("another hint-broker is running on"),
        "{error}"
    );
    Client::connect(&served.path)
        .await
        .unwrap()
        .list()
        .await
        .unwrap();

    let stale = dir.path().join("stale.sock");
    drop(UnixListener::bind(&stale).unwrap());
    drop(ControlSocket::bind(&stale, 0o600).unwrap());
    assert!(!stale.exists());
    let foreign = dir.path().join("foreign.sock");
    let _live = UnixListener::bind(&foreign).unwrap();
    assert!(ControlSocket::bind(&foreign, 0o600).is_err());
    let file = dir.path().join("file");
    fs::write(&file, "precious").unwrap();
    assert!(ControlSocket::bind(&file, 0o600).is_err());
    assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
}

#[tokio::test]
async fn the_end_takes_the_socket_away_though_clients_watch() {
    let dir = tempfile::tempdir().unwrap();
    let served = serve(
        dir.path(),
        host_view(vec![vm_view(vm(id(1).pid, "v"), None)]),
    );
    let mut client = Client::connect(&served.path).await.unwrap();
    let mut states = client.watch().await.unwrap();
    assert!(states.message().await.unwrap().is_some());
    served.stop.send(()).unwrap();
    timeout(PATIENCE, served.server)
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert!(!served.path.exists());
}

#[tokio::test]
async fn clients_beyond_the_bound_are_hung_up_on() {
    use tokio::io::AsyncReadExt;

    let dir = tempfile::tempdir().unwrap();
    let served = serve(
        dir.path(),
        host_view(vec![vm_view(vm(id(1).pid, "v"), None)]),
    );
    let connect = || tokio::net::UnixStream::connect(&served.path);
    let mut silent = Vec::new();
    for _ in 0..128 {
        silent.push(connect().await.unwrap());
        tokio::task::yield_now().await;
    }
    let mut beyond = connect().await.unwrap();
    let read = timeout(PATIENCE, beyond.read(&mut [0])).await.unwrap();
    assert_eq!(read.unwrap(), 0, "hung up on");
    // Places are free again when the others go.
    drop(silent);
    let listed = async {
        loop {
            if let Ok(mut client) = Client::connect(&served.path).await
                && let Ok(state) = client.list().await
            {
                return state;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    let state = timeout(PATIENCE, listed).await.unwrap();
    assert_eq!(state.vms.len(), 1);
}
