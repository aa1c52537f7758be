//! The guest channel over real Unix sockets, with a real gRPC client as the agent.
#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod common;

use std::fs;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use common::{Guest, PATIENCE, channel, door, hello, hint, id, until, vm_in};
use hint_broker::model::{Cpus, Hint, Mode, Outcome, Reason};
use hint_broker::publish::{ChannelSettings, Publisher};
use hint_proto::v1;
use hint_proto::v1::session_request::Message as Said;
use hint_proto::v1::session_response::Message;
use tonic::Code;

const EPOCH: u64 = 42;

fn settings() -> ChannelSettings {
    ChannelSettings {
        vsock: false,
        heartbeat: Duration::from_millis(100),
        deadline: Duration::from_secs(20),
        lease: Duration::from_secs(25),
        ..ChannelSettings::default()
    }
}

fn publisher() -> Publisher {
    Publisher::start(settings(), EPOCH).unwrap()
}

#[tokio::test]
async fn a_hint_is_delivered_renewed_and_withdrawn() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    publisher.set_vms(&[vm_in(dir.path(), 10)]);
    let (mut guest, welcome) = Guest::join(&door(dir.path(), 10)).await;
    assert_eq!((welcome.protocol, welcome.epoch), (1, EPOCH));
    assert_eq!(welcome.heartbeat_ms, 100);
    assert_eq!(welcome.deadline_ms, 20_000);
    assert_eq!(welcome.mode(), v1::Mode::Observe);
    assert!(matches!(
        guest.next().await,
        Ok(Some(Message::Heartbeat(_)))
    ));

    publisher.publish(id(10), Some(hint(2)));
    let first = guest.hint(|_| true).await;
    assert_eq!((first.epoch, first.sequence), (EPOCH, 1));
    assert_eq!((first.usable, first.vcpus, first.lease_ms), (2, 4, 25_000));
    assert_eq!(first.mode(), v1::Mode::Enforce);
    assert_eq!(first.reason(), v1::Reason::Contention);
    assert_eq!(first.contention(), v1::Contention::Contended);
    assert_eq!(first.entitlement_milli_cpus, Some(1500));
    let classes = first.classes.unwrap();
    assert_eq!((classes.full, classes.partial, classes.avoided), (2, 0, 2));
    guest.applied(EPOCH, 1, "0-1").await;
    let agent = until("the answer", || {
        publisher
            .agents()
            .remove(&id(10))
            .filter(|agent| agent.outcome.is_some())
    })
    .await;
    assert_eq!(agent.outcome, Some(Outcome::Applied));
    assert_eq!(agent.preferred.to_string(), "0-1");
    assert!(agent.folded());

    // Figures ride along in the renewal, under the same sequence.
    let figures = Hint {
        spare: Some(Cpus(0.75)),
        ..hint(2)
    };
    publisher.publish(id(10), Some(figures.clone()));
    let renewal = guest.hint(|hint| hint.spare_milli_cpus == Some(750)).await;
    assert_eq!((renewal.sequence, renewal.usable), (1, 2));

    publisher.publish(
        id(10),
        Some(Hint {
            reason: Reason::Damped,
            ..figures
        }),
    );
    assert_eq!(
        guest.hint(|hint| hint.sequence == 2).await.reason(),
        v1::Reason::Damped
    );
    guest.applied(EPOCH, 2, "0-1").await;

    publisher.publish(id(10), None);
    let withdrawn = guest.hint(|hint| hint.sequence > 2).await;
    assert_eq!(
        (withdrawn.sequence, withdrawn.usable, withdrawn.vcpus),
        (3, 4, 4)
    );
    assert_eq!(withdrawn.mode(), v1::Mode::Observe);
    assert_eq!(withdrawn.classes.unwrap().full, 4);
    for _ in 0..3 {
        assert!(matches!(
            guest.next().await,
            Ok(Some(Message::Heartbeat(_)))
        ));
    }
}

#[tokio::test]
async fn a_new_session_hears_the_hint_in_force_and_nothing_of_one_withdrawn() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    publisher.set_vms(&[vm_in(dir.path(), 10), vm_in(dir.path(), 11)]);
    publisher.publish(id(10), Some(hint(3)));
    publisher.publish(id(11), Some(hint(1)));
    publisher.publish(id(11), None);
    let (mut guest, welcome) = Guest::join(&door(dir.path(), 10)).await;
    assert_eq!(welcome.mode(), v1::Mode::Enforce);
    let Ok(Some(Message::Hint(first))) = guest.next().await else {
        panic!("expected the hint in force");
    };
    assert_eq!((first.sequence, first.usable), (1, 3));
    let (mut other, welcome) = Guest::join(&door(dir.path(), 11)).await;
    assert_eq!(welcome.mode(), v1::Mode::Observe);
    for _ in 0..3 {
        assert!(matches!(
            other.next().await,
            Ok(Some(Message::Heartbeat(_)))
        ));
    }
}

#[tokio::test]
async fn an_observed_vm_gets_no_hint() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    publisher.set_vms(&[vm_in(dir.path(), 10)]);
    publisher.publish(
        id(10),
        Some(Hint {
            mode: Mode::Observe,
            ..hint(1)
        }),
    );
    let (mut guest, _) = Guest::join(&door(dir.path(), 10)).await;
    for _ in 0..3 {
        assert!(matches!(
            guest.next().await,
            Ok(Some(Message::Heartbeat(_)))
        ));
    }
}

#[tokio::test]
async fn a_second_session_replaces_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    publisher.set_vms(&[vm_in(dir.path(), 10)]);
    let (mut first, _) = Guest::join(&door(dir.path(), 10)).await;
    let (mut second, _) = Guest::join(&door(dir.path(), 10)).await;
    loop {
        match first.next().await {
            Ok(Some(Message::Heartbeat(_))) => {}
            Ok(Some(Message::Goodbye(goodbye))) => {
                assert!(goodbye.reason.contains("another session"));
                assert!(goodbye.retry_after_ms > 0);
                break;
            }
            other => panic!("expected a Goodbye, got {other:?}"),
        }
    }
    assert_eq!(first.status().await.code(), Code::Aborted);
    publisher.publish(id(10), Some(hint(1)));
    assert_eq!(second.hint(|_| true).await.usable, 1);
    assert_eq!(publisher.agents().len(), 1);
}

#[tokio::test]
async fn a_slow_reader_gets_the_latest_hint_and_no_queue() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    publisher.set_vms(&[vm_in(dir.path(), 10)]);
    let (mut guest, _) = Guest::join(&door(dir.path(), 10)).await;
    let rounds = 300;
    let start = std::time::Instant::now();
    for round in 0..rounds {
        publisher.publish(id(10), Some(hint(1 + round % 4)));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let latest = Hint {
        reason: Reason::Policy,
        ..hint(2)
    };
    publisher.publish(id(10), Some(latest));
    let heard = std::cell::Cell::new(0_u128);
    let last = guest
        .hint(|hint| {
            heard.set(heard.get() + 1);
            hint.reason() == v1::Reason::Policy
        })
        .await;
    assert_eq!((last.sequence, last.usable), (u64::from(rounds) + 1, 2));
    let beats = start.elapsed().as_millis() / 100;
    assert!(
        heard.get() <= beats + 2,
        "{} hints in {beats} heartbeats",
        heard.get()
    );
}

#[tokio::test]
async fn the_answer_lets_the_next_hint_out_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let slow_beat = ChannelSettings {
        heartbeat: Duration::from_secs(600),
        deadline: Duration::from_secs(1200),
        lease: Duration::from_secs(1200),
        ..settings()
    };
    let publisher = Publisher::start(slow_beat, EPOCH).unwrap();
    publisher.set_vms(&[vm_in(dir.path(), 10)]);
    let (mut guest, _) = Guest::join(&door(dir.path(), 10)).await;
    for usable in [1, 2, 3] {
        publisher.publish(id(10), Some(hint(usable)));
        let next = guest.hint(|_| true).await;
        assert_eq!((next.sequence, next.usable), (u64::from(usable), usable));
        guest.applied(EPOCH, next.sequence, "0").await;
    }
}

#[tokio::test]
async fn garbage_on_one_socket_harms_no_other_vm() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    publisher.set_vms(&[vm_in(dir.path(), 10), vm_in(dir.path(), 11)]);
    let (mut guest, _) = Guest::join(&door(dir.path(), 11)).await;
    for garbage in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0xff; 100_000],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        b"",
    ] {
        let mut bad = UnixStream::connect(door(dir.path(), 10)).unwrap();
        bad.set_nonblocking(true).unwrap();
        let _ = bad.write(garbage);
        publisher.publish(id(11), Some(hint(1)));
        guest.hint(|hint| hint.usable == 1).await;
    }
    // Nor does a crowd of connections that say nothing.
    let mut crowd = Vec::new();
    for _ in 0..32 {
        crowd.push(tokio::net::UnixStream::connect(door(dir.path(), 10)).await);
    }
    publisher.publish(id(11), Some(hint(2)));
    guest.hint(|hint| hint.usable == 2).await;
    assert_eq!(publisher.agents().len(), 1);
    drop(crowd);
    let start = std::time::Instant::now();
    while !welcomed(&door(dir.path(), 10)).await {
        assert!(start.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Can an agent begin a session now?
async fn welcomed(socket: &std::path::Path) -> bool {
    let Ok(channel) = common::try_channel(socket).await else {
        return false;
    };
    let Ok(mut guest) = Guest::open(channel, Said::Hello(hello())).await else {
        return false;
    };
    matches!(guest.next().await, Ok(Some(Message::Welcome(_))))
}

#[tokio::test]
async fn what_is_no_hello_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    publisher.set_vms(&[vm_in(dir.path(), 10)]);
    let other_protocol = v1::Hello {
        protocol: 9,
        ..hello()
    };
    let bad_online = v1::Hello {
        online: "0-banana".to_owned(),
        ..hello()
    };
    for (first, says) in [
        (Said::Heartbeat(v1::Heartbeat {}), "expected a Hello"),
        (
            Said::Hello(other_protocol),
            "hello.protocol: expected 1, found 9",
        ),
        (Said::Hello(bad_online), "hello.online:"),
    ] {
        let channel = channel(&door(dir.path(), 10)).await;
        let mut guest = Guest::open(channel, first).await.unwrap();
        let status = guest.status().await;
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert!(status.message().contains(says), "{}", status.message());
    }
    assert!(publisher.agents().is_empty());
}

#[tokio::test]
async fn a_bad_message_ends_the_session_and_names_the_field() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    publisher.set_vms(&[vm_in(dir.path(), 10)]);
    let (mut guest, _) = Guest::join(&door(dir.path(), 10)).await;
    guest.applied(0, 0, "3-1").await;
    let status = guest.status().await;
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(
        status.message().starts_with("applied.preferred:"),
        "{}",
        status.message()
    );
    until("the agent to be gone", || {
        publisher.agents().is_empty().then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_answer_to_a_hint_never_sent_is_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    publisher.set_vms(&[vm_in(dir.path(), 10)]);
    publisher.publish(id(10), Some(hint(2)));
    let (mut guest, _) = Guest::join(&door(dir.path(), 10)).await;
    guest.hint(|_| true).await;
    guest.applied(EPOCH, 99, "0").await;
    guest.applied(EPOCH + 1, 1, "0").await;
    guest.applied(EPOCH, 1, "0-1").await;
    let agent = until("the answer", || {
        publisher
            .agents()
            .remove(&id(10))
            .filter(|agent| agent.outcome.is_some())
    })
    .await;
    assert_eq!(agent.preferred.to_string(), "0-1");
}

#[tokio::test]
async fn a_message_too_large_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    publisher.set_vms(&[vm_in(dir.path(), 10)]);
    let (mut guest, _) = Guest::join(&door(dir.path(), 10)).await;
    guest
        .send(Said::Goodbye(v1::Goodbye {
            reason: "x".repeat(70_000),
            retry_after_ms: 0,
        }))
        .await;
    let status = guest.status().await;
    assert_eq!(status.code(), Code::OutOfRange, "{status:?}");
    until("the agent to be gone", || {
        publisher.agents().is_empty().then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_flood_is_refused_and_harms_no_other_vm() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    publisher.set_vms(&[vm_in(dir.path(), 10), vm_in(dir.path(), 11)]);
    let (mut good, _) = Guest::join(&door(dir.path(), 11)).await;
    let (mut bad, _) = Guest::join(&door(dir.path(), 10)).await;
    for _ in 0..200 {
        bad.send(Said::Heartbeat(v1::Heartbeat {})).await;
    }
    let status = bad.status().await;
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    publisher.publish(id(11), Some(hint(1)));
    good.hint(|hint| hint.usable == 1).await;
    until("one agent", || {
        (publisher.agents().len() == 1).then_some(())
    })
    .await;
}

#[tokio::test]
async fn silence_ends_a_session() {
    let dir = tempfile::tempdir().unwrap();
    let short = ChannelSettings {
        deadline: Duration::from_millis(300),
        ..settings()
    };
    let publisher = Publisher::start(short, EPOCH).unwrap();
    publisher.set_vms(&[vm_in(dir.path(), 10)]);
    let (mut guest, _) = Guest::join(&door(dir.path(), 10)).await;
    let status = guest.status().await;
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    until("the agent to be gone", || {
        publisher.agents().is_empty().then_some(())
    })
    .await;
}

#[tokio::test]
async fn changes_of_agents_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    publisher.set_vms(&[vm_in(dir.path(), 10)]);
    let (guest, _) = Guest::join(&door(dir.path(), 10)).await;
    let told = || tokio::time::timeout(PATIENCE, publisher.changed());
    told().await.unwrap();
    assert_eq!(publisher.agents()[&id(10)].kernel_release, "6.12.0");
    guest
        .send(Said::Report(v1::Report {
            runnable_tasks: Some(7),
            ..v1::Report::default()
        }))
        .await;
    told().await.unwrap();
    assert_eq!(publisher.agents()[&id(10)].runnable_tasks, Some(7));
    guest
        .send(Said::Goodbye(v1::Goodbye {
            reason: "done".to_owned(),
            retry_after_ms: 0,
        }))
        .await;
    told().await.unwrap();
    assert!(publisher.agents().is_empty());
}

#[tokio::test]
async fn a_departed_vms_session_ends_and_its_socket_goes() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    publisher.set_vms(&[vm_in(dir.path(), 10), vm_in(dir.path(), 11)]);
    let (mut guest, _) = Guest::join(&door(dir.path(), 10)).await;
    publisher.set_vms(&[vm_in(dir.path(), 11)]);
    assert_eq!(guest.status().await.code(), Code::Aborted);
    assert!(!door(dir.path(), 10).exists());
    assert!(door(dir.path(), 11).exists());
    assert!(publisher.agents().is_empty());
}

#[tokio::test]
async fn a_path_that_is_taken_degrades_one_vm_until_it_is_free() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    fs::write(door(dir.path(), 10), "precious").unwrap();
    let live = UnixListener::bind(door(dir.path(), 11)).unwrap();
    drop(UnixListener::bind(door(dir.path(), 12)).unwrap());
    let vms = [10, 11, 12, 13].map(|pid| vm_in(dir.path(), pid));
    publisher.set_vms(&vms);
    let degraded = publisher.degraded();
    assert_eq!(degraded.len(), 2, "{degraded:?}");
    assert!(degraded[0].contains("VM 10-7") && degraded[0].contains("regular file"));
    assert!(degraded[1].contains("VM 11-7") && degraded[1].contains("somebody listens"));
    assert_eq!(
        fs::read_to_string(door(dir.path(), 10)).unwrap(),
        "precious"
    );
    let _stale_taken_over = Guest::join(&door(dir.path(), 12)).await;
    let _unharmed = Guest::join(&door(dir.path(), 13)).await;

    fs::remove_file(door(dir.path(), 10)).unwrap();
    drop(live);
    publisher.set_vms(&vms);
    assert_eq!(publisher.degraded(), Vec::<String>::new());
    let _ten = Guest::join(&door(dir.path(), 10)).await;
    let _eleven = Guest::join(&door(dir.path(), 11)).await;
    assert_eq!(publisher.agents().len(), 4);
}

#[tokio::test]
async fn a_socket_file_that_somebody_removed_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    let vms = [vm_in(dir.path(), 10)];
    publisher.set_vms(&vms);
    let (mut guest, _) = Guest::join(&door(dir.path(), 10)).await;
    fs::remove_file(door(dir.path(), 10)).unwrap();
    publisher.set_vms(&vms);
    let _again = Guest::join(&door(dir.path(), 10)).await;
    assert_eq!(guest.status().await.code(), Code::Aborted);
}

#[tokio::test]
async fn a_hybrid_socket_of_two_vms_is_nobodys() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    let mut twin = vm_in(dir.path(), 11);
    twin.hybrid_socket = vm_in(dir.path(), 10).hybrid_socket;
    publisher.set_vms(&[vm_in(dir.path(), 10), twin]);
    assert!(!door(dir.path(), 10).exists());
    let degraded = publisher.degraded().join("\n");
    assert!(degraded.contains("several VMs (10-7, 11-7)"), "{degraded}");
}

#[tokio::test]
async fn the_socket_is_its_vmms_alone() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir().unwrap();
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: giving a socket to another user takes root");
        return;
    }
    let _vmms = UnixListener::bind(dir.path().join("10.vsock")).unwrap();
    std::os::unix::fs::chown(dir.path().join("10.vsock"), Some(1234), Some(1235)).unwrap();
    let publisher = publisher();
    publisher.set_vms(&[vm_in(dir.path(), 10)]);
    let made = fs::metadata(door(dir.path(), 10)).unwrap();
    assert_eq!(
        (made.uid(), made.gid(), made.mode() & 0o777),
        (1234, 1235, 0o600)
    );
}

#[tokio::test]
async fn shutdown_says_goodbye_hears_the_last_answer_and_removes_the_sockets() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    publisher.set_vms(&[vm_in(dir.path(), 10)]);
    let (mut guest, _) = Guest::join(&door(dir.path(), 10)).await;
    let agent = tokio::spawn(async move {
        loop {
            match guest.next().await {
                Ok(Some(Message::Goodbye(goodbye))) => {
                    drop(guest.say);
                    return goodbye.reason;
                }
                Ok(Some(_)) => {}
                other => panic!("expected a Goodbye, got {other:?}"),
            }
        }
    });
    publisher.shutdown("upgrade").await;
    assert_eq!(agent.await.unwrap(), "upgrade");
    assert!(!door(dir.path(), 10).exists());
    assert!(UnixStream::connect(door(dir.path(), 10)).is_err());
}

#[tokio::test]
async fn shutdown_does_not_wait_for_an_agent_that_hangs() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    publisher.set_vms(&[vm_in(dir.path(), 10)]);
    let (_hung, _) = Guest::join(&door(dir.path(), 10)).await;
    tokio::time::timeout(PATIENCE, publisher.shutdown("bye"))
        .await
        .unwrap();
}

#[tokio::test]
async fn one_connection_may_hold_a_session_and_its_successor() {
    let dir = tempfile::tempdir().unwrap();
    let publisher = publisher();
    publisher.set_vms(&[vm_in(dir.path(), 10)]);
    let channel = channel(&door(dir.path(), 10)).await;
    let mut first = Guest::open(channel.clone(), Said::Hello(hello()))
        .await
        .unwrap();
    assert!(matches!(first.next().await, Ok(Some(Message::Welcome(_)))));
    let mut second = Guest::open(channel, Said::Hello(hello())).await.unwrap();
    assert!(matches!(second.next().await, Ok(Some(Message::Welcome(_)))));
    assert_eq!(first.status().await.code(), Code::Aborted);
    assert_eq!(publisher.agents().len(), 1);
}
