//! What is known of a device that outlives its server: by its record the keeper of the next server recognizes it.
//!
//! The record is a file that only root can read, so that nobody else can have a server take a device over that is not
//! of its image. The keeper of a device holds the record's lock while its server lives, and whoever deletes the device
//! or takes it over holds it meanwhile.

use super::image::{Image, ImageFile, Seen, Stamp};
use super::moments::SinceBoot;
use isobath_storage::FileId;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Where the records are: a reboot, after which there are no devices, clears it.
const DIRECTORY: &str = "/run/isobath";
/// The user whose they are.
const ROOT: u32 = 0;
/// Identifies a record of this layout.
const MAGIC: u64 = u64::from_be_bytes(*b"isoublk2");
/// The longest record: each name has at most 4 KiB.
const LONGEST: usize = 12 << 10;
/// How often a lock is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// What a record says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// The number that the driver keeps with the device: no other device has it.
    pub(super) nonce: u64,
    /// The keeper that deletes the device if no server takes it over, by a number that no other keeper has.
    pub(super) keeper: u64,
    /// A server was about to serve it: some of its queues may be its, others nobody's.
    pub(super) recovering: bool,
    /// The image that it is of.
    pub(super) image: Image,
    /// The stamps of the image's files as the last server has left them; `None` while it has not ended, or if nobody has
    /// seen that it has.
    pub(super) left: Option<Vec<Option<Stamp>>>,
    /// Until when the device waits, however many servers attempt to take it over; `None` while it does not wait.
    pub(super) until: Option<SinceBoot>,
}

/// The most files that an image is written to.
const MOST_FILES: usize = 2;

/// How a record begins; the files' names follow.
#[derive(Clone, Copy, Debug, IntoBytes, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    magic: u64,
    nonce: u64,
    keeper: u64,
    below: u64,
    name_lengths: [u32; MOST_FILES],
    recovering: u32,
    left: u16,
    count: u16,
    files: [FileEntry; MOST_FILES],
    /// In nanoseconds; 0 if there is no such moment.
    until: u64,
}

/// What it says of a file.
#[derive(Clone, Copy, Debug, Default, IntoBytes, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct FileEntry {
    device: u64,
    inode: u64,
    seen: Seen,
    stamp: Stamp,
    has_seen: u32,
    has_stamp: u32,
}

/// A number that is 0 or 1.
fn flag(number: u32) -> Option<bool> {
    match number {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

impl Entry {
    /// # Errors
    /// It does not fit a record.
    fn to_bytes(&self) -> io::Result<Vec<u8>> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let Image { files, below } = &self.image;
        let (mut name_lengths, mut entries) = ([0; MOST_FILES], [FileEntry::default(); MOST_FILES]);
        let mut names = Vec::new();
        for (number, file) in files.iter().enumerate() {
            let name = file.name.as_os_str().as_bytes();
            let stamp = self.left.as_ref().and_then(|left| left.get(number).copied().flatten());
            *name_lengths.get_mut(number).ok_or_else(invalid)? = name.len() as u32;
            entries[number] = FileEntry {
                device: file.id.device,
                inode: file.id.inode,
                seen: file.seen.unwrap_or_default(),
                stamp: stamp.unwrap_or_default(),
                has_seen: file.seen.is_some().into(),
                has_stamp: stamp.is_some().into(),
            };
            names.extend_from_slice(name);
        }
        let header = Header {
            magic: MAGIC,
            nonce: self.nonce,
            keeper: self.keeper,
            below: *below,
            name_lengths,
            recovering: self.recovering.into(),
            left: self.left.is_some().into(),
            count: files.len() as u16,
            files: entries,
            until: self
                .until
                .map_or(0, |until| u64::try_from(until.as_nanos()).unwrap_or(u64::MAX)),
        };
        let bytes = [header.as_bytes(), &names].concat();
        if bytes.len() > LONGEST { Err(invalid()) } else { Ok(bytes) }
    }

    /// The entry that these bytes begin with; `None` if they are none.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (header, mut rest) = Header::read_from_prefix(bytes).ok()?;
        let Header { magic, nonce, keeper, below, recovering, left, count, .. } = header;
        if magic != MAGIC {
            return None;
        }
        let (mut files, mut stamps) = (Vec::new(), Vec::new());
        let entries = header.files.get(..count.into())?;
        for (entry, length) in entries.iter().zip(header.name_lengths) {
            let (name, behind) = rest.split_at_checked(length as usize)?;
            rest = behind;
            files.push(ImageFile {
                name: OsString::from_vec(name.to_vec()).into(),
                id: FileId { device: entry.device, inode: entry.inode },
                seen: flag(entry.has_seen)?.then_some(entry.seen),
            });
            stamps.push(flag(entry.has_stamp)?.then_some(entry.stamp));
        }
        let (recovering, left) = (flag(recovering)?, flag(left.into())?.then_some(stamps));
        let until = (header.until > 0).then(|| Duration::from_nanos(header.until));
        Some(Self { nonce, keeper, recovering, image: Image { files, below }, left, until })
    }
}

/// A record, which is locked unless it was [unlocked](Self::unlock).
#[derive(Debug)]
pub(super) struct Record {
    file: File,
    path: PathBuf,
}

impl Record {
    /// Locks the record of the device with this number, which is made if there is none. `wait` waits for a moment, and
    /// returns whether to give up.
    ///
    /// # Errors
    /// Another keeper has it for longer than `patience`, or it is not root's alone: for users.
    pub(super) fn lock(
        number: u32,
        patience: Duration,
        wait: impl FnMut(Duration) -> bool,
    ) -> Result<Self, String> {
        Self::lock_in(Path::new(DIRECTORY), ROOT, number, patience, wait)
    }

    fn lock_in(
        directory: &Path,
        owner: u32,
        number: u32,
        patience: Duration,
        mut wait: impl FnMut(Duration) -> bool,
    ) -> Result<Self, String> {
        let mut path = directory.join(format!("ublk-{number}"));
        let fails = |path: &Path, error: &io::Error| {
            format!("cannot use {}, which only root may: {error}", path.display())
        };
        prepare(directory, owner).map_err(|error| fails(directory, &error))?;
        let until = Instant::now() + patience;
        loop {
            let file = open(&path, owner).map_err(|error| fails(&path, &error))?;
            let record = Self { file, path };
            // Whoever had it locked may have removed it.
            if record.try_lock() && record.is_there() {
                return Ok(record);
            }
            if Instant::now() > until {
                return Err(format!(
                    "another server serves the ublk device {number}: its keeper holds {}",
                    record.path.display()
                ));
            }
            if wait(LOOK) {
                return Err("the server has ended".into());
            }
            path = record.path;
        }
    }

    /// Whether it is the file of its name.
    fn is_there(&self) -> bool {
        let id = |found: Metadata| (found.dev(), found.ino());
        let own = self.file.metadata().map(id).ok();
        own.is_some() && own == fs::symlink_metadata(&self.path).map(id).ok()
    }

    /// Attempts to lock it again.
    pub(super) fn try_lock(&self) -> bool {
        // SAFETY: a plain system call on an open descriptor.
        unsafe { libc::flock(self.file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
    }

    /// Lets another keeper lock it.
    pub(super) fn unlock(&self) {
        // SAFETY: a plain system call on an open descriptor.
        unsafe { libc::flock(self.file.as_raw_fd(), libc::LOCK_UN) };
    }

    /// What it says; `None` if nobody has written it, or something else.
    pub(super) fn read(&self) -> io::Result<Option<Entry>> {
        let mut bytes = vec![0; LONGEST];
        let mut length = 0;
        loop {
            match self.file.read_at(&mut bytes[length..], length as u64)? {
                0 => return Ok(Entry::from_bytes(&bytes[..length])),
                read => length += read,
            }
        }
    }

    /// Has it say this from now on.
    ///
    /// # Errors
    /// The names are too long for it, or it cannot be written.
    pub(super) fn write(&self, entry: &Entry) -> io::Result<()> {
        self.file.write_all_at(&entry.to_bytes()?, 0)
    }

    /// Removes it: there is no device any more. It is locked.
    pub(super) fn remove(&self) {
        if self.is_there() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Makes the directory unless it is there. It and what it is in are the owner's, and nobody else may write to them.
fn prepare(directory: &Path, owner: u32) -> io::Result<()> {
    let parent = directory.parent().ok_or(io::ErrorKind::InvalidInput)?;
    let found = fs::symlink_metadata(parent)?;
    // In a sticky directory others replace nothing that is not theirs.
    let denied = if found.mode() & libc::S_ISVTX != 0 { 0 } else { 0o022 };
    check(&found, owner, libc::S_IFDIR, denied).map_err(|error| {
        io::Error::other(format!("the directory that it is in ({}): {error}", parent.display()))
    })?;
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    check(&fs::symlink_metadata(directory)?, owner, libc::S_IFDIR, 0o022)
}

/// Opens a record, which is the owner's alone.
fn open(path: &Path, owner: u32) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    check(&file.metadata()?, owner, libc::S_IFREG, 0o077)?;
    Ok(file)
}

/// Checks that a file or directory is of this type, this user's, and that others may not do what these bits say.
fn check(found: &Metadata, owner: u32, kind: u32, denied: u32) -> io::Result<()> {
    let mode = found.mode();
    let why = if mode & libc::S_IFMT != kind {
        "it is something else".into()
    } else if found.uid() != owner {
        format!("it belongs to another user ({})", found.uid())
    } else if mode & denied != 0 {
        format!("others may use it (mode {:o})", mode & 0o7777)
    } else if kind == libc::S_IFREG && found.nlink() > 1 {
        "it has another name as well (a hard link)".into()
    } else {
        return Ok(());
    };
    Err(io::Error::other(why))
}

#[cfg(test)]
mod tests {
    use super::super::image::Moment;
    use super::*;
    use std::fs::Permissions;
    use std::mem::offset_of;
    use std::os::unix::fs::{PermissionsExt, symlink};

    struct World {
        directory: tempfile::TempDir,
        owner: u32,
    }

    impl World {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let owner = directory.path().metadata().unwrap().uid();
            Self { directory, owner }
        }

        fn records(&self) -> PathBuf {
            self.directory.path().join("isobath")
        }

        fn lock(&self, number: u32) -> Result<Record, String> {
            let patience = Duration::from_millis(30);
            Record::lock_in(&self.records(), self.owner, number, patience, |moment| {
                std::thread::sleep(moment);
                false
            })
        }

        fn refused(&self, number: u32) -> String {
            self.lock(number).map(drop).unwrap_err()
        }
    }

    fn entry(name: &str) -> Entry {
        let born = Moment { seconds: 1, nanoseconds: 2 };
        let seen = Some(Seen { device: 3, inode: 4, born });
        let id = FileId { device: 5, inode: u64::MAX };
        let data = ImageFile { name: "/data".into(), id, seen: None };
        let image =
            Image { files: vec![ImageFile { name: name.into(), id, seen }, data], below: 9 };
        let stamp = Stamp { length: 77, ..Stamp::default() };
        let left = Some(vec![None, Some(stamp)]);
        let until = Some(Duration::new(9, 10));
        Entry { nonce: 7, keeper: 8, recovering: true, image, left, until }
    }

    #[test]
    fn what_is_written_is_read_by_the_next_who_locks_it() {
        let world = World::new();
        let record = world.lock(3).unwrap();
        assert_eq!(record.read().unwrap(), None, "nobody has written it");
        let mut live = entry("/images/a long name");
        (live.left, live.recovering, live.until) = (None, false, None);
        live.image.files.truncate(1);
        for entry in [live, entry("/a")] {
            record.write(&entry).unwrap();
            assert_eq!(record.read().unwrap(), Some(entry));
        }
        let held = world.refused(3);
        assert!(held.contains("another server serves the ublk device 3"), "{held}");
        assert!(world.lock(4).is_ok(), "another device's is another one");
        record.unlock();
        let next = world.lock(3).unwrap();
        assert_eq!(next.read().unwrap(), Some(entry("/a")));
        assert!(!record.try_lock());
        // The next one's is a new file.
        next.remove();
        let new = world.lock(3).unwrap();
        assert_eq!(new.read().unwrap(), None);
        next.remove();
        assert!(new.is_there(), "only its own is removed");
        let given_up =
            Record::lock_in(&world.records(), world.owner, 3, Duration::from_secs(9), |_| true);
        assert_eq!(given_up.map(drop).unwrap_err(), "the server has ended");
        let mode = |path: PathBuf| path.metadata().unwrap().mode() & 0o7777;
        assert_eq!((mode(world.records()), mode(world.records().join("ublk-3"))), (0o700, 0o600));
    }

    #[test]
    fn what_is_no_record_says_nothing() {
        let whole = entry("/images/disk").to_bytes().unwrap();
        assert_eq!(Entry::from_bytes(&whole), Some(entry("/images/disk")));
        assert_eq!(Entry::from_bytes(&[&*whole, b"rest"].concat()), Some(entry("/images/disk")));
        for length in 0..whole.len() {
            assert_eq!(Entry::from_bytes(&whole[..length]), None, "{length} bytes");
        }
        let changed = |at: usize| {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x82;
            Entry::from_bytes(&bytes)
        };
        let flags = offset_of!(FileEntry, has_seen)..size_of::<FileEntry>();
        let file = |number: usize| offset_of!(Header, files) + number * size_of::<FileEntry>();
        let of_flags = |number| file(number) + flags.start..file(number) + flags.end;
        // What it is, the lengths of the names, and whether something is so.
        for at in (0..8).chain(32..48).chain(of_flags(0)).chain(of_flags(1)) {
            assert_eq!(changed(at), None, "byte {at}");
        }
        // Of what is not known any number is the same.
        let known = |at: &usize| *at < file(0) + offset_of!(FileEntry, stamp);
        for at in (8..32).chain((file(0)..).take_while(known)) {
            assert!(changed(at).is_some_and(|changed| changed != entry("/images/disk")), "{at}");
        }
        // Programs look there, too.
        assert_eq!((offset_of!(Header, nonce), offset_of!(Header, recovering)), (8, 40));
        let world = World::new();
        let record = world.lock(1).unwrap();
        record.file.write_all_at(&vec![0xff; 3 * LONGEST], 0).unwrap();
        assert_eq!(record.read().unwrap(), None);
        assert!(record.write(&entry(&"n".repeat(LONGEST))).is_err());
        let mut many = entry("/a");
        many.image.files.push(many.image.files[0].clone());
        assert!(record.write(&many).is_err());
    }

    #[test]
    fn what_others_may_have_made_is_refused_and_stays() {
        let world = World::new();
        drop(world.lock(0).unwrap());
        let at = |name: &str| world.records().join(name);
        fs::write(at("precious"), "precious").unwrap();
        symlink("precious", at("ublk-1")).unwrap();
        symlink("nothing", at("ublk-2")).unwrap();
        fs::hard_link(at("precious"), at("ublk-3")).unwrap();
        fs::set_permissions(at("precious"), Permissions::from_mode(0o600)).unwrap();
        fs::create_dir(at("ublk-4")).unwrap();
        let pipe = std::ffi::CString::new(at("ublk-5").as_os_str().as_bytes()).unwrap();
        // SAFETY: the path ends with NUL.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        fs::write(at("ublk-6"), "").unwrap();
        fs::set_permissions(at("ublk-6"), Permissions::from_mode(0o640)).unwrap();
        for number in 1..=6 {
            let error = world.refused(number);
            assert!(
                error.contains(&format!("isobath/ublk-{number}, which only root may")),
                "{error}"
            );
        }
        assert!(world.refused(3).contains("hard link") && world.refused(6).contains("mode 640"));
        assert_eq!(fs::read(at("precious")).unwrap(), b"precious");
        assert!(!at("nothing").exists());

        let other = |owner| {
            let locked =
                Record::lock_in(&world.records(), owner, 0, Duration::ZERO, |_| false).map(drop);
            locked.unwrap_err()
        };
        assert!(other(world.owner + 1).contains("belongs to another user"));
        fs::set_permissions(world.records(), Permissions::from_mode(0o770)).unwrap();
        assert!(world.refused(0).contains("mode 770"));
        fs::set_permissions(world.records(), Permissions::from_mode(0o755)).unwrap();
        assert!(world.lock(0).is_ok(), "others may look into the directory");
        fs::rename(world.records(), world.directory.path().join("moved")).unwrap();
        symlink("moved", world.records()).unwrap();
        assert!(world.refused(0).contains("it is something else"));
        fs::set_permissions(world.directory.path(), Permissions::from_mode(0o777)).unwrap();
        assert!(world.refused(0).contains("mode 777"));
        fs::remove_file(world.records()).unwrap();
        assert!(world.refused(0).contains("others may use it (mode 777)"));
        fs::set_permissions(world.directory.path(), Permissions::from_mode(0o1777)).unwrap();
        assert!(world.lock(0).is_ok(), "others replace nothing there");
    }
}
