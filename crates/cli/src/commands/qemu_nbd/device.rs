//! The kernel's NBD devices: which one a name is, and what becomes of what is written to it.

use super::netlink::{self, Connection, Driver};
use crate::failure::Failure;
use isobath_ring::sleep;
use isobath_storage::cause;
use rustix::fs::{major, minor};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The number that Linux gives to NBD devices.
const MAJOR: u32 = 43;
/// How often, and how long, to wait for a device that is open but not connected: udev looks at each one that was
/// disconnected.
const TRIES: usize = 100;
const PAUSE: Duration = Duration::from_millis(50);
/// How long the disconnection waits for the server to close its image.
const SERVER_PATIENCE: Duration = Duration::from_secs(10);

/// A device of the kernel's NBD driver, connected or not.
#[derive(Clone, Debug)]
pub(super) struct Device {
    path: PathBuf,
    index: u32,
    /// Its directory in sysfs.
    directory: PathBuf,
}

impl Device {
    /// The device of this name, which is not opened: an open device cannot be connected.
    ///
    /// # Errors
    /// There is none, or it is not a whole NBD device.
    pub(super) fn find(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path);
        let file = file.map_err(|error| {
            if error.kind() == ErrorKind::NotFound && !Path::new("/sys/module/nbd").exists() {
                let cause = cause(&error);
                return io::Error::other(format!(
                    "{cause}; the kernel's NBD driver is not loaded, which 'modprobe nbd' does"
                ));
            }
            error
        })?;
        let found = file.metadata()?;
        let number = found.rdev();
        if !found.file_type().is_block_device() || major(number) != MAJOR {
            return Err(io::Error::other("it is no NBD device, such as /dev/nbd0"));
        }
        let directory = format!("/sys/dev/block/{}:{}", major(number), minor(number));
        let directory = fs::canonicalize(&directory)
            .map_err(|error| io::Error::other(format!("{directory}: {}", cause(&error))))?;
        let name = directory.file_name().unwrap_or_default().to_string_lossy();
        let index = name.strip_prefix("nbd").and_then(|index| index.parse().ok());
        let Some(index) = index.filter(|_| !directory.join("partition").exists()) else {
            return Err(io::Error::other(format!(
                "it is '{name}', a part of an NBD device; name the whole one"
            )));
        };
        Ok(Self { path: path.to_owned(), index, directory })
    }

    /// The process that has connected it, as sysfs has it; `None` if it is not connected.
    fn owner(&self) -> Option<String> {
        let owner = fs::read_to_string(self.directory.join("pid")).ok()?;
        Some(owner.trim().to_owned())
    }

    /// The process that serves it, if that is a server of ours: it has the image open until it ends.
    fn server(&self) -> Option<OwnedFd> {
        let owner = self.owner()?;
        let process = Pid::from_raw(owner.parse().ok()?)?;
        let handle = pidfd_open(process, PidfdFlags::empty()).ok()?;
        // Looked at after it was opened, so that both are of one process. Another PID namespace has other numbers.
        let program = fs::read_to_string(format!("/proc/{owner}/comm")).ok()?;
        ["isobath", "qemu-nbd"].contains(&program.trim()).then_some(handle)
    }

    /// Writes to the disk what the kernel holds for it, of file systems on it too, and of those on its partitions. What
    /// other devices on it hold, and partitions that have no node here, is written with everything that the machine
    /// holds, as `sync(2)` does.
    ///
    /// # Errors
    /// The device may not be opened; a write has failed.
    fn flush(&self) -> io::Result<()> {
        let (mut files, mut rest) = (Vec::new(), has_holders(&self.directory));
        for entry in fs::read_dir(&self.directory)? {
            let part = entry?.path();
            if part.join("partition").exists() {
                let node = Path::new("/dev").join(part.file_name().unwrap_or_default());
                rest |= has_holders(&part);
                match open_node(&part, &node) {
                    Ok(file) => files.push(file),
                    Err(_) => rest = true,
                }
            }
        }
        match open_node(&self.directory, &self.path) {
            Ok(file) => files.push(file),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => return Err(error),
            Err(_) => rest = true,
        }
        if rest {
            rustix::fs::sync();
        }
        files.iter().map(flush_file).fold(Ok(()), Result::and)
    }

    /// Opens the device, for which the kernel reads its table of partitions.
    fn look(&self) -> io::Result<()> {
        File::open(&self.path).map(drop)
    }
}

/// Whether other devices, such as logical volumes, are on the one of a directory in sysfs.
fn has_holders(directory: &Path) -> bool {
    fs::read_dir(directory.join("holders")).is_ok_and(|mut holders| holders.next().is_some())
}

/// Opens the device of a directory in sysfs by its name in the file system.
fn open_node(directory: &Path, path: &Path) -> io::Result<File> {
    let expected = fs::read_to_string(directory.join("dev"))?;
    let file = File::open(path)?;
    let number = file.metadata()?.rdev();
    if format!("{}:{}", major(number), minor(number)) != expected.trim() {
        return Err(io::Error::other(format!("{} is another device by now", path.display())));
    }
    Ok(file)
}

fn flush_file(file: &File) -> io::Result<()> {
    // SAFETY: the descriptor is open, and the request has no argument.
    if unsafe { libc::ioctl(file.as_raw_fd(), BLKFLSBUF as _, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // It tells of writes that failed.
    file.sync_all()
}

/// `_IO(0x12, 0x61)` of `linux/fs.h`: writes out a file system on the device, and what is cached of the device itself.
const BLKFLSBUF: u32 = 0x12 << 8 | 0x61;

/// A device that this process has connected.
pub(super) struct Connected {
    device: Device,
    driver: Driver,
    /// What sysfs says of whoever has connected it.
    owner: Option<String>,
}

impl Connected {
    /// Connects the device of this name.
    ///
    /// # Errors
    /// There is none; it is connected, or open and stays so; the caller may not connect it.
    pub(super) async fn connect(path: &Path, connection: &Connection<'_>) -> Result<Self, Failure> {
        let device = Device::find(path).map_err(|error| {
            Failure::new(format_args!("Failed to open {}: {}", path.display(), cause(&error)))
        })?;
        let refused = |reason: String| {
            Failure::new(format_args!("Failed to connect {}: {reason}", path.display()))
        };
        let mut driver = Driver::find().map_err(|error| refused(cause(&error)))?;
        let mut tries = 0;
        while let Err(error) = driver.connect(device.index, connection) {
            if error.raw_os_error() != Some(libc::EBUSY) {
                return Err(refused(netlink::reason(&error)));
            }
            if let Some(owner) = device.owner() {
                return Err(refused(format!(
                    "it is in use: process {owner} has connected it; disconnect it with 'qemu-nbd -d {}', or name \
                     another device",
                    path.display()
                )));
            }
            tries += 1;
            if tries == TRIES {
                return Err(refused(
                    "it is in use: another program has it open; name another device".into(),
                ));
            }
            sleep(PAUSE).await;
        }
        let owner = device.owner();
        Ok(Self { device, driver, owner })
    }

    /// The call that lets the kernel read the table of partitions, through the server. It fails if the device cannot be
    /// opened.
    pub(super) fn look(&self) -> impl FnOnce() -> io::Result<()> + Send + 'static {
        let device = self.device.clone();
        move || device.look()
    }

    /// The call that disconnects the device, unless somebody else has done so, and before writes to the disk what the
    /// kernel holds for it, if it `is_served`; returns the failure if that has not reached the disk. If it fails, the
    /// device is still connected.
    pub(super) fn disconnect(
        mut self,
        is_served: bool,
    ) -> impl FnOnce() -> io::Result<Option<Failure>> + Send + 'static {
        move || {
            let flushed = if is_served { self.device.flush() } else { Ok(()) };
            // The device may be somebody else's by now.
            if self.device.owner() == self.owner {
                self.driver.disconnect(self.device.index)?;
            }
            Ok(flushed.err().map(|error| unflushed(&self.device, &error)))
        }
    }
}

fn unflushed(device: &Device, error: &io::Error) -> Failure {
    Failure::new(format_args!(
        "{}: not everything that was written to it has reached the disk: {}",
        device.path.display(),
        cause(error)
    ))
}

/// Disconnects a device, whoever has connected it, after what the kernel holds for it is written to its disk. One that
/// is not connected is left alone. When it returns, a server of ours has usually closed its image.
///
/// # Errors
/// There is no such device; the caller may not; or it is disconnected, but not everything that was written to it has
/// reached the disk.
pub(super) fn disconnect(path: &Path) -> Result<(), Failure> {
    let device = Device::find(path).map_err(|error| {
        Failure::new(format_args!("Cannot open {}: {}", path.display(), cause(&error)))
    })?;
    let refused = |reason: String| {
        Failure::new(format_args!("Cannot disconnect {}: {reason}", path.display()))
    };
    let Some(owner) = device.owner() else { return Ok(()) };
    let mut driver = Driver::find().map_err(|error| refused(cause(&error)))?;
    let server = device.server();
    let flushed = match device.flush() {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            return Err(refused(netlink::reason(&error)));
        }
        flushed => flushed.map_err(|error| unflushed(&device, &error)),
    };
    let lost = match flushed {
        // Nobody serves it any more. What was lost was lost then.
        Err(failure) if !Path::new("/proc").join(&owner).exists() => {
            tracing::warn!("{}", failure.message.unwrap_or_default());
            Ok(())
        }
        flushed => flushed,
    };
    driver.disconnect(device.index).map_err(|error| refused(netlink::reason(&error)))?;
    if let Some(server) = server {
        wait_for_end(server.as_fd());
    }
    lost
}

/// Waits until a process has ended, but not for long: nothing depends on it.
fn wait_for_end(process: BorrowedFd<'_>) {
    let mut poll = libc::pollfd { fd: process.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the call reads and writes one valid `pollfd`.
    if unsafe { libc::poll(&raw mut poll, 1, SERVER_PATIENCE.as_millis() as i32) } == 0 {
        tracing::warn!("the server of the device has still to close its image");
    }
}
