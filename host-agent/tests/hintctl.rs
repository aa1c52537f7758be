//! The real hintctl against a real control socket.
#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod common;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command as Program, Output, Stdio};
use std::sync::Arc;

use common::{PATIENCE, agent, host_view, vm, vm_view};
use hint_broker::control::{Command, ControlSocket};
use hint_broker::model::{HostView, Mode};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

fn hintctl(socket: &Path) -> Program {
    let mut command = Program::new(env!("CARGO_BIN_EXE_hintctl"));
    command
        .env_remove("HINT_BROKER_SOCKET")
        .arg("--socket")
        .arg(socket)
        .stdin(Stdio::null());
    command
}

async fn run(socket: &Path, arguments: &[&str]) -> Output {
    let mut command = hintctl(socket);
    command.args(arguments);
    blocking(move || command.output().unwrap()).await
}

/// Runs what waits for a program, while this thread serves it.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let work = tokio::task::spawn_blocking(work);
    timeout(PATIENCE, work).await.unwrap().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A served socket whose daemon sets each mode and then shows the view that `after` makes of it.
fn serve(
    dir: &Path,
    view: HostView,
    after: impl Fn(Mode) -> HostView + Send + 'static,
) -> (PathBuf, watch::Sender<Arc<HostView>>) {
    let path = dir.join("control.sock");
    let socket = ControlSocket::bind(&path, 0o600).unwrap();
    let (sender, shown) = watch::channel(Arc::new(view));
    let (commands, mut received) = mpsc::channel(4);
    tokio::spawn(socket.serve(shown, commands, std::future::pending()));
    let daemon = sender.clone();
    tokio::spawn(async move {
        while let Some(Command::SetMode { mode, done }) = received.recv().await {
            daemon.send_replace(Arc::new(after(mode)));
            let _ = done.send(());
        }
    });
    (path, sender)
}

fn view() -> HostView {
    host_view(vec![
        vm_view(vm(10, "db"), Some(agent("0"))),
        vm_view(vm(20, "web"), None),
    ])
}

#[tokio::test]
async fn list_shows_a_table_or_json() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, _view) = serve(dir.path(), view(), |_| view());
    let table = run(&socket, &["list"]).await;
    assert!(table.status.success());
    let expected = "\
mode enforce, pool 0-1, supply 2.00 CPUs, used 1.98, contended

NAME  ID    VCPUS  USABLE  APPLIED   RUN  DELAY  TARGET  REASON      AGENT
db    10-7      4       1        1  0.99   0.02    1.00  contention  cpuset
web   20-7      4       1        -  0.99   0.02    1.00  contention  -
";
    assert_eq!(text(&table.stdout), expected);
    let json = run(&socket, &["list", "--json"]).await;
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["schema"], 1);
    assert_eq!(json["vms"][0]["agent"]["applied_cpus"], 1);
    assert_eq!(json["vms"][1]["agent"], serde_json::Value::Null);
}

#[tokio::test]
async fn the_socket_may_come_from_the_environment() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, _view) = serve(dir.path(), view(), |_| view());
    let mut command = Program::new(env!("CARGO_BIN_EXE_hintctl"));
    command
        .env("HINT_BROKER_SOCKET", &socket)
        .args(["get", "web", "--json"]);
    let output = blocking(move || command.output().unwrap()).await;
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["vm"]["pid"], 20);
}

#[tokio::test]
async fn explain_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, _view) = serve(dir.path(), view(), |_| view());
    let output = run(&socket, &["explain", "db"]).await;
    assert!(output.status.success());
    let said = text(&output.stdout);
    assert!(
        said.contains("usable: 1 of 4 vCPUs, because: contention"),
        "{said}"
    );
    assert!(
        said.contains("its share gives 1 of 4 vCPUs, share 1.00 at weight 100"),
        "{said}"
    );
}

#[tokio::test]
async fn failures_have_their_exit_codes_and_say_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let nowhere = dir.path().join("none.sock");
    let output = run(&nowhere, &["list"]).await;
    assert_eq!(output.status.code(), Some(3));
    let said = text(&output.stderr);
    assert!(
        said.contains("none.sock") && said.contains("is hint-broker running?"),
        "{said}"
    );
    drop(std::os::unix::net::UnixListener::bind(&nowhere).unwrap());
    let said = text(&run(&nowhere, &["list"]).await.stderr);
    assert!(said.contains("left behind"), "{said}");

    let twins = host_view(vec![vm_view(vm(1, "a"), None), vm_view(vm(2, "a"), None)]);
    let (socket, _view) = serve(dir.path(), twins, |_| view());
    let unknown = run(&socket, &["get", "z"]).await;
    assert_eq!(unknown.status.code(), Some(4));
    assert!(text(&unknown.stderr).contains("there are 1-7 (a), 2-7 (a)"));
    let unclear = run(&socket, &["explain", "a"]).await;
    assert_eq!(unclear.status.code(), Some(4));
    assert!(text(&unclear.stderr).contains("1-7, 2-7"));
    assert_eq!(
        run(&socket, &["mode", "sideways"]).await.status.code(),
        Some(2)
    );
}

#[tokio::test]
async fn off_shows_vm_by_vm_that_it_is_off() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, _view) = serve(dir.path(), view(), |mode| {
        let vms = vec![vm_view(vm(10, "db"), Some(agent("0-3")))];
        HostView {
            mode,
            ..host_view(vms)
        }
    });
    let output = run(&socket, &["off"]).await;
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(
        text(&output.stdout),
        "mode observe\ndb (10-7): off, as its agent confirms\noff: no hint is in force\n"
    );
    let output = run(&socket, &["mode", "advise"]).await;
    assert_eq!(text(&output.stdout), "mode advise\n");
}

#[tokio::test]
async fn off_fails_when_a_guest_does_not_confirm() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, _view) = serve(dir.path(), view(), |mode| HostView { mode, ..view() });
    let output = run(&socket, &["off"]).await;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(text(&output.stdout).contains("(10-7): not confirmed"));
    assert!(text(&output.stderr).contains("not confirmed by: 10-7"));
}

#[tokio::test]
async fn top_prints_a_block_for_each_change_and_ends_with_the_broker() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, sender) = serve(dir.path(), view(), |_| view());
    let once = run(&socket, &["top", "--once"]).await;
    let picture = text(&once.stdout);
    assert!(
        picture.contains("db   [#####...............]       1/4"),
        "{picture}"
    );
    assert!(!picture.contains('\u{1b}'));

    let mut top = hintctl(&socket)
        .arg("top")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(top.stdout.take().unwrap());
    let (sender_of_lines, mut lines) = mpsc::channel(64);
    std::thread::spawn(move || {
        for line in output.lines() {
            if sender_of_lines.blocking_send(line.unwrap()).is_err() {
                break;
            }
        }
    });
    let mut wait_for = async |what: &str| loop {
        let line = timeout(PATIENCE, lines.recv()).await.unwrap();
        if line.expect("more output").contains(what) {
            break;
        }
    };
    wait_for("1/4").await;
    let mut changed = view();
    changed.vms[0].usable = Some(3);
    sender.send_replace(Arc::new(changed));
    wait_for("3/4").await;
    let pid = rustix::process::Pid::from_child(&top);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let status = blocking(move || top.wait().unwrap()).await;
    assert_eq!(status.code(), Some(0));
}

#[tokio::test]
async fn a_reader_that_goes_away_is_no_failure() {
    let dir = tempfile::tempdir().unwrap();
    let vms = (1..3000)
        .map(|pid| vm_view(vm(pid, "many"), None))
        .collect();
    let (socket, _view) = serve(dir.path(), host_view(vms), |_| view());
    let mut child = hintctl(&socket)
        .arg("list")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = blocking(move || child.wait_with_output().unwrap()).await;
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stderr), "");
}
