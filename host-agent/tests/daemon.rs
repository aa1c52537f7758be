//! The daemon as a process: what it says and does when its configuration, its sockets or the host's files are not as they
//! should be. Fixture trees stand for the host; everything else is real.

#![allow(
    clippy::unwrap_used,
    reason = "clippy exempts test functions but not the helpers of a test file"
)]

use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use hint_broker::ctl::{Client, HostState};
use hint_proto::v1;
use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::TempDir;

const BROKER: &str = env!("CARGO_BIN_EXE_hint-broker");
const SOON: Duration = Duration::from_secs(30);

/// A folder that everybody may look into, with a configuration for a broker that touches nothing outside it.
fn folder(more: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let config = folder.path().join("broker.toml");
    let socket = folder.path().join("control.sock");
    let text = format!(
        "[channel]\nvsock = false\n[control]\nsocket = \"{}\"\n[metrics]\n{more}\n",
        socket.display()
    );
    fs::write(&config, text).unwrap();
    (folder, config)
}

fn run(config: &Path, root: &Path) -> Command {
    let mut command = Command::new(BROKER);
    command
        .arg("run")
        .arg("--config")
        .arg(config)
        .arg("--root")
        .arg(root);
    command
}

/// Runs a broker that must end by itself.
fn refused(config: &Path) -> String {
    let Output { status, stderr, .. } = run(config, Path::new("/")).output().unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(1), "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    stderr
}

/// A broker that runs until it is dropped.
struct Running(Child);

impl Running {
    fn start(mut command: Command) -> Self {
        Self(command.stderr(Stdio::null()).spawn().unwrap())
    }

    /// Its host as the control API tells it, when it is as wanted.
    fn list(&mut self, folder: &Path, wanted: impl Fn(&HostState) -> bool) -> HostState {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let socket = folder.join("control.sock");
        let end = Instant::now() + SOON;
        loop {
            let state = runtime.block_on(async { Client::connect(&socket).await?.list().await });
            match state {
                Ok(state) if wanted(&state) => return state,
                other => assert!(Instant::now() < end, "{other:?}"),
            }
            assert_eq!(self.0.try_wait().unwrap(), None, "the broker ended");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The part of a host that shows one KVM VM with two vCPU threads of the given names.
fn host_with_a_vm(root: &Path, names: [&str; 2]) {
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    write("sys/devices/system/cpu/online", "0-1\n");
    write(
        "proc/stat",
        "cpu  2 2 2 2 2\ncpu0 1 1 1 1 1\ncpu1 1 1 1 1 1\n",
    );
    write(
        "proc/500/stat",
        "500 (qemu-system-x86) S 1 500 500 0 -1 0 0 0 0 0 0 0 0 0 20 0 3 0 4242 0 0\n",
    );
    write(
        "proc/500/cmdline",
        "/usr/bin/qemu-system-x86_64\0-name\0guest=web,debug-threads=on\0",
    );
    fs::create_dir_all(root.join("proc/500/fd")).unwrap();
    symlink("anon_inode:kvm-vm", root.join("proc/500/fd/12")).unwrap();
    for (tid, name) in [(500, "qemu-system-x86"), (501, names[0]), (502, names[1])] {
        write(&format!("proc/500/task/{tid}/comm"), &format!("{name}\n"));
        write(
            &format!("proc/500/task/{tid}/status"),
            "Name:\tx\nCpus_allowed_list:\t0-1\n",
        );
        write(
            &format!("proc/500/task/{tid}/stat"),
            &format!("{tid} ({name}) S 1 1 1\n"),
        );
        write(
            &format!("proc/500/task/{tid}/schedstat"),
            "1000000 2000000 30\n",
        );
    }
}

#[test]
fn a_bad_configuration_is_refused_with_file_line_and_key() {
    let (folder, config) = folder("listen = \"127.0.0.1:0\"\nprot = 3");
    let stderr = refused(&config);
    assert!(stderr.contains(config.to_str().unwrap()), "{stderr}");
    assert!(
        stderr.contains("line 7") && stderr.contains("prot"),
        "{stderr}"
    );
    assert!(!folder.path().join("control.sock").exists());
    let check = Command::new(BROKER)
        .arg("check-config")
        .arg(&config)
        .output()
        .unwrap();
    assert_eq!(check.status.code(), Some(1));
    let stderr = refused(Path::new("/nonexistent/broker.toml"));
    assert!(stderr.contains("/nonexistent/broker.toml"), "{stderr}");
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (folder, config) = folder(&format!("listen = \"{address}\""));
    let stderr = refused(&config);
    assert!(
        stderr.contains(&address) && stderr.contains("in use"),
        "{stderr}"
    );
    assert!(
        !folder.path().join("control.sock").exists(),
        "it takes nothing with it"
    );
}

#[test]
fn a_second_broker_is_refused_and_the_first_goes_on() {
    let (folder, config) = folder("enabled = false");
    let mut first = Running::start(run(&config, Path::new("/")));
    first.list(folder.path(), |_| true);
    let stderr = refused(&config);
    assert!(stderr.contains("control.sock"), "{stderr}");
    first.list(folder.path(), |_| true);
}

#[test]
fn a_file_in_place_of_the_control_socket_is_left_alone() {
    let (folder, config) = folder("enabled = false");
    let path = folder.path().join("control.sock");
    fs::write(&path, "precious").unwrap();
    let stderr = refused(&config);
    assert!(stderr.contains(path.to_str().unwrap()), "{stderr}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn a_killed_broker_leaves_nothing_that_stops_the_next() {
    let (folder, config) = folder("enabled = false");
    let mut killed = Running::start(run(&config, Path::new("/")));
    killed.list(folder.path(), |_| true);
    drop(killed);
    assert!(
        folder.path().join("control.sock").exists(),
        "SIGKILL leaves the socket"
    );
    let mut next = Running::start(run(&config, Path::new("/")));
    next.list(folder.path(), |_| true);
    kill_process(Pid::from_child(&next.0), Signal::TERM).unwrap();
    assert!(next.0.wait().unwrap().success());
    assert!(!folder.path().join("control.sock").exists());
}

#[test]
fn without_proc_the_broker_runs_degraded() {
    let (folder, config) = folder("enabled = false");
    let empty = tempfile::tempdir().unwrap();
    let mut broker = Running::start(run(&config, empty.path()));
    let state = broker.list(folder.path(), |state| state.host.degraded.len() >= 2);
    let degraded = state.host.degraded.join("\n");
    assert!(
        degraded.contains("proc/stat") && degraded.contains("sys/devices/system/cpu/online"),
        "{degraded}"
    );
    assert_eq!(
        (state.host.supply_milli_cpus, state.host.contention()),
        (None, v1::Contention::Unspecified)
    );
    assert!(state.vms.is_empty());
}

#[test]
fn a_vm_is_found_by_its_threads_where_debugfs_is_closed() {
    let (folder, config) = folder("enabled = false");
    let root = folder.path().join("host");
    host_with_a_vm(&root, ["CPU 0/KVM", "CPU 1/KVM"]);
    let debugfs = root.join("sys/kernel/debug/kvm");
    fs::create_dir_all(&debugfs).unwrap();
    fs::set_permissions(&debugfs, fs::Permissions::from_mode(0o000)).unwrap();
    // Root may open everything, so the broker must be somebody else.
    let mut command = run(&config, &root);
    if geteuid().is_root() {
        let mut other = Command::new("setpriv");
        other.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]);
        other.arg(command.get_program()).args(command.get_args());
        command = other;
    }
    let mut broker = Running::start(command);
    let state = broker.list(folder.path(), |state| !state.vms.is_empty());
    let degraded = state.host.degraded.join("\n");
    assert!(
        degraded.contains("sys/kernel/debug/kvm") && degraded.contains("run the broker as root"),
        "{degraded}"
    );
    assert_eq!(
        (
            state.vms[0].name.as_str(),
            state.vms[0].vcpus,
            state.vms[0].id.as_str()
        ),
        ("web", Some(2), "500-4242")
    );
}

#[test]
fn files_that_vanish_or_hold_garbage_make_their_vm_unmeasured() {
    let (folder, config) = folder("enabled = false");
    let root = folder.path().join("host");
    host_with_a_vm(&root, ["CPU 0/KVM", "CPU 1/KVM"]);
    let mut broker = Running::start(run(&config, &root));
    broker.list(folder.path(), |state| {
        state.vms.len() == 1 && state.vms[0].run_milli_cpus.is_some()
    });

    fs::write(root.join("proc/500/task/502/schedstat"), "half a li").unwrap();
    let state = broker.list(folder.path(), |state| {
        state.vms.iter().any(|vm| vm.run_milli_cpus.is_none())
    });
    assert_eq!(
        state.vms[0].run_delay_milli_cpus, None,
        "unknown is not zero"
    );
    assert!(
        state
            .host
            .degraded
            .iter()
            .any(|text| text.contains("502/schedstat")),
        "{:?}",
        state.host.degraded
    );

    fs::write(root.join("proc/stat"), "no cpu here\n").unwrap();
    let state = broker.list(folder.path(), |state| {
        state.host.supply_milli_cpus.is_none()
    });
    assert!(
        state
            .host
            .degraded
            .iter()
            .any(|text| text.contains("proc/stat")),
        "{:?}",
        state.host.degraded
    );

    fs::remove_dir_all(root.join("proc/500")).unwrap();
    let state = broker.list(folder.path(), |state| state.vms.is_empty());
    assert!(
        !state.host.degraded.iter().any(|text| text.contains("502")),
        "{:?}",
        state.host.degraded
    );
}

#[test]
fn a_vm_without_named_threads_is_shown_and_never_judged() {
    let (folder, config) = folder("enabled = false");
    let root = folder.path().join("host");
    host_with_a_vm(&root, ["qemu-system-x86", "qemu-system-x86"]);
    let mut broker = Running::start(run(&config, &root));
    let state = broker.list(folder.path(), |state| !state.vms.is_empty());
    let vm = &state.vms[0];
    assert_eq!(
        (vm.vcpus, vm.usable, vm.run_milli_cpus, vm.reason()),
        (None, None, None, v1::Reason::Unclassified)
    );
    assert!(
        vm.explanation.contains("debug-threads=on"),
        "{}",
        vm.explanation
    );
}

#[test]
fn a_log_that_takes_nothing_does_not_stop_the_broker() {
    let (folder, config) = folder("enabled = false");
    let mut command = run(&config, Path::new("/nonexistent"));
    let full = fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let mut broker = Running(command.stderr(full).spawn().unwrap());
    broker.list(folder.path(), |state| !state.host.degraded.is_empty());
}

#[test]
fn a_lost_terminal_ends_the_broker_in_order() {
    let (folder, config) = folder("enabled = false");
    let mut broker = Running::start(run(&config, Path::new("/nonexistent")));
    broker.list(folder.path(), |_| true);
    kill_process(Pid::from_child(&broker.0), Signal::HUP).unwrap();
    assert!(broker.0.wait().unwrap().success());
    assert!(!folder.path().join("control.sock").exists());
}

#[test]
fn top_ends_when_the_broker_hangs() {
    let (folder, config) = folder("enabled = false");
    let mut broker = Running::start(run(&config, Path::new("/nonexistent")));
    broker.list(folder.path(), |_| true);
    let top = Command::new(env!("CARGO_BIN_EXE_hintctl"))
        .arg("--socket")
        .arg(folder.path().join("control.sock"))
        .arg("top")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut top = Running(top);
    let mut shown = [0];
    top.0
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut shown)
        .unwrap();
    kill_process(Pid::from_child(&broker.0), Signal::STOP).unwrap();
    let end = Instant::now() + SOON;
    let status = loop {
        if let Some(status) = top.0.try_wait().unwrap() {
            break status;
        }
        assert!(Instant::now() < end, "top goes on");
        thread::sleep(Duration::from_millis(50));
    };
    let mut said = String::new();
    top.0
        .stderr
        .as_mut()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    assert_eq!(status.code(), Some(3), "{said}");
}
