//! Is a received hint to be followed? Pure.

use std::time::Duration;

use hint_proto::v1;

/// No broker renews as seldom as this; a longer lease is a mistake and would hold a guest folded for ever.
pub const LONGEST_LEASE: Duration = Duration::from_secs(3600);

/// Why a hint is ignored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It is of another run of the broker than the Welcome.
    #[error("its epoch is {found}, the broker's is {expected}")]
    Epoch {
        /// The epoch of the Welcome.
        expected: u64,
        /// The hint's.
        found: u64,
    },
    /// A newer one was already received on this stream, or it has no number.
    #[error("its sequence is {found}, the last one was {last}")]
    Sequence {
        /// The highest sequence so far; 0 for none.
        last: u64,
        /// The hint's.
        found: u64,
    },
    /// Its lease is zero or absurdly long.
    #[error("its lease is {found_ms} ms, expected 1 to 3600000")]
    Lease {
        /// The hint's lease in milliseconds.
        found_ms: u32,
    },
}

/// Checks a hint against the stream's Welcome and the highest sequence so far (0 for none); gives its lease.
///
/// # Errors
/// When the hint is to be ignored.
pub fn check(hint: &v1::Hint, epoch: u64, last: u64) -> Result<Duration, Refusal> {
    if hint.epoch != epoch {
        return Err(Refusal::Epoch {
            expected: epoch,
            found: hint.epoch,
        });
    }
    if hint.sequence == 0 || hint.sequence < last {
        return Err(Refusal::Sequence {
            last,
            found: hint.sequence,
        });
    }
    let lease = Duration::from_millis(u64::from(hint.lease_ms));
    if lease.is_zero() || lease > LONGEST_LEASE {
        return Err(Refusal::Lease {
            found_ms: hint.lease_ms,
        });
    }
    Ok(lease)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint(epoch: u64, sequence: u64, lease_ms: u32) -> v1::Hint {
        v1::Hint {
            epoch,
            sequence,
            lease_ms,
            usable: 2,
            ..v1::Hint::default()
        }
    }

    #[test]
    fn only_hints_of_this_run_in_order_with_a_sane_lease_are_followed() {
        let second = Ok(Duration::from_secs(1));
        assert_eq!(check(&hint(7, 1, 1000), 7, 0), second);
        assert_eq!(check(&hint(7, 5, 1000), 7, 5), second, "a renewal");
        assert_eq!(
            check(&hint(8, 6, 1000), 7, 5),
            Err(Refusal::Epoch {
                expected: 7,
                found: 8
            })
        );
        assert_eq!(
            check(&hint(7, 4, 1000), 7, 5),
            Err(Refusal::Sequence { last: 5, found: 4 })
        );
        assert_eq!(
            check(&hint(7, 0, 1000), 7, 0),
            Err(Refusal::Sequence { last: 0, found: 0 })
        );
        assert!(check(&hint(7, 1, 3_600_000), 7, 0).is_ok());
        for lease_ms in [0, 3_600_001, u32::MAX] {
            assert_eq!(
                check(&hint(7, 1, lease_ms), 7, 0),
                Err(Refusal::Lease { found_ms: lease_ms })
            );
        }
    }
}
