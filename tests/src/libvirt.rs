//! A libvirt of a test's own: its daemon, with its bus, its configuration and its VMs, in namespaces that end with the test. Only
//! its CPU groups are the host's; they are removed at the end.
//!
//! Its VMs are QEMU's with software emulation and without an operating system: what counts is how libvirt sets them up.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::console;
use crate::process::{Process, ProcessError};

const PATIENCE: Duration = Duration::from_secs(60);

/// Debian has files in these folders, or daemons make some.
const PRIVATE: &str = "/etc/libvirt /run /var/lib/libvirt /var/log/libvirt /var/cache/libvirt";

/// Only what divides CPU time: in other hierarchies no group is made.
const QEMU_CONF: &str = r#"user = "root"
group = "root"
security_driver = "none"
remember_owner = 0
stdio_handler = "file"
namespaces = []
cgroup_controllers = [ "cpu", "cpuset", "cpuacct" ]
"#;

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum LibvirtError {
    /// The daemon's processes did not start.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// A file or folder can't be used.
    #[error("can't use {path}: {source}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The daemon doesn't answer.
    #[error("libvirtd does not answer ({said}); its log: {log}")]
    Silent {
        /// What virsh says.
        said: String,
        /// What the daemon said.
        log: String,
    },
    /// virsh failed.
    #[error("virsh {arguments}: {said}")]
    Virsh {
        /// What it was told.
        arguments: String,
        /// What it said.
        said: String,
    },
}

/// A running libvirtd. Dropping it ends its VMs and removes its CPU groups.
#[derive(Debug)]
pub struct Libvirt {
    keeper: Option<Process>,
    folder: TempDir,
    groups_to_remove: Vec<PathBuf>,
}

impl Libvirt {
    /// Starts one and waits until it answers.
    ///
    /// # Errors
    /// When it does not.
    pub fn start() -> Result<Self, LibvirtError> {
        let folder = tempfile::tempdir().map_err(|source| LibvirtError::Io {
            path: std::env::temp_dir(),
            source,
        })?;
        let conf = folder.path().join("qemu.conf");
        fs::write(&conf, QEMU_CONF).map_err(|source| LibvirtError::Io {
            path: conf.clone(),
            source,
        })?;
        let log = folder.path().join("log");
        // The PID namespace takes all of it along when it ends, QEMUs too. Its first process is the shell, which waits for
        // processes that others leave behind; libvirtd would not.
        let script = format!(
            "set -e; for at in {PRIVATE}; do mkdir -p $at; mount -t tmpfs none $at; done; \
             cp {conf} /etc/libvirt/; mkdir /run/dbus; dbus-daemon --system --fork --nopidfile; libvirtd || true",
            conf = conf.display()
        );
        let arguments = [
            "--mount",
            "--propagation",
            "private",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            &script,
        ];
        let groups_to_remove = machine_groups().into_iter().filter(|path| !path.exists());
        let groups_to_remove = groups_to_remove.collect();
        let keeper = Process::start(Path::new("unshare"), &arguments.map(Into::into), &log, None)?;
        let libvirt = Self {
            keeper: Some(keeper),
            folder,
            groups_to_remove,
        };
        let end = Instant::now() + PATIENCE;
        while let Err(error) = libvirt.virsh(&["version"]) {
            if Instant::now() > end {
                return Err(LibvirtError::Silent {
                    said: error.to_string(),
                    log: console::tail(&log, 20),
                });
            }
            thread::sleep(Duration::from_millis(100));
        }
        Ok(libvirt)
    }

    /// Runs virsh, and gives what it prints.
    ///
    /// # Errors
    /// When it fails; with what it said.
    pub fn virsh(&self, arguments: &[&str]) -> Result<String, LibvirtError> {
        let pid = self.keeper.as_ref().map_or(0, Process::pid).to_string();
        let output = Command::new("nsenter")
            .args([
                "--target",
                &pid,
                "--mount",
                "virsh",
                "--connect",
                "qemu:///system",
            ])
            .args(arguments)
            .output()
            .map_err(|source| LibvirtError::Io {
                path: PathBuf::from("nsenter"),
                source,
            })?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Err(LibvirtError::Virsh {
            arguments: arguments.join(" "),
            said: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        })
    }

    /// Starts a VM of one name with so many vCPUs; `cputune` is the XML inside the element of that name.
    ///
    /// # Errors
    /// When libvirt refuses.
    pub fn start_vm(
        &self,
        name: &str,
        uuid: &str,
        vcpus: u32,
        cputune: &str,
    ) -> Result<(), LibvirtError> {
        let xml = format!(
            "<domain type='qemu'><name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>64</memory><vcpu>{vcpus}</vcpu>\
             <os><type arch='x86_64'>hvm</type></os><cputune>{cputune}</cputune></domain>"
        );
        let path = self.folder.path().join(format!("{name}.xml"));
        fs::write(&path, xml).map_err(|source| LibvirtError::Io {
            path: path.clone(),
            source,
        })?;
        self.virsh(&["create", &path.to_string_lossy()]).map(|_| ())
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        drop(self.keeper.take());
        let end = Instant::now() + PATIENCE;
        for group in &self.groups_to_remove {
            while group.exists() && !remove_tree(group) && Instant::now() < end {
                thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

/// Where libvirt puts its VMs, in each hierarchy that it may use.
fn machine_groups() -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let groups = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (at, kind) = (fields.next()?, fields.next()?);
        kind.starts_with("cgroup")
            .then(|| Path::new(at).join("machine"))
    });
    groups.collect()
}

/// Removes a group with those below it; false while one of them has processes.
fn remove_tree(group: &Path) -> bool {
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path());
        }
    }
    fs::remove_dir(group).is_ok()
}
