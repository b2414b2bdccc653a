//! Requests to the kernel's NBD driver, by generic netlink: `linux/nbd-netlink.h` has the numbers.

use isobath_storage::cause;
use socket2::{Domain, Protocol, Socket, Type};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd};

const FAMILY: &[u8] = b"nbd\0";
const VERSION: u8 = 1;

const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;

const INDEX: u16 = 1;
const SIZE_BYTES: u16 = 2;
const BLOCK_SIZE_BYTES: u16 = 3;
const SERVER_FLAGS: u16 = 5;
const SOCKETS: u16 = 7 | NESTED;
/// In the list of sockets, and in one of its items.
const SOCKET_ITEM: u16 = 1 | NESTED;
const SOCKET_FD: u16 = 1;

/// The attribute's value consists of attributes.
const NESTED: u16 = libc::NLA_F_NESTED as u16;
/// What messages and attributes are padded to.
const ALIGNMENT: usize = 4;
/// Bytes of the headers of a message, of a generic message in it, and of an attribute.
const HEADER: usize = 16;
const GENERIC_HEADER: usize = 4;
const ATTRIBUTE_HEADER: usize = 4;
/// Room for a message from the kernel: the longest is the description of a family.
const LONGEST: usize = 32 << 10;

/// The kernel's NBD driver.
pub(super) struct Driver {
    socket: Socket,
    /// The driver's number among the families.
    family: u16,
    /// The number of the last request.
    sequence: u32,
}

/// What the kernel is told of a connection.
pub(super) struct Connection<'a> {
    /// A socket whose other end serves requests.
    pub(super) socket: BorrowedFd<'a>,
    /// The disk's size in bytes, a multiple of the block size.
    pub(super) size: u64,
    /// Bytes to which requests are aligned.
    pub(super) block_size: u64,
    /// The transmission flags.
    pub(super) flags: u16,
}

impl Driver {
    /// Finds the driver.
    ///
    /// # Errors
    /// It is not loaded, or cannot be reached from here.
    pub(super) fn find() -> io::Result<Self> {
        let generic = Some(Protocol::from(libc::NETLINK_GENERIC));
        let socket = Socket::new(Domain::from(libc::AF_NETLINK), Type::DGRAM, generic)?;
        let mut driver = Self { socket, family: libc::GENL_ID_CTRL as u16, sequence: 0 };
        let name = attribute(libc::CTRL_ATTR_FAMILY_NAME as u16, FAMILY);
        let answer = driver.call(libc::CTRL_CMD_GETFAMILY as u8, &name);
        let answer = answer.map_err(|error| {
            if error.kind() != io::ErrorKind::NotFound {
                return error;
            }
            io::Error::other(
                "the kernel's NBD driver has no netlink interface here: load it with 'modprobe nbd'; it cannot be \
                 reached from a container with a network of its own",
            )
        })?;
        let number = find_attribute(&answer, libc::CTRL_ATTR_FAMILY_ID as u16);
        let number = number.and_then(|value| Some(u16::from_ne_bytes(*value.first_chunk()?)));
        driver.family = number.ok_or_else(|| malformed("a family without a number"))?;
        Ok(driver)
    }

    /// Connects the device with this index.
    ///
    /// # Errors
    /// `EBUSY` if it is connected, or open; `EPERM` without the capability `CAP_SYS_ADMIN`.
    pub(super) fn connect(&mut self, index: u32, connection: &Connection<'_>) -> io::Result<()> {
        let socket = attribute(SOCKET_FD, &connection.socket.as_raw_fd().to_ne_bytes());
        let attributes = [
            attribute(INDEX, &index.to_ne_bytes()),
            attribute(SIZE_BYTES, &connection.size.to_ne_bytes()),
            attribute(BLOCK_SIZE_BYTES, &connection.block_size.to_ne_bytes()),
            attribute(SERVER_FLAGS, &u64::from(connection.flags).to_ne_bytes()),
            attribute(SOCKETS, &attribute(SOCKET_ITEM, &socket)),
        ];
        self.call(CONNECT, &attributes.concat()).map(drop)
    }

    /// Disconnects the device with this index, if it is connected: its requests in flight fail, and the server is told.
    ///
    /// # Errors
    /// `EPERM` without the capability `CAP_SYS_ADMIN`; `EINVAL` if there is no such device.
    pub(super) fn disconnect(&mut self, index: u32) -> io::Result<()> {
        self.call(DISCONNECT, &attribute(INDEX, &index.to_ne_bytes())).map(drop)
    }

    /// Makes a request, and returns the attributes of the answer, if there is one besides the success.
    fn call(&mut self, command: u8, attributes: &[u8]) -> io::Result<Vec<u8>> {
        self.sequence += 1;
        let request = message(self.family, self.sequence, command, attributes);
        let sent = self.socket.send(&request)?;
        if sent != request.len() {
            return Err(malformed("a request that was cut short"));
        }
        let mut answer = Vec::new();
        let mut space = vec![0; LONGEST];
        loop {
            let length = match (&self.socket).read(&mut space) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                length => length?,
            };
            let received = space.get(..length).unwrap_or_default();
            match take_answers(received, self.sequence, &mut answer)? {
                Some(0) => return Ok(answer),
                Some(errno) => return Err(io::Error::from_raw_os_error(errno)),
                None => {}
            }
        }
    }
}

/// What to say of a request that the kernel has refused.
pub(super) fn reason(error: &io::Error) -> String {
    if error.raw_os_error() == Some(libc::EPERM) {
        return format!("{}; it needs root (CAP_SYS_ADMIN)", cause(error));
    }
    cause(error)
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("netlink: {what}"))
}

/// A value with its kind and length.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = (ATTRIBUTE_HEADER + value.len()) as u16;
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend_from_slice(value);
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
    bytes
}

/// A request that is to be acknowledged.
fn message(family: u16, sequence: u32, command: u8, attributes: &[u8]) -> Vec<u8> {
    let length = (HEADER + GENERIC_HEADER + attributes.len()) as u32;
    let flags = (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16;
    let mut bytes = length.to_ne_bytes().to_vec();
    bytes.extend(family.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    // The sender's number, which the kernel knows, and what follows the command: its version and two unused bytes.
    bytes.extend(0_u32.to_ne_bytes());
    bytes.extend([command, VERSION, 0, 0]);
    bytes.extend_from_slice(attributes);
    bytes
}

/// Takes the answers to the request `sequence` from what was received: the attributes of one that has any, and the
/// number of the error, 0 for success, which is the last.
fn take_answers(
    mut received: &[u8],
    sequence: u32,
    answer: &mut Vec<u8>,
) -> io::Result<Option<i32>> {
    while !received.is_empty() {
        let short = || malformed("an answer that was cut short");
        let word = |at: usize| -> Option<[u8; 4]> { received.get(at..)?.first_chunk().copied() };
        let length = word(0).map(u32::from_ne_bytes).ok_or_else(short)? as usize;
        let kind = word(4).and_then(|word| Some(u16::from_ne_bytes(*word.first_chunk()?)));
        let kind = kind.ok_or_else(short)?;
        let number = word(8).map(u32::from_ne_bytes).ok_or_else(short)?;
        let body = received.get(HEADER..length).ok_or_else(short)?;
        if number == sequence {
            if i32::from(kind) == libc::NLMSG_ERROR {
                let error = body.first_chunk().copied().map(i32::from_ne_bytes);
                return error.map(|error| Some(error.wrapping_neg())).ok_or_else(short);
            }
            body.get(GENERIC_HEADER..).ok_or_else(short)?.clone_into(answer);
        }
        received = received.get(length.next_multiple_of(ALIGNMENT)..).unwrap_or_default();
    }
    Ok(None)
}

/// The value of the first attribute of this kind.
fn find_attribute(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
    loop {
        let length = usize::from(u16::from_ne_bytes(*attributes.first_chunk()?));
        let found = u16::from_ne_bytes(*attributes.get(2..)?.first_chunk()?);
        let value = attributes.get(ATTRIBUTE_HEADER..length)?;
        if found == kind {
            return Some(value);
        }
        attributes = attributes.get(length.next_multiple_of(ALIGNMENT)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages as the kernel sends them: their kind, number and body.
    fn received(messages: &[(u16, u32, &[u8])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (kind, number, body) in messages {
            bytes.extend(((HEADER + body.len()) as u32).to_ne_bytes());
            bytes.extend(kind.to_ne_bytes());
            bytes.extend([0; 2]);
            bytes.extend(number.to_ne_bytes());
            bytes.extend([0; 4]);
            bytes.extend_from_slice(body);
            bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
        }
        bytes
    }

    const ERROR: u16 = libc::NLMSG_ERROR as u16;

    #[test]
    fn the_kernel_knows_families_by_name_and_refuses_unknown_ones() {
        let generic = Some(Protocol::from(libc::NETLINK_GENERIC));
        let socket = Socket::new(Domain::from(libc::AF_NETLINK), Type::DGRAM, generic).unwrap();
        let mut driver = Driver { socket, family: libc::GENL_ID_CTRL as u16, sequence: 6 };
        let ask = |driver: &mut Driver, name: &[u8]| {
            let name = attribute(libc::CTRL_ATTR_FAMILY_NAME as u16, name);
            driver.call(libc::CTRL_CMD_GETFAMILY as u8, &name)
        };
        let answer = ask(&mut driver, b"nlctrl\0").unwrap();
        let number = find_attribute(&answer, libc::CTRL_ATTR_FAMILY_ID as u16).unwrap();
        assert_eq!(number, (libc::GENL_ID_CTRL as u16).to_ne_bytes());
        assert_eq!(ask(&mut driver, b"nosuch\0").unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn answers_to_other_requests_are_passed_over() {
        let mut answer = Vec::new();
        let body = [&[1, 1, 0, 0][..], &attribute(1, &[7; 3])].concat();
        let busy = (-libc::EBUSY).to_ne_bytes();
        let bytes = received(&[(ERROR, 4, &busy), (40, 4, &[9; 8]), (40, 5, &body)]);
        assert_eq!(take_answers(&bytes, 5, &mut answer).unwrap(), None);
        assert_eq!(find_attribute(&answer, 1), Some(&[7; 3][..]));
        assert_eq!(find_attribute(&answer, 2), None);
        let bytes = received(&[(ERROR, 5, &busy)]);
        assert_eq!(take_answers(&bytes, 5, &mut answer).unwrap(), Some(libc::EBUSY));
        let bytes = received(&[(ERROR, 5, &[0; 4])]);
        assert_eq!(take_answers(&bytes, 5, &mut answer).unwrap(), Some(0));
    }

    #[test]
    fn what_is_cut_short_is_an_error_wherever() {
        let whole = received(&[(40, 5, &[0; 8]), (ERROR, 5, &[0; 4])]);
        let first = HEADER + 8;
        for length in 1..whole.len() {
            let taken = take_answers(&whole[..length], 5, &mut Vec::new());
            assert_eq!(taken.is_ok(), length == first, "{length}");
        }
        let attributes = [attribute(1, &[1; 5]), attribute(2, &[2; 4])].concat();
        for length in 0..attributes.len() {
            assert_eq!(find_attribute(&attributes[..length], 2), None, "{length}");
        }
        // A length that leads nowhere.
        assert_eq!(find_attribute(&[0; 64], 2), None);
        assert!(take_answers(&[0; 64], 5, &mut Vec::new()).is_err());
    }
}
