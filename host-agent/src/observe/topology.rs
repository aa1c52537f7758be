//! The host's pCPUs from `/sys/devices/system`: what is online and isolated, cores, NUMA nodes, and speeds.
//!
//! Only pCPUs that are online are asked for their place; the list of possible ones names folders that may not exist.

use std::collections::BTreeMap;

use hint_proto::CpuSet;

use crate::model::Topology;
use crate::procfs::number;
use crate::root::{ReadError, Root};

const CPUS: &str = "sys/devices/system/cpu";
const NODES: &str = "sys/devices/system/node";

/// What could be read, with what could not.
#[derive(Debug, Clone, Default)]
pub struct TopologyScan {
    /// The pCPUs; `None` when it is not known which are online.
    pub topology: Option<Topology>,
    /// What could not be read, with what it means and how to mend it.
    pub degraded: Vec<String>,
}

/// Keeps what was read as long as the same pCPUs are online and isolated.
#[derive(Debug, Default)]
pub(super) struct TopologyReader(TopologyScan);

impl TopologyReader {
    pub(super) fn read(&mut self, root: &Root) -> &TopologyScan {
        let same = self.0.topology.as_ref().is_some_and(|topology| {
            let is = |name: &str, known: &CpuSet| {
                let now = list(root, &format!("{CPUS}/{name}"));
                now.is_ok_and(|now| now.unwrap_or_default() == *known)
            };
            is("online", &topology.online) && is("isolated", &topology.isolated)
        });
        if !same || !self.0.degraded.is_empty() {
            self.0 = read(root);
        }
        &self.0
    }
}

/// Reads all of it.
fn read(root: &Root) -> TopologyScan {
    let mut scan = TopologyScan::default();
    let online = match list(root, &format!("{CPUS}/online")) {
        Ok(Some(online)) if !online.is_empty() => online,
        Ok(_) => {
            scan.degraded.push(format!(
                "{} can't be read: isolated CPUs count as common ones",
                root.path(format!("{CPUS}/online")).display()
            ));
            return scan;
        }
        Err(error) => {
            scan.degraded
                .push(format!("{error}: isolated CPUs count as common ones"));
            return scan;
        }
    };
    let mut note = |result: Result<Option<CpuSet>, ReadError>, effect: &str| {
        result
            .inspect_err(|error| scan.degraded.push(format!("{error}: {effect}")))
            .ok()
            .flatten()
    };
    let isolated = note(
        list(root, &format!("{CPUS}/isolated")),
        "isolated CPUs count as common ones",
    );
    let isolated = isolated.unwrap_or_default().intersection(&online);
    let nodes = note(
        list(root, &format!("{NODES}/online")),
        "NUMA nodes are not known",
    );
    let nodes = nodes.iter().flat_map(CpuSet::iter).filter_map(|node| {
        let cpus = note(
            list(root, &format!("{NODES}/node{node}/cpulist")),
            "the CPUs of this NUMA node are not known",
        );
        Some((node, cpus?.intersection(&online)))
    });
    let nodes = nodes.filter(|(_, cpus)| !cpus.is_empty()).collect();
    let (mut cores, mut capacity) = (BTreeMap::new(), BTreeMap::new());
    // One cause has as many files as there are CPUs.
    let mut first_error = None;
    for cpu in online.iter() {
        // A kernel without this file, and a CPU whose siblings are unknown: a core of its own.
        let siblings = list(
            root,
            &format!("{CPUS}/cpu{cpu}/topology/thread_siblings_list"),
        );
        let siblings = siblings
            .unwrap_or_else(|error| {
                first_error.get_or_insert(error);
                None
            })
            .map(|siblings| siblings.intersection(&online))
            .filter(|siblings| siblings.contains(cpu))
            .unwrap_or_else(|| CpuSet::from_iter([cpu]));
        cores.insert(siblings.first().unwrap_or(cpu), siblings);
        match speed(root, cpu) {
            Ok(speed) => capacity.extend(speed.map(|speed| (cpu, speed))),
            Err(error) => {
                first_error.get_or_insert(error);
            }
        }
    }
    scan.degraded.extend(
        first_error
            .map(|error| format!("{error}: some cores, or the speeds of pCPUs, are not known")),
    );
    // Speeds of some and not of others can't be compared.
    if capacity.len() != online.len() {
        capacity.clear();
    }
    scan.topology = Some(Topology {
        online,
        isolated,
        cores,
        nodes,
        capacity,
    });
    scan
}

/// How fast a pCPU is beside others; `None` when the kernel doesn't tell.
fn speed(root: &Root, cpu: u32) -> Result<Option<u32>, ReadError> {
    let relative = format!("{CPUS}/cpu{cpu}/cpu_capacity");
    let Some(text) = root.read_text(&relative)? else {
        return Ok(None);
    };
    number(text.trim())
        .map(Some)
        .ok_or_else(|| ReadError::content(&root.path(&relative), "a number", &text))
}

/// A cpulist; `None` when there is no such file. Some kernels print a set that they don't keep as `(null)`.
fn list(root: &Root, relative: &str) -> Result<Option<CpuSet>, ReadError> {
    let Some(text) = root.read_text(relative)? else {
        return Ok(None);
    };
    parse_list(&text)
        .ok_or_else(|| ReadError::content(&root.path(relative), "a list of CPUs", &text))
}

/// What is in the text of a cpulist, `Some(None)` for `(null)`; `None` when it is none.
pub(super) fn parse_list(text: &str) -> Option<Option<CpuSet>> {
    if text.trim() == "(null)" {
        return Some(None);
    }
    CpuSet::parse_list(text).ok().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::Tree;

    fn topology(text: &str) -> Topology {
        let tree = Tree::new(text);
        let scan = read(&tree.root);
        assert_eq!(scan.degraded, [""; 0]);
        scan.topology.unwrap()
    }

    fn shown(sets: &BTreeMap<u32, CpuSet>) -> Vec<String> {
        sets.iter()
            .map(|(name, set)| format!("{name}: {set}"))
            .collect()
    }

    #[test]
    fn pcpus_that_come_and_go_are_followed() {
        let tree = Tree::new("[sys/devices/system/cpu]\nonline = 0-3\nisolated =\n");
        let mut reader = TopologyReader::default();
        let mut online = || {
            let scan = reader.read(&tree.root);
            scan.topology
                .as_ref()
                .map(|topology| topology.online.to_string())
        };
        assert_eq!(online().as_deref(), Some("0-3"));
        tree.write("sys/devices/system/cpu/online", "0,2-3\n");
        assert_eq!(online().as_deref(), Some("0,2-3"));
        tree.remove("sys/devices/system/cpu/online");
        assert_eq!(online(), None);
    }

    #[test]
    fn cores_and_nodes_hold_what_is_online() {
        let mut text = "[sys/devices/system/cpu]\nonline = 0-2,4-7\npossible = 0-15\npresent = 0-7\nisolated = 6-7,12\n\
                        [sys/devices/system/node]\nonline = 0-1\nnode0/cpulist = 0-3\nnode1/cpulist = 4-7\n"
            .to_owned();
        for cpu in 0..8 {
            let first = cpu / 2 * 2;
            text.push_str(&format!(
                "[sys/devices/system/cpu/cpu{cpu}/topology]\nthread_siblings_list = {first}-{}\n",
                first + 1
            ));
        }
        let found = topology(&text);
        assert_eq!(found.online.to_string(), "0-2,4-7");
        assert_eq!(found.isolated.to_string(), "6-7");
        assert_eq!(found.common().to_string(), "0-2,4-5");
        assert_eq!(shown(&found.cores), ["0: 0-1", "2: 2", "4: 4-5", "6: 6-7"]);
        assert_eq!(shown(&found.nodes), ["0: 0-2", "1: 4-7"]);
        assert!(found.capacity.is_empty());
    }

    #[test]
    fn possible_cpus_that_do_not_exist_and_cpu0_without_a_switch_harm_nothing() {
        let found = topology(
            "[sys/devices/system/cpu]\nonline = 0-15\npossible = 0-31\npresent = 0-31\nisolated =\n\
             [sys/devices/system/cpu/cpu1]\nonline = 1\n",
        );
        assert_eq!(found.common().len(), 16);
        assert_eq!(found.cores.len(), 16);
        assert!(found.nodes.is_empty());
    }

    #[test]
    fn cores_of_two_packages_with_the_same_core_id_are_two() {
        let mut text = "[sys/devices/system/cpu]\nonline = 0-3\n".to_owned();
        for (cpu, package, core) in [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)] {
            text.push_str(&format!(
                "[sys/devices/system/cpu/cpu{cpu}/topology]\nphysical_package_id = {package}\ncore_id = {core}\nthread_siblings_list = {cpu}\n"
            ));
        }
        assert_eq!(topology(&text).cores.len(), 4);
    }

    #[test]
    fn speeds_are_read_where_all_have_one() {
        let mut text = "[sys/devices/system/cpu]\nonline = 0-7\n".to_owned();
        for cpu in 0..8 {
            let speed = if cpu < 4 { 414 } else { 1024 };
            text.push_str(&format!("cpu{cpu}/cpu_capacity = {speed}\n"));
        }
        let found = topology(&text);
        assert_eq!((found.capacity[&3], found.capacity[&4]), (414, 1024));
        let tree = Tree::new(&text);
        tree.remove("sys/devices/system/cpu/cpu5/cpu_capacity");
        assert!(read(&tree.root).topology.unwrap().capacity.is_empty());
    }

    #[test]
    fn a_null_set_is_none_and_junk_is_named() {
        let found = topology(&format!(
            "[sys/devices/system/cpu]\nonline = 0-1\nisolated = {}(null)\n",
            " ".repeat(240)
        ));
        assert_eq!(found.common().to_string(), "0-1");
        let tree = Tree::new("[sys/devices/system/cpu]\nonline = 0-1\nisolated = none\n");
        let scan = read(&tree.root);
        assert_eq!(scan.topology.unwrap().online.to_string(), "0-1");
        assert!(
            scan.degraded[0].contains("cpu/isolated") && scan.degraded[0].contains("none"),
            "{:?}",
            scan.degraded
        );
        for online in ["", "0-", "(null)"] {
            let tree = Tree::new(&format!("[sys/devices/system/cpu]\nonline = {online}\n"));
            let scan = read(&tree.root);
            assert!(scan.topology.is_none(), "{online:?}");
            assert!(scan.degraded[0].contains("cpu/online"), "{online:?}");
        }
        let all_isolated = topology("[sys/devices/system/cpu]\nonline = 0-3\nisolated = 0-3\n");
        assert_eq!(all_isolated.common().to_string(), "0-3");
    }
}
