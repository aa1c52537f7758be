//! A fold of a guest of files, with a real guardian.

use std::time::Duration;

use hint_agent::apply::{self, Choice};
use hint_agent::clock::Moment;
use hint_agent::files::{Files, Root};
use hint_agent::fold::{Ask, Change, Fold, FoldError};
use hint_agent::guardian::{Guardian, Launch};
use hint_agent::lock;
use hint_agent::restore::StateDir;

use super::{Guest, PROGRAM};

pub(crate) fn fold<F: Files + Clone + 'static>(guest: &Guest, files: &F, choice: Choice) -> Fold {
    let state = StateDir::new(guest.state());
    let launch = Launch {
        program: PROGRAM.into(),
        root: guest.root(),
        state: state.clone(),
        lock: lock::take(&Root::new(guest.root()))
            .unwrap()
            .expect("nobody else has it"),
    };
    let guardian = Guardian::start(launch, Moment::now()).unwrap();
    let probed = apply::probe(files, choice, false).unwrap();
    Fold::new(Box::new(files.clone()), probed.actuator, state, guardian).unwrap()
}

pub(crate) fn follow(fold: &mut Fold, usable: u32) -> Result<Change, FoldError> {
    let now = Moment::now();
    let ask = Ask {
        usable,
        ..Ask::default()
    };
    fold.follow(&ask, now + Duration::from_secs(120), now)
}
