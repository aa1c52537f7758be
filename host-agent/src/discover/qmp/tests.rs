use super::*;
use std::os::unix::net::UnixListener;

/// What a monitor says to one client, line by line of what that says.
fn serve(
    path: &Path,
    greeting: &'static str,
    answers: &'static [&'static str],
) -> thread::JoinHandle<Vec<String>> {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        client.write_all(greeting.as_bytes()).unwrap();
        let mut input = BufReader::new(client.try_clone().unwrap());
        let mut said = Vec::new();
        for answer in answers {
            let mut line = String::new();
            if input.read_line(&mut line).unwrap_or(0) == 0 {
                break;
            }
            said.push(line.trim_end().to_owned());
            client.write_all(answer.as_bytes()).unwrap();
        }
        // Holds the connection until the client has gone.
        let _ = input.read_to_end(&mut Vec::new());
        said
    })
}

const GREETING: &str = "{\"QMP\": {\"version\": {}, \"capabilities\": [\"oob\"]}}\r\n";

fn me() -> (Root, u32) {
    (Root::new("/"), std::process::id())
}

/// The id of a thread of this process.
fn my_thread() -> u32 {
    let tid = rustix::thread::gettid().as_raw_nonzero().get();
    u32::try_from(tid).unwrap()
}

#[test]
fn vcpus_are_told_whatever_events_come_between() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("qmp");
    let tid = my_thread();
    let answer = format!(
        "{{\"event\": \"RESUME\"}}\r\n{{\"return\": [{{\"cpu-index\": 3, \"thread-id\": {tid}, \"target\": \"x86_64\"}}]}}\r\n"
    );
    let answers: &[&str] = Box::leak(Box::new([
        "{\"event\": \"STOP\"}\r\n{\"return\": {}}\r\n",
        Box::leak(answer.into_boxed_str()) as &str,
    ]));
    let server = serve(&path, GREETING, answers);
    let (root, pid) = me();
    assert_eq!(ask(&root, pid, &path).unwrap(), BTreeMap::from([(3, tid)]));
    assert_eq!(
        server.join().unwrap(),
        [
            "{\"execute\":\"qmp_capabilities\"}",
            "{\"execute\":\"query-cpus-fast\"}"
        ]
    );
}

#[test]
fn a_monitor_that_serves_somebody_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let _tool = UnixStream::connect(&path).unwrap();
    let (served, _) = listener.accept().unwrap();
    let (root, pid) = me();
    assert!(matches!(ask(&root, pid, &path), Err(QmpError::Busy(_))));
    // Nobody knocked.
    listener.set_nonblocking(true).unwrap();
    assert_eq!(
        listener.accept().unwrap_err().kind(),
        io::ErrorKind::WouldBlock
    );
    drop(served);
}

#[test]
fn a_silent_or_strange_monitor_is_given_up_soon() {
    let (root, pid) = me();
    let folder = tempfile::tempdir().unwrap();
    let silent = folder.path().join("silent");
    let _listener = UnixListener::bind(&silent).unwrap();
    let started = Instant::now();
    assert!(matches!(ask(&root, pid, &silent), Err(QmpError::Busy(_))));
    assert!(started.elapsed() < Duration::from_secs(30));
    let cases: [(&str, &'static str, &'static [&'static str]); 6] = [
        ("ssh", "SSH-2.0-OpenSSH\r\n", &[]),
        ("empty", "{}\n", &[]),
        ("error", GREETING, &["{\"error\": {\"class\": \"x\"}}\n"]),
        (
            "none",
            GREETING,
            &["{\"return\": {}}\n", "{\"return\": []}\n"],
        ),
        (
            "half",
            GREETING,
            &["{\"return\": {}}\n", "{\"return\": [{\"cpu-index\": 1}]}\n"],
        ),
        // Not a thread of this process.
        (
            "alien",
            GREETING,
            &[
                "{\"return\": {}}\n",
                "{\"return\": [{\"cpu-index\": 0, \"thread-id\": 1}]}\n",
            ],
        ),
    ];
    for (name, greeting, answers) in cases {
        let path = folder.path().join(name);
        let server = serve(&path, greeting, answers);
        let found = ask(&root, pid, &path);
        assert!(
            matches!(found, Err(QmpError::Answer { .. })),
            "{name}: {found:?}"
        );
        server.join().unwrap();
    }
    let missing = ask(&root, pid, &folder.path().join("missing"));
    assert!(matches!(missing, Err(QmpError::Io { .. })), "{missing:?}");
}

#[test]
fn a_socket_of_another_process_is_not_asked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    // This process says that it is its parent.
    let parent = rustix::process::getppid().unwrap().as_raw_nonzero().get();
    let found = ask(&Root::new("/"), u32::try_from(parent).unwrap(), &path);
    assert!(
        matches!(found, Err(QmpError::Foreign { .. } | QmpError::Io { .. })),
        "{found:?}"
    );
    if let Ok((mut client, _)) = listener.accept() {
        client.set_nonblocking(false).unwrap();
        let mut said = Vec::new();
        client.read_to_end(&mut said).unwrap();
        assert_eq!(said, b"", "nothing is said to a stranger");
    }
}

#[test]
fn threads_of_another_pid_namespace_are_translated() {
    let tree = crate::fixture::Tree::new(
        "@thread 100 2310 | x | 0 | 0::/\n@thread 100 2311 | x | 0 | 0::/\n",
    );
    tree.write(
        "proc/100/task/2310/status",
        "Name:\tx\nNSpid:\t2310\t41\t7\n",
    );
    tree.write("proc/100/task/2311/status", "Name:\tx\n");
    let translated = |inner: &[(u32, u32)]| {
        translate(&tree.root, 100, &inner.iter().copied().collect()).unwrap()
    };
    assert_eq!(
        translated(&[(0, 7), (1, 2311)]),
        Some(BTreeMap::from([(0, 2310), (1, 2311)]))
    );
    assert_eq!(translated(&[(0, 2310)]), None);
}

#[test]
fn an_answer_comes_with_a_later_scan_and_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("qmp");
    let tid = my_thread();
    let answer = format!("{{\"return\": [{{\"cpu-index\": 0, \"thread-id\": {tid}}}]}}\n");
    let answers: &[&str] = Box::leak(Box::new([
        "{\"return\": {}}\n",
        Box::leak(answer.into_boxed_str()) as &str,
    ]));
    let server = serve(&path, GREETING, answers);
    let (root, pid) = me();
    let id = VmId {
        pid,
        start_ticks: 1,
    };
    let mut monitors = Monitors::default();
    let mut scan = |threads: &[u32]| {
        monitors.vcpus(
            &root,
            id,
            std::slice::from_ref(&path),
            &threads.iter().copied().collect(),
        )
    };
    assert!(scan(&[tid]).unwrap_err().contains("has not answered yet"));
    let end = Instant::now() + Duration::from_secs(60);
    while scan(&[tid]).is_err() {
        assert!(Instant::now() < end);
        thread::sleep(Duration::from_millis(10));
    }
    server.join().unwrap();
    // Nobody listens any more, and the answer holds as long as its threads live.
    assert_eq!(scan(&[tid]).unwrap(), BTreeMap::from([(0, tid)]));
    assert_eq!(scan(&[tid, tid + 1]).unwrap(), BTreeMap::from([(0, tid)]));
    assert!(scan(&[tid + 1]).unwrap_err().contains("is gone"));
    monitors.retain(|_| false);
    assert!(monitors.asked.is_empty());
    let nowhere = monitors.vcpus(&root, id, &[], &BTreeSet::new());
    assert!(nowhere.unwrap_err().contains("no QMP socket"));
}

#[test]
fn files_that_fail_while_a_monitor_is_asked_are_named_and_nothing_is_made_up() {
    use crate::root::{Fault, Faults};
    let folder = tempfile::tempdir().unwrap();
    let pid = std::process::id();
    let tid = my_thread();
    let answer = format!("{{\"return\": [{{\"cpu-index\": 0, \"thread-id\": {tid}}}]}}\n");
    let answers: &[&str] = Box::leak(Box::new([
        "{\"return\": {}}\n",
        Box::leak(answer.into_boxed_str()) as &str,
    ]));
    let cases = [
        ("net/unix", Fault::Error(rustix::io::Errno::ACCESS)),
        ("/status", Fault::Error(rustix::io::Errno::OPNOTSUPP)),
        ("/comm", Fault::Error(rustix::io::Errno::ACCESS)),
        ("/task", Fault::Error(rustix::io::Errno::SRCH)),
    ];
    for (index, (within, fault)) in cases.into_iter().enumerate() {
        let path = folder.path().join(index.to_string());
        let server = serve(&path, GREETING, answers);
        let root = Root::with_faults("/", std::sync::Arc::new(Faults::always(within, fault)));
        let error = ask(&root, pid, &path).unwrap_err().to_string();
        let wanted = match within {
            "/task" => "threads of its process",
            _ => within,
        };
        assert!(error.contains(wanted), "{within}: {error}");
        // Whoever was not asked at all would wait for ever.
        drop(UnixStream::connect(&path));
        let _ = server.join();
    }
    // Without the lines of names in PID namespaces the threads are called as they are here.
    let path = folder.path().join("plain");
    let server = serve(&path, GREETING, answers);
    let faults = Faults::always("/status", Fault::Garbage);
    let root = Root::with_faults("/", std::sync::Arc::new(faults));
    assert_eq!(ask(&root, pid, &path).unwrap(), BTreeMap::from([(0, tid)]));
    server.join().unwrap();
}
