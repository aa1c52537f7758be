//! What a guest can have the broker log. In a process of its own: the log is the process's.
#![allow(clippy::unwrap_used)] // helpers of tests are tests too

mod common;

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use common::{Guest, channel, door, hello, until, vm_in};
use hint_broker::publish::{ChannelSettings, Publisher};
use hint_proto::v1;
use hint_proto::v1::session_request::Message as Said;
use hint_proto::v1::session_response::Message;

#[tokio::test]
async fn a_guest_that_comes_and_goes_fills_no_log() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(Arc::new(fs::File::create(&log).unwrap()))
        .init();
    let settings = ChannelSettings {
        vsock: false,
        deadline: Duration::from_secs(20),
        lease: Duration::from_secs(20),
        ..ChannelSettings::default()
    };
    let publisher = Publisher::start(settings, 42).unwrap();
    publisher.set_vms(&[vm_in(dir.path(), 10)]);
    for _ in 0..20 {
        let hello = v1::Hello {
            online: "0-8190:1/2".to_owned(),
            ..hello()
        };
        let channel = channel(&door(dir.path(), 10)).await;
        let mut guest = Guest::open(channel, Said::Hello(hello)).await.unwrap();
        assert!(matches!(guest.next().await, Ok(Some(Message::Welcome(_)))));
    }
    until("all have left", || {
        publisher.agents().is_empty().then_some(())
    })
    .await;
    let text = fs::read_to_string(&log).unwrap();
    // Five at once and five a minute; a slow machine may take some seconds.
    let lines = text.lines().filter(|line| line.contains("vm=10-")).count();
    assert!((1..=8).contains(&lines), "{lines} lines: {text}");
    assert!(text.len() < 8 * 1024, "{} bytes", text.len());
}
