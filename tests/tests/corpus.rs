//! The corpus of each fuzz target goes through the target's function, on any toolchain. `make fuzz` looks for more.

#![allow(
    clippy::unwrap_used,
    reason = "clippy exempts test functions but not the helpers of a test file"
)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// All targets of all crates.
fn targets() -> impl Iterator<Item = (&'static str, fn(&[u8]))> {
    let all = [
        hint_agent::fuzz::TARGETS,
        hint_broker::fuzz::TARGETS,
        hint_proto::fuzz::TARGETS,
        lab::fuzz::TARGETS,
    ];
    all.into_iter().flatten().copied()
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz")
        .join(name)
}

/// Names in a folder, without what follows a dot.
fn names(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).unwrap();
    let name = |path: PathBuf| path.file_stem().unwrap().to_str().unwrap().to_owned();
    entries.map(|entry| name(entry.unwrap().path())).collect()
}

#[test]
fn every_target_has_a_corpus_and_a_program() {
    let wanted: BTreeSet<String> = targets().map(|(name, _)| name.to_owned()).collect();
    assert_eq!(names(&folder("corpus")), wanted);
    assert_eq!(names(&folder("fuzz_targets")), wanted);
}

#[test]
fn the_corpus_breaks_no_promise() {
    for (name, target) in targets() {
        let mut count = 0;
        for entry in fs::read_dir(folder("corpus").join(name)).unwrap() {
            let path = entry.unwrap().path();
            let bytes = fs::read(&path).unwrap();
            println!("{}", path.display());
            target(&bytes);
            count += 1;
        }
        assert!(count > 0, "{name} has an empty corpus");
        target(b"");
    }
}

#[test]
fn a_list_of_all_numbers_costs_nothing() {
    for text in [
        "0-4294967295",
        "0-18446744073709551615:1/1",
        "4294967295,0-8191",
    ] {
        for (name, target) in targets() {
            println!("{name} {text}");
            target(text.as_bytes());
            target(format!("Cpus_allowed_list:\t{text}\n").as_bytes());
        }
    }
}
