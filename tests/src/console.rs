//! A guest's console log: its end for error messages, and a kept copy when a test fails.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::assets;

/// The last lines of a console log, without the terminal's control bytes; a note instead when it cannot be read.
#[must_use]
pub fn tail(log: &Path, lines: usize) -> String {
    let bytes = match fs::read(log) {
        Ok(bytes) => bytes,
        Err(error) => return format!("({}: {error})", log.display()),
    };
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text.lines().map(str::trim_end).collect();
    let first = all.len().saturating_sub(lines);
    let end = all[first..].join("\n");
    end.chars()
        .filter(|c| !c.is_control() || matches!(c, '\n' | '\t'))
        .collect()
}

/// Copies a log to where it stays after the test: `lab/logs` below the target folder.
///
/// # Errors
/// When the copy cannot be written.
pub fn keep(log: &Path, name: &str) -> io::Result<PathBuf> {
    let folder = assets::target_dir().join("lab/logs");
    fs::create_dir_all(&folder)?;
    let kept = folder.join(format!("{name}-{}.log", std::process::id()));
    fs::copy(log, &kept)?;
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_is_the_last_lines_without_control_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("console");
        fs::write(&log, b"one\r\n\x1b[2Jtwo\r\nthr\xffee\r\n").unwrap();
        assert_eq!(tail(&log, 2), "[2Jtwo\nthr\u{fffd}ee");
        assert_eq!(tail(&log, 9).lines().count(), 3);
        assert!(tail(&dir.path().join("none"), 2).contains("none"));
    }
}
