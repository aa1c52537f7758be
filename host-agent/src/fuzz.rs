//! What the fuzz targets do, one function each: they take any bytes, and panic where a parser breaks a promise of its
//! documentation. Only for `tests/fuzz`, and for the test that replays its corpus.

use std::path::Path;

use hint_proto::MAX_CPUS;

use crate::config::Config;
pub use crate::discover::fuzz::*;
use crate::model::{Accelerator, Mode, Vcpus, Vm, VmId};
pub use crate::observe::fuzz::*;
use crate::procfs;
pub use crate::publish::fuzz::*;
use crate::text::{MAX_BYTES, printable};

/// A target: its name, which is that of its corpus, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets of this crate.
pub const TARGETS: &[Target] = &[
    ("broker_config", broker_config),
    ("cgroup_values", cgroup_values),
    ("cmdline", cmdline),
    ("debugfs", debugfs),
    ("firecracker_config", firecracker_config),
    ("guest_messages", guest_messages),
    ("libvirt_scope", libvirt_scope),
    ("membership", membership),
    ("mountinfo", mountinfo),
    ("pressure", pressure),
    ("printable", printable_text),
    ("proc_stat", proc_stat),
    ("qmp", qmp),
    ("schedstat", schedstat),
    ("status", status),
    ("task_stat", task_stat),
    ("topology_list", topology_list),
    ("unix_table", unix_table),
];

/// `/proc/<pid>/stat`: the command never shifts what stands after it.
pub fn task_stat(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let _ = procfs::start_ticks(&text);
    let command = text.replace('\n', " ");
    let stat =
        format!("1 ({command}) R 1 1 1 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 8212345 99 1\n");
    assert_eq!(procfs::stat_fields(&stat).next(), Some("R"));
    assert_eq!(procfs::start_ticks(&stat), Some(8_212_345));
}

/// PSI: a part of the time, or nothing.
pub fn pressure(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Some(average) = procfs::pressure_of_a_minute(&text) {
        assert!((0.0..=100.0).contains(&average));
    }
}

/// Text for logs and terminals: short, without what steers a terminal, and the same when it is made fit twice.
pub fn printable_text(data: &[u8]) {
    let text = printable(&String::from_utf8_lossy(data));
    assert!(text.len() <= MAX_BYTES);
    assert!(!text.chars().any(char::is_control));
    assert_eq!(printable(&text), text);
}

/// The daemon's configuration: what is taken is within the bounds that the documentation gives.
pub fn broker_config(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let config = match Config::parse(&text, Path::new("/etc/hint-broker.toml")) {
        Ok(config) => config,
        Err(error) => {
            assert!(error.to_string().contains("/etc/hint-broker.toml"));
            return;
        }
    };
    let channel = &config.channel;
    assert!((50..=1000).contains(&config.observe.interval.as_millis()));
    assert!((100..=60_000).contains(&config.discover.rescan.as_millis()));
    assert!((1..=10_000).contains(&config.host.weight));
    assert!((1..1024).contains(&channel.port));
    assert!(channel.lease >= 2 * channel.heartbeat);
    for policy in &config.vms {
        assert!(policy.name.is_some() || policy.uuid.is_some());
        assert!((1..=MAX_CPUS).contains(&policy.min_usable));
        assert!(
            policy
                .max_usable
                .is_none_or(|most| most >= policy.min_usable)
        );
        assert!(
            policy
                .usable
                .is_none_or(|usable| (1..=MAX_CPUS).contains(&usable))
        );
        assert!(
            policy
                .weight
                .is_none_or(|weight| (1..=10_000).contains(&weight))
        );
        assert!((0.0..=f64::from(MAX_CPUS)).contains(&policy.reservation));
        let vm = Vm {
            id: VmId {
                pid: 1,
                start_ticks: 1,
            },
            name: policy.name.clone().unwrap_or_default(),
            uuid: policy.uuid.clone(),
            accelerator: Accelerator::Kvm,
            vcpus: Vcpus::Unclassified(String::new()),
            cid: None,
            hybrid_socket: None,
        };
        let mode: Mode = config.policy(&vm).mode;
        assert!(mode <= config.mode);
    }
}
