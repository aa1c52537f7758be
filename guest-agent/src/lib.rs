//! The guest side of the KVM hint broker, as a pipeline: session → choose → apply.
//!
//! Whatever fails, the guest goes back to the mask that it had before: [`restore`] knows how, [`lease`] and
//! [`guardian`] know when.

pub mod agent;
pub mod apply;
pub mod choose;
pub mod clock;
pub mod config;
pub mod error;
pub mod files;
pub mod fold;
#[cfg(feature = "fuzz")]
pub mod fuzz;
pub mod guardian;
pub mod hint;
pub mod lease;
pub mod lock;
pub mod open;
pub mod restore;
pub mod session;
pub mod status;
pub mod system;
pub mod topology;
