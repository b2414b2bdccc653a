//! A client of an NBD server that the test is itself, so that it knows what was answered.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

const WRITE: u16 = 1;
const FLUSH: u16 = 3;
const ZEROES: u16 = 6;

/// A connection to an export.
pub(crate) struct Nbd(UnixStream);

impl Nbd {
    pub(crate) fn connect(socket: &Path, export: &str) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.read_exact(&mut [0; 18])?;
        // Fixed newstyle, no zeroes; NBD_OPT_EXPORT_NAME.
        let mut hello = 3_u32.to_be_bytes().to_vec();
        hello.extend(b"IHAVEOPT\0\0\0\x01");
        hello.extend((export.len() as u32).to_be_bytes());
        hello.extend(export.as_bytes());
        stream.write_all(&hello)?;
        stream.read_exact(&mut [0; 10])?;
        Ok(Self(stream))
    }

    fn request(kind: u16, offset: u64, length: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
        bytes.extend([0; 2]);
        bytes.extend(kind.to_be_bytes());
        bytes.extend([0; 8]);
        bytes.extend(offset.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes.extend(data);
        bytes
    }

    /// A write; `None` writes zeroes.
    pub(crate) fn write(offset: u64, length: u32, data: Option<&[u8]>) -> Vec<u8> {
        match data {
            Some(data) => Self::request(WRITE, offset, length, data),
            None => Self::request(ZEROES, offset, length, &[]),
        }
    }

    /// Sends requests and waits for as many replies. An error that the server answers with fails the
    /// test.
    pub(crate) fn send(&mut self, requests: &[Vec<u8>]) -> io::Result<()> {
        self.0.write_all(&requests.concat())?;
        for _ in requests {
            let mut reply = [0; 16];
            self.0.read_exact(&mut reply)?;
            assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0], "an error");
        }
        Ok(())
    }

    /// Flushes.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.send(&[Self::request(FLUSH, 0, 0, &[])])
    }
}
