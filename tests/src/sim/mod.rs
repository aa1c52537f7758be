//! The simulator: a host's scheduler, guests with theirs, loads, and whoever decides how many vCPUs each guest should use.
//!
//! It keeps the governor honest: it shows what folding costs and what it is worth in many more situations than real guests can
//! be put into. docs/simulator.md says what it models and what not. Same scenario, same seed, same result.

pub mod clock;
pub mod guest;
pub mod host;
pub mod mask;
pub mod world;

pub use self::guest::load::Load;
pub use self::world::World;
