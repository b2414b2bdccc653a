//! A device that outlives its server: waiting for another one, and taking over one that waits.

use super::control::{Control, outlives};
use super::record::{Entry, Record};
use super::wire::{DEAD, DeviceInfo, LIVE, Parameters, SECTOR, attribute};
use super::{Image, Waiting};
use isobath_storage::shown;
use std::io;
use std::os::fd::BorrowedFd;
use std::thread;
use std::time::{Duration, Instant};

/// How long the keeper of a server that has ended may take to notice.
const NOTICING: Duration = Duration::from_secs(10);
/// How long the driver may take to end what a server had. It takes half a minute if the server had all requests that a
/// queue can have.
const ENDING: Duration = Duration::from_mins(1);
/// How often that is looked at, and whether another server has come.
const LOOK: Duration = Duration::from_millis(50);

/// What there is of a device that outlives its server.
pub(super) struct Outliving {
    pub(super) number: u32,
    /// How long it waits for another server.
    patience: Duration,
    record: Record,
    /// The number of this keeper in the record.
    keeper: u64,
    /// The image of the server, which has looked for a device.
    image: Option<Image>,
    /// The device that waits.
    found: Option<Found>,
    /// What this keeper has written into the record.
    entry: Option<Entry>,
    queues: u16,
}

/// A device that waits, and that the server may take over.
struct Found {
    nonce: u64,
    queues: u16,
}

/// What becomes of a device that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Successor {
    /// Another keeper has it.
    Came,
    /// Nobody came, and nobody can come any more.
    None,
}

impl Outliving {
    /// The device with this number is to wait for another server for so many seconds. `wait` waits for a moment, and
    /// returns whether to give up.
    ///
    /// # Errors
    /// Another server serves it, or its record cannot be used: for users.
    pub(super) fn begin(
        number: u32,
        seconds: u32,
        wait: impl FnMut(Duration) -> bool,
    ) -> Result<Self, String> {
        let record = Record::lock(number, NOTICING, wait)?;
        let keeper = random().map_err(|error| error.to_string())?;
        let patience = Duration::from_secs(seconds.into());
        let (image, found, entry, queues) = (None, None, None, 0);
        Ok(Self { number, patience, record, keeper, image, found, entry, queues })
    }

    /// The device that waits for a server of this image, if one does.
    ///
    /// # Errors
    /// There is one with this number, but it cannot be the disk with these parameters: for users.
    pub(super) fn look(
        &mut self,
        control: &Control,
        parameters: &Parameters,
        image: Image,
        mut wait: impl FnMut(Duration) -> bool,
    ) -> Result<Option<Waiting>, String> {
        let number = self.number;
        let fails = |error: io::Error| format!("cannot look at ublk device {number}: {error}");
        let entry = self.record.read().map_err(fails)?;
        let until = Instant::now() + ENDING;
        let info = loop {
            let Some(info) = control.device(number).map_err(fails)? else { break None };
            match judge(&info, entry.as_ref(), &image)? {
                Judgement::Free => break None,
                Judgement::Waits => break Some(info),
                Judgement::Ends if Instant::now() > until => {
                    return Err(format!(
                        "the ublk device {number} is still served, though no keeper holds its record"
                    ));
                }
                Judgement::Ends if wait(LOOK) => return Err("the server has ended".into()),
                Judgement::Ends => {}
            }
        };
        if let Some(info) = &info {
            compare(number, &control.parameters(number).map_err(fails)?, parameters)?;
            self.found = Some(Found { nonce: info.private_flags, queues: info.queues });
        }
        self.image = Some(image);
        Ok(info.map(|DeviceInfo { queues, depth, .. }| Waiting { queues, depth }))
    }

    /// A new device is to be added, with this number for the driver to keep.
    pub(super) fn begin_new(&mut self) -> Result<u64, String> {
        let nonce = random().map_err(|error| error.to_string())?;
        self.write(nonce, false).map_err(|error| self.unwritten(&error))?;
        Ok(nonce)
    }

    /// Takes over the device that was found, which is `device` once this keeper has to delete it. Returns how many
    /// queues it has. From then on all of them are to be served: those who serve only some cannot be followed.
    pub(super) fn adopt(
        &mut self,
        control: &Control,
        device: &mut Option<u32>,
        mut wait: impl FnMut(Duration) -> bool,
    ) -> Result<u16, String> {
        let Found { nonce, queues } = self.found.take().ok_or("no device was found")?;
        self.queues = queues;
        self.write(nonce, false).map_err(|error| self.unwritten(&error))?;
        *device = Some(self.number);
        let until = Instant::now() + ENDING;
        loop {
            match control.start_recovery(self.number) {
                Err(error)
                    if error.kind() == io::ErrorKind::ResourceBusy
                        && Instant::now() < until
                        && !wait(LOOK) => {}
                Ok(()) => break,
                Err(error) => {
                    return Err(format!("cannot take over /dev/ublkb{}: {error}", self.number));
                }
            }
        }
        self.write(nonce, true).map_err(|error| self.unwritten(&error))?;
        Ok(queues)
    }

    /// Whether the device was taken over, and does not go on yet.
    pub(super) fn is_recovering(&self) -> bool {
        self.entry.as_ref().is_some_and(|entry| entry.recovering)
    }

    /// Lets the device go on that was taken over.
    pub(super) fn end_recovery(
        &mut self,
        control: &Control,
        number: u32,
        server: BorrowedFd<'_>,
    ) -> io::Result<()> {
        control.end_recovery(number, server)?;
        if let Some(entry) = &mut self.entry {
            entry.recovering = false;
            // If this fails, the device waits for no other server.
            entry.recovering = self.record.write(entry).is_err();
        }
        Ok(())
    }

    /// Whether the device of a server that has ended may wait for another one.
    pub(super) fn may_wait(&self, control: &Control, number: u32) -> bool {
        let info = control.device(number).ok().flatten();
        let is_disk = info.is_some_and(|info| outlives(&info));
        let entry = self.entry.as_ref();
        is_disk && entry.is_some_and(|entry| !entry.recovering || self.queues == 1)
    }

    /// Waits until another keeper has the device that `is_there`, for as long as it is to wait.
    pub(super) fn wait(&self, is_there: impl Fn() -> bool) -> Successor {
        self.record.unlock();
        let until = Instant::now() + self.patience;
        loop {
            let is_over = Instant::now() >= until || !is_there();
            // Who has it locked is about to take the device over, or fails.
            let is_locked = is_over && self.record.try_lock();
            // In doubt it has been taken over: it is not this keeper's to delete.
            let keeper = self.record.read().ok().flatten().map(|entry| entry.keeper);
            if keeper != Some(self.keeper) {
                return Successor::Came;
            }
            if is_locked {
                return Successor::None;
            }
            thread::sleep(LOOK);
        }
    }

    /// There is no device of this keeper any more, whose record is locked.
    pub(super) fn end(&self) {
        let is_own = self.entry.is_some();
        if is_own || self.record.read().is_ok_and(|entry| entry.is_none()) {
            self.record.remove();
        }
    }

    fn write(&mut self, nonce: u64, recovering: bool) -> io::Result<()> {
        let image = self.image.clone();
        let image = image.ok_or_else(|| io::Error::other("nobody has looked for a device"))?;
        let entry = Entry { nonce, keeper: self.keeper, recovering, image };
        self.record.write(&entry)?;
        self.entry = Some(entry);
        Ok(())
    }

    fn unwritten(&self, error: &io::Error) -> String {
        format!("cannot write the record of ublk device {}: {error}", self.number)
    }
}

/// What a device is for a server that looks for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Judgement {
    /// None that it could take over.
    Free,
    /// Its server is ending.
    Ends,
    /// It waits for this one.
    Waits,
}

/// Judges the device of a record, which says `entry`, for a server of this image.
fn judge(info: &DeviceInfo, entry: Option<&Entry>, image: &Image) -> Result<Judgement, String> {
    let number = info.device;
    let way_out = format!(
        "choose another number, or 'auto' for one that is free; 'ublk del -n {number}' removes one that nobody serves"
    );
    if info.state == DEAD {
        return Ok(Judgement::Free);
    }
    let entry = entry.filter(|entry| entry.nonce == info.private_flags && outlives(info));
    let Some(entry) = entry else {
        return Err(format!(
            "there is a ublk device {number} already, and not one that waits for another server: {way_out}"
        ));
    };
    if entry.image != *image {
        let (of, not) = (shown(&entry.image.name), shown(&image.name));
        let which = if entry.image.name == image.name {
            format!("another file that had the name '{of}'")
        } else {
            format!("'{of}', not of '{not}'")
        };
        return Err(format!("/dev/ublkb{number} is of {which}: {way_out}"));
    }
    if entry.recovering && info.queues > 1 {
        return Err(format!(
            "/dev/ublkb{number} has lost a server that was just taking it over, and cannot be taken over any more: \
             {way_out}"
        ));
    }
    Ok(if info.state == LIVE { Judgement::Ends } else { Judgement::Waits })
}

/// Fails if a disk is not what its device is for those who use it.
fn compare(number: u32, device: &Parameters, disk: &Parameters) -> Result<(), String> {
    if device == disk {
        return Ok(());
    }
    let bytes = |parameters: &Parameters| parameters.basic.sectors.saturating_mul(SECTOR);
    let is_read_only =
        |parameters: &Parameters| parameters.basic.attributes & attribute::READ_ONLY != 0;
    let how = if device.basic.sectors != disk.basic.sectors {
        format!("it has {} bytes, and the disk {}", bytes(device), bytes(disk))
    } else if is_read_only(device) != is_read_only(disk) {
        let [device, disk] =
            if is_read_only(device) { ["read-only", "not"] } else { ["writable", "read-only"] };
        format!("it is {device}, and the disk is {disk}")
    } else {
        "its blocks and limits differ from the disk's".into()
    };
    Err(format!(
        "/dev/ublkb{number} cannot be taken over: {how}; serve the disk as it was, or remove the device with 'ublk del \
         -n {number}'"
    ))
}

/// A number that no other has.
fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    // SAFETY: the call writes at most the eight bytes.
    match unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) } {
        8 => Ok(u64::from_ne_bytes(bytes)),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::control::RECOVERY;
    use super::super::wire::{Basic, QUIESCED, feature};
    use super::*;
    use isobath_storage::FileId;

    fn image(name: &str, inode: u64) -> Image {
        Image { name: name.into(), file: FileId { device: 1, inode } }
    }

    #[test]
    fn only_the_device_of_the_record_is_taken_over_and_only_for_its_image() {
        let ours = image("/images/vm.qcow2", 7);
        let entry = Entry { nonce: 99, keeper: 1, recovering: false, image: ours.clone() };
        let waits = DeviceInfo {
            queues: 2,
            device: 5,
            state: QUIESCED,
            flags: RECOVERY | 1 << 7,
            private_flags: 99,
            ..DeviceInfo::default()
        };
        let judged = |info: DeviceInfo, entry: &Entry| judge(&info, Some(entry), &ours);
        assert_eq!(judged(waits, &entry), Ok(Judgement::Waits));
        assert_eq!(judged(DeviceInfo { state: LIVE, ..waits }, &entry), Ok(Judgement::Ends));
        assert_eq!(judged(DeviceInfo { state: DEAD, ..waits }, &entry), Ok(Judgement::Free));
        for info in [
            DeviceInfo { private_flags: 98, ..waits },
            DeviceInfo { flags: feature::USER_RECOVERY, ..waits },
            DeviceInfo { state: 3, ..waits },
        ] {
            let refused = judged(info, &entry).unwrap_err();
            assert!(refused.contains("there is a ublk device 5 already"), "{refused}");
            assert!(refused.contains("'ublk del -n 5'"), "{refused}");
        }
        assert!(judge(&waits, None, &ours).unwrap_err().contains("ublk device 5 already"));
        let other = judge(&waits, Some(&entry), &image("/images/b", 7)).unwrap_err();
        assert!(other.contains("is of '/images/vm.qcow2', not of '/images/b'"), "{other}");
        let replaced = judge(&waits, Some(&entry), &image("/images/vm.qcow2", 8)).unwrap_err();
        assert!(replaced.contains("another file that had the name '/images/vm.qcow2'"));
        // What was half taken over can be where one queue is either served or not.
        let half = Entry { recovering: true, ..entry };
        assert!(judged(waits, &half).unwrap_err().contains("cannot be taken over any more"));
        assert_eq!(judged(DeviceInfo { queues: 1, ..waits }, &half), Ok(Judgement::Waits));
    }

    #[test]
    fn a_disk_is_what_its_device_is() {
        let device = Parameters::room();
        let with = |change: &dyn Fn(&mut Basic)| {
            let mut disk = device;
            change(&mut disk.basic);
            compare(3, &device, &disk)
        };
        assert_eq!(with(&|_| ()), Ok(()));
        let larger = with(&|basic| basic.sectors = 2).unwrap_err();
        assert!(
            larger.contains("/dev/ublkb3 cannot be taken over: it has 0 bytes, and the disk 1024")
        );
        let read_only = with(&|basic| basic.attributes = attribute::READ_ONLY).unwrap_err();
        assert!(read_only.contains("it is writable, and the disk is read-only"), "{read_only}");
        assert!(with(&|basic| basic.optimal_shift = 9).unwrap_err().contains("blocks and limits"));
    }

    #[test]
    fn numbers_differ() {
        assert_ne!(random().unwrap(), random().unwrap());
    }
}
