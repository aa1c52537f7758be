//! The writer: a thread of its own, behind a bounded queue, so that no tick waits for a disk.
//!
//! What can't be written is lost and counted, and the next block is tried anew. A file is never touched that is no recording.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{
    Receiver, RecvTimeoutError, SyncSender, TrySendError, channel, sync_channel,
};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, flock};

use super::block::{self, HEAD_LEN, Head};
use super::format::{BlockStart, Encoder};
use super::{Moment, RecordError, old_path};
use crate::model::RecordState;

/// Moments that wait for the writer; more are lost.
const QUEUE: usize = 64;
/// A block holds what came in so long: so much is lost with a crash.
const BLOCK_TIME: Duration = Duration::from_secs(10);
/// A block with a payload of so many bytes is written before its time.
const BLOCK_LEN: usize = 1 << 20;
/// How long the end of the daemon waits for the last block.
const END_TIME: Duration = Duration::from_secs(5);

/// Takes moments and has them written. Dropping it writes what it has, for five seconds at most.
#[derive(Debug)]
pub struct Recorder {
    queue: Option<SyncSender<Moment>>,
    ended: Receiver<()>,
    status: Arc<Mutex<Status>>,
    full: u64,
}

#[derive(Debug, Default)]
struct Status {
    bytes: u64,
    lost: u64,
    failure: Option<String>,
}

impl Recorder {
    /// Records to `path` and `path.old`, which together stay below `most` bytes. `epoch` is the daemon's run.
    ///
    /// # Errors
    /// When the system gives no thread. Whatever is wrong with the file shows in [`Recorder::failure`].
    pub fn start(path: &Path, most: u64, epoch: u64) -> io::Result<Self> {
        let (queue, moments) = sync_channel(QUEUE);
        let (end, ended) = channel();
        let status = Arc::new(Mutex::new(Status::default()));
        let writer = Writer {
            path: path.to_owned(),
            most,
            epoch,
            file: None,
            status: Arc::clone(&status),
        };
        thread::Builder::new()
            .name("record".to_owned())
            .spawn(move || {
                writer.run(&moments);
                // The daemon may have stopped waiting.
                let _ = end.send(());
            })?;
        Ok(Self {
            queue: Some(queue),
            ended,
            status,
            full: 0,
        })
    }

    /// Hands a moment to the writer; never waits.
    pub fn take(&mut self, moment: Moment) {
        let queue = self.queue.as_ref().expect("it is there until the drop");
        match queue.try_send(moment) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => self.full += 1,
        }
    }

    /// How it goes.
    #[must_use]
    pub fn state(&self) -> RecordState {
        let status = lock(&self.status);
        RecordState {
            bytes: status.bytes,
            lost_ticks: status.lost + self.full,
            failing: status.failure.is_some(),
        }
    }

    /// Why nothing is written now.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        lock(&self.status).failure.clone()
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        drop(self.queue.take());
        // A disk that hangs must not hold up the end; then the last block is lost.
        let _ = self.ended.recv_timeout(END_TIME);
    }
}

fn lock(status: &Mutex<Status>) -> std::sync::MutexGuard<'_, Status> {
    status.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A block that is being filled.
struct Pending {
    encoder: Encoder,
    payload: Vec<u8>,
    ticks: u64,
    due: Instant,
}

struct Writer {
    path: PathBuf,
    most: u64,
    epoch: u64,
    file: Option<Current>,
    status: Arc<Mutex<Status>>,
}

/// The file that is written to.
struct Current {
    file: File,
    length: u64,
}

impl Writer {
    fn run(mut self, moments: &Receiver<Moment>) {
        // What is wrong with the file is told at once, and not with the first block.
        let opened = self.open();
        self.tell(opened, 0);
        let mut pending: Option<Pending> = None;
        loop {
            let left = pending.as_ref().map_or(BLOCK_TIME, |pending| {
                pending.due.saturating_duration_since(Instant::now())
            });
            let next = moments.recv_timeout(left);
            let ended = matches!(next, Err(RecvTimeoutError::Disconnected));
            if let Ok(moment) = next
                && let Err(error) = self.add(&mut pending, &moment)
            {
                self.tell(Err(error), 1);
            }
            let due = |pending: &mut Pending| {
                ended || pending.payload.len() >= BLOCK_LEN || pending.due <= Instant::now()
            };
            if let Some(block) = pending.take_if(due) {
                let written = self.write(&block.payload);
                self.tell(written, block.ticks);
            }
            if ended {
                return;
            }
        }
    }

    fn add(&self, pending: &mut Option<Pending>, moment: &Moment) -> Result<(), RecordError> {
        let encode = |source| RecordError::Encode {
            path: self.path.clone(),
            source,
        };
        let pending = match pending {
            Some(pending) => pending,
            None => pending.insert(Pending {
                encoder: Encoder::default(),
                payload: postcard::to_allocvec(&BlockStart { epoch: self.epoch })
                    .map_err(encode)?,
                ticks: 0,
                due: Instant::now() + BLOCK_TIME,
            }),
        };
        let entry = pending.encoder.entry(moment);
        let payload = std::mem::take(&mut pending.payload);
        pending.payload = postcard::to_extend(&entry, payload).map_err(encode)?;
        pending.ticks += 1;
        Ok(())
    }

    /// Keeps how it went for those who ask.
    fn tell(&self, result: Result<(), RecordError>, ticks: u64) {
        let mut status = lock(&self.status);
        status.bytes = self.file.as_ref().map_or(0, |current| current.length);
        match result {
            Ok(()) => status.failure = None,
            Err(error) => {
                status.lost += ticks;
                status.failure = Some(format!("{error}: nothing is recorded until that is mended"));
            }
        }
    }

    fn write(&mut self, payload: &[u8]) -> Result<(), RecordError> {
        let failed = |error| RecordError::io("pack a block for", &self.path)(error);
        let too_long = || io::Error::other("so many VMs make it too long");
        let block = block::pack(payload)
            .and_then(|block| block.ok_or_else(too_long))
            .map_err(failed)?;
        self.open()?;
        if self.length() + block.len() as u64 > self.most / 2 && self.length() > HEAD_LEN as u64 {
            self.rotate()?;
            self.open()?;
        }
        let current = self.file.as_mut().expect("it was opened");
        let start = current.length;
        let written = (current.file.seek(SeekFrom::Start(start)))
            .and_then(|_| current.file.write_all(&block));
        if let Err(error) = written {
            // Half a block does no harm, since readers go on behind it; without it there is more room on a full disk.
            let _ = current.file.set_len(start);
            self.file = None;
            return Err(RecordError::io("write", &self.path)(error));
        }
        current.length = start + block.len() as u64;
        Ok(())
    }

    fn length(&self) -> u64 {
        self.file.as_ref().map_or(0, |current| current.length)
    }

    /// Opens the file, unless it is open and still the one of that name.
    fn open(&mut self) -> Result<(), RecordError> {
        if let Some(current) = &self.file
            && is_at(&current.file, &self.path)
        {
            return Ok(());
        }
        self.file = None;
        let (mut file, head) = open_recording(&self.path)?;
        if matches!(head, Head::Recording(format) if format != block::FORMAT) {
            self.rotate()?;
            (file, _) = open_recording(&self.path)?;
        }
        let io = |error| RecordError::io("write", &self.path)(error);
        let mut length = file.metadata().map_err(io)?.len();
        if length < HEAD_LEN as u64 {
            file.write_all_at(&block::file_head(), 0).map_err(io)?;
            length = HEAD_LEN as u64;
        }
        // Behind a block that a crash cut off.
        file.seek(SeekFrom::Start(length)).map_err(io)?;
        self.file = Some(Current { file, length });
        Ok(())
    }

    /// Makes the file the older half, in place of the one before.
    fn rotate(&mut self) -> Result<(), RecordError> {
        let old = old_path(&self.path);
        if old.symlink_metadata().is_ok() {
            open_recording(&old)?;
        }
        fs::rename(&self.path, &old).map_err(RecordError::io("rename", &self.path))?;
        self.file = None;
        Ok(())
    }
}

fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(open), Ok(named)) => (open.dev(), open.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

/// Opens or makes a recording for this process alone; refuses whatever else has that name.
fn open_recording(path: &Path) -> Result<(File, Head), RecordError> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits();
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        // The flags of open(2) are the low bits of a positive int.
        .custom_flags(flags.cast_signed())
        .open(path)
        .map_err(RecordError::io("open", path))?;
    let metadata = file.metadata().map_err(RecordError::io("open", path))?;
    if !metadata.is_file() {
        return Err(RecordError::NoRecording(path.to_owned()));
    }
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Err(RecordError::Taken(path.to_owned()));
    }
    let mut head = [0; HEAD_LEN];
    let length = usize::try_from(metadata.len()).map_or(HEAD_LEN, |length| length.min(HEAD_LEN));
    file.read_exact_at(&mut head[..length], 0)
        .map_err(RecordError::io("read", path))?;
    match block::parse_file_head(&head[..length]) {
        Head::Other => Err(RecordError::NoRecording(path.to_owned())),
        head => Ok((file, head)),
    }
}
