//! Output to stdout. What it says may contain names from images and directories, and does nothing to a terminal.

use crate::messages::harmless;
use std::io::{self, StdoutLock, Write};
use std::os::fd::{AsFd, AsRawFd};

/// A writer of text, with characters escaped that would control a terminal or mislead the reader.
pub(crate) struct Screen<W> {
    out: W,
    /// The beginning of a character whose rest comes with the next write.
    begun: Vec<u8>,
}

/// Standard output as it is, for what is not text for people.
pub(crate) fn raw() -> StdoutLock<'static> {
    io::stdout().lock()
}

/// Whether nobody reads standard output any more: it is a pipe or socket whose other end is closed.
pub(crate) fn is_abandoned() -> bool {
    let mut poll = libc::pollfd { fd: raw().as_fd().as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: one valid structure, and no wait; after an error it says nothing.
    let found = unsafe { libc::poll(&raw mut poll, 1, 0) };
    found == 1 && poll.revents & (libc::POLLERR | libc::POLLHUP) != 0
}

impl<W: Write> Screen<W> {
    pub(crate) fn new(out: W) -> Self {
        Self { out, begun: Vec::new() }
    }

    fn show(&mut self, text: &str) -> io::Result<()> {
        let plain = |byte: &u8| matches!(byte, b' '..=b'~' | b'\n' | b'\t');
        if text.as_bytes().iter().all(plain) {
            self.out.write_all(text.as_bytes())
        } else {
            self.out.write_all(harmless(text, false).as_bytes())
        }
    }
}

impl<W: Write> Write for Screen<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let joined;
        let mut rest = bytes;
        if !self.begun.is_empty() {
            self.begun.extend(bytes);
            joined = std::mem::take(&mut self.begun);
            rest = &joined;
        }
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    self.show(text)?;
                    return Ok(bytes.len());
                }
                Err(error) => {
                    let (text, other) = rest.split_at(error.valid_up_to());
                    self.show(&String::from_utf8_lossy(text))?;
                    let Some(wrong) = error.error_len() else {
                        self.begun = other.to_vec();
                        return Ok(bytes.len());
                    };
                    self.show("\u{fffd}")?;
                    rest = other.get(wrong..).unwrap_or_default();
                }
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_does_nothing_to_a_terminal_however_it_is_cut() {
        let text = "né 磁盤\t🙂\n\x1b]0;owned\x07\u{202e}\r\u{9b}x".as_bytes();
        let text = [text, b"\xff\x9b31m.\n"].concat();
        let shown = "né 磁盤\t🙂\n\\u{1b}]0;owned\\u{7}\\u{202e}\\r\\u{9b}x\u{fffd}\u{fffd}31m.\n";
        for length in 1..=text.len() {
            let mut screen = Screen::new(Vec::new());
            for part in text.chunks(length) {
                screen.write_all(part).unwrap();
            }
            assert_eq!(String::from_utf8(screen.out).unwrap(), shown, "{length}");
        }
    }
}
