//! Pointers to blocks, and the header extension.

use crate::bytes;
use crate::offset::HostOffset;

/// The first 16 bytes of a block's BLAKE3 hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BlockHash(pub [u8; 16]);

impl BlockHash {
    /// The hash of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self::first_half(blake3::hash(bytes).as_bytes())
    }

    pub(super) fn first_half(hash: &[u8; 32]) -> Self {
        let mut half = [0; 16];
        half.copy_from_slice(&hash[..16]);
        Self(half)
    }
}

/// Computes a [`BlockHash`] incrementally.
#[derive(Clone, Debug, Default)]
pub struct BlockHasher(blake3::Hasher);

impl BlockHasher {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The hash of everything added.
    pub fn finish(&self) -> BlockHash {
        BlockHash::first_half(self.0.finalize().as_bytes())
    }
}

/// The place of a block, and the hash of its contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPointer {
    /// The layer whose file holds the block, counted from the base.
    pub layer: u16,
    /// The block's first byte in that file.
    pub offset: HostOffset,
    /// Its length in bytes; not 0.
    pub length: u32,
    /// The hash of its bytes.
    pub hash: BlockHash,
}

impl BlockPointer {
    /// Bytes of a pointer.
    pub const BYTES: usize = 32;

    /// Whether it points to a block at all.
    fn is_some(&self) -> bool {
        self.length != 0
    }

    /// Appends a pointer, or one to nothing.
    pub(super) fn write(pointer: Option<&Self>, out: &mut Vec<u8>) {
        let Some(pointer) = pointer else {
            out.extend([0; Self::BYTES]);
            return;
        };
        out.extend(pointer.offset.get().to_be_bytes());
        out.extend(pointer.length.to_be_bytes());
        out.extend(pointer.layer.to_be_bytes());
        out.extend([0; 2]);
        out.extend(pointer.hash.0);
    }
}

/// The header extension that points to the root of an image's index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexExtension {
    /// First byte of the clusters that hold the blocks in this file.
    pub area_offset: HostOffset,
    /// Bytes of those clusters: a multiple of the cluster size.
    pub area_length: u64,
    /// The root's first byte, in the area.
    pub root_offset: HostOffset,
    /// The root's length in bytes.
    pub root_length: u32,
    /// The hash of the root.
    pub root_hash: BlockHash,
}

impl IndexExtension {
    /// The extension's type: "IBX1".
    pub const MAGIC: u32 = 0x4942_5831;
    /// Bytes of its data.
    pub const BYTES: usize = 48;
    /// The version written and understood here.
    const VERSION: u16 = 1;

    /// The extension in `data`; `None` if it is of another version or not valid, in which case the image has no index.
    pub(crate) fn parse(data: &[u8]) -> Option<Self> {
        if data.len() != Self::BYTES || bytes::be16(data, 0)? != Self::VERSION {
            return None;
        }
        if bytes::be16(data, 2)? != 0 {
            return None;
        }
        let extension = Self {
            root_length: bytes::be32(data, 4)?,
            area_offset: HostOffset::new(bytes::be64(data, 8)?),
            area_length: bytes::be64(data, 16)?,
            root_offset: HostOffset::new(bytes::be64(data, 24)?),
            root_hash: BlockHash(bytes::array(data, 32)?),
        };
        let (area, root) = (extension.area_offset.get(), extension.root_offset.get());
        let area_end = area.checked_add(extension.area_length)?;
        let root_end = root.checked_add(u64::from(extension.root_length))?;
        (extension.root_length != 0 && root >= area && root_end <= area_end).then_some(extension)
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut data = Vec::with_capacity(Self::BYTES);
        data.extend(Self::VERSION.to_be_bytes());
        data.extend([0; 2]);
        data.extend(self.root_length.to_be_bytes());
        data.extend(self.area_offset.get().to_be_bytes());
        data.extend(self.area_length.to_be_bytes());
        data.extend(self.root_offset.get().to_be_bytes());
        data.extend(self.root_hash.0);
        data
    }
}

/// Reads the fields of a block one after another.
pub(crate) struct Fields<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Fields<'a> {
    /// The fields after the block's magic, if that is what it starts with.
    pub(crate) fn after(magic: [u8; 4], bytes: &'a [u8]) -> Option<Self> {
        bytes.starts_with(&magic).then_some(Self { bytes, at: magic.len() })
    }

    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(crate) fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let taken = self.bytes.get(self.at..self.at.checked_add(length)?)?;
        self.at += length;
        Some(taken)
    }

    pub(super) fn u8(&mut self) -> Option<u8> {
        self.take(1)?.first().copied()
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        bytes::be16(self.take(2)?, 0)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        bytes::be32(self.take(4)?, 0)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        bytes::be64(self.take(8)?, 0)
    }

    pub(super) fn hash(&mut self) -> Option<BlockHash> {
        bytes::array(self.take(16)?, 0).map(BlockHash)
    }

    /// Reads a pointer into `place`, or `None` if it points to nothing.
    pub(super) fn pointer(&mut self, place: &mut Option<BlockPointer>) -> Option<()> {
        let offset = HostOffset::new(self.u64()?);
        let length = self.u32()?;
        let layer = self.u16()?;
        self.take(2)?;
        let hash = self.hash()?;
        *place = Some(BlockPointer { layer, offset, length, hash }).filter(BlockPointer::is_some);
        Some(())
    }

    /// Skips padding up to a multiple of 8 bytes from the block's start.
    pub(crate) fn align(&mut self) -> Option<()> {
        self.take(self.at.next_multiple_of(8) - self.at).map(|_| ())
    }

    pub(crate) fn rest(&self) -> usize {
        self.bytes.len() - self.at.min(self.bytes.len())
    }
}

/// Appends padding up to a multiple of 8 bytes.
pub(crate) fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(8), 0);
}
