//! Whatever ends the agent, the guest gets its mask back: the real program and real signals.

#![allow(clippy::unwrap_used)] // a panic is how a test fails, also in its helpers

mod common;

use std::fs;
use std::process::{Command, Output, Stdio};

use common::{Agent, Broker, Guest, PROGRAM, Stream, eventually, hint, lives, send, state_of};
use hint_proto::v1;
use hint_proto::v1::session_request::Message as Request;
use rustix::process::Signal;

/// An agent that has folded its guest from 4 CPUs to 2.
async fn folded(guest: &Guest, lease_ms: u32) -> (Broker, Agent, Stream) {
    let mut broker = Broker::start(guest, 7);
    let agent = Agent::start(guest);
    let stream = fold(guest, &mut broker, lease_ms).await;
    (broker, agent, stream)
}

async fn fold(guest: &Guest, broker: &mut Broker, lease_ms: u32) -> Stream {
    let mut stream = broker.accept().await;
    let hint = v1::Hint {
        lease_ms,
        ..hint(7, 1, 2)
    };
    stream.hint(hint).await;
    assert_eq!(stream.applied().await.outcome(), v1::Outcome::Applied);
    assert_eq!(guest.avoided(), "2-3");
    assert!(guest.has_record());
    stream
}

fn restore(guest: &Guest) -> Output {
    Command::new(PROGRAM)
        .arg("restore")
        .arg("--root")
        .arg(guest.root())
        .arg("--state-dir")
        .arg(guest.state())
        .stderr(Stdio::inherit())
        .output()
        .unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Ends agent and guardian so that neither can do anything any more.
fn kill_both(agent: &mut Agent) {
    let guardian = agent.guardian();
    agent.signal(Signal::STOP);
    eventually("the agent stands still", || {
        state_of(agent.pid()).is_some_and(|(state, _)| state == 'T')
    });
    send(guardian, Signal::KILL);
    agent.signal(Signal::KILL);
    agent.ended();
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_restores_says_goodbye_and_exits_with_success() {
    for signal in [Signal::TERM, Signal::INT] {
        let guest = Guest::paravirt(4);
        let (_broker, mut agent, mut stream) = folded(&guest, 120_000).await;
        let guardian = agent.guardian();
        agent.signal(signal);
        loop {
            match stream.next().await {
                Some(Request::Goodbye(_)) => break,
                Some(_) => {}
                None => panic!("no goodbye"),
            }
        }
        assert_eq!(guest.avoided(), "", "restored before the goodbye");
        drop(stream);
        assert!(agent.ended().success());
        assert!(!guest.has_record());
        eventually("the guardian ends", || !lives(guardian));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sigkill_of_the_agent_is_made_good_by_the_guardian() {
    let guest = Guest::paravirt(4);
    let (_broker, mut agent, _stream) = folded(&guest, 120_000).await;
    let guardian = agent.guardian();
    agent.signal(Signal::KILL);
    agent.ended();
    eventually("the guardian restores", || guest.avoided().is_empty());
    eventually("the guardian ends", || !lives(guardian));
    assert!(!guest.has_record());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_log_does_not_stop_the_guardian() {
    let guest = Guest::paravirt(4);
    let mut broker = Broker::start(&guest, 7);
    let mut agent = Agent::start_with(&guest, Stdio::piped());
    drop(agent.child().stderr.take());
    let _stream = fold(&guest, &mut broker, 120_000).await;
    agent.signal(Signal::KILL);
    agent.ended();
    eventually("the guardian restores", || guest.avoided().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_guardian_has_its_own_name_and_ignores_what_ends_the_agent() {
    let guest = Guest::paravirt(4);
    let (_broker, mut agent, _stream) = folded(&guest, 120_000).await;
    let guardian = agent.guardian();
    assert_eq!(
        fs::read_to_string(format!("/proc/{guardian}/comm")).unwrap(),
        "hint-guardian\n"
    );
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        send(guardian, signal);
    }
    agent.signal(Signal::KILL);
    agent.ended();
    eventually("the guardian restores", || guest.avoided().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn when_both_are_killed_the_restore_command_does_it() {
    let guest = Guest::paravirt(4);
    guest.put(common::PARAVIRT, "3\n");
    let mut broker = Broker::start(&guest, 7);
    let mut agent = Agent::start(&guest);
    let mut stream = broker.accept().await;
    assert_eq!(stream.hello.preferred, "0-2");
    stream.hint(hint(7, 1, 1)).await;
    assert_eq!(stream.applied().await.preferred, "0");
    kill_both(&mut agent);
    assert_eq!(guest.avoided(), "1-3");
    let output = restore(&guest);
    assert!(output.status.success());
    assert_eq!(text(&output), "restored /sys/devices/system/cpu/paravirt\n");
    assert_eq!(guest.get(common::PARAVIRT), "3\n", "byte for byte as found");
    let output = restore(&guest);
    assert!(output.status.success());
    assert_eq!(text(&output), "nothing to restore\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_agent_restores_what_the_last_one_left() {
    let guest = Guest::paravirt(4);
    let (mut broker, mut agent, _stream) = folded(&guest, 120_000).await;
    kill_both(&mut agent);
    assert_eq!(guest.avoided(), "2-3");
    let _next = Agent::start(&guest);
    let stream = broker.accept().await;
    assert_eq!(stream.hello.preferred, "0-3");
    assert_eq!(guest.avoided(), "");
    assert!(!guest.has_record());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_of_another_boot_is_dropped() {
    let guest = Guest::paravirt(4);
    let (_broker, mut agent, _stream) = folded(&guest, 120_000).await;
    kill_both(&mut agent);
    guest.put("proc/sys/kernel/random/boot_id", "other\n");
    assert_eq!(text(&restore(&guest)), "nothing to restore\n");
    assert_eq!(guest.avoided(), "2-3", "not this boot's business");
    assert!(!guest.has_record());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_boot_that_is_not_known_may_be_this_one() {
    let guest = Guest::paravirt(4);
    let (_broker, mut agent, _stream) = folded(&guest, 120_000).await;
    kill_both(&mut agent);
    fs::remove_file(guest.root().join("proc/sys/kernel/random/boot_id")).unwrap();
    assert_eq!(
        text(&restore(&guest)),
        "restored /sys/devices/system/cpu/paravirt\n"
    );
    assert_eq!(guest.avoided(), "");
    assert!(!guest.has_record());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_hangs_beyond_its_lease_is_made_good_and_comes_back() {
    let guest = Guest::paravirt(4);
    let (_broker, agent, mut stream) = folded(&guest, 4000).await;
    agent.signal(Signal::STOP);
    eventually("the guardian restores", || guest.avoided().is_empty());
    agent.signal(Signal::CONT);
    // Its own clock tells it the same.
    assert_eq!(stream.applied().await.outcome(), v1::Outcome::Restored);
    stream.hint(hint(7, 2, 2)).await;
    assert_eq!(stream.applied().await.outcome(), v1::Outcome::Applied);
    assert_eq!(guest.avoided(), "2-3");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_guardian_is_replaced_and_the_next_knows_the_record() {
    let guest = Guest::paravirt(4);
    let (_broker, mut agent, _stream) = folded(&guest, 120_000).await;
    let first = agent.guardian();
    send(first, Signal::KILL);
    eventually("there is another guardian", || {
        !lives(first) && agent.guardian() != first
    });
    assert_eq!(guest.avoided(), "2-3");
    // A guardian that has its name has yet to read what it is told; the pipe keeps that for it.
    agent.signal(Signal::KILL);
    agent.ended();
    eventually("the new guardian restores", || guest.avoided().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_agent_is_refused() {
    let guest = Guest::paravirt(4);
    let (_broker, _agent, _stream) = folded(&guest, 120_000).await;
    let mut second = Agent::start(&guest);
    assert_eq!(second.ended().code(), Some(1));
    assert_eq!(guest.avoided(), "2-3");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_agent_with_another_state_directory_is_refused_too() {
    let guest = Guest::paravirt(4);
    let (_broker, mut agent, _stream) = folded(&guest, 120_000).await;
    let output = Command::new(PROGRAM)
        .args(["run", "--endpoint", "unix:/nowhere", "--state-dir"])
        .arg(guest.root().join("other"))
        .arg("--root")
        .arg(guest.root())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(log.contains("/sys/devices/system/cpu/online"), "{log}");
    agent.signal(Signal::KILL);
    agent.ended();
    eventually("the guardian restores", || guest.avoided().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_record_opens_every_mask_and_is_kept() {
    let guest = Guest::paravirt(4);
    let (mut broker, mut agent, _stream) = folded(&guest, 120_000).await;
    kill_both(&mut agent);
    let (record, aside) = (
        guest.state().join("restore.json"),
        guest.state().join("restore.json.damaged"),
    );
    let whole = fs::read(&record).unwrap();
    for damaged in [&whole[..whole.len() / 2], b"", b"\xff\xfe", b"[1]"] {
        guest.put(common::PARAVIRT, "2-3\n");
        fs::write(&record, damaged).unwrap();
        let output = restore(&guest);
        assert!(output.status.success());
        let said = text(&output);
        assert!(
            said.contains("damaged") && said.contains("restore.json.damaged"),
            "{said}"
        );
        assert_eq!(guest.avoided(), "");
        assert_eq!(fs::read(&aside).unwrap(), damaged);
        assert!(!guest.has_record() && !guest.state().join("preferred").exists());
        assert_eq!(text(&restore(&guest)), "nothing to restore\n");
    }
    // An agent that starts does the same, and works.
    guest.put(common::PARAVIRT, "2-3\n");
    fs::write(&record, "{").unwrap();
    let _next = Agent::start(&guest);
    let stream = broker.accept().await;
    assert_eq!(stream.hello.preferred, "0-3");
    assert_eq!(guest.avoided(), "");
    assert_eq!(fs::read(&aside).unwrap(), b"{");
}

#[test]
fn mistakes_in_the_configuration_are_named() {
    let guest = Guest::paravirt(4);
    let config = guest.root().join("agent.toml");
    fs::write(&config, "actuator = \"observe\"\nleese = 3\n").unwrap();
    let output = Command::new(PROGRAM)
        .arg("run")
        .arg("--config")
        .arg(&config)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(log.contains("line 2") && log.contains("leese"), "{log}");
}

#[test]
fn an_actuator_asked_for_by_name_that_does_not_work_is_an_error() {
    let guest = Guest::bare(4);
    let output = Command::new(PROGRAM)
        .args([
            "run",
            "--actuator",
            "paravirt",
            "--endpoint",
            "unix:/nowhere",
        ])
        .arg("--root")
        .arg(guest.root())
        .arg("--state-dir")
        .arg(guest.state())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(
        log.contains("/sys/devices/system/cpu/paravirt is missing"),
        "{log}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_somebody_else_took_is_logged_once() {
    let guest = Guest::bare(4);
    let group = "sys/fs/cgroup/user.slice/cpuset.cpus";
    for (path, text) in [
        (
            "proc/self/mountinfo",
            "32 25 0:27 / /sys/fs/cgroup rw - cgroup2 none rw\n",
        ),
        ("sys/devices/system/cpu/possible", "0-3\n"),
        ("sys/fs/cgroup/cgroup.controllers", "cpuset\n"),
        ("sys/fs/cgroup/cgroup.subtree_control", "cpuset\n"),
        (group, "\n"),
    ] {
        guest.put(path, text);
    }
    let log = guest.root().join("log");
    let mut broker = Broker::start(&guest, 7);
    let stderr = fs::File::create(&log).unwrap();
    let mut agent = Agent::start_with(&guest, stderr.into());
    let mut stream = broker.accept().await;
    stream.hint(hint(7, 1, 2)).await;
    assert_eq!(stream.applied().await.outcome(), v1::Outcome::Applied);
    assert_eq!(guest.get(group), "0-1");
    guest.put(group, "0-2\n");
    for sequence in 2..8u32 {
        let usable = 1 + sequence % 2;
        stream.hint(hint(7, u64::from(sequence), usable)).await;
        stream.applied().await;
    }
    assert_eq!(guest.get(group), "0-2\n", "it is theirs");
    agent.signal(Signal::TERM);
    assert!(agent.ended().success());
    let said = fs::read_to_string(&log).unwrap();
    let warnings = said.matches("somebody else writes this file").count();
    assert_eq!(warnings, 1, "{said}");
}
