//! Named skips: a test that lacks a capability of the machine says which, and `make test` lists all of them at the end.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;

use crate::assets::{self, Assets, Kernel};
use crate::cgroup::Controller;

/// A capability that a test needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// The right to make CPU groups, read other users' processes and the like.
    Root,
    /// Everything that boots a guest: root, kernel, QEMU, vhost-device-vsock, a CPU controller.
    Guests,
    /// The same, and the guest kernel with the mask of CPUs to avoid.
    ParavirtGuests,
    /// The headers of the guests' kernel, to build modules for it.
    KernelHeaders,
    /// `/dev/kvm`, readable and writable.
    Kvm,
    /// A kernel with debugfs; it need not be mounted.
    Debugfs,
    /// QEMU.
    Qemu,
    /// Guests with Debian's root and systemd.
    SystemdGuests,
    /// libvirt's daemon for QEMU, and what it needs.
    Libvirt,
}

impl Need {
    /// What is missing, in words; `None` when all is there.
    #[must_use]
    pub fn missing(self) -> Option<String> {
        match self {
            Self::Root => (!rustix::process::geteuid().is_root()).then(|| "root".to_owned()),
            Self::Guests => guests(Kernel::Debian),
            Self::ParavirtGuests => guests(Kernel::Paravirt),
            Self::SystemdGuests => guests(Kernel::Debian)
                .or_else(|| assets::debian_root().err().map(|error| error.to_string())),
            Self::KernelHeaders => assets::kernel_headers()
                .err()
                .map(|error| error.to_string()),
            Self::Kvm => OpenOptions::new()
                .read(true)
                .write(true)
                .open("/dev/kvm")
                .err()
                .map(|error| format!("/dev/kvm ({error})")),
            Self::Debugfs => {
                let kinds = fs::read_to_string("/proc/filesystems").unwrap_or_default();
                let there = kinds
                    .lines()
                    .any(|line| line.split_whitespace().last() == Some("debugfs"));
                (!there).then(|| "debugfs in this kernel".to_owned())
            }
            Self::Qemu => missing_program(&["qemu-system-x86_64"]),
            Self::Libvirt => missing_program(&["libvirtd", "virsh", "dbus-daemon"])
                .or_else(|| Self::Qemu.missing())
                .or_else(|| Controller::find().err().map(|error| error.to_string())),
        }
    }
}

fn guests(kernel: Kernel) -> Option<String> {
    Need::Root
        .missing()
        .or_else(|| Assets::find(kernel).err().map(|error| error.to_string()))
        .or_else(|| Controller::find().err().map(|error| error.to_string()))
}

fn missing_program(names: &[&str]) -> Option<String> {
    let missing = names.iter().find_map(|name| assets::program(name).err());
    missing.map(|error| error.to_string())
}

/// Can the test run? If not, the skip is printed and noted.
///
/// ```
/// # fn guest_boots() {
/// use lab::skip::{self, Need};
/// if !skip::can_run("guest_boots", &[Need::Guests]) {
///     return;
/// }
/// # }
/// ```
#[must_use]
pub fn can_run(test: &str, needs: &[Need]) -> bool {
    match needs.iter().find_map(|need| need.missing()) {
        Some(missing) => {
            skipped(test, &missing);
            false
        }
        None => true,
    }
}

/// Prints `SKIPPED <test>: <missing>` and adds the line to `lab/skipped` below the target folder.
pub fn skipped(test: &str, missing: &str) {
    note(&assets::target_dir().join("lab"), test, missing);
}

fn note(folder: &Path, test: &str, missing: &str) {
    let line = format!("SKIPPED {test}: {}", missing.replace('\n', " "));
    eprintln!("{line}");
    let noted = fs::create_dir_all(folder)
        .and_then(|()| {
            OpenOptions::new()
                .create(true)
                .append(true)
                .open(folder.join("skipped"))
        })
        .and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    if let Err(error) = noted {
        eprintln!("lab: cannot note the skip in {}: {error}", folder.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skips_are_noted_one_a_line() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("lab");
        note(&folder, "boots", "root");
        note(&folder, "folds", "two\nlines");
        assert_eq!(
            fs::read_to_string(folder.join("skipped")).unwrap(),
            "SKIPPED boots: root\nSKIPPED folds: two lines\n"
        );
    }
}
