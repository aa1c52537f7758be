//! Who decides how many vCPUs each guest uses. One file for each; each sees what such a program could really see.

mod broker;
mod fixed;
mod steal_governor;
mod stealmon;

pub use self::broker::Broker;
pub use self::fixed::{Fixed, best_static};
pub use self::steal_governor::StealGovernor;
pub use self::stealmon::StealMon;

use super::clock::Nanos;
use super::sight::{GuestSight, Sight};

/// One who decides.
pub trait Arm {
    /// Time between decisions, a multiple of 100 ms; none at all if it is 0.
    fn period(&self) -> Nanos;

    /// Time until a decision is carried out.
    fn delay(&self) -> Nanos {
        0
    }

    /// vCPUs to use, for each VM.
    fn decide(&mut self, sight: &Sight) -> Vec<usize>;
}

/// A rule that runs in a guest and knows nothing of the others.
pub trait GuestRule: Default {
    /// Time between decisions.
    const PERIOD: Nanos;

    /// vCPUs to use, after one more period.
    fn decide(&mut self, guest: &GuestSight) -> usize;
}

/// One guest rule for each guest.
#[derive(Debug, Default)]
pub struct Guests<R> {
    rules: Vec<R>,
}

impl<R: GuestRule> Arm for Guests<R> {
    fn period(&self) -> Nanos {
        R::PERIOD
    }

    fn decide(&mut self, sight: &Sight) -> Vec<usize> {
        self.rules.resize_with(sight.guests.len(), R::default);
        let guests = self.rules.iter_mut().zip(&sight.guests);
        guests.map(|(rule, guest)| rule.decide(guest)).collect()
    }
}

/// The arms by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, clap::ValueEnum)]
pub enum Name {
    /// No hint.
    None,
    /// The kernel's steal governor.
    StealGovernor,
    /// An earlier form of it.
    #[value(name = "steal-governor-2025")]
    StealGovernor2025,
    /// As many vCPUs fewer as steal says.
    Stealmon,
    /// The broker's governor.
    Broker,
    /// The best counts that never change.
    BestStatic,
}

impl Name {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::None,
        Self::StealGovernor,
        Self::StealGovernor2025,
        Self::Stealmon,
        Self::Broker,
        Self::BestStatic,
    ];

    /// As in tables.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::StealGovernor => "steal-governor",
            Self::StealGovernor2025 => "steal-governor-2025",
            Self::Stealmon => "stealmon",
            Self::Broker => "broker",
            Self::BestStatic => "best-static",
        }
    }
}
