//! The fuzz targets of this stage.

use std::collections::BTreeMap;
use std::time::Duration;

use hint_proto::MAX_CPUS;

pub use super::cgroups::fuzz::*;
use super::rates::Rates;
use super::schedstat::Figures;
use super::{Sample, ThreadTimes, VmTimes, pcpus, schedstat, topology};
use crate::model::VmId;

const VM: VmId = VmId {
    pid: 1,
    start_ticks: 1,
};

/// Two texts of one file, one after the other: `|` stands between them.
fn two(text: &str) -> (&str, &str) {
    text.split_once('|').unwrap_or((text, text))
}

fn at(second: u64) -> Sample {
    Sample {
        at: Duration::from_secs(second),
        ..Sample::default()
    }
}

/// `/proc/stat` twice: whatever it says, no pCPU is idle, in interrupts or stolen for more than all of the time.
pub fn proc_stat(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (before, after) = two(&text);
    let mut rates = Rates::default();
    let mut tick = None;
    for (second, text) in [(1, before), (2, after)] {
        let times = pcpus::parse(text);
        assert!(times.keys().all(|cpu| *cpu < MAX_CPUS));
        let mut sample = at(second);
        sample.pcpus = Some(times);
        tick = Some(rates.update(sample));
    }
    for pcpu in tick.and_then(|tick| tick.pcpus).unwrap_or_default() {
        for share in [pcpu.idle, pcpu.irq, pcpu.steal] {
            assert!((0.0..=1.0).contains(&share.0), "{pcpu:?}");
        }
    }
}

/// `schedstat` three times: whatever it says, one thread runs and waits for no more than all of the time.
pub fn schedstat(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut rates = Rates::default();
    for (second, text) in (1..).zip(text.split('|').take(8)) {
        let times = schedstat::parse(text).map(
            |Figures {
                 run,
                 run_delay,
                 slices,
             }| ThreadTimes {
                run,
                run_delay,
                waiting: slices % 2 == 1,
            },
        );
        let mut sample = at(second);
        let threads = BTreeMap::from([(1, times)]);
        let at = sample.at;
        sample.vms.insert(VM, VmTimes { at, threads });
        let tick = rates.update(sample);
        if let Some(rates) = tick.vms[&VM] {
            for part in [rates.run, rates.run_delay, rates.wanted] {
                assert!((0.0..=1.0).contains(&part.0), "{rates:?}");
            }
            assert!((0.0..=0.25).contains(&rates.variance), "{rates:?}");
        }
    }
}

/// Lists of CPUs and NUMA nodes in sysfs.
pub fn topology_list(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    match topology::parse_list(&text) {
        Some(Some(cpus)) => {
            assert_eq!(topology::parse_list(&cpus.to_string()), Some(Some(cpus)));
        }
        Some(None) => assert_eq!(text.trim(), "(null)"),
        None => {}
    }
}
