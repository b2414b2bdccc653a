//! An NBD client with one request at a time.

use isobath_export::nbd::request::Request;
use isobath_export::nbd::wire::{self, option, option_reply};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A connection to the first export.
pub struct Client {
    stream: UnixStream,
    cookie: u64,
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the server's {what} cannot be understood"))
}

impl Client {
    /// Connects and shakes hands.
    pub fn connect(socket: &Path) -> io::Result<Self> {
        let mut client = Self { stream: UnixStream::connect(socket)?, cookie: 0 };
        let greeting: [u8; 18] = client.take()?;
        let magics = [wire::GREETING_MAGIC.to_be_bytes(), wire::OPTION_MAGIC.to_be_bytes()];
        if greeting[..16] != magics.concat() {
            return Err(wrong("greeting"));
        }
        // Fixed newstyle, no zeroes; then the export with the empty name, without information requests.
        let go = [
            &3_u32.to_be_bytes()[..],
            &wire::OPTION_MAGIC.to_be_bytes(),
            &option::GO.to_be_bytes(),
            &6_u32.to_be_bytes(),
            &[0; 6],
        ];
        client.stream.write_all(&go.concat())?;
        loop {
            let head: [u8; 20] = client.take()?;
            let word = |at: usize| {
                u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]])
            };
            if head[..8] != wire::OPTION_REPLY_MAGIC.to_be_bytes() {
                return Err(wrong("reply to an option"));
            }
            let mut data = vec![0; word(16) as usize];
            client.stream.read_exact(&mut data)?;
            match word(12) {
                option_reply::ACK => return Ok(client),
                option_reply::INFO => {}
                refused => return Err(io::Error::other(format!("refused: {refused:#x}"))),
            }
        }
    }

    fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Sends a request other than a read, and waits for its reply.
    pub fn ask(&mut self, command: u16, offset: u64, length: u32, data: &[u8]) -> io::Result<()> {
        self.cookie += 1;
        let request = Request { flags: 0, command, cookie: self.cookie, offset, length };
        self.stream.write_all(&[&request.encode()[..], data].concat())?;
        let magic = u32::from_be_bytes(self.take()?);
        let error = u32::from_be_bytes(self.take()?);
        let cookie = u64::from_be_bytes(self.take()?);
        if magic != wire::SIMPLE_REPLY_MAGIC || cookie != self.cookie {
            return Err(wrong("reply"));
        }
        match error {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error.cast_signed())),
        }
    }
}
