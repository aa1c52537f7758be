//! QEMU: `qemu-system-*`, `qemu-kvm`, `kvm`, also as libvirt, KubeVirt, Proxmox and kata start it. Thread names come from
//! `debug-threads=on`, which libvirt always sets.

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::{Identity, Vmm, after_prefix};
use crate::discover::process::Process;

/// QEMU.
#[derive(Debug)]
pub(super) struct Qemu;

impl Vmm for Qemu {
    fn recognises(&self, process: &Process) -> bool {
        let program = process.program();
        program.starts_with("qemu-system-") || program == "qemu-kvm" || program == "kvm"
    }

    fn may_run_without_kvm(&self) -> bool {
        true
    }

    fn identify(&self, process: &Process) -> Identity {
        let mut identity = Identity::default();
        let mut chardevs: Vec<(String, PathBuf)> = Vec::new();
        let mut vhost_user: Vec<String> = Vec::new();
        let mut monitors: Vec<String> = Vec::new();
        let mut arguments = process.arguments.iter().skip(1);
        while let Some(option) = arguments.next() {
            let option = option
                .strip_prefix('-')
                .map_or("", |option| option.strip_prefix('-').unwrap_or(option));
            let wanted = [
                "name",
                "uuid",
                "smbios",
                "chardev",
                "device",
                "mon",
                "qmp",
                "qmp-pretty",
            ];
            let wanted = wanted.contains(&option);
            let Some(value) = wanted.then(|| arguments.next()).flatten() else {
                continue;
            };
            let options = Options::parse(value);
            match option {
                "name" => {
                    identity.name = options
                        .get("guest")
                        .or(options.first())
                        .unwrap_or_default()
                        .to_owned();
                }
                "uuid" => identity.uuid = Some(value.clone()),
                // Proxmox gives the UUID so.
                "smbios" if options.get("type") == Some("1") => {
                    let uuid = options.get("uuid").map(str::to_owned);
                    identity.uuid = identity.uuid.or(uuid);
                }
                "mon" if options.get("mode") == Some("control") => {
                    let chardev = options.get("chardev").or(options.first());
                    monitors.extend(chardev.map(str::to_owned));
                }
                "qmp" | "qmp-pretty" => {
                    let path = options
                        .first()
                        .and_then(|first| first.strip_prefix("unix:"));
                    identity.monitors.extend(path.map(PathBuf::from));
                }
                "chardev" => {
                    if let (Some(id), Some(path)) = (options.get("id"), options.get("path")) {
                        chardevs.push((id.to_owned(), PathBuf::from(path)));
                    }
                }
                "device" => {
                    let driver = options
                        .first()
                        .or(options.get("driver"))
                        .unwrap_or_default();
                    if driver.starts_with("vhost-vsock") {
                        identity.cid = options.get("guest-cid").and_then(|cid| cid.parse().ok());
                    } else if driver.starts_with("vhost-user-vsock") {
                        vhost_user.extend(options.get("chardev").map(str::to_owned));
                    }
                }
                _ => {}
            }
        }
        for (id, path) in chardevs {
            if vhost_user.contains(&id) {
                identity.vhost_user_sockets.push(path);
            } else if monitors.contains(&id) {
                identity.monitors.push(path);
            }
        }
        identity
    }

    fn vcpu_index(&self, thread_name: &str) -> Option<u32> {
        let name = thread_name
            .strip_suffix("/KVM")
            .or_else(|| thread_name.strip_suffix("/TCG"))?;
        after_prefix(name, "CPU ")
    }
}

/// QEMU's `a,key=value,...`: the first part may have no key, and a doubled comma is a comma of the value. Or a JSON object, which
/// is how libvirt writes devices since QEMU 6.2.
struct Options(Vec<(Option<String>, String)>);

impl Options {
    fn parse(text: &str) -> Self {
        if text.starts_with('{') {
            return Self::from_json(text);
        }
        let mut parts = vec![String::new()];
        let mut characters = text.chars().peekable();
        while let Some(character) = characters.next() {
            if character == ',' && characters.next_if_eq(&',').is_none() {
                parts.push(String::new());
            } else if let Some(part) = parts.last_mut() {
                part.push(character);
            }
        }
        let pairs = parts.into_iter().map(|part| match part.split_once('=') {
            Some((key, value)) => (Some(key.to_owned()), value.to_owned()),
            None => (None, part),
        });
        Self(pairs.collect())
    }

    /// Texts and numbers of a JSON object; nothing of what is none.
    fn from_json(text: &str) -> Self {
        let object: Map<String, Value> = serde_json::from_str(text).unwrap_or_default();
        let pairs = object.into_iter().filter_map(|(key, value)| match value {
            Value::String(value) => Some((Some(key), value)),
            Value::Number(value) => Some((Some(key), value.to_string())),
            _ => None,
        });
        Self(pairs.collect())
    }

    fn first(&self) -> Option<&str> {
        self.0
            .first()
            .filter(|(key, _)| key.is_none())
            .map(|(_, value)| value.as_str())
    }

    fn get(&self, wanted: &str) -> Option<&str> {
        self.0
            .iter()
            .find(|(key, _)| key.as_deref() == Some(wanted))
            .map(|(_, value)| value.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identify(line: &[&str]) -> Identity {
        let arguments = line.iter().map(|argument| (*argument).to_owned()).collect();
        Qemu.identify(&Process { pid: 1, arguments })
    }

    #[test]
    fn a_libvirt_command_line_gives_name_uuid_and_cid() {
        let identity = identify(&[
            "/usr/bin/qemu-system-x86_64",
            "-name",
            "guest=web,,1,debug-threads=on",
            "-uuid",
            "6c9a5bd2-2e19-4f8c-9a3f-0a4f4b1a7b10",
            "-device",
            r#"virtio-net-pci,netdev=n,id=net0"#,
            "-device",
            "vhost-vsock-pci,id=vsock0,guest-cid=33,vhostfd=3",
        ]);
        assert_eq!(identity.name, "web,1");
        assert_eq!(
            identity.uuid.as_deref(),
            Some("6c9a5bd2-2e19-4f8c-9a3f-0a4f4b1a7b10")
        );
        assert_eq!(identity.cid, Some(33));
        assert!(identity.vhost_user_sockets.is_empty());
    }

    #[test]
    fn devices_in_json_are_read_as_libvirt_writes_them() {
        let identity = identify(&[
            "/usr/bin/qemu-system-x86_64",
            "-device",
            r#"{"driver":"virtio-net-pci","netdev":"n","id":"net0","bus":"pci.1","addr":"0x0"}"#,
            "-device",
            r#"{"driver":"vhost-vsock-pci","id":"vsock0","guest-cid":33,"vhostfd":"28","bus":"pci.7","addr":"0x0"}"#,
        ]);
        assert_eq!(identity.cid, Some(33));
        let identity = identify(&[
            "qemu-system-x86_64",
            "-chardev",
            "socket,id=c0,path=/run/vm/vu.sock",
            "-device",
            r#"{"driver":"vhost-user-vsock-pci","chardev":"c0"}"#,
        ]);
        assert_eq!(
            identity.vhost_user_sockets,
            [PathBuf::from("/run/vm/vu.sock")]
        );
        for wrong in [
            "{",
            "{}",
            r#"{"driver":7}"#,
            r#"{"driver":"vhost-vsock-pci","guest-cid":-1}"#,
        ] {
            assert_eq!(identify(&["kvm", "-device", wrong]), Identity::default());
        }
    }

    #[test]
    fn a_name_without_a_key_counts_and_a_missing_one_is_empty() {
        assert_eq!(identify(&["kvm", "-name", "db,process=qemu"]).name, "db");
        assert_eq!(identify(&["kvm", "--name", "db"]).name, "db");
        assert_eq!(identify(&["kvm", "-m", "512"]), Identity::default());
        assert_eq!(identify(&["kvm", "-name"]), Identity::default());
    }

    #[test]
    fn only_the_socket_of_the_vsock_back_end_is_taken() {
        let identity = identify(&[
            "qemu-system-x86_64",
            "-chardev",
            "socket,id=c0,path=/run/vm/vu.sock",
            "-chardev",
            "socket,id=mon,path=/run/vm/monitor,server=on",
            "-device",
            "vhost-user-vsock-pci,chardev=c0",
        ]);
        assert_eq!(
            identity.vhost_user_sockets,
            [PathBuf::from("/run/vm/vu.sock")]
        );
    }

    #[test]
    fn monitors_are_found_where_they_have_a_path() {
        let identity = identify(&[
            "/usr/bin/kvm",
            "-id",
            "101",
            "-name",
            "web,debug-threads=on",
            "-chardev",
            "socket,id=qmp,path=/var/run/qemu-server/101.qmp,server=on,wait=off",
            "-mon",
            "chardev=qmp,mode=control",
            "-chardev",
            "socket,id=hmp,path=/run/hmp",
            "-mon",
            "chardev=hmp,mode=readline",
            "-qmp",
            "unix:/run/a,,b.sock,server=on,wait=off",
            "-qmp",
            "tcp:127.0.0.1:4444,server=on",
            "-monitor",
            "unix:/run/human",
            "-smbios",
            "type=1,uuid=6c9a5bd2-2e19-4f8c-9a3f-0a4f4b1a7b10",
        ]);
        assert_eq!(
            identity.monitors,
            [
                PathBuf::from("/run/a,b.sock"),
                PathBuf::from("/var/run/qemu-server/101.qmp")
            ]
        );
        assert_eq!(identity.name, "web");
        assert_eq!(
            identity.uuid.as_deref(),
            Some("6c9a5bd2-2e19-4f8c-9a3f-0a4f4b1a7b10")
        );
        // libvirt hands over an open socket, which nobody else can reach.
        let identity = identify(&[
            "qemu-system-x86_64",
            "-chardev",
            "socket,id=charmonitor,fd=31,server=on,wait=off",
            "-mon",
            "chardev=charmonitor,id=monitor,mode=control",
        ]);
        assert_eq!(identity, Identity::default());
    }

    #[test]
    fn vcpu_threads_are_told_by_their_full_name() {
        for (name, index) in [
            ("CPU 0/KVM", Some(0)),
            ("CPU 47/KVM", Some(47)),
            ("CPU 3/TCG", Some(3)),
            ("CPU /KVM", None),
            ("CPU +1/KVM", None),
            ("CPU 1/KVMx", None),
            ("qemu-system-x86", None),
            ("IO mon_iothread", None),
        ] {
            assert_eq!(Qemu.vcpu_index(name), index, "{name}");
        }
    }

    #[test]
    fn qemu_is_recognised_by_its_program() {
        let recognises = |program: &str| {
            Qemu.recognises(&Process {
                pid: 1,
                arguments: vec![program.to_owned()],
            })
        };
        assert!(recognises("/usr/bin/qemu-system-aarch64"));
        assert!(recognises("/usr/libexec/qemu-kvm"));
        assert!(recognises("/usr/bin/kvm"));
        assert!(!recognises("qemu-img"));
        assert!(!recognises("vi"));
    }
}
