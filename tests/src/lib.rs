//! The lab: real Linux guests for tests and the demonstration, and what they need on the host.
//!
//! A guest is a QEMU process with software emulation, so that it boots wherever QEMU runs; its vCPUs are host threads that
//! compete for CPUs like those of KVM. It has its own host CPU group, as under libvirt, and a vsock whose host side is a Unix
//! socket. `tests/setup.sh` (`make setup`) installs everything; docs/lab.md tells how to use it.
//!
//! The lab is no benchmark of CPUs: only comparisons between guests of the same lab mean something.

pub mod assets;
pub mod broker;
pub mod cgroup;
mod channel;
pub mod console;
pub mod fuzz;
pub mod guest;
pub mod host;
pub mod initramfs;
pub mod kvm;
pub mod libvirt;
pub mod load;
pub mod lock;
pub mod mounts;
pub mod process;
pub mod sim;
pub mod skip;
pub mod vm_process;
pub mod vsock;

pub use assets::Kernel;
pub use broker::{Broker, BrokerError, BrokerSpec};
pub use guest::{Guest, GuestError, GuestSpec, Output, Topology, WorkId};
pub use host::{InnerGuest, VirtualHost};
