//! Reading below an injected root: `/` in production, a fixture tree in tests. Every error carries its path, and what is not
//! there is a value, not an error.

use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Where `proc` and `sys` are.
#[derive(Debug, Clone)]
pub struct Root(PathBuf);

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
        Self(path.into())
    }

    /// The real path of `relative`; a leading slash means this root.
    #[must_use]
    pub fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        let relative = relative.as_ref();
        self.0.join(relative.strip_prefix("/").unwrap_or(relative))
    }

    /// The bytes of a file; `None` when it, or the process it belongs to, is gone or never was.
    ///
    /// # Errors
    /// When the file is there and can't be read.
    pub fn read(&self, relative: &str) -> Result<Option<Vec<u8>>, ReadError> {
        let path = self.path(relative);
        gone_is_none(std::fs::read(&path), &path)
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
        let path = self.path(relative);
        let Some(entries) = gone_is_none(std::fs::read_dir(&path), &path)? else {
            return Ok(None);
        };
        // A process that ends while its directory is read ends the list; what was read so far is right.
        Ok(Some(
            entries
                .map_while(Result::ok)
                .map(|entry| entry.file_name())
                .collect(),
        ))
    }

    /// Where a symbolic link points; `None` when it is gone.
    ///
    /// # Errors
    /// When the link is there and can't be read.
    pub fn link(&self, relative: &str) -> Result<Option<PathBuf>, ReadError> {
        let path = self.path(relative);
        gone_is_none(std::fs::read_link(&path), &path)
    }
}

/// ENOENT and ESRCH both mean that a process ended between two looks.
pub(crate) fn gone_is_none<T>(result: io::Result<T>, path: &Path) -> Result<Option<T>, ReadError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_gone(&error) => Ok(None),
        Err(source) => Err(ReadError::Io {
            path: path.to_owned(),
            source,
        }),
    }
}

/// Does this error mean that the process or file is no more?
pub(crate) fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_gone_is_none_and_what_is_refused_is_an_error() {
        let path = Path::new("/proc/1/stat");
        let errno = |errno: rustix::io::Errno| {
            Err::<(), _>(io::Error::from_raw_os_error(errno.raw_os_error()))
        };
        assert!(
            gone_is_none(errno(rustix::io::Errno::NOENT), path)
                .unwrap()
                .is_none()
        );
        assert!(
            gone_is_none(errno(rustix::io::Errno::SRCH), path)
                .unwrap()
                .is_none()
        );
        let error = gone_is_none(errno(rustix::io::Errno::ACCESS), path).unwrap_err();
        assert!(error.is_denied());
        assert!(error.to_string().contains("/proc/1/stat"));
    }
}
