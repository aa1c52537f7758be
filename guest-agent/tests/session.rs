//! The agent against a real gRPC server on a real Unix socket.

#![allow(clippy::unwrap_used)] // a panic is how a test fails, also in its helpers

mod common;

use std::time::{Duration, Instant};

use common::{Agent, Broker, Guest, eventually, hint, listen};
use hint_proto::v1;
use hint_proto::v1::session_request::Message as Request;
use hint_proto::v1::session_response::Message as Response;

#[tokio::test(flavor = "multi_thread")]
async fn a_hint_is_applied_and_answered_with_the_mask() {
    let guest = Guest::paravirt(4);
    let mut broker = Broker::start(&guest, 7);
    let _agent = Agent::start(&guest);
    let mut stream = broker.accept().await;
    let hello = stream.hello.clone();
    assert_eq!(hello.protocol, 1);
    assert_eq!(hello.kernel_release, "6.12.0-test");
    assert_eq!(hello.boot_id, "b00t");
    assert_eq!(hello.actuator(), v1::Actuator::Paravirt);
    assert_eq!(hello.pinned_tasks(), v1::PinnedTasks::Stay);
    assert_eq!(
        (hello.online.as_str(), hello.preferred.as_str()),
        ("0-3", "0-3")
    );
    assert_eq!(hello.cores.len(), 4);

    stream.hint(hint(7, 1, 2)).await;
    let applied = stream.applied().await;
    assert_eq!((applied.epoch, applied.sequence), (7, 1));
    assert_eq!(applied.outcome(), v1::Outcome::Applied);
    assert_eq!(
        (applied.preferred.as_str(), applied.online.as_str()),
        ("0-1", "0-3")
    );
    assert_eq!(guest.avoided(), "2-3");
    assert_eq!(
        std::fs::read_to_string(guest.state().join("preferred")).unwrap(),
        "0-1\n"
    );

    // A renewal finds the mask right and is not answered: the next answer is to the next hint.
    stream.hint(hint(7, 1, 2)).await;
    stream.hint(hint(7, 2, 3)).await;
    let applied = stream.applied().await;
    assert_eq!((applied.sequence, applied.preferred.as_str()), (2, "0-2"));
    assert_eq!(guest.avoided(), "3");

    stream.hint(hint(7, 3, 4)).await;
    let applied = stream.applied().await;
    assert_eq!(applied.outcome(), v1::Outcome::Applied);
    assert_eq!((applied.sequence, applied.preferred.as_str()), (3, "0-3"));
    assert_eq!(guest.avoided(), "");
    assert!(!guest.has_record());
    assert!(!guest.state().join("preferred").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_guest_reports_on_itself() {
    let guest = Guest::paravirt(4);
    let mut broker = Broker::start(&guest, 1);
    let _agent = Agent::start(&guest);
    let mut stream = broker.accept().await;
    let report = loop {
        match stream.next().await {
            Some(Request::Report(report)) => break report,
            Some(_) => {}
            None => panic!("the agent closed"),
        }
    };
    assert_eq!(report.runnable_tasks, Some(3));
    assert_eq!(report.steal_ms, Some(850));
    assert_eq!(report.online, "0-3");
    assert_eq!(report.pressure_us, None, "no PSI: not known, not zero");
    assert_eq!(report.preferred, "0-3");
    assert_eq!(report.pinned_outside, Some(0));
    assert_eq!(report.trouble, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_broker_is_told_that_the_kernels_governor_is_in_charge() {
    let guest = Guest::paravirt(4);
    let mut broker = Broker::start(&guest, 7);
    let _agent = Agent::start(&guest);
    let mut stream = broker.accept().await;
    stream.hint(hint(7, 1, 2)).await;
    assert_eq!(stream.applied().await.outcome(), v1::Outcome::Applied);
    // It comes while the guest is folded: the mask is put back, and is the governor's.
    guest.put("sys/module/steal_governor/refcnt", "0\n");
    stream.hint(hint(7, 2, 1)).await;
    let applied = stream.applied().await;
    assert_eq!(applied.outcome(), v1::Outcome::Failed);
    assert!(applied.error.contains("modprobe -r steal_governor"));
    assert_eq!(stream.applied().await.outcome(), v1::Outcome::Restored);
    assert_eq!(guest.avoided(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_ends_while_the_broker_hangs() {
    let guest = Guest::paravirt(4);
    let mut broker = Broker::start(&guest, 7);
    let _agent = Agent::start(&guest);
    let mut stream = broker.accept().await;
    let short = v1::Hint {
        lease_ms: 3000,
        ..hint(7, 1, 2)
    };
    stream.hint(short.clone()).await;
    assert_eq!(stream.applied().await.outcome(), v1::Outcome::Applied);
    eventually("the mask is back", || guest.avoided().is_empty());
    let restored = stream.applied().await;
    assert_eq!(restored.outcome(), v1::Outcome::Restored);
    assert_eq!((restored.epoch, restored.sequence), (7, 1));
    assert_eq!(restored.preferred, "0-3");
    assert!(!guest.has_record());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_moves_the_lease() {
    let guest = Guest::paravirt(4);
    let mut broker = Broker::start(&guest, 7);
    let _agent = Agent::start(&guest);
    let mut stream = broker.accept().await;
    let short = v1::Hint {
        lease_ms: 5000,
        ..hint(7, 1, 2)
    };
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(8) {
        stream.hint(short.clone()).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(guest.avoided(), "2-3");
    assert_eq!(stream.applied().await.outcome(), v1::Outcome::Applied);
    assert_eq!(
        stream.applied().await.outcome(),
        v1::Outcome::Restored,
        "nothing between"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_accepts_and_closes_is_not_hammered() {
    let guest = Guest::paravirt(4);
    let listener = listen(&guest.socket());
    let _agent = Agent::start(&guest);
    drop(listener.accept().await.unwrap());
    let (mut count, start) = (1, Instant::now());
    while let Ok(accepted) = tokio::time::timeout(
        Duration::from_secs(5).saturating_sub(start.elapsed()),
        listener.accept(),
    )
    .await
    {
        drop(accepted.unwrap());
        count += 1;
    }
    // Six on average; without doubling a hundred, without pauses thousands.
    assert!(count <= 30, "{count} connections in 5 s");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_greets_and_closes_is_not_hammered() {
    let guest = Guest::paravirt(4);
    let mut broker = Broker::start(&guest, 1);
    let _agent = Agent::start(&guest);
    drop(broker.accept().await);
    let (mut count, start) = (1, Instant::now());
    while let Ok(stream) = tokio::time::timeout(
        Duration::from_secs(5).saturating_sub(start.elapsed()),
        broker.accept(),
    )
    .await
    {
        drop(stream);
        count += 1;
    }
    assert!(count <= 30, "{count} streams in 5 s");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_goodbye_restores_at_once_and_sets_the_pause() {
    let guest = Guest::paravirt(4);
    let mut broker = Broker::start(&guest, 7);
    let _agent = Agent::start(&guest);
    let mut stream = broker.accept().await;
    stream.hint(hint(7, 1, 1)).await;
    assert_eq!(stream.applied().await.preferred, "0");
    let goodbye = Instant::now();
    stream
        .say(Response::Goodbye(v1::Goodbye {
            reason: "test".to_owned(),
            retry_after_ms: 1500,
        }))
        .await;
    assert_eq!(stream.applied().await.outcome(), v1::Outcome::Restored);
    assert_eq!(guest.avoided(), "");
    drop(stream);
    broker.accept().await;
    assert!(goodbye.elapsed() >= Duration::from_millis(1500));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_goodbye_is_answered_though_there_is_nothing_to_restore() {
    let guest = Guest::paravirt(4);
    let mut broker = Broker::start(&guest, 7);
    let _agent = Agent::start(&guest);
    let mut stream = broker.accept().await;
    stream
        .say(Response::Goodbye(v1::Goodbye {
            reason: "test".to_owned(),
            retry_after_ms: 60_000,
        }))
        .await;
    assert_eq!(stream.applied().await.outcome(), v1::Outcome::Restored);
    assert!(stream.next().await.is_none(), "it has nothing more to say");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_the_broker_keeps_the_mask_and_the_new_one_is_followed() {
    let guest = Guest::paravirt(4);
    let mut broker = Broker::start(&guest, 7);
    let _agent = Agent::start(&guest);
    let mut stream = broker.accept().await;
    stream.hint(hint(7, 5, 2)).await;
    stream.applied().await;
    broker.stop();
    drop(stream);

    let mut broker = Broker::start(&guest, 8);
    let mut stream = broker.accept().await;
    assert_eq!(stream.hello.preferred, "0-1", "kept within the lease");
    assert_eq!(guest.avoided(), "2-3");
    stream.hint(hint(8, 1, 3)).await;
    let applied = stream.applied().await;
    assert_eq!((applied.epoch, applied.sequence), (8, 1));
    assert_eq!(applied.preferred, "0-2");
    assert_eq!(guest.avoided(), "3");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_stream_is_given_up_and_the_mask_kept() {
    let guest = Guest::paravirt(4);
    let mut broker = Broker::start_with(&guest, 7, Duration::from_secs(5));
    let _agent = Agent::start(&guest);
    let mut silent = broker.accept().await;
    silent.hint(hint(7, 1, 2)).await;
    silent.applied().await;
    let next = broker.accept().await;
    assert_eq!(next.hello.preferred, "0-1");
    assert_eq!(guest.avoided(), "2-3");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agent_gives_signs_of_life() {
    let guest = Guest::paravirt(4);
    let mut broker = Broker::start_with(&guest, 7, Duration::from_secs(8));
    let _agent = Agent::start(&guest);
    let mut stream = broker.accept().await;
    for _ in 0..3 {
        while !matches!(stream.next().await, Some(Request::Heartbeat(_))) {}
        stream.say(Response::Heartbeat(v1::Heartbeat {})).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_hints_change_nothing() {
    let guest = Guest::paravirt(4);
    let mut broker = Broker::start(&guest, 7);
    let _agent = Agent::start(&guest);
    let mut stream = broker.accept().await;
    stream.hint(hint(7, 5, 3)).await;
    assert_eq!(stream.applied().await.preferred, "0-2");
    stream.hint(hint(6, 6, 1)).await;
    stream.hint(hint(7, 4, 1)).await;
    for lease_ms in [0, 3_600_001] {
        stream
            .hint(v1::Hint {
                lease_ms,
                ..hint(7, 6, 1)
            })
            .await;
    }
    stream.hint(hint(7, 6, 2)).await;
    let applied = stream.applied().await;
    assert_eq!((applied.sequence, applied.preferred.as_str()), (6, "0-1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn advice_is_logged_and_ends_a_fold() {
    let guest = Guest::paravirt(4);
    let mut broker = Broker::start(&guest, 7);
    let _agent = Agent::start(&guest);
    let mut stream = broker.accept().await;
    let advice = |sequence| v1::Hint {
        mode: v1::Mode::Advise.into(),
        ..hint(7, sequence, 1)
    };
    stream.hint(advice(1)).await;
    let logged = stream.applied().await;
    assert_eq!(logged.outcome(), v1::Outcome::Logged);
    assert_eq!(logged.preferred, "0-3");
    assert_eq!(guest.avoided(), "");

    stream.hint(hint(7, 2, 1)).await;
    assert_eq!(stream.applied().await.preferred, "0");
    stream.hint(advice(3)).await;
    let restored = stream.applied().await;
    assert_eq!(restored.outcome(), v1::Outcome::Restored);
    assert_eq!((restored.sequence, restored.preferred.as_str()), (3, "0-3"));
    assert_eq!(guest.avoided(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_follows_cpus_that_come_and_go() {
    let guest = Guest::paravirt(4);
    let mut broker = Broker::start(&guest, 7);
    let _agent = Agent::start(&guest);
    let mut stream = broker.accept().await;
    stream.hint(hint(7, 1, 2)).await;
    assert_eq!(stream.applied().await.preferred, "0-1");
    guest.put(common::ONLINE, "0,2-5\n");
    stream.hint(hint(7, 1, 2)).await;
    let applied = stream.applied().await;
    assert_eq!(
        (applied.preferred.as_str(), applied.online.as_str()),
        ("0,2", "0,2-5")
    );
    assert_eq!(guest.avoided(), "3-5");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_kernel_refuses_is_told_and_tried_again() {
    let guest = Guest::paravirt(4);
    let mut broker = Broker::start(&guest, 7);
    let _agent = Agent::start(&guest);
    let mut stream = broker.accept().await;
    let file = guest.root().join(common::PARAVIRT);
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    stream.hint(hint(7, 1, 2)).await;
    let failed = stream.applied().await;
    assert_eq!(failed.outcome(), v1::Outcome::Failed);
    assert!(
        failed.error.contains("/sys/devices/system/cpu/paravirt"),
        "{}",
        failed.error
    );
    assert!(!guest.has_record());

    std::fs::remove_dir(&file).unwrap();
    guest.put(common::PARAVIRT, "\n");
    let start = Instant::now();
    while guest.avoided() != "2-3" {
        assert!(start.elapsed() < common::PATIENCE);
        stream.hint(hint(7, 1, 2)).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(stream.applied().await.outcome(), v1::Outcome::Applied);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_without_an_actuator_observes() {
    let guest = Guest::bare(4);
    let mut broker = Broker::start(&guest, 7);
    let mut agent = Agent::start(&guest);
    let mut stream = broker.accept().await;
    assert_eq!(stream.hello.actuator(), v1::Actuator::Observe);
    stream.hint(hint(7, 1, 2)).await;
    let logged = stream.applied().await;
    assert_eq!(logged.outcome(), v1::Outcome::Logged);
    assert_eq!(
        logged.preferred, "0-3",
        "what is in use, not what was asked for"
    );
    let preferred = guest.state().join("preferred");
    assert_eq!(std::fs::read_to_string(&preferred).unwrap(), "0-1\n");
    agent.signal(rustix::process::Signal::TERM);
    assert!(agent.ended().success());
    assert!(!preferred.exists());
}
