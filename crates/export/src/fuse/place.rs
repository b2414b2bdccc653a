//! Mount points: checking them, mounting, unmounting.

use super::channel::{DEVICE, open_device};
use super::helper;
use super::options::AllowOther;
use isobath_storage::cause;
use parking_lot::Mutex;
use std::ffi::CString;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// What `mount` and `/proc/mounts` show as the source.
const SOURCE: &str = "isobath";
/// Maximum number of dead mounts to remove from one path.
const MOST_DEAD: usize = 16;

/// The mounts that this process serves. Querying the attributes of one of them could deadlock.
static OWN: Mutex<Vec<Device>> = Mutex::new(Vec::new());

/// The device number of a mount; each FUSE connection has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Device(u32, u32);

/// Why a disk cannot be mounted. The message names the mount point and says how to fix the problem.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// The mount point does not exist.
    #[error("the mount point '{0}' does not exist; create an empty file there ('touch')")]
    NotFound(PathBuf),
    /// The mount point is not a regular file.
    #[error(
        "the mount point '{0}' is not a regular file; the disk appears as a file, so create an \
         empty file and mount on that instead"
    )]
    NotAFile(PathBuf),
    /// Something is already mounted there.
    #[error("something is already mounted on '{0}'; unmount it ('umount') or choose another file")]
    Busy(PathBuf),
    /// The kernel has no FUSE, or this process has no access to it.
    #[error(
        "cannot mount '{path}': cannot open {DEVICE}: {source}; load the module ('modprobe fuse'), \
         or pass the device to the container"
    )]
    NoDevice {
        /// The mount point.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Neither this process nor the helper is permitted to mount.
    #[error(
        "no permission to mount on '{path}', and the helper fusermount3 failed: {}; \
         run as root (CAP_SYS_ADMIN), or install fusermount3 (package fuse3)",
        cause(source)
    )]
    NoPermission {
        /// The mount point.
        path: PathBuf,
        /// The helper's error.
        source: io::Error,
    },
    /// The kernel's protocol version is not supported.
    #[error(
        "cannot mount '{path}': this kernel supports FUSE {major}.{minor}, but 7.31 or a later 7.x \
         is required (Linux 5.4)"
    )]
    Kernel {
        /// The mount point.
        path: PathBuf,
        /// The kernel's major version.
        major: u32,
        /// The kernel's minor version.
        minor: u32,
    },
    /// Any other error.
    #[error("cannot mount '{path}': {source}")]
    Io {
        /// The mount point.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
}

/// A mount of this process.
pub(super) struct Place {
    path: PathBuf,
    device: Option<Device>,
}

/// Mounts, and returns the place and the connection.
pub(super) fn mount(
    path: &Path,
    read_only: bool,
    allow: AllowOther,
) -> Result<(Place, OwnedFd), MountError> {
    let path = check(path)?;
    let failed = |source| MountError::Io { path: path.clone(), source };
    let no_device = |source| MountError::NoDevice { path: path.clone(), source };
    let opened = match open_device() {
        Ok(connection) => Some(connection),
        Err(error) if is_denied(&error) => None,
        Err(error) => return Err(no_device(error)),
    };
    let mounted = opened.map(|connection| {
        mount_directly(&path, &connection, read_only, allow).map(|()| connection)
    });
    let connection = match mounted {
        Some(Ok(connection)) => connection,
        Some(Err(error)) if error.raw_os_error() == Some(libc::ENODEV) => {
            return Err(no_device(error));
        }
        Some(Err(error)) if !is_denied(&error) => return Err(failed(error)),
        Some(Err(_)) | None => mount_by_helper(&path, read_only, allow)
            .map_err(|source| MountError::NoPermission { path: path.clone(), source })?,
    };
    match look(&path) {
        Ok(Seen { device, .. }) => {
            OWN.lock().push(device);
            Ok((Place { path, device: Some(device) }, connection))
        }
        Err(error) => {
            // The mount is ours, and nobody else uses it yet.
            let _ = detach(&path, libc::MNT_FORCE);
            Err(failed(error))
        }
    }
}

fn is_denied(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES))
}

impl Place {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the mount and aborts its connection: programs that wait for a reply, or have the file open, get an error
    /// from now on. Does nothing if it was already unmounted.
    ///
    /// Closing the connection's descriptors would abort it as well, but not while a child of this process has copies of
    /// them between fork and exec.
    pub(super) fn unmount(&mut self) {
        let Some(device) = self.device.take() else { return };
        if look(&self.path).is_ok_and(|seen| seen.is_mount && seen.device == device)
            && let Err(error) = detach(&self.path, libc::MNT_FORCE)
        {
            let path = isobath_storage::shown(&self.path);
            tracing::error!(%path, %error, "cannot unmount the disk");
        }
        OWN.lock().retain(|own| *own != device);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.unmount();
    }
}

/// The properties of a path that can be determined without asking a FUSE server.
struct Seen {
    device: Device,
    is_mount: bool,
    is_file: bool,
}

fn look(path: &Path) -> io::Result<Seen> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    let mut space = MaybeUninit::<libc::statx>::zeroed();
    let flags = libc::AT_STATX_DONT_SYNC | libc::AT_NO_AUTOMOUNT;
    // SAFETY: the name is NUL-terminated, and there is room for the result.
    let result = unsafe {
        libc::statx(libc::AT_FDCWD, name.as_ptr(), flags, libc::STATX_TYPE, space.as_mut_ptr())
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a zeroed `statx` is valid, and the call has filled in the fields that it supports.
    let answer = unsafe { space.assume_init() };
    Ok(Seen {
        device: Device(answer.stx_dev_major, answer.stx_dev_minor),
        is_mount: answer.stx_attributes & libc::STATX_ATTR_MOUNT_ROOT as u64 != 0,
        is_file: u32::from(answer.stx_mode) & libc::S_IFMT == libc::S_IFREG,
    })
}

/// Removes dead mounts from a path, and checks that it is a file with nothing mounted on it.
fn check(path: &Path) -> Result<PathBuf, MountError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => MountError::NotFound(path.to_owned()),
        _ => MountError::Io { path: path.to_owned(), source },
    };
    let path = resolve(path).map_err(failed)?;
    for _ in 0..MOST_DEAD {
        let seen = look(&path).map_err(failed)?;
        if !seen.is_file {
            return Err(MountError::NotAFile(path));
        }
        if !seen.is_mount {
            return Ok(path);
        }
        let own = OWN.lock().contains(&seen.device);
        // ECONNABORTED: the mount died during the query.
        let dead = |error: io::Error| {
            matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED))
        };
        if own || !fs::metadata(&path).is_err_and(dead) {
            return Err(MountError::Busy(path));
        }
        let shown = isobath_storage::shown(&path);
        tracing::info!(path = %shown, "removed a stale mount left by a server that no longer runs");
        detach(&path, 0).map_err(failed)?;
    }
    Err(MountError::Busy(path))
}

/// The path with symbolic links resolved, even if the file is a dead mount and cannot be accessed.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    match path.canonicalize() {
        Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => {
            let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
                return Err(error);
            };
            let here = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            Ok(here.canonicalize()?.join(name))
        }
        done => done,
    }
}

/// `mount(2)`, which requires privileges.
fn mount_directly(
    path: &Path,
    connection: &OwnedFd,
    read_only: bool,
    allow: AllowOther,
) -> io::Result<()> {
    // SAFETY: these calls cannot fail.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    let others = if allow == AllowOther::Off { "" } else { ",allow_other" };
    let number = connection.as_raw_fd();
    let options = format!(
        "fd={number},rootmode={:o},user_id={user},group_id={group},default_permissions{others}",
        libc::S_IFREG,
    );
    let source = CString::new(SOURCE)?;
    let target = CString::new(path.as_os_str().as_bytes())?;
    let kind = CString::new(format!("fuse.{SOURCE}"))?;
    let options = CString::new(options)?;
    let read_only = if read_only { libc::MS_RDONLY } else { 0 };
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC | read_only;
    // SAFETY: all strings are NUL-terminated and outlive the call.
    let result = unsafe {
        libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, options.as_ptr().cast())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn mount_by_helper(path: &Path, read_only: bool, allow: AllowOther) -> io::Result<OwnedFd> {
    let access = if read_only { "ro" } else { "rw" };
    let options = format!(
        "{access},nosuid,nodev,noexec,default_permissions,fsname={SOURCE},subtype={SOURCE}"
    );
    let for_others = format!("{options},allow_other");
    match allow {
        AllowOther::Off => helper::mount(path, &options),
        AllowOther::On => helper::mount(path, &for_others),
        // /etc/fuse.conf may forbid users to give others access.
        AllowOther::Auto => helper::mount(path, &for_others).or_else(|error| match error.kind() {
            io::ErrorKind::NotFound => Err(error),
            _ => helper::mount(path, &options),
        }),
    }
}

/// Unmounts, with additional `umount2(2)` flags if this process has the privilege.
fn detach(path: &Path, flags: i32) -> io::Result<()> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    let flags = flags | libc::MNT_DETACH | libc::UMOUNT_NOFOLLOW;
    // SAFETY: the name is NUL-terminated.
    if unsafe { libc::umount2(name.as_ptr(), flags) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::EPERM) { helper::unmount(path) } else { Err(error) }
}
