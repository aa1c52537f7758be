//! What a test asks QEMU itself: to stop the guest and to let it go on, say.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Guest, GuestError};

/// Far more than any command here takes.
const DEADLINE: Duration = Duration::from_secs(120);

impl Guest {
    /// Gives QEMU a command of QMP and returns its answer.
    ///
    /// # Errors
    /// When the socket does not work, somebody else uses it, or QEMU refuses the command.
    pub fn qmp(&self, command: &str, arguments: &Value) -> Result<Value, GuestError> {
        let path = self.qmp_socket();
        self.converse(command, arguments)
            .map_err(|source| GuestError::Io { path, source })
    }

    fn converse(&self, command: &str, arguments: &Value) -> io::Result<Value> {
        let stream = UnixStream::connect(self.qmp_socket())?;
        stream.set_read_timeout(Some(DEADLINE))?;
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        // The greeting.
        lines.next().transpose()?;
        answer(&stream, &mut lines, "qmp_capabilities", &json!({}))?;
        answer(&stream, &mut lines, command, arguments)
    }
}

fn answer(
    mut stream: &UnixStream,
    lines: &mut impl Iterator<Item = io::Result<String>>,
    command: &str,
    arguments: &Value,
) -> io::Result<Value> {
    let request = json!({ "execute": command, "arguments": arguments });
    stream.write_all(format!("{request}\n").as_bytes())?;
    for line in lines {
        let mut message: Value = serde_json::from_str(&line?)?;
        // Events come in between.
        if let Some(value) = message.get_mut("return") {
            return Ok(value.take());
        }
        if let Some(error) = message.get("error") {
            return Err(io::Error::other(format!("{command}: {error}")));
        }
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}
