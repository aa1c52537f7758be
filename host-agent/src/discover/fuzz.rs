//! The fuzz targets of this stage.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::process::{self, Process};
use super::vmm::{self, KNOWN, after_prefix};
use super::{qmp, scope, vhost_vsock};
use crate::procfs::{self, Escapes, UnixSocket, number, unescape, unix_sockets};

fn process(arguments: &[&str]) -> Process {
    Process {
        pid: 1,
        arguments: arguments.iter().map(|text| (*text).to_owned()).collect(),
    }
}

/// `/proc/<pid>/cmdline` of every VMM: a name comes back whatever is in it, and thread names give the number in them.
pub fn cmdline(data: &[u8]) {
    let arguments = procfs::arguments(data);
    assert!(arguments.iter().all(|argument| !argument.is_empty()));
    let any = Process { pid: 1, arguments };
    let whole: usize = any.arguments.iter().map(String::len).sum();
    for vmm in KNOWN {
        let identity = vmm.identify(&any);
        assert!(identity.name.len() <= whole);
        assert!(identity.monitors.len() + identity.vhost_user_sockets.len() <= any.arguments.len());
        for name in &any.arguments {
            if let Some(index) = vmm.vcpu_index(name) {
                assert!(name.contains(&index.to_string()), "{name:?} is {index}");
            }
        }
    }
    let _ = vmm::of(&any);
    let _ = vhost_vsock::hybrid_socket(&any, Path::new("/run/vu"));
    let text = String::from_utf8_lossy(data).replace('\0', "0");
    let doubled = text.replace(',', ",,");
    let qemu = process(&[
        "/usr/bin/qemu-system-x86_64",
        "-name",
        &format!("guest={doubled},debug-threads=on"),
        "-chardev",
        &format!("socket,id=m,path={doubled},server=on"),
        "-mon",
        "chardev=m,mode=control",
    ]);
    let identity = vmm::of(&qemu).expect("it is QEMU").identify(&qemu);
    assert_eq!(identity.name, text);
    assert_eq!(identity.monitors, [PathBuf::from(&text)]);
    if !text.is_empty() {
        let firecracker = process(&["/firecracker", "--id", &text]);
        let vmm = vmm::of(&firecracker).expect("it is Firecracker");
        assert_eq!(vmm.identify(&firecracker).name, text);
    }
}

/// `status` of processes and threads: a value comes back behind any other lines.
pub fn status(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let _ = process::uid_in_status(&text);
    let _ = process::innermost_pid(&text);
    if let Some(cpus) = process::cpus_in_status(&text) {
        assert!(!cpus.is_empty());
        let again = format!("Name:\tx\nCpus_allowed_list:\t{cpus}\n");
        assert_eq!(process::cpus_in_status(&again), Some(cpus));
    }
    // The kernel writes a line end in a name as two characters.
    let name = text.replace(['\n', '\r'], "\\n");
    let whole =
        format!("Name:\t{name}\nUid:\t1\t2\t3\t4\nNSpid:\t900\t8\nCpus_allowed_list:\t0-3\n");
    assert_eq!(process::uid_in_status(&whole), Some(2));
    assert_eq!(process::innermost_pid(&whole), Some(8));
}

/// Names of VMs in the names of their groups: systemd's escapes and libvirt's numbers come off, and nothing else.
pub fn libvirt_scope(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let _ = scope::name(&text);
    if let Some(index) = process::vcpu_in_groups(&text) {
        assert!(text.contains(&index.to_string()));
    }
    let plain = unescape(&text, Escapes::Hex);
    assert!(text.contains("\\x") || plain == text);
    let mut escaped = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() {
            escaped.push(char::from(byte));
        } else {
            write!(escaped, "\\x{byte:02x}").expect("a string takes all");
        }
    }
    assert_eq!(unescape(&escaped, Escapes::Hex), text);
    let group =
        format!("0::/machine.slice/machine-qemu\\x2d37\\x2d{escaped}.scope/libvirt/emulator\n");
    assert_eq!(scope::name(&group).as_deref(), Some(&*text));
}

/// `net/unix`: a path comes back with its blanks, and a line that is none is passed over.
pub fn unix_table(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    for socket in unix_sockets(&text) {
        assert!(!socket.path.is_empty() && !socket.path.contains('\n'));
    }
    let path = text.replace(['\n', '\r'], "?");
    let line = format!("0000000000000000: 00000002 00000000 00010000 0001 01 22845 {path}\n");
    let wanted = UnixSocket {
        inode: 22845,
        connected: false,
        listening: true,
        path: &path,
    };
    let found: Vec<UnixSocket<'_>> = unix_sockets(&line).collect();
    assert_eq!(found, Vec::from_iter((!path.is_empty()).then_some(wanted)));
}

/// Names and contents of KVM's debugfs.
pub fn debugfs(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    for name in text.lines() {
        if let Some(index) = after_prefix(name, "vcpu") {
            assert_eq!(after_prefix(&format!("vcpu{index}"), "vcpu"), Some(index));
            assert!(name.contains(&index.to_string()));
        }
        if let Some(tid) = number::<u32>(name.trim()) {
            assert!(name.trim().ends_with(&tid.to_string()));
        }
    }
}

/// What a monitor answers: every vCPU has a thread of its own place, or there is no answer.
pub fn qmp(data: &[u8]) {
    let Ok(value) = serde_json::from_slice::<Value>(data) else {
        return;
    };
    let Some(threads) = qmp::parse(&value) else {
        return;
    };
    assert!(!threads.is_empty());
    assert_eq!(Some(threads.len()), value.as_array().map(Vec::len));
    let again = threads
        .iter()
        .map(|(index, tid)| serde_json::json!({"cpu-index": index, "thread-id": tid}));
    assert_eq!(qmp::parse(&Value::from_iter(again)), Some(threads));
}

/// Firecracker's configuration file.
pub fn firecracker_config(data: &[u8]) {
    if let Some(path) = vmm::vsock_in_config(data) {
        assert!(!path.as_os_str().is_empty());
        let config = serde_json::json!({"vsock": {"guest_cid": 3, "uds_path": path}}).to_string();
        assert_eq!(vmm::vsock_in_config(config.as_bytes()), Some(path));
    }
}
