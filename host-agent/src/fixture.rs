//! Trees of `/proc` and `/sys` for tests, from a short text:
//!
//! ```text
//! # a comment
//! [sys/fs/cgroup/machine.slice]          the folder of what follows
//! cpu.weight = 100                       a file; \0, \n, \t and \\ are escapes, \x is none; a line end is added where there is no \0
//! | a second line
//! 9 -> anon_inode:kvm-vm                 a link
//! @process 2301 | /usr/bin/qemu-system-x86_64\0-name\0web
//! @kvm 2301                              it holds a KVM VM as descriptor 9
//! @thread 2301 2310 | CPU 0/KVM | 0-7 | 0::/machine.slice/web.scope
//! ```

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::model::{Accelerator, Vcpus, Vm, VmId};
use crate::root::Root;

/// A tree in a folder of its own.
pub(crate) struct Tree {
    directory: TempDir,
    pub(crate) root: Root,
}

impl Tree {
    pub(crate) fn new(text: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let root = Root::new(directory.path());
        let tree = Self { directory, root };
        tree.add(text);
        tree
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Writes what `text` says over what is there.
    pub(crate) fn add(&self, text: &str) {
        let mut folder = "";
        let mut last = String::new();
        for line in text.lines().map(str::trim_start) {
            if line.is_empty() || line.starts_with('#') {
            } else if let Some(name) = line.strip_prefix('[') {
                folder = name.split_once(']').unwrap().0;
                fs::create_dir_all(self.path().join(folder)).unwrap();
            } else if let Some(directive) = line.strip_prefix('@') {
                self.directive(directive);
            } else if let Some(more) = line.strip_prefix("| ") {
                let old = fs::read_to_string(self.path().join(&last)).unwrap();
                self.write(&last, &format!("{old}{}", unescape(more)));
            } else if let Some((name, target)) = line.split_once(" -> ") {
                let link = self.path().join(folder).join(name);
                fs::create_dir_all(link.parent().unwrap()).unwrap();
                std::os::unix::fs::symlink(target, link).unwrap();
            } else {
                let (name, value) = line.split_once(" =").unwrap_or_else(|| panic!("{line:?}"));
                last = format!("{folder}/{name}");
                self.write(&last, &unescape(value.strip_prefix(' ').unwrap_or(value)));
            }
        }
    }

    pub(crate) fn write(&self, relative: &str, text: &str) {
        let path = self.path().join(relative);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(crate) fn remove(&self, relative: &str) {
        let path = self.path().join(relative);
        if path.is_dir() {
            fs::remove_dir_all(path).unwrap();
        } else {
            fs::remove_file(path).unwrap();
        }
    }

    fn directive(&self, text: &str) {
        let mut fields = text.split(" | ");
        let mut head = fields.next().unwrap().split_ascii_whitespace();
        let what = head.next().unwrap();
        let pid = head.next().unwrap();
        match what {
            "process" => {
                let tail = "S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0";
                self.write(
                    &format!("proc/{pid}/stat"),
                    &format!("{pid} (x) {tail} {pid}0 0 0\n"),
                );
                self.write(
                    &format!("proc/{pid}/status"),
                    "Name:\tx\nUid:\t0\t0\t0\t0\n",
                );
                let line = unescape(fields.next().unwrap());
                self.write(
                    &format!("proc/{pid}/cmdline"),
                    &format!("{}\0", line.trim_end()),
                );
            }
            "kvm" => self.add(&format!("[proc/{pid}/fd]\n9 -> anon_inode:kvm-vm")),
            "thread" => {
                let task = format!("proc/{pid}/task/{}", head.next().unwrap());
                self.write(
                    &format!("{task}/comm"),
                    &format!("{}\n", fields.next().unwrap()),
                );
                let cpus = fields.next().unwrap();
                self.write(
                    &format!("{task}/status"),
                    &format!("Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t{cpus}\n"),
                );
                let groups = unescape(fields.next().unwrap());
                self.write(&format!("{task}/cgroup"), &groups);
                self.write(&format!("{task}/schedstat"), "1000 2000 3\n");
                self.write(&format!("{task}/stat"), "1 (x) S 1 1\n");
            }
            other => panic!("{other:?}"),
        }
    }
}

fn unescape(text: &str) -> String {
    let ends_itself = text.contains(r"\0");
    let mut plain = String::new();
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        if character != '\\' {
            plain.push(character);
            continue;
        }
        match characters.next() {
            Some('0') => plain.push('\0'),
            Some('n') => plain.push('\n'),
            Some('t') => plain.push('\t'),
            // systemd's escapes stay.
            Some('x') => plain.push_str("\\x"),
            other => plain.extend(other),
        }
    }
    if !ends_itself {
        plain.push('\n');
    }
    plain
}

/// A VM whose first vCPU is thread `tids[0]`, and so on.
pub(crate) fn vm(pid: u32, tids: &[u32]) -> Vm {
    Vm {
        id: VmId {
            pid,
            start_ticks: u64::from(pid) * 10,
        },
        name: String::new(),
        uuid: None,
        accelerator: Accelerator::Kvm,
        vcpus: Vcpus::Known((0..).zip(tids.iter().copied()).collect()),
        cid: None,
        hybrid_socket: None,
    }
}
