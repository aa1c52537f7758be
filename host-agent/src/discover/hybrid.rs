//! Where a VM's hybrid vsock is, as a path on this host: the VMM's command line, its configuration file or a back end names it, or
//! the VMM listens on it. All of them may be wrong or lie, so only a socket of the process's own user counts.
//!
//! A VMM may see other files than this process does: a jailer gives it a root folder of its own, and names are relative to the folder
//! that it works in.

use std::collections::BTreeSet;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::process::{self, Process};
use super::vhost_vsock;
use super::vmm::{Elsewhere, vsock_in_config};
use crate::procfs::{number, unix_sockets};
use crate::root::{ReadError, Root};

/// A configuration of a microVM has a few kilobytes.
const LONGEST_CONFIG: u64 = 1 << 20;

/// The path on this host of what process `pid` calls `path`.
pub(super) fn on_host(root: &Root, pid: u32, path: &Path) -> PathBuf {
    let own = PathBuf::from(format!("/proc/{pid}"));
    let place = |path: &Path| {
        let found = root.path(path).metadata().ok()?;
        Some((found.dev(), found.ino()))
    };
    // A root folder that can't be looked at is that of a process that ends, or of none: nothing will be found there.
    let its_root = place(&own.join("root"));
    let shares_root = its_root.is_none() || its_root == place(Path::new("/"));
    match path.strip_prefix("/") {
        // With this host's own name, two VMs with one socket are seen to have one.
        Ok(_) if shares_root => path.to_owned(),
        Ok(below) => own.join("root").join(below),
        Err(_) => {
            let folder = root.link(&own.join("cwd").to_string_lossy());
            let folder = folder.ok().flatten().filter(|_| shares_root);
            let path = path.strip_prefix(".").unwrap_or(path);
            folder.unwrap_or_else(|| own.join("cwd")).join(path)
        }
    }
}

/// `path`, as process `pid` calls it, if a socket of its user is there.
pub(super) fn named(root: &Root, pid: u32, path: &Path) -> Option<PathBuf> {
    Some(on_host(root, pid, path)).filter(|path| is_its_own(root, pid, path))
}

/// The hybrid socket behind one of these vhost-user sockets, by its back end's command line.
pub(super) fn of_back_end(
    root: &Root,
    back_ends: &[Process],
    vhost_user: &[PathBuf],
) -> Option<PathBuf> {
    vhost_user.iter().find_map(|socket| {
        back_ends.iter().find_map(|back_end| {
            let path = vhost_vsock::hybrid_socket(back_end, socket)?;
            named(root, back_end.pid, &path)
        })
    })
}

/// The hybrid socket of a VMM that has it from a file, or was told over its API.
///
/// # Errors
/// When the configuration file, or what the process has open, can't be read.
pub(super) fn of_vmm(
    root: &Root,
    pid: u32,
    elsewhere: &Elsewhere,
) -> Result<Option<PathBuf>, ReadError> {
    if let Some(file) = &elsewhere.config_file {
        let file = on_host(root, pid, file);
        let text = root.read_regular(&file.to_string_lossy(), LONGEST_CONFIG)?;
        let path = text.as_deref().and_then(vsock_in_config);
        if let Some(path) = path.and_then(|path| named(root, pid, &path)) {
            return Ok(Some(path));
        }
    }
    let path = listened_on(root, pid, elsewhere.api_socket.as_deref())?;
    Ok(path.and_then(|path| named(root, pid, &path)))
}

/// The one socket with a file that the process listens on, besides the one of its API. Several tell nothing.
fn listened_on(root: &Root, pid: u32, api: Option<&Path>) -> Result<Option<PathBuf>, ReadError> {
    let own = process::sockets(root, pid)?;
    // The table of the process's own network namespace.
    let table = root.read_text(&format!("proc/{pid}/net/unix"))?;
    let table = table.unwrap_or_default();
    let mut seen = BTreeSet::new();
    let mut listening = Vec::new();
    for socket in unix_sockets(&table).filter(|socket| own.contains(&socket.inode)) {
        if !seen.insert(socket.inode) {
            return Ok(None);
        }
        if socket.listening && !socket.path.starts_with('@') && api != Some(Path::new(socket.path))
        {
            listening.push(socket.path);
        }
    }
    Ok(match listening.as_slice() {
        [path] => Some(PathBuf::from(path)),
        _ => None,
    })
}

/// The inode of an open socket, from its link `socket:[22845]`.
pub(super) fn socket_inode(link: &Path) -> Option<u64> {
    let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
    number(inode)
}

/// Is there a socket at `path` that belongs to this process's user? A command line can say anything: without this, whoever may
/// start processes could have the broker listen in a folder of his choice, or take another VM's channel away.
pub(super) fn is_its_own(root: &Root, pid: u32, path: &Path) -> bool {
    let Ok(Some(uid)) = process::effective_uid(root, pid) else {
        return false;
    };
    root.path(path)
        .symlink_metadata()
        .is_ok_and(|file| file.file_type().is_socket() && (uid == 0 || file.uid() == uid))
}

#[cfg(test)]
mod tests;
