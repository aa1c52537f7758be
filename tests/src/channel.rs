//! The channel for commands: one request, one answer, in order. The guest's side is `rootfs/serve`, which also describes the
//! frames.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::guest::Output;

/// Most bytes of standard output, and of standard error, that a guest sends.
pub(crate) const LIMIT: usize = 1 << 20;

/// Longest header; a longer one is no header.
const HEADER_LIMIT: usize = 100;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ChannelError {
    #[error("no answer within {0:?}")]
    Deadline(Duration),
    #[error("the guest closed the channel")]
    Closed,
    #[error("expected a header of four numbers, found {0:?}")]
    Garbled(String),
    #[error("expected at most {LIMIT} bytes of output, found {0}")]
    TooLarge(u64),
    #[error("channel: {0}")]
    Io(#[from] io::Error),
}

#[derive(Debug)]
pub(crate) struct Channel {
    stream: UnixStream,
    /// Bytes of the next frames; it outlives a call, so that a late answer is skipped as a whole.
    received: Vec<u8>,
    last_id: u64,
}

struct Header {
    id: u64,
    status: u8,
    stdout: u64,
    stderr: u64,
}

impl Channel {
    pub(crate) fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            received: Vec::new(),
            last_id: 0,
        }
    }

    /// Waits until the guest is up.
    pub(crate) fn wait_ready(&mut self, patience: Duration) -> Result<(), ChannelError> {
        self.answer(0, patience, Instant::now() + patience)
            .map(drop)
    }

    /// Runs shell text in the guest. The guest kills it after `deadline`; the answer may take a little longer.
    pub(crate) fn call(
        &mut self,
        command: &[u8],
        deadline: Duration,
    ) -> Result<Output, ChannelError> {
        self.last_id += 1;
        let id = self.last_id;
        let seconds = deadline.as_secs().max(1);
        let patience = deadline + Duration::from_secs(10);
        let end = Instant::now() + patience;
        let mut request = format!("{id} {seconds} {}\n", command.len()).into_bytes();
        request.extend_from_slice(command);
        self.stream.set_write_timeout(Some(patience))?;
        self.stream
            .write_all(&request)
            .map_err(|error| match error.kind() {
                ErrorKind::WouldBlock => ChannelError::Deadline(patience),
                ErrorKind::BrokenPipe => ChannelError::Closed,
                _ => ChannelError::Io(error),
            })?;
        self.answer(id, patience, end)
    }

    fn answer(
        &mut self,
        id: u64,
        patience: Duration,
        end: Instant,
    ) -> Result<Output, ChannelError> {
        loop {
            let (header, output) = self.frame(patience, end)?;
            if header.id == id {
                let size = header.stdout.max(header.stderr);
                return if size > LIMIT as u64 {
                    Err(ChannelError::TooLarge(size))
                } else {
                    Ok(output)
                };
            }
        }
    }

    fn frame(
        &mut self,
        patience: Duration,
        end: Instant,
    ) -> Result<(Header, Output), ChannelError> {
        let (header_len, header) = loop {
            if let Some(len) = self.received.iter().position(|byte| *byte == b'\n') {
                let text = String::from_utf8_lossy(&self.received[..len]).into_owned();
                let header = parse_header(&text).ok_or(ChannelError::Garbled(text))?;
                break (len + 1, header);
            }
            if self.received.len() > HEADER_LIMIT {
                let text = String::from_utf8_lossy(&self.received[..HEADER_LIMIT]).into_owned();
                return Err(ChannelError::Garbled(text));
            }
            self.receive(patience, end)?;
        };
        let out_end = header_len + sent(header.stdout);
        let frame_end = out_end + sent(header.stderr);
        while self.received.len() < frame_end {
            self.receive(patience, end)?;
        }
        let rest = self.received.split_off(frame_end);
        let frame = std::mem::replace(&mut self.received, rest);
        let output = Output {
            status: header.status,
            stdout: frame[header_len..out_end].to_vec(),
            stderr: frame[out_end..].to_vec(),
        };
        Ok((header, output))
    }

    fn receive(&mut self, patience: Duration, end: Instant) -> Result<(), ChannelError> {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ChannelError::Deadline(patience));
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut buffer = [0; 64 * 1024];
        match self.stream.read(&mut buffer) {
            Ok(0) => Err(ChannelError::Closed),
            Ok(count) => {
                self.received.extend_from_slice(&buffer[..count]);
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                Err(ChannelError::Deadline(patience))
            }
            Err(error) if error.kind() == ErrorKind::ConnectionReset => Err(ChannelError::Closed),
            Err(error) => Err(ChannelError::Io(error)),
        }
    }
}

/// How many bytes of an output of this size are in the frame.
fn sent(size: u64) -> usize {
    usize::try_from(size).map_or(LIMIT, |size| size.min(LIMIT))
}

fn parse_header(text: &str) -> Option<Header> {
    let mut numbers = text.split(' ').map(str::parse::<u64>);
    let mut next = || numbers.next()?.ok();
    let header = Header {
        id: next()?,
        status: u8::try_from(next()?).ok()?,
        stdout: next()?,
        stderr: next()?,
    };
    numbers.next().is_none().then_some(header)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// A peer that reads one request and answers with these bytes.
    fn answering(answers: Vec<Vec<u8>>) -> (Channel, thread::JoinHandle<UnixStream>) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let peer = thread::spawn(move || {
            for answer in answers {
                let mut request = [0; 1000];
                let _ = theirs.read(&mut request).unwrap();
                for part in answer.chunks(7) {
                    theirs.write_all(part).unwrap();
                }
            }
            theirs
        });
        (Channel::new(ours), peer)
    }

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn output_of_any_bytes_comes_back_whole() {
        let mut answer = b"1 7 5 2\n".to_vec();
        answer.extend_from_slice(b"\n\0\xff1\ner");
        let (mut channel, _peer) = answering(vec![answer]);
        let output = channel.call(b"x", SOON).unwrap();
        assert_eq!(output.status, 7);
        assert_eq!(output.stdout, b"\n\0\xff1\n");
        assert_eq!(output.stderr, b"er");
    }

    #[test]
    fn late_answers_to_earlier_commands_are_skipped() {
        let (mut channel, _peer) = answering(vec![
            b"9 0 1 0\nx1 0 1 0\na8 0 0 0\n".to_vec(),
            b"2 0 1 0\nb".to_vec(),
        ]);
        assert_eq!(channel.call(b"x", SOON).unwrap().stdout, b"a");
        assert_eq!(channel.call(b"y", SOON).unwrap().stdout, b"b");
    }

    #[test]
    fn too_much_output_is_an_error_and_the_next_call_works() {
        let mut answer = format!("1 0 {} 0\n", LIMIT + 5).into_bytes();
        answer.resize(answer.len() + LIMIT, b'x');
        let (mut channel, _peer) = answering(vec![answer, b"2 0 0 0\n".to_vec()]);
        let found = channel.call(b"x", SOON).unwrap_err();
        assert!(matches!(found, ChannelError::TooLarge(size) if size == LIMIT as u64 + 5));
        assert_eq!(channel.call(b"y", SOON).unwrap().status, 0);
    }

    #[test]
    fn a_guest_that_dies_or_talks_nonsense_is_an_error() {
        let (mut channel, peer) = answering(vec![b"1 0 9 0\nshort".to_vec()]);
        let caller = thread::spawn(move || channel.call(b"x", SOON));
        drop(peer.join().unwrap());
        assert!(matches!(caller.join().unwrap(), Err(ChannelError::Closed)));

        let (mut channel, _peer) = answering(vec![b"Kernel panic\n".to_vec()]);
        let found = channel.call(b"x", SOON).unwrap_err();
        assert!(matches!(found, ChannelError::Garbled(_)));
    }
}
