//! `hint-broker doctor` as a program: what it prints, and its exit codes.

#![allow(
    clippy::unwrap_used,
    reason = "clippy exempts test functions but not the helpers of a test file"
)]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn doctor(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hint-broker"))
        .arg("doctor")
        .args(arguments)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_host_that_shows_nothing_is_unsafe() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().display().to_string();
    let said = doctor(&["--root", &root]);
    assert_eq!(said.status.code(), Some(2), "{said:?}");
    let shown = text(&said.stdout);
    assert!(
        shown.contains("bad      proc") && shown.contains("to do:"),
        "{shown}"
    );
    assert!(
        shown.ends_with("do not enforce before what is bad has been mended\n"),
        "{shown}"
    );

    let said = doctor(&["--json", "--root", &root]);
    assert_eq!(said.status.code(), Some(2), "{said:?}");
    let value: Value = serde_json::from_slice(&said.stdout).unwrap();
    assert_eq!(value["enforce_is_safe"], false);
}

#[test]
fn the_exit_code_says_what_is_printed() {
    let said = doctor(&["--json"]);
    let value: Value = serde_json::from_slice(&said.stdout).unwrap();
    let safe = value["enforce_is_safe"].as_bool().unwrap();
    assert_eq!(
        said.status.code(),
        Some(if safe { 0 } else { 2 }),
        "{value}"
    );
    let findings = value["findings"].as_array().unwrap();
    let bad = findings.iter().any(|finding| finding["weight"] == "bad");
    assert_eq!(safe, !bad, "{value}");
    // Whatever this machine is like: its pCPUs are counted, and its threads' times kept.
    let found = |probe: &str| findings.iter().any(|finding| finding["probe"] == probe);
    assert!(found("proc") && found("groups") | found("vms"), "{value}");
}

#[test]
fn a_configuration_that_is_refused_is_no_diagnosis() {
    let missing = Path::new("/nowhere/broker.toml").display().to_string();
    let said = doctor(&["--config", &missing]);
    assert_eq!(said.status.code(), Some(1), "{said:?}");
    assert!(text(&said.stderr).contains(&missing), "{said:?}");
    assert_eq!(text(&said.stdout), "");
}
