//! The host side of the KVM hint broker, as a pipeline: discover → observe → entitle → govern → publish.

pub mod control;
pub mod ctl;
pub mod metrics;
pub mod model;
pub mod publish;
pub mod socket;
pub mod text;
pub mod wire;
