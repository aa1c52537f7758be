//! The actuator that applies nothing. The CPUs that the agent would choose are published in its state directory.

use hint_proto::{CpuSet, v1};

use super::{Actuator, ApplyError, Plan, Wish};
use crate::files::Files;
use crate::restore::Record;

pub(super) const NAME: &str = "observe";

/// Applies nothing; works everywhere.
#[derive(Debug, Clone, Copy)]
pub struct Observe;

impl Actuator for Observe {
    fn name(&self) -> &'static str {
        NAME
    }

    fn kind(&self) -> v1::Actuator {
        v1::Actuator::Observe
    }

    fn pinned_tasks(&self) -> v1::PinnedTasks {
        v1::PinnedTasks::Stay
    }

    fn plan(&self, _files: &dyn Files, record: &Record, _wish: &Wish) -> Result<Plan, ApplyError> {
        Ok(Plan {
            record: record.clone(),
            ..Plan::default()
        })
    }

    fn current(&self, _files: &dyn Files, online: &CpuSet) -> Result<CpuSet, ApplyError> {
        Ok(online.clone())
    }
}
