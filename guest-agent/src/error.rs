//! How errors are told: each error names its part and not its source; whoever tells it tells the whole chain.

use std::error::Error;

/// The error and its sources, as one line.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let next = error.to_string();
        // Wrappers of other crates repeat what they wrap, and some messages tell their cause in the middle of the text.
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::TopologyError;
    use std::io;

    #[test]
    fn the_chain_names_everything_once() {
        let error = TopologyError::Read {
            path: "/sys/x".into(),
            source: io::Error::from_raw_os_error(5),
        };
        assert_eq!(
            chain(&error),
            "can't read /sys/x, for which sysfs must be mounted: Input/output error (os error 5)"
        );
        assert_eq!(chain(&io::Error::other("alone")), "alone");
    }
}
