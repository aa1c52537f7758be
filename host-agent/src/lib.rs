//! The host side of the KVM hint broker, as a pipeline: discover → observe → entitle → govern → publish.
//!
//! [`entitle`] and [`govern`] decide and are pure; [`discover`] and [`observe`] read the host below an injected root.

pub mod config;
pub mod discover;
pub mod entitle;
pub mod govern;
pub mod model;
pub mod observe;
mod procfs;
pub mod root;
