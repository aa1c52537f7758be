//! Counts that never change: no hint, and the best that could be had without ever changing them.

use super::Arm;
use crate::sim::clock::Nanos;
use crate::sim::run::simulate_with;
use crate::sim::scenario::{Scenario, ScenarioError};
use crate::sim::sight::Sight;

/// Fixed counts; all vCPUs where there are none.
#[derive(Debug, Clone, Default)]
pub struct Fixed(pub Option<Vec<usize>>);

impl Arm for Fixed {
    fn period(&self) -> Nanos {
        0
    }

    fn decide(&mut self, sight: &Sight) -> Vec<usize> {
        self.0
            .clone()
            .unwrap_or_else(|| sight.guests.iter().map(|guest| guest.steal.len()).collect())
    }
}

/// How much of a scenario each try simulates, in seconds.
const TRY: f64 = 5.0;
/// The parts of its vCPUs that each VM is tried with first.
const PARTS: [f64; 11] = [
    0.875, 0.75, 0.667, 0.5, 0.4, 0.333, 0.25, 0.1875, 0.125, 0.0625, 0.03125,
];

/// Searches the counts with the most useful work of all VMs together: first the same part of its vCPUs for each, then one VM
/// after the other. Steps of load later than the time tried are not seen.
///
/// # Errors
/// When the scenario can't be used.
pub fn best_static(scenario: &Scenario) -> Result<Fixed, ScenarioError> {
    let mut tried = scenario.clone();
    tried.seconds = scenario.seconds.min(TRY);
    tried.from = scenario.from.min(tried.seconds / 4.0);
    let work = |counts: &[usize]| -> Result<f64, ScenarioError> {
        let outcome = simulate_with(&tried, "", &mut Fixed(Some(counts.to_vec())))?;
        Ok(outcome.work())
    };
    let vcpus: Vec<usize> = scenario
        .vms
        .iter()
        .flat_map(|spec| std::iter::repeat_n(spec.vcpus, spec.count))
        .collect();
    let mut best = (work(&vcpus)?, vcpus.clone());
    for part in PARTS {
        let counts: Vec<usize> = vcpus.iter().map(|vcpus| portion(*vcpus, part)).collect();
        let found = work(&counts)?;
        // Only a real gain: the larger counts are the safer ones.
        if found > best.0 * 1.001 {
            best = (found, counts);
        }
    }
    for more in [true, false] {
        let counts = best.1.iter().zip(&vcpus).map(|(count, vcpus)| {
            let count = if more {
                count + 1
            } else {
                count.saturating_sub(1)
            };
            count.clamp(1, *vcpus)
        });
        let counts: Vec<usize> = counts.collect();
        let found = work(&counts)?;
        if found > best.0 * 1.001 {
            best = (found, counts);
        }
    }
    let alike = scenario.vms.len() < 2;
    for vm in 0..if alike { 0 } else { vcpus.len() } {
        for count in [
            best.1[vm] / 2,
            best.1[vm].saturating_sub(1),
            best.1[vm] + 1,
            best.1[vm] * 2,
        ] {
            let mut counts = best.1.clone();
            counts[vm] = count.clamp(1, vcpus[vm]);
            if counts != best.1 {
                let found = work(&counts)?;
                if found > best.0 * 1.001 {
                    best = (found, counts);
                }
            }
        }
    }
    Ok(Fixed(Some(best.1)))
}

/// A part of some vCPUs, at least one of them.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // at most the number that it is a part of
fn portion(vcpus: usize, part: f64) -> usize {
    ((vcpus as f64 * part).round() as usize).max(1)
}
