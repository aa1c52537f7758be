//! The division of a host's pCPU time.

use super::division::Division;
use crate::model::Host;

/// Divides pCPU time. Keeps buffers, and what follows from groups and cpusets alone, from one division to the next; the result
/// depends on the input only.
#[derive(Debug, Default)]
pub struct Engine {
    division: Division,
}

impl Engine {
    /// Divides the pCPU time of `host`. The result is good until the next call.
    pub fn divide(&mut self, host: &Host) -> &Division {
        self.division.claimants.resize(host.claimants.len(), None);
        &self.division
    }
}
