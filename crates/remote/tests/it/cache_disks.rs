//! A cache on a disk that is full or fails shows no wrong byte, and does without it.

use crate::cache::{Layer, files, open, tidy};
use isobath_remote::cache::{CachedLayer, Filled, Look, NotKept, ObjectKind};
use isobath_remote::store::Version;
use isobath_remote::{BLOCK, Digest};
use isobath_testkit::process::run;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file system of this size, until it is dropped.
pub(crate) struct Small(tempfile::TempDir);

impl Small {
    pub(crate) fn new(size: &str) -> Self {
        let options = format!("size={size},mode=700");
        Self::mounted(&["-t", "tmpfs", "-o", &options], Path::new("none"))
    }

    fn mounted(options: &[&str], what: &Path) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        let mounted = run(mount.args(options).arg(what).arg(directory.path()));
        assert_eq!(mounted.code(), 0, "this test mounts a file system, which needs root");
        Self(directory)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Takes all the space.
    pub(crate) fn fill(&self) {
        let mut file = File::create(self.path().join("filler")).unwrap();
        while file.write(&[1; 4096]).is_ok_and(|count| count > 0) {}
    }

    /// Takes all the space also of a file system that gives some of it back when it is written.
    fn fill_to_the_last(&self) {
        let mut file = File::create(self.path().join("filler")).unwrap();
        while file.write(&vec![1; 1 << 20]).is_ok_and(|count| count > 0) {}
        let _ = file.sync_data();
        let mut refused = 0;
        while refused < 20 {
            let written = file.write(&[1; 4096]).and_then(|_| file.sync_data());
            refused += u32::from(written.is_err());
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // The thread of a cache may be using it for a moment.
        run(Command::new("umount").arg("-l").arg(self.path()));
    }
}

#[test]
fn a_full_disk_keeps_nothing_more_and_is_used_again_when_there_is_room() {
    let small = Small::new("12m");
    let reserve = small.path().join("reserve");
    fs::write(&reserve, vec![1; 4 << 20]).unwrap();
    let inner = small.path().join("cache");
    let cache = open(&inner);
    let of_store = Layer::new(1, 60 * BLOCK);
    let layer = of_store.open(&cache);
    let mut kept = 0;
    for block in 0..60 {
        match layer.fill(block, of_store.block(block)) {
            Filled::Kept(_) => kept += 1,
            filled => assert_eq!(filled, Filled::NotKept(NotKept::Failing)),
        }
    }
    assert!((20..32).contains(&kept), "{kept}");
    small.fill();
    assert_eq!(of_store.present(&layer), kept);
    // Another layer can have no files, and objects none.
    let other = Layer::new(2, 3 * BLOCK);
    let detached = other.open(&cache);
    assert!(!detached.is_attached());
    assert_eq!((detached.blocks(), detached.file().metadata().unwrap().len()), (3, 3 * BLOCK));
    assert_eq!((detached.look(2), detached.verify(2)), (Look::Absent, Look::Absent));
    assert_eq!(detached.fill(2, other.block(2)), Filled::NotKept(NotKept::Detached));
    assert_eq!(detached.fill(2, other.block(1)), Filled::Wrong);
    let (digest, object) = (Digest::of(&[7; 9000]), [7; 9000]);
    let held = cache.keep(ObjectKind::Heads, &digest, &object).unwrap();
    assert!(!held.is_kept());
    assert_eq!(**held.bytes(), object);
    cache.keep_manifest("s3://b/vm", &object, &Version { tag: None, number: None });
    assert!(cache.manifest("s3://b/vm").is_none());
    // A cache that is opened now works, and shows what is there.
    let second = open(&inner);
    assert_eq!(of_store.present(&of_store.open(&second)), kept);
    fs::remove_file(small.path().join("filler")).unwrap();
    fs::remove_file(reserve).unwrap();
    tidy(&cache);
    let tried = (0..20_000).find(|_| matches!(layer.fill(59, of_store.block(59)), Filled::Kept(_)));
    assert!(tried.is_some());
    assert!(of_store.read(&layer, 59));
    assert!(other.open(&cache).is_attached());
}

/// Drops what the kernel has of a file in memory and can read from the disk again.
fn forget(file: &File) {
    // SAFETY: a system call without memory.
    let done = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    assert_eq!(done, 0);
}

/// A file system on a disk that can be full before its file system is.
pub(crate) struct Failing {
    // Dropped before what is below.
    small: Small,
    below: Small,
}

impl Failing {
    pub(crate) fn new() -> Self {
        let below = Small::new("24m");
        let image = below.path().join("image");
        File::create(&image).unwrap().set_len(64 << 20).unwrap();
        let mkfs = isobath_testkit::tools::require("mkfs.ext4");
        let (without, lazy) = ("^has_journal", "lazy_itable_init=0");
        let made = run(Command::new(mkfs)
            .args(["-q", "-F", "-b", "4096", "-O", without, "-E", lazy])
            .arg(&image));
        assert_eq!(made.code(), 0, "{}", made.report());
        Self { small: Small::mounted(&["-o", "loop"], &image), below }
    }

    pub(crate) fn path(&self) -> PathBuf {
        // The modes of a new file system's root are those of the system.
        self.small.path().join("cache")
    }

    /// Writes what the kernel has in memory to the disk, if that works.
    fn sync(&self) {
        let _ = run(Command::new("sync").arg("-f").arg(self.small.path()));
    }

    /// What has no place on the disk yet is refused from now on.
    fn fail(&self) {
        self.sync();
        self.below.fill();
    }

    /// Takes a page with these bytes out of the disk, which the kernel has in memory.
    fn take_away(&self, page: &[u8]) {
        let path = self.below.path().join("image");
        let image = fs::read(&path).unwrap();
        let number = image.chunks(4096).position(|found| found == page).unwrap();
        let file = OpenOptions::new().write(true).open(path).unwrap();
        let flags = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let offset = number as libc::off_t * 4096;
        // SAFETY: a system call without memory.
        assert_eq!(unsafe { libc::fallocate(file.as_raw_fd(), flags, offset, 4096) }, 0);
    }

    /// The disk ends before the page with these bytes, once the kernel has forgotten the file.
    pub(crate) fn end_before(&self, page: &[u8], file: &Path) {
        self.sync();
        let path = self.below.path().join("image");
        let image = fs::read(&path).unwrap();
        let number = image.chunks(4096).position(|found| found == page).unwrap();
        OpenOptions::new().write(true).open(path).unwrap().set_len(number as u64 * 4096).unwrap();
        forget(&File::open(file).unwrap());
    }

    /// Nothing is refused any more.
    fn mend(&self) {
        fs::remove_file(self.below.path().join("filler")).unwrap();
    }
}

fn absent(layer: &CachedLayer) -> usize {
    (0..layer.blocks()).filter(|block| layer.look(*block) == Look::Absent).count()
}

#[test]
fn blocks_that_the_disk_refused_are_fetched_again_though_the_kernel_still_has_them() {
    let disk = Failing::new();
    let of_store = Layer::new(1, 40 * BLOCK);
    let cache = open(&disk.path());
    let layer = of_store.open(&cache);
    // The map has its place on the disk.
    of_store.fill(&layer, 0);
    disk.fail();
    (1..40).for_each(|block| of_store.fill(&layer, block));
    layer.doubt(7);
    disk.sync();
    // Whoever verifies or fills a block hears of it.
    assert_eq!(layer.verify(7), Look::Absent);
    assert!(layer.is_attached());
    assert_eq!(absent(&layer), 40);
    assert_eq!(of_store.present(&layer), 0);
    // What is filled now is not taken for what is on the disk, either, before it is.
    (0..40).for_each(|block| of_store.fill(&layer, block));
    disk.sync();
    layer.verify(0);
    of_store.present(&layer);
    forget(layer.file());
    of_store.present(&layer);
    disk.mend();
    layer.verify(0);
    (0..40).for_each(|block| of_store.fill(&layer, block));
    disk.sync();
    layer.verify(0);
    forget(layer.file());
    assert_eq!(of_store.present(&layer), 40);
}

#[test]
fn blocks_that_the_disk_refused_while_nobody_used_them_are_read_from_it() {
    let disk = Failing::new();
    let of_store = Layer::new(1, 40 * BLOCK);
    {
        let layer = of_store.open(&open(&disk.path()));
        of_store.fill(&layer, 0);
        disk.fail();
        (1..40).for_each(|block| of_store.fill(&layer, block));
    }
    // Somebody else hears of it, and the kernel says it to nobody again.
    let [data] = &files(&disk.path().join("layers"), ".data")[..] else { panic!("one layer") };
    let file = File::open(data).unwrap();
    let _ = file.sync_all();
    drop(file);
    let layer = of_store.open(&open(&disk.path()));
    of_store.present(&layer);
    forget(layer.file());
    of_store.present(&layer);
}

#[test]
fn a_map_that_the_disk_refused_is_used_no_more() {
    let disk = Failing::new();
    let of_store = Layer::new(1, 100 << 10);
    let cache = open(&disk.path());
    let layer = of_store.open(&cache);
    // The data has its place on the disk.
    let data = OpenOptions::new().write(true).open(layer.path()).unwrap();
    data.write_all_at(&vec![1; 100 << 10], 0).unwrap();
    disk.sync();
    // The words lose theirs, and find no other.
    disk.take_away(&fs::read(&files(&disk.path().join("layers"), ".map")[0]).unwrap()[4096..]);
    disk.below.fill();
    of_store.fill(&layer, 0);
    let other = of_store.open(&open(&disk.path()));
    assert!(of_store.read(&other, 0));
    disk.sync();
    for one in [&layer, &other] {
        assert_eq!(one.fill(0, of_store.block(0)), Filled::NotKept(NotKept::Detached));
        assert_eq!(one.look(0), Look::Absent);
        assert!(!one.is_attached());
    }
    assert_eq!(files(&disk.path().join("layers"), ".map").len(), 0);
    disk.mend();
    let again = of_store.open(&cache);
    of_store.fill(&again, 0);
    assert!(of_store.read(&again, 0));
}

#[test]
fn a_map_that_cannot_be_written_begins_no_session() {
    // Files that share their blocks need room for each change.
    let below = tempfile::tempdir().unwrap();
    let image = below.path().join("image");
    File::create(&image).unwrap().set_len(320 << 20).unwrap();
    let mkfs = isobath_testkit::tools::require("mkfs.xfs");
    let made = run(Command::new(mkfs).args(["-q", "-m", "reflink=1"]).arg(&image));
    assert_eq!(made.code(), 0, "{}", made.report());
    let small = Small::mounted(&["-o", "loop"], &image);
    let path = small.path().join("cache");
    let of_store = Layer::new(1, 8 * BLOCK);
    {
        let layer = of_store.open(&open(&path));
        (0..8).for_each(|block| of_store.fill(&layer, block));
    }
    isobath_testkit::until("nobody uses the layer", || {
        of_store.open(&open(&path)).look(0) == Look::Unverified
    });
    {
        // All are verified again.
        let layer = of_store.open(&open(&path));
        assert_eq!(of_store.present(&layer), 8);
    }
    let one_file = |suffix| files(&path.join("layers"), suffix).pop().unwrap();
    let (map, data) = (one_file(".map"), one_file(".data"));
    let copy = Command::new("cp")
        .arg("--reflink=always")
        .arg(&map)
        .arg(small.path().join("copy"))
        .status();
    assert!(copy.unwrap().success());
    // Damage, while nobody uses it.
    let file = OpenOptions::new().write(true).open(&data).unwrap();
    file.write_all_at(&vec![0; BLOCK as usize], 0).unwrap();
    file.sync_all().unwrap();
    drop(file);
    small.fill_to_the_last();
    let first = open(&path);
    let one = of_store.open(&first);
    assert_eq!(of_store.present(&one), 0);
    fs::remove_file(small.path().join("filler")).unwrap();
    let two = of_store.open(&open(&path));
    of_store.present(&two);
    let three = of_store.open(&first);
    of_store.fill(&three, 0);
}
