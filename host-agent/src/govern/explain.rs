//! A decision in words: its figures, and what would change it.

use super::{AgentState, Decision, VmInput};
use crate::model::{Contention, Cpus, Reason};

/// Says why `decision` is what it is. `pool` is supply and demand of the pool, where known.
pub(super) fn explain(
    vm: &VmInput,
    decision: &Decision,
    contention: Contention,
    pool: Option<(Cpus, Cpus)>,
) -> String {
    let vcpus = vm.vcpus.unwrap_or(0);
    let usable = decision.usable.unwrap_or(0);
    let figures = match pool {
        Some((supply, demand)) => format!("CPUs wanted {demand} of {supply}"),
        None => "the pool's figures are not known".to_owned(),
    };
    let share = decision
        .target
        .map_or_else(|| "not known".to_owned(), |target| target.to_string());
    let share = format!("share {share} at weight {}", vm.weight);
    match decision.reason {
        Reason::Unclassified => "its vCPU threads are not known, so it is shown and never hinted".to_owned(),
        Reason::Pinned => "it may not run on all pCPUs of the pool, so it keeps all its vCPUs; give them the affinity that the other VMs have".to_owned(),
        Reason::NoAgent => {
            let would = match decision.target {
                Some(_) if contention == Contention::Contended => format!("; {figures}, {share}"),
                _ => String::new(),
            };
            match vm.agent {
                AgentState::Absent => format!("no agent is connected, so it is counted and keeps all its vCPUs{would}; install hint-agent in the guest"),
                _ => format!("its agent could not apply a hint, so it keeps all its vCPUs for a minute or more{would}; see the agent's error")
            }
        }
        Reason::Unmeasured => "its figures or the pool's are missing, so it uses all vCPUs until they are whole; see the degraded sources".to_owned(),
        Reason::Uncontended => format!("no contention: {figures}; it folds when more is wanted than there is and the pCPUs are full"),
        Reason::ShareCovers => format!("contended ({figures}), and its {share} covers all its {vcpus} vCPUs"),
        Reason::WarmUp => format!("contended ({figures}), and not watched for a second yet; then {share} counts"),
        Reason::NoGain => format!("contended ({figures}), and folding {vcpus} vCPUs at a {share} gains nothing"),
        Reason::Sleeper => format!("contended ({figures}); it fills only a part of its vCPUs and ran less than its {share}, so it can't be told whether it would still run that much when folded"),
        Reason::Starved => format!("contended ({figures}); folded, it got much less than its {share}: its peers took what it gave up; give each VM a cgroup of its own"),
        Reason::Damped => format!("a change is due ({figures}, {share}) and waits: at most one fold a second and four a minute, and a raise that nothing shows to be needed waits for a second"),
        Reason::Policy => format!("contended ({figures}, {share}); min_usable keeps it at {usable}"),
        Reason::Contention => {
            let settled = match vm.agent {
                AgentState::Works { in_use: Some(in_use) } if in_use != usable => format!("; the guest still uses {in_use}"),
                _ => String::new(),
            };
            format!("contended ({figures}); {share} gives {usable} of {vcpus} vCPUs{settled}; more when others want less or its weight grows")
        }
    }
}
