//! The reader: moment after moment, from the older half on. It goes on behind damage and says what was lost.

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::block::{self, BLOCK_HEAD_LEN, HEAD_LEN, Head, MARK};
use super::format::{BlockStart, Decoder, Entry};
use super::{Moment, RecordError, old_path};

/// How much is looked through at a time for the next block.
const STRIDE: usize = 64 * 1024;

/// A part of a file that can't be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// The file.
    pub path: PathBuf,
    /// Where the part begins.
    pub offset: u64,
    /// How long it is.
    pub bytes: u64,
    /// It is at the end of the file: a writer was stopped in the middle of a block.
    pub at_end: bool,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            path,
            offset,
            bytes,
            at_end,
        } = self;
        let kind = if *at_end { "cut off" } else { "damaged" };
        write!(
            f,
            "{}: {bytes} bytes from {offset} on are {kind} and left out",
            path.display()
        )
    }
}

/// Reads a recording.
#[derive(Debug)]
pub struct Reader {
    files: VecDeque<Input>,
    block: VecDeque<(u64, Moment)>,
    losses: Vec<Loss>,
}

impl Reader {
    /// Opens a recording, and the older half beside it where there is one.
    ///
    /// # Errors
    /// When it can't be read, is no recording, or is one of another format. An older half that is such counts as a file of its own and
    /// gives the same errors.
    pub fn open(path: &Path) -> Result<Self, RecordError> {
        let old = old_path(path);
        let mut files = VecDeque::new();
        if old.exists() {
            files.push_back(Input::open(&old)?);
        }
        files.push_back(Input::open(path)?);
        Ok(Self {
            files,
            block: VecDeque::new(),
            losses: Vec::new(),
        })
    }

    /// The next moment, with the daemon's run that it is of; `None` at the end.
    ///
    /// # Errors
    /// When the system fails to read.
    pub fn next_moment(&mut self) -> Result<Option<(u64, Moment)>, RecordError> {
        loop {
            if let Some(moment) = self.block.pop_front() {
                return Ok(Some(moment));
            }
            let Some(input) = self.files.front_mut() else {
                return Ok(None);
            };
            match input.next_block(&mut self.losses)? {
                Some(block) => self.block = block,
                None => {
                    self.files.pop_front();
                }
            }
        }
    }

    /// What could not be used so far.
    #[must_use]
    pub fn losses(&self) -> &[Loss] {
        &self.losses
    }
}

#[derive(Debug)]
struct Input {
    path: PathBuf,
    file: File,
    length: u64,
    at: u64,
}

impl Input {
    fn open(path: &Path) -> Result<Self, RecordError> {
        let file = File::open(path).map_err(RecordError::io("open", path))?;
        let metadata = file.metadata().map_err(RecordError::io("open", path))?;
        if !metadata.is_file() {
            return Err(RecordError::NoRecording(path.to_owned()));
        }
        let mut input = Self {
            path: path.to_owned(),
            file,
            length: metadata.len(),
            at: HEAD_LEN as u64,
        };
        let head = input.read(0, HEAD_LEN)?;
        match block::parse_file_head(&head) {
            Head::Recording(block::FORMAT) => {}
            Head::Begun => input.at = input.length,
            Head::Recording(found) => {
                return Err(RecordError::Version {
                    path: path.to_owned(),
                    found,
                    expected: block::FORMAT,
                });
            }
            Head::Other => return Err(RecordError::NoRecording(path.to_owned())),
        }
        Ok(input)
    }

    /// The next whole block; what was passed over on the way to it is lost.
    fn next_block(
        &mut self,
        losses: &mut Vec<Loss>,
    ) -> Result<Option<VecDeque<(u64, Moment)>>, RecordError> {
        let start = self.at;
        let mut lose = |path: &Path, end: u64, at_end: bool| {
            if end > start {
                losses.push(Loss {
                    path: path.to_owned(),
                    offset: start,
                    bytes: end - start,
                    at_end,
                });
            }
        };
        while let Some(begin) = self.find_mark()? {
            if let Some((block, end)) = self.block_at(begin)? {
                lose(&self.path, begin, false);
                self.at = end;
                return Ok(Some(block));
            }
            self.at = begin + 1;
        }
        lose(&self.path, self.length, true);
        self.at = self.length;
        Ok(None)
    }

    /// Where the next block may begin.
    fn find_mark(&self) -> Result<Option<u64>, RecordError> {
        let mut at = self.at;
        while at < self.length {
            let bytes = self.read(at, STRIDE)?;
            if let Some(found) = bytes.windows(MARK.len()).position(|window| window == MARK) {
                return Ok(Some(at + found as u64));
            }
            if bytes.len() < STRIDE {
                return Ok(None);
            }
            // A mark may lie across the border.
            at += (STRIDE - MARK.len() + 1) as u64;
        }
        Ok(None)
    }

    /// The block that begins here, and where it ends; `None` when it isn't whole.
    #[allow(clippy::type_complexity, reason = "used once")]
    fn block_at(&self, begin: u64) -> Result<Option<(VecDeque<(u64, Moment)>, u64)>, RecordError> {
        let head = self.read(begin, BLOCK_HEAD_LEN)?;
        let head: Option<[u8; BLOCK_HEAD_LEN]> = head.try_into().ok();
        let Some((length, sum)) = head.and_then(block::parse_block_head) else {
            return Ok(None);
        };
        let from = begin + BLOCK_HEAD_LEN as u64;
        let end = from + u64::from(length);
        if end > self.length {
            return Ok(None);
        }
        let packed = self.read(from, length as usize)?;
        if block::check_sum(&packed) != sum {
            return Ok(None);
        }
        let moments = block::unpack(&packed).and_then(|payload| decode(&payload));
        Ok(moments.map(|moments| (moments, end)))
    }

    /// So many bytes, or as many as there are.
    fn read(&self, at: u64, most: usize) -> Result<Vec<u8>, RecordError> {
        let left = usize::try_from(self.length.saturating_sub(at)).unwrap_or(usize::MAX);
        let mut bytes = vec![0; left.min(most)];
        match self.file.read_exact_at(&mut bytes, at) {
            Ok(()) => Ok(bytes),
            // It was cut while it was read.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(Vec::new()),
            Err(error) => Err(RecordError::io("read", &self.path)(error)),
        }
    }
}

/// All moments of a block; `None` when one of them means nothing, or they go back in time.
fn decode(payload: &[u8]) -> Option<VecDeque<(u64, Moment)>> {
    let (BlockStart { epoch }, mut rest) = postcard::take_from_bytes(payload).ok()?;
    let mut decoder = Decoder::default();
    let mut moments: VecDeque<(u64, Moment)> = VecDeque::new();
    while !rest.is_empty() {
        let (entry, left) = postcard::take_from_bytes::<Entry>(rest).ok()?;
        rest = left;
        let moment = decoder.moment(entry)?;
        if let Some((_, last)) = moments.back()
            && (moment.number <= last.number || moment.sample.at < last.sample.at)
        {
            return None;
        }
        moments.push_back((epoch, moment));
    }
    Some(moments)
}
