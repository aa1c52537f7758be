//! What the fuzz target of this crate does; see `tests/fuzz`.

use crate::sim::scenario::Scenario;

/// A target: its name, which is that of its corpus, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets of this crate.
pub const TARGETS: &[Target] = &[("scenario", scenario)];

/// A scenario file of the simulator: one that is taken comes back when it is written.
pub fn scenario(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let Ok(scenario) = toml::from_str::<Scenario>(&text) else {
        return;
    };
    let Ok(written) = toml::to_string(&scenario) else {
        // TOML has no place for a number above i64's.
        return;
    };
    let again: Scenario = toml::from_str(&written).expect("it was just written");
    // No number is NaN's equal.
    let shown = format!("{scenario:?}");
    assert_eq!(format!("{again:?}"), shown);
}
