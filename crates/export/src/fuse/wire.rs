//! The kernel's FUSE protocol, major version 7, as far as an export of one file needs it
//! (`include/uapi/linux/fuse.h`). All numbers are in the host's byte order.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The protocol's major version.
pub(crate) const MAJOR: u32 = 7;
/// The latest minor version that this implementation knows.
pub(crate) const MINOR: u32 = 38;
/// The minimum minor version of the kernel, that of Linux 5.4. The executor needs a later kernel anyway.
pub(crate) const LEAST_MINOR: u32 = 31;
/// The inode number of the only file.
pub(crate) const ROOT: u64 = 1;
/// `FUSE_DEV_IOC_CLONE`: attaches a new descriptor to the connection of an existing one.
pub(crate) const IOCTL_CLONE: u64 = 0x8004_e500;

/// Kinds of requests.
pub(crate) mod opcode {
    pub(crate) const FORGET: u32 = 2;
    pub(crate) const GETATTR: u32 = 3;
    pub(crate) const SETATTR: u32 = 4;
    pub(crate) const OPEN: u32 = 14;
    pub(crate) const READ: u32 = 15;
    pub(crate) const WRITE: u32 = 16;
    pub(crate) const STATFS: u32 = 17;
    pub(crate) const RELEASE: u32 = 18;
    pub(crate) const FSYNC: u32 = 20;
    pub(crate) const INIT: u32 = 26;
    pub(crate) const DESTROY: u32 = 38;
    pub(crate) const BATCH_FORGET: u32 = 42;
    pub(crate) const FALLOCATE: u32 = 43;
    pub(crate) const LSEEK: u32 = 46;
}

/// Flags negotiated by `INIT`.
pub(crate) mod init_flag {
    /// Concurrent reads of one file.
    pub(crate) const ASYNC_READ: u32 = 1 << 0;
    /// Writes of more than a page.
    pub(crate) const BIG_WRITES: u32 = 1 << 5;
    /// Asynchronous direct I/O is submitted asynchronously.
    pub(crate) const ASYNC_DIO: u32 = 1 << 15;
    /// The server sets the maximum number of pages of a request.
    pub(crate) const MAX_PAGES: u32 = 1 << 22;
    /// The server clears set-user-ID bits, so that the kernel need not ask before every write.
    pub(crate) const HANDLE_KILLPRIV_V2: u32 = 1 << 28;
}

/// Flags in the reply to `OPEN`.
pub(crate) mod open_flag {
    /// Reads and writes bypass the page cache.
    pub(crate) const DIRECT_IO: u32 = 1 << 0;
    /// Direct writes may run in parallel.
    pub(crate) const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// The attributes that `SETATTR` changes.
pub(crate) mod set {
    pub(crate) const MODE: u32 = 1 << 0;
    pub(crate) const UID: u32 = 1 << 1;
    pub(crate) const GID: u32 = 1 << 2;
    pub(crate) const SIZE: u32 = 1 << 3;
}

/// The header of every request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InHeader {
    /// Length of the whole message in bytes.
    pub(crate) len: u32,
    pub(crate) opcode: u32,
    /// The kernel's ID of the request, repeated in the reply.
    pub(crate) unique: u64,
    pub(crate) nodeid: u64,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) pid: u32,
    pub(crate) total_extlen: u16,
    pub(crate) padding: u16,
}

/// The header of every reply.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct OutHeader {
    /// Length of the whole message in bytes.
    pub(crate) len: u32,
    /// 0, or a negative error number.
    pub(crate) error: i32,
    pub(crate) unique: u64,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InitIn {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) max_readahead: u32,
    pub(crate) flags: u32,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InitOut {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) max_readahead: u32,
    pub(crate) flags: u32,
    /// Maximum number of concurrent asynchronous requests.
    pub(crate) max_background: u16,
    pub(crate) congestion_threshold: u16,
    /// Longest payload of a write in bytes.
    pub(crate) max_write: u32,
    /// Granularity of times in nanoseconds.
    pub(crate) time_gran: u32,
    /// Maximum number of pages in a request.
    pub(crate) max_pages: u16,
    pub(crate) map_alignment: u16,
    pub(crate) flags2: u32,
    pub(crate) unused: [u32; 7],
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct SetattrIn {
    pub(crate) valid: u32,
    pub(crate) padding: u32,
    pub(crate) fh: u64,
    pub(crate) size: u64,
    pub(crate) lock_owner: u64,
    pub(crate) times: [u64; 3],
    pub(crate) nanoseconds: [u32; 3],
    pub(crate) mode: u32,
    pub(crate) unused4: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) unused5: u32,
}

/// `struct fuse_read_in`, and `struct fuse_write_in`, which has the same fields.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct TransferIn {
    pub(crate) fh: u64,
    pub(crate) offset: u64,
    pub(crate) size: u32,
    pub(crate) transfer_flags: u32,
    pub(crate) lock_owner: u64,
    /// The open file's flags, as in `open(2)`.
    pub(crate) flags: u32,
    pub(crate) padding: u32,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct FallocateIn {
    pub(crate) fh: u64,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    /// As in `fallocate(2)`.
    pub(crate) mode: u32,
    pub(crate) padding: u32,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct LseekIn {
    pub(crate) fh: u64,
    pub(crate) offset: u64,
    /// `SEEK_DATA` or `SEEK_HOLE`; the kernel handles the others itself.
    pub(crate) whence: u32,
    pub(crate) padding: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Attr {
    pub(crate) ino: u64,
    pub(crate) size: u64,
    pub(crate) blocks: u64,
    pub(crate) atime: u64,
    pub(crate) mtime: u64,
    pub(crate) ctime: u64,
    pub(crate) atimensec: u32,
    pub(crate) mtimensec: u32,
    pub(crate) ctimensec: u32,
    pub(crate) mode: u32,
    pub(crate) nlink: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) rdev: u32,
    pub(crate) blksize: u32,
    pub(crate) flags: u32,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct AttrOut {
    /// How long the kernel may cache the attributes, in seconds.
    pub(crate) attr_valid: u64,
    pub(crate) attr_valid_nsec: u32,
    pub(crate) dummy: u32,
    pub(crate) attr: Attr,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct OpenOut {
    pub(crate) fh: u64,
    pub(crate) open_flags: u32,
    pub(crate) padding: u32,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct WriteOut {
    pub(crate) size: u32,
    pub(crate) padding: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct StatfsOut {
    pub(crate) blocks: u64,
    pub(crate) bfree: u64,
    pub(crate) bavail: u64,
    pub(crate) files: u64,
    pub(crate) ffree: u64,
    pub(crate) bsize: u32,
    pub(crate) namelen: u32,
    pub(crate) frsize: u32,
    pub(crate) padding: u32,
    pub(crate) spare: [u32; 6],
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct LseekOut {
    pub(crate) offset: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes that the kernel expects, from the uapi header.
    #[test]
    fn structures_have_the_kernels_sizes() {
        assert_eq!(size_of::<InHeader>(), 40);
        assert_eq!(size_of::<OutHeader>(), 16);
        assert_eq!(size_of::<InitOut>(), 64);
        assert_eq!(size_of::<SetattrIn>(), 88);
        assert_eq!(size_of::<TransferIn>(), 40);
        assert_eq!(size_of::<FallocateIn>(), 32);
        assert_eq!(size_of::<LseekIn>(), 24);
        assert_eq!(size_of::<Attr>(), 88);
        assert_eq!(size_of::<AttrOut>(), 104);
        assert_eq!(size_of::<StatfsOut>(), 80);
    }
}
