//! The files of one group, kept open between reads.

use std::time::Duration;

use hint_proto::CpuSet;

use super::mounts::{Hierarchies, Hierarchy, Version};
use super::values;
use crate::model::Limit;
use crate::root::{KeptFile, ReadError, Root};

/// What a group's files say.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Values {
    pub(super) standing: Standing,
    pub(super) weight: Option<f64>,
    pub(super) quota: Option<Limit>,
    /// `None` when it has no set of its own, too.
    pub(super) cpus: Option<CpuSet>,
}

/// How the scheduler treats a group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Standing {
    /// As a whole, by its weight.
    #[default]
    Group,
    /// Not at all: the CPU controller is not passed on to it, and its threads count in the group above.
    Threads,
    /// It is no more.
    Gone,
}

/// The files of one group.
#[derive(Debug)]
pub(super) struct GroupFiles {
    is_root: bool,
    version: Version,
    weight: KeptFile,
    idle: KeptFile,
    quota: QuotaFiles,
    cpus: Vec<KeptFile>,
    usage: Vec<(Version, KeptFile)>,
}

impl GroupFiles {
    /// Those of the group `path` of the CPU hierarchy.
    pub(super) fn new(hierarchies: &Hierarchies, cpu: &Hierarchy, path: &str) -> Self {
        let own = |name: &str| KeptFile::new(file(cpu, path, name));
        let cpus = hierarchies.cpuset.as_ref().map_or(Vec::new(), |cpuset| {
            let names: &[&str] = match cpuset.version {
                Version::V1 => &["cpuset.effective_cpus", "cpuset.cpus"],
                Version::V2 => &["cpuset.cpus.effective"],
            };
            let files = names
                .iter()
                .map(|name| KeptFile::new(file(cpuset, path, name)));
            files.collect()
        });
        let usage = hierarchies.usage.iter().map(|usage| {
            let name = match usage.version {
                Version::V1 => "cpuacct.usage",
                Version::V2 => "cpu.stat",
            };
            (usage.version, KeptFile::new(file(usage, path, name)))
        });
        Self {
            is_root: path.is_empty(),
            version: cpu.version,
            weight: own(match cpu.version {
                Version::V1 => "cpu.shares",
                Version::V2 => "cpu.weight",
            }),
            idle: own("cpu.idle"),
            quota: QuotaFiles::new(cpu, path),
            cpus,
            usage: usage.collect(),
        }
    }

    /// What they say now. What can't be read is `None`, and its error goes to `problem`.
    pub(super) fn read(&mut self, root: &Root, mut problem: impl FnMut(ReadError)) -> Values {
        let mut known = |result: Result<Option<f64>, ReadError>| result.map_err(&mut problem).ok();
        let parse = match self.version {
            Version::V1 => values::shares,
            Version::V2 => values::weight,
        };
        let weight = known(value(root, &mut self.weight, "a weight", parse));
        let standing = match weight {
            Some(None) if !self.is_root => self.without_weight(root),
            _ => Standing::Group,
        };
        let mut values = Values {
            standing,
            weight: weight.flatten(),
            ..Values::default()
        };
        if standing == Standing::Group && !self.is_root {
            let idle = value(root, &mut self.idle, "0 or 1", |text| {
                // A weight that is not known stays so, unless the group is idle.
                Some(values::idle(text, values.weight)).filter(|_| matches!(text.trim(), "0" | "1"))
            });
            match idle {
                Ok(Some(weight)) => values.weight = weight,
                // Kernels before 5.15 have no such file.
                Ok(None) => {}
                Err(error) => {
                    values.weight = None;
                    problem(error);
                }
            }
        }
        values.quota = self.quota.read(root).map_err(&mut problem).ok();
        for file in &mut self.cpus {
            match value(root, file, "a list of CPUs", |text| {
                CpuSet::parse_list(text).ok()
            }) {
                Ok(cpus) => values.cpus = cpus.filter(|cpus| !cpus.is_empty()),
                Err(error) => problem(error),
            }
            if values.cpus.is_some() {
                break;
            }
        }
        values
    }

    /// A group of v1 always has a weight, one of v2 only where the controller is passed on; each has `cpu.stat`.
    fn without_weight(&mut self, root: &Root) -> Standing {
        let is_there = self.usage.iter_mut().any(|(version, file)| {
            let both = (self.version, *version) == (Version::V2, Version::V2);
            both && !matches!(file.read_again(root), Ok(None))
        });
        if is_there {
            Standing::Threads
        } else {
            Standing::Gone
        }
    }

    /// The time that its threads have used since it was made; `None` when it is gone or the kernel doesn't tell.
    pub(super) fn usage(&mut self, root: &Root) -> Result<Option<Duration>, ReadError> {
        for (version, file) in &mut self.usage {
            let used = match version {
                Version::V1 => value(root, file, "nanoseconds", values::usage_v1)?,
                Version::V2 => value(root, file, "a line usage_usec", values::usage_v2)?,
            };
            if used.is_some() {
                return Ok(used);
            }
        }
        Ok(None)
    }
}

/// The files of a group's quota.
#[derive(Debug)]
pub(super) struct QuotaFiles {
    quota: KeptFile,
    /// v1 has it in a file of its own.
    period: Option<KeptFile>,
}

impl QuotaFiles {
    pub(super) fn new(cpu: &Hierarchy, path: &str) -> Self {
        let kept = |name: &str| KeptFile::new(file(cpu, path, name));
        match cpu.version {
            Version::V1 => Self {
                quota: kept("cpu.cfs_quota_us"),
                period: Some(kept("cpu.cfs_period_us")),
            },
            Version::V2 => Self {
                quota: kept("cpu.max"),
                period: None,
            },
        }
    }

    /// The group's own limit. There is none where there is no such file: at the root, and where the CPU controller is not passed
    /// on.
    pub(super) fn read(&mut self, root: &Root) -> Result<Limit, ReadError> {
        let Some(quota) = self.quota.read_again(root)? else {
            return Ok(Limit::None);
        };
        let (limit, expected) = match &mut self.period {
            None => (values::cpu_max(&quota), "a quota or max, and a period"),
            // Most groups have no limit, and no need for its period.
            Some(_) if quota.trim() == "-1" => return Ok(Limit::None),
            Some(period) => {
                let period = period.read_again(root)?.unwrap_or_default();
                let expected = "-1, or a quota with its period in cpu.cfs_period_us";
                (values::cfs_quota(&quota, &period), expected)
            }
        };
        limit.ok_or_else(|| ReadError::content(&self.quota.path(root), expected, &quota))
    }
}

/// Reads one value; `None` when the file is not there.
fn value<T>(
    root: &Root,
    file: &mut KeptFile,
    expected: &'static str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>, ReadError> {
    let Some(text) = file.read_again(root)? else {
        return Ok(None);
    };
    parse(&text)
        .map(Some)
        .ok_or_else(|| ReadError::content(&file.path(root), expected, &text))
}

fn file(hierarchy: &Hierarchy, path: &str, name: &str) -> String {
    hierarchy
        .point
        .join(path)
        .join(name)
        .to_string_lossy()
        .into_owned()
}
