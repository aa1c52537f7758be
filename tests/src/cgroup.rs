//! A host CPU group for each guest, so that guests compete with equal weight whatever their number of threads, as they do
//! under libvirt. It works with either cgroup version; the group lies directly below the controller's root.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::process;

/// What went wrong with a CPU group.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// No usable CPU controller.
    #[error(
        "expected a cgroup CPU controller (v1 `cpu`, or v2 with `cpu` in cgroup.subtree_control of its root), found none in {0}"
    )]
    NoController(PathBuf),
    /// A file or folder of a group cannot be used.
    #[error("cannot use {path}: {source}; CPU groups need root")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Which interface the CPU controller has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// `cpu.shares`, `cpu.cfs_quota_us`.
    V1,
    /// `cpu.weight`, `cpu.max`.
    V2,
}

/// The machine's CPU controller: where its root is mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Controller {
    /// Root of the hierarchy.
    pub root: PathBuf,
    /// Its interface.
    pub version: Version,
}

impl Controller {
    /// Finds the controller of this machine.
    ///
    /// # Errors
    /// When there is none, or the unified hierarchy's root does not pass `cpu` on.
    pub fn find() -> Result<Self, CgroupError> {
        let mounts = Path::new("/proc/self/mounts");
        let text = fs::read_to_string(mounts).map_err(|source| io_error(mounts, source))?;
        Self::from_mounts(&text, |root| {
            fs::read_to_string(root.join("cgroup.subtree_control")).unwrap_or_default()
        })
        .ok_or_else(|| CgroupError::NoController(mounts.to_owned()))
    }

    fn from_mounts(mounts: &str, passed_on: impl Fn(&Path) -> String) -> Option<Self> {
        let mut found = None;
        for line in mounts.lines() {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            let [_, root, kind, options, ..] = fields[..] else {
                continue;
            };
            let root = PathBuf::from(root);
            let version = match kind {
                "cgroup" if options.split(',').any(|option| option == "cpu") => Version::V1,
                "cgroup2"
                    if passed_on(&root)
                        .split_whitespace()
                        .any(|name| name == "cpu") =>
                {
                    Version::V2
                }
                _ => continue,
            };
            found.get_or_insert(Self { root, version });
        }
        found
    }
}

/// A CPU group of one guest with the default weight; dropping it removes it, once its processes have ended.
#[derive(Debug)]
pub struct CpuGroup {
    path: PathBuf,
    version: Version,
}

impl CpuGroup {
    /// Makes a group for this process and the given name, and removes groups that earlier, killed processes left.
    ///
    /// # Errors
    /// When there is no controller or no right to make the group.
    pub fn create(name: &str) -> Result<Self, CgroupError> {
        let controller = Controller::find()?;
        for orphan in process::orphans(&controller.root) {
            // Another test may have removed it first, and a group with processes stays.
            let _ = fs::remove_dir(orphan);
        }
        let path = controller.root.join(process::owned_name(name));
        fs::create_dir(&path).map_err(|source| io_error(&path, source))?;
        Ok(Self {
            path,
            version: controller.version,
        })
    }

    /// Folder of the group.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file that takes a process id to move that process with all its threads into the group.
    #[must_use]
    pub fn procs(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Sets the weight on the scale of v2: 1 to 10000, 100 is the default.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_weight(&self, weight: u32) -> Result<(), CgroupError> {
        match self.version {
            Version::V1 => {
                let shares = (u64::from(weight) * 1024 / 100).max(2);
                self.write("cpu.shares", &shares.to_string())
            }
            Version::V2 => self.write("cpu.weight", &weight.to_string()),
        }
    }

    /// Sets the quota in milli-CPUs per period of 100 ms; `None` takes it away.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_quota(&self, milli_cpus: Option<u32>) -> Result<(), CgroupError> {
        let quota_us = milli_cpus.map(|milli| u64::from(milli) * 100);
        match (self.version, quota_us) {
            (Version::V1, Some(quota)) => self.write("cpu.cfs_quota_us", &quota.to_string()),
            (Version::V1, None) => self.write("cpu.cfs_quota_us", "-1"),
            (Version::V2, Some(quota)) => self.write("cpu.max", &format!("{quota} 100000")),
            (Version::V2, None) => self.write("cpu.max", "max 100000"),
        }
    }

    fn write(&self, file: &str, text: &str) -> Result<(), CgroupError> {
        let path = self.path.join(file);
        fs::write(&path, text).map_err(|source| io_error(&path, source))
    }
}

impl Drop for CpuGroup {
    fn drop(&mut self) {
        // A process that was waited for may stay in the group's books for a moment.
        let end = Instant::now() + Duration::from_secs(5);
        while let Err(error) = fs::remove_dir(&self.path) {
            if error.kind() == io::ErrorKind::NotFound {
                return;
            }
            if Instant::now() > end {
                eprintln!("lab: cannot remove {}: {error}", self.path.display());
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

fn io_error(path: &Path, source: io::Error) -> CgroupError {
    CgroupError::Io {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
tmpfs /sys/fs/cgroup tmpfs rw,relatime,mode=755 0 0
cgroup /sys/fs/cgroup/cpuset cgroup rw,relatime,cpuset 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0
";

    #[test]
    fn a_hybrid_machine_has_its_cpu_controller_in_v1() {
        let found = Controller::from_mounts(HYBRID, |_| String::new()).unwrap();
        assert_eq!(found.root, Path::new("/sys/fs/cgroup/cpu,cpuacct"));
        assert_eq!(found.version, Version::V1);
    }

    #[test]
    fn a_unified_machine_must_pass_the_controller_on() {
        let mounts = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n";
        let found = Controller::from_mounts(mounts, |_| "cpuset cpu io\n".to_owned()).unwrap();
        assert_eq!(found.version, Version::V2);
        assert_eq!(
            Controller::from_mounts(mounts, |_| "cpuset io\n".to_owned()),
            None
        );
    }
}
