//! The governor's rules, each with right values.

mod bounds;
mod rig;
mod shares;
