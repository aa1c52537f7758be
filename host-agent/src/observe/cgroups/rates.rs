//! What groups used between two readings. Pure: readings carry their time.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::model::{Cpus, GroupTree};

/// Two readings further apart than this say nothing of now.
const LONGEST_INTERVAL: Duration = Duration::from_secs(5);

/// Makes rates of readings; holds the last one.
#[derive(Debug, Default)]
pub struct GroupRates {
    at: Duration,
    last: BTreeMap<String, Duration>,
}

impl GroupRates {
    /// Takes what each group of the tree has used until `at`, on the broker's monotonic clock, and gives what each used since the
    /// last reading, both in the order of the tree. `None` for a group that is new, unknown, or was made anew under its name.
    pub fn update(
        &mut self,
        at: Duration,
        tree: &GroupTree,
        usage: &[Option<Duration>],
    ) -> Vec<Option<Cpus>> {
        let interval = at.saturating_sub(self.at);
        let last = std::mem::take(&mut self.last);
        self.at = at;
        let mut rates = Vec::with_capacity(tree.groups.len());
        for (group, used) in tree.groups.iter().zip(usage) {
            let before = last
                .get(&group.path)
                .filter(|_| interval <= LONGEST_INTERVAL);
            let grown = used
                .zip(before)
                .and_then(|(used, before)| used.checked_sub(*before));
            rates.push(grown.and_then(|grown| Cpus::from_time(grown, interval)));
            if let Some(used) = used {
                self.last.insert(group.path.clone(), *used);
            }
        }
        rates
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::CpuGroup;

    fn tree(paths: &[&str]) -> GroupTree {
        let group = |path: &&str| CpuGroup {
            path: (*path).to_owned(),
            parent: None,
            weight: None,
            quota: None,
            cpus: None,
            holds_vms: false,
        };
        GroupTree {
            groups: paths.iter().map(group).collect(),
            vms: BTreeMap::new(),
        }
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn use_is_told_by_path_wherever_a_group_stands() {
        let mut rates = GroupRates::default();
        let used = |values: &[u64]| {
            values
                .iter()
                .map(|value| Some(ms(*value)))
                .collect::<Vec<_>>()
        };
        let first = rates.update(ms(1000), &tree(&["", "a"]), &used(&[500, 100]));
        assert_eq!(first, [None, None]);
        let next = rates.update(ms(1500), &tree(&["", "0", "a"]), &used(&[1500, 7, 350]));
        assert_eq!(next, [Some(Cpus(2.0)), None, Some(Cpus(0.5))]);
        // Made anew, not known, and too long ago.
        let next = rates.update(
            ms(1600),
            &tree(&["", "0", "a"]),
            &[None, Some(ms(7)), Some(ms(3))],
        );
        assert_eq!(next, [None, Some(Cpus::ZERO), None]);
        let next = rates.update(ms(9000), &tree(&["0"]), &used(&[8]));
        assert_eq!(next, [None]);
        let again = rates.update(ms(9000), &tree(&["0"]), &used(&[8]));
        assert_eq!(again, [None], "no time has passed");
    }
}
