//! What CPUs the guest has: online ones, cores, NUMA nodes, and those that are set apart (isolated, nohz_full).
//!
//! Read from sysfs as it is now; files that a kernel may lack are values, not errors.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use hint_proto::{CpuSet, ParseCpuSetError};

use crate::files::{Files, is_gone};

const CPUS: &str = "/sys/devices/system/cpu";
const CPU_INFO: &str = "/proc/cpuinfo";
const NODES: &str = "/sys/devices/system/node";

/// Why the topology is not known.
#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    /// A file can't be read.
    #[error("can't read {path}, for which sysfs must be mounted")]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A file is no CPU list.
    #[error("{path} is no CPU list")]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: ParseCpuSetError,
    },
    /// No CPU is online.
    #[error("{path} lists no CPU; expected at least one")]
    NoCpu {
        /// The file.
        path: PathBuf,
    },
}

/// One physical core as the guest sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Core {
    /// Its online hardware threads; at least one.
    pub cpus: CpuSet,
    /// Its NUMA node; 0 on a kernel without NUMA.
    pub node: u32,
}

/// The guest's CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// CPUs that are online; at least one.
    pub online: CpuSet,
    /// The cores, by lowest CPU; every online CPU is in exactly one.
    pub cores: Vec<Core>,
    /// CPUs without scheduler domains (`isolcpus=`), online or not.
    pub isolated: CpuSet,
    /// CPUs without timer ticks (`nohz_full=`), online or not.
    pub nohz_full: CpuSet,
    /// The CPUs that are present, online or not, in the order in which the host counts its vCPUs.
    pub by_vcpu: Vec<u32>,
}

impl Topology {
    /// Reads the topology.
    ///
    /// # Errors
    /// When the online CPUs can't be read, or a file that exists is no CPU list.
    pub fn read(files: &dyn Files) -> Result<Self, TopologyError> {
        let online = online(files)?;
        let nodes = nodes(files)?;
        // core_id repeats in each package; the siblings' text is the same for all threads of one core and no others.
        let mut threads: BTreeMap<String, CpuSet> = BTreeMap::new();
        for cpu in online.iter() {
            let path = format!("{CPUS}/cpu{cpu}/topology/thread_siblings_list");
            let siblings = read(files, Path::new(&path))?.unwrap_or_else(|| cpu.to_string());
            threads
                .entry(siblings.trim().to_owned())
                .or_default()
                .insert(cpu);
        }
        let mut cores: Vec<Core> = threads
            .into_values()
            .map(|cpus| Core {
                node: cpus
                    .first()
                    .and_then(|cpu| nodes.iter().find(|(_, list)| list.contains(cpu)))
                    .map_or(0, |(node, _)| *node),
                cpus,
            })
            .collect();
        cores.sort_by_key(|core| core.cpus.first());
        Ok(Self {
            cores,
            isolated: list(files, &format!("{CPUS}/isolated"))?.unwrap_or_default(),
            nohz_full: list(files, &format!("{CPUS}/nohz_full"))?.unwrap_or_default(),
            by_vcpu: by_vcpu(files, &online)?,
            online,
        })
    }

    /// Online CPUs that the agent leaves alone: isolated and nohz_full.
    #[must_use]
    pub fn untouched(&self) -> CpuSet {
        self.isolated
            .union(&self.nohz_full)
            .intersection(&self.online)
    }

    /// Online CPUs for ordinary work: all but the untouched ones.
    #[must_use]
    pub fn housekeeping(&self) -> CpuSet {
        self.online.difference(&self.untouched())
    }
}

/// The present CPUs by what the firmware calls them: a VMM numbers vCPUs so, and the kernel CPUs as they come, which differs after
/// hotplug. ACPI's uid first, which is there for CPUs that are offline too; then x86's APIC id; else the kernel's numbers have to do.
fn by_vcpu(files: &dyn Files, online: &CpuSet) -> Result<Vec<u32>, TopologyError> {
    let present = list(files, &format!("{CPUS}/present"))?.unwrap_or_else(|| online.clone());
    let uid = |cpu| -> Option<(u32, u32)> {
        let path = format!("{CPUS}/cpu{cpu}/firmware_node/uid");
        let text = files.read(Path::new(&path)).ok()?;
        Some((text.trim().parse().ok()?, cpu))
    };
    let uids: Option<Vec<(u32, u32)>> = present.iter().map(uid).collect();
    let ids = uids.or_else(|| {
        let text = files.read(Path::new(CPU_INFO)).ok()?;
        let ids = apic_ids(&text);
        let of = |cpu| ids.iter().find(|(_, known)| *known == cpu).copied();
        present.iter().map(of).collect()
    });
    let mut ids = ids.unwrap_or_else(|| present.iter().map(|cpu| (cpu, cpu)).collect());
    ids.sort_unstable();
    Ok(ids.into_iter().map(|(_, cpu)| cpu).collect())
}

/// APIC id and number of each CPU in the text of `/proc/cpuinfo`.
fn apic_ids(text: &str) -> Vec<(u32, u32)> {
    let mut cpu = None;
    let mut ids = Vec::new();
    for line in text.lines() {
        let Some((key, value)) = line.split_once(':') else {
            continue;
        };
        match (key.trim(), value.trim().parse().ok(), cpu) {
            ("processor", number, _) => cpu = number,
            ("apicid", Some(id), Some(number)) => ids.push((id, number)),
            _ => {}
        }
    }
    ids
}

/// CPUs that are online now.
///
/// # Errors
/// When `/sys/devices/system/cpu/online` can't be read, is no list or is empty.
pub fn online(files: &dyn Files) -> Result<CpuSet, TopologyError> {
    let path = PathBuf::from(format!("{CPUS}/online"));
    let text = files.read(&path).map_err(|source| TopologyError::Read {
        path: path.clone(),
        source,
    })?;
    let online = CpuSet::parse_list(&text).map_err(|source| TopologyError::Parse {
        path: path.clone(),
        source,
    })?;
    if online.is_empty() {
        return Err(TopologyError::NoCpu { path });
    }
    Ok(online)
}

fn nodes(files: &dyn Files) -> Result<Vec<(u32, CpuSet)>, TopologyError> {
    let names = match files.directories(Path::new(NODES)) {
        Ok(names) => names,
        Err(error) if is_gone(&error) => return Ok(Vec::new()),
        Err(source) => {
            return Err(TopologyError::Read {
                path: NODES.into(),
                source,
            });
        }
    };
    let mut nodes = Vec::new();
    for name in names {
        let Some(node) = name.strip_prefix("node").and_then(|id| id.parse().ok()) else {
            continue;
        };
        if let Some(cpus) = list(files, &format!("{NODES}/{name}/cpulist"))? {
            nodes.push((node, cpus));
        }
    }
    Ok(nodes)
}

fn list(files: &dyn Files, path: &str) -> Result<Option<CpuSet>, TopologyError> {
    let Some(text) = read(files, Path::new(path))? else {
        return Ok(None);
    };
    CpuSet::parse_list(&text)
        .map(Some)
        .map_err(|source| TopologyError::Parse {
            path: path.into(),
            source,
        })
}

fn read(files: &dyn Files, path: &Path) -> Result<Option<String>, TopologyError> {
    match files.read(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if is_gone(&error) => Ok(None),
        Err(source) => Err(TopologyError::Read {
            path: path.into(),
            source,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::chain;
    use crate::files::Root;
    use std::fs;

    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let root = Root::new(dir.path());
        (dir, root)
    }

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    #[test]
    fn firmware_that_lists_more_cpus_than_are_online_is_no_error() {
        let (_dir, root) = tree(&[
            ("sys/devices/system/cpu/online", "0-2\n"),
            ("sys/devices/system/cpu/possible", "0-31\n"),
            ("sys/devices/system/cpu/isolated", "      (null)\n"),
        ]);
        let topology = Topology::read(&root).unwrap();
        assert_eq!(topology.online, set("0-2"));
        assert_eq!(topology.cores.len(), 3, "no siblings files: a core each");
        assert!(topology.cores.iter().all(|core| core.node == 0));
        assert_eq!(topology.untouched(), CpuSet::new());
        assert_eq!(topology.housekeeping(), set("0-2"));
    }

    #[test]
    fn cores_are_told_by_their_siblings_and_not_by_core_id() {
        let mut files = vec![
            (
                "sys/devices/system/cpu/online".to_owned(),
                "0-7\n".to_owned(),
            ),
            (
                "sys/devices/system/cpu/isolated".to_owned(),
                "7\n".to_owned(),
            ),
            (
                "sys/devices/system/cpu/nohz_full".to_owned(),
                "6-9\n".to_owned(),
            ),
            (
                "sys/devices/system/node/node0/cpulist".to_owned(),
                "0-3\n".to_owned(),
            ),
            (
                "sys/devices/system/node/node1/cpulist".to_owned(),
                "4-7\n".to_owned(),
            ),
            (
                "sys/devices/system/node/power/control".to_owned(),
                "auto\n".to_owned(),
            ),
        ];
        for cpu in 0..8 {
            let dir = format!("sys/devices/system/cpu/cpu{cpu}/topology");
            let first = cpu / 2 * 2;
            files.push((
                format!("{dir}/thread_siblings_list"),
                format!("{first}-{}\n", first + 1),
            ));
            files.push((format!("{dir}/core_id"), "0\n".to_owned()));
        }
        let files: Vec<(&str, &str)> = files
            .iter()
            .map(|(a, b)| (a.as_str(), b.as_str()))
            .collect();
        let (_dir, root) = tree(&files);
        let topology = Topology::read(&root).unwrap();
        let cores: Vec<(String, u32)> = topology
            .cores
            .iter()
            .map(|core| (core.cpus.to_string(), core.node))
            .collect();
        assert_eq!(
            cores,
            [
                ("0-1".into(), 0),
                ("2-3".into(), 0),
                ("4-5".into(), 1),
                ("6-7".into(), 1)
            ]
        );
        assert_eq!(topology.untouched(), set("6-7"));
        assert_eq!(topology.housekeeping(), set("0-5"));
    }

    #[test]
    fn vcpus_are_told_by_what_the_firmware_calls_them() {
        let present = ("sys/devices/system/cpu/present", "0-3\n");
        let online = ("sys/devices/system/cpu/online", "0-1,3\n");
        let uids = [
            ("sys/devices/system/cpu/cpu0/firmware_node/uid", "0\n"),
            ("sys/devices/system/cpu/cpu1/firmware_node/uid", "1\n"),
            ("sys/devices/system/cpu/cpu2/firmware_node/uid", "7\n"),
            ("sys/devices/system/cpu/cpu3/firmware_node/uid", "5\n"),
        ];
        let info = "processor\t: 0\napicid\t\t: 0\n\nprocessor\t: 1\napicid\t\t: 4\n\nprocessor\t: 2\ninitial apicid\t: 9\napicid\t\t: 2\n\nprocessor\t: 3\napicid\t\t: 6\n";
        let cpuinfo = ("proc/cpuinfo", info);
        let read = |files: &[(&str, &str)]| {
            let (_dir, root) = tree(files);
            Topology::read(&root).unwrap().by_vcpu
        };
        assert_eq!(read(&[present, online]), [0, 1, 2, 3]);
        assert_eq!(read(&[online]), [0, 1, 3], "no list of those present");
        assert_eq!(read(&[present, online, cpuinfo]), [0, 2, 1, 3]);
        let mut all = vec![present, online, cpuinfo];
        all.extend(uids);
        assert_eq!(read(&all), [0, 1, 3, 2]);
        all.pop();
        assert_eq!(read(&all), [0, 2, 1, 3], "one uid is missing");
    }

    #[test]
    fn errors_name_the_file() {
        let (_dir, root) = tree(&[]);
        let error = chain(&Topology::read(&root).unwrap_err());
        assert!(error.contains("/sys/devices/system/cpu/online"), "{error}");
        let (_dir, root) = tree(&[
            ("sys/devices/system/cpu/online", "0-1\n"),
            ("sys/devices/system/cpu/isolated", "junk\n"),
        ]);
        let error = chain(&Topology::read(&root).unwrap_err());
        assert!(
            error.contains("cpu/isolated") && error.contains("junk"),
            "{error}"
        );
        let (_dir, root) = tree(&[("sys/devices/system/cpu/online", "\n")]);
        assert!(matches!(
            Topology::read(&root),
            Err(TopologyError::NoCpu { .. })
        ));
    }
}
