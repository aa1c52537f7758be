//! The harness itself, with real guests.

use lab::skip::{self, Need};
use lab::{Guest, GuestSpec, lock};

#[test]
fn a_guest_boots_and_runs_commands() {
    if !skip::can_run("a_guest_boots_and_runs_commands", &[Need::Guests]) {
        return;
    }
    let _cores = lock::cores().unwrap();
    let guest = Guest::boot(&GuestSpec::named("one")).unwrap();
    println!("boot: {:?}", guest.boot_time());
    println!(
        "{}",
        guest
            .sh("uname -a; cat /proc/loadavg; ps; dmesg | tail -3")
            .unwrap()
    );
    assert_eq!(guest.online().unwrap().to_string(), "0-3");
}
