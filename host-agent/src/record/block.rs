//! The frame of a file: its head, and blocks with length and check sum, which can be found again behind damage.
//!
//! Head: `HINTREC\n`, format (u16). Block: `\xa5blk`, length (u32), CRC-32 (u32), deflated payload. Numbers are little-endian.

use std::io::{self, Read, Write};

use flate2::Compression;
use flate2::Crc;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;

/// The format that is written and read; every change of a payload raises it.
pub(super) const FORMAT: u16 = 1;
const MAGIC: [u8; 8] = *b"HINTREC\n";
/// Length of a file's head.
pub(super) const HEAD_LEN: usize = 10;
/// What each block begins with.
pub(super) const MARK: [u8; 4] = *b"\xa5blk";
/// Length of a block's head.
pub(super) const BLOCK_HEAD_LEN: usize = 12;
/// A block that says it is longer than this is damaged.
pub(super) const MAX_BLOCK: u32 = 64 << 20;
/// A payload that unpacks to more than this is damaged.
const MAX_PAYLOAD: u64 = 256 << 20;

/// What a file begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Head {
    /// A recording of this format.
    Recording(u16),
    /// Nothing, or the first bytes of a head: a writer was stopped there.
    Begun,
    /// Something else.
    Other,
}

pub(super) fn file_head() -> [u8; HEAD_LEN] {
    let mut head = [0; HEAD_LEN];
    head[..8].copy_from_slice(&MAGIC);
    head[8..].copy_from_slice(&FORMAT.to_le_bytes());
    head
}

pub(super) fn parse_file_head(bytes: &[u8]) -> Head {
    let known = bytes.len().min(MAGIC.len());
    if bytes[..known] != MAGIC[..known] {
        return Head::Other;
    }
    match bytes.get(8..HEAD_LEN) {
        Some(format) => Head::Recording(u16::from_le_bytes([format[0], format[1]])),
        None => Head::Begun,
    }
}

/// Packs a payload; `None` for one that is too long.
pub(super) fn pack(payload: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let mut encoder = DeflateEncoder::new(vec![0; BLOCK_HEAD_LEN], Compression::fast());
    encoder.write_all(payload)?;
    let mut block = encoder.finish()?;
    let packed = &block[BLOCK_HEAD_LEN..];
    let length = u32::try_from(packed.len())
        .ok()
        .filter(|length| *length <= MAX_BLOCK);
    let (Some(length), true) = (length, payload.len() as u64 <= MAX_PAYLOAD) else {
        return Ok(None);
    };
    let sum = check_sum(packed);
    block[..4].copy_from_slice(&MARK);
    block[4..8].copy_from_slice(&length.to_le_bytes());
    block[8..12].copy_from_slice(&sum.to_le_bytes());
    Ok(Some(block))
}

/// Length and check sum of the block that begins here.
pub(super) fn parse_block_head(head: [u8; BLOCK_HEAD_LEN]) -> Option<(u32, u32)> {
    let number =
        |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let length = number(4);
    (head[..4] == MARK && length <= MAX_BLOCK).then(|| (length, number(8)))
}

pub(super) fn check_sum(packed: &[u8]) -> u32 {
    let mut crc = Crc::new();
    crc.update(packed);
    crc.sum()
}

/// The payload; `None` for one that is damaged.
pub(super) fn unpack(packed: &[u8]) -> Option<Vec<u8>> {
    let mut payload = Vec::new();
    let mut decoder = DeflateDecoder::new(packed).take(MAX_PAYLOAD + 1);
    decoder.read_to_end(&mut payload).ok()?;
    (payload.len() as u64 <= MAX_PAYLOAD).then_some(payload)
}
