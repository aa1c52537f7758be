//! What the broker's two sides agree on: the messages of `hintbroker/v1` and [`CpuSet`].

mod cpuset;
#[cfg(feature = "fuzz")]
pub mod fuzz;

pub use cpuset::{CpuSet, MAX_CPUS, ParseCpuSetError};

/// Generated from `hintbroker/v1/*.proto`; the comments there are the reference.
pub mod v1 {
    #![allow(missing_docs, clippy::all, unreachable_pub)]
    tonic::include_proto!("hintbroker.v1");
}

/// The vsock port of the guest service; below 1024, so that only root of the host can listen on it.
pub const GUEST_PORT: u32 = 737;

/// The version of the guest protocol that this crate describes.
pub const PROTOCOL: u32 = 1;
