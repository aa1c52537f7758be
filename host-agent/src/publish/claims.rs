//! What a guest says, checked. Everything is a claim: bounded, and fit to be logged, before anything else sees it.
//!
//! A bad value names its field, so that who writes an agent finds it.

use hint_proto::{CpuSet, MAX_CPUS, v1};
use tonic::Status;

use crate::model::{Agent, Outcome};
use crate::text::{MAX_BYTES, printable};

/// Free text of a guest is refused above this many bytes.
const MAX_FREE_TEXT: usize = 4096;
/// NUMA nodes of any Linux are below this.
const MAX_NODES: u32 = 1024;
/// Tasks of any Linux are at most as many as PIDs.
const MAX_TASKS: u32 = 1 << 22;

/// A checked answer to a hint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answer {
    /// Epoch of the hint; 0 for news that answer none.
    pub(super) epoch: u64,
    /// Its sequence; 0 for none.
    pub(super) sequence: u64,
    /// What became of it.
    pub(super) outcome: Outcome,
    /// CPUs in use; empty when the agent can't tell.
    pub(super) preferred: CpuSet,
    /// Online CPUs; `None` when the agent can't tell.
    pub(super) online: Option<CpuSet>,
}

/// The agent that a Hello describes.
pub(super) fn agent(hello: &v1::Hello) -> Result<Agent, Status> {
    if hello.protocol != hint_proto::PROTOCOL {
        return Err(invalid(
            "hello.protocol",
            &format!("expected {}", hint_proto::PROTOCOL),
            &hello.protocol.to_string(),
        ));
    }
    let actuator = match v1::Actuator::try_from(hello.actuator) {
        Ok(v1::Actuator::Observe) => "observe",
        Ok(v1::Actuator::Paravirt) => "paravirt",
        Ok(v1::Actuator::Cpuset) => "cpuset",
        Ok(v1::Actuator::Unspecified) | Err(_) => {
            return Err(invalid(
                "hello.actuator",
                "expected an actuator of protocol 1",
                &hello.actuator.to_string(),
            ));
        }
    };
    name("hello.boot_id", &hello.boot_id)?;
    cpus("hello.untouched", &hello.untouched)?;
    cores(&hello.cores)?;
    Ok(Agent {
        version: name("hello.agent_version", &hello.agent_version)?,
        kernel_release: name("hello.kernel_release", &hello.kernel_release)?,
        actuator: actuator.to_owned(),
        online: some("hello.online", cpus("hello.online", &hello.online)?)?,
        preferred: cpus("hello.preferred", &hello.preferred)?,
        outcome: None,
        runnable_tasks: None,
    })
}

/// The answer in an Applied.
pub(super) fn answer(applied: &v1::Applied) -> Result<Answer, Status> {
    let error = free_text("applied.error", &applied.error)?;
    let outcome = match v1::Outcome::try_from(applied.outcome) {
        Ok(v1::Outcome::Applied) => Outcome::Applied,
        Ok(v1::Outcome::Logged) => Outcome::Logged,
        Ok(v1::Outcome::Failed) => Outcome::Failed(error),
        Ok(v1::Outcome::Restored) => Outcome::Restored,
        Ok(v1::Outcome::Unspecified) | Err(_) => {
            return Err(invalid(
                "applied.outcome",
                "expected an outcome of protocol 1",
                &applied.outcome.to_string(),
            ));
        }
    };
    Ok(Answer {
        epoch: applied.epoch,
        sequence: applied.sequence,
        outcome,
        preferred: cpus("applied.preferred", &applied.preferred)?,
        online: known(cpus("applied.online", &applied.online)?),
    })
}

/// Runnable tasks and online CPUs of a Report; each `None` when it says nothing of them.
pub(super) fn report(report: &v1::Report) -> Result<(Option<u32>, Option<CpuSet>), Status> {
    if let Some(tasks) = report.runnable_tasks.filter(|tasks| *tasks > MAX_TASKS) {
        return Err(invalid(
            "report.runnable_tasks",
            &format!("expected at most {MAX_TASKS}"),
            &tasks.to_string(),
        ));
    }
    let online = cpus("report.online", &report.online)?;
    Ok((report.runnable_tasks, known(online)))
}

/// The reason in a Goodbye.
pub(super) fn goodbye(goodbye: &v1::Goodbye) -> Result<String, Status> {
    free_text("goodbye.reason", &goodbye.reason)
}

fn cores(cores: &[v1::GuestCore]) -> Result<(), Status> {
    let mut threads = 0;
    for core in cores {
        threads += cpus("hello.cores.cpus", &core.cpus)?.len();
        if core.node >= MAX_NODES {
            return Err(invalid(
                "hello.cores.node",
                &format!("expected a node below {MAX_NODES}"),
                &core.node.to_string(),
            ));
        }
        if threads > MAX_CPUS as usize {
            return Err(invalid(
                "hello.cores",
                &format!("expected at most {MAX_CPUS} threads in all"),
                "more",
            ));
        }
    }
    Ok(())
}

/// A short text that names something.
fn name(field: &str, text: &str) -> Result<String, Status> {
    if text.len() > MAX_BYTES {
        return Err(invalid(
            field,
            &format!("expected at most {MAX_BYTES} bytes"),
            &text.len().to_string(),
        ));
    }
    Ok(printable(text))
}

/// A text for people; its end may be lost.
fn free_text(field: &str, text: &str) -> Result<String, Status> {
    if text.len() > MAX_FREE_TEXT {
        return Err(invalid(
            field,
            &format!("expected at most {MAX_FREE_TEXT} bytes"),
            &text.len().to_string(),
        ));
    }
    Ok(printable(text))
}

fn some(field: &str, cpus: CpuSet) -> Result<CpuSet, Status> {
    known(cpus).ok_or_else(|| invalid(field, "expected at least one CPU", "none"))
}

fn known(cpus: CpuSet) -> Option<CpuSet> {
    (!cpus.is_empty()).then_some(cpus)
}

fn cpus(field: &str, text: &str) -> Result<CpuSet, Status> {
    if spelled_out(text) > u64::from(MAX_CPUS) {
        return Err(invalid(
            field,
            &format!("expected a list of at most {MAX_CPUS} CPUs without repeats"),
            text,
        ));
    }
    CpuSet::parse_list(text)
        .map_err(|error| Status::invalid_argument(printable(&format!("{field}: {error}"))))
}

/// How many CPUs a list names when each repeat counts: a short list can keep its reader busy for very long.
fn spelled_out(list: &str) -> u64 {
    list.split(',')
        .map(|part| {
            let range = part.split(':').next().unwrap_or(part);
            let mut ends = range.splitn(2, '-').map(|end| end.trim().parse::<u32>());
            match (ends.next(), ends.next()) {
                (Some(Ok(first)), Some(Ok(last))) => u64::from(last.saturating_sub(first)) + 1,
                _ => 1,
            }
        })
        .sum()
}

fn invalid(field: &str, expected: &str, found: &str) -> Status {
    Status::invalid_argument(format!("{field}: {expected}, found {}", printable(found)))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn some_agent() -> Agent {
        agent(&hello()).unwrap()
    }

    fn hello() -> v1::Hello {
        v1::Hello {
            protocol: 1,
            agent_version: "0.1.0".to_owned(),
            kernel_release: "6.12.0".to_owned(),
            boot_id: "b".to_owned(),
            actuator: v1::Actuator::Cpuset.into(),
            pinned_tasks: v1::PinnedTasks::Moved.into(),
            online: "0-3".to_owned(),
            untouched: String::new(),
            cores: vec![],
            preferred: "0-3".to_owned(),
        }
    }

    #[test]
    fn a_guest_may_have_as_many_cpus_as_any_linux() {
        let hello = v1::Hello {
            online: "0-8191".to_owned(),
            preferred: "0-1279".to_owned(),
            ..hello()
        };
        let agent = agent(&hello).unwrap();
        assert_eq!((agent.online.len(), agent.preferred.len()), (8192, 1280));
    }

    #[test]
    fn a_good_hello_becomes_an_agent() {
        let agent = agent(&hello()).unwrap();
        assert_eq!(agent.actuator, "cpuset");
        assert_eq!(agent.online.len(), 4);
        assert_eq!(agent.outcome, None);
        assert!(agent.works() && !agent.folded());
    }

    #[test]
    fn an_agent_that_cannot_read_its_mask_counts_as_folded() {
        let unread = v1::Hello {
            preferred: String::new(),
            ..hello()
        };
        assert!(agent(&unread).unwrap().folded());
    }

    #[test]
    fn bad_values_name_their_field() {
        type Spoil = fn(&mut v1::Hello);
        let cases: [(&str, Spoil); 11] = [
            ("hello.protocol", |h| h.protocol = 2),
            ("hello.actuator", |h| h.actuator = 0),
            ("hello.actuator", |h| h.actuator = 99),
            ("hello.online", |h| h.online = "0-x".to_owned()),
            ("hello.online", |h| h.online = String::new()),
            ("hello.online", |h| h.online = "8192".to_owned()),
            ("hello.preferred", |h| h.preferred = "0-3,3-0".to_owned()),
            ("hello.untouched", |h| h.untouched = "-".to_owned()),
            ("hello.agent_version", |h| h.agent_version = "v".repeat(257)),
            ("hello.kernel_release", |h| {
                h.kernel_release = "k".repeat(9000);
            }),
            ("hello.cores.node", |h| {
                h.cores = vec![v1::GuestCore {
                    cpus: "0".to_owned(),
                    node: 4_000_000_000,
                }];
            }),
        ];
        for (field, spoil) in cases {
            let mut hello = hello();
            spoil(&mut hello);
            let status = agent(&hello).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert!(
                status.message().starts_with(&format!("{field}:")),
                "{field}: {}",
                status.message()
            );
        }
    }

    #[test]
    fn a_list_that_repeats_its_cpus_is_refused_before_it_is_read() {
        let list = vec!["0-8191"; 5000].join(",");
        let status = cpus("hello.online", &list).unwrap_err();
        assert!(status.message().contains("without repeats"));
        assert!(status.message().len() < 400);
        assert_eq!(cpus("hello.online", "0-8191").unwrap().len(), 8192);
        let even: CpuSet = (0..8192).step_by(2).collect();
        assert_eq!(cpus("hello.online", &even.to_string()).unwrap(), even);
    }

    #[test]
    fn an_error_is_kept_short_and_clean() {
        let applied = v1::Applied {
            epoch: 1,
            sequence: 1,
            outcome: v1::Outcome::Failed.into(),
            preferred: "0".to_owned(),
            online: "0".to_owned(),
            error: format!("write\u{1b}[31m {}", "x".repeat(1000)),
        };
        let Outcome::Failed(error) = answer(&applied).unwrap().outcome else {
            panic!("expected a failure");
        };
        assert_eq!(error.len(), 256);
        assert!(error.starts_with("write?[31m xxx"));
        let too_long = v1::Applied {
            error: "x".repeat(5000),
            ..applied
        };
        assert!(
            answer(&too_long)
                .unwrap_err()
                .message()
                .starts_with("applied.error:")
        );
    }

    #[test]
    fn absurd_reports_are_refused_and_unset_stays_unknown() {
        let (tasks, online) = report(&v1::Report::default()).unwrap();
        assert_eq!((tasks, online), (None, None));
        let absurd = v1::Report {
            runnable_tasks: Some(u32::MAX),
            ..v1::Report::default()
        };
        assert!(
            report(&absurd)
                .unwrap_err()
                .message()
                .starts_with("report.runnable_tasks:")
        );
    }
}
