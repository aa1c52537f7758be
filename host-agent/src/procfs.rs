//! Forms of `/proc` files that more than one stage reads.

/// The fields of a `stat` file from the third (state) on.
pub(crate) fn stat_fields(text: &str) -> impl Iterator<Item = &str> {
    text.rsplit_once(')')
        .map_or("", |(_, rest)| rest)
        .split_ascii_whitespace()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_with_parentheses_and_blanks_does_not_shift_the_fields() {
        for comm in ["(sd-pam)", "sle ep", ":-) 1 2 3 4 5 6", "a)b(c"] {
            let text = format!(
                "1467 ({comm}) S 1465 1467 1467 0 -1 1077936448 1 2 3 4 5 6 7 8 20 0 1 0 8212345 99 1\n"
            );
            let fields: Vec<&str> = stat_fields(&text).collect();
            assert_eq!(fields[0], "S", "{comm}");
            assert_eq!(fields[19], "8212345", "{comm}");
        }
        assert_eq!(stat_fields("no parenthesis at all").count(), 0);
    }
}
