//! The host side of the KVM hint broker, as a pipeline: discover → observe → entitle → govern → publish.
//!
//! [`entitle`] and [`govern`] decide and are pure; [`discover`] and [`observe`] read the host below an injected root;
//! [`publish`], [`control`] and [`metrics`] speak to guests and operators; [`daemon`] runs all of it.

pub mod config;
pub mod control;
pub mod ctl;
pub mod daemon;
pub mod discover;
pub mod doctor;
pub mod entitle;
#[cfg(test)]
mod fixture;
#[cfg(feature = "fuzz")]
pub mod fuzz;
pub mod govern;
#[cfg(test)]
mod layouts;
pub mod metrics;
pub mod model;
pub mod observe;
pub mod place;
mod procfs;
pub mod publish;
pub mod record;
pub mod replay;
pub mod root;
pub mod socket;
pub mod text;
pub mod wire;
