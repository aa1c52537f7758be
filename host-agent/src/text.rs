//! Text from outside made fit for logs, terminals and labels. It bounds and cleans; it never judges what a text means.

/// A foreign text is cut to this many bytes before it is logged, shown or kept.
pub const MAX_BYTES: usize = 256;

/// A copy of `text` of at most [`MAX_BYTES`] bytes, with a `?` for each character that could steer a terminal or hide in a line.
#[must_use]
pub fn printable(text: &str) -> String {
    let mut end = text.len().min(MAX_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end]
        .chars()
        .map(|c| if steers(c) { '?' } else { c })
        .collect()
}

/// An error with all its causes, in one line.
#[must_use]
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Some messages tell their cause in the middle of the text.
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

/// Control characters, and the invisible ones that reorder or hide text.
fn steers(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_told_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("can't read x: {source}; name another")]
        struct Inside {
            source: std::io::Error,
        }
        #[derive(Debug, thiserror::Error)]
        #[error("can't start")]
        struct Outside(#[source] Inside);
        let source = std::io::Error::other("no disk");
        let text = with_causes(&Outside(Inside { source }));
        assert_eq!(text, "can't start: can't read x: no disk; name another");
    }

    #[test]
    fn escapes_and_reordering_marks_are_replaced() {
        assert_eq!(printable("web\u{1b}[2J\n\u{202e}x"), "web?[2J??x");
        assert_eq!(printable("büro-ü"), "büro-ü");
    }

    #[test]
    fn the_cut_never_splits_a_character() {
        let text = "ü".repeat(200);
        assert_eq!(printable(&text), "ü".repeat(128));
        let odd = format!("a{text}");
        assert_eq!(printable(&odd).len(), 255);
    }
}
