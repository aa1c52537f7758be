//! What a sample is about: VMs, groups, pCPUs and settings. It changes seldom.

use hint_proto::CpuSet;

use crate::config::{Config, Host, VmPolicy};
use crate::discover::Found;
use crate::model::{GroupTree, Mode};

/// Everything beside counters and agents that decisions depend on.
#[derive(Debug, Clone, PartialEq)]
pub struct Scene {
    /// The VMs. Of each, what decisions and policies look at: identity, name, UUID, vCPUs, and where they may run.
    pub found: Vec<Found>,
    /// The CPU groups.
    pub tree: GroupTree,
    /// pCPUs that are online and not isolated.
    pub common: CpuSet,
    /// pCPUs that have times in `/proc/stat`.
    pub online: CpuSet,
    /// The configuration.
    pub settings: Settings,
}

/// What decisions take from the configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// The broker's mode at the time.
    pub mode: Mode,
    /// Weight of the host's own work.
    pub host_weight: u32,
    /// Exceptions for single VMs.
    pub vms: Vec<VmPolicy>,
}

impl Settings {
    /// A configuration with these settings, and defaults for what decisions don't look at.
    #[must_use]
    pub fn config(&self) -> Config {
        Config {
            mode: self.mode,
            host: Host {
                weight: self.host_weight,
            },
            vms: self.vms.clone(),
            ..Config::default()
        }
    }
}

impl From<&Config> for Settings {
    fn from(config: &Config) -> Self {
        Self {
            mode: config.mode,
            host_weight: config.host.weight,
            vms: config.vms.clone(),
        }
    }
}
