//! What the guest says of itself: kernel release, boot id, load. Unknown is `None`.

use std::path::Path;

use crate::files::Files;

/// Milliseconds in one tick of `/proc/stat`: the kernel's USER_HZ is 100 on every architecture with KVM guests.
const TICK_MS: u64 = 10;

/// The kernel's release, as `uname -r` prints it.
#[must_use]
pub fn kernel_release(files: &dyn Files) -> Option<String> {
    line(files, "/proc/sys/kernel/osrelease")
}

/// Major and minor number of the kernel's release.
#[must_use]
pub fn kernel_version(files: &dyn Files) -> Option<(u32, u32)> {
    let release = kernel_release(files)?;
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The random id of this boot.
#[must_use]
pub fn boot_id(files: &dyn Files) -> Option<String> {
    line(files, "/proc/sys/kernel/random/boot_id")
}

/// Tasks that run or wait for a CPU: the `r` of `r/t` in `/proc/loadavg`.
#[must_use]
pub fn runnable_tasks(files: &dyn Files) -> Option<u32> {
    let text = line(files, "/proc/loadavg")?;
    text.split_ascii_whitespace()
        .nth(3)?
        .split_once('/')?
        .0
        .parse()
        .ok()
}

/// Steal time since boot, summed over CPUs, in milliseconds: the 8th number of the `cpu` line of `/proc/stat`.
#[must_use]
pub fn steal_ms(files: &dyn Files) -> Option<u64> {
    let text = files.read(Path::new("/proc/stat")).ok()?;
    let ticks: u64 = text
        .lines()
        .find_map(|line| line.strip_prefix("cpu "))?
        .split_ascii_whitespace()
        .nth(7)?
        .parse()
        .ok()?;
    ticks.checked_mul(TICK_MS)
}

fn line(files: &dyn Files, path: &str) -> Option<String> {
    let text = files.read(Path::new(path)).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::Root;
    use std::fs;

    fn root(path: &str, text: &str) -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        let root = Root::new(dir.path());
        (dir, root)
    }

    #[test]
    fn load_is_read_from_its_columns() {
        let (_dir, files) = root("proc/loadavg", "0.10 0.20 0.30 3/412 9876\n");
        assert_eq!(runnable_tasks(&files), Some(3));
        assert_eq!(steal_ms(&files), None, "no file: not known, not zero");
        let (_dir, files) = root(
            "proc/stat",
            "cpu  1 2 3 4 5 6 7 85 9 10\ncpu0 1 2 3 4 5 6 7 85 9 10\nprocesses -2049562273\n",
        );
        assert_eq!(steal_ms(&files), Some(850));
        let (_dir, files) = root("proc/stat", "cpu  1 2 3 4 5 6 7\n");
        assert_eq!(steal_ms(&files), None, "an old kernel without the column");
    }

    #[test]
    fn releases_of_distributions_are_understood() {
        for (text, version) in [
            ("6.1.0-13-amd64\n", Some((6, 1))),
            ("6.12-rc1\n", Some((6, 12))),
            ("5.14.0-362.el9.x86_64\n", Some((5, 14))),
            ("next\n", None),
            ("\n", None),
        ] {
            let (_dir, files) = root("proc/sys/kernel/osrelease", text);
            assert_eq!(kernel_version(&files), version, "{text:?}");
        }
    }
}
