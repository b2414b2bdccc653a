//! Opening files by their names.

use super::at_once::WriteAtOnce;
use super::cached::Cached;
use super::descriptor_sets;
use super::descriptors::Pool;
use super::direct::Direct;
use super::flush::Durability;
use super::named::Named;
use super::open::{
    Attempt, Failure, Kind, MOST_REPLACED, Opened, Taking, attach, check_type, descriptor,
    existing, explain_direct, id_at, no_direct, options, replaced,
};
use super::role::Writing;
use super::source::Source;
use super::storage::{FileStorage, Rejected};
use super::sys;
use arc_swap::ArcSwap;
use isobath_ring::place::{self, Identity, Place};
use isobath_storage::error::{Operation, StorageError};
use isobath_storage::{
    FileId, Host, Locking, Made, OpenMode, Result, StorageExt, is_descriptor_set,
};
use rustix::fs::{FileType, Mode, OFlags, fstat, openat, readlinkat};
use rustix::io::Errno;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// How many links to files that do not exist are followed, one after another (the kernel's limit).
const MOST_LINKS: u32 = 40;

/// Opens files and block devices by path, and [descriptors that were handed in](crate::descriptor_sets). Relative paths
/// start at the working directory.
///
/// All its files share the process's descriptors (see the [crate's documentation](crate)).
#[derive(Clone, Copy, Debug, Default)]
pub struct FileHost;

impl FileHost {
    /// A host whose files share `count` descriptors of their own, at least 2. Files opened for writing keep theirs even
    /// beyond that.
    pub fn with_descriptors(count: usize) -> LimitedHost {
        LimitedHost { pool: Arc::new(Pool::new(count.max(2))) }
    }

    /// Lets the files of all hosts of this kind be read through mappings of together at most `bytes`
    /// bytes, or none if that is 0, as at first: what is in the page cache is then copied without a system call. The
    /// kernel needs up to 1/512 of that for page tables.
    ///
    /// Only regular files on ext4, XFS and Btrfs are mapped, and none if the address space is limited
    /// (`RLIMIT_AS`). A handler for SIGBUS is installed with the first mapping: it catches accesses to what is missing
    /// in these, and passes all others on to the handler that was there before. Do not use it in a process that locks
    /// all its future memory (`mlockall`).
    pub fn map_reads(self, bytes: u64) {
        Pool::of_process().mappings().allow(bytes);
    }

    /// Lets files of all hosts of this kind be written to by the thread that wants it, where that hardly ever has to
    /// wait: writes of whole pages, and of at most 64 KiB, into the page cache. On ext4 that costs a fraction of what
    /// it costs through the ring. All tasks of the thread wait when it does. After a call that took more than a
    /// millisecond it makes none for a hundred times as long. It concerns files that were not written to before.
    ///
    /// Only regular files on ext4 and XFS are written to so, and none by direct I/O.
    pub fn write_at_once(self, files: WriteAtOnce) {
        Pool::of_process().write_at_once(files);
    }
}

impl FileHost {
    /// The regular file of an open descriptor, for reading, under a name for messages. It keeps this descriptor, so
    /// that its contents may change while it is read, and takes no locks.
    ///
    /// # Errors
    /// It is no regular file, or it cannot be queried.
    pub async fn adopt(self, name: &Path, file: File) -> Result<FileStorage> {
        let pool = Pool::of_process();
        let mode = OpenMode { locking: Locking::Unlocked, ..OpenMode::default() };
        let adopted = async {
            let permit = pool.admit().await;
            let opened = attach(file, None, name, mode, Taking::Alone, permit, pool).await?;
            if opened.kind != Kind::Regular {
                let text = "it is a device, and not a regular file";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text).into());
            }
            storage_of(opened, name, mode, OnceLock::new(), pool, true)
        };
        adopted.await.map_err(|error: Failure| error.named(Operation::Open, name))
    }
}

/// A [`FileHost`] with its own limit on descriptors.
#[derive(Clone)]
pub struct LimitedHost {
    pool: Arc<Pool>,
}

impl LimitedHost {
    /// As [`FileHost::map_reads`], for this host's files.
    pub fn map_reads(&self, bytes: u64) {
        self.pool.mappings().allow(bytes);
    }

    /// As [`FileHost::write_at_once`], for this host's files.
    pub fn write_at_once(&self, files: WriteAtOnce) {
        self.pool.write_at_once(files);
    }
}

impl Host for FileHost {
    type File = FileStorage;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<FileStorage> {
        open(name, mode, Pool::of_process()).await
    }

    async fn create(&self, name: &Path, mode: OpenMode) -> Result<FileStorage> {
        create(name, mode, Pool::of_process()).await
    }

    async fn create_unlike(
        &self,
        name: &Path,
        mode: OpenMode,
        spared: &dyn Fn(FileId) -> bool,
    ) -> Result<Option<Made<FileStorage>>> {
        create_unlike(name, mode, spared, Pool::of_process()).await
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        let removed = check_removable(name).and_then(|()| fs::remove_file(name));
        removed.map_err(|error| StorageError::new(Operation::Remove, name, error))
    }

    async fn remove_file(&self, name: &Path, file: &FileStorage) -> Result<bool> {
        let FileId { device, inode } = file.id();
        let removed = check_removable(name)
            .and_then(|()| Place::of(name))
            .and_then(|place| place.remove_aside((device, inode)));
        match removed {
            // The directory is gone.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            removed => removed.map_err(|error| StorageError::new(Operation::Remove, name, error)),
        }
    }

    fn canonical(&self, name: &Path) -> Result<PathBuf> {
        let found = if is_descriptor_set(name) {
            descriptor_sets::of_name(name).map(|_| name.to_owned())
        } else {
            fs::canonicalize(name)
        };
        found.map_err(|error| StorageError::new(Operation::Query, name, error))
    }

    fn find(&self, name: &Path) -> Result<Option<FileId>> {
        if is_descriptor_set(name) {
            return Ok(None);
        }
        let found = fs::metadata(name);
        found
            .map(|found| Some(id_at(&found)))
            .map_err(|error| StorageError::new(Operation::Query, name, error))
    }
}

impl Host for LimitedHost {
    type File = FileStorage;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<FileStorage> {
        open(name, mode, &self.pool).await
    }

    async fn create(&self, name: &Path, mode: OpenMode) -> Result<FileStorage> {
        create(name, mode, &self.pool).await
    }

    async fn create_unlike(
        &self,
        name: &Path,
        mode: OpenMode,
        spared: &dyn Fn(FileId) -> bool,
    ) -> Result<Option<Made<FileStorage>>> {
        create_unlike(name, mode, spared, &self.pool).await
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        FileHost.remove(name).await
    }

    async fn remove_file(&self, name: &Path, file: &FileStorage) -> Result<bool> {
        FileHost.remove_file(name, file).await
    }

    fn canonical(&self, name: &Path) -> Result<PathBuf> {
        FileHost.canonical(name)
    }

    fn find(&self, name: &Path) -> Result<Option<FileId>> {
        FileHost.find(name)
    }
}

/// Refuses names that cannot be removed.
fn check_removable(name: &Path) -> io::Result<()> {
    if is_descriptor_set(name) {
        let text = "it was handed in as a descriptor, so that its name is not known";
        return Err(io::Error::new(io::ErrorKind::Unsupported, text));
    }
    Ok(())
}

async fn open(name: &Path, mode: OpenMode, pool: &Arc<Pool>) -> Result<FileStorage> {
    mode.check(name)?;
    let opened = descriptor(name, name, mode, Taking::Alone, pool).await?;
    let storage = storage(opened, name, mode, OnceLock::new(), pool);
    storage.map_err(|error| error.named(Operation::Open, name))
}

async fn create(name: &Path, mode: OpenMode, pool: &Arc<Pool>) -> Result<FileStorage> {
    match create_unlike(name, mode, &|_| false, pool).await? {
        Some(made) => Ok(made.file),
        None => unreachable!("no file is spared"),
    }
}

async fn create_unlike(
    name: &Path,
    mode: OpenMode,
    spared: &dyn Fn(FileId) -> bool,
    pool: &Arc<Pool>,
) -> Result<Option<Made<FileStorage>>> {
    let mode = OpenMode { writable: true, ..mode };
    mode.check(name)?;
    let made = async {
        let Some((opened, durability, is_new)) = emptied(name, mode, spared, pool).await? else {
            return Ok(None);
        };
        let file = storage(opened, name, mode, durability, pool)?;
        Ok(Some(Made { file, is_new }))
    };
    made.await.map_err(|error: Failure| error.named(Operation::Create, name))
}

/// Opens a file, with its locks, and empties it, unless it is to be spared. Tells whether it is new.
async fn emptied(
    name: &Path,
    mode: OpenMode,
    spared: &dyn Fn(FileId) -> bool,
    pool: &Arc<Pool>,
) -> Attempt<Option<(Opened, OnceLock<Arc<Durability>>, bool)>> {
    if is_descriptor_set(name) {
        let opened = descriptor(name, name, mode, Taking::Alone, pool).await?;
        let emptied = empty(&opened, spared)?;
        return Ok(emptied.then(|| (opened, OnceLock::new(), false)));
    }
    for _ in 0..MOST_REPLACED {
        match fs::metadata(name) {
            // Who names a source as the target is told that, and not that the source is in use.
            Ok(found) if spared(id_at(&found)) => return Ok(None),
            Ok(found) => check_type(found.mode(), found.rdev(), mode)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
        let permit = pool.admit().await;
        // What is made here can be removed again even if there are no more descriptors.
        let spare = match pool.open(|| spare_of(name)).await {
            Err(error) if is_lack_of_descriptors(&error) => return Err(error.into()),
            // What cannot be opened for another reason matters only if a file is made.
            spare => spare.ok(),
        };
        let Some((file, is_new)) = new_or_found(name, mode, pool).await? else { continue };
        drop(spare);
        let created = if is_new { created_at(name, &file) } else { None };
        let durability = OnceLock::new();
        let attached = async {
            if is_new {
                let directory = pool.open(|| File::open(directory_of(name)?)).await?;
                durability.get_or_init(|| Arc::new(Durability::created(directory.into())));
            }
            attach(file, None, name, mode, Taking::Alone, permit, pool).await
        };
        let opened = match attached.await {
            Ok(opened) => opened,
            Err(error) => {
                // It stays if it has got another name.
                if let Some((place, id)) = created {
                    let _ = place.remove(id);
                }
                return Err(error);
            }
        };
        let is_there = opened.is_at(name);
        if !matches!(is_there, Ok(true)) {
            if let Some((place, id)) = created {
                let _ = place.remove(id);
            }
            is_there?;
            continue;
        }
        // What is new is nobody's yet.
        let emptied = empty(&opened, &|id| !is_new && spared(id))?;
        return Ok(emptied.then_some((opened, durability, is_new)));
    }
    Err(replaced().into())
}

/// Empties a file whose locks are held, unless it is to be spared. Returns whether it may be written to.
fn empty(opened: &Opened, spared: &dyn Fn(FileId) -> bool) -> io::Result<bool> {
    if spared(opened.id) {
        return Ok(false);
    }
    if opened.kind == Kind::Regular {
        sys::ftruncate(&opened.target.file, 0)?;
    }
    Ok(true)
}

/// Opens a file, and tells whether it is new. `None` if the name has changed meanwhile.
async fn new_or_found(name: &Path, mode: OpenMode, pool: &Pool) -> Attempt<Option<(File, bool)>> {
    let explained = |error| Failure::Plain(explain_direct(error, mode));
    let mut name = name.to_owned();
    for _ in 0..MOST_LINKS {
        match pool.open(|| options(mode).create_new(true).open(&name)).await {
            Ok(file) => return Ok(Some((file, true))),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(explained(error)),
        }
        match pool.open(|| existing(&name, mode)).await {
            Ok(file) => return Ok(Some((file, false))),
            // The name is a link to a file that does not exist, which is created by its own name, or was removed in
            // between.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let Some(target) = target_of(&name).map_err(explained)? else { return Ok(None) };
                name = name.parent().map_or_else(|| target.clone(), |parent| parent.join(&target));
            }
            Err(error) => return Err(explained(error)),
        }
    }
    Err(io::Error::from_raw_os_error(libc::ELOOP).into())
}

/// Where a link leads; `None` if there is none any more.
///
/// # Errors
/// It may not be followed to create a file.
fn target_of(link: &Path) -> io::Result<Option<PathBuf>> {
    let (Some(parent), Some(file)) = (link.parent(), link.file_name()) else { return Ok(None) };
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let directory = rustix::fs::open(parent, flags | OFlags::DIRECTORY, Mode::empty())?;
    let held = match openat(&directory, file, flags | OFlags::NOFOLLOW, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        held => held?,
    };
    let found = fstat(&held)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::Symlink {
        return Ok(None);
    }
    let of_directory = fstat(&directory)?;
    let own = rustix::process::geteuid().as_raw();
    if !may_follow(found.st_uid, of_directory.st_mode, of_directory.st_uid, own) {
        return Err(io::Error::from_raw_os_error(libc::EACCES));
    }
    let target = readlinkat(&held, c"", Vec::new())?;
    Ok(Some(PathBuf::from(OsString::from_vec(target.into_bytes()))))
}

/// Whether a link of the user `owner` is followed to create a file. In a directory where everybody may make links and
/// nobody remove another's, such as `/tmp`, only links of one's `own` and of the directory's owner are: as Linux judges
/// with `fs.protected_symlinks` what it follows itself.
fn may_follow(owner: u32, directory: u32, of_directory: u32, own: u32) -> bool {
    let shared = libc::S_ISVTX | libc::S_IWOTH;
    directory & shared != shared || owner == own || owner == of_directory
}

/// Where a file is that was created under this name, and which one it is.
fn created_at(name: &Path, file: &File) -> Option<(Place, Identity)> {
    let id = place::identity_of(file).ok()?;
    let place = Place::of(&fs::canonicalize(name).ok()?).ok()?;
    place.holds(id).then_some((place, id))
}

/// As many descriptors as the removal of a file takes.
fn spare_of(name: &Path) -> io::Result<[File; 2]> {
    let directory = directory_of(name)?;
    Ok([File::open(&directory)?, File::open(&directory)?])
}

fn is_lack_of_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// The directory of a file, or of the one that its name is a link to.
fn directory_of(name: &Path) -> io::Result<PathBuf> {
    let real = if name.is_symlink() { fs::canonicalize(name)? } else { name.to_owned() };
    let parent = real.parent().filter(|parent| !parent.as_os_str().is_empty());
    Ok(parent.unwrap_or(Path::new(".")).to_owned())
}

fn storage(
    opened: Opened,
    name: &Path,
    mode: OpenMode,
    durability: OnceLock<Arc<Durability>>,
    pool: &Arc<Pool>,
) -> Attempt<FileStorage> {
    storage_of(opened, name, mode, durability, pool, false)
}

/// As [`storage`]; a file whose descriptor is `kept` is not opened again by its name.
fn storage_of(
    opened: Opened,
    name: &Path,
    mode: OpenMode,
    durability: OnceLock<Arc<Durability>>,
    pool: &Arc<Pool>,
    kept: bool,
) -> Attempt<FileStorage> {
    let Opened { target, id, kind } = opened;
    let direct = if mode.direct { Some(Box::new(direct(&target.file, kind)?)) } else { None };
    let file = Named::new(name, mode, id, pool.clone())?;
    let target = Arc::new(target);
    let nameless = kept || is_descriptor_set(&file.path);
    let source = if mode.writable || kind != Kind::Regular || nameless {
        Source::Kept(target, None)
    } else {
        Source::of_reader(&file, target)?
    };
    Ok(FileStorage {
        writing: Writing::new(mode.writable),
        file,
        source: ArcSwap::from_pointee(source),
        mapped: OnceLock::new(),
        kind,
        direct,
        cached: Cached::default(),
        durability,
        rejected: Rejected::default(),
        timed: OnceLock::new(),
        found: OnceLock::new(),
    })
}

fn direct(file: &OwnedFd, kind: Kind) -> io::Result<Direct> {
    let (memory, block) = match (sys::direct_alignment(file), kind) {
        (Some((0, _) | (_, 0)), _) => {
            return Err(no_direct(&io::Error::from_raw_os_error(libc::EINVAL)));
        }
        (Some(alignment), _) => alignment,
        (None, Kind::Device { block }) => (u64::from(block), u64::from(block)),
        // Enough for the block device of every file system with blocks of at most a page.
        (None, Kind::Regular) => (4096, 4096),
    };
    Direct::new(memory, block, kind == Kind::Regular)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_strangers_link_in_a_directory_for_all_creates_no_file() {
        let (own, host, stranger) = (1000, 0, 1001);
        for (directory, owner, expected) in [
            (0o41777, stranger, false),
            (0o41777, own, true),
            (0o41777, host, true),
            (0o40777, stranger, true),
            (0o41775, stranger, true),
            (0o40755, stranger, true),
        ] {
            assert_eq!(may_follow(owner, directory, host, own), expected, "{directory:o} {owner}");
        }
    }

    #[test]
    fn what_is_a_link_leads_where_it_says() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        symlink("there", at("own")).unwrap();
        fs::write(at("file"), "").unwrap();
        assert_eq!(target_of(&at("own")).unwrap(), Some("there".into()));
        assert_eq!(target_of(&at("file")).unwrap(), None);
        assert_eq!(target_of(&at("missing")).unwrap(), None);
    }
}
