//! Reads that fail, at any moment and in any way: nothing panics, and the mask is back when the kernel answers again.

#![allow(clippy::unwrap_used)] // a panic is how a test fails, also in its helpers

mod common;

use std::cell::RefCell;
use std::io;
use std::path::Path;
use std::rc::Rc;

use common::Guest;
use common::fold::{fold, follow};
use common::kernel::{CGROUPS, Kernel};
use hint_agent::apply::{self, Choice};
use hint_agent::clock::Moment;
use hint_agent::files::Files;
use hint_agent::fold::Fold;
use rustix::io::Errno;

/// What a read can meet.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Error(Errno),
    Garbage,
    Half,
}

/// What a file that is there and stays there can do.
const REFUSED: &[Fault] = &[
    Fault::Error(Errno::ACCESS),
    Fault::Error(Errno::OPNOTSUPP),
    Fault::Error(Errno::SRCH),
    Fault::Error(Errno::IO),
];

/// And what no kernel does with one.
const ALL: &[Fault] = &[
    Fault::Error(Errno::NOENT),
    Fault::Error(Errno::NODEV),
    Fault::Error(Errno::SRCH),
    Fault::Error(Errno::ACCESS),
    Fault::Garbage,
    Fault::Half,
];

/// What is drawn, and from what.
type Drawn = (fastrand::Rng, &'static [Fault]);

/// The kernel's files, of which one read in four meets one of the faults.
#[derive(Debug, Clone)]
struct Faulty {
    kernel: Kernel,
    faults: Rc<RefCell<Option<Drawn>>>,
}

impl Faulty {
    fn draw(&self) -> Option<Fault> {
        let mut faults = self.faults.borrow_mut();
        let (draw, faults) = faults.as_mut()?;
        draw.u8(..)
            .is_multiple_of(4)
            .then(|| faults[draw.usize(..faults.len())])
    }
}

impl Files for Faulty {
    fn read(&self, path: &Path) -> io::Result<String> {
        let fault = self.draw();
        if let Some(Fault::Error(errno)) = fault {
            return Err(errno.into());
        }
        let text = self.kernel.read(path)?;
        Ok(match fault {
            Some(Fault::Garbage) => "\u{fffd},-:/ (null) 99999999999999999999 \n\0".to_owned(),
            Some(Fault::Half) => text[..text.len() / 2].to_owned(),
            _ => text,
        })
    }

    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        self.kernel.write(path, text)
    }

    fn writable(&self, path: &Path) -> io::Result<()> {
        self.kernel.writable(path)
    }

    fn directories(&self, path: &Path) -> io::Result<Vec<String>> {
        match self.draw() {
            Some(Fault::Error(errno)) => Err(errno.into()),
            _ => self.kernel.directories(path),
        }
    }
}

/// A guest with each of the actuators that write.
fn guests() -> Vec<(Guest, Choice)> {
    let cgroups = Guest::bare(8);
    cgroups.put("sys/devices/system/cpu/possible", "0-15\n");
    cgroups.put(
        "proc/self/mountinfo",
        "32 25 0:27 / /sys/fs/cgroup rw shared:10 - cgroup2 none rw\n",
    );
    cgroups.put(&format!("{CGROUPS}/cgroup.controllers"), "cpuset cpu\n");
    cgroups.put(&format!("{CGROUPS}/cgroup.subtree_control"), "cpuset cpu\n");
    let kernel = Kernel::new(cgroups.root());
    for group in ["system.slice", "user.slice"] {
        kernel.add_group(group);
        cgroups.put(&format!("{CGROUPS}/{group}/cpuset.cpus"), "0-7\n");
    }
    let paravirt = Guest::paravirt(8);
    paravirt.put(common::PARAVIRT, "7\n");
    vec![(cgroups, Choice::Cpuset), (paravirt, Choice::Paravirt)]
}

/// Folds and unfolds while reads fail; then they don't any more, and the end of the fold is as given.
fn under(faults: &'static [Fault], seed: u64, check: impl Fn(&mut Fold, &Guest)) {
    for (guest, choice) in guests() {
        let files = Faulty {
            kernel: Kernel::new(guest.root()),
            faults: Rc::default(),
        };
        let mut fold = fold(&guest, &files, choice);
        *files.faults.borrow_mut() = Some((fastrand::Rng::with_seed(seed), faults));
        for usable in [3, 1, 6, 2, 8, 3, 5] {
            let _ = follow(&mut fold, usable);
            let _ = (fold.current(), fold.hello(), fold.topology().cloned());
            let _ = apply::probe(&files, Choice::Auto, false);
        }
        *files.faults.borrow_mut() = None;
        check(&mut fold, &guest);
    }
}

#[test]
fn files_that_are_refused_for_a_while_come_back_as_they_were_found() {
    for seed in 0..12 {
        let found: Vec<_> = guests()
            .into_iter()
            .map(|(guest, _)| texts(&guest))
            .collect();
        under(REFUSED, seed, |fold, guest| {
            fold.unfold(Moment::now()).unwrap();
            assert!(found.contains(&texts(guest)), "{seed}: {:?}", texts(guest));
            assert!(!guest.has_record(), "{seed}");
        });
    }
}

#[test]
fn whatever_a_read_gives_nothing_panics_and_a_fold_can_be_ended() {
    for seed in 0..12 {
        under(ALL, seed, |fold, _| {
            fold.unfold(Moment::now()).unwrap();
            assert!(!fold.is_folded(), "{seed}");
        });
    }
}

/// The files that an actuator writes, with their texts.
fn texts(guest: &Guest) -> Vec<(String, String)> {
    let root = guest.root();
    let kernel = Kernel::new(&root);
    let tree = kernel.tree().into_iter();
    let relative = tree.map(|(path, text)| {
        let path = path.strip_prefix(&root).unwrap().display().to_string();
        (path, text)
    });
    relative
        .filter(|(path, _)| {
            path.ends_with("cpuset.cpus")
                || path.ends_with("subtree_control")
                || path == common::PARAVIRT
        })
        .collect()
}
