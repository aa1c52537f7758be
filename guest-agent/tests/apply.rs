//! The contract that every actuator keeps, and what is special to each. The guardian is the real one.

#![allow(clippy::unwrap_used)] // a panic is how a test fails, also in its helpers

mod common;

use std::fs;
use std::time::Duration;

use common::Guest;
use common::fold::{fold, follow};
use common::kernel::{CGROUPS, Kernel};
use hint_agent::apply::{self, ApplyError, Choice};
use hint_agent::clock::Moment;
use hint_agent::fold::{Ask, Change, FoldError};
use hint_agent::restore::{RestoreError, StateDir, restore, restore_left_over};
use hint_proto::{CpuSet, v1};
use rustix::io::Errno;

const ERRNOS: [Errno; 5] = [
    Errno::INVAL,
    Errno::ACCESS,
    Errno::IO,
    Errno::NOSPC,
    Errno::RANGE,
];

const POSSIBLE: &str = "sys/devices/system/cpu/possible";

fn set(text: &str) -> CpuSet {
    text.parse().unwrap()
}

/// A guest with cgroup v2: three groups, the cpuset controller enabled or not.
fn cgroup_guest(cpus: u32, enabled: bool) -> (Guest, Kernel) {
    let guest = Guest::bare(cpus);
    guest.put(POSSIBLE, "0-15\n");
    guest.put(
        "proc/self/mountinfo",
        "25 1 0:22 / /sys rw - sysfs sysfs rw\n32 25 0:27 / /sys/fs/cgroup rw shared:10 - cgroup2 none rw\n",
    );
    let controllers = if enabled { "cpuset cpu\n" } else { "cpu\n" };
    guest.put(
        &format!("{CGROUPS}/cgroup.controllers"),
        "cpuset cpu io memory\n",
    );
    guest.put(&format!("{CGROUPS}/cgroup.subtree_control"), controllers);
    let kernel = Kernel::new(guest.root());
    for name in ["init.scope", "system.slice", "user.slice"] {
        kernel.add_group(name);
    }
    (guest, kernel)
}

fn paravirt_guest(cpus: u32) -> (Guest, Kernel) {
    let guest = Guest::paravirt(cpus);
    let kernel = Kernel::new(guest.root());
    (guest, kernel)
}

/// Gives every group a `cpuset.cpus` of its own.
fn own_masks(guest: &Guest) {
    for group in ["init.scope", "system.slice", "user.slice"] {
        guest.put(&cpus_of(group), "0-7\n");
    }
}

fn cpus_of(group: &str) -> String {
    format!("{CGROUPS}/{group}/cpuset.cpus")
}

/// Each kind of guest that the contract is kept on, with its actuator.
fn all() -> Vec<(&'static str, Guest, Kernel, Choice)> {
    let (paravirt, paravirt_kernel) = paravirt_guest(8);
    let (enabled, enabled_kernel) = cgroup_guest(8, true);
    own_masks(&enabled);
    let (disabled, disabled_kernel) = cgroup_guest(8, false);
    vec![
        ("paravirt", paravirt, paravirt_kernel, Choice::Paravirt),
        ("cpuset", enabled, enabled_kernel, Choice::Cpuset),
        (
            "cpuset, not enabled",
            disabled,
            disabled_kernel,
            Choice::Cpuset,
        ),
    ]
}

#[test]
fn the_mask_is_as_wished_and_afterwards_as_found() {
    for (name, guest, kernel, choice) in all() {
        let found = kernel.tree();
        let mut fold = fold(&guest, &kernel, choice);
        for usable in [3, 1, 6, 6] {
            follow(&mut fold, usable).unwrap();
            let wished: CpuSet = (0..usable).collect();
            assert_eq!(fold.current().unwrap(), wished, "{name}");
            assert!(guest.has_record(), "{name}");
        }
        assert_eq!(follow(&mut fold, 6).unwrap(), Change::None, "{name}");
        assert_eq!(follow(&mut fold, 8).unwrap(), Change::Unfolded, "{name}");
        assert_eq!(kernel.tree(), found, "{name}");
        assert!(!guest.has_record(), "{name}");
        assert!(fold.unfold(Moment::now()).unwrap().is_none(), "{name}");
    }
}

#[test]
fn a_mask_that_was_found_comes_back_byte_for_byte() {
    let (guest, kernel) = paravirt_guest(8);
    guest.put(common::PARAVIRT, "6-7\n");
    let mut paravirt = fold(&guest, &kernel, Choice::Auto);
    follow(&mut paravirt, 2).unwrap();
    assert_eq!(guest.avoided(), "2-7");
    follow(&mut paravirt, 8).unwrap();
    assert_eq!(guest.get(common::PARAVIRT), "6-7\n");

    let (guest, kernel) = cgroup_guest(8, true);
    guest.put(&cpus_of("user.slice"), "1-4\n");
    guest.put(
        &format!("{CGROUPS}/user.slice/cpuset.cpus.effective"),
        "1-4\n",
    );
    guest.put(&cpus_of("init.scope"), "0-7\n");
    guest.put(&cpus_of("system.slice"), "0-9\n");
    let found = kernel.tree();
    let mut cpuset = fold(&guest, &kernel, Choice::Auto);
    follow(&mut cpuset, 2).unwrap();
    assert_eq!(
        guest.get(&cpus_of("user.slice")),
        "1\n",
        "narrower stays narrower"
    );
    assert_eq!(guest.get(&cpus_of("system.slice")), "0-1\n");
    follow(&mut cpuset, 1).unwrap();
    assert_eq!(
        guest.get(&cpus_of("user.slice")),
        "1-4\n",
        "nothing of it is preferred"
    );
    assert_eq!(guest.get(&cpus_of("system.slice")), "0\n");
    assert_eq!(
        cpuset.current().unwrap(),
        set("0-4"),
        "what is really in use"
    );
    follow(&mut cpuset, 8).unwrap();
    assert_eq!(kernel.tree(), found);
}

#[test]
fn a_refused_write_changes_nothing_and_is_named() {
    for errno in ERRNOS {
        for (name, guest, kernel, choice) in all() {
            let mut fold = fold(&guest, &kernel, choice);
            // How many writes does this take?
            follow(&mut fold, 3).unwrap();
            let count = kernel.writes().len();
            follow(&mut fold, 8).unwrap();
            let found = kernel.tree();
            for nth in 1..=count {
                kernel.fail("", nth, errno);
                let error = follow(&mut fold, 3).unwrap_err();
                let (path, text) = kernel.writes()[nth - 1].clone();
                let FoldError::Apply(ApplyError::Write {
                    path: named,
                    text: written,
                    source,
                }) = error
                else {
                    panic!("{name}: {error}");
                };
                assert_eq!((named, written), (path, text.trim().to_owned()), "{name}");
                assert_eq!(source.raw_os_error(), Some(errno.raw_os_error()), "{name}");
                kernel.heal();
                assert_eq!(kernel.tree(), found, "{name}: write {nth}");
                assert!(!guest.has_record(), "{name}");
                assert!(!fold.is_folded(), "{name}");
            }
        }
    }
}

#[test]
fn a_write_that_is_refused_while_folded_keeps_that_fold() {
    for (name, guest, kernel, choice) in all() {
        let found = kernel.tree();
        let mut fold = fold(&guest, &kernel, choice);
        follow(&mut fold, 4).unwrap();
        let folded = kernel.tree();
        kernel.heal();
        follow(&mut fold, 2).unwrap();
        let count = kernel.writes().len();
        follow(&mut fold, 4).unwrap();
        for nth in 1..=count {
            kernel.fail("", nth, Errno::IO);
            follow(&mut fold, 2).unwrap_err();
            kernel.heal();
            assert_eq!(kernel.tree(), folded, "{name}: write {nth}");
            assert!(fold.is_folded() && guest.has_record(), "{name}");
            let preferred = fs::read_to_string(guest.state().join("preferred")).unwrap();
            assert_eq!(preferred, "0-3\n", "{name}");
        }
        // The record on disk is good for the guardian and for `hint-agent restore`, too.
        restore_left_over(&kernel, &StateDir::new(guest.state()))
            .unwrap()
            .unwrap();
        assert_eq!(kernel.tree(), found, "{name}");
    }
}

#[test]
fn when_the_undoing_fails_too_the_error_says_both_and_the_record_stays() {
    let (guest, kernel) = cgroup_guest(8, true);
    own_masks(&guest);
    let found = kernel.tree();
    let mut fold = fold(&guest, &kernel, Choice::Cpuset);
    // The second group refuses the fold, the first one refuses to be undone, and once more to be restored.
    kernel.fail("system.slice/cpuset.cpus", 1, Errno::NOSPC);
    kernel.fail_too("init.scope/cpuset.cpus", 2, Errno::IO);
    kernel.fail_too("init.scope/cpuset.cpus", 3, Errno::IO);
    let error = follow(&mut fold, 2).unwrap_err();
    let FoldError::Restore(RestoreError::Files(failed)) = &error else {
        panic!("{error}");
    };
    assert!(failed[0].0.ends_with("init.scope/cpuset.cpus"));
    assert!(guest.has_record() && fold.is_folded());
    kernel.heal();
    fold.unfold(Moment::now()).unwrap().expect("it was folded");
    assert_eq!(kernel.tree(), found);
    assert!(!guest.has_record());
}

#[test]
fn what_can_not_be_restored_is_tried_again_and_the_rest_is_back() {
    let (guest, kernel) = cgroup_guest(8, true);
    own_masks(&guest);
    let found = kernel.tree();
    let mut fold = fold(&guest, &kernel, Choice::Cpuset);
    follow(&mut fold, 2).unwrap();
    kernel.fail("init.scope/cpuset.cpus", 1, Errno::IO);
    let error = fold.unfold(Moment::now()).unwrap_err().to_string();
    assert!(
        error.contains("init.scope/cpuset.cpus") && error.contains("os error 5"),
        "{error}"
    );
    assert_eq!(guest.get(&cpus_of("system.slice")), "0-7\n");
    assert_eq!(guest.get(&cpus_of("init.scope")), "0-1\n");
    assert!(guest.has_record());
    fold.unfold(Moment::now()).unwrap().expect("still folded");
    assert_eq!(kernel.tree(), found);
}

#[test]
fn blank_groups_with_tasks_get_all_possible_cpus_which_is_the_same_mask() {
    let (guest, kernel) = cgroup_guest(8, true);
    guest.put(
        &format!("{CGROUPS}/init.scope/cgroup.events"),
        "populated 0\n",
    );
    let mut cpuset = fold(&guest, &kernel, Choice::Cpuset);
    for _ in 0..2 {
        follow(&mut cpuset, 2).unwrap();
        assert_eq!(guest.get(&cpus_of("system.slice")), "0-1\n");
        let record = StateDir::new(guest.state()).load().unwrap().unwrap();
        let restored = cpuset.unfold(Moment::now()).unwrap().unwrap();
        assert!(restored.left.is_empty());
        assert_eq!(
            guest.get(&cpus_of("init.scope")),
            "\n",
            "no tasks: blank again"
        );
        assert_eq!(guest.get(&cpus_of("system.slice")), "0-15\n");
        assert_eq!(cpuset.current().unwrap(), set("0-7"));
        // Once more, as a guardian would that was not released: nobody else's text is seen.
        let again = restore(&kernel, &StateDir::new(guest.state()), &record).unwrap();
        assert!(again.left.is_empty());
    }
}

#[test]
fn beside_a_partition_blank_groups_get_what_the_root_has_left() {
    let (guest, kernel) = cgroup_guest(8, true);
    guest.put(&format!("{CGROUPS}/cpuset.cpus.effective"), "0-5\n");
    let mut cpuset = fold(&guest, &kernel, Choice::Cpuset);
    follow(&mut cpuset, 2).unwrap();
    // The writes are the blank text, all possible CPUs, and what the root has left.
    kernel.fail("user.slice/cpuset.cpus", 2, Errno::INVAL);
    let restored = cpuset.unfold(Moment::now()).unwrap().unwrap();
    assert_eq!(guest.get(&cpus_of("system.slice")), "0-15\n");
    assert_eq!(guest.get(&cpus_of("user.slice")), "0-5\n");
    assert_eq!(restored.replaced.last().unwrap().1, "0-5");
}

#[test]
fn groups_that_come_and_go_while_folded() {
    let (guest, kernel) = cgroup_guest(8, true);
    let mut fold = fold(&guest, &kernel, Choice::Cpuset);
    follow(&mut fold, 2).unwrap();
    kernel.add_group("machine.slice");
    fs::remove_dir_all(guest.root().join(CGROUPS).join("user.slice")).unwrap();
    assert_eq!(follow(&mut fold, 2).unwrap(), Change::Applied);
    assert_eq!(guest.get(&cpus_of("machine.slice")), "0-1\n");
    assert_eq!(follow(&mut fold, 2).unwrap(), Change::None);
    fs::remove_dir_all(guest.root().join(CGROUPS).join("system.slice")).unwrap();
    let restored = fold.unfold(Moment::now()).unwrap().unwrap();
    assert!(restored.left.is_empty());
    assert_eq!(guest.get(&cpus_of("machine.slice")), "0-15\n");
    assert_eq!(guest.get(&cpus_of("init.scope")), "0-15\n");
}

#[test]
fn what_somebody_else_wrote_meanwhile_stays() {
    for enabled in [true, false] {
        let (guest, kernel) = cgroup_guest(8, enabled);
        let mut fold = fold(&guest, &kernel, Choice::Cpuset);
        follow(&mut fold, 2).unwrap();
        guest.put(&cpus_of("user.slice"), "5\n");
        assert_eq!(follow(&mut fold, 2).unwrap(), Change::None, "no fight");
        follow(&mut fold, 3).unwrap();
        assert_eq!(guest.get(&cpus_of("user.slice")), "5\n");
        assert_eq!(guest.get(&cpus_of("system.slice")), "0-2\n");
        let restored = fold.unfold(Moment::now()).unwrap().unwrap();
        assert!(restored.left[0].0.ends_with("user.slice/cpuset.cpus"));
        assert!(restored.left[0].1.contains("\"5\""));
        assert_eq!(guest.get(&cpus_of("user.slice")), "5\n");
        assert_eq!(guest.get(&cpus_of("system.slice")), "0-15\n");
        let control = guest.get(&format!("{CGROUPS}/cgroup.subtree_control"));
        assert_eq!(
            control, "cpuset cpu\n",
            "their setting needs the controller"
        );
    }
}

#[test]
fn a_controller_that_is_in_use_below_stays_enabled() {
    let (guest, kernel) = cgroup_guest(8, false);
    let mut fold = fold(&guest, &kernel, Choice::Cpuset);
    follow(&mut fold, 2).unwrap();
    kernel.fail("cgroup.subtree_control", 1, Errno::BUSY);
    let restored = fold.unfold(Moment::now()).unwrap().unwrap();
    assert!(restored.left[0].1.contains("uses the cpuset controller"));
    assert_eq!(guest.get(&cpus_of("system.slice")), "0-15\n");
    assert!(!guest.has_record());
}

#[test]
fn threaded_groups_and_partitions_are_left_alone() {
    let (guest, kernel) = cgroup_guest(8, true);
    guest.put(&format!("{CGROUPS}/init.scope/cgroup.type"), "threaded\n");
    guest.put(
        &format!("{CGROUPS}/user.slice/cpuset.cpus.partition"),
        "root\n",
    );
    guest.put(&cpus_of("user.slice"), "6-7\n");
    guest.put(
        &format!("{CGROUPS}/system.slice/cgroup.type"),
        "domain threaded\n",
    );
    let mut fold = fold(&guest, &kernel, Choice::Cpuset);
    follow(&mut fold, 2).unwrap();
    assert_eq!(guest.get(&cpus_of("init.scope")), "\n");
    assert_eq!(guest.get(&cpus_of("user.slice")), "6-7\n");
    assert_eq!(guest.get(&cpus_of("system.slice")), "0-1\n");
}

#[test]
fn a_mask_that_became_impossible_is_cleared() {
    let (guest, kernel) = paravirt_guest(4);
    guest.put(common::PARAVIRT, "0-2\n");
    let mut fold = fold(&guest, &kernel, Choice::Paravirt);
    guest.put(common::ONLINE, "0-2\n");
    follow(&mut fold, 1).unwrap();
    assert_eq!(guest.avoided(), "1-2");
    let restored = fold.unfold(Moment::now()).unwrap().unwrap();
    assert_eq!(guest.avoided(), "");
    assert_eq!(restored.replaced.len(), 1);
    assert_eq!(restored.replaced[0].1, "");
}

#[test]
fn a_cpu_that_the_kernel_took_out_of_the_mask_is_avoided_again_when_it_is_back() {
    let (guest, kernel) = paravirt_guest(4);
    let mut fold = fold(&guest, &kernel, Choice::Paravirt);
    follow(&mut fold, 1).unwrap();
    assert_eq!(guest.avoided(), "1-3");
    // CPU 2 goes offline and comes back before the next renewal.
    guest.put(common::PARAVIRT, "1,3\n");
    assert_eq!(follow(&mut fold, 1).unwrap(), Change::Applied);
    assert_eq!(guest.avoided(), "1-3");
    // All but one go: nothing would be left to prefer, so the kernel has cleared the mask.
    guest.put(common::ONLINE, "0\n");
    guest.put(common::PARAVIRT, "\n");
    assert_eq!(follow(&mut fold, 1).unwrap(), Change::Unfolded);
    assert_eq!(guest.avoided(), "");
}

#[test]
fn actuators_are_probed_in_order_and_say_why_not() {
    let (guest, kernel) = cgroup_guest(4, false);
    let probed = apply::probe(&kernel, Choice::Auto, false).unwrap();
    assert_eq!(probed.actuator.name(), "cpuset");
    assert_eq!(probed.actuator.pinned_tasks(), v1::PinnedTasks::Moved);
    assert!(probed.rejected[0].1.contains("paravirt is missing"));

    guest.put(common::PARAVIRT, "\n");
    let probed = apply::probe(&kernel, Choice::Auto, false).unwrap();
    assert_eq!(probed.actuator.name(), "paravirt");
    assert_eq!(probed.actuator.pinned_tasks(), v1::PinnedTasks::Stay);
    kernel.fail("paravirt", 0, Errno::ACCESS);
    let probed = apply::probe(&kernel, Choice::Auto, false).unwrap();
    assert_eq!(probed.actuator.name(), "cpuset");
    assert!(probed.rejected[0].1.contains("not writable"));

    guest.put("proc/sys/kernel/osrelease", "6.1.0-13-amd64\n");
    let probed = apply::probe(&kernel, Choice::Auto, false).unwrap();
    assert_eq!(probed.actuator.name(), "observe");
    assert!(probed.rejected[1].1.contains("6.1.0-13-amd64"));
    let probed = apply::probe(&kernel, Choice::Auto, true).unwrap();
    assert_eq!(probed.actuator.name(), "cpuset", "the operator accepts it");

    guest.put("proc/sys/kernel/osrelease", "6.12.0\n");
    guest.put("sys/devices/system/cpu/isolated", "3\n");
    let error = apply::probe(&kernel, Choice::Cpuset, false)
        .unwrap_err()
        .to_string();
    assert!(error.contains("CPUs 3 are isolated"), "{error}");

    guest.put("sys/devices/system/cpu/isolated", "\n");
    guest.put(&format!("{CGROUPS}/cgroup.controllers"), "cpu io\n");
    let error = apply::probe(&kernel, Choice::Cpuset, false)
        .unwrap_err()
        .to_string();
    assert!(error.contains("lacks cpuset"), "{error}");
}

#[test]
fn without_knowing_what_was_found_every_mask_is_opened() {
    let (guest, kernel) = cgroup_guest(8, true);
    guest.put(common::PARAVIRT, "4-7\n");
    guest.put(&cpus_of("init.scope"), "0-3\n");
    guest.put(&cpus_of("system.slice"), "0-3\n");
    guest.put(
        &format!("{CGROUPS}/system.slice/cgroup.events"),
        "populated 0\n",
    );
    kernel.add_group("partition");
    guest.put(&cpus_of("partition"), "5\n");
    guest.put(
        &format!("{CGROUPS}/partition/cpuset.cpus.partition"),
        "root\n",
    );
    fs::create_dir_all(guest.state()).unwrap();
    fs::write(guest.state().join("restore.json"), "junk").unwrap();
    let state = StateDir::new(guest.state());

    // A mask that can't be opened: the others are, and the record stays for another try.
    kernel.fail("paravirt", 1, Errno::IO);
    let error = restore_left_over(&kernel, &state).unwrap_err();
    assert!(matches!(&error, RestoreError::Files(failed) if failed.len() == 1));
    assert!(guest.has_record());
    kernel.heal();
    let restored = restore_left_over(&kernel, &state).unwrap().unwrap();
    assert_eq!(
        restored.damaged,
        Some(guest.state().join("restore.json.damaged"))
    );
    assert_eq!(guest.get(common::PARAVIRT), "\n");
    assert_eq!(guest.get(&cpus_of("init.scope")), "0-15\n", "it has tasks");
    assert_eq!(guest.get(&cpus_of("system.slice")), "\n");
    assert_eq!(guest.get(&cpus_of("user.slice")), "\n");
    assert_eq!(guest.get(&cpus_of("partition")), "5\n");
    assert_eq!(restore_left_over(&kernel, &state).unwrap(), None);
}

#[test]
fn cpus_that_go_between_the_choice_and_the_write_are_chosen_without() {
    let (guest, kernel) = paravirt_guest(4);
    let mut fold = fold(&guest, &kernel, Choice::Paravirt);
    // Of 0-3, 1-3 would be avoided; with 1 and 3 gone that is more than there are.
    kernel.online_at_next_write("0,2\n");
    assert_eq!(follow(&mut fold, 1).unwrap(), Change::Applied);
    assert_eq!(guest.avoided(), "2");
    kernel.online_at_next_write("0\n");
    guest.put(common::ONLINE, "0-3\n");
    assert_eq!(
        follow(&mut fold, 2).unwrap(),
        Change::Unfolded,
        "one is left"
    );
    assert_eq!(guest.avoided(), "");
}

#[test]
fn nothing_is_written_beside_the_kernels_own_governor() {
    for (name, guest, kernel, choice) in all() {
        let mut fold = fold(&guest, &kernel, choice);
        follow(&mut fold, 2).unwrap();
        follow(&mut fold, 8).unwrap();
        // The module is loaded while the agent runs.
        guest.put("sys/module/steal_governor/refcnt", "0\n");
        let found = kernel.tree();
        kernel.heal();
        let error = follow(&mut fold, 2).unwrap_err();
        assert!(matches!(error, FoldError::Governor), "{name}");
        assert!(error.to_string().contains("modprobe -r steal_governor"));
        assert!(kernel.writes().is_empty() && !guest.has_record(), "{name}");
        assert_eq!(kernel.tree(), found, "{name}");
        let probed = apply::probe(&kernel, Choice::Auto, false).unwrap();
        assert_eq!(probed.actuator.name(), "observe", "{name}");
        assert!(
            probed
                .rejected
                .iter()
                .all(|(_, why)| why.contains("steal_governor"))
        );
        guest.put("sys/module/steal_governor/parameters/enabled", "N\n");
        follow(&mut fold, 2).unwrap();
        fold.unfold(Moment::now()).unwrap().unwrap();
    }
}

#[test]
fn observe_applies_nothing_and_tells_other_programs() {
    let guest = Guest::bare(4);
    let kernel = Kernel::new(guest.root());
    let mut fold = fold(&guest, &kernel, Choice::Observe);
    let ask = Ask {
        usable: 2,
        vcpus: 4,
        ..Ask::default()
    };
    let now = Moment::now();
    fold.follow(&ask, now + Duration::from_secs(120), now)
        .unwrap();
    assert!(kernel.writes().is_empty());
    let read = |name: &str| fs::read_to_string(guest.state().join(name)).unwrap();
    assert_eq!(read("preferred"), "0-1\n");
    assert_eq!(
        read("hint.json"),
        "{\"usable\":2,\"vcpus\":4,\"actuator\":\"observe\",\"preferred\":\"0-1\",\"online\":\"0-3\"}\n"
    );
    fold.unfold(now).unwrap().unwrap();
    assert!(!guest.state().join("preferred").exists() && !guest.state().join("hint.json").exists());
}
