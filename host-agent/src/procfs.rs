//! Forms of `/proc` files that more than one stage reads, as text to values. No file is read here.

use std::str::FromStr;

/// A whole number of digits alone. Rust's own parser takes a sign too, which no name and no file that is read with this has.
pub(crate) fn number<T: FromStr>(text: &str) -> Option<T> {
    let only_digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| only_digits)
}

/// The fields of a `stat` file from the third (state) on.
pub(crate) fn stat_fields(text: &str) -> impl Iterator<Item = &str> {
    text.rsplit_once(')')
        .map_or("", |(_, rest)| rest)
        .split_ascii_whitespace()
}

/// When a process started, in clock ticks since boot: field 22 of its `stat`.
pub(crate) fn start_ticks(stat: &str) -> Option<u64> {
    stat_fields(stat).nth(19).and_then(number)
}

/// The three numbers of a `schedstat`: nanoseconds run, nanoseconds waited, slices.
pub(crate) fn schedstat(text: &str) -> Option<[u64; 3]> {
    let mut numbers = text.split_ascii_whitespace().map(number::<u64>);
    Some([numbers.next()??, numbers.next()??, numbers.next()??])
}

/// What a line of `status` says: `Uid`, `NSpid`, ...
pub(crate) fn status_value<'a>(status: &'a str, key: &str) -> Option<&'a str> {
    status
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))
        .map(str::trim)
}

/// The arguments of a `cmdline`; empty ones are left out.
pub(crate) fn arguments(cmdline: &[u8]) -> Vec<String> {
    cmdline
        .split(|byte| *byte == 0)
        .filter(|argument| !argument.is_empty())
        .map(|argument| String::from_utf8_lossy(argument).into_owned())
        .collect()
}

/// A Unix socket with a name, as `/proc/<pid>/net/unix` lists those of the process's network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UnixSocket<'a> {
    pub(crate) inode: u64,
    /// Somebody is connected: an accepted connection has the name of its listener.
    pub(crate) connected: bool,
    /// It takes connections.
    pub(crate) listening: bool,
    /// As it was bound: relative to a folder that is not told, maybe. `@` stands first where it is no file.
    pub(crate) path: &'a str,
}

/// The flag of a socket that listens (`__SO_ACCEPTCON` in include/uapi/linux/net.h).
const ACCEPTS: u32 = 1 << 16;
/// `SS_CONNECTED` of the same file.
const CONNECTED: &str = "03";

/// The sockets with a name in a `net/unix`. Whoever names a socket can put a line end into the name, and so write lines of his
/// own: an inode that is there twice tells nothing.
pub(crate) fn unix_sockets(table: &str) -> impl Iterator<Item = UnixSocket<'_>> {
    table.lines().filter_map(|line| {
        // Num RefCount Protocol Flags Type St Inode Path; the path may hold blanks.
        let mut rest = line;
        let mut fields = [""; 7];
        for field in &mut fields {
            let (first, after) = rest.trim_start_matches(' ').split_once(' ')?;
            (*field, rest) = (first, after);
        }
        let flags = u32::from_str_radix(fields[3], 16).ok()?;
        Some(UnixSocket {
            inode: number(fields[6])?,
            connected: fields[5] == CONNECTED,
            listening: flags & ACCEPTS != 0,
            path: Some(rest).filter(|path| !path.is_empty())?,
        })
    })
}

/// How much of the last minute tasks waited for pCPUs, in per cent: `some avg10=0.00 avg60=1.25 ...`
pub(crate) fn pressure_of_a_minute(pressure: &str) -> Option<f64> {
    let line = pressure
        .lines()
        .find_map(|line| line.strip_prefix("some "))?;
    let field = line
        .split(' ')
        .find_map(|field| field.strip_prefix("avg60="))?;
    field
        .parse()
        .ok()
        .filter(|average| (0.0..=100.0).contains(average))
}

/// How a text stands for bytes that its form has no place for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Escapes {
    /// `\040`, as the kernel writes paths.
    Octal,
    /// `\x2d`, as systemd writes names of units.
    Hex,
}

/// The text with what its escapes stand for. What only looks like one stays as it is.
pub(crate) fn unescape(text: &str, escapes: Escapes) -> String {
    let (mark, digits, radix) = match escapes {
        Escapes::Octal => ("\\", 3, 8),
        Escapes::Hex => ("\\x", 2, 16),
    };
    let escaped = |rest: &[u8]| {
        let digits = rest.strip_prefix(mark.as_bytes())?.get(..digits)?;
        // The parser alone would take a sign.
        let fits = digits.iter().all(u8::is_ascii_alphanumeric);
        let text = std::str::from_utf8(digits).ok().filter(|_| fits)?;
        u8::from_str_radix(text, radix).ok()
    };
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some(first) = rest.first() {
        let (byte, length) = match escaped(rest) {
            Some(byte) => (byte, mark.len() + digits),
            None => (*first, 1),
        };
        bytes.push(byte);
        rest = &rest[length..];
    }
    String::from_utf8_lossy(&bytes).into_owned()
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
            assert_eq!(stat_fields(&text).next(), Some("S"), "{comm}");
            assert_eq!(start_ticks(&text), Some(8_212_345), "{comm}");
        }
        assert_eq!(stat_fields("no parenthesis at all").count(), 0);
        assert_eq!(start_ticks("1 (x) S 1 2 3"), None);
    }

    #[test]
    fn a_command_that_is_cut_or_no_text_shifts_nothing_either() {
        // 15 bytes, cut inside of a parenthesis and of a character.
        let mut stat =
            b"7 (:-) (((((((((\xc3) R 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4711 1 1\n".to_vec();
        assert_eq!(start_ticks(&String::from_utf8_lossy(&stat)), Some(4711));
        stat.truncate(30);
        assert_eq!(
            start_ticks(&String::from_utf8_lossy(&stat)),
            None,
            "half a line"
        );
    }

    #[test]
    fn numbers_have_digits_alone() {
        assert_eq!(number::<u32>("0042"), Some(42));
        for wrong in ["", "+1", "-1", " 1", "1x", "4294967296"] {
            assert_eq!(number::<u32>(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn a_key_that_only_begins_like_another_is_not_taken() {
        let status = "Name:\tUid:\nPid:\t7\nNSpid:\t7\t1\nUid:\t1\t2\t3\t4\n";
        assert_eq!(status_value(status, "Uid"), Some("1\t2\t3\t4"));
        assert_eq!(status_value(status, "NSpid"), Some("7\t1"));
        assert_eq!(status_value(status, "NS"), None);
    }

    #[test]
    fn sockets_are_told_with_blanks_in_their_paths() {
        let table = "Num       RefCount Protocol Flags    Type St Inode Path\n\
            00000000aa: 00000002 00000000 00010000 0001 01 22845 /run/vm 1/v.sock\n\
            00000000ab: 00000003 00000000 00000000 0001 03 22846 /run/q\n\
            00000000ac: 00000003 00000000 00000000 0001 03    99\n\
            00000000ad: 00000002 00000000 00010000 0005 01   101 @abstract\n\
            00000000ae: 00000002 00000000 00010000 0001 01 x /run/z\n";
        let found: Vec<UnixSocket<'_>> = unix_sockets(table).collect();
        let socket = |inode, listening: bool, path| UnixSocket {
            inode,
            connected: !listening,
            listening,
            path,
        };
        assert_eq!(
            found,
            [
                socket(22845, true, "/run/vm 1/v.sock"),
                socket(22846, false, "/run/q"),
                socket(101, true, "@abstract"),
            ]
        );
    }

    #[test]
    fn pressure_is_a_part_of_the_time() {
        let some = |value: &str| {
            pressure_of_a_minute(&format!(
                "full avg60=9\nsome avg10=0.00 avg60={value} total=1\n"
            ))
        };
        assert_eq!(some("1.25"), Some(1.25));
        for wrong in ["NaN", "inf", "-1", "100.01", "", "x"] {
            assert_eq!(some(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn escapes_are_digits_of_the_right_number() {
        for (text, octal, hex) in [
            (r"a\040b\134c", r"a b\c", r"a\040b\134c"),
            (r"a\x2db\xc3\xbc", r"a\x2db\xc3\xbc", "a-bü"),
            (
                r"\9\04\+12\x+a\x2\400",
                r"\9\04\+12\x+a\x2\400",
                r"\9\04\+12\x+a\x2\400",
            ),
        ] {
            assert_eq!(unescape(text, Escapes::Octal), octal, "{text}");
            assert_eq!(unescape(text, Escapes::Hex), hex, "{text}");
        }
    }
}
