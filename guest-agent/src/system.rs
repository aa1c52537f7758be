//! What the guest says of itself: kernel release, boot id, load. Unknown is `None`.

use std::path::Path;

use hint_proto::CpuSet;

use crate::files::Files;

/// Milliseconds in one tick of `/proc/stat`: the kernel's USER_HZ is 100 on every architecture with KVM guests.
const TICK_MS: u64 = 10;
/// More tasks are not looked at one by one.
const MOST_TASKS: u32 = 4096;
const STEAL_GOVERNOR: &str = "/sys/module/steal_governor";
/// What to do about the kernel's governor.
pub const GOVERNOR_ADVICE: &str = "the kernel's steal_governor sets the preferred CPUs, and two writers would fight; hand over with `modprobe -r steal_governor`";

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

/// Time since boot in which some task waited for a CPU, in microseconds: `total` of `some` in `/proc/pressure/cpu`.
#[must_use]
pub fn pressure_us(files: &dyn Files) -> Option<u64> {
    let text = files.read(Path::new("/proc/pressure/cpu")).ok()?;
    text.lines()
        .find_map(|line| line.strip_prefix("some "))?
        .split_ascii_whitespace()
        .find_map(|field| field.strip_prefix("total="))?
        .parse()
        .ok()
}

/// Tasks whose affinity has nothing of `preferred`, and which therefore run on avoided CPUs; `None` when there are more than 4096 tasks.
/// Kernel threads are not counted: most of them belong to one CPU.
#[must_use]
pub fn pinned_outside(files: &dyn Files, preferred: &CpuSet) -> Option<u32> {
    let (mut seen, mut outside) = (0, 0);
    for process in files.directories(Path::new("/proc")).ok()? {
        if !process.bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        // Tasks come and go while they are counted.
        let tasks = Path::new("/proc").join(process).join("task");
        for task in files.directories(&tasks).unwrap_or_default() {
            seen += 1;
            if seen > MOST_TASKS {
                return None;
            }
            let status = files.read(&tasks.join(task).join("status"));
            if status.is_ok_and(|status| is_outside(&status, preferred)) {
                outside += 1;
            }
        }
    }
    Some(outside)
}

fn is_outside(status: &str, preferred: &CpuSet) -> bool {
    let value = |key: &str| status.lines().find_map(|line| line.strip_prefix(key));
    // Only what has memory is no kernel thread.
    value("VmSize:").is_some()
        && value("Cpus_allowed_list:")
            .and_then(|list| CpuSet::parse_list(list).ok())
            .is_some_and(|allowed| allowed.intersection(preferred).is_empty())
}

/// Does the kernel's own governor, which sets the mask of preferred CPUs by the guest's steal time, run? A module that says of itself
/// that it is switched off does not.
#[must_use]
pub fn steal_governor(files: &dyn Files) -> bool {
    files.directories(Path::new(STEAL_GOVERNOR)).is_ok()
        && !matches!(
            line(files, &format!("{STEAL_GOVERNOR}/parameters/enabled")).as_deref(),
            Some("N" | "0")
        )
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
    fn pressure_is_the_total_of_some() {
        let text = "some avg10=0.00 avg60=0.10 avg300=0.20 total=123456\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n";
        let (_dir, files) = root("proc/pressure/cpu", text);
        assert_eq!(pressure_us(&files), Some(123_456));
        assert_eq!(pressure_us(&root("proc/pressure/cpu", "some\n").1), None);
        assert_eq!(pressure_us(&root("proc/other", "").1), None, "no PSI");
    }

    #[test]
    fn tasks_pinned_to_avoided_cpus_are_counted() {
        let (dir, files) = root(
            "proc/self/task/9/status",
            "VmSize: 1 kB\nCpus_allowed_list:\t3\n",
        );
        let put = |path: &str, status: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("status"), status).unwrap();
        };
        put(
            "proc/1/task/1",
            "Name:\tinit\nVmSize:\t 9 kB\nCpus_allowed_list:\t0-3\n",
        );
        put(
            "proc/2/task/2",
            "Name:\tmigration/3\nCpus_allowed_list:\t3\n",
        );
        put(
            "proc/7/task/7",
            "Name:\tpinned\nVmSize:\t 9 kB\nCpus_allowed_list:\t2-3\n",
        );
        put(
            "proc/7/task/8",
            "Name:\tpinned\nVmSize:\t 9 kB\nCpus_allowed_list:\t1-2\n",
        );
        fs::create_dir_all(dir.path().join("proc/8/task/8")).unwrap();
        assert_eq!(pinned_outside(&files, &"0-1".parse().unwrap()), Some(1));
        assert_eq!(pinned_outside(&files, &"0".parse().unwrap()), Some(2));
    }

    #[test]
    fn the_governor_is_there_until_it_says_that_it_is_off() {
        let (_dir, files) = root("sys/module/other/x", "");
        assert!(!steal_governor(&files));
        let (_dir, files) = root("sys/module/steal_governor/refcnt", "0\n");
        assert!(steal_governor(&files));
        for (value, active) in [("Y\n", true), ("1\n", true), ("N\n", false), ("0\n", false)] {
            let (_dir, files) = root("sys/module/steal_governor/parameters/enabled", value);
            assert_eq!(steal_governor(&files), active);
        }
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
