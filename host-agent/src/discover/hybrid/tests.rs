use super::*;
use crate::fixture::Tree;
use crate::socket::{self, Access};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

/// Process 7 of this process's user, and a folder `run`.
fn tree() -> Tree {
    let uid = rustix::process::geteuid().as_raw();
    let tree = Tree::new(
        "[run]\n[proc/7/fd]\n[proc/7/net]\nunix = Num RefCount Protocol Flags Type St Inode Path\n",
    );
    tree.write(
        "proc/7/status",
        &format!("Name:\tx\nUid:\t1\t{uid}\t1\t1\n"),
    );
    tree
}

fn bind(tree: &Tree, path: &str) -> UnixListener {
    let path = tree.path().join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    UnixListener::bind(path).unwrap()
}

/// A line of the table, and the descriptor where the process has one.
fn line(tree: &Tree, inode: u64, flags: &str, path: &str, fd: Option<u32>) {
    let old = fs::read_to_string(tree.path().join("proc/7/net/unix")).unwrap();
    let text = format!("0000000000000000: 00000002 00000000 {flags} 0001 01 {inode:5} {path}\n");
    tree.write("proc/7/net/unix", &(old + &text));
    if let Some(fd) = fd {
        tree.add(&format!("[proc/7/fd]\n{fd} -> socket:[{inode}]"));
    }
}

const LISTENS: &str = "00010000";

fn look(tree: &Tree, elsewhere: &Elsewhere) -> Option<String> {
    let found = of_vmm(&tree.root, 7, elsewhere).unwrap();
    found.map(|path| path.display().to_string())
}

fn config(file: &str) -> Elsewhere {
    Elsewhere {
        config_file: Some(PathBuf::from(file)),
        api_socket: None,
    }
}

#[test]
fn only_a_socket_of_the_process_s_own_user_counts() {
    let tree = tree();
    let uid = rustix::process::geteuid().as_raw();
    tree.write(
        "proc/8/status",
        &format!("Name:\tx\nUid:\t1\t{}\t1\t1\n", uid + 1),
    );
    let _socket = bind(&tree, "run/v");
    tree.write("run/file", "");
    let is_its_own = |pid, path| is_its_own(&tree.root, pid, Path::new(path));
    assert!(is_its_own(7, "/run/v"));
    assert!(!is_its_own(8, "/run/v"), "another user's");
    assert!(!is_its_own(9, "/run/v"), "a process that is gone");
    assert!(!is_its_own(7, "/run/file"), "no socket");
    assert!(!is_its_own(7, "/run/none"), "not there yet");
}

#[test]
fn paths_are_the_process_s_own() {
    let tree = tree();
    let on_host = |path| {
        on_host(&tree.root, 7, Path::new(path))
            .display()
            .to_string()
    };
    // It has the same root folder as this process, here: the tree's.
    symlink(tree.path(), tree.path().join("proc/7/root")).unwrap();
    symlink("/run/vm", tree.path().join("proc/7/cwd")).unwrap();
    assert_eq!(on_host("/run/v"), "/run/v");
    assert_eq!(on_host("v"), "/run/vm/v");
    // A jail.
    tree.remove("proc/7/root");
    fs::create_dir_all(tree.path().join("srv/jail")).unwrap();
    symlink(
        tree.path().join("srv/jail"),
        tree.path().join("proc/7/root"),
    )
    .unwrap();
    assert_eq!(on_host("/v"), "/proc/7/root/v");
    assert_eq!(on_host("./v"), "/proc/7/cwd/v");
}

#[test]
fn the_configuration_file_names_the_socket_in_the_jail_too() {
    let tree = tree();
    tree.write(
        "srv/jail/vm.json",
        r#"{"vsock":{"guest_cid":3,"uds_path":"/v.sock"}}"#,
    );
    symlink(
        tree.path().join("srv/jail"),
        tree.path().join("proc/7/root"),
    )
    .unwrap();
    assert_eq!(look(&tree, &config("/vm.json")), None, "not there yet");
    let _socket = bind(&tree, "srv/jail/v.sock");
    assert_eq!(
        look(&tree, &config("/vm.json")).as_deref(),
        Some("/proc/7/root/v.sock")
    );
    // Names are those of the jail and not of the host.
    assert_eq!(look(&tree, &config("/srv/jail/vm.json")), None);
}

#[test]
fn a_configuration_that_is_no_plain_file_is_refused_and_not_waited_for() {
    let tree = tree();
    let fifo = tree.path().join("run/fifo");
    let made = std::process::Command::new("mkfifo")
        .arg(&fifo)
        .status()
        .unwrap();
    assert!(made.success());
    let error = of_vmm(&tree.root, 7, &config("/run/fifo")).unwrap_err();
    assert!(error.to_string().contains("run/fifo"), "{error}");
    tree.write("run/long.json", &" ".repeat(2 << 20));
    let error = of_vmm(&tree.root, 7, &config("/run/long.json")).unwrap_err();
    assert!(error.to_string().contains("run/long.json"), "{error}");
    for text in ["", "{", r#"{"vsock":null}"#, r#"{"vsock":{"uds_path":""}}"#] {
        tree.write("run/vm.json", text);
        assert_eq!(look(&tree, &config("/run/vm.json")), None, "{text:?}");
    }
    assert_eq!(look(&tree, &config("/run/none.json")), None, "gone");
}

#[test]
fn the_one_socket_that_it_listens_on_beside_its_api_is_the_vsock() {
    let tree = tree();
    let _sockets = [bind(&tree, "run/a b.sock"), bind(&tree, "run/other")];
    let elsewhere = Elsewhere {
        config_file: None,
        api_socket: Some(PathBuf::from("/run/api.sock")),
    };
    line(&tree, 100, LISTENS, "/run/api.sock", Some(5));
    line(&tree, 101, LISTENS, "/run/other", None);
    line(&tree, 102, "00000000", "/run/other", Some(6));
    line(&tree, 103, LISTENS, "@abstract", Some(7));
    assert_eq!(look(&tree, &elsewhere), None, "none of its own");
    line(&tree, 104, LISTENS, "/run/a b.sock", Some(8));
    assert_eq!(look(&tree, &elsewhere).as_deref(), Some("/run/a b.sock"));
    // Somebody put a line end into a socket's name, to pass his own off as the VMM's.
    let table = fs::read_to_string(tree.path().join("proc/7/net/unix")).unwrap();
    line(&tree, 104, LISTENS, "/run/other", None);
    assert_eq!(look(&tree, &elsewhere), None, "an inode twice");
    tree.write("proc/7/net/unix", &table);
    line(&tree, 105, LISTENS, "/run/other", Some(9));
    assert_eq!(look(&tree, &elsewhere), None, "one of two");
}

#[test]
fn a_real_listener_of_this_process_is_found_by_the_kernel_s_own_table() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v.sock");
    let _listener = UnixListener::bind(&path).unwrap();
    let root = Root::new("/");
    let me = std::process::id();
    let inodes = process::sockets(&root, me).unwrap();
    let table = root
        .read_text(&format!("proc/{me}/net/unix"))
        .unwrap()
        .unwrap();
    let found = unix_sockets(&table)
        .find(|socket| Path::new(socket.path) == path)
        .unwrap();
    assert!(found.listening && inodes.contains(&found.inode));
    assert_eq!(named(&root, me, &path), Some(path));
}

/// The variable that makes [`the_vmm_of_the_jail`] one.
const JAIL: &str = "HINT_TEST_JAIL";

/// Not a test of its own: the VMM that [`a_real_jail_is_looked_into_and_reached`] starts. It goes into its jail, listens, and calls
/// the broker's port as Firecracker does for its guest.
#[test]
fn the_vmm_of_the_jail() {
    let Some(jail) = std::env::var_os(JAIL) else {
        return;
    };
    rustix::process::chroot(PathBuf::from(&jail)).unwrap();
    std::env::set_current_dir("/").unwrap();
    let _listener = UnixListener::bind("v.sock").unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    let mut stream = loop {
        match UnixStream::connect("v.sock_737") {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    stream.write_all(b"from the jail").unwrap();
}

#[test]
fn a_real_jail_is_looked_into_and_reached() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: a jail takes root");
        return;
    }
    for by_config in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        fs::write(
            directory.path().join("vm.json"),
            r#"{"vsock":{"guest_cid":3,"uds_path":"./v.sock"}}"#,
        )
        .unwrap();
        let mut vmm = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "discover::hybrid::tests::the_vmm_of_the_jail"])
            .env(JAIL, directory.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let elsewhere = Elsewhere {
            config_file: by_config.then(|| PathBuf::from("/vm.json")),
            api_socket: Some(PathBuf::from("/run/firecracker.socket")),
        };
        let root = Root::new("/");
        let end = Instant::now() + Duration::from_secs(60);
        let path = loop {
            if let Some(path) = of_vmm(&root, vmm.id(), &elsewhere).unwrap() {
                break path;
            }
            assert!(Instant::now() < end, "it is not found");
            std::thread::sleep(Duration::from_millis(20));
        };
        assert_eq!(path, Path::new(&format!("/proc/{}/cwd/v.sock", vmm.id())));
        let mut door = path.into_os_string();
        door.push("_737");
        let access = Access {
            mode: 0o600,
            owner: None,
        };
        let (listener, _file) = socket::listen(Path::new(&door), access).unwrap();
        listener.set_nonblocking(false).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        assert_eq!(said, "from the jail");
        assert!(vmm.wait().unwrap().success());
    }
}
