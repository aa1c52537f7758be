//! `deploy/hint-broker.toml` is what people copy: it must hold the defaults, every one of them.

use std::path::PathBuf;

use hint_broker::config::{Config, VmPolicy};

fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../deploy/hint-broker.toml")
}

/// Takes the `#` off keys and section heads; what a blank follows is prose.
fn uncommented(text: &str) -> String {
    let key = |line: &&str| {
        line.strip_prefix('#').is_some_and(|rest| {
            rest.starts_with(|first: char| first.is_alphabetic() || first == '[')
        })
    };
    text.lines()
        .map(|line| if key(&line) { &line[1..] } else { line })
        .collect::<Vec<_>>()
        .join("\n")
}

/// The keys of a section, by the parser's own list of what it expected instead of `wrong`.
fn keys(section: &str) -> Vec<String> {
    let error = Config::parse(&format!("{section}\nwrong = 1\n"), &path())
        .expect_err("no section has a key of this name")
        .to_string();
    let (_, expected) = error
        .split_once(", expected ")
        .expect("the parser tells the keys that it knows");
    expected
        .split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_example_as_it_is_changes_nothing() {
    assert_eq!(Config::load(Some(&path())).unwrap(), Config::default());
}

#[test]
fn the_example_uncommented_holds_the_defaults() {
    let text = uncommented(&std::fs::read_to_string(path()).unwrap());
    let mut config = Config::parse(&text, &path()).unwrap();
    let vms = std::mem::take(&mut config.vms);
    assert!(
        config.record.path.take().is_some(),
        "an example, since nothing is recorded by default"
    );
    assert_eq!(config, Config::default());
    let [vm] = <[VmPolicy; 1]>::try_from(vms).unwrap();
    let examples = VmPolicy {
        name: None,
        uuid: None,
        weight: None,
        max_usable: None,
        usable: None,
        hybrid_socket: None,
        ..vm.clone()
    };
    assert_eq!(examples, VmPolicy::default());
    assert!(vm.name.is_some() && vm.uuid.is_some() && vm.hybrid_socket.is_some());
    assert!(vm.weight.is_some() && vm.max_usable.is_some() && vm.usable.is_some());
}

#[test]
fn the_example_names_every_key() {
    let text = std::fs::read_to_string(path()).unwrap();
    let sections = keys("");
    assert!(sections.contains(&"mode".to_owned()), "{sections:?}");
    for section in sections.iter().filter(|section| *section != "mode") {
        let head = if section == "vm" {
            "[[vm]]".to_owned()
        } else {
            format!("[{section}]")
        };
        let (_, body) = text
            .split_once(&format!("#{head}\n"))
            .unwrap_or_else(|| panic!("{head} is not in the example"));
        let body = body.split("\n#[").next().unwrap();
        for key in keys(&head) {
            assert!(
                body.lines()
                    .any(|line| line.starts_with(&format!("#{key} = "))),
                "{head} {key} is not in the example"
            );
        }
    }
}
