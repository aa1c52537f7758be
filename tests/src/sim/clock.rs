//! Simulated time.

/// Simulated nanoseconds.
pub type Nanos = u64;

/// A microsecond.
pub const US: Nanos = 1_000;
/// A millisecond.
pub const MS: Nanos = 1_000_000;
/// A second.
pub const SEC: Nanos = 1_000_000_000;

/// Nanoseconds of so many seconds; 0 for negative values and NaN.
#[must_use]
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // the cast saturates, and NaN gives 0
pub fn nanos(seconds: f64) -> Nanos {
    (seconds * 1e9).round() as Nanos
}

/// Seconds of so many nanoseconds.
#[must_use]
pub fn seconds(nanos: Nanos) -> f64 {
    nanos as f64 / 1e9
}
