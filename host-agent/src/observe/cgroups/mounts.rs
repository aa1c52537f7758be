//! Where the cgroup hierarchies are mounted, from `mountinfo`: v1, v2, or both beside each other. A folder's name says nothing;
//! the file system's type and options do.

use std::path::{Path, PathBuf};

use crate::procfs::{Escapes, number, unescape};
use crate::root::{ReadError, Root};

const MOUNTINFO: &str = "proc/self/mountinfo";

/// Which files a hierarchy has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    /// One hierarchy a controller, or a few controllers: `cpu.shares`, `cpu.cfs_quota_us`.
    V1,
    /// The unified one: `cpu.weight`, `cpu.max`.
    V2,
}

/// One mounted hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hierarchy {
    pub(super) version: Version,
    /// Where it is mounted.
    pub(super) point: PathBuf,
    /// Which of its groups is seen at the mount point: `/` for all of it.
    pub(super) top: String,
}

/// The hierarchies that divide CPU time; `None` where a controller is mounted nowhere.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Hierarchies {
    /// Weights and quotas.
    pub(super) cpu: Option<Hierarchy>,
    /// CPU sets.
    pub(super) cpuset: Option<Hierarchy>,
    /// Used time: `cpuacct` of v1 first, then v2, which always counts it. A group need not be in both.
    pub(super) usage: Vec<Hierarchy>,
}

impl Hierarchies {
    /// Reads what this process sees mounted.
    pub(super) fn read(root: &Root) -> Result<Self, ReadError> {
        let text = root.read_text(MOUNTINFO)?;
        text.filter(|text| !text.is_empty())
            .map(|text| Self::parse(&text))
            .ok_or_else(|| ReadError::content(&root.path(MOUNTINFO), "a list of mounts", ""))
    }

    /// What a `mountinfo` says; lines that are none are passed over.
    pub(super) fn parse(mountinfo: &str) -> Self {
        let mounts: Vec<Mount> = mountinfo.lines().filter_map(Mount::parse).collect();
        let seen: Vec<&Mount> = mounts
            .iter()
            .filter(|mount| mount.kind.starts_with("cgroup") && !is_hidden(mount, &mounts))
            .collect();
        // Of several mounts of one hierarchy, the one that shows all of it.
        let find = |version: Version, wanted: &dyn Fn(&Mount) -> bool| {
            let mounts = seen.iter().filter(|mount| wanted(mount));
            mounts
                .min_by_key(|mount| mount.top != "/")
                .map(|mount| mount.hierarchy(version))
        };
        let v1 = |controller: &str| {
            find(Version::V1, &|mount| {
                let mut options = mount.options.split(',');
                mount.kind == "cgroup" && options.any(|option| option == controller)
            })
        };
        let unified = || find(Version::V2, &|mount| mount.kind == "cgroup2");
        Self {
            cpu: v1("cpu").or_else(unified),
            cpuset: v1("cpuset").or_else(unified),
            usage: v1("cpuacct").into_iter().chain(unified()).collect(),
        }
    }
}

/// A line of `mountinfo` (`man 5 proc_pid_mountinfo`).
struct Mount {
    id: u32,
    parent: u32,
    top: String,
    point: PathBuf,
    kind: String,
    options: String,
}

impl Mount {
    fn parse(line: &str) -> Option<Self> {
        // A number of optional fields stands before the dash.
        let (left, right) = line.split_once(" - ")?;
        let path = |text| unescape(text, Escapes::Octal);
        let mut left = left.split(' ');
        let mut right = right.split(' ');
        let (id, parent) = (number(left.next()?)?, number(left.next()?)?);
        let (top, point) = (path(left.nth(1)?), path(left.next()?));
        Some(Self {
            id,
            parent,
            top,
            point: PathBuf::from(point),
            kind: right.next()?.to_owned(),
            options: right.nth(1)?.to_owned(),
        })
    }

    fn hierarchy(&self, version: Version) -> Hierarchy {
        Hierarchy {
            version,
            point: self.point.clone(),
            top: self.top.clone(),
        }
    }
}

/// Is another mount on top of this one, or of one that it lies in?
fn is_hidden(mount: &Mount, mounts: &[Mount]) -> bool {
    let covers = |upper: &Mount, parent: u32, point: &Path| {
        // The first mount of all is its own parent.
        upper.parent == parent && upper.id != parent && point.starts_with(&upper.point)
    };
    if mounts
        .iter()
        .any(|upper| covers(upper, mount.id, &mount.point))
    {
        return true;
    }
    let mut lower = mount;
    // No deeper than there are mounts, whatever the file says.
    for _ in mounts {
        if mounts
            .iter()
            .any(|upper| upper.id != lower.id && covers(upper, lower.parent, &lower.point))
        {
            return true;
        }
        let Some(parent) = mounts.iter().find(|other| other.id == lower.parent) else {
            return false;
        };
        lower = parent;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(mountinfo: &str) -> [Option<(Version, String, String)>; 3] {
        let found = Hierarchies::parse(mountinfo);
        let usage = found.usage.into_iter().next();
        [found.cpu, found.cpuset, usage].map(|hierarchy| {
            hierarchy.map(|it| (it.version, it.point.display().to_string(), it.top))
        })
    }

    fn at(version: Version, point: &str) -> Option<(Version, String, String)> {
        Some((version, point.to_owned(), "/".to_owned()))
    }

    #[test]
    fn v2_alone() {
        let found = places(
            "22 1 0:20 / / rw - ext4 /dev/vda1 rw\n\
             34 22 0:29 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n",
        );
        assert_eq!(found, [(); 3].map(|()| at(Version::V2, "/sys/fs/cgroup")));
    }

    #[test]
    fn v1_with_controllers_mounted_together_and_named_hierarchies_beside() {
        let found = places(
            "25 0 0:22 / /sys/fs/cgroup ro shared:8 - tmpfs tmpfs ro,mode=755\n\
             26 25 0:23 / /sys/fs/cgroup/systemd rw shared:9 - cgroup cgroup rw,xattr,release_agent=/usr/lib/systemd/systemd-cgroups-agent,name=systemd\n\
             27 25 0:24 / /sys/fs/cgroup/cpu,cpuacct rw shared:10 master:3 - cgroup cgroup rw,cpuacct,cpu\n\
             28 25 0:25 / /sys/fs/cgroup/cpuset rw shared:11 - cgroup cgroup rw,cpuset\n\
             29 25 0:26 / /named rw - cgroup cgroup rw,name=cpu\n",
        );
        assert_eq!(
            found,
            [
                at(Version::V1, "/sys/fs/cgroup/cpu,cpuacct"),
                at(Version::V1, "/sys/fs/cgroup/cpuset"),
                at(Version::V1, "/sys/fs/cgroup/cpu,cpuacct"),
            ]
        );
    }

    #[test]
    fn in_a_hybrid_each_controller_is_where_it_is_mounted() {
        let found = places(
            "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
             32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
             41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        );
        let unified = at(Version::V2, "/sys/fs/cgroup/unified");
        assert_eq!(
            found,
            [
                at(Version::V1, "/sys/fs/cgroup/cpu"),
                unified.clone(),
                unified
            ]
        );
    }

    #[test]
    fn a_folder_named_cpu_may_be_v2_anywhere() {
        let found = places(
            "1 0 0:1 / /cgroups/cpu rw,relatime - cgroup2 none rw\n\
             2 0 0:2 / /cgroups/cpu\\040set rw,relatime - cgroup none rw,cpuset\n",
        );
        assert_eq!(
            found,
            [
                at(Version::V2, "/cgroups/cpu"),
                at(Version::V1, "/cgroups/cpu set"),
                at(Version::V2, "/cgroups/cpu"),
            ]
        );
    }

    #[test]
    fn a_mount_that_shows_all_is_better_than_a_part_and_one_that_is_covered_is_none() {
        let part = "1 0 0:1 /docker/abc /part rw - cgroup2 none rw\n";
        let whole = "2 0 0:1 / /whole rw - cgroup2 none rw\n";
        assert_eq!(
            places(&format!("{part}{whole}"))[0],
            at(Version::V2, "/whole")
        );
        assert_eq!(places(part)[0].as_ref().unwrap().2, "/docker/abc");
        for cover in [
            "3 2 0:3 / /whole rw - tmpfs none rw\n",
            "3 0 0:3 / / rw - tmpfs none rw\n",
        ] {
            assert_eq!(places(&format!("{whole}{cover}"))[0], None, "{cover}");
        }
        // The root that an initramfs left behind comes after /sys and covers nothing of it.
        let booted = "20 30 0:20 / /sys rw - sysfs sysfs rw\n\
                      25 20 0:25 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n\
                      30 1 8:1 / / rw - ext4 /dev/sda1 rw\n";
        assert_eq!(places(booted)[0], at(Version::V2, "/sys/fs/cgroup"));
    }

    #[test]
    fn a_machine_that_stays_in_its_initramfs_hides_nothing() {
        let found = places(
            "1 1 0:2 / / rw - rootfs rootfs rw\n\
             21 1 0:20 / /sys rw - sysfs sysfs rw\n\
             25 21 0:25 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        );
        assert_eq!(found[0], at(Version::V2, "/sys/fs/cgroup"));
    }

    #[test]
    fn lines_that_are_none_are_passed_over() {
        assert_eq!(
            Hierarchies::parse("x\n1 2\n\n- - -\n5 5 0:1 / /a rw - cgroup2 none rw\n").cpu,
            Some(Hierarchy {
                version: Version::V2,
                point: PathBuf::from("/a"),
                top: "/".to_owned()
            })
        );
        let loops = "5 6 0:1 / /a rw - cgroup2 none rw\n6 5 0:1 / /b rw - tmpfs none rw\n";
        assert!(Hierarchies::parse(loops).cpu.is_some());
    }
}
