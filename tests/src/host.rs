//! A virtual KVM host: a guest of the lab whose emulated CPUs can virtualise, so that real KVM guests with the kernel's own
//! vsock run in it, beside a broker. What happens in it touches neither KVM nor AF_VSOCK of the machine.
//!
//! ```text
//! machine ─► VirtualHost (QEMU, emulated, 2 pCPUs): hint-broker ◄─ AF_VSOCK ─┐
//!                └─► InnerGuest (QEMU, KVM): hint-agent ─────────────────────┘ work ─► console log in the virtual host
//! ```
//! All of it is slow: wait for states, and for minutes.

use std::path::PathBuf;

use hint_proto::CpuSet;

use crate::assets::{self, AssetError, Assets, Kernel};
use crate::guest::{Guest, GuestError, GuestSpec, WorkId};
use crate::initramfs::{self, Contents, Role};

/// KVM for AMD, which the emulated CPU is, and the host side of vsock; each after those it needs.
const MODULES: [&str; 6] = [
    "virt/lib/irqbypass",
    "arch/x86/kvm/kvm",
    "arch/x86/kvm/kvm-amd",
    "drivers/vhost/vhost_iotlb",
    "drivers/vhost/vhost",
    "drivers/vhost/vhost_vsock",
];

const KERNEL: &str = "/inner/kernel";
const INITRAMFS: &str = "/inner/initramfs";

/// A KVM guest in a virtual host. Its agent dials CID 2, port 737; its work spins on every vCPU.
#[derive(Debug, Clone)]
pub struct InnerGuest {
    /// Its name.
    pub name: String,
    /// Its CID.
    pub cid: u32,
    /// Its vCPUs.
    pub vcpus: u32,
}

/// A running virtual host, without a broker and without guests at first.
#[derive(Debug)]
pub struct VirtualHost {
    guest: Guest,
}

impl VirtualHost {
    /// What is missing for a virtual host, besides what every guest needs; `None` when all is there.
    #[must_use]
    pub fn missing() -> Option<AssetError> {
        assets::firmware()
            .and_then(|_| assets::program("strip"))
            .err()
    }

    /// Boots one with so many pCPUs, and mounts debugfs in it.
    ///
    /// # Errors
    /// When a part is missing, or it does not come up with KVM and vsock.
    pub fn boot(name: &str, pcpus: u32) -> Result<Self, GuestError> {
        let assets = Assets::find(Kernel::Debian)?;
        let agent = assets::agent()?;
        let broker = assets::broker()?;
        let temporary = std::env::temp_dir();
        let folder = tempfile::tempdir().map_err(|source| GuestError::io(&temporary, source))?;

        let inner = folder.path().join("inner");
        let contents = Contents {
            hostname: "inner",
            role: Role::Busy,
            agent: Some(&agent),
            ..Contents::default()
        };
        initramfs::build(&assets, &contents, &folder.path().join("root"), &inner)?;

        let mut programs = vec![assets.qemu.display().to_string()];
        for name in ["hint-broker", "hintctl"] {
            let stripped = folder.path().join(name);
            initramfs::strip(&broker.with_file_name(name), &stripped)?;
            programs.push(stripped.display().to_string());
        }
        let mut files: Vec<(PathBuf, PathBuf)> = assets::firmware()?
            .into_iter()
            .map(|path| (path.clone(), path))
            .collect();
        files.push((assets.kernel, KERNEL.into()));
        files.push((inner, INITRAMFS.into()));
        let spec = GuestSpec {
            vcpus: pcpus,
            memory_mib: 3072,
            programs,
            modules: MODULES.map(str::to_owned).into(),
            files,
            qemu_args: ["-cpu", "EPYC,+svm", "-d", "cpu_reset"]
                .map(str::to_owned)
                .into(),
            ..GuestSpec::named(name)
        };
        let guest = Guest::boot(&spec)?;
        guest.sh(
            "mount -t debugfs debugfs /sys/kernel/debug && mkdir /run/inner /run/hint-broker",
        )?;
        guest.sh("test -c /dev/kvm && test -c /dev/vhost-vsock")?;
        Ok(Self { guest })
    }

    /// The virtual host as the guest that it is.
    #[must_use]
    pub fn guest(&self) -> &Guest {
        &self.guest
    }

    /// How QEMU's emulation of AMD-V lost this host, if it did: now and then the machine resets or hangs without a word of its
    /// kernel, which has no part in that. `None` while it answers, and when its kernel panicked.
    #[must_use]
    pub fn lost_to_emulation(&self) -> Option<&'static str> {
        let read = |path| {
            let bytes = std::fs::read(path).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        if read(self.guest.console_log()).contains("Kernel panic") {
            return None;
        }
        match self.guest.ended() {
            // A reset ends QEMU without an error, since it may not reboot.
            Some(status) if !status.success() => None,
            Some(_) if read(self.guest.qemu_log()).contains("Triple fault") => {
                Some("a triple fault")
            }
            Some(_) => Some("a reset"),
            // Commands run at real-time priority, so no program in the host keeps them from their answer.
            None => self.guest.run("true").is_err().then_some("a hang"),
        }
    }

    /// Starts the broker with this configuration, at normal priority, and gives its process id.
    ///
    /// # Errors
    /// As [`Guest::sh`]. That it starts and fails is no error here: see [`VirtualHost::broker_log`].
    pub fn start_broker(&self, config: &str) -> Result<u32, GuestError> {
        let pid = self.guest.sh(&format!(
            "cat >/etc/hint-broker.toml <<'END'\n{config}\nEND\n\
             chrt -o 0 setsid hint-broker run </dev/null >>/run/hint-broker.log 2>&1 4>&- &\n\
             echo $!"
        ))?;
        pid.parse().map_err(|_| GuestError::Unexpected {
            guest: self.guest.name().to_owned(),
            expected: "the broker's process id",
            found: pid,
        })
    }

    /// What brokers logged since boot.
    ///
    /// # Errors
    /// As [`Guest::sh`].
    pub fn broker_log(&self) -> Result<String, GuestError> {
        self.guest.sh("cat /run/hint-broker.log")
    }

    /// Starts a KVM guest in a CPU group of its own. Its vCPU threads have no names, so that only KVM's debugfs tells them.
    ///
    /// # Errors
    /// As [`Guest::sh`].
    pub fn start_guest(&self, inner: &InnerGuest) -> Result<WorkId, GuestError> {
        let InnerGuest { name, cid, vcpus } = inner;
        self.guest.spawn_work(&format!(
            "exec qemu-system-x86_64 -accel kvm -cpu host -smp {vcpus} -m 256 -name guest={name} \
             -L /usr/share/qemu -L /usr/share/seabios -nodefaults -vga none -display none -no-reboot \
             -kernel {KERNEL} -initrd {INITRAMFS} \
             -append 'console=ttyS0 quiet panic=-1 mitigations=off random.trust_cpu=on' \
             -serial file:/run/inner/{name} -device vhost-vsock-pci,guest-cid={cid}"
        ))
    }

    /// The CPUs that a KVM guest's work may use, and the number of the report, which grows; `None` before the first.
    ///
    /// # Errors
    /// As [`Guest::run`].
    pub fn work_cpus(&self, name: &str) -> Result<Option<(u64, CpuSet)>, GuestError> {
        let console = self.guest.run(&format!("tail -c 4096 /run/inner/{name}"))?;
        Ok(last_report(&String::from_utf8_lossy(&console.stdout)))
    }

    /// The last lines of a KVM guest's console.
    ///
    /// # Errors
    /// As [`Guest::sh`].
    pub fn console(&self, name: &str) -> Result<String, GuestError> {
        self.guest.sh(&format!("tail -n 30 /run/inner/{name}"))
    }
}

/// The last whole line `work-cpus NUMBER LIST` of a console.
fn last_report(console: &str) -> Option<(u64, CpuSet)> {
    let (whole, _) = console.rsplit_once('\n')?;
    whole.lines().rev().find_map(|line| {
        let (number, list) = line.trim().strip_prefix("work-cpus ")?.split_once(' ')?;
        Some((number.parse().ok()?, CpuSet::parse_list(list).ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_reports_count() {
        let cpus = |list| CpuSet::parse_list(list).unwrap();
        let console =
            "cpus 1\r\nwork-cpus 12 0-3\r\nwork-cpus 13 0,2\r\n[ 1.2] other\r\nwork-cpus 14 0";
        assert_eq!(last_report(console), Some((13, cpus("0,2"))));
        assert_eq!(last_report("work-cpus 12"), None);
        assert_eq!(last_report("work-cpus x 0\n"), None);
    }
}
