//! What a server and the keeper of its device tell each other, over a stream socket.

use super::image::{Image, ImageFile};
use super::wire::Parameters;
use isobath_storage::FileId;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The longest text.
const LONGEST: usize = 16 << 10;

/// What the server wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The server is about to open the image of this name, an absolute path, for the device that waits.
    Open { name: PathBuf },
    /// The server has opened the file that this identifies, and has it locked. It is about to change it.
    Locked { id: FileId },
    /// If a device waits for another server, and is of this image, this one may take it over.
    Look { parameters: Parameters, image: Image },
    /// This server takes it over.
    Adopt,
    /// The queues of the device that it has taken over are about to be mapped and served.
    Serve,
    /// A device with at most so many queues of so many requests.
    Add { queues: u16, depth: u16, max_bytes: u32 },
    /// The device is to become a disk, or one that was taken over is to go on.
    Start { parameters: Parameters },
    /// Wait until nobody uses the disk, and then let nobody mount it any more.
    Release,
    /// What the kernel still has of the disk is to be written.
    WriteBack,
    /// The disk is to be removed.
    Stop,
    /// The device is to be deleted, although the server has it open.
    DeleteOpen,
    /// The same, once the server has closed it.
    Delete,
}

/// What the keeper answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// It has what it needs, or has done what was ordered.
    Done,
    /// A device waits for this server, with so many queues of so many requests.
    Waits { queues: u16, depth: u16 },
    /// A device waits for this server, and nobody knows how the last one has left the image.
    Unknown,
    /// It has added the device with this number and so many queues, or taken it over, and sends its descriptor with the
    /// next byte.
    Added { number: u32, queues: u16 },
    /// It waits: the disk is used by these.
    InUse(String),
    /// It could not do what was ordered, for this reason.
    Failed(String),
}

/// What precedes a message's bytes.
#[derive(Clone, Copy, Debug, IntoBytes, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    kind: u32,
    numbers: [u32; 4],
    length: u32,
}

mod kind {
    pub(crate) const ADD: u32 = 1;
    pub(crate) const START: u32 = 2;
    pub(crate) const RELEASE: u32 = 3;
    pub(crate) const STOP: u32 = 4;
    pub(crate) const DELETE: u32 = 5;
    pub(crate) const DELETE_OPEN: u32 = 6;
    pub(crate) const WRITE_BACK: u32 = 7;
    pub(crate) const OPEN: u32 = 8;
    pub(crate) const LOOK: u32 = 9;
    pub(crate) const ADOPT: u32 = 10;
    pub(crate) const SERVE: u32 = 11;
    pub(crate) const LOCKED: u32 = 12;
    pub(crate) const DONE: u32 = 16;
    pub(crate) const ADDED: u32 = 17;
    pub(crate) const IN_USE: u32 = 18;
    pub(crate) const FAILED: u32 = 19;
    pub(crate) const WAITS: u32 = 20;
    pub(crate) const UNKNOWN: u32 = 21;
}

fn send(stream: &mut impl Write, kind: u32, numbers: [u32; 4], bytes: &[u8]) -> io::Result<()> {
    let header = Header { kind, numbers, length: bytes.len() as u32 };
    stream.write_all(&[header.as_bytes(), bytes].concat())
}

/// The next message; `None` if the other end is closed.
fn receive(stream: &mut impl Read) -> io::Result<Option<(Header, Vec<u8>)>> {
    let mut header = [0; size_of::<Header>()];
    match stream.read_exact(&mut header) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
        Err(error) => return Err(error),
    }
    let header: Header = zerocopy::transmute!(header);
    let length = header.length as usize;
    if length > LONGEST {
        return Err(invalid());
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    Ok(Some((header, bytes)))
}

fn invalid() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the message is of no known kind")
}

impl Order {
    pub(crate) fn send(&self, stream: &mut impl Write) -> io::Result<()> {
        let mut sought;
        let (kind, numbers, bytes) = match self {
            Self::Open { name } => (kind::OPEN, [0; 4], name.as_os_str().as_bytes()),
            Self::Locked { id: FileId { device, inode } } => {
                sought = [device.to_ne_bytes(), inode.to_ne_bytes()].concat();
                (kind::LOCKED, [0; 4], &sought[..])
            }
            Self::Look { parameters, image: Image { files, below } } => {
                sought = [parameters.as_bytes(), below.as_bytes()].concat();
                for ImageFile { name, id: FileId { device, inode }, .. } in files {
                    let name = name.as_os_str().as_bytes();
                    sought.extend_from_slice([*device, *inode, name.len() as u64].as_bytes());
                    sought.extend_from_slice(name);
                }
                (kind::LOOK, [0; 4], &sought[..])
            }
            Self::Adopt => (kind::ADOPT, [0; 4], &[][..]),
            Self::Serve => (kind::SERVE, [0; 4], &[][..]),
            Self::Add { queues, depth, max_bytes } => {
                (kind::ADD, [u32::from(*queues), u32::from(*depth), *max_bytes, 0], &[][..])
            }
            Self::Start { parameters } => (kind::START, [0; 4], parameters.as_bytes()),
            Self::Release => (kind::RELEASE, [0; 4], &[][..]),
            Self::WriteBack => (kind::WRITE_BACK, [0; 4], &[][..]),
            Self::Stop => (kind::STOP, [0; 4], &[][..]),
            Self::DeleteOpen => (kind::DELETE_OPEN, [0; 4], &[][..]),
            Self::Delete => (kind::DELETE, [0; 4], &[][..]),
        };
        send(stream, kind, numbers, bytes)
    }

    /// The next order; `None` if the server has ended.
    pub(crate) fn receive(stream: &mut impl Read) -> io::Result<Option<Self>> {
        let Some((Header { kind, numbers: [a, b, c, _], .. }, bytes)) = receive(stream)? else {
            return Ok(None);
        };
        let short = |number: u32| u16::try_from(number).map_err(|_| invalid());
        Ok(Some(match kind {
            kind::OPEN => Self::Open { name: OsString::from_vec(bytes).into() },
            kind::LOCKED => {
                let [device, inode] = <[u64; 2]>::read_from_bytes(&bytes).map_err(|_| invalid())?;
                Self::Locked { id: FileId { device, inode } }
            }
            kind::LOOK => sought(&bytes).ok_or_else(invalid)?,
            kind::ADOPT => Self::Adopt,
            kind::SERVE => Self::Serve,
            kind::ADD => Self::Add { queues: short(a)?, depth: short(b)?, max_bytes: c },
            kind::START => {
                let parameters = Parameters::read_from_bytes(&bytes).map_err(|_| invalid())?;
                Self::Start { parameters }
            }
            kind::RELEASE => Self::Release,
            kind::WRITE_BACK => Self::WriteBack,
            kind::STOP => Self::Stop,
            kind::DELETE_OPEN => Self::DeleteOpen,
            kind::DELETE => Self::Delete,
            _ => return Err(invalid()),
        }))
    }
}

/// The [`Order::Look`] of these bytes.
fn sought(bytes: &[u8]) -> Option<Order> {
    let (parameters, rest) = Parameters::read_from_prefix(bytes).ok()?;
    let (below, mut rest) = u64::read_from_prefix(rest).ok()?;
    let mut files = Vec::new();
    while !rest.is_empty() {
        let ([device, inode, length], behind) = <[u64; 3]>::read_from_prefix(rest).ok()?;
        let (name, behind) = behind.split_at_checked(usize::try_from(length).ok()?)?;
        let name = OsString::from_vec(name.to_vec()).into();
        files.push(ImageFile { name, id: FileId { device, inode }, seen: None });
        rest = behind;
    }
    Some(Order::Look { parameters, image: Image { files, below } })
}

impl Report {
    pub(crate) fn send(&self, stream: &mut impl Write) -> io::Result<()> {
        /// What fits of a text.
        fn cut(text: &str) -> &[u8] {
            &text.as_bytes()[..text.floor_char_boundary(LONGEST)]
        }
        let (kind, numbers, bytes) = match self {
            Self::Done => (kind::DONE, [0; 4], &[][..]),
            Self::Waits { queues, depth } => {
                (kind::WAITS, [u32::from(*queues), u32::from(*depth), 0, 0], &[][..])
            }
            Self::Unknown => (kind::UNKNOWN, [0; 4], &[][..]),
            Self::Added { number, queues } => {
                (kind::ADDED, [*number, u32::from(*queues), 0, 0], &[][..])
            }
            Self::InUse(text) => (kind::IN_USE, [0; 4], cut(text)),
            Self::Failed(text) => (kind::FAILED, [0; 4], cut(text)),
        };
        send(stream, kind, numbers, bytes)
    }

    /// The next report; `None` if the keeper has ended.
    pub(crate) fn receive(stream: &mut impl Read) -> io::Result<Option<Self>> {
        let Some((Header { kind, numbers: [a, b, ..], .. }, bytes)) = receive(stream)? else {
            return Ok(None);
        };
        let text = || String::from_utf8_lossy(&bytes).into_owned();
        let short = |number: u32| u16::try_from(number).map_err(|_| invalid());
        Ok(Some(match kind {
            kind::DONE => Self::Done,
            kind::WAITS => Self::Waits { queues: short(a)?, depth: short(b)? },
            kind::UNKNOWN => Self::Unknown,
            kind::ADDED => Self::Added { number: a, queues: short(b)? },
            kind::IN_USE => Self::InUse(text()),
            kind::FAILED => Self::Failed(text()),
            _ => return Err(invalid()),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    #[test]
    fn what_is_sent_arrives() {
        let parameters = Parameters { length: 64, types: 3, ..Parameters::new_zeroed() };
        let id = FileId { device: 1 << 40, inode: u64::MAX };
        let file = |name: &&str| ImageFile { name: name.into(), id, seen: None };
        let image =
            |names: &[&str]| Image { files: names.iter().map(file).collect(), below: 1 << 50 };
        let orders = [
            Order::Open { name: "/images/a b".into() },
            Order::Locked { id },
            Order::Look { parameters, image: image(&["/images/a b", "/images/data"]) },
            Order::Look { parameters, image: image(&[""]) },
            Order::Adopt,
            Order::Serve,
            Order::Add { queues: 2, depth: 64, max_bytes: 1 << 20 },
            Order::Start { parameters },
            Order::Release,
            Order::WriteBack,
            Order::Stop,
            Order::DeleteOpen,
            Order::Delete,
        ];
        let mut sent = Vec::new();
        for order in &orders {
            order.send(&mut sent).unwrap();
        }
        let mut stream = &*sent;
        for order in orders {
            assert_eq!(Order::receive(&mut stream).unwrap(), Some(order));
        }
        assert_eq!(Order::receive(&mut stream).unwrap(), None);
        let reports = [
            Report::Done,
            Report::Waits { queues: 4, depth: 64 },
            Report::Unknown,
            Report::Added { number: 3, queues: 2 },
            Report::InUse("mounted".into()),
            Report::Failed("é".repeat(LONGEST)),
        ];
        let mut sent = Vec::new();
        for report in &reports {
            report.send(&mut sent).unwrap();
        }
        let mut stream = &*sent;
        for report in &reports[..5] {
            assert_eq!(Report::receive(&mut stream).unwrap().as_ref(), Some(report));
        }
        let cut = Report::receive(&mut stream).unwrap();
        assert_eq!(cut, Some(Report::Failed("é".repeat(LONGEST / 2))));
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let orders = [
            (99, [0; 4], 0),
            (1, [1 << 16, 0, 0, 0], 0),
            (1, [0, 1 << 16, 0, 0], 0),
            (2, [0; 4], 8),
            (12, [0; 4], 15),
            (9, [0; 4], 64 + 7),
            (9, [0; 4], 64 + 8 + 23),
        ];
        for (kind, numbers, length) in orders {
            let mut sent = Vec::new();
            send(&mut sent, kind, numbers, &vec![0; length]).unwrap();
            let error = Order::receive(&mut &*sent).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
        let mut look = Vec::new();
        let file =
            ImageFile { name: "/images/a".into(), id: FileId { device: 1, inode: 2 }, seen: None };
        let image = Image { files: vec![file], below: 3 };
        let parameters = Parameters::new_zeroed();
        Order::Look { parameters, image }.send(&mut look).unwrap();
        let whole = &look[size_of::<Header>()..];
        assert!(sought(whole).is_some());
        assert_eq!(sought(&whole[..whole.len() - 1]), None, "a name is not all there");
        let mut sent = Vec::new();
        send(&mut sent, kind::WAITS, [1 << 16, 0, 0, 0], &[]).unwrap();
        assert!(Report::receive(&mut &*sent).is_err());
        let mut sent = Vec::new();
        send(&mut sent, kind::FAILED, [0; 4], &vec![0; LONGEST + 1]).unwrap();
        assert!(Report::receive(&mut &*sent).is_err());
        assert!(Order::receive(&mut &sent[..30]).is_err());
    }
}
