//! A guest's memory, shared by the client and mapped into this process.

use isobath_buf::guard::{Access, Guard};
use std::fs::{File, Metadata};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Maximum number of regions that a client may share at a time.
pub(crate) const MAX_REGIONS: usize = 509;

/// A region's location, as sent by the client (vhost-user: "Memory region description").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegionAt {
    /// Guest physical address.
    pub(crate) guest: u64,
    /// Length in bytes.
    pub(crate) size: u64,
    /// Address in the client's process, as used in ring addresses.
    pub(crate) user: u64,
    /// Offset in the file.
    pub(crate) offset: u64,
}

impl RegionAt {
    /// Whether it is not empty, and none of its addresses and offsets overflows.
    fn is_sound(&self) -> bool {
        let ends = |start: u64| start.checked_add(self.size).is_some();
        self.size > 0 && ends(self.guest) && ends(self.user) && ends(self.offset)
    }
}

/// The unit in which a file is mapped, in bytes: on hugetlbfs the huge page, of which the file system's blocks are.
/// Other file systems' blocks may be larger than the pages of which memory consists.
fn mapping_unit(file: &File, data: &Metadata) -> io::Result<u64> {
    let mut system = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: a plain system call on an open descriptor, which fills `system` if it succeeds.
    let system = unsafe {
        if libc::fstatfs(file.as_raw_fd(), system.as_mut_ptr()) < 0 {
            return Err(io::Error::last_os_error());
        }
        system.assume_init()
    };
    if system.f_type == libc::HUGETLBFS_MAGIC {
        return Ok(data.blksize());
    }
    // SAFETY: the call has no preconditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(page).map_err(|_| io::Error::other("the size of a page is unknown"))
}

/// A part of a file, mapped shared for reading and writing.
///
/// A client can cut the file short while it is mapped. What is missing then reads as zeroes, and the mapping
/// [is lost](Self::is_lost).
#[derive(Debug)]
pub(crate) struct Mapping {
    /// The address that `mmap` returned, and the length mapped.
    base: NonNull<u8>,
    mapped: usize,
    /// Bytes of the mapping before the requested range.
    lead: usize,
    length: usize,
    /// Taken when the mapping ends. A file that is sealed against becoming shorter can lose pages as well: bad ones,
    /// and those for which there is no memory.
    guard: Option<Guard>,
}

// SAFETY: a mapping belongs to the whole process; whoever uses its addresses is responsible for how.
unsafe impl Send for Mapping {}
// SAFETY: as above; the methods only return addresses and lengths.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes of `file` from `offset` on.
    ///
    /// # Errors
    /// The file is too short, or cannot be mapped.
    pub(crate) fn new(file: &File, offset: u64, length: u64) -> io::Result<Self> {
        let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text);
        let data = file.metadata()?;
        let end = offset.checked_add(length).filter(|end| length > 0 && *end <= data.size());
        let end =
            end.ok_or_else(|| invalid("the mapping is empty or extends past the end of its file"))?;
        // Offsets and lengths must be aligned to it.
        let block = mapping_unit(file, &data)?;
        if !block.is_power_of_two() {
            return Err(invalid("the file's block size is not a power of two"));
        }
        let start = offset & !(block - 1);
        let (lead, length) = ((offset - start) as usize, length as usize);
        let mapped = usize::try_from(end - start)
            .ok()
            .and_then(|size| size.checked_next_multiple_of(block as usize))
            .filter(|size| isize::try_from(*size).is_ok())
            .ok_or_else(|| invalid("the mapping is too large"))?;
        let start = libc::off_t::try_from(start).map_err(|_| invalid("the offset is too large"))?;
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), mapped, access, flags, file.as_raw_fd(), start)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base =
            NonNull::new(base.cast()).ok_or_else(|| invalid("the file was mapped at address 0"))?;
        let mut mapping = Self { base, mapped, lead, length, guard: None };
        mapping.guard = Some(Guard::new(base, mapped, block as usize, Access::Write)?);
        Ok(mapping)
    }

    /// Whether a part of it was found missing.
    pub(crate) fn is_lost(&self) -> bool {
        self.guard.as_ref().is_some_and(Guard::is_lost)
    }

    /// The first byte of the requested range.
    pub(crate) fn start(&self) -> NonNull<u8> {
        // SAFETY: `lead` is within the mapping.
        unsafe { self.base.add(self.lead) }
    }

    /// Number of bytes that may be used from the start on.
    pub(crate) fn len(&self) -> usize {
        self.length
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.guard = None;
        // SAFETY: the mapping was made by `new`, and all users of its memory, which hold it, are gone.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.mapped) };
    }
}

#[derive(Clone, Debug)]
struct Region {
    at: RegionAt,
    mapping: Arc<Mapping>,
}

/// A guest's memory at one point in time. It is immutable: every change to the memory table creates a new one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory {
    /// Sorted by guest address, without overlaps.
    regions: Vec<Region>,
}

impl Memory {
    /// Maps a region and adds it.
    ///
    /// # Errors
    /// It overlaps another region, is not entirely within its file, or there are too many.
    pub(crate) fn with(&self, at: RegionAt, file: &File) -> io::Result<Self> {
        let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text);
        if !at.is_sound() {
            return Err(invalid("the memory region's addresses overflow"));
        }
        if self.regions.len() >= MAX_REGIONS {
            return Err(invalid("too many memory regions"));
        }
        let overlaps = |start: u64, other: u64, size: u64| {
            start < other.saturating_add(size) && other < start.saturating_add(at.size)
        };
        for Region { at: old, .. } in &self.regions {
            if overlaps(at.guest, old.guest, old.size) || overlaps(at.user, old.user, old.size) {
                return Err(invalid("memory regions overlap"));
            }
        }
        let mapping = Arc::new(Mapping::new(file, at.offset, at.size)?);
        let mut regions = self.regions.clone();
        let place = regions.partition_point(|region| region.at.guest < at.guest);
        regions.insert(place, Region { at, mapping });
        Ok(Self { regions })
    }

    /// Removes a region. Its offset in the file is ignored, as the specification says.
    pub(crate) fn without(&self, at: RegionAt) -> Option<Self> {
        let is_it = |region: &Region| {
            (region.at.guest, region.at.size, region.at.user) == (at.guest, at.size, at.user)
        };
        let place = self.regions.iter().position(is_it)?;
        let mut regions = self.regions.clone();
        regions.remove(place);
        Some(Self { regions })
    }

    /// Whether a part of it was found missing.
    pub(crate) fn is_lost(&self) -> bool {
        self.regions.iter().any(|region| region.mapping.is_lost())
    }

    /// The address in this process of a guest address, and the number of contiguous bytes there.
    pub(crate) fn guest(&self, address: u64) -> Option<(NonNull<u8>, usize)> {
        let after = self.regions.partition_point(|region| region.at.guest <= address);
        let region = self.regions.get(after.checked_sub(1)?)?;
        region.at_distance(address - region.at.guest)
    }

    /// The address in this process of `length` bytes at a guest address, if they are contiguous.
    pub(crate) fn guest_piece(&self, address: u64, length: usize) -> Option<NonNull<u8>> {
        self.guest(address).filter(|(_, rest)| *rest >= length).map(|(start, _)| start)
    }

    /// The address in this process of `length` bytes at an address in the client's process, if they are contiguous.
    pub(crate) fn user_piece(&self, address: u64, length: usize) -> Option<NonNull<u8>> {
        let found = |region: &Region| {
            let distance = address.checked_sub(region.at.user)?;
            region.at_distance(distance)
        };
        let (start, rest) = self.regions.iter().find_map(found)?;
        (rest >= length).then_some(start)
    }
}

impl Region {
    fn at_distance(&self, distance: u64) -> Option<(NonNull<u8>, usize)> {
        let rest = self.at.size.checked_sub(distance).filter(|rest| *rest > 0)?;
        // SAFETY: the mapping has `size` bytes, which is more than `distance`.
        Some((unsafe { self.mapping.start().add(distance as usize) }, rest as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn file(size: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        file
    }

    #[test]
    fn addresses_are_found_in_their_regions_only() {
        let mut shared = file(0x5000);
        shared.write_all(&[7; 0x1000]).unwrap();
        shared.write_all(&[8; 0x1000]).unwrap();
        let low = RegionAt { guest: 0, size: 0x1800, user: 0x70_0000, offset: 0x800 };
        let high = RegionAt { guest: 0x10_0000, size: 0x3000, user: 0x10_0000, offset: 0x2000 };
        let memory = Memory::default().with(high, &shared).unwrap().with(low, &shared).unwrap();
        let (start, rest) = memory.guest(0x7ff).unwrap();
        assert_eq!(rest, 0x1001);
        // SAFETY: two bytes of a mapped region.
        assert_eq!(unsafe { (start.read(), start.add(1).read()) }, (7, 8));
        assert!(memory.guest(0x1800).is_none() && memory.guest(0xf_ffff).is_none());
        assert!(memory.guest(u64::MAX).is_none() && memory.guest(0x10_3000).is_none());
        assert_eq!(memory.user_piece(0x70_0010, 0x17f0), memory.guest_piece(0x10, 0x17f0));
        assert!(memory.user_piece(0x70_0010, 0x17f1).is_none());
        assert!(memory.guest_piece(0x10_2fff, 1).is_some());
        let less = memory.without(RegionAt { offset: 0, ..low }).unwrap();
        assert!(less.guest(0).is_none() && memory.guest(0).is_some());
        assert!(less.without(low).is_none());
    }

    #[test]
    fn regions_that_cannot_be_are_refused() {
        let shared = file(0x4000);
        let at = RegionAt { guest: 0x1000, size: 0x1000, user: 0x9000, offset: 0 };
        let memory = Memory::default().with(at, &shared).unwrap();
        for bad in [
            RegionAt { guest: 0x1fff, user: 0, ..at },
            RegionAt { guest: 0, size: 0x1001, user: 0, ..at },
            RegionAt { guest: 0x8000, user: 0x9fff, ..at },
            RegionAt { guest: 0x8000, user: 0, offset: 0x3001, ..at },
            RegionAt { guest: 0x8000, user: 0, size: 0, ..at },
            RegionAt { guest: u64::MAX, user: 0, ..at },
            RegionAt { guest: 0x8000, user: u64::MAX, ..at },
            RegionAt { guest: 0x8000, user: 0, size: 1 << 62, offset: 1 << 63 },
        ] {
            assert!(memory.with(bad, &shared).is_err(), "{bad:?}");
        }
    }
}
