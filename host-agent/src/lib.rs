//! The host side of the KVM hint broker, as a pipeline: discover → observe → entitle → govern → publish.

pub mod model;
