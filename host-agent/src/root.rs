//! Reading below an injected root: `/` in production, a fixture tree in tests. Every error carries its path, and what is not
//! there is a value, not an error.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

#[cfg(test)]
pub(crate) use self::faults::{Fault, Faults};

/// Where `proc` and `sys` are.
#[derive(Debug, Clone)]
pub struct Root {
    base: PathBuf,
    #[cfg(test)]
    faults: Option<std::sync::Arc<Faults>>,
}

/// A file that is there and can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The system refuses to read it.
    #[error("can't read {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It says something else than expected.
    #[error("expected {expected} in {path}, found {found:?}")]
    Content {
        /// The file.
        path: PathBuf,
        /// What should stand there.
        expected: &'static str,
        /// What stands there, shortened.
        found: String,
    },
}

impl ReadError {
    /// A content error, with what was found cut to a length that fits a log line.
    #[must_use]
    pub fn content(path: &Path, expected: &'static str, found: &str) -> Self {
        let found = found.chars().take(80).collect();
        Self::Content {
            path: path.to_owned(),
            expected,
            found,
        }
    }

    /// Was it a lack of permission?
    #[must_use]
    pub fn is_denied(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == ErrorKind::PermissionDenied)
    }
}

impl Root {
    /// Reads below `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            base: path.into(),
            #[cfg(test)]
            faults: None,
        }
    }

    /// The same root, where reads fail as `faults` says.
    #[cfg(test)]
    pub(crate) fn with_faults(path: impl Into<PathBuf>, faults: std::sync::Arc<Faults>) -> Self {
        Self {
            base: path.into(),
            faults: Some(faults),
        }
    }

    /// The real path of `relative`; a leading slash means this root.
    #[must_use]
    pub fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        let relative = relative.as_ref();
        self.base
            .join(relative.strip_prefix("/").unwrap_or(relative))
    }

    /// The bytes of a file; `None` when it, or the process it belongs to, is gone or never was.
    ///
    /// # Errors
    /// When the file is there and can't be read.
    pub fn read(&self, relative: &str) -> Result<Option<Vec<u8>>, ReadError> {
        let path = self.path(relative);
        let bytes = self.access(&path, std::fs::read(&path))?;
        #[cfg(test)]
        let bytes = bytes.map(|bytes| self.spoil(&path, bytes));
        Ok(bytes)
    }

    /// The bytes of a plain file that a stranger named, of at most `most` bytes: what is no plain file is not even opened, since that
    /// alone can wait for ever or do something. `None` when it is gone or never was.
    ///
    /// # Errors
    /// When it is no plain file, too long, or can't be read.
    pub fn read_regular(&self, relative: &str, most: u64) -> Result<Option<Vec<u8>>, ReadError> {
        let path = self.path(relative);
        let Some(bytes) = self.access(&path, read_regular(&path, most))? else {
            return Ok(None);
        };
        #[cfg(test)]
        let bytes = self.spoil(&path, bytes);
        if u64::try_from(bytes.len()).is_ok_and(|length| length > most) {
            return Err(ReadError::content(&path, "a short file", "a longer one"));
        }
        Ok(Some(bytes))
    }

    /// The text of a file, whatever its bytes; `None` when it is gone or never was.
    ///
    /// # Errors
    /// When the file is there and can't be read.
    pub fn read_text(&self, relative: &str) -> Result<Option<String>, ReadError> {
        Ok(self
            .read(relative)?
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// The names in a directory; `None` when it is gone or never was.
    ///
    /// # Errors
    /// When the directory is there and can't be read.
    pub fn list(&self, relative: &str) -> Result<Option<Vec<OsString>>, ReadError> {
        self.entries(relative, |_| true)
    }

    /// The names of the directories in a directory; `None` when it is gone or never was.
    ///
    /// # Errors
    /// When the directory is there and can't be read.
    pub fn list_directories(&self, relative: &str) -> Result<Option<Vec<OsString>>, ReadError> {
        self.entries(relative, |entry| {
            entry.file_type().is_ok_and(|kind| kind.is_dir())
        })
    }

    fn entries(
        &self,
        relative: &str,
        wanted: impl Fn(&std::fs::DirEntry) -> bool,
    ) -> Result<Option<Vec<OsString>>, ReadError> {
        let path = self.path(relative);
        let entries = self.access(&path, std::fs::read_dir(&path))?;
        // A process that ends while its directory is read ends the list; what was read so far is right.
        Ok(entries.map(|entries| {
            entries
                .map_while(Result::ok)
                .filter(wanted)
                .map(|entry| entry.file_name())
                .collect()
        }))
    }

    /// Where a symbolic link points; `None` when it is gone.
    ///
    /// # Errors
    /// When the link is there and can't be read.
    pub fn link(&self, relative: &str) -> Result<Option<PathBuf>, ReadError> {
        let path = self.path(relative);
        self.access(&path, std::fs::read_link(&path))
    }

    /// Every read ends here; tests make it fail.
    #[allow(clippy::unused_self, reason = "tests keep faults in it")]
    fn access<T>(&self, path: &Path, result: io::Result<T>) -> Result<Option<T>, ReadError> {
        #[cfg(test)]
        if let Some(error) = self.faults.as_ref().and_then(|faults| faults.error(path)) {
            return gone_is_none(Err(error), path);
        }
        gone_is_none(result, path)
    }

    #[cfg(test)]
    fn spoil(&self, path: &Path, bytes: Vec<u8>) -> Vec<u8> {
        match &self.faults {
            Some(faults) => faults.spoil(path, bytes),
            None => bytes,
        }
    }
}

/// A file below a root that stays open between reads: that makes a read seven times cheaper.
#[derive(Debug)]
pub struct KeptFile {
    relative: String,
    file: Option<File>,
}

impl KeptFile {
    /// A file that the first [`read_again`](Self::read_again) opens.
    pub fn new(relative: impl Into<String>) -> Self {
        Self {
            relative: relative.into(),
            file: None,
        }
    }

    /// Opens a file; one that is gone or never was reads as `None`.
    ///
    /// # Errors
    /// When the file is there and can't be opened.
    pub fn open(root: &Root, relative: impl Into<String>) -> Result<Self, ReadError> {
        let mut kept = Self::new(relative);
        kept.reopen(root)?;
        Ok(kept)
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self, root: &Root) -> PathBuf {
        root.path(&self.relative)
    }

    /// The text of the file as it was opened, from its beginning; `None` when what it belongs to is gone.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn read(&self, root: &Root) -> Result<Option<String>, ReadError> {
        let Some(file) = &self.file else {
            return Ok(None);
        };
        let path = self.path(root);
        let bytes = root.access(&path, read_whole(file))?;
        #[cfg(test)]
        let bytes = bytes.map(|bytes| root.spoil(&path, bytes));
        Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// As [`read`](Self::read), of what is there under this path now: another file may have taken the place of the one that
    /// was opened.
    ///
    /// # Errors
    /// When it is there and can't be read.
    pub fn read_again(&mut self, root: &Root) -> Result<Option<String>, ReadError> {
        if let Some(text) = self.read(root).inspect_err(|_| self.file = None)? {
            return Ok(Some(text));
        }
        self.reopen(root)?;
        self.read(root)
    }

    fn reopen(&mut self, root: &Root) -> Result<(), ReadError> {
        self.file = None;
        let path = self.path(root);
        self.file = root.access(&path, File::open(&path))?;
        Ok(())
    }
}

fn read_whole(file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut buffer = [0u8; 4096];
    loop {
        let length = file.read_at(&mut buffer, bytes.len() as u64)?;
        bytes.extend_from_slice(&buffer[..length]);
        // The kernel fills what it is given as long as there is more.
        if length < buffer.len() {
            return Ok(bytes);
        }
    }
}

/// One byte more than `most`, where there are more.
fn read_regular(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let named = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if !named.metadata()?.is_file() {
        return Err(io::Error::other("it is no plain file"));
    }
    // The very file that was looked at, whatever has its name by now.
    let file = File::open(format!("/proc/self/fd/{}", named.as_raw_fd()))?;
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// What is gone reads as `None`.
fn gone_is_none<T>(result: io::Result<T>, path: &Path) -> Result<Option<T>, ReadError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_gone(&error) => Ok(None),
        Err(source) => Err(ReadError::Io {
            path: path.to_owned(),
            source,
        }),
    }
}

/// ENOENT and ESRCH both mean that a process ended between two looks; ENODEV says the same of a cgroup.
fn is_gone(error: &io::Error) -> bool {
    [Errno::NOENT, Errno::SRCH, Errno::NODEV]
        .iter()
        .any(|gone| error.raw_os_error() == Some(gone.raw_os_error()))
}

#[cfg(test)]
mod faults {
    use super::{Errno, Path, io};
    use std::sync::Mutex;

    /// What a read can meet.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Fault {
        /// The system's error.
        Error(Errno),
        /// Nothing in the file.
        Empty,
        /// Bytes that mean nothing.
        Garbage,
        /// The text ends in its middle.
        Half,
    }

    const ALL: [Fault; 8] = [
        Fault::Error(Errno::NOENT),
        Fault::Error(Errno::SRCH),
        Fault::Error(Errno::NODEV),
        Fault::Error(Errno::OPNOTSUPP),
        Fault::Error(Errno::ACCESS),
        Fault::Empty,
        Fault::Garbage,
        Fault::Half,
    ];

    /// Makes reads fail: all of certain paths in one way, or some of them, drawn by a seed, in any way.
    #[derive(Debug)]
    pub(crate) struct Faults {
        /// Only paths with this in them.
        within: String,
        always: Option<Fault>,
        draw: Mutex<fastrand::Rng>,
    }

    impl Faults {
        /// Each read of a path with `within` in it meets `fault`.
        pub(crate) fn always(within: &str, fault: Fault) -> Self {
            Self {
                within: within.to_owned(),
                always: Some(fault),
                draw: Mutex::new(fastrand::Rng::with_seed(0)),
            }
        }

        /// A third of the reads of paths with `within` in them meet one of the faults.
        pub(crate) fn any(within: &str, seed: u64) -> Self {
            Self {
                within: within.to_owned(),
                always: None,
                draw: Mutex::new(fastrand::Rng::with_seed(seed)),
            }
        }

        fn next(&self, path: &Path) -> Option<Fault> {
            if !path.to_string_lossy().contains(&self.within) {
                return None;
            }
            if self.always.is_some() {
                return self.always;
            }
            let mut draw = self.draw.lock().unwrap();
            draw.u8(..)
                .is_multiple_of(6)
                .then(|| ALL[draw.usize(..ALL.len())])
        }

        pub(super) fn error(&self, path: &Path) -> Option<io::Error> {
            match self.next(path) {
                Some(Fault::Error(errno)) => {
                    Some(io::Error::from_raw_os_error(errno.raw_os_error()))
                }
                _ => None,
            }
        }

        pub(super) fn spoil(&self, path: &Path, mut bytes: Vec<u8>) -> Vec<u8> {
            match self.next(path) {
                Some(Fault::Empty) => Vec::new(),
                Some(Fault::Garbage) => b"\xff\xfe,-:/ (null) 99999999999999999999 \n\0".to_vec(),
                Some(Fault::Half) => {
                    bytes.truncate(bytes.len() / 2);
                    bytes
                }
                _ => bytes,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn what_is_gone_is_none_and_what_is_refused_is_an_error() {
        let path = Path::new("/proc/1/stat");
        let errno = |errno: Errno| Err::<(), _>(io::Error::from_raw_os_error(errno.raw_os_error()));
        for gone in [Errno::NOENT, Errno::SRCH, Errno::NODEV] {
            assert!(gone_is_none(errno(gone), path).unwrap().is_none());
        }
        let error = gone_is_none(errno(Errno::ACCESS), path).unwrap_err();
        assert!(error.is_denied());
        assert!(error.to_string().contains("/proc/1/stat"));
    }

    #[test]
    fn a_kept_file_is_read_from_its_beginning_each_time() {
        let directory = tempfile::tempdir().unwrap();
        let root = Root::new(directory.path());
        let path = directory.path().join("value");
        let mut kept = KeptFile::new("value");
        assert_eq!(kept.read_again(&root).unwrap(), None);
        let long = "0123456789".repeat(1000);
        for text in ["one\n", &long, "two\n"] {
            fs::write(&path, text).unwrap();
            assert_eq!(kept.read_again(&root).unwrap().as_deref(), Some(text));
            assert_eq!(kept.read(&root).unwrap().as_deref(), Some(text));
        }
        let never = KeptFile::open(&root, "never").unwrap();
        assert_eq!(never.read(&root).unwrap(), None);
    }

    #[test]
    fn only_directories_are_listed_where_those_are_wanted() {
        let directory = tempfile::tempdir().unwrap();
        let root = Root::new(directory.path());
        fs::create_dir(directory.path().join("group")).unwrap();
        fs::write(directory.path().join("file"), "").unwrap();
        assert_eq!(root.list_directories("").unwrap().unwrap(), ["group"]);
        assert_eq!(root.list("").unwrap().unwrap().len(), 2);
        assert_eq!(root.list_directories("none").unwrap(), None);
    }
}
