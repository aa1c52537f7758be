//! QEMU's command line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::assets::Assets;

use super::spec::{GuestSpec, Topology};

/// The files of one guest.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) initramfs: PathBuf,
    pub(super) console: PathBuf,
    pub(super) qemu_log: PathBuf,
    pub(super) command_port: PathBuf,
    pub(super) event_port: PathBuf,
    pub(super) qmp: PathBuf,
}

impl Files {
    pub(super) fn new(folder: &Path) -> Self {
        Self {
            initramfs: folder.join("initramfs.cpio"),
            console: folder.join("console.log"),
            qemu_log: folder.join("qemu.log"),
            command_port: folder.join("command.sock"),
            event_port: folder.join("event.sock"),
            qmp: folder.join("qmp.sock"),
        }
    }
}

pub(super) fn arguments(
    spec: &GuestSpec,
    assets: &Assets,
    uuid: &str,
    files: &Files,
    vhost_socket: &Path,
) -> Vec<OsString> {
    let mut args = Arguments(Vec::new());
    args.add("-accel", "tcg,thread=multi");
    args.add("-name", format!("guest={},debug-threads=on", spec.name));
    args.add("-uuid", uuid);
    args.add("-smp", smp(spec));
    args.add("-m", format!("{}M", spec.memory_mib));
    for option in ["-nographic", "-no-reboot", "-nodefaults"] {
        args.0.push(option.into());
    }
    args.add("-kernel", &assets.kernel);
    args.add("-initrd", &files.initramfs);
    // Without mitigations each system call is some thousand emulated instructions shorter.
    let mut words = vec![
        "console=ttyS0",
        "panic=-1",
        "mitigations=off",
        "random.trust_cpu=on",
    ];
    words.extend(spec.kernel_args.iter().map(String::as_str));
    args.add("-append", words.join(" "));

    args.add("-serial", prefixed("file:", &files.console, ""));
    args.add("-qmp", prefixed("unix:", &files.qmp, ",server=on,wait=off"));
    args.add("-device", "virtio-serial-pci");
    for (id, socket) in [
        ("command", &files.command_port),
        ("event", &files.event_port),
    ] {
        args.add(
            "-chardev",
            prefixed(&format!("socket,id={id},path="), socket, ""),
        );
        args.add(
            "-device",
            format!("virtserialport,chardev={id},name=lab.{id}"),
        );
    }

    // A vhost-user device needs the guest's memory shared, and memory comes by NUMA node.
    let memory = spec.memory_mib / spec.numa_nodes;
    let mut next = 0;
    for node in 0..spec.numa_nodes {
        let even = spec.vcpus / spec.numa_nodes;
        let size = spec.node_vcpus.get(node as usize).copied().unwrap_or(even);
        let cpus: String = (next..next + size)
            .map(|vcpu| format!("cpus={vcpu},"))
            .collect();
        next += size;
        args.add(
            "-object",
            format!("memory-backend-memfd,id=memory{node},size={memory}M,share=on"),
        );
        args.add(
            "-numa",
            format!("node,nodeid={node},{cpus}memdev=memory{node}"),
        );
    }
    args.add(
        "-chardev",
        prefixed("socket,id=vsock,path=", vhost_socket, ""),
    );
    args.add("-device", "vhost-user-vsock-pci,chardev=vsock");
    args.0.extend(spec.qemu_args.iter().map(OsString::from));
    args.0
}

struct Arguments(Vec<OsString>);

impl Arguments {
    fn add(&mut self, option: &str, value: impl Into<OsString>) {
        self.0.extend([option.into(), value.into()]);
    }
}

fn smp(spec: &GuestSpec) -> String {
    let Topology {
        sockets,
        cores,
        threads,
    } = spec.topology.unwrap_or(Topology {
        sockets: spec.vcpus,
        cores: 1,
        threads: 1,
    });
    format!(
        "{},sockets={sockets},cores={cores},threads={threads}",
        spec.vcpus
    )
}

fn prefixed(before: &str, path: &Path, after: &str) -> OsString {
    let mut text = OsString::from(before);
    text.push(path);
    text.push(after);
    text
}
