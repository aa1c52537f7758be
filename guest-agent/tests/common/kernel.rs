//! A tree of files that answers writes as the kernel does, and fails on demand.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use hint_agent::files::{Files, Root};
use hint_proto::CpuSet;
use rustix::io::Errno;

pub(crate) const CGROUPS: &str = "sys/fs/cgroup";

/// The write number `nth` (from 1) to a file whose path ends with `path` fails with `errno`.
#[derive(Debug, Clone)]
pub(crate) struct Fault {
    pub(crate) path: String,
    pub(crate) nth: usize,
    pub(crate) errno: Errno,
}

/// Files below a root, with the kernel's manners.
#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    root: PathBuf,
    files: Root,
    faults: Rc<RefCell<Vec<Fault>>>,
    writes: Rc<RefCell<Vec<(PathBuf, String)>>>,
    online_next: Rc<RefCell<Option<String>>>,
}

impl Kernel {
    pub(crate) fn new(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        Self {
            files: Root::new(&root),
            root,
            faults: Rc::default(),
            writes: Rc::default(),
            online_next: Rc::default(),
        }
    }

    /// Lets a write fail; forgets the faults and writes before.
    pub(crate) fn fail(&self, path: &str, nth: usize, errno: Errno) {
        self.heal();
        self.fail_too(path, nth, errno);
    }

    /// Lets another write fail.
    pub(crate) fn fail_too(&self, path: &str, nth: usize, errno: Errno) {
        self.faults.borrow_mut().push(Fault {
            path: path.to_owned(),
            nth,
            errno,
        });
    }

    /// These CPUs will be online just before the next write.
    pub(crate) fn online_at_next_write(&self, list: &str) {
        *self.online_next.borrow_mut() = Some(list.to_owned());
    }

    /// Nothing fails any more; also forgets the writes so far.
    pub(crate) fn heal(&self) {
        self.faults.borrow_mut().clear();
        self.writes.borrow_mut().clear();
    }

    /// The writes so far, the failed ones too.
    pub(crate) fn writes(&self) -> Vec<(PathBuf, String)> {
        self.writes.borrow().clone()
    }

    /// All files with their text.
    pub(crate) fn tree(&self) -> BTreeMap<PathBuf, String> {
        let mut tree = BTreeMap::new();
        let mut open = vec![self.root.clone()];
        while let Some(dir) = open.pop() {
            for entry in fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    open.push(path);
                } else {
                    let text = fs::read_to_string(&path).unwrap();
                    tree.insert(path, text);
                }
            }
        }
        tree
    }

    /// Makes a top-level group; with the controller's files if it is enabled.
    pub(crate) fn add_group(&self, name: &str) {
        let group = self.root.join(CGROUPS).join(name);
        fs::create_dir_all(&group).unwrap();
        fs::write(group.join("cgroup.type"), "domain\n").unwrap();
        fs::write(group.join("cgroup.events"), "populated 1\nfrozen 0\n").unwrap();
        if self.control().contains("cpuset") {
            self.add_cpuset(&group);
        }
    }

    fn control(&self) -> String {
        fs::read_to_string(self.root.join(CGROUPS).join("cgroup.subtree_control")).unwrap()
    }

    fn groups(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.root.join(CGROUPS)).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.is_dir()).collect()
    }

    fn online(&self) -> CpuSet {
        let path = self.root.join("sys/devices/system/cpu/online");
        fs::read_to_string(path).unwrap().parse().unwrap()
    }

    fn add_cpuset(&self, group: &Path) {
        fs::write(group.join("cpuset.cpus"), "\n").unwrap();
        fs::write(group.join("cpuset.cpus.partition"), "member\n").unwrap();
        let effective = format!("{}\n", self.online());
        fs::write(group.join("cpuset.cpus.effective"), effective).unwrap();
    }

    fn write_control(&self, path: &Path, text: &str) -> io::Result<()> {
        let mut names: Vec<String> = self
            .control()
            .split_ascii_whitespace()
            .map(str::to_owned)
            .collect();
        match text.trim() {
            "+cpuset" => {
                names.insert(0, "cpuset".to_owned());
                for group in self.groups() {
                    self.add_cpuset(&group);
                }
            }
            "-cpuset" => {
                names.retain(|name| name != "cpuset");
                for group in self.groups() {
                    for file in [
                        "cpuset.cpus",
                        "cpuset.cpus.partition",
                        "cpuset.cpus.effective",
                    ] {
                        let _ = fs::remove_file(group.join(file));
                    }
                }
            }
            _ => return Err(Errno::INVAL.into()),
        }
        self.files.write(path, &format!("{}\n", names.join(" ")))
    }

    fn write_cpuset(&self, path: &Path, text: &str) -> io::Result<()> {
        let cpus = CpuSet::parse_list(text).map_err(|_| Errno::INVAL)?;
        let events = self.read(&path.with_file_name("cgroup.events"))?;
        if cpus.is_empty() && self.read(path)?.trim() != "" && events.contains("populated 1") {
            return Err(Errno::NOSPC.into());
        }
        self.files.write(path, &format!("{cpus}\n"))?;
        let allowed = cpus.intersection(&self.online());
        let effective = if allowed.is_empty() {
            self.online()
        } else {
            allowed
        };
        let beside = path.with_file_name("cpuset.cpus.effective");
        self.files.write(&beside, &format!("{effective}\n"))
    }

    fn write_paravirt(&self, path: &Path, text: &str) -> io::Result<()> {
        let avoided = CpuSet::parse_list(text).map_err(|_| Errno::INVAL)?;
        let online = self.online();
        if avoided == online || avoided.len() > online.len() {
            return Err(Errno::INVAL.into());
        }
        self.files.write(path, &format!("{avoided}\n"))
    }
}

impl Files for Kernel {
    fn read(&self, path: &Path) -> io::Result<String> {
        self.files.read(path)
    }

    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        assert!(!text.is_empty(), "the kernel sees no empty write");
        self.writes
            .borrow_mut()
            .push((path.to_owned(), text.to_owned()));
        if let Some(list) = self.online_next.borrow_mut().take() {
            fs::write(self.root.join("sys/devices/system/cpu/online"), list)?;
        }
        for fault in self.faults.borrow().iter() {
            let writes = self.writes.borrow();
            let count = writes
                .iter()
                .filter(|(path, _)| path.to_str().unwrap().ends_with(&fault.path))
                .count();
            if path.to_str().unwrap().ends_with(&fault.path) && count == fault.nth {
                return Err(fault.errno.into());
            }
        }
        self.files.read(path)?;
        match path.file_name().unwrap().to_str().unwrap() {
            "cgroup.subtree_control" => self.write_control(path, text),
            "cpuset.cpus" => self.write_cpuset(path, text),
            "paravirt" => self.write_paravirt(path, text),
            _ => Err(Errno::ACCESS.into()),
        }
    }

    fn writable(&self, path: &Path) -> io::Result<()> {
        for fault in self.faults.borrow().iter() {
            if fault.nth == 0 && path.to_str().unwrap().ends_with(&fault.path) {
                return Err(fault.errno.into());
            }
        }
        self.files.writable(path)
    }

    fn directories(&self, path: &Path) -> io::Result<Vec<String>> {
        self.files.directories(path)
    }
}
