//! Listening Unix sockets that never take a path away from someone alive.
//!
//! A crashed broker leaves its socket files behind. Such a file is removed only when it is a socket and connecting to it is
//! refused, which is what the kernel says when nobody listens there. Everything else at the path is left alone.
//! What is served on a socket is the caller's business.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FlockOperation, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 16;

/// Why there is no listener on a path.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Someone listens there.
    #[error(
        "{path}: expected a free path, found a socket that somebody listens on: stop that process or use another path"
    )]
    Live {
        /// The path.
        path: PathBuf,
    },
    /// Something else than a socket is there.
    #[error(
        "{path}: expected a free path or a socket left behind, found a {found}: move it away or use another path"
    )]
    NotASocket {
        /// The path.
        path: PathBuf,
        /// What it is.
        found: &'static str,
    },
    /// A socket is there that doesn't show whether somebody listens on it.
    #[error(
        "{path}: can't tell whether somebody listens on the socket there: remove it if nobody does"
    )]
    Unclear {
        /// The path.
        path: PathBuf,
        /// What connecting to it gave.
        source: io::Error,
    },
    /// Another process holds the lock.
    #[error(
        "another hint-broker is running on {path} and holds {lock}: stop it or use another path"
    )]
    Locked {
        /// The socket.
        path: PathBuf,
        /// The lock file.
        lock: PathBuf,
    },
    /// The system refused.
    #[error("{path}: can't {what}")]
    Io {
        /// The path.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// A lock that its process holds as long as this value lives. The file stays: removing it would let two processes hold two
/// files of one name.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// Takes the lock `<path>.lock` of the socket at `path`.
///
/// # Errors
/// [`SocketError::Locked`] when another process holds it.
pub fn lock(path: &Path) -> Result<Lock, SocketError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let lock = PathBuf::from(name);
    let file = rustix::fs::open(
        &lock,
        OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW,
        Mode::RUSR | Mode::WUSR,
    )
    .map_err(system(&lock, "open the lock file; its folder must exist (the systemd unit makes /run/hint-broker) and be writable"))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Lock {
            _file: File::from(file),
        }),
        Err(Errno::WOULDBLOCK) => Err(SocketError::Locked {
            path: path.to_owned(),
            lock,
        }),
        Err(errno) => Err(system(&lock, "lock the file")(errno)),
    }
}

/// A user and a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// The user's number.
    pub uid: u32,
    /// The group's number.
    pub gid: u32,
}

/// Who may connect to a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// Permission bits of the file; connecting takes the write bit.
    pub mode: u32,
    /// Its owner; `None` leaves it to this process's user.
    pub owner: Option<Owner>,
}

/// A socket file that this process has made. It is removed on drop, unless another file has taken its name by then.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Is the file at the path still the one that was made?
    #[must_use]
    pub fn in_place(&self) -> bool {
        fs::symlink_metadata(&self.path)
            .is_ok_and(|file| file.dev() == self.device && file.ino() == self.inode)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.in_place()
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "can't remove the socket");
        }
    }
}

/// Listens on `path`, after removing a socket there that nobody listens on. The listener does not block.
///
/// Nobody but this process's user can connect before `access` is in force.
///
/// # Errors
/// When the path is taken, or the system refuses.
pub fn listen(path: &Path, access: Access) -> Result<(UnixListener, SocketFile), SocketError> {
    free(path)?;
    let address = SocketAddrUnix::new(path).map_err(system(
        path,
        "make it a socket's address (at most 107 bytes)",
    ))?;
    let socket = new_socket(path)?;
    // The kernel gives the new file the permissions that the socket has when it is bound.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)
        .map_err(system(path, "set the socket's permissions"))?;
    rustix::net::bind(&socket, &address).map_err(system(path, "bind the socket"))?;
    rustix::net::listen(&socket, BACKLOG).map_err(system(path, "listen on the socket"))?;
    let file = hand_over(path, access)?;
    Ok((UnixListener::from(socket), file))
}

/// Sets access on the file that was just bound, and no other, whatever the directory's owner does to its name meanwhile.
fn hand_over(path: &Path, access: Access) -> Result<SocketFile, SocketError> {
    let pinned = rustix::fs::open(
        path,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .map_err(system(path, "find the new socket"))?;
    let pinned = File::from(pinned);
    let found = pinned.metadata().map_err(|source| SocketError::Io {
        path: path.to_owned(),
        what: "look at the new socket",
        source,
    })?;
    if !found.file_type().is_socket() {
        return Err(SocketError::NotASocket {
            path: path.to_owned(),
            found: kind(&found),
        });
    }
    let file = SocketFile {
        path: path.to_owned(),
        device: found.dev(),
        inode: found.ino(),
    };
    if let Some(owner) = access.owner
        && (owner.uid != found.uid() || owner.gid != found.gid())
    {
        rustix::fs::chownat(
            &pinned,
            "",
            Some(Uid::from_raw(owner.uid)),
            Some(Gid::from_raw(owner.gid)),
            AtFlags::EMPTY_PATH,
        )
        .map_err(system(path, "give the socket to the VMM's user"))?;
    }
    let descriptor = std::os::fd::AsRawFd::as_raw_fd(&pinned);
    fs::set_permissions(
        format!("/proc/self/fd/{descriptor}"),
        Permissions::from_mode(access.mode),
    )
    .map_err(|source| SocketError::Io {
        path: path.to_owned(),
        what: "set the socket's permissions",
        source,
    })?;
    Ok(file)
}

/// Makes sure that nothing is at `path`.
fn free(path: &Path) -> Result<(), SocketError> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => {
            return Err(SocketError::Io {
                path: path.to_owned(),
                what: "look at it",
                source,
            });
        }
    };
    if !found.file_type().is_socket() {
        return Err(SocketError::NotASocket {
            path: path.to_owned(),
            found: kind(&found),
        });
    }
    match probe(path)? {
        Ok(()) | Err(Errno::AGAIN) => Err(SocketError::Live {
            path: path.to_owned(),
        }),
        Err(Errno::CONNREFUSED) => {
            fs::remove_file(path).map_err(|source| SocketError::Io {
                path: path.to_owned(),
                what: "remove the socket left behind",
                source,
            })?;
            tracing::info!(path = %path.display(), "removed a socket left behind");
            Ok(())
        }
        Err(errno) => Err(SocketError::Unclear {
            path: path.to_owned(),
            source: errno.into(),
        }),
    }
}

/// Connects to the socket at `path`; the inner result is the kernel's answer. A full backlog gives `EAGAIN`.
fn probe(path: &Path) -> Result<Result<(), Errno>, SocketError> {
    let address = SocketAddrUnix::new(path).map_err(system(path, "connect to it"))?;
    let socket = new_socket(path)?;
    Ok(rustix::net::connect(&socket, &address))
}

fn new_socket(path: &Path) -> Result<std::os::fd::OwnedFd, SocketError> {
    rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map_err(system(path, "make a socket"))
}

fn system(path: &Path, what: &'static str) -> impl FnOnce(Errno) -> SocketError {
    let path = path.to_owned();
    move |errno| SocketError::Io {
        path,
        what,
        source: errno.into(),
    }
}

fn kind(found: &fs::Metadata) -> &'static str {
    let kind = found.file_type();
    if kind.is_file() {
        "regular file"
    } else if kind.is_dir() {
        "directory"
    } else if kind.is_symlink() {
        "symbolic link"
    } else {
        "special file"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    const ACCESS: Access = Access {
        mode: 0o660,
        owner: None,
    };

    #[test]
    fn a_socket_left_behind_is_taken_over_and_removed_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let (listener, file) = listen(&path, ACCESS).unwrap();
        assert!(UnixStream::connect(&path).is_ok());
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o660);
        drop(listener);
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn a_live_socket_is_left_alone_even_with_a_full_backlog() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (_listener, _file) = listen(&path, ACCESS).unwrap();
        let mut waiting = Vec::new();
        for _ in 0..BACKLOG + 5 {
            let socket = new_socket(&path).unwrap();
            let _ = rustix::net::connect(&socket, &SocketAddrUnix::new(&path).unwrap());
            waiting.push(socket);
        }
        let error = listen(&path, ACCESS).unwrap_err();
        assert!(matches!(error, SocketError::Live { .. }), "{error}");
        assert!(path.exists());
    }

    #[test]
    fn files_of_another_kind_are_refused_by_their_kind() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "precious").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path().join("nowhere"), &link).unwrap();
        for (path, kind) in [
            (&file, "regular file"),
            (&link, "symbolic link"),
            (&dir.path().to_owned(), "directory"),
        ] {
            let error = listen(path, ACCESS).unwrap_err().to_string();
            assert!(error.contains(kind), "{error}");
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "precious");
    }

    #[test]
    fn a_successors_file_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (_old, file) = listen(&path, ACCESS).unwrap();
        let other = dir.path().join("other");
        let _new = UnixListener::bind(&other).unwrap();
        fs::rename(&other, &path).unwrap();
        assert!(!file.in_place());
        drop(file);
        assert!(path.exists());
    }

    #[test]
    fn a_lock_is_held_by_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let held = lock(&path).unwrap();
        let error = lock(&path).unwrap_err().to_string();
        assert!(
            error.starts_with("another hint-broker is running on "),
            "{error}"
        );
        drop(held);
        lock(&path).unwrap();
    }

    #[test]
    fn a_path_too_long_for_a_socket_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let error = listen(&dir.path().join("x".repeat(120)), ACCESS).unwrap_err();
        assert!(error.to_string().contains("at most 107 bytes"), "{error}");
    }
}
