//! The records of all images, a few bytes each.

use crate::probe::{Facts, Id, Kind};
use crate::problem::Problems;
use isobath_formats::Format;
use isobath_qcow2::probe::Foreign;
use rustc_hash::FxHashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// No image: the `parent` of an image without a backing file.
pub(crate) const NONE: u32 = u32::MAX;

/// Flags of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Flags(u16);

impl Flags {
    /// Not a qcow2 image: the end of a chain.
    pub(crate) const RAW: Self = Self(1);
    /// Outside the surveyed directories, found through a name in a header.
    pub(crate) const OUTSIDE: Self = Self(1 << 1);
    /// Its backing file is treated as raw whatever it contains.
    pub(crate) const RAW_BACKING: Self = Self(1 << 2);
    /// Its header says that its backing file is qcow2.
    pub(crate) const QCOW2_BACKING: Self = Self(1 << 3);
    /// It has a backing file that could not be followed, or is part of a loop.
    pub(crate) const CUT: Self = Self(1 << 4);
    /// It begins like a qcow2 image, but its header is unusable.
    pub(crate) const BROKEN: Self = Self(1 << 5);
    /// Its header refers to a direct-access index.
    pub(crate) const INDEXED: Self = Self(1 << 6);
    /// Its clusters may belong to internal snapshots or to a data file.
    pub(crate) const SHARED_CLUSTERS: Self = Self(1 << 7);
    /// It is encrypted.
    pub(crate) const ENCRYPTED: Self = Self(1 << 8);
    /// The same file under another name; not counted.
    pub(crate) const DUPLICATE: Self = Self(1 << 9);
    /// Its L2 entries are 16 bytes long.
    pub(crate) const EXTENDED_L2: Self = Self(1 << 10);
    /// Its birth time is unknown; the last write is used instead.
    pub(crate) const NO_BIRTH: Self = Self(1 << 11);
    /// It begins like an image in a format that is not supported.
    pub(crate) const FOREIGN: Self = Self(1 << 12);
    /// What is below it is in an object store.
    pub(crate) const STORED: Self = Self(1 << 13);

    pub(crate) fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    pub(crate) fn set(&mut self, other: Self, on: bool) {
        if on {
            self.0 |= other.0;
        }
    }
}

/// An image, or a base of another format: 72 bytes plus its file's name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Image {
    inode: u64,
    /// The file that its header names, until it is found among the images.
    backing_inode: u64,
    /// The disk's size in bytes.
    pub(crate) disk: u64,
    /// Bytes that the file occupies.
    pub(crate) held: u64,
    /// Seconds since 1970.
    pub(crate) born: i64,
    name_start: u64,
    directory: u32,
    /// The backing file among the images, or [`NONE`].
    pub(crate) parent: u32,
    device: u16,
    backing_device: u16,
    name_length: u16,
    pub(crate) flags: Flags,
    pub(crate) cluster_bits: u8,
    has_backing: bool,
}

/// The images, with their names in one arena and each directory stored once.
#[derive(Debug, Default)]
pub(crate) struct Fleet {
    images: Vec<Image>,
    names: Vec<u8>,
    directories: Vec<Box<[u8]>>,
    directory_numbers: FxHashMap<Box<[u8]>, u32>,
    devices: Vec<u64>,
    pub(crate) problems: Problems,
}

/// The result of probing a file.
pub(crate) struct Seen {
    pub(crate) path: PathBuf,
    pub(crate) facts: Facts,
    pub(crate) kind: Kind,
    /// The file that its backing file's name resolves to.
    pub(crate) backing: Option<Id>,
    /// Its backing file cannot be followed.
    pub(crate) cut: bool,
    /// What is below it is in an object store.
    pub(crate) stored: bool,
    pub(crate) outside: bool,
}

impl Fleet {
    /// Adds a file. Returns its number, or `None` if there are too many files.
    pub(crate) fn add(&mut self, seen: &Seen, use_births: bool) -> Option<u32> {
        let number = u32::try_from(self.images.len()).ok().filter(|&number| number != NONE)?;
        let bytes = seen.path.as_os_str().as_bytes();
        let name_start = bytes.iter().rposition(|&byte| byte == b'/').map_or(0, |at| at + 1);
        let (directory, name) = bytes.split_at_checked(name_start)?;
        let mut flags = Flags::default();
        flags.set(Flags::OUTSIDE, seen.outside);
        flags.set(Flags::CUT, seen.cut);
        flags.set(Flags::STORED, seen.stored);
        let (mut disk, mut cluster_bits) = (seen.facts.length, 16);
        match &seen.kind {
            Kind::Other(format) => {
                flags.set(Flags::RAW, true);
                let supported = |it| it == Foreign::Luks || Format::detected(it).is_some();
                flags.set(Flags::FOREIGN, format.is_some_and(|it| !supported(it)));
            }
            Kind::Broken(_) => {
                flags.set(Flags::BROKEN, true);
                flags.set(Flags::CUT, true);
                disk = 0;
            }
            Kind::Qcow2(summary) => {
                disk = summary.disk;
                cluster_bits = summary.geometry.cluster_bits() as u8;
                flags.set(Flags::EXTENDED_L2, summary.geometry.extended_l2());
                flags.set(Flags::INDEXED, summary.indexed);
                flags.set(Flags::ENCRYPTED, summary.encrypted);
                flags.set(Flags::SHARED_CLUSTERS, summary.internal_snapshots);
                if let Some(backing) = &summary.backing {
                    flags.set(Flags::RAW_BACKING, backing.other_format);
                    flags.set(Flags::QCOW2_BACKING, backing.qcow2);
                }
            }
        }
        let born = seen.facts.born.filter(|_| use_births);
        flags.set(Flags::NO_BIRTH, born.is_none());
        let image = Image {
            inode: seen.facts.id.inode,
            backing_inode: seen.backing.map_or(0, |id| id.inode),
            disk,
            held: seen.facts.held,
            born: born.unwrap_or(seen.facts.modified),
            name_start: self.names.len() as u64,
            directory: self.directory(directory)?,
            parent: NONE,
            device: self.device(seen.facts.id.device)?,
            backing_device: seen.backing.map_or(Some(0), |id| self.device(id.device))?,
            name_length: u16::try_from(name.len()).ok()?,
            flags,
            cluster_bits,
            has_backing: seen.backing.is_some(),
        };
        self.names.extend_from_slice(name);
        self.images.push(image);
        Some(number)
    }

    fn directory(&mut self, name: &[u8]) -> Option<u32> {
        if let Some(&number) = self.directory_numbers.get(name) {
            return Some(number);
        }
        let number = u32::try_from(self.directories.len()).ok()?;
        self.directories.push(name.into());
        self.directory_numbers.insert(name.into(), number);
        Some(number)
    }

    fn device(&mut self, device: u64) -> Option<u16> {
        if let Some(at) = self.devices.iter().position(|&one| one == device) {
            return u16::try_from(at).ok();
        }
        let number = u16::try_from(self.devices.len()).ok()?;
        self.devices.push(device);
        Some(number)
    }

    /// Frees the memory that is only needed for adding images.
    pub(crate) fn settle(&mut self) {
        self.directory_numbers = FxHashMap::default();
        self.images.shrink_to_fit();
        self.names.shrink_to_fit();
        self.directories.shrink_to_fit();
    }

    pub(crate) fn len(&self) -> usize {
        self.images.len()
    }

    /// An image. It exists, since the fleet assigned the number.
    #[allow(clippy::indexing_slicing, reason = "numbers come from `add` and are never taken back")]
    pub(crate) fn image(&self, number: u32) -> &Image {
        &self.images[number as usize]
    }

    #[allow(clippy::indexing_slicing, reason = "numbers come from `add` and are never taken back")]
    pub(crate) fn image_mut(&mut self, number: u32) -> &mut Image {
        &mut self.images[number as usize]
    }

    /// The numbers of all images except duplicates.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.images
            .iter()
            .zip(0_u32..)
            .filter(|(image, _)| !image.flags.has(Flags::DUPLICATE))
            .map(|(_, number)| number)
    }

    /// The numbers of all images, including duplicates.
    pub(crate) fn all_numbers(&self) -> std::ops::Range<u32> {
        0..self.images.len() as u32
    }

    pub(crate) fn id(&self, number: u32) -> Id {
        let image = self.image(number);
        Id { device: self.device_of(image.device), inode: image.inode }
    }

    /// The backing file that the image's header names, if it was found.
    pub(crate) fn backing_id(&self, number: u32) -> Option<Id> {
        let image = self.image(number);
        image.has_backing.then(|| Id {
            device: self.device_of(image.backing_device),
            inode: image.backing_inode,
        })
    }

    fn device_of(&self, number: u16) -> u64 {
        self.devices.get(usize::from(number)).copied().unwrap_or(0)
    }

    /// The file's path, as bytes.
    pub(crate) fn path_bytes(&self, number: u32) -> Vec<u8> {
        let image = self.image(number);
        let directory = self.directories.get(image.directory as usize).map_or(&[][..], |d| d);
        let start = image.name_start as usize;
        let name = self.names.get(start..start + usize::from(image.name_length));
        [directory, name.unwrap_or_default()].concat()
    }

    /// The file's path.
    pub(crate) fn path(&self, number: u32) -> PathBuf {
        Path::new(OsStr::from_bytes(&self.path_bytes(number))).to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_kept_in_few_bytes() {
        assert!(size_of::<Image>() <= 72);
    }

    #[test]
    fn names_come_back_as_they_were() {
        let mut fleet = Fleet::default();
        let facts = Facts {
            id: Id { device: 7, inode: 9 },
            length: 1,
            held: 512,
            born: Some(5),
            modified: 6,
        };
        for name in [&b"/a/b\xff/c\xfe.qcow2"[..], b"plain", b"./x/y"] {
            let seen = Seen {
                path: OsStr::from_bytes(name).into(),
                facts,
                kind: Kind::Other(None),
                backing: Some(Id { device: 8, inode: 1 }),
                cut: false,
                stored: false,
                outside: false,
            };
            let number = fleet.add(&seen, true).unwrap();
            assert_eq!(fleet.path_bytes(number), name);
            assert_eq!(fleet.id(number), facts.id);
            assert_eq!(fleet.backing_id(number), Some(Id { device: 8, inode: 1 }));
        }
    }
}
