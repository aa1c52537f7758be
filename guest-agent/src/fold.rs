//! Folding and unfolding this guest: choose, plan, secure, apply.
//!
//! Secure means that the record of what to put back is on disk and with the guardian before the first write to the kernel.
//! When to fold is the [`crate::agent`]'s business.

use std::collections::BTreeSet;
use std::path::PathBuf;

use hint_proto::{CpuSet, v1};

use crate::apply::{Actuator, ApplyError, Plan, Wish, carry_out};
use crate::choose::{Preference, choose};
use crate::clock::Moment;
use crate::error::chain;
use crate::files::Files;
use crate::guardian::{Guardian, GuardianError};
use crate::restore::{Published, Record, RestoreError, Restored, StateDir, restore};
use crate::system;
use crate::topology::{self, Topology, TopologyError};

/// Why a hint could not be followed; the mask is as it was before, unless the error says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum FoldError {
    /// Planning or writing failed.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// The record could not be secured, or not everything could be put back.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// There is no guardian.
    #[error(transparent)]
    Guardian(#[from] GuardianError),
    /// Somebody else chooses the guest's CPUs.
    #[error("{}", system::GOVERNOR_ADVICE)]
    Governor,
    /// The topology is not known.
    #[error(transparent)]
    Topology(#[from] TopologyError),
}

/// How often a hint is tried when CPUs come or go between the choice and the write.
const TRIES: u32 = 3;

/// What a hint asks of the mask.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ask {
    /// How many CPUs to use.
    pub usable: u32,
    /// The VM's vCPUs, as the host counts them.
    pub vcpus: u32,
    /// vCPUs by number, those first that the host would rather keep.
    pub keep: Vec<u32>,
}

/// What following a hint came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The mask was right already.
    None,
    /// The mask was changed.
    Applied,
    /// All CPUs are to be used: the mask as found is back.
    Unfolded,
}

/// This guest's mask and everything that is needed to change it and put it back.
#[derive(Debug)]
pub struct Fold {
    files: Box<dyn Files>,
    actuator: Box<dyn Actuator>,
    state: StateDir,
    guardian: Guardian,
    topology: Topology,
    folded: Option<Folded>,
    /// Files that others write now; each was logged when it was lost.
    lost: BTreeSet<PathBuf>,
    /// What other programs are told.
    published: Published,
}

/// What is known while folded.
#[derive(Debug)]
struct Folded {
    record: Record,
    preferred: CpuSet,
}

impl Fold {
    /// Takes charge of the mask as it is now: unfolded.
    ///
    /// # Errors
    /// When the topology can't be read.
    pub fn new(
        files: Box<dyn Files>,
        actuator: Box<dyn Actuator>,
        state: StateDir,
        guardian: Guardian,
    ) -> Result<Self, FoldError> {
        let topology = Topology::read(files.as_ref())?;
        Ok(Self {
            files,
            actuator,
            state,
            guardian,
            topology,
            folded: None,
            lost: BTreeSet::new(),
            published: Published::default(),
        })
    }

    /// The kernel's files.
    #[must_use]
    pub fn files(&self) -> &dyn Files {
        self.files.as_ref()
    }

    /// The actuator.
    #[must_use]
    pub fn actuator(&self) -> &dyn Actuator {
        self.actuator.as_ref()
    }

    /// The guardian.
    pub fn guardian(&mut self) -> &mut Guardian {
        &mut self.guardian
    }

    /// The topology, read again if the online CPUs changed.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn topology(&mut self) -> Result<&Topology, TopologyError> {
        if topology::online(self.files.as_ref())? != self.topology.online {
            self.topology = Topology::read(self.files.as_ref())?;
            tracing::info!(online = %self.topology.online, "the online CPUs changed");
        }
        Ok(&self.topology)
    }

    /// Is the guest folded?
    #[must_use]
    pub fn is_folded(&self) -> bool {
        self.folded.is_some()
    }

    /// CPUs in use now, by the kernel's files.
    ///
    /// # Errors
    /// When they can't be read.
    pub fn current(&self) -> Result<CpuSet, FoldError> {
        let online = topology::online(self.files.as_ref())?;
        Ok(self.actuator.current(self.files.as_ref(), &online)?)
    }

    /// Tasks pinned to avoided CPUs alone; `None` when that is not known, or the actuator moves them.
    #[must_use]
    pub fn pinned_outside(&self) -> Option<u32> {
        match (&self.folded, self.actuator.pinned_tasks()) {
            (Some(folded), v1::PinnedTasks::Stay) => {
                system::pinned_outside(self.files.as_ref(), &folded.preferred)
            }
            (None, _) => Some(0),
            (Some(_), _) => None,
        }
    }

    /// Makes the guest use as many CPUs as `ask` says, and the guardian expect the next word by `lease_ends`. When CPUs come or go
    /// meanwhile, so that the kernel refuses what was chosen, it chooses again.
    ///
    /// # Errors
    /// When it can't be done; the mask is as it was before, unless the error says otherwise.
    pub fn follow(
        &mut self,
        ask: &Ask,
        lease_ends: Moment,
        now: Moment,
    ) -> Result<Change, FoldError> {
        let mut result = self.follow_once(ask, lease_ends, now);
        for _ in 1..TRIES {
            let changed = topology::online(self.files.as_ref())? != self.topology.online;
            if !(changed && matches!(result, Err(FoldError::Apply(_)))) {
                break;
            }
            result = self.follow_once(ask, lease_ends, now);
        }
        result
    }

    fn follow_once(
        &mut self,
        ask: &Ask,
        lease_ends: Moment,
        now: Moment,
    ) -> Result<Change, FoldError> {
        if self.actuator.kind() != v1::Actuator::Observe
            && system::steal_governor(self.files.as_ref())
        {
            return Err(FoldError::Governor);
        }
        let in_use = match &self.folded {
            Some(folded) => folded.preferred.clone(),
            None => self.current()?,
        };
        let topology = self.topology()?;
        let online = topology.online.clone();
        let preference = Preference::new(topology, ask.vcpus, &ask.keep);
        let preferred = choose(topology, &in_use, ask.usable, &preference);
        if preferred == online {
            return Ok(match self.unfold(now)? {
                Some(_) => Change::Unfolded,
                None => Change::None,
            });
        }
        self.guardian.lease(lease_ends, now)?;
        let before = self.folded.as_ref().map_or_else(
            || Record {
                boot_id: system::boot_id(self.files.as_ref()),
                actuator: self.actuator.name().to_owned(),
                ..Record::default()
            },
            |folded| folded.record.clone(),
        );
        let wish = Wish { preferred, online };
        let plan = self.actuator.plan(self.files.as_ref(), &before, &wish)?;
        self.note_lost(&plan);
        let same = self
            .folded
            .as_ref()
            .is_some_and(|folded| folded.preferred == wish.preferred);
        if same && plan.writes.is_empty() {
            return Ok(Change::None);
        }
        self.published = Published {
            usable: ask.usable,
            vcpus: ask.vcpus,
            actuator: self.actuator.name().to_owned(),
            preferred: wish.preferred.to_string(),
            online: wish.online.to_string(),
        };
        self.commit(plan, wish.preferred, now)?;
        Ok(Change::Applied)
    }

    fn commit(&mut self, plan: Plan, preferred: CpuSet, now: Moment) -> Result<(), FoldError> {
        let result = self.secure_and_write(&plan, now);
        match (&result, &mut self.folded) {
            (Ok(()), _) => {
                self.folded = Some(Folded {
                    record: plan.record,
                    preferred,
                });
            }
            // The fold before is in force again, and the record names what both wrote.
            (Err(_), Some(folded)) => {
                folded.record = plan.record;
                self.published.preferred = folded.preferred.to_string();
                self.state.publish(&self.published)?;
            }
            (Err(error), None) => {
                tracing::debug!("back to the mask as found: {}", chain(error));
                self.folded = Some(Folded {
                    record: plan.record,
                    preferred,
                });
                self.unfold(now)?;
            }
        }
        result
    }

    fn secure_and_write(&mut self, plan: &Plan, now: Moment) -> Result<(), FoldError> {
        self.state.save(&plan.record)?;
        self.guardian.hold(&plan.record, now)?;
        carry_out(self.files.as_ref(), &plan.writes)?;
        self.state.publish(&self.published)?;
        Ok(())
    }

    fn note_lost(&mut self, plan: &Plan) {
        let lost: BTreeSet<PathBuf> = plan.lost.iter().cloned().collect();
        for path in lost.difference(&self.lost) {
            tracing::warn!(path = %path.display(), "somebody else writes this file: it is left to them");
        }
        self.lost = lost;
    }

    /// Puts the mask back as it was found. `None` when the guest is not folded.
    ///
    /// # Errors
    /// When something can't be put back; the guest then still counts as folded, and another try does the rest.
    pub fn unfold(&mut self, now: Moment) -> Result<Option<Restored>, FoldError> {
        let Some(folded) = &self.folded else {
            return Ok(None);
        };
        let restored = restore(self.files.as_ref(), &self.state, &folded.record)?;
        self.folded = None;
        self.lost.clear();
        for (path, text) in &restored.replaced {
            tracing::info!(path = %path.display(), text, "restored with another text for the same mask");
        }
        for (path, why) in &restored.left {
            tracing::warn!(path = %path.display(), "{why}");
        }
        // A guardian that does not hear this restores once more, which changes nothing.
        if let Err(error) = self.guardian.release(now) {
            tracing::warn!("the guardian was not released: {}", chain(&error));
        }
        Ok(Some(restored))
    }

    /// What the agent says of itself when a stream begins.
    ///
    /// # Errors
    /// When the topology can't be read.
    pub fn hello(&mut self) -> Result<v1::Hello, FoldError> {
        let preferred = self.current().map(|cpus| cpus.to_string());
        let topology = self.topology()?;
        let cores = topology
            .cores
            .iter()
            .map(|core| v1::GuestCore {
                cpus: core.cpus.to_string(),
                node: core.node,
            })
            .collect();
        let (online, untouched) = (
            topology.online.to_string(),
            topology.untouched().to_string(),
        );
        Ok(v1::Hello {
            protocol: hint_proto::PROTOCOL,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel_release: system::kernel_release(self.files()).unwrap_or_default(),
            boot_id: system::boot_id(self.files()).unwrap_or_default(),
            actuator: self.actuator.kind().into(),
            pinned_tasks: self.actuator.pinned_tasks().into(),
            online,
            untouched,
            cores,
            preferred: preferred.unwrap_or_default(),
        })
    }
}
