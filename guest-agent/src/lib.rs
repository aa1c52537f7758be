//! The guest side of the KVM hint broker.
