//! The model's enums as the protocol's, for both the guest stream and the control service.

use hint_proto::v1;

use crate::model::{Contention, Mode, Reason};

/// The protocol's mode.
#[must_use]
pub fn mode(mode: Mode) -> v1::Mode {
    match mode {
        Mode::Observe => v1::Mode::Observe,
        Mode::Advise => v1::Mode::Advise,
        Mode::Enforce => v1::Mode::Enforce,
    }
}

/// The model's mode; `None` for `MODE_UNSPECIFIED`.
#[must_use]
pub fn model_mode(mode: v1::Mode) -> Option<Mode> {
    match mode {
        v1::Mode::Unspecified => None,
        v1::Mode::Observe => Some(Mode::Observe),
        v1::Mode::Advise => Some(Mode::Advise),
        v1::Mode::Enforce => Some(Mode::Enforce),
    }
}

/// The protocol's contention.
#[must_use]
pub fn contention(contention: Contention) -> v1::Contention {
    match contention {
        Contention::Unknown => v1::Contention::Unspecified,
        Contention::None => v1::Contention::None,
        Contention::Contended => v1::Contention::Contended,
    }
}

/// The protocol's reason.
#[must_use]
pub fn reason(reason: Reason) -> v1::Reason {
    match reason {
        Reason::Uncontended => v1::Reason::Uncontended,
        Reason::Contention => v1::Reason::Contention,
        Reason::ShareCovers => v1::Reason::ShareCovers,
        Reason::WarmUp => v1::Reason::WarmUp,
        Reason::Sleeper => v1::Reason::Sleeper,
        Reason::NoGain => v1::Reason::NoGain,
        Reason::Damped => v1::Reason::Damped,
        Reason::NoAgent => v1::Reason::NoAgent,
        Reason::Unclassified => v1::Reason::Unclassified,
        Reason::Unmeasured => v1::Reason::Unmeasured,
        Reason::Pinned => v1::Reason::Pinned,
        Reason::Policy => v1::Reason::Policy,
        Reason::Starved => v1::Reason::Starved,
        Reason::Quota => v1::Reason::Quota,
    }
}

/// The word for a mode that the broker sent, as the configuration spells it; `None` for one that this program doesn't know.
#[must_use]
pub fn mode_word(mode: i32) -> Option<String> {
    v1::Mode::try_from(mode)
        .ok()
        .and_then(model_mode)
        .map(|mode| mode.to_string())
}

/// The word for a reason that the broker sent; `None` for one that this program doesn't know.
#[must_use]
pub fn reason_word(reason: i32) -> Option<String> {
    word(v1::Reason::try_from(reason).ok()?.as_str_name(), "REASON_")
}

/// The word for a contention that the broker sent: `none` or `contended`; `None` when it is not known.
#[must_use]
pub fn contention_word(contention: i32) -> Option<String> {
    word(
        v1::Contention::try_from(contention).ok()?.as_str_name(),
        "CONTENTION_",
    )
}

/// The word for an agent state that the broker sent; `None` when it is not known.
#[must_use]
pub fn agent_state_word(state: i32) -> Option<String> {
    word(
        v1::AgentState::try_from(state).ok()?.as_str_name(),
        "AGENT_STATE_",
    )
}

/// `REASON_SHARE_COVERS` → `share-covers`; `…_UNSPECIFIED` → `None`.
fn word(name: &str, prefix: &str) -> Option<String> {
    let word = name.strip_prefix(prefix)?;
    (word != "UNSPECIFIED").then(|| word.to_ascii_lowercase().replace('_', "-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_the_same_word_on_both_sides() {
        for model in [
            Reason::Uncontended,
            Reason::Contention,
            Reason::ShareCovers,
            Reason::WarmUp,
            Reason::Sleeper,
            Reason::NoGain,
            Reason::Damped,
            Reason::NoAgent,
            Reason::Unclassified,
            Reason::Unmeasured,
            Reason::Pinned,
            Reason::Policy,
            Reason::Starved,
            Reason::Quota,
        ] {
            assert_eq!(
                reason_word(reason(model).into()),
                Some(model.to_string()),
                "{model:?}"
            );
        }
    }

    #[test]
    fn modes_come_back_and_what_is_not_said_is_none() {
        for model in [Mode::Observe, Mode::Advise, Mode::Enforce] {
            assert_eq!(model_mode(mode(model)), Some(model));
            assert_eq!(mode_word(mode(model).into()), Some(model.to_string()));
        }
        assert_eq!(mode_word(0), None);
        assert_eq!(mode_word(77), None);
        assert_eq!(reason_word(0), None);
        assert_eq!(contention_word(0), None);
        assert_eq!(contention_word(2).as_deref(), Some("contended"));
        assert_eq!(agent_state_word(3).as_deref(), Some("failing"));
    }
}
