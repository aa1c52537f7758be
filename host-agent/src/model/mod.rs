//! The words that the stages of the pipeline share. Stages know these types and not each other.
//!
//! `None` always means "not known"; it never stands for zero.

mod cgroups;
mod figures;
mod host;
mod topology;
mod why;

use std::collections::BTreeMap;
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, Sub};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hint_proto::CpuSet;

pub use self::cgroups::{CpuGroup, GroupTree, Limit, VmGroup};
pub use self::figures::{PcpuRates, Tick, VmRates};
pub use self::host::{Claimant, Group, Host, Pcpu, Threads};
pub use self::topology::Topology;
pub use self::why::{BoundBy, Pool, Rule, Turn, Wait, Why};

/// CPUs' worth of time: 1.0 is one pCPU for all of the time.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
pub struct Cpus(pub f64);

impl Cpus {
    /// None at all.
    pub const ZERO: Self = Self(0.0);

    /// Thousandths of a CPU, rounded; negative values and NaN give 0.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // the cast saturates, and NaN gives 0
    pub fn milli(self) -> u64 {
        (self.0 * 1000.0).round() as u64
    }

    /// The mean number of CPUs that `time` on CPUs in a `window` is; `None` for an empty window.
    #[must_use]
    pub fn from_time(time: Duration, window: Duration) -> Option<Self> {
        (!window.is_zero()).then(|| Self(time.as_secs_f64() / window.as_secs_f64()))
    }
}

impl From<u32> for Cpus {
    fn from(count: u32) -> Self {
        Self(f64::from(count))
    }
}

impl Add for Cpus {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl Sub for Cpus {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}

impl Sum for Cpus {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        Self(parts.map(|part| part.0).sum())
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2}", self.0)
    }
}

/// A VM's identity on this host: its VMM process. PIDs are used again, so the start time belongs to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmId {
    /// PID of the VMM.
    pub pid: u32,
    /// Its start in clock ticks since boot (`/proc/<pid>/stat`, field 22).
    pub start_ticks: u64,
}

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.pid, self.start_ticks)
    }
}

/// How far the broker goes with a VM; ordered by how far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Compute and export; send no hint.
    #[default]
    Observe,
    /// Send hints; the agent logs them.
    Advise,
    /// Send hints; the agent applies them.
    Enforce,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Observe => "observe",
            Self::Advise => "advise",
            Self::Enforce => "enforce",
        })
    }
}

/// What runs the guest's code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// The process holds an `anon_inode:kvm-vm` file.
    Kvm,
    /// QEMU without KVM: vCPU threads translate the guest's code.
    Tcg,
}

/// What is known of a VM's vCPU threads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Vcpus {
    /// Thread of each vCPU, by vCPU index. Never empty.
    Known(BTreeMap<u32, u32>),
    /// Nothing tells the vCPU threads from the VMM's others; the text says why.
    Unclassified(String),
}

/// A VM as discovery found it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vm {
    /// Its identity.
    pub id: VmId,
    /// Its name by the VMM; a label, not unique, maybe empty.
    pub name: String,
    /// Its UUID by the VMM.
    pub uuid: Option<String>,
    /// What runs its code.
    pub accelerator: Accelerator,
    /// Its vCPU threads.
    pub vcpus: Vcpus,
    /// Its vsock CID, when the VMM uses the host's AF_VSOCK.
    pub cid: Option<u32>,
    /// Its hybrid vsock: guest connections to host port P arrive on the Unix socket `<path>_P`.
    pub hybrid_socket: Option<PathBuf>,
}

/// Is there contention for the pCPUs of a pool?
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Contention {
    /// Not known: measurements are missing.
    #[default]
    Unknown,
    /// There is idle pCPU time for who wants it.
    None,
    /// VMs want more pCPU time than there is.
    Contended,
}

/// Why usable is what it is; the same list as `Reason` in hint.proto.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// No contention: all vCPUs.
    Uncontended,
    /// Contention: the VM's share of the pool.
    Contention,
    /// Contention, and the share covers all vCPUs.
    ShareCovers,
    /// Not watched for long enough to fold.
    WarmUp,
    /// Sleeps so often that it can't show its demand.
    Sleeper,
    /// Folding can't help it.
    NoGain,
    /// A change was due and the damping put it off.
    Damped,
    /// No working agent.
    NoAgent,
    /// vCPU threads not known.
    Unclassified,
    /// Measurements incomplete.
    Unmeasured,
    /// None of the pCPUs that it may use is online.
    Pinned,
    /// Fixed by the configuration.
    Policy,
    /// Folded, it got less than its share, so it is left unfolded for some time.
    Starved,
    /// It uses up its quota, or that of a group that it is in.
    Quota,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Uncontended => "uncontended",
            Self::Contention => "contention",
            Self::ShareCovers => "share-covers",
            Self::WarmUp => "warm-up",
            Self::Sleeper => "sleeper",
            Self::NoGain => "no-gain",
            Self::Damped => "damped",
            Self::NoAgent => "no-agent",
            Self::Unclassified => "unclassified",
            Self::Unmeasured => "unmeasured",
            Self::Pinned => "pinned",
            Self::Policy => "policy",
            Self::Starved => "starved",
            Self::Quota => "quota",
        })
    }
}

/// vCPUs by what each can expect; the three add up to the VM's vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Classes {
    /// With a pCPU's worth of time each.
    pub full: u32,
    /// With part of a pCPU's time; at most one where usable follows the VM's share.
    pub partial: u32,
    /// To be avoided.
    pub avoided: u32,
}

/// What to tell a guest, before the channel adds epoch, sequence and lease.
#[derive(Debug, Clone, PartialEq)]
pub struct Hint {
    /// vCPUs to use now, 1 to `vcpus`.
    pub usable: u32,
    /// All vCPUs.
    pub vcpus: u32,
    /// The vCPUs by class.
    pub classes: Classes,
    /// What the VM would get if it wanted all its vCPUs.
    pub entitlement: Option<Cpus>,
    /// Idle time of the pool.
    pub spare: Option<Cpus>,
    /// Contention of the pool.
    pub contention: Contention,
    /// What bound usable.
    pub reason: Reason,
    /// Apply it, or log it.
    pub mode: Mode,
    /// The vCPUs by number, those first that the host would rather keep in use; empty where it makes no difference.
    pub keep: Arc<[u32]>,
}

/// What became of the last hint, by the agent's word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The mask is as asked.
    Applied,
    /// Logged, nothing changed.
    Logged,
    /// Not applied; the text says why.
    Failed(String),
    /// The mask that the agent had found is back.
    Restored,
}

/// A connected agent, by its own word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agent {
    /// Version of the agent.
    pub version: String,
    /// Release of the guest kernel.
    pub kernel_release: String,
    /// Name of its actuator: `paravirt`, `cpuset` or `observe`.
    pub actuator: String,
    /// Online CPUs of the guest.
    pub online: CpuSet,
    /// CPUs in use.
    pub preferred: CpuSet,
    /// What became of the last hint; `None` before the first answer.
    pub outcome: Option<Outcome>,
    /// Runnable tasks by the last report.
    pub runnable_tasks: Option<u32>,
}

impl Agent {
    /// Did it do what it could with its last hint? What the guest really uses is in `preferred`.
    #[must_use]
    pub fn works(&self) -> bool {
        !matches!(self.outcome, Some(Outcome::Failed(_)))
    }

    /// Does the guest avoid some of its online CPUs?
    #[must_use]
    pub fn folded(&self) -> bool {
        !self.online.is_subset(&self.preferred)
    }
}

/// One VM in a [`HostView`].
#[derive(Debug, Clone, PartialEq)]
pub struct VmView {
    /// The VM.
    pub vm: Vm,
    /// Its mode: the lesser of the host's and its own.
    pub mode: Mode,
    /// Its weight among the VMs of its pool.
    pub weight: u32,
    /// Mean number of its vCPUs that ran, over the last half second.
    pub run: Option<Cpus>,
    /// Mean number of its vCPUs that waited for a pCPU, over the last half second.
    pub run_delay: Option<Cpus>,
    /// Time that its vCPUs have run since the broker saw it first; never falls.
    pub run_total: Duration,
    /// Time that they have waited since then; never falls.
    pub run_delay_total: Duration,
    /// Its demand estimate.
    pub demand: Option<Cpus>,
    /// What it would get if it wanted all its vCPUs.
    pub target: Option<Cpus>,
    /// vCPUs to use now; `None` when its vCPUs are not known.
    pub usable: Option<u32>,
    /// Why.
    pub reason: Reason,
    /// The decision's grounds, with its figures and what would change it; `None` before the first.
    pub why: Option<Why>,
    /// Its pCPUs' contention.
    pub contention: Contention,
    /// Folds since the broker saw it first.
    pub folds: u64,
    /// Unfolds since then.
    pub unfolds: u64,
    /// Its agent; `None` when none is connected.
    pub agent: Option<Agent>,
}

/// How recording goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RecordState {
    /// Length of the file that is written to.
    pub bytes: u64,
    /// Ticks that were not recorded since the start.
    pub lost_ticks: u64,
    /// The last block could not be written.
    pub failing: bool,
}

/// All that the broker knows at one moment: what control API, metrics and journal show.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct HostView {
    /// The run of the broker.
    pub epoch: u64,
    /// The mode of the whole broker.
    pub mode: Mode,
    /// pCPUs of the pool.
    pub pcpus: CpuSet,
    /// What the pool can give.
    pub supply: Option<Cpus>,
    /// How busy it is.
    pub used: Option<Cpus>,
    /// Contention of the pool.
    pub contention: Contention,
    /// Ticks since the start.
    pub ticks: u64,
    /// Samples that were thrown away because a counter fell or a read failed.
    pub rejected_samples: u64,
    /// Sources that can't be read now, each with what it means and how to mend it.
    pub degraded: Vec<String>,
    /// The recording; `None` when nothing is recorded.
    pub record: Option<RecordState>,
    /// The VMs, by name, then id.
    pub vms: Vec<VmView>,
}
