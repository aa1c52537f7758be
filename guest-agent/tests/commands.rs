//! What `status`, `probe` and `restore` print, and their exit status: the real program.

#![allow(clippy::unwrap_used)] // a panic is how a test fails, also in its helpers

mod common;

use std::fs;
use std::process::{Command, Output};

use common::{Agent, Broker, Guest, PROGRAM, hint};
use hint_proto::v1;
use serde_json::{Value, json};

fn call(guest: &Guest, args: &[&str]) -> (Option<i32>, String) {
    let Output { status, stdout, .. } = Command::new(PROGRAM)
        .args(args)
        .arg("--root")
        .arg(guest.root())
        .arg("--state-dir")
        .arg(guest.state())
        .output()
        .unwrap();
    (status.code(), String::from_utf8(stdout).unwrap())
}

fn call_json(guest: &Guest, command: &str) -> (Option<i32>, Value) {
    let (code, text) = call(guest, &[command, "--json"]);
    (code, serde_json::from_str(&text).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn status_tells_who_is_there_and_what_would_be_put_back() {
    let guest = Guest::paravirt(4);
    let (code, text) = call(&guest, &["status"]);
    assert_eq!(code, Some(3));
    assert_eq!(text, "agent: does not run\nstate: unfolded\nonline: 0-3\n");

    let mut broker = Broker::start(&guest, 7);
    let agent = Agent::start(&guest);
    let mut stream = broker.accept().await;
    assert_eq!(call_json(&guest, "status").1["state"], "unfolded");
    stream.hint(hint(7, 1, 2)).await;
    assert_eq!(stream.applied().await.outcome(), v1::Outcome::Applied);
    let (code, status) = call_json(&guest, "status");
    assert_eq!(code, Some(0));
    assert_eq!(
        status,
        json!({
            "running": true,
            "state": "folded",
            "actuator": "paravirt",
            "online": "0-3",
            "preferred": "0-1",
            "files": [{ "path": "/sys/devices/system/cpu/paravirt", "found": "", "now": "2-3" }],
        })
    );
    let record = fs::read(guest.state().join("restore.json")).unwrap();
    drop(agent);
    common::eventually("the guardian restores", || !guest.has_record());

    // What is left when the guardian was killed too.
    common::eventually("nobody has the lock", || {
        call(&guest, &["status"]).0 == Some(3)
    });
    guest.put(common::PARAVIRT, "2-3\n");
    fs::write(guest.state().join("restore.json"), record).unwrap();
    let (code, text) = call(&guest, &["status"]);
    assert_eq!(code, Some(4));
    assert!(text.contains("hint-agent restore"), "{text}");
    assert!(
        text.contains("paravirt: \"2-3\" now, \"\" to be put back"),
        "{text}"
    );
    let (code, restored) = call_json(&guest, "restore");
    assert_eq!(code, Some(0));
    assert_eq!(
        restored["files"],
        json!(["/sys/devices/system/cpu/paravirt"])
    );
    assert_eq!(restored["damaged"], Value::Null);

    fs::write(guest.state().join("restore.json"), "{").unwrap();
    let (code, status) = call_json(&guest, "status");
    assert_eq!((code, &status["state"]), (Some(4), &json!("damaged")));
    assert!(guest.has_record(), "status changes nothing");
}

#[test]
fn probe_names_the_actuator_and_why_not_the_others() {
    let guest = Guest::paravirt(4);
    guest.put("sys/devices/system/cpu/isolated", "3\n");
    let (code, survey) = call_json(&guest, "probe");
    assert_eq!(code, Some(0));
    assert_eq!(
        (&survey["online"], &survey["untouched"]),
        (&json!("0-3"), &json!("3"))
    );
    let actuators = survey["actuators"].as_array().unwrap();
    let names: Vec<_> = actuators
        .iter()
        .map(|one| one["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["paravirt", "cpuset", "observe"]);
    let used: Vec<_> = actuators.iter().map(|one| one["used"] == true).collect();
    assert_eq!(used, [true, false, false]);
    let pinned: Vec<_> = actuators
        .iter()
        .map(|one| one["pinned_tasks"].as_str().unwrap())
        .collect();
    assert_eq!(pinned, ["stay", "moved", "stay"]);
    assert_eq!(actuators[0]["why_not"], Value::Null);
    let why = actuators[1]["why_not"].as_str().unwrap();
    assert!(why.contains("/proc/self/mountinfo"), "{why}");

    let (code, text) = call(&guest, &["probe", "--actuator", "cpuset"]);
    assert_eq!(code, Some(4));
    assert!(text.contains("cpuset: does not work here"), "{text}");
    assert!(text.contains("3 are isolated"), "{text}");

    let (code, text) = call(&Guest::bare(2), &["probe"]);
    assert_eq!(code, Some(3));
    assert!(text.contains("observe: works, and would be used"), "{text}");
    assert!(text.contains("this kernel lacks"), "{text}");
}

#[test]
fn what_can_not_be_found_out_is_an_error() {
    let guest = Guest::bare(2);
    fs::remove_file(guest.root().join(common::ONLINE)).unwrap();
    assert_eq!(call(&guest, &["status"]).0, Some(1));
    assert_eq!(call(&guest, &["probe"]).0, Some(1));
    assert_eq!(call(&guest, &["status", "--nonsense"]).0, Some(2));
}

#[test]
fn a_configuration_that_is_refused_hides_no_record() {
    let guest = Guest::paravirt(4);
    guest.put(common::PARAVIRT, "2-3\n");
    fs::create_dir_all(guest.state()).unwrap();
    fs::write(guest.state().join("restore.json"), "{ damaged").unwrap();
    let config = guest.root().join("agent.toml");
    let call = |command: &str| {
        let Output { status, stderr, .. } = Command::new(PROGRAM)
            .args([command, "--root"])
            .arg(guest.root())
            .arg("--config")
            .arg(&config)
            .output()
            .unwrap();
        (status.code(), String::from_utf8(stderr).unwrap())
    };
    let state_dir = format!("state_dir = {:?}\n", guest.state());

    // No TOML: the record may be anywhere.
    fs::write(&config, format!("{state_dir}endpoint")).unwrap();
    for command in ["status", "restore"] {
        let (code, stderr) = call(command);
        assert_eq!(code, Some(1), "{stderr}");
        assert!(stderr.contains("--state-dir"), "{stderr}");
    }
    assert!(guest.has_record());
    // A key misspelt: what it says of the directory holds.
    fs::write(&config, format!("{state_dir}endpont = \"x\"\n")).unwrap();
    assert_eq!(call("status").0, Some(4));
    let (code, stderr) = call("restore");
    assert_eq!(code, Some(0), "{stderr}");
    assert!(!guest.has_record());
    assert_eq!(guest.avoided().trim(), "");
}
