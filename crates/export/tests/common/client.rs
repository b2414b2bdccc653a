//! A client over a unix socket, in bytes.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used)]

use super::script::{flags, option as option_bytes, request};
use super::served::Served;
use isobath_export::nbd::wire::{command, option};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// A client that speaks simple replies.
pub struct Client(pub UnixStream);

impl Client {
    pub fn connect(served: &Served) -> Self {
        Self::connect_to(&served.socket)
    }

    pub fn connect_to(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
        Self(stream)
    }

    /// Connects and chooses the default export.
    pub fn ready(served: &Served) -> Self {
        let mut client = Self::connect(served);
        client.send(&[flags(), option_bytes(option::EXPORT_NAME, b"")].concat());
        client.take::<28>();
        client
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    pub fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Everything until the server closes. A reset counts as a close.
    pub fn rest(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self.0.read_to_end(&mut bytes) {
            Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("{error}"),
            _ => bytes,
        }
    }

    /// The error and the cookie of a reply.
    pub fn reply(&mut self) -> (u32, u64) {
        let reply: [u8; 16] = self.take();
        assert_eq!(reply[..4], 0x6744_6698_u32.to_be_bytes());
        let error = u32::from_be_bytes(reply[4..8].try_into().unwrap());
        (error, u64::from_be_bytes(reply[8..].try_into().unwrap()))
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) {
        self.send(&request(command::WRITE, 0, 7, (offset, data.len() as u32), data));
        assert_eq!(self.reply(), (0, 7));
    }

    pub fn read(&mut self, offset: u64, length: u32) -> Vec<u8> {
        self.send(&request(command::READ, 0, 8, (offset, length), &[]));
        assert_eq!(self.reply(), (0, 8));
        let mut data = vec![0; length as usize];
        self.0.read_exact(&mut data).unwrap();
        data
    }

    pub fn disconnect(mut self) {
        self.send(&request(command::DISC, 0, 0, (0, 0), &[]));
        assert_eq!(self.rest(), b"");
    }
}
