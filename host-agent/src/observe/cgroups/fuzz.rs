//! The fuzz targets of the CPU groups.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use super::membership::{self, Place, ancestors, parent};
use super::mounts::{Hierarchies, Version};
use super::values;
use crate::model::{Cpus, Limit};

/// The files of a group: weights and limits are above zero and finite, and come back when they are written as the kernel does.
pub fn cgroup_values(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (first, second) = text.split_once('|').unwrap_or((&text, "100000\n"));
    let weights = [values::weight(first), values::shares(first)];
    for weight in weights
        .into_iter()
        .chain([values::idle(first, Some(100.0))])
    {
        assert!(weight.is_none_or(|weight| weight > 0.0 && weight <= 25_600.0));
    }
    for limit in [values::cpu_max(first), values::cfs_quota(first, second)] {
        if let Some(Limit::At(Cpus(cpus))) = limit {
            assert!(cpus.is_finite() && cpus > 0.0);
        }
    }
    let _ = (values::usage_v1(first), values::usage_v2(first));
    if let Some(number) = data.get(..4) {
        let number = u32::from_le_bytes(number.try_into().expect("four bytes")).max(1);
        let limit = Some(Limit::At(Cpus(f64::from(number) / 100_000.0)));
        assert_eq!(values::cpu_max(&format!("{number} 100000\n")), limit);
        assert_eq!(values::cfs_quota(&format!("{number}\n"), "100000\n"), limit);
    }
}

/// `mountinfo`: a mount point comes back whatever is in its path.
pub fn mountinfo(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let found = Hierarchies::parse(&text);
    assert!(found.usage.len() <= 2);
    let mut escaped = String::from("/");
    for byte in text.bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\r' | b'\\' => {
                write!(escaped, "\\{byte:03o}").expect("a string takes all");
            }
            _ if byte.is_ascii() => escaped.push(char::from(byte)),
            _ => escaped.push('?'),
        }
    }
    let plain: String = text
        .bytes()
        .map(|byte| {
            if byte.is_ascii() {
                char::from(byte)
            } else {
                '?'
            }
        })
        .collect();
    let line = format!("34 22 0:29 / {escaped} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n");
    let cpu = Hierarchies::parse(&line).cpu.expect("v2 is mounted there");
    assert_eq!((cpu.version, cpu.top.as_str()), (Version::V2, "/"));
    assert_eq!(cpu.point, Path::new(&format!("/{plain}")));
}

/// `/proc/<pid>/cgroup`: a group lies below the mount point, and a VM's group holds all its threads.
pub fn membership(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut threads = BTreeMap::new();
    for (index, line) in (0..).zip(text.lines().take(64)) {
        for version in [Version::V1, Version::V2] {
            let Some(path) = membership::path_in(line, version) else {
                continue;
            };
            assert!(path.starts_with('/'));
            for top in ["/", "/..", "/machine.slice"] {
                if let Place::In(place) = membership::below(top, path) {
                    assert!(!place.starts_with('/') && !place.ends_with('/'));
                    assert!(place != ".." && !place.starts_with("../"));
                    threads.insert(index, place);
                }
            }
        }
    }
    let Some((group, _)) = membership::of_vm(&threads) else {
        assert!(threads.is_empty());
        return;
    };
    for path in threads.values() {
        assert!(group.is_empty() || path == group || path.starts_with(&format!("{group}/")));
        let mut last = path.as_str();
        for above in ancestors(path) {
            assert_eq!(parent(last), Some(above));
            last = above;
        }
    }
}
