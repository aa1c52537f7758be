//! The kernel's files below an injected root: `/` in a guest, a tree of plain files in tests.
//!
//! Paths are always the guest's own (`/sys/...`); only this module puts the root in front.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// What the agent does with files of sysfs, procfs and cgroupfs.
pub trait Files: fmt::Debug {
    /// The whole text; bytes that are no UTF-8 are replaced.
    ///
    /// # Errors
    /// The kernel's.
    fn read(&self, path: &Path) -> io::Result<String>;

    /// Writes the text in one call to a file that must exist.
    ///
    /// # Errors
    /// The kernel's.
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;

    /// Can the file be opened for writing?
    ///
    /// # Errors
    /// The kernel's reason why not.
    fn writable(&self, path: &Path) -> io::Result<()>;

    /// Names of the directories in a directory, sorted; names that are no UTF-8 are left out.
    ///
    /// # Errors
    /// The kernel's.
    fn directories(&self, path: &Path) -> io::Result<Vec<String>>;
}

/// Real files below a directory.
#[derive(Debug, Clone)]
pub struct Root(PathBuf);

impl Root {
    /// Files below `root`.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self(root.into())
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open(&self, path: &Path) -> io::Result<File> {
        File::open(self.resolve(path))
    }

    fn resolve(&self, path: &Path) -> PathBuf {
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }
}

impl Files for Root {
    fn read(&self, path: &Path) -> io::Result<String> {
        let bytes = fs::read(self.resolve(path))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        // Truncation means nothing to the kernel's files; plain files in tests need it.
        let mut file = OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(self.resolve(path))?;
        file.write_all(text.as_bytes())
    }

    fn writable(&self, path: &Path) -> io::Result<()> {
        OpenOptions::new()
            .write(true)
            .open(self.resolve(path))
            .map(drop)
    }

    fn directories(&self, path: &Path) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.resolve(path))? {
            let entry = entry?;
            if entry.file_type().is_ok_and(|kind| kind.is_dir())
                && let Ok(name) = entry.file_name().into_string()
            {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }
}

/// Does the error mean that the file, or what it stands for, is not there (any more)?
#[must_use]
pub fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || error
            .raw_os_error()
            .is_some_and(|errno| errno == rustix::io::Errno::NODEV.raw_os_error())
}
