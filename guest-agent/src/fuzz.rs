//! What the fuzz targets do, one function each: they take any bytes, and panic where a parser breaks a promise of its
//! documentation. Only for `tests/fuzz`, and for the test that replays its corpus.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use hint_proto::{CpuSet, v1};
use prost::Message;

use crate::apply::{Actuator, Cpuset, Paravirt, Wish};
use crate::choose::{Preference, choose};
use crate::config::{Config, Overrides};
use crate::files::Files;
use crate::hint;
use crate::restore::{Author, Record, writable_text};
use crate::session::{Endpoint, check_welcome};
use crate::system;
use crate::topology::Topology;

/// A target: its name, which is that of its corpus, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets of this crate.
pub const TARGETS: &[Target] = &[
    ("agent_config", agent_config),
    ("agent_files", agent_files),
    ("agent_topology", agent_topology),
    ("endpoint", endpoint),
    ("hints", hints),
    ("restore_record", restore_record),
];

/// Files in memory: the kernel's of a guest, as the fuzzer likes them. Each begins with `=` and its path in a line of its own.
#[derive(Debug, Default)]
struct Tree(BTreeMap<PathBuf, String>);

impl Tree {
    fn parse(data: &[u8]) -> Self {
        let text = String::from_utf8_lossy(data);
        let files = text.split("\n=").filter_map(|part| {
            let (path, text) = part.split_once('\n')?;
            Some((PathBuf::from(path.trim_start_matches('=')), text.to_owned()))
        });
        Self(files.take(64).collect())
    }

    fn find(&self, path: &Path) -> io::Result<&String> {
        self.0.get(path).ok_or(io::ErrorKind::NotFound.into())
    }
}

impl Files for Tree {
    fn read(&self, path: &Path) -> io::Result<String> {
        self.find(path).cloned()
    }

    fn write(&self, path: &Path, _: &str) -> io::Result<()> {
        self.find(path).map(drop)
    }

    fn writable(&self, path: &Path) -> io::Result<()> {
        self.find(path).map(drop)
    }

    fn directories(&self, path: &Path) -> io::Result<Vec<String>> {
        let below = self.0.keys().filter_map(|file| {
            let mut rest = file.strip_prefix(path).ok()?.components();
            let name = rest.next()?.as_os_str().to_str()?.to_owned();
            rest.next().map(|_| name)
        });
        let names: BTreeSet<String> = below.collect();
        if names.is_empty() {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(names.into_iter().collect())
    }
}

/// The guest's CPUs: every online one is in one core, and what is chosen of them is online, never empty, and as many as asked.
pub fn agent_topology(data: &[u8]) {
    let Ok(topology) = Topology::read(&Tree::parse(data)) else {
        return;
    };
    assert!(!topology.online.is_empty());
    let in_cores: usize = topology.cores.iter().map(|core| core.cpus.len()).sum();
    assert_eq!(in_cores, topology.online.len());
    let housekeeping = topology.housekeeping();
    let keep: Vec<u32> = data.iter().take(8).copied().map(u32::from).collect();
    let vcpus = u32::try_from(topology.by_vcpu.len()).expect("CPU numbers are bounded");
    let preference = Preference::new(&topology, vcpus, &keep);
    for usable in [0, 1, 3, u32::from(data.first().copied().unwrap_or(7))] {
        let chosen = choose(&topology, &topology.online, usable, &preference);
        assert!(!chosen.is_empty() && chosen.is_subset(&topology.online));
        assert!(topology.untouched().is_subset(&chosen));
        let wanted = usize::try_from(usable.max(1)).expect("a small number");
        if !housekeeping.is_empty() {
            let used = chosen.intersection(&housekeeping);
            assert_eq!(used.len(), wanted.min(housekeeping.len()));
            assert!(used.contains(housekeeping.first().expect("it is not empty")));
        }
    }
}

/// Everything else that the agent reads of the kernel: mounts, groups, masks, release, load. What an actuator plans to write is a
/// list of CPUs that come from the wish or were there before.
pub fn agent_files(data: &[u8]) {
    let tree = Tree::parse(data);
    let _ = (
        system::kernel_version(&tree),
        system::runnable_tasks(&tree),
        system::steal_ms(&tree),
        system::boot_id(&tree),
    );
    let online: CpuSet = (0..8).collect();
    let wish = Wish {
        preferred: (0..3).collect(),
        online: online.clone(),
    };
    let topology = Topology {
        online: online.clone(),
        cores: Vec::new(),
        isolated: CpuSet::new(),
        nohz_full: CpuSet::new(),
        by_vcpu: Vec::new(),
    };
    let cpuset = Cpuset::probe(&tree, &topology, false).ok();
    let paravirt = Paravirt::probe(&tree).ok();
    let cpuset = cpuset.as_ref().map(|actuator| actuator as &dyn Actuator);
    let paravirt = paravirt.as_ref().map(|actuator| actuator as &dyn Actuator);
    for actuator in cpuset.into_iter().chain(paravirt) {
        let _ = actuator.current(&tree, &online);
        let Ok(plan) = actuator.plan(&tree, &Record::default(), &wish) else {
            continue;
        };
        for write in &plan.writes {
            let is_control = write.path.ends_with("cgroup.subtree_control");
            assert!(
                is_control || CpuSet::parse_list(&write.text).is_ok(),
                "{write:?}"
            );
            let known = plan
                .record
                .files
                .iter()
                .find(|entry| entry.path == write.path);
            assert!(is_control || known.is_some(), "nothing puts {write:?} back");
            if let Some(entry) = known {
                assert_ne!(entry.author(&write.text), Author::Other);
            }
        }
    }
}

/// The restore record: it comes back, and who wrote a file is clear for the texts in it.
pub fn restore_record(data: &[u8]) {
    let Ok(record) = serde_json::from_slice::<Record>(data) else {
        return;
    };
    let text = serde_json::to_string(&record).expect("a record can be written");
    assert_eq!(
        serde_json::from_str::<Record>(&text).ok(),
        Some(record.clone())
    );
    for mut entry in record.files {
        assert_eq!(entry.author(&entry.found), Author::Found);
        assert!(
            entry
                .wrote
                .iter()
                .all(|text| entry.author(text) != Author::Other)
        );
        assert!(!writable_text(&entry.found).is_empty());
        let found = entry.found.clone();
        entry.will_write(&found, "0-1");
        assert_ne!(entry.author("0-1\n"), Author::Other);
    }
}

/// The agent's configuration.
pub fn agent_config(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let path = Path::new("/etc/hint-agent.toml");
    match Config::parse(&text, path, Overrides::default()) {
        Ok(config) => {
            let endpoint = config.endpoint.to_string();
            assert_eq!(endpoint.parse().ok(), Some(config.endpoint));
        }
        Err(error) => assert!(error.to_string().contains("/etc/hint-agent.toml")),
    }
}

/// Where the broker listens, from a text and back.
pub fn endpoint(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(endpoint) = text.parse::<Endpoint>() {
        assert_eq!(endpoint.to_string().parse().ok(), Some(endpoint));
    }
}

/// What the broker sends, from the bytes on the wire: a hint that is followed is of this run, not older than the last, and has a lease
/// of an hour at most.
pub fn hints(data: &[u8]) {
    let Ok(response) = v1::SessionResponse::decode(data) else {
        return;
    };
    if let Ok(welcome) = check_welcome(response.clone()) {
        assert_eq!(welcome.protocol, hint_proto::PROTOCOL);
        assert!(welcome.heartbeat_ms > 0 && welcome.heartbeat_ms < welcome.deadline_ms);
    }
    let Some(v1::session_response::Message::Hint(hint)) = response.message else {
        return;
    };
    for (epoch, last) in [(hint.epoch, 0), (hint.epoch, hint.sequence), (7, 7)] {
        match hint::check(&hint, epoch, last) {
            Ok(lease) => {
                assert_eq!(hint.epoch, epoch);
                assert!(hint.sequence >= last.max(1));
                assert!(!lease.is_zero() && lease <= hint::LONGEST_LEASE);
            }
            Err(refusal) => assert!(!refusal.to_string().is_empty()),
        }
    }
}
