//! What the fuzz targets do, one function each: they take any bytes, and panic where a parser breaks a promise of its
//! documentation. Only for `tests/fuzz`, and for the test that replays its corpus.

use crate::{CpuSet, MAX_CPUS, ParseCpuSetError};

/// A target: its name, which is that of its corpus, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets of this crate.
pub const TARGETS: &[Target] = &[("cpu_list", cpu_list), ("cpu_mask", cpu_mask)];

/// The kernel's list form: no CPU of [`MAX_CPUS`] or above, a canonical form that comes back, no long error.
pub fn cpu_list(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let Some(set) = bounded(CpuSet::parse_list(&text)) else {
        return;
    };
    assert_eq!(CpuSet::parse_list(&set.to_string()), Ok(set.clone()));
    both_ways(&set);
}

/// The kernel's mask form, likewise; what is written has groups of eight digits.
pub fn cpu_mask(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let Some(set) = bounded(CpuSet::parse_mask(&text)) else {
        return;
    };
    both_ways(&set);
    let mask = set.to_mask();
    for (index, group) in mask.split(',').enumerate() {
        assert!(
            group.len() == 8 || index == 0 && (1..=8).contains(&group.len()),
            "{mask}"
        );
    }
}

fn both_ways(set: &CpuSet) {
    assert_eq!(CpuSet::parse_list(&set.to_string()).as_ref(), Ok(set));
    assert_eq!(CpuSet::parse_mask(&set.to_mask()).as_ref(), Ok(set));
    let all: CpuSet = (0..MAX_CPUS).collect();
    assert!(set.is_subset(&all) && set.intersection(&all) == *set);
    assert!(set.difference(set).is_empty() && set.union(set) == *set);
    let rest = all.difference(set);
    assert_eq!(rest.len() + set.len(), all.len());
    assert!(set.iter().zip(set.iter().skip(1)).all(|(a, b)| a < b));
}

fn bounded(result: Result<CpuSet, ParseCpuSetError>) -> Option<CpuSet> {
    result
        .inspect_err(|error| assert!(error.to_string().len() < 2000, "{error}"))
        .ok()
}
