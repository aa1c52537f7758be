//! The simulator against what is known of real kernels, and the governor in the simulator against its bounds.

use lab::sim::clock::{MS, SEC, seconds};
use lab::sim::mask::Mask;
use lab::sim::{Load, World};

/// Run and run delay of each VM over the second half, in CPUs, and its useful work.
fn rates(world: &mut World, vms: usize, length: f64) -> Vec<(f64, f64, f64)> {
    let length = lab::sim::clock::nanos(length);
    world.run_until(length / 2);
    let totals = |world: &World, vm: usize| {
        let vcpus = 0..world.vcpus(vm);
        let times: Vec<_> = vcpus.map(|vcpu| world.vcpu_times(vm, vcpu)).collect();
        [
            times.iter().map(|times| times.run).sum::<u64>(),
            times.iter().map(|times| times.run_delay).sum(),
            world.used(vm).work,
        ]
    };
    let before: Vec<[u64; 3]> = (0..vms).map(|vm| totals(world, vm)).collect();
    world.run_until(length);
    let cpus = |time: u64| seconds(time) / seconds(length / 2);
    before
        .iter()
        .enumerate()
        .map(|(vm, before)| {
            let now = totals(world, vm);
            (
                cpus(now[0] - before[0]),
                cpus(now[1] - before[1]),
                cpus(now[2] - before[2]),
            )
        })
        .collect()
}

fn spinners(threads: usize) -> Load {
    Load::Cpu {
        threads,
        pinned: false,
    }
}

fn near(found: f64, wanted: f64, tolerance: f64) -> bool {
    (found - wanted).abs() <= tolerance
}

/// What the development machine's kernel (6.18, two pCPUs) did with groups of spinning threads.
#[test]
fn groups_of_spinners_run_as_on_a_real_kernel() {
    let cases = [
        ([(1, 100.0), (2, 100.0)], [(1.0, 0.0), (1.0, 1.0)]),
        ([(1, 100.0), (4, 100.0)], [(1.0, 0.0), (1.0, 3.0)]),
        ([(2, 300.0), (4, 100.0)], [(1.5, 0.5), (0.5, 3.5)]),
    ];
    for (groups, wanted) in cases {
        let mut world = World::new(2, 1);
        for (threads, weight) in groups {
            let group = world.add_group(0, weight, None);
            let vm = world.add_vm(group, threads, Mask::first(2));
            world.set_load(vm, &spinners(threads));
        }
        let found = rates(&mut world, 2, 20.0);
        println!("{groups:?}: {found:.2?}");
        for (found, wanted) in found.iter().zip(wanted) {
            assert!(
                near(found.0, wanted.0, 0.05) && near(found.1, wanted.1, 0.1),
                "{groups:?}: {found:.2?}, not {wanted:?}"
            );
        }
    }
}

/// Three spinners on two pCPUs: on that kernel each ran 0.65 to 0.68 of 15 s, and 0.49 to 0.83 of each half second.
#[test]
fn threads_that_do_not_divide_evenly_take_turns() {
    let mut world = World::new(2, 1);
    for _ in 0..3 {
        let group = world.add_group(0, 100.0, None);
        let vm = world.add_vm(group, 1, Mask::first(2));
        world.set_load(vm, &spinners(1));
    }
    let mut before = [0; 3];
    for half in 1..=30 {
        world.run_until(half * SEC / 2);
        for (vm, before) in before.iter_mut().enumerate() {
            let run = world.vcpu_times(vm, 0).run;
            let part = seconds(run - *before) / 0.5;
            assert!((0.4..=0.9).contains(&part), "VM {vm} ran {part}");
            *before = run;
        }
    }
    for run in before {
        assert!(near(seconds(run) / 15.0, 0.667, 0.04), "{before:?}");
    }
}

#[test]
fn a_quota_shows_as_run_delay() {
    let mut world = World::new(4, 1);
    let group = world.add_group(0, 100.0, Some((100 * MS, 100 * MS)));
    let vm = world.add_vm(group, 4, Mask::first(4));
    world.set_load(vm, &spinners(4));
    let found = rates(&mut world, 1, 20.0)[0];
    println!("{found:.3?}");
    assert!(
        near(found.0, 1.0, 0.02) && near(found.1, 3.0, 0.05),
        "{found:?}"
    );
}

/// Useful work of two VMs of four vCPUs on two pCPUs, with so many in use.
fn two_guests(load: &Load, usable: usize) -> f64 {
    let mut world = World::new(2, 1);
    for _ in 0..2 {
        let group = world.add_group(0, 100.0, None);
        let vm = world.add_vm(group, 4, Mask::first(2));
        world.set_load(vm, load);
        world.set_usable(vm, usable);
    }
    let start = std::time::Instant::now();
    let found = rates(&mut world, 2, 20.0);
    println!(
        "{usable} usable: {found:.2?}, used {:?}, {} looks in {:?}",
        world.used(0),
        world.looked_at(),
        start.elapsed()
    );
    found.iter().map(|vm| vm.2).sum()
}

#[test]
fn folding_is_worth_what_it_is_worth_in_the_lab() {
    for (groups, work_us, lock_us) in [
        (1, 240.0, 60.0),
        (2, 240.0, 60.0),
        (4, 240.0, 60.0),
        (2, 200.0, 100.0),
        (2, 120.0, 30.0),
        (2, 100.0, 50.0),
    ] {
        let load = Load::Hackbench {
            groups,
            pairs: 4,
            work_us,
            lock_us,
        };
        let (unfolded, half, folded) = (
            two_guests(&load, 4),
            two_guests(&load, 2),
            two_guests(&load, 1),
        );
        println!(
            "{groups} {work_us} {lock_us} groups: x{:.2} x{:.2}",
            half / unfolded,
            folded / unfolded
        );
    }
}

#[test]
fn folding_speeds_up_no_plain_computing() {
    let load = spinners(4);
    let gain = two_guests(&load, 1) / two_guests(&load, 4);
    println!("{gain}");
    assert!(near(gain, 1.0, 0.02), "{gain}");
}

#[test]
fn a_second_is_a_second() {
    let mut world = World::new(2, 1);
    world.run_until(SEC);
    assert_eq!(world.host().idle_time(0), SEC);
}
