//! The lab: real guests for tests and the demonstration.
