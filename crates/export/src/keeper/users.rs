//! Who uses a disk: what is mounted from it, what other devices are on it, and who has it open.

use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::ffi::CString;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process;

/// The most users that are named.
const NAMED: usize = 8;

/// A disk that may be in use.
pub(crate) struct Disk {
    /// Its name: `ublkbN`.
    name: String,
    /// What is being looked at, which may not answer.
    looks_at: Mutex<String>,
}

/// The disk is claimed: until this is dropped it cannot be mounted, nor can other devices be put on it.
#[derive(Debug)]
pub(crate) struct Claim {
    file: File,
}

impl Claim {
    /// Writes what the kernel has of the disk.
    ///
    /// # Errors
    /// Something written through the page cache has not reached the disk, now or since the claim.
    pub(crate) fn write_back(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    /// Writes what the kernel has of the disk, to which nothing can be written any more then: whoever still has it
    /// open, or opens it, is refused.
    ///
    /// # Errors
    /// As [`write_back`](Self::write_back), or the disk cannot be made read-only.
    pub(crate) fn write_back_last(&self) -> io::Result<()> {
        /// `BLKROSET` of `linux/fs.h`.
        const SET_READ_ONLY: libc::Ioctl = 0x125d;
        // Most of it before: the kernel warns of what it writes to a disk that is read-only.
        let first = self.file.sync_all();
        let read_only: libc::c_int = 1;
        // SAFETY: the call reads one number.
        if unsafe { libc::ioctl(self.file.as_raw_fd(), SET_READ_ONLY, &raw const read_only) } < 0 {
            return Err(io::Error::last_os_error());
        }
        first.and(self.file.sync_all())
    }
}

/// What comes of an attempt to claim a disk.
#[derive(Debug)]
pub(crate) enum Claimed {
    /// Nobody uses it.
    Free(Claim),
    /// These use it.
    InUse(String),
    /// It is not there.
    Gone,
}

impl Disk {
    pub(crate) fn new(number: u32) -> Self {
        Self { name: format!("ublkb{number}"), looks_at: Mutex::default() }
    }

    /// What is being looked at.
    pub(crate) fn looks_at(&self) -> String {
        self.looks_at.lock().clone()
    }

    fn look_at(&self, what: impl fmt::Display) {
        *self.looks_at.lock() = what.to_string();
    }

    fn in_sysfs(&self) -> PathBuf {
        Path::new("/sys/class/block").join(&self.name)
    }

    /// Claims the disk unless it is in use.
    ///
    /// The kernel knows of everything that claims a disk: file systems, swap space, devices made of others. Who only
    /// has it open does not claim it, and is looked for among the processes.
    ///
    /// # Errors
    /// It cannot be told whether it is in use.
    pub(crate) fn claim(&self) -> io::Result<Claimed> {
        // First without a claim, which would make others fail.
        let Some(numbers) = self.numbers()? else { return Ok(Claimed::Gone) };
        let open = self.openers(&numbers)?;
        if !open.is_empty() {
            return Ok(Claimed::InUse(self.named(&numbers, open)));
        }
        let path = Path::new("/dev").join(&self.name);
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_EXCL | libc::O_NONBLOCK);
        let file = match options.open(&path) {
            Ok(file) => file,
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                return Ok(Claimed::InUse(self.named(&numbers, Vec::new())));
            }
            Err(_) if self.numbers()?.is_none() => return Ok(Claimed::Gone),
            Err(error) => return Err(error),
        };
        let metadata = file.metadata()?;
        if !metadata.file_type().is_block_device() || !numbers.contains(&metadata.rdev()) {
            return Err(io::Error::other(format!("{} is not the device", path.display())));
        }
        // Partitions may have been found meanwhile.
        let Some(numbers) = self.numbers()? else { return Ok(Claimed::Gone) };
        let open = self.openers(&numbers)?;
        if open.is_empty() {
            return Ok(Claimed::Free(Claim { file }));
        }
        Ok(Claimed::InUse(self.named(&numbers, open)))
    }

    /// The device numbers of the disk and its partitions; `None` if there is no disk.
    fn numbers(&self) -> io::Result<Option<BTreeSet<u64>>> {
        numbers_in(&self.in_sysfs())
    }

    /// Names those who use the disk, as far as they can be seen from here.
    fn named(&self, numbers: &BTreeSet<u64>, openers: Vec<String>) -> String {
        let mut users = openers;
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        users.extend(mounts_of(&mounts, numbers).map(|place| format!("it is mounted on {place}")));
        let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
        let is_swap = |file: &str| {
            let metadata = fs::metadata(file);
            metadata.is_ok_and(|found| {
                found.file_type().is_block_device() && numbers.contains(&found.rdev())
            })
        };
        let mut files = swaps.lines().filter_map(|line| line.split_whitespace().next());
        if files.any(is_swap) {
            users.push("it is swap space".into());
        }
        users.extend(holders(&self.in_sysfs()).map(|holder| format!("{holder} is made of it")));
        if users.is_empty() {
            return "another namespace has it mounted, or another device is made of it".into();
        }
        let more = users.len().saturating_sub(NAMED);
        users.truncate(NAMED);
        if more > 0 {
            users.push(format!("{more} more"));
        }
        users.join(", ")
    }

    /// The processes, but for this one, and the loop devices that have a device with one of these numbers open.
    ///
    /// # Errors
    /// One cannot be looked at.
    fn openers(&self, numbers: &BTreeSet<u64>) -> io::Result<Vec<String>> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let path = entry?.path();
            let number = path.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok());
            let Some(number) = number.filter(|number| *number != process::id()) else { continue };
            self.look_at(format_args!("process {number}"));
            let open = has_open(&path.join("fd"), numbers);
            if open.map_err(|error| about(&format_args!("process {number}"), &error))? {
                let name = fs::read_to_string(path.join("comm")).unwrap_or_default();
                let name = name.trim().escape_debug();
                found.push(format!("process {number} ({name}) has it open"));
            }
        }
        for entry in fs::read_dir("/sys/class/block")? {
            let path = entry?.path();
            let Some(name) = path.file_name().filter(|_| path.join("loop/backing_file").exists())
            else {
                continue;
            };
            self.look_at(format_args!("loop device {}", name.display()));
            let backing = backing_of_loop(&Path::new("/dev").join(name));
            let backing = backing.map_err(|error| about(&name.display(), &error))?;
            if backing.is_some_and(|of| numbers.contains(&of)) {
                found.push(format!("{} is a loop device on it", name.display()));
            }
        }
        Ok(found)
    }
}

/// The device numbers of a disk in sysfs and of its partitions.
fn numbers_in(disk: &Path) -> io::Result<Option<BTreeSet<u64>>> {
    let mut numbers = BTreeSet::new();
    let own = match fs::read_to_string(disk.join("dev")) {
        Ok(text) => text,
        Err(error) if is_gone(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    numbers.extend(number_of(&own));
    for entry in fs::read_dir(disk)? {
        let part = entry?.path();
        if part.join("partition").exists()
            && let Ok(text) = fs::read_to_string(part.join("dev"))
        {
            numbers.extend(number_of(&text));
        }
    }
    Ok(Some(numbers))
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENXIO))
}

/// A device's number, from `MAJOR:MINOR`.
fn number_of(text: &str) -> Option<u64> {
    let (major, minor) = text.trim().split_once(':')?;
    Some(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// Where devices with these numbers are mounted, by the contents of a `mountinfo`.
fn mounts_of<'a>(mounts: &'a str, numbers: &BTreeSet<u64>) -> impl Iterator<Item = &'a str> {
    mounts.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(2);
        let number = number_of(words.next()?)?;
        let place = words.nth(1)?;
        numbers.contains(&number).then_some(place)
    })
}

/// The names of the devices that are made of a disk or its partitions.
fn holders(disk: &Path) -> impl Iterator<Item = String> {
    let names = |directory: PathBuf| {
        fs::read_dir(directory)
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
    };
    let parts =
        fs::read_dir(disk).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let parts: Vec<_> = parts.filter(|part| part.join("partition").exists()).collect();
    [disk.to_owned()].into_iter().chain(parts).flat_map(move |part| names(part.join("holders")))
}

/// The error with what it is about.
fn about(what: &dyn fmt::Display, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// Whether one of the descriptors in a directory of `/proc` is of a block device with one of these numbers.
fn has_open(directory: &Path, numbers: &BTreeSet<u64>) -> io::Result<bool> {
    // A process that has ended meanwhile has nothing open.
    let ended = |error: &io::Error| {
        error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
    };
    let unless_ended = |error| if ended(&error) { Ok(false) } else { Err(error) };
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) => return unless_ended(error),
    };
    for entry in entries {
        match entry.and_then(|entry| device_behind(&entry.path())) {
            Ok(Some(number)) if numbers.contains(&number) => return Ok(true),
            Ok(_) => {}
            Err(error) => {
                unless_ended(error)?;
            }
        }
    }
    Ok(false)
}

/// The number of the block device behind a link of `/proc/PID/fd`, if it is one.
fn device_behind(link: &Path) -> io::Result<Option<u64>> {
    /// Errors of file systems that have lost their server or device: what is behind the link is a file there.
    const LOST: [i32; 6] = [
        libc::ESTALE,
        libc::ENOTCONN,
        libc::ETIMEDOUT,
        libc::EHOSTDOWN,
        libc::EHOSTUNREACH,
        libc::EIO,
    ];
    let path = CString::new(link.as_os_str().as_bytes())?;
    // SAFETY: all zeroes are a valid `statx`.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path ends with NUL, and the result has room.
    let done = unsafe {
        libc::statx(
            libc::AT_FDCWD,
            path.as_ptr(),
            libc::AT_STATX_DONT_SYNC | libc::AT_NO_AUTOMOUNT,
            // Whoever asks for nothing is refused nothing by a user's FUSE mount. What the kernel knows is told anyway.
            0,
            &raw mut found,
        )
    };
    if done < 0 {
        let error = io::Error::last_os_error();
        let is_lost = error.raw_os_error().is_some_and(|number| LOST.contains(&number));
        return if is_lost { Ok(None) } else { Err(error) };
    }
    let is_block = u32::from(found.stx_mode) & libc::S_IFMT == libc::S_IFBLK;
    Ok(is_block.then(|| libc::makedev(found.stx_rdev_major, found.stx_rdev_minor)))
}

/// The number of the device that a loop device is on, if it is on one.
fn backing_of_loop(path: &Path) -> io::Result<Option<u64>> {
    /// `LOOP_GET_STATUS64` and the length of `struct loop_info64` in `linux/loop.h`.
    const GET_STATUS: libc::Ioctl = 0x4c05;
    const LENGTH: usize = 232;
    let file = match OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Ok(file) => file,
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut info = [0_u64; LENGTH / 8];
    // SAFETY: the call writes the structure, for which there is room.
    if unsafe { libc::ioctl(file.as_raw_fd(), GET_STATUS, info.as_mut_ptr()) } == 0 {
        // The third number is the device that the file is.
        return Ok(Some(info[2]));
    }
    let error = io::Error::last_os_error();
    // It is on nothing any more.
    if error.raw_os_error() == Some(libc::ENXIO) { Ok(None) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_found_by_their_numbers() {
        let mounts = "22 1 259:3 / / rw - ext4 /dev/ublkb0 rw\n\
                      23 22 0:5 / /proc rw shared:2 - proc proc rw\n\
                      24 22 259:4 /sub /mnt/a\\040b rw - ext4 /dev/other rw\nodd";
        let find = |numbers: &[(u32, u32)]| -> Vec<&str> {
            let numbers = numbers.iter().map(|(major, minor)| libc::makedev(*major, *minor));
            mounts_of(mounts, &numbers.collect()).collect()
        };
        assert_eq!(find(&[(259, 4)]), ["/mnt/a\\040b"]);
        assert_eq!(find(&[(259, 3), (259, 4)]), ["/", "/mnt/a\\040b"]);
        assert!(find(&[(8, 0)]).is_empty());
    }

    #[test]
    fn a_disk_has_the_numbers_of_its_partitions() {
        let directory = tempfile::tempdir().unwrap();
        let disk = directory.path().join("ublkb7");
        assert!(numbers_in(&disk).unwrap().is_none());
        for (name, number, is_part) in [("", "259:1\n", false), ("ublkb7p1", "259:1048580\n", true)]
        {
            fs::create_dir_all(disk.join(name).join("holders")).unwrap();
            fs::write(disk.join(name).join("dev"), number).unwrap();
            if is_part {
                fs::write(disk.join(name).join("partition"), "1\n").unwrap();
            }
        }
        fs::write(disk.join("ublkb7p1/holders/dm-3"), "").unwrap();
        let numbers = numbers_in(&disk).unwrap().unwrap();
        assert_eq!(numbers, [libc::makedev(259, 1), libc::makedev(259, 1_048_580)].into());
        assert_eq!(holders(&disk).collect::<Vec<_>>(), ["dm-3"]);
        assert_eq!(number_of("nothing"), None);
    }

    #[test]
    fn what_is_no_block_device_has_no_number() {
        let file = File::open("/dev/null").unwrap();
        let link = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        assert_eq!(device_behind(&link).unwrap(), None);
        let none = device_behind(Path::new("/proc/self/fd/none")).unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn who_has_ended_has_nothing_open_and_who_cannot_be_looked_at_is_an_error() {
        let numbers = [libc::makedev(1, 1)].into();
        assert!(!has_open(Path::new("/proc/self/fd"), &numbers).unwrap());
        assert!(!has_open(Path::new("/proc/0/fd"), &numbers).unwrap());
        // A file is no directory.
        has_open(Path::new("/proc/self/comm"), &numbers).unwrap_err();
        assert!(backing_of_loop(Path::new("/dev/null")).is_err());
        assert!(backing_of_loop(Path::new("/dev/none")).is_err());
    }
}
