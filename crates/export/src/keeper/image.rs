//! The image that a device is of, and whether it is still the same.

use isobath_storage::FileId;
use std::fs::{self, File, Metadata};
use std::io;
use std::mem::zeroed;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, UNIX_EPOCH};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// How long a file system may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The image that a device is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Image {
    /// The files that it is written to: the active image, and its data file if it has one.
    pub(crate) files: Vec<ImageFile>,
    /// A digest of what identifies the files below: none of them is another one unless this is another one.
    pub(crate) below: u64,
}

/// A file of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImageFile {
    /// Its name as an absolute path.
    pub(crate) name: PathBuf,
    /// What the server says that identifies it.
    pub(crate) id: FileId,
    /// What the keeper has found by the name: nothing if that is no regular file here.
    pub(crate) seen: Option<Seen>,
}

/// What identifies a file for its keeper.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, FromBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub(crate) struct Seen {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    /// When it was made, or 1970 if the file system does not know: the number of a file that was removed may be another
    /// one's.
    pub(crate) born: Moment,
}

/// A time of a file, since 1970.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, FromBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub(crate) struct Moment {
    pub(crate) seconds: i64,
    pub(crate) nanoseconds: i64,
}

/// What changes with a file's contents.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, FromBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub(crate) struct Stamp {
    pub(crate) modified: Moment,
    /// When anything of it was changed, which a program cannot set.
    pub(crate) changed: Moment,
    /// In bytes.
    pub(crate) length: u64,
}

impl Image {
    /// Notes the files that are found by its names.
    ///
    /// # Errors
    /// One is neither a file nor a device here, or cannot be looked at: nobody could tell later whether it is the same.
    pub(super) fn find(&mut self) -> Result<(), PathBuf> {
        let found = look(self);
        for (file, found) in self.files.iter_mut().zip(found) {
            file.seen = match found {
                Found::File(seen, _) => Some(seen),
                Found::Device => None,
                Found::Nothing => return Err(file.name.clone()),
            };
        }
        Ok(())
    }

    /// The stamps of its files. There is none of a file that its name does not find any more, nor of a device, whose
    /// times say nothing of its contents.
    pub(super) fn stamps(&self) -> Vec<Option<Stamp>> {
        let found = self.files.iter().zip(look(self));
        found
            .map(|(file, found)| match found {
                Found::File(seen, stamp) if file.seen == Some(seen) => Some(stamp),
                _ => None,
            })
            .collect()
    }

    /// Whether its files are as these stamps say. Of those that are no files nothing is known.
    pub(super) fn is_as(&self, left: &[Option<Stamp>]) -> bool {
        let all = self.files.iter().zip(self.stamps()).zip(left);
        left.len() == self.files.len()
            && all.into_iter().all(|((file, stamp), left)| {
                stamp == *left && (stamp.is_some() || file.seen.is_none())
            })
    }

    /// The same, of one of its files.
    pub(super) fn has_as(&self, number: usize, left: &[Option<Stamp>]) -> bool {
        let (Some(file), Some(left)) = (self.files.get(number), left.get(number)) else {
            return false;
        };
        Self { files: vec![file.clone()], below: self.below }.is_as(&[*left])
    }

    /// Whether one of its files has the locks of a writer, as it has until the last write of a killed server has ended.
    /// In doubt it has.
    pub(super) fn is_written(&self) -> bool {
        let names = self.files.iter().filter(|file| file.seen.is_some());
        let names: Vec<_> = names.map(|file| file.name.clone()).collect();
        within_patience(move || names.iter().any(|name| has_writer(name).unwrap_or(true)))
            .unwrap_or(true)
    }
}

/// What a name finds.
#[derive(Clone, Copy, Debug)]
enum Found {
    File(Seen, Stamp),
    /// A block device.
    Device,
    Nothing,
}

/// What is found of the files of an image.
fn look(image: &Image) -> Vec<Found> {
    let files = image.files.clone();
    let found = within_patience(move || {
        let found = files.iter().map(|file| {
            let Ok(found) = fs::metadata(&file.name) else { return Found::Nothing };
            if found.file_type().is_block_device() {
                return Found::Device;
            }
            let born = born(&found).unwrap_or_default();
            let seen = Seen { device: found.dev(), inode: found.ino(), born };
            if found.is_file() { Found::File(seen, stamp(&found)) } else { Found::Nothing }
        });
        found.collect()
    });
    found.unwrap_or_else(|| vec![Found::Nothing; image.files.len()])
}

/// What `look` says, if it does so in time: a file system whose server does not answer keeps only a thread.
fn within_patience<T: Send + 'static>(look: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (result, answer) = mpsc::sync_channel(1);
    thread::Builder::new().spawn(move || result.send(look())).ok()?;
    answer.recv_timeout(PATIENCE).ok()
}

/// Whether somebody has the lock of those who write to the image with this name.
fn has_writer(name: &Path) -> io::Result<bool> {
    /// The byte that writers lock: the one for the permission to write, in QEMU's numbers.
    const WRITES: libc::off_t = 101;
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(name)?;
    // SAFETY: zeroes are a valid description, and these locks demand the process 0.
    let mut lock: libc::flock = unsafe { zeroed() };
    (lock.l_type, lock.l_whence) =
        (libc::F_WRLCK as libc::c_short, libc::SEEK_SET as libc::c_short);
    (lock.l_start, lock.l_len) = (WRITES, 1);
    // SAFETY: the kernel reads and writes the description.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(lock.l_type != libc::F_UNLCK as libc::c_short)
}

fn born(found: &Metadata) -> Option<Moment> {
    let since = found.created().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(Moment {
        seconds: i64::try_from(since.as_secs()).ok()?,
        nanoseconds: since.subsec_nanos().into(),
    })
}

fn stamp(found: &Metadata) -> Stamp {
    Stamp {
        modified: Moment { seconds: found.mtime(), nanoseconds: found.mtime_nsec() },
        changed: Moment { seconds: found.ctime(), nanoseconds: found.ctime_nsec() },
        length: found.len(),
    }
}

/// A digest of what identifies these files, in this order, which is the same in every version of this program.
pub(crate) fn digest(files: impl Iterator<Item = FileId>) -> u64 {
    // FNV-1a.
    let numbers = files.flat_map(|FileId { device, inode }| [device, inode]);
    numbers.flat_map(u64::to_le_bytes).fold(0xcbf2_9ce4_8422_2325, |digest, byte| {
        (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn what_is_written_or_put_in_the_place_of_a_file_is_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("image"), "image").unwrap();
        let file = |name: &str| ImageFile {
            name: at(name),
            id: FileId { device: 0, inode: 1 },
            seen: None,
        };
        let mut image = Image { files: vec![file("image"), file("none")], below: 0 };
        assert_eq!(image.stamps(), [None, None], "nothing was found before");
        assert_eq!(image.find(), Err(at("none")));
        let found = fs::metadata(at("image")).unwrap();
        let seen = image.files[0].seen.unwrap();
        assert_eq!((seen.device, seen.inode), (found.dev(), found.ino()));
        assert_eq!((seen.born.seconds > 0, image.files[1].seen), (found.created().is_ok(), None));
        let first = image.stamps();
        assert!(first[0].is_some_and(|stamp| stamp.length == 5) && first[1].is_none());
        assert_eq!(image.stamps(), first);
        assert!(!image.is_as(&first[..1]) && image.is_as(&first));
        assert!(image.has_as(0, &first) && image.has_as(1, &first) && !image.has_as(2, &first));
        // Its time is put back, but not that of the change.
        let opened = File::options().write(true).open(at("image")).unwrap();
        let modified = opened.metadata().unwrap().modified().unwrap();
        while image.stamps() == first {
            opened.set_modified(SystemTime::now()).unwrap();
        }
        opened.set_modified(modified).unwrap();
        let changed = image.stamps();
        assert_eq!(changed[0].unwrap().modified, first[0].unwrap().modified);
        assert_ne!(changed, first);
        assert!(image.is_as(&changed) && !image.is_as(&first));
        // Another file has its name.
        fs::write(at("new"), "image").unwrap();
        fs::rename(at("new"), at("image")).unwrap();
        assert_eq!(image.stamps(), [None, None]);
        assert!(!image.is_as(&[None, None]), "nothing seen is not the same");
        fs::remove_file(at("image")).unwrap();
        fs::create_dir(at("image")).unwrap();
        assert_eq!(image.find(), Err(at("image")));
    }

    #[test]
    fn a_writer_is_seen_by_its_lock() {
        let directory = tempfile::tempdir().unwrap();
        let name = directory.path().join("image");
        fs::write(&name, "image").unwrap();
        let id = FileId { device: 0, inode: 1 };
        let file = |name: &Path| ImageFile { name: name.to_owned(), id, seen: None };
        let mut image = Image { files: vec![file(&name)], below: 0 };
        image.find().unwrap();
        assert!(!image.is_written());
        let opened = File::options().read(true).write(true).open(&name).unwrap();
        let lock = |kind, byte| {
            // SAFETY: as above.
            let mut lock: libc::flock = unsafe { zeroed() };
            (lock.l_type, lock.l_start, lock.l_len) = (kind as libc::c_short, byte, 1);
            // SAFETY: as above.
            let done = unsafe { libc::fcntl(opened.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) };
            assert_eq!(done, 0);
        };
        lock(libc::F_RDLCK, 100);
        lock(libc::F_RDLCK, 201);
        assert!(!image.is_written(), "a reader");
        lock(libc::F_RDLCK, 101);
        assert!(image.is_written());
        lock(libc::F_UNLCK, 101);
        assert!(!image.is_written());
        fs::remove_file(&name).unwrap();
        assert!(image.is_written(), "in doubt");
    }

    #[test]
    fn files_in_another_order_have_another_digest() {
        let [a, b] = [1, 2].map(|inode| FileId { device: 7, inode });
        let digests = [vec![], vec![a], vec![b], vec![a, b], vec![b, a], vec![a, a]];
        let digests = digests.map(|files| digest(files.into_iter()));
        for (number, one) in digests.iter().enumerate() {
            assert!(digests.iter().skip(number + 1).all(|other| one != other), "{digests:x?}");
        }
        assert_eq!(digests[0], 0xcbf2_9ce4_8422_2325, "it is the same in every version");
        assert_eq!(digest([FileId { device: 0x61, inode: 0 }].into_iter()), DIGEST_OF_ONE);
    }
    const DIGEST_OF_ONE: u64 = {
        let mut digest: u64 = (0xcbf2_9ce4_8422_2325 ^ 0x61_u64).wrapping_mul(0x0100_0000_01b3);
        let mut zeroes = 0;
        while zeroes < 15 {
            digest = digest.wrapping_mul(0x0100_0000_01b3);
            zeroes += 1;
        }
        digest
    };
}
