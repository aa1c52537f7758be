//! The fuzz target of what guests send.

use hint_proto::v1::session_request::Message;
use hint_proto::{MAX_CPUS, v1};
use prost::Message as _;

use super::claims;
use crate::text::MAX_BYTES;

/// A guest's message, from the bytes on the wire: what is taken is short and has CPUs; what is refused has a short reason.
pub fn guest_messages(data: &[u8]) {
    let Ok(request) = v1::SessionRequest::decode(data) else {
        return;
    };
    let Some(message) = request.message else {
        return;
    };
    let is_short = |text: &str| text.len() <= MAX_BYTES && !text.chars().any(char::is_control);
    let refused = match message {
        Message::Hello(hello) => claims::agent(&hello)
            .map(|agent| {
                assert!(!agent.online.is_empty() && agent.online.len() <= MAX_CPUS as usize);
                assert!(is_short(&agent.version) && is_short(&agent.kernel_release));
            })
            .err(),
        Message::Applied(applied) => claims::answer(&applied)
            .map(|answer| assert!(answer.online.is_none_or(|online| !online.is_empty())))
            .err(),
        Message::Report(report) => claims::report(&report)
            .map(|(_, online)| assert!(online.is_none_or(|online| !online.is_empty())))
            .err(),
        Message::Goodbye(goodbye) => claims::goodbye(&goodbye)
            .map(|reason| assert!(is_short(&reason)))
            .err(),
        Message::Heartbeat(_) => None,
    };
    assert!(refused.is_none_or(|status| status.message().len() <= 2 * MAX_BYTES));
}
