//! In which groups a VM's vCPU threads are, and which of them is the VM's.

use std::collections::BTreeMap;

use super::mounts::{Hierarchy, Version};
use crate::root::{ReadError, Root};

/// Where a thread is in one hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// In the group with this path below the mount point; empty for the one that is mounted.
    In(String),
    /// In a group that can't be seen from here.
    Hidden(String),
}

/// Where a thread is; `None` when it is gone.
pub(super) fn place(
    root: &Root,
    hierarchy: &Hierarchy,
    pid: u32,
    tid: u32,
) -> Result<Option<Place>, ReadError> {
    let relative = format!("proc/{pid}/task/{tid}/cgroup");
    let Some(text) = root.read_text(&relative)?.filter(|text| !text.is_empty()) else {
        return Ok(None);
    };
    match text
        .lines()
        .find_map(|line| path_in(line, hierarchy.version))
    {
        Some(path) if path.ends_with(" (deleted)") => Ok(None),
        Some(path) => Ok(Some(below(&hierarchy.top, path))),
        None => {
            let expected = match hierarchy.version {
                Version::V1 => "a line N:cpu:PATH",
                Version::V2 => "a line 0::PATH",
            };
            Err(ReadError::content(&root.path(&relative), expected, &text))
        }
    }
}

/// `4:cpu,cpuacct:/path`, or `0::/path` for v2. A named hierarchy has `name=...` in the middle.
pub(super) fn path_in(line: &str, version: Version) -> Option<&str> {
    let mut fields = line.splitn(3, ':');
    let (id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    let fits = match version {
        Version::V1 => controllers.split(',').any(|name| name == "cpu"),
        Version::V2 => id == "0" && controllers.is_empty(),
    };
    (fits && path.starts_with('/')).then_some(path)
}

/// `path` seen from a mount that shows the group `top`. Both begin at the root of this process's cgroup namespace, above which
/// lies `/..`.
pub(super) fn below(top: &str, path: &str) -> Place {
    let rest = match top {
        "/" => Some(path),
        top => path
            .strip_prefix(top)
            .filter(|rest| rest.is_empty() || rest.starts_with('/')),
    };
    match rest.map(|rest| rest.trim_matches('/')) {
        Some(rest) if rest != ".." && !rest.starts_with("../") => Place::In(rest.to_owned()),
        _ => Place::Hidden(path.to_owned()),
    }
}

/// The smallest group with all vCPU threads, and whether they are scattered over groups that are not the VM's alone. libvirt
/// gives each vCPU a group `vcpuN` below the VM's.
pub(super) fn of_vm(threads: &BTreeMap<u32, String>) -> Option<(&str, bool)> {
    let mut paths = threads.values().map(String::as_str);
    let first = paths.next()?;
    let common = paths.fold(first, common_ancestor);
    let group = match split_last(common) {
        Some((parent, name)) if is_vcpu_group(name) => parent,
        _ => common,
    };
    let is_own = |path: &str| {
        path == group
            || split_last(path).is_some_and(|(parent, name)| parent == group && is_vcpu_group(name))
    };
    let scattered = !threads.values().all(|path| is_own(path));
    Some((group, scattered))
}

/// All groups above a group, the nearest first, without the root.
pub(super) fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(parent(path), |path| parent(path)).filter(|path| !path.is_empty())
}

/// The group that a group lies in; `None` for the root.
pub(super) fn parent(path: &str) -> Option<&str> {
    (!path.is_empty()).then(|| split_last(path).map_or("", |(parent, _)| parent))
}

fn split_last(path: &str) -> Option<(&str, &str)> {
    match path.rsplit_once('/') {
        Some(parts) => Some(parts),
        None => (!path.is_empty()).then_some(("", path)),
    }
}

fn is_vcpu_group(name: &str) -> bool {
    name.strip_prefix("vcpu").is_some_and(|digits| {
        !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
    })
}

fn common_ancestor<'a>(a: &'a str, b: &str) -> &'a str {
    let mut end = 0;
    for (index, part) in a.split('/').enumerate() {
        if b.split('/').nth(index) != Some(part) {
            break;
        }
        end += part.len() + usize::from(index > 0);
    }
    &a[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_the_hierarchy_counts_and_named_ones_do_not() {
        let text = "12:name=cpu:/named\n4:cpuacct,cpu:/machine/a:b\n0::/unified\n";
        let find = |version| text.lines().find_map(|line| path_in(line, version));
        assert_eq!(find(Version::V1), Some("/machine/a:b"));
        assert_eq!(find(Version::V2), Some("/unified"));
        for wrong in ["", "0::", "4:cpu", "0::relative", "4:cpuset:/x"] {
            assert_eq!(path_in(wrong, Version::V1), None, "{wrong:?}");
        }
    }

    #[test]
    fn paths_are_seen_from_the_mount() {
        let inside = |path: &str| Place::In(path.to_owned());
        let hidden = |path: &str| Place::Hidden(path.to_owned());
        for (top, path, place) in [
            ("/", "/machine/vm", inside("machine/vm")),
            ("/", "/", inside("")),
            ("/kubepods", "/kubepods/pod1", inside("pod1")),
            ("/kubepods", "/kubepods", inside("")),
            ("/kubepods", "/kubepods2/pod1", hidden("/kubepods2/pod1")),
            ("/kubepods", "/", hidden("/")),
            // This process is in a cgroup namespace, and the VM is outside of it.
            ("/", "/../machine/vm", hidden("/../machine/vm")),
            ("/", "/..", hidden("/..")),
            ("/..", "/../machine/vm", inside("machine/vm")),
            ("/../..", "/../../machine/vm", inside("machine/vm")),
            ("/..", "/../../machine/vm", hidden("/../../machine/vm")),
            ("/..", "/vm", hidden("/vm")),
        ] {
            assert_eq!(below(top, path), place, "{top} {path}");
        }
    }

    fn group_of(paths: &[&str]) -> (String, bool) {
        let threads = (0u32..)
            .zip(paths)
            .map(|(index, path)| (index, (*path).to_owned()))
            .collect();
        let (group, scattered) = of_vm(&threads).unwrap();
        (group.to_owned(), scattered)
    }

    #[test]
    fn the_vms_group_is_the_smallest_with_all_its_vcpus() {
        for (paths, group, scattered) in [
            (&["m/vm.scope", "m/vm.scope"][..], "m/vm.scope", false),
            (
                &["m/vm.scope/libvirt/vcpu0", "m/vm.scope/libvirt/vcpu1"],
                "m/vm.scope/libvirt",
                false,
            ),
            (&["m/vm.scope/vcpu0"], "m/vm.scope", false),
            (&["m/vm.scope/vcpu0", "m/vm.scope"], "m/vm.scope", false),
            (&["vcpu0", "vcpu1"], "", false),
            (&["m/vcpux"], "m/vcpux", false),
            (&["", ""], "", false),
            (&["a/x", "b/x"], "", true),
            (&["m/a", "m/ab"], "m", true),
            (&["m/vm1", "m/vm1/vcpu0/deep"], "m/vm1", true),
            (&["m/a", ""], "", true),
        ] {
            assert_eq!(group_of(paths), (group.to_owned(), scattered), "{paths:?}");
        }
        assert_eq!(of_vm(&BTreeMap::new()), None);
    }

    #[test]
    fn ancestors_end_below_the_root() {
        assert_eq!(ancestors("a/b/c").collect::<Vec<_>>(), ["a/b", "a"]);
        assert_eq!(ancestors("a").count() + ancestors("").count(), 0);
        assert_eq!((parent("a"), parent("")), (Some(""), None));
    }
}
