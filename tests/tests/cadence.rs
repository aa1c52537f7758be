//! The pace of a real broker on a quiet host and a busy one: a guest, since this machine may not be quiet.

#![allow(
    clippy::unwrap_used,
    reason = "clippy exempts test functions but not the helpers of a test file"
)]

use std::time::{Duration, Instant};

use lab::skip::{self, Need};
use lab::{Guest, GuestSpec, assets, initramfs, lock};

const SOON: Duration = Duration::from_secs(180);
/// Ticks are counted for so long by the guest's clock.
const WINDOW: f64 = 4.0;

const START: &str = r#"
mkdir -p /run/hint-broker
printf '[channel]\nvsock = false\n' >/run/broker.toml
hint-broker run --config /run/broker.toml >/run/broker.log 2>&1 </dev/null &
"#;

/// Ticks of the broker so far, and the guest's clock in seconds.
fn ticks(guest: &Guest) -> Option<(f64, f64)> {
    let said = guest
        .run("wget -q -O - http://127.0.0.1:9737/metrics | grep ^hint_broker_ticks_total; cat /proc/uptime")
        .unwrap()
        .text();
    let number = |line: &str, at: usize| line.split(' ').nth(at)?.parse().ok();
    let (first, second) = said.split_once('\n')?;
    Some((number(first, 1)?, number(second, 0)?))
}

/// Counts until ticks come at a pace within this range, a second.
fn pace_until(guest: &Guest, wanted: std::ops::RangeInclusive<f64>) {
    let end = Instant::now() + SOON;
    let mut before = None;
    let mut seen = Vec::new();
    loop {
        if let Some((count, at)) = ticks(guest) {
            let (old, from) = *before.get_or_insert((count, at));
            if at - from >= WINDOW {
                let pace = (count - old) / (at - from);
                seen.push(format!("{pace:.1}"));
                if wanted.contains(&pace) {
                    println!("ticks a second: {seen:?}");
                    return;
                }
                before = Some((count, at));
            }
        }
        assert!(
            Instant::now() < end,
            "ticks a second: {seen:?}, not {wanted:?}\n{}",
            guest.sh("cat /run/broker.log").unwrap()
        );
        std::thread::sleep(Duration::from_millis(500));
    }
}

#[test]
fn a_quiet_host_is_looked_at_seldom_and_a_busy_one_often() {
    let test = "a_quiet_host_is_looked_at_seldom_and_a_busy_one_often";
    if !skip::can_run(test, &[Need::Guests]) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let broker = folder.path().join("hint-broker");
    initramfs::strip(&assets::broker().unwrap(), &broker).unwrap();
    let guest = Guest::boot(&GuestSpec {
        vcpus: 2,
        programs: vec![broker.display().to_string()],
        kernel_args: vec!["psi=1".to_owned()],
        ..GuestSpec::named("cadence")
    })
    .unwrap();
    guest.sh(START).unwrap();
    pace_until(&guest, 0.5..=1.6);
    let work = guest.spawn_spinners(4).unwrap();
    pace_until(&guest, 4.0..=10.5);
    guest.kill_work(work).unwrap();
    pace_until(&guest, 0.5..=1.6);
}
