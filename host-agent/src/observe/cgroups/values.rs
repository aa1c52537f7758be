//! What the files of a cgroup say, as text to values. No file is read here.

use std::time::Duration;

use crate::model::{Cpus, Limit};
use crate::procfs::number;

/// The weight of a new group on the scale of v2.
const DEFAULT_WEIGHT: f64 = 100.0;
/// The same on the scale of v1.
const DEFAULT_SHARES: f64 = 1024.0;
/// The scheduler's own weights of `cpu.idle` groups and of new groups (`WEIGHT_IDLEPRIO` and `NICE_0_LOAD` in
/// kernel/sched/sched.h).
const IDLE_WEIGHT: f64 = DEFAULT_WEIGHT * 3.0 / 1024.0;
/// The quota's period where the file names none.
const DEFAULT_PERIOD_US: f64 = 100_000.0;

/// `cpu.weight`, 1 to 10 000; 0 is what newer kernels say of a group with `cpu.idle`.
pub(super) fn weight(text: &str) -> Option<f64> {
    match number::<u32>(text.trim())? {
        0 => Some(IDLE_WEIGHT),
        weight @ 1..=10_000 => Some(f64::from(weight)),
        _ => None,
    }
}

/// `cpu.shares`, 2 to 262 144, on the scale of v2. Only ratios among siblings count, and those it keeps.
pub(super) fn shares(text: &str) -> Option<f64> {
    let shares: u32 = number(text.trim())?;
    (2..=262_144)
        .contains(&shares)
        .then(|| f64::from(shares) * DEFAULT_WEIGHT / DEFAULT_SHARES)
}

/// What `cpu.idle` makes of a weight: with it a group gets next to nothing, whatever its weight says.
pub(super) fn idle(text: &str, weight: Option<f64>) -> Option<f64> {
    match text.trim() {
        "0" => weight,
        "1" => Some(IDLE_WEIGHT),
        _ => None,
    }
}

/// `cpu.max`: quota or `max`, then the period, then what some vendors add.
pub(super) fn cpu_max(text: &str) -> Option<Limit> {
    let mut fields = text.split_ascii_whitespace();
    let quota = fields.next()?;
    let period = match fields.next() {
        Some(period) => number::<u32>(period)?.into(),
        None => DEFAULT_PERIOD_US,
    };
    if quota == "max" {
        return Some(Limit::None);
    }
    at(number(quota)?, period)
}

/// `cpu.cfs_quota_us` and `cpu.cfs_period_us`; -1 is no limit.
pub(super) fn cfs_quota(quota: &str, period: &str) -> Option<Limit> {
    match quota.trim() {
        "-1" => Some(Limit::None),
        quota => at(number(quota)?, number::<u32>(period.trim())?.into()),
    }
}

#[allow(
    clippy::cast_precision_loss,
    reason = "microseconds of a quota are far below 2^52"
)]
fn at(quota_us: u64, period_us: f64) -> Option<Limit> {
    (quota_us > 0 && period_us > 0.0).then(|| Limit::At(Cpus(quota_us as f64 / period_us)))
}

/// The used time in `cpu.stat`.
pub(super) fn usage_v2(text: &str) -> Option<Duration> {
    let used = text
        .lines()
        .find_map(|line| line.strip_prefix("usage_usec "))?;
    number(used.trim()).map(Duration::from_micros)
}

/// `cpuacct.usage`, in nanoseconds.
pub(super) fn usage_v1(text: &str) -> Option<Duration> {
    number(text.trim()).map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_of_both_versions_have_one_scale() {
        assert_eq!(weight("100\n"), Some(100.0));
        assert_eq!(weight("1024\n"), Some(1024.0));
        assert_eq!(shares("1024\n"), Some(100.0));
        assert_eq!(shares("2048\n"), Some(200.0));
        assert_eq!(shares("2\n"), Some(0.195_312_5));
        for wrong in ["", "max", "-1", "10001", "1 2"] {
            assert_eq!(weight(wrong), None, "{wrong:?}");
        }
        for wrong in ["", "0", "1", "262145", "-1"] {
            assert_eq!(shares(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn an_idle_group_weighs_next_to_nothing_whatever_its_weight_says() {
        assert_eq!(idle("1\n", Some(100.0)), Some(0.292_968_75));
        assert_eq!(idle("1\n", None), Some(0.292_968_75));
        assert_eq!(weight("0\n"), Some(0.292_968_75));
        assert_eq!(idle("0\n", Some(100.0)), Some(100.0));
        assert_eq!(idle("", Some(100.0)), None);
    }

    #[test]
    fn quotas_of_v2() {
        for (text, limit) in [
            ("max 100000\n", Some(Limit::None)),
            ("max 100000 0\n", Some(Limit::None)),
            ("max", Some(Limit::None)),
            ("200000 100000\n", Some(Limit::At(Cpus(2.0)))),
            ("50000\n", Some(Limit::At(Cpus(0.5)))),
            ("50000 100000 20000\n", Some(Limit::At(Cpus(0.5)))),
            ("0 100000\n", None),
            ("50000 0\n", None),
            ("50000 ma", None),
            ("-1 100000\n", None),
            ("", None),
        ] {
            assert_eq!(cpu_max(text), limit, "{text:?}");
        }
    }

    #[test]
    fn quotas_of_v1() {
        for (quota, period, limit) in [
            ("-1\n", "100000\n", Some(Limit::None)),
            ("150000\n", "100000\n", Some(Limit::At(Cpus(1.5)))),
            ("-1\n", "", Some(Limit::None)),
            ("150000\n", "", None),
            ("150000\n", "0", None),
            ("-2\n", "100000\n", None),
            ("0\n", "100000\n", None),
        ] {
            assert_eq!(cfs_quota(quota, period), limit, "{quota:?} {period:?}");
        }
    }

    #[test]
    fn used_time() {
        assert_eq!(
            usage_v2("usage_usec 1500\nuser_usec 1000\nsystem_usec 500\n"),
            Some(Duration::from_micros(1500))
        );
        assert_eq!(usage_v2("user_usec 1000\nusage_usec\n"), None);
        assert_eq!(usage_v2("usage_usec x\n"), None);
        assert_eq!(usage_v1("1500000\n"), Some(Duration::from_micros(1500)));
        assert_eq!(usage_v1(""), None);
    }
}
