//! Why a VM has the usable count that it has: the rule that bound it, the figures of that rule, and what would change it. Plain
//! data; words are made when somebody asks.

use std::fmt;
use std::time::Duration;

use super::{Cpus, Reason};

/// The grounds of one decision.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Why {
    /// The rule that bound usable.
    pub rule: Rule,
    /// vCPUs to use now; 0 when the VM's vCPUs are not known.
    pub usable: u32,
    /// All vCPUs; 0 when they are not known.
    pub vcpus: u32,
    /// vCPUs that the guest uses, where its agent has said so.
    pub in_use: Option<u32>,
    /// The VM's weight among its siblings.
    pub weight: f64,
    /// What it would get if it wanted all its vCPUs, and what keeps that from being more.
    pub target: Option<(Cpus, BoundBy)>,
    /// The pCPUs that it competes for; `None` while they are not known.
    pub pool: Option<Pool>,
    /// What would change the decision, the nearest first.
    pub turns: [Option<Turn>; 2],
}

/// What is competed for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pool {
    /// What the pCPUs can give.
    pub supply: Cpus,
    /// What those who are confined to them show that they want.
    pub wanted: Cpus,
}

/// What keeps a target from being larger.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum BoundBy {
    /// The VM can't use more: it has so many vCPUs.
    Vcpus,
    /// Its quota, or that of a group that it is in.
    Quota(Cpus),
    /// Its CPU set has no more.
    Cpuset,
    /// Others want the same pCPUs.
    Others,
    /// Its reservation is more than its weight would bring it, and it gets no more than that.
    Reservation,
}

/// The rule that bound usable, with its figures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// vCPU threads not known.
    Unclassified,
    /// None of the pCPUs that it may use is online.
    NoPcpus,
    /// No agent.
    AgentAbsent,
    /// The agent could not do as it was told; the VM is left alone for so long.
    AgentFails(Duration),
    /// Measurements incomplete.
    Unmeasured,
    /// Somewhere there is idle pCPU time for it.
    Uncontended,
    /// Its share, rounded, covers all its vCPUs.
    ShareCovers,
    /// Not watched for long enough yet; so much longer.
    WarmUp(Duration),
    /// Folding can't help it.
    NoGain,
    /// It wants so much and no more, so its share serves it without folding.
    Satisfied(Cpus),
    /// Its vCPUs rest so often, or all at once, that it needs all of them to run its share; it wants so much on the whole.
    Sleeper(Cpus),
    /// Its load comes and goes, all of it, every few seconds or faster: it is left alone, and its neighbours keep the vCPUs with which
    /// they use what it leaves.
    Swings,
    /// Folded, it got too little; it is left unfolded for so long.
    Starved(Duration),
    /// The configuration fixes usable.
    Fixed,
    /// The configuration's least.
    AtLeast(u32),
    /// The configuration's most.
    AtMost(u32),
    /// Its share of the pCPUs, and so many vCPUs more, since its own rest now and then or pCPUs were idle with the share alone.
    Share {
        /// vCPUs beyond the rounded share.
        more: u32,
    },
    /// Its quota, or that of a group that it is in.
    Quota(Cpus),
    /// A change to `wanted` is due and waits.
    Damped {
        /// What usable would be without damping.
        wanted: u32,
        /// What it waits for.
        wait: Wait,
    },
}

/// What a change waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// So long since the last change, or so long a wish for this one.
    For(Duration),
    /// Until one of the last minute's folds is older than a minute.
    Budget,
}

/// What would change a decision.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Turn {
    /// The pCPUs full, and more than this wanted of them.
    Wanted(Cpus),
    /// More wanted by itself than this.
    Demand(Cpus),
    /// More idle time of pCPUs that it may use than this.
    Idle(Cpus),
    /// A target of this or more gives it so many vCPUs.
    TargetFrom {
        /// The target.
        target: Cpus,
        /// The count.
        usable: u32,
    },
    /// A target below this gives it so many vCPUs.
    TargetBelow {
        /// The target.
        target: Cpus,
        /// The count.
        usable: u32,
    },
    /// So much time, if all else stays.
    Time(Duration),
    /// An agent in the guest that can apply hints.
    Agent,
    /// Another quota.
    Quota,
    /// Another configuration.
    Configuration,
    /// A CPU group for each VM.
    OwnGroup,
    /// Measurements.
    Figures,
    /// pCPUs of its set that are online.
    Pcpus,
}

impl Why {
    /// The rule without its figures.
    #[must_use]
    pub fn reason(&self) -> Reason {
        match self.rule {
            Rule::Unclassified => Reason::Unclassified,
            Rule::NoPcpus => Reason::Pinned,
            Rule::AgentAbsent | Rule::AgentFails(_) => Reason::NoAgent,
            Rule::Unmeasured => Reason::Unmeasured,
            Rule::Uncontended => Reason::Uncontended,
            Rule::ShareCovers | Rule::Satisfied(_) => Reason::ShareCovers,
            Rule::WarmUp(_) => Reason::WarmUp,
            Rule::NoGain => Reason::NoGain,
            Rule::Sleeper(_) | Rule::Swings => Reason::Sleeper,
            Rule::Starved(_) => Reason::Starved,
            Rule::Fixed | Rule::AtLeast(_) | Rule::AtMost(_) => Reason::Policy,
            Rule::Share { .. } => Reason::Contention,
            Rule::Quota(_) => Reason::Quota,
            Rule::Damped { .. } => Reason::Damped,
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            usable,
            vcpus,
            weight,
            ..
        } = self;
        match self.rule {
            Rule::Unclassified => {
                f.write_str("its vCPU threads are not known, so it is shown and never hinted")?;
            }
            Rule::NoPcpus => f.write_str(
                "none of the pCPUs that it may use is online, so it keeps all its vCPUs",
            )?,
            Rule::AgentAbsent => f.write_str(
                "no agent is connected, so it is counted and keeps all its vCPUs",
            )?,
            Rule::AgentFails(left) => write!(
                f,
                "its agent could not apply a hint, so it keeps all its vCPUs for another {} s",
                left.as_secs()
            )?,
            Rule::Unmeasured => f.write_str(
                "its figures or those of its pCPUs are missing, so it uses all vCPUs until they are whole",
            )?,
            Rule::Uncontended => f.write_str("no contention")?,
            Rule::ShareCovers => {
                write!(f, "contended, and its share covers all its {vcpus} vCPUs")?;
            }
            Rule::WarmUp(left) => write!(
                f,
                "contended, and not watched for long enough: {:.1} s more, then its share counts",
                left.as_secs_f64()
            )?,
            Rule::NoGain => write!(
                f,
                "contended, and folding {vcpus} vCPUs at such a share gains nothing"
            )?,
            Rule::Satisfied(wants) => write!(
                f,
                "contended, and its share covers the {wants} CPUs that it wants"
            )?,
            Rule::Sleeper(wants) => write!(
                f,
                "contended; its vCPUs want {wants} CPUs together and rest in between, so that with fewer of them it would run less than its share"
            )?,
            Rule::Swings => f.write_str(
                "contended; its load comes and goes every few seconds or faster, so it is left alone, and its neighbours keep the vCPUs with which they use what it leaves",
            )?,
            Rule::Starved(left) => write!(
                f,
                "contended; folded, it got less than its share, since its peers took what it gave up; left alone for another {} s",
                left.as_secs()
            )?,
            Rule::Fixed => write!(f, "the configuration fixes usable at {usable}")?,
            Rule::AtLeast(least) => write!(f, "contended; min_usable = {least} keeps it at {usable}")?,
            Rule::AtMost(most) => write!(f, "max_usable = {most} keeps it at {usable}")?,
            Rule::Share { more: 0 } => {
                write!(f, "contended; its share gives {usable} of {vcpus} vCPUs")?;
            }
            Rule::Share { more } => write!(
                f,
                "contended; its share gives {} of {vcpus} vCPUs, and {more} more, since its vCPUs rest now and then, or pCPUs were idle with those alone",
                usable.saturating_sub(more)
            )?,
            Rule::Quota(cap) => write!(
                f,
                "it uses up its quota of {cap} CPUs, which gives {usable} of {vcpus} vCPUs; with more of them it would be throttled more often, not run more"
            )?,
            Rule::Damped { wanted, wait } => {
                write!(f, "{wanted} vCPUs are due, and that waits ")?;
                match wait {
                    Wait::For(left) => write!(f, "for another {:.1} s", left.as_secs_f64())?,
                    Wait::Budget => f.write_str("for its turn: at most four folds a minute")?,
                }
            }
        }
        if let Some(pool) = self.pool {
            write!(f, "; CPUs wanted {} of {}", pool.wanted, pool.supply)?;
        }
        if let Some((target, limit)) = self.target {
            write!(f, ", share {target} at weight {weight}, bound by {limit}")?;
        }
        match self.in_use {
            Some(in_use) if in_use != *usable && self.rule_is_share() => {
                write!(f, "; the guest still uses {in_use}")?;
            }
            _ => {}
        }
        for (index, turn) in self.turns.iter().flatten().enumerate() {
            let lead = if index == 0 {
                ". It changes with"
            } else {
                ", or with"
            };
            write!(f, "{lead} {turn}")?;
        }
        Ok(())
    }
}

impl Why {
    fn rule_is_share(&self) -> bool {
        matches!(self.rule, Rule::Share { .. } | Rule::Quota(_))
    }
}

impl fmt::Display for BoundBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vcpus => f.write_str("its vCPUs"),
            Self::Quota(cap) => write!(f, "a quota of {cap}"),
            Self::Cpuset => f.write_str("its CPU set"),
            Self::Others => f.write_str("what others want"),
            Self::Reservation => f.write_str("its reservation"),
        }
    }
}

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wanted(wanted) => write!(f, "full pCPUs and more than {wanted} wanted of them"),
            Self::Demand(wanted) => write!(f, "more than {wanted} wanted by itself"),
            Self::Idle(idle) => write!(f, "more than {idle} pCPUs idle"),
            Self::TargetFrom { target, usable } => {
                write!(f, "a share of {target} or more ({usable} vCPUs)")
            }
            Self::TargetBelow { target, usable } => {
                write!(f, "a share below {target} ({usable} vCPUs)")
            }
            Self::Time(left) => write!(f, "time, {:.1} s", left.as_secs_f64()),
            Self::Agent => f.write_str("an agent in the guest that applies hints"),
            Self::Quota => f.write_str("another quota"),
            Self::Configuration => f.write_str("another configuration"),
            Self::OwnGroup => f.write_str("a CPU group for each VM"),
            Self::Figures => f.write_str("figures: see the degraded sources"),
            Self::Pcpus => f.write_str("pCPUs of its set that are online"),
        }
    }
}
