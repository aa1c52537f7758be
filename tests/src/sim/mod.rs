//! The simulator: a host's scheduler, guests with theirs, loads, and whoever decides how many vCPUs each guest should use.
//!
//! It keeps the governor honest: it shows what folding costs and what it is worth in many more situations than real guests can
//! be put into. docs/simulator.md says what it models and what not. Same scenario, same seed, same result.

pub mod arms;
pub mod batch;
pub mod clock;
pub mod families;
pub mod guest;
pub mod host;
pub mod mask;
pub mod measure;
pub mod plot;
pub mod report;
pub mod run;
pub mod scenario;
pub mod sight;
pub mod world;

pub use self::arms::Name;
pub use self::guest::load::Load;
pub use self::run::{Outcome, simulate};
pub use self::scenario::Scenario;
pub use self::world::World;
