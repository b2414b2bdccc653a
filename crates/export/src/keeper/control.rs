//! Commands to the driver.

use super::wire::{
    ANY_DEVICE, CONTROL, Command, ControlPayload, DEAD, DeviceInfo, LIVE, NOBODY, Parameters,
    QUIESCED, feature,
};
use isobath_ring::{command, command_unless};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process;
use std::thread;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The kernel that has all that is needed.
const KERNEL: &str = "Linux 6.5 or newer";
/// The same for a device that outlives its server. Those before have the features, but some fail by a null pointer when
/// another server begins to take a device over that nobody serves completely.
const RECOVERY_KERNEL: &str = "Linux 6.12 or newer";
const RECOVERY_RELEASE: (u32, u32) = (6, 12);

/// How long a number may still be taken by a device that has been deleted, and how often that is looked at.
const GOING: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(10);

/// The driver. Each command blocks until the kernel has carried it out.
pub(crate) struct Control {
    file: File,
}

/// What a device needs for another server to take it over.
pub(crate) const RECOVERY: u64 = feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE;

/// A device that was added.
#[derive(Debug)]
pub(crate) struct Added {
    /// Its number: N of `/dev/ublkbN`.
    pub(crate) number: u32,
    /// How many queues it has: no more than the machine has processors.
    pub(crate) queues: u16,
}

impl Control {
    /// Opens the driver, which must have what is needed.
    ///
    /// # Errors
    /// What is missing, for users.
    pub(crate) fn open() -> Result<Self, String> {
        let file = OpenOptions::new().read(true).write(true).open(CONTROL);
        let file = file.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                format!(
                    "there is no {CONTROL}: load the driver with 'modprobe ublk_drv' ({KERNEL})"
                )
            }
            io::ErrorKind::PermissionDenied => {
                format!("cannot open {CONTROL}: {error}; start the server as root (see --user)")
            }
            _ => format!("cannot open {CONTROL}: {error}"),
        })?;
        let control = Self { file };
        let features = control.features();
        check(features.map_err(|error| match error.raw_os_error() {
            Some(libc::EOPNOTSUPP | libc::EINVAL | ENOTSUPP) => {
                format!("this kernel's ublk driver is too old: {KERNEL} is needed")
            }
            _ => format!("cannot send commands to {CONTROL}: {error}"),
        })?)?;
        Ok(control)
    }

    /// Fails if the driver cannot keep a device for another server, for users.
    pub(crate) fn check_recovery(&self) -> Result<(), String> {
        let features = self.features();
        let features =
            features.map_err(|error| format!("cannot send commands to {CONTROL}: {error}"))?;
        let release = fs::read_to_string("/proc/sys/kernel/osrelease");
        let release = release.map_err(|error| format!("cannot tell the kernel's version: {error}"));
        check_recovery(features, &release?)
    }

    fn features(&self) -> io::Result<u64> {
        let mut features = 0_u64;
        self.send(Command::GetFeatures, ANY_DEVICE, &mut features, 0)?;
        Ok(features)
    }

    /// Adds a device with this number, in place of one that nobody serves any longer, or with any that is free for
    /// [`ANY_DEVICE`]. With a `nonce`, which the driver then keeps, another server may take the device over.
    pub(crate) fn add(
        &self,
        number: u32,
        queues: u16,
        depth: u16,
        max_bytes: u32,
        nonce: Option<u64>,
    ) -> io::Result<Added> {
        let recovery = if nonce.is_some() { RECOVERY } else { 0 };
        let flags = feature::USER_COPY | feature::IOCTL_ENCODE | recovery;
        let private_flags = nonce.unwrap_or_default();
        let mut info = DeviceInfo {
            queues,
            depth,
            max_bytes,
            device: number,
            flags,
            private_flags,
            ..DeviceInfo::default()
        };
        let until = Instant::now() + GOING;
        loop {
            match self.send(Command::AddDevice, number, &mut info, 0) {
                Err(error)
                    if error.raw_os_error() == Some(libc::EEXIST)
                        && Instant::now() < until
                        && self.makes_way(number) =>
                {
                    thread::sleep(LOOK);
                }
                done => break done?,
            }
        }
        let added = Added { number: info.device, queues: info.queues };
        // What was not asked for is refused by name here, not by the first request.
        let asked = feature::USER_COPY | recovery;
        let kept = info.flags & asked == asked
            && info.private_flags == private_flags
            && info.max_bytes == max_bytes
            && info.depth == depth;
        if kept {
            return Ok(added);
        }
        self.delete(added.number)?;
        Err(io::Error::other("the driver has not added the device as it was asked to"))
    }

    /// Whether the number of a device is about to be free: the device is being deleted, or is what has been left of
    /// one whose server was killed together with what was to delete it, which this deletes.
    fn makes_way(&self, number: u32) -> bool {
        let info = match self.info(number) {
            Ok(info) => info,
            Err(error) => return is_no_device(&error),
        };
        if info.state == LIVE {
            // The kernel notices a moment after the process has gone.
            return !is_running(info.process);
        }
        if !is_abandoned(&info) {
            return false;
        }
        // The driver opens it once at a time. While it is open here, nobody else's device gets this number.
        let Ok(_opened) = open_device(number) else { return true };
        let is_same = self.info(number).is_ok_and(|info| is_abandoned(&info));
        is_same && self.delete_open(number).is_ok()
    }

    /// The device with this number; `None` if there is none.
    pub(crate) fn device(&self, number: u32) -> io::Result<Option<DeviceInfo>> {
        match self.info(number) {
            Ok(info) => Ok(Some(info)),
            Err(error) if is_no_device(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn info(&self, number: u32) -> io::Result<DeviceInfo> {
        let mut info = DeviceInfo::default();
        self.send(Command::GetDevice, number, &mut info, 0)?;
        Ok(info)
    }

    /// Whether a device is a disk that is served.
    pub(crate) fn is_live(&self, number: u32) -> io::Result<bool> {
        Ok(self.device(number)?.is_some_and(|info| info.state == LIVE))
    }

    /// A device's parameters.
    pub(crate) fn parameters(&self, number: u32) -> io::Result<Parameters> {
        let mut parameters = Parameters::room();
        self.send(Command::GetParameters, number, &mut parameters, 0)?;
        Ok(parameters.set())
    }

    /// Has a disk that waits for another server forget the last one. The queues of all that had begun to serve it must
    /// have been served: Linux 6.12 does not look.
    ///
    /// # Errors
    /// [`ResourceBusy`](io::ErrorKind::ResourceBusy) while the last one has not ended completely.
    pub(crate) fn start_recovery(&self, number: u32) -> io::Result<()> {
        match self.send(Command::StartRecovery, number, &mut (), 0) {
            // It has forgotten it already, and nobody has begun to serve it.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            done => done,
        }
    }

    /// Lets a disk go on once all of its queues are served, which this waits for. The process that calls this must be
    /// the one that has opened the device. Gives up as [`start`](Self::start) does.
    pub(crate) fn end_recovery(&self, number: u32, order: BorrowedFd<'_>) -> io::Result<()> {
        self.once_served(Command::EndRecovery, number, order)
    }

    /// Sets a device's parameters and makes it a disk, which this waits for. The kernel reads its partition table,
    /// unless a thread that serves it lacks `CAP_SYS_ADMIN`.
    /// The process that calls this must be the one that has opened the device. Gives up once `order` can be read, or
    /// its other end is closed.
    pub(crate) fn start(
        &self,
        number: u32,
        parameters: &Parameters,
        order: BorrowedFd<'_>,
    ) -> io::Result<()> {
        self.send(Command::SetParameters, number, &mut parameters.clone(), 0)?;
        self.once_served(Command::StartDevice, number, order)
    }

    /// Sends a command that waits until all queues are served.
    fn once_served(&self, what: Command, number: u32, order: BorrowedFd<'_>) -> io::Result<()> {
        let process = u64::from(process::id());
        let payload = ControlPayload::new(number, (0, 0), process).payload();
        // SAFETY: the command refers to no memory.
        let done = unsafe { command_unless(self.file.as_fd(), what.code(), payload, order) };
        done?.map(drop).ok_or_else(|| io::Error::other("its server has ended"))
    }

    /// Writes what the kernel still has of a disk, and removes it. The requests are served meanwhile.
    pub(crate) fn stop(&self, number: u32) -> io::Result<()> {
        self.send(Command::StopDevice, number, &mut (), 0)
    }

    /// Stops a device, if it was not, and deletes it, without waiting for those who have it open. Older kernels cannot
    /// (Linux 6.9).
    pub(crate) fn delete_open(&self, number: u32) -> io::Result<()> {
        self.send(Command::DeleteDeviceAsync, number, &mut (), 0)
    }

    /// Stops a device, if it was not, and deletes it. Waits for those who have it open, where the kernel does.
    pub(crate) fn delete(&self, number: u32) -> io::Result<()> {
        match self.delete_open(number) {
            Err(error) if !is_no_device(&error) => {
                self.send(Command::DeleteDevice, number, &mut (), 0)
            }
            done => done,
        }
        .or_else(|error| if is_no_device(&error) { Ok(()) } else { Err(error) })
    }

    fn send<T: IntoBytes + FromBytes + Immutable>(
        &self,
        what: Command,
        device: u32,
        buffer: &mut T,
        data: u64,
    ) -> io::Result<()> {
        let bytes = buffer.as_mut_bytes();
        let place =
            if bytes.is_empty() { 0 } else { bytes.as_mut_ptr().expose_provenance() as u64 };
        let payload = ControlPayload::new(device, (place, bytes.len() as u16), data).payload();
        // SAFETY: the buffer outlives the command, and takes any bytes.
        unsafe { command(self.file.as_fd(), what.code(), payload) }.map(drop)
    }
}

/// Whether nobody serves a device any longer that was a disk.
fn is_abandoned(info: &DeviceInfo) -> bool {
    info.state == DEAD && info.process == NOBODY
}

/// Whether another server may take a device over once its own has ended: it is a disk.
pub(crate) fn outlives(info: &DeviceInfo) -> bool {
    info.flags & RECOVERY == RECOVERY && matches!(info.state, LIVE | QUIESCED)
}

/// Whether there is a process with this number.
fn is_running(process: i32) -> bool {
    // SAFETY: no signal is sent.
    let found = unsafe { libc::kill(process, 0) } == 0;
    found || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

/// Whether there is no device of a number.
fn is_no_device(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENODEV)
}

/// The kernel's own number for what is not supported, which is no `errno`.
const ENOTSUPP: i32 = 524;

/// Fails if a driver lacks what is needed.
fn check(features: u64) -> Result<(), String> {
    for (bit, name) in [
        (feature::IOCTL_ENCODE, "commands encoded as for ioctl (UBLK_F_CMD_IOCTL_ENCODE)"),
        (feature::USER_COPY, "data copied by the server (UBLK_F_USER_COPY)"),
    ] {
        if features & bit == 0 {
            return Err(format!("this kernel's ublk driver lacks {name}: {KERNEL} is needed"));
        }
    }
    Ok(())
}

/// Fails if a driver lacks what a device needs that outlives its server, or does it wrong in kernels of this release.
fn check_recovery(features: u64, release: &str) -> Result<(), String> {
    if features & RECOVERY != RECOVERY {
        return Err(format!(
            "this kernel's ublk driver does not keep a device for another server (UBLK_F_USER_RECOVERY, \
             UBLK_F_USER_RECOVERY_REISSUE): {RECOVERY_KERNEL} is needed"
        ));
    }
    let mut numbers = release.trim().split(|other: char| !other.is_ascii_digit()).map(str::parse);
    let number = (numbers.next().and_then(Result::ok)).zip(numbers.next().and_then(Result::ok));
    if number.is_none_or(|number: (u32, u32)| number < RECOVERY_RELEASE) {
        return Err(format!(
            "this kernel ({}) may fail when another server takes a ublk device over: {RECOVERY_KERNEL} is needed",
            release.trim().escape_debug()
        ));
    }
    Ok(())
}

/// Opens the character device of a device that was added.
pub(crate) fn open_device(number: u32) -> io::Result<OwnedFd> {
    let path = format!("/dev/ublkc{number}");
    let file = OpenOptions::new().read(true).write(true).open(&path);
    let file =
        file.map_err(|error| io::Error::new(error.kind(), format!("cannot open {path}: {error}")))?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_driver_lacks_is_named() {
        assert_eq!(check(0x1fe), Ok(()));
        for (features, lacks) in [(0x7f, "USER_COPY"), (0x80, "IOCTL_ENCODE"), (0, "IOCTL_ENCODE")]
        {
            let error = check(features).unwrap_err();
            assert!(error.contains(lacks) && error.contains("Linux 6.5"), "{error}");
        }
        for features in [0xd0, 0xc8, 0xc0] {
            let error = check_recovery(features, "6.12.1").unwrap_err();
            assert!(error.contains("UBLK_F_USER_RECOVERY_REISSUE): Linux 6.12"), "{error}");
        }
        for release in ["6.12.117+deb13-cloud-amd64\n", "6.12-rc1", "6.13", "7.0.0", "10.1"] {
            assert_eq!(check_recovery(0xd8, release), Ok(()));
        }
        for release in ["6.11.9", "6.5.0-9-generic", "5.14.0", "", "7", "x6.12"] {
            let error = check_recovery(0xd8, release).unwrap_err();
            assert!(error.contains(&format!("this kernel ({release}) may fail")), "{error}");
        }
    }
}
