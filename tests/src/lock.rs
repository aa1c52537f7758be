//! A lock for the whole machine: tests that need the cores for themselves hold it, across test programs.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// The lock file cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot lock {path}: {source}; remove it if it belongs to another user")]
pub struct LockError {
    path: PathBuf,
    source: io::Error,
}

/// The cores are this test's own until it drops this. The kernel frees the lock of a killed process.
#[derive(Debug)]
pub struct CoresLock {
    _file: File,
}

/// Waits until no other lab test on this machine holds the cores.
///
/// Take it once and before the first guest boots: a second call in the same test waits for ever.
///
/// # Errors
/// When the lock file cannot be used.
pub fn cores() -> Result<CoresLock, LockError> {
    let folder = Path::new("/run/lock");
    let folder = if folder.is_dir() {
        folder.to_owned()
    } else {
        std::env::temp_dir()
    };
    lock(&folder.join("hint-lab.lock"))
}

fn lock(path: &Path) -> Result<CoresLock, LockError> {
    let error = |source| LockError {
        path: path.to_owned(),
        source,
    };
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .map_err(error)?;
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        eprintln!("lab: another test has the cores: waiting for it");
        loop {
            match flock(&file, FlockOperation::LockExclusive) {
                Ok(()) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(error(errno.into())),
            }
        }
    }
    Ok(CoresLock { _file: file })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::thread;
    use std::time::Duration;

    #[test]
    fn the_second_waits_until_the_first_is_done() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let first = lock(&path).unwrap();
        let (sender, receiver) = channel();
        let second = thread::spawn(move || {
            let held = lock(&path).unwrap();
            sender.send(()).unwrap();
            held
        });
        assert_eq!(
            receiver.recv_timeout(Duration::from_millis(300)),
            Err(RecvTimeoutError::Timeout)
        );
        drop(first);
        receiver.recv_timeout(Duration::from_secs(20)).unwrap();
        second.join().unwrap();
    }
}
