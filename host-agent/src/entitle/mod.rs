//! Entitle: how much each VM of a pool can run. Pure: no I/O and no clock.
//!
//! Weighted max-min fairness over one pool: everybody gets what they want up to a common level for each unit of weight, and
//! the level is the highest that the supply bears (Bertsekas and Gallager, Data Networks, §6.5.2, "progressive filling").

pub mod assemble;
mod curves;
pub mod demand;
mod division;
mod engine;
mod flow;
mod parts;
mod report;
mod solve;
mod structure;
mod targets;

pub use self::division::{
    Bound, Class, ClassId, CompetingSet, Division, Entitlement, Fault, FaultKind, Place,
};
pub use self::engine::Engine;

use crate::model::Cpus;

/// One who wants a part of the supply.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Claim {
    /// Its weight against the others; anything but a positive finite number counts as the smallest weight.
    pub weight: f64,
    /// What it wants at most; anything but a positive finite number counts as nothing.
    pub demand: Cpus,
}

/// Divides `supply` among `claims`: the sum never exceeds the supply, nobody gets more than their demand, and nobody can be
/// given more without taking it from one who has less for each unit of weight. The result stands in the order of the claims.
#[must_use]
pub fn max_min(supply: Cpus, claims: &[Claim]) -> Vec<Cpus> {
    let claims: Vec<Claim> = claims.iter().map(|claim| sane(*claim)).collect();
    // The claims that the rising level satisfies first come first.
    let mut order: Vec<usize> = (0..claims.len()).collect();
    let level_of = |claim: &Claim| claim.demand.0 / claim.weight;
    order.sort_by(|a, b| level_of(&claims[*a]).total_cmp(&level_of(&claims[*b])));
    let mut left = if supply.0.is_finite() {
        supply.0.max(0.0)
    } else {
        0.0
    };
    let mut weight_left: f64 = claims.iter().map(|claim| claim.weight).sum();
    let mut shares = vec![Cpus::ZERO; claims.len()];
    for index in order {
        let claim = claims[index];
        let fair = left * (claim.weight / weight_left).min(1.0);
        let share = claim.demand.0.min(fair);
        shares[index] = Cpus(share);
        left = (left - share).max(0.0);
        weight_left -= claim.weight;
    }
    shares
}

/// What claim `index` would get if it wanted `all` instead of its demand: what it can grow into at once.
#[must_use]
pub fn target(supply: Cpus, claims: &[Claim], index: usize, all: Cpus) -> Cpus {
    let mut claims = claims.to_vec();
    let Some(claim) = claims.get_mut(index) else {
        return Cpus::ZERO;
    };
    claim.demand = all;
    max_min(supply, &claims)[index]
}

fn sane(claim: Claim) -> Claim {
    let positive = |value: f64, otherwise: f64| {
        if value.is_finite() && value > 0.0 {
            value
        } else {
            otherwise
        }
    };
    Claim {
        weight: positive(claim.weight, 1.0),
        demand: Cpus(positive(claim.demand.0, 0.0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn claim(weight: f64, demand: f64) -> Claim {
        Claim {
            weight,
            demand: Cpus(demand),
        }
    }

    fn shares(supply: f64, claims: &[Claim]) -> Vec<f64> {
        max_min(Cpus(supply), claims)
            .into_iter()
            .map(|share| share.0)
            .collect()
    }

    fn assert_close(found: &[f64], wanted: &[f64]) {
        let near = found.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-9);
        assert!(
            near && found.len() == wanted.len(),
            "{found:?}, not {wanted:?}"
        );
    }

    #[test]
    fn known_divisions() {
        assert_close(
            &shares(2.0, &[claim(100.0, 4.0), claim(100.0, 4.0)]),
            &[1.0, 1.0],
        );
        assert_close(
            &shares(2.0, &[claim(3072.0, 2.0), claim(1024.0, 4.0)]),
            &[1.5, 0.5],
        );
        assert_close(
            &shares(
                8.0,
                &[claim(300.0, 8.0), claim(100.0, 8.0), claim(100.0, 8.0)],
            ),
            &[4.8, 1.6, 1.6],
        );
        assert_close(
            &shares(4.0, &[claim(1.0, 0.5), claim(1.0, 4.0), claim(1.0, 4.0)]),
            &[0.5, 1.75, 1.75],
        );
        // A weight that its VM can't use goes to the others.
        assert_close(
            &shares(
                4.0,
                &[claim(10_000.0, 1.0), claim(1.0, 4.0), claim(1.0, 4.0)],
            ),
            &[1.0, 1.5, 1.5],
        );
        assert_close(
            &shares(4.0, &[claim(1.0, 1.0), claim(1.0, 1.0)]),
            &[1.0, 1.0],
        );
        assert_close(&shares(0.0, &[claim(1.0, 1.0)]), &[0.0]);
        assert_close(&shares(4.0, &[]), &[]);
    }

    #[test]
    fn figures_that_are_none_harm_no_other_claim() {
        for bad in [f64::NAN, f64::INFINITY, -1.0] {
            assert_close(
                &shares(2.0, &[claim(1.0, bad), claim(1.0, 4.0)]),
                &[0.0, 2.0],
            );
            assert_close(
                &shares(2.0, &[claim(bad, 4.0), claim(1.0, 4.0)]),
                &[1.0, 1.0],
            );
        }
        assert_close(&shares(f64::NAN, &[claim(1.0, 1.0)]), &[0.0]);
    }

    #[test]
    fn a_target_uses_what_an_idle_neighbour_leaves() {
        let claims = [claim(100.0, 4.0), claim(100.0, 0.1)];
        assert!((target(Cpus(2.0), &claims, 0, Cpus(4.0)).0 - 1.9).abs() < 1e-9);
        assert!((target(Cpus(2.0), &claims, 1, Cpus(4.0)).0 - 1.0).abs() < 1e-9);
        assert_eq!(target(Cpus(2.0), &claims, 9, Cpus(4.0)), Cpus::ZERO);
    }

    /// Progressive filling in small steps: slow and plainly right.
    fn reference(supply: f64, claims: &[Claim]) -> Vec<f64> {
        let (mut low, mut high) = (0.0, 1e6);
        for _ in 0..200 {
            let level = f64::midpoint(low, high);
            let sum: f64 = claims
                .iter()
                .map(|claim| claim.demand.0.min(level * claim.weight))
                .sum();
            if sum > supply {
                high = level;
            } else {
                low = level;
            }
        }
        claims
            .iter()
            .map(|claim| claim.demand.0.min(low * claim.weight))
            .collect()
    }

    proptest! {
        #[test]
        fn agrees_with_progressive_filling(
            supply in 0.0..64.0f64,
            figures in proptest::collection::vec((1.0..10_000.0f64, 0.0..32.0f64), 0..20),
        ) {
            let claims: Vec<Claim> = figures.iter().map(|(weight, demand)| claim(*weight, *demand)).collect();
            let found = shares(supply, &claims);
            let wanted = reference(supply, &claims);
            for (a, b) in found.iter().zip(&wanted) {
                prop_assert!((a - b).abs() < 1e-6, "{:?}, not {:?}", found, wanted);
            }
            prop_assert!(found.iter().sum::<f64>() <= supply + 1e-9);
        }
    }
}
