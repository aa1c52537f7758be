//! The times of the host's pCPUs, from `/proc/stat`.

use std::collections::BTreeMap;
use std::time::Duration;

use hint_proto::MAX_CPUS;

use crate::procfs::number;
use crate::root::{ReadError, Root};

/// `/proc` counts in USER_HZ, which is 100 on every architecture that runs KVM.
const TICK_MS: u64 = 10;

/// Times of one pCPU since boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuTimes {
    /// Idle, waiting for I/O included.
    pub idle: Duration,
    /// In interrupts, hard and soft.
    pub irq: Duration,
    /// Taken by a hypervisor below this host.
    pub steal: Duration,
}

/// Reads the times of each online pCPU.
pub(super) fn read(root: &Root) -> Result<BTreeMap<u32, CpuTimes>, ReadError> {
    let path = root.path("proc/stat");
    let text = root.read_text("proc/stat")?.unwrap_or_default();
    let times = parse(&text);
    if times.is_empty() {
        return Err(ReadError::content(&path, "lines cpu0, cpu1, ...", &text));
    }
    Ok(times)
}

/// The times in the text of a `/proc/stat`.
pub(super) fn parse(text: &str) -> BTreeMap<u32, CpuTimes> {
    text.lines().filter_map(parse_line).collect()
}

/// `cpu3 user nice system idle iowait irq softirq steal ...`; old kernels have fewer columns, which then count nothing. A line
/// that is no such line is passed over.
fn parse_line(line: &str) -> Option<(u32, CpuTimes)> {
    let mut fields = line.strip_prefix("cpu")?.split_ascii_whitespace();
    let cpu = fields
        .next()
        .filter(|_| !line.starts_with("cpu "))
        .and_then(number)
        .filter(|cpu| *cpu < MAX_CPUS)?;
    let ticks: Vec<u64> = fields.map_while(number).collect();
    let time = |column: usize| {
        Duration::from_millis(
            ticks
                .get(column)
                .copied()
                .unwrap_or(0)
                .saturating_mul(TICK_MS),
        )
    };
    ticks.get(3)?;
    Some((
        cpu,
        CpuTimes {
            idle: time(3) + time(4),
            irq: time(5) + time(6),
            steal: time(7),
        },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn columns_are_told_by_place_and_missing_ones_count_nothing() {
        let parse = |line| parse_line(line).unwrap();
        let ms = Duration::from_millis;
        let (cpu, times) = parse("cpu12 10 20 30 40 5 6 7 8 9 10");
        assert_eq!(cpu, 12);
        assert_eq!(
            times,
            CpuTimes {
                idle: ms(450),
                irq: ms(130),
                steal: ms(80)
            }
        );
        let (_, times) = parse("cpu0 10 20 30 40");
        assert_eq!(
            times,
            CpuTimes {
                idle: ms(400),
                irq: ms(0),
                steal: ms(0)
            }
        );
        for junk in [
            "cpu  1 2 3 4 5",
            "cpu0",
            "cpu0 1 2",
            "cpux 1 2 3 4",
            "processes -2049562273",
            "",
        ] {
            assert!(parse_line(junk).is_none(), "{junk:?}");
        }
    }

    #[test]
    fn bad_lines_lose_nothing_else_and_an_empty_file_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let root = Root::new(directory.path());
        assert!(read(&root).unwrap_err().to_string().contains("proc/stat"));
        fs::create_dir_all(directory.path().join("proc")).unwrap();
        fs::write(
            directory.path().join("proc/stat"),
            "cpu  1 1 1 1\ncpu0 1 1 1 1\ncpu2 1 1 1 1 1\nprocesses -3\nsoftirq\n",
        )
        .unwrap();
        assert_eq!(read(&root).unwrap().into_keys().collect::<Vec<_>>(), [0, 2]);
    }
}
