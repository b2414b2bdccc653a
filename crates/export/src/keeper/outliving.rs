//! A device that outlives its server: waiting for another one, and taking over one that waits.

use super::Waiting;
use super::control::{Control, outlives};
use super::image::{Image, ImageFile, Stamp};
use super::moments::{Events, Server, SinceBoot, now};
use super::record::{Entry, Record};
use super::wire::{DEAD, DeviceInfo, LIVE, Parameters, SECTOR, attribute};
use isobath_storage::{FileId, shown};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How long the keeper of a server that has ended may take to notice.
const NOTICING: Duration = Duration::from_secs(10);
/// How long the driver may take to end what a server had. It takes half a minute if the server had all requests that a
/// queue can have.
const ENDING: Duration = Duration::from_mins(1);
/// How long the last writes of a server may take that has ended.
const LANDING: Duration = Duration::from_secs(10);
/// How often that is looked at, and whether another server has come.
const LOOK: Duration = Duration::from_millis(50);

/// What there is of a device that outlives its server.
pub(super) struct Outliving {
    number: u32,
    /// How long it waits for another server.
    patience: Duration,
    record: Record,
    /// The number of this keeper in the record.
    keeper: u64,
    /// What the record says of the device that waited for a server when this one began.
    waiting: Option<Entry>,
    /// Until when a device waits that has lost its server: until it goes on.
    until: Option<SinceBoot>,
    /// Which of that device's files the server has locked, and were then as the last server had left them, as far as
    /// that is known. It may have changed them since.
    locked: Vec<bool>,
    /// The image of the server, which has looked for a device.
    image: Option<Image>,
    /// The device that waits, and that the server may take over.
    found: Option<Found>,
    /// What this keeper has written into the record of a device that is its to delete.
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
    /// Another server serves it, its record cannot be used, or the image of a device that waits was changed since its
    /// server has ended: for users.
    pub(super) fn begin(
        control: &Control,
        number: u32,
        seconds: u32,
        wait: impl FnMut(Duration) -> bool,
    ) -> Result<Self, String> {
        let record = Record::lock(number, NOTICING, wait)?;
        let keeper = random().map_err(|error| error.to_string())?;
        let fails = |error: io::Error| cannot_look(number, &error);
        let patience = Duration::from_secs(seconds.into());
        let info = control.device(number).map_err(fails)?;
        let mut waiting = record.read().map_err(fails)?.filter(|entry| {
            info.is_some_and(|info| info.state != DEAD && is_of_record(&info, entry))
        });
        if let Some(entry) = &mut waiting {
            let until = *entry.until.get_or_insert_with(|| now() + patience);
            if now() >= until {
                // Nobody has deleted it. The record is locked, so that nobody takes it over.
                control.delete(number).map_err(fails)?;
                waiting = None;
            } else {
                record.write(entry).map_err(fails)?;
            }
        }
        let until = waiting.as_ref().and_then(|entry| entry.until);
        if let Some(Entry { image, left: Some(left), .. }) = &waiting
            && !image.is_as(left)
        {
            return Err(is_changed(number, image));
        }
        let (image, found, entry, queues) = (None, None, None, 0);
        let locked = vec![false; waiting.as_ref().map_or(0, |entry| entry.image.files.len())];
        Ok(Self {
            number,
            patience,
            record,
            keeper,
            waiting,
            until,
            locked,
            image,
            found,
            entry,
            queues,
        })
    }

    /// The device that waited for a server when this one began.
    pub(super) fn waits(&self) -> bool {
        self.waiting.is_some()
    }

    /// Until when the device waits that this server is to take over, or is just taking over.
    pub(super) fn until(&self) -> Option<SinceBoot> {
        self.until
    }

    /// Deletes the device that waits, whose time is over, and which was not taken over.
    pub(super) fn expire(&mut self, control: &Control) -> io::Result<()> {
        if let (Some(waiting), None) = (&self.waiting, &self.entry)
            && control.device(self.number)?.is_some_and(|info| is_of_record(&info, waiting))
        {
            control.delete(self.number)?;
            self.record.remove();
        }
        self.waiting = None;
        Ok(())
    }

    /// The server begins to open the image of this name. Returns whether it is known how the last server has left it.
    ///
    /// # Errors
    /// The device that waits is of another one: for users.
    pub(super) fn open(&self, name: &Path) -> Result<bool, String> {
        let waiting = self.waiting.as_ref().ok_or("no device waits")?;
        let of = waiting.image.files.first().map(|file| file.name.as_path());
        if of != Some(name) {
            return Err(is_of_other(self.number, &waiting.image, name));
        }
        Ok(waiting.left.is_some())
    }

    /// The server has locked this file, and may change it from then on. Those that the device is not written to do not
    /// matter.
    ///
    /// # Errors
    /// It was changed since the last server has left it: for users.
    pub(super) fn lock(&mut self, id: FileId) -> Result<(), String> {
        let Some(waiting) = &self.waiting else { return Err("no device waits".into()) };
        for (number, locked) in self.locked.iter_mut().enumerate() {
            if waiting.image.files[number].id != id {
                continue;
            }
            let left = waiting.left.as_ref();
            if left.is_some_and(|left| !waiting.image.has_as(number, left)) {
                return Err(is_changed(self.number, &waiting.image));
            }
            *locked = true;
        }
        Ok(())
    }

    /// The device that waits for a server of this image, if one does.
    ///
    /// # Errors
    /// There is one with this number, but it cannot be the disk with these parameters: for users.
    pub(super) fn look(
        &mut self,
        control: &Control,
        parameters: &Parameters,
        mut image: Image,
        mut wait: impl FnMut(Duration) -> bool,
    ) -> Result<Option<Waiting>, String> {
        let number = self.number;
        let fails = |error: io::Error| cannot_look(number, &error);
        image.find().map_err(|name| {
            format!(
                "the device cannot outlive its server: the keeper finds no file and no device by the name '{}'",
                shown(&name)
            )
        })?;
        let until = Instant::now() + ENDING;
        let info = loop {
            let Some(info) = control.device(number).map_err(fails)? else { break None };
            // A device of the record that has come since is nobody's who could be followed.
            match judge(&info, self.waiting.as_ref(), &image)? {
                Judgement::Free => break None,
                Judgement::Waits if self.locked.iter().all(|is_locked| *is_locked) => {
                    break Some(info);
                }
                Judgement::Waits => return Err("the image was not opened for the device".into()),
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
    ///
    /// # Errors
    /// One waits for the server, nobody has looked, or the record cannot be written: for users.
    pub(super) fn begin_new(&mut self) -> Result<u64, String> {
        if self.found.is_some() {
            return Err(format!("/dev/ublkb{} waits for this server", self.number));
        }
        let nonce = random().map_err(|error| error.to_string())?;
        self.write(nonce, false).map_err(|error| self.unwritten(&error))?;
        Ok(nonce)
    }

    /// Takes over the device that was found, which is `device` once this keeper has to delete it. Returns how many
    /// queues it has, none of which is served then.
    ///
    /// # Errors
    /// None was found, it is not there any more, or the driver refuses: for users.
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
            if !self.is_own(control) {
                return Err(format!("/dev/ublkb{} has been removed meanwhile", self.number));
            }
            match control.start_recovery(self.number) {
                Err(error)
                    if error.kind() == io::ErrorKind::ResourceBusy
                        && Instant::now() < until
                        && !wait(LOOK) => {}
                Ok(()) => return Ok(queues),
                Err(error) => {
                    return Err(format!("cannot take over /dev/ublkb{}: {error}", self.number));
                }
            }
        }
    }

    /// The server begins to serve the queues of the device that was taken over, all of them: those who serve only some
    /// cannot be followed.
    ///
    /// # Errors
    /// None was taken over, or the record cannot be written: for users.
    pub(super) fn begin_serving(&mut self) -> Result<(), String> {
        let nonce = self.entry.as_ref().ok_or("no device was taken over")?.nonce;
        self.write(nonce, true).map_err(|error| self.unwritten(&error))
    }

    /// Whether the device that was taken over is about to be served, and does not go on yet.
    pub(super) fn is_recovering(&self) -> bool {
        self.entry.as_ref().is_some_and(|entry| entry.recovering)
    }

    /// Lets the device go on that was taken over.
    pub(super) fn end_recovery(
        &mut self,
        control: &Control,
        number: u32,
        events: &Events,
    ) -> io::Result<()> {
        control.end_recovery(number, events.as_fd())?;
        if let Some(entry) = &mut self.entry {
            (entry.recovering, entry.until, self.until) = (false, None, None);
            // If this fails, the device waits for no other server.
            entry.recovering = self.record.write(entry).is_err();
        }
        Ok(())
    }

    /// Whether the device with this number is the one of this keeper, and no other that has its number now.
    pub(super) fn is_own(&self, control: &Control) -> bool {
        self.find_own(control).unwrap_or(false)
    }

    /// The same, where it makes a difference that this cannot be told.
    ///
    /// # Errors
    /// The driver does not say.
    pub(super) fn find_own(&self, control: &Control) -> io::Result<bool> {
        let info = control.device(self.number)?;
        let nonce = self.entry.as_ref().map(|entry| entry.nonce);
        Ok(info.is_some_and(|info| Some(info.private_flags) == nonce))
    }

    /// Whether the device of a server that has ended may wait for another one.
    pub(super) fn may_wait(&self, control: &Control) -> bool {
        let info = control.device(self.number).ok().flatten();
        let entry = self.entry.as_ref();
        entry.zip(info).is_some_and(|(entry, info)| {
            is_of_record(&info, entry) && (!entry.recovering || self.queues == 1)
        })
    }

    /// Waits until another keeper has the device that `is_there`, for as long as it is to wait.
    pub(super) fn wait(&mut self, server: &Server, is_there: impl Fn() -> bool) -> Successor {
        let Some(entry) = &mut self.entry else { return Successor::None };
        let until = *entry.until.get_or_insert_with(|| now() + self.patience);
        if self.record.write(entry).is_err() {
            return Successor::None;
        }
        if !has_ended(server, until, &is_there) {
            return Successor::None;
        }
        entry.left = stamps_left(&entry.image, until);
        if self.record.write(entry).is_err() {
            return Successor::None;
        }
        self.record.unlock();
        loop {
            let is_over = now() >= until || !is_there();
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

    /// There is no device of this keeper any more, or never was one; its record is locked.
    pub(super) fn end(&self, server: &Server) {
        if let (Some(waiting), None) = (&self.waiting, &self.entry) {
            // What waits goes on waiting. The server may have recovered the image, as the next one would have: but only
            // what it has locked.
            let until = self.until.unwrap_or_default();
            if let Some(before) = &waiting.left
                && self.locked.contains(&true)
                && has_ended(server, until, || true)
            {
                let left = stamps_left(&waiting.image, until);
                let left = left.map(|left| merged(before, &left, &self.locked));
                // If this fails, the next server is refused.
                let _ = self.record.write(&Entry { left, ..waiting.clone() });
            }
        } else if self.entry.is_some() || self.record.read().is_ok_and(|entry| entry.is_none()) {
            self.record.remove();
        }
    }

    fn write(&mut self, nonce: u64, recovering: bool) -> io::Result<()> {
        let image = self.image.clone();
        let image = image.ok_or_else(|| io::Error::other("nobody has looked for a device"))?;
        let (keeper, until) = (self.keeper, self.until);
        let entry = Entry { nonce, keeper, recovering, image, left: None, until };
        self.record.write(&entry)?;
        self.entry = Some(entry);
        Ok(())
    }

    fn unwritten(&self, error: &io::Error) -> String {
        format!("cannot write the record of ublk device {}: {error}", self.number)
    }
}

/// Waits until the server has ended, which may only have given up the device, and then still changes the image. Returns
/// whether it has in time.
fn has_ended(server: &Server, until: SinceBoot, is_there: impl Fn() -> bool) -> bool {
    while !server.has_ended(LOOK) {
        if now() >= until || !is_there() {
            return false;
        }
    }
    true
}

/// The stamps of an image whose server has ended: what is changed from then on was not changed by it. `None` if its last
/// writes do not end, or somebody else writes to it.
fn stamps_left(image: &Image, until: SinceBoot) -> Option<Vec<Option<Stamp>>> {
    let landed = until.min(now() + LANDING);
    while image.is_written() {
        if now() >= landed {
            return None;
        }
        thread::sleep(LOOK);
    }
    Some(image.stamps())
}

/// The stamps of files as one server has left them, but those that the next one has `locked` as that one has.
fn merged(
    before: &[Option<Stamp>],
    after: &[Option<Stamp>],
    locked: &[bool],
) -> Vec<Option<Stamp>> {
    let all = before.iter().zip(after).zip(locked);
    all.map(|((before, after), is_locked)| if *is_locked { *after } else { *before }).collect()
}

fn is_changed(number: u32, image: &Image) -> String {
    format!(
        "{} is not as the server of /dev/ublkb{number} has left it: it was written to since, or replaced, or cannot be \
         looked at; those who use the device would lose data, and 'ublk del -n {number}' removes it",
        named(image)
    )
}

fn cannot_look(number: u32, error: &io::Error) -> String {
    format!("cannot look at ublk device {number}: {error}")
}

/// Whether a device is the one of a record, and may wait for a server.
fn is_of_record(info: &DeviceInfo, entry: &Entry) -> bool {
    entry.nonce == info.private_flags && outlives(info)
}

/// The image's name in messages.
fn named(image: &Image) -> String {
    let name = image.files.first().map(|file| shown(&file.name).to_string());
    format!("'{}'", name.unwrap_or_default())
}

fn is_of_other(number: u32, image: &Image, name: &Path) -> String {
    format!(
        "/dev/ublkb{number} is of {}, not of '{}': {}",
        named(image),
        shown(name),
        way_out(number)
    )
}

fn way_out(number: u32) -> String {
    format!(
        "choose another number, or 'auto' for one that is free; 'ublk del -n {number}' removes one that nobody serves"
    )
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
    if info.state == DEAD {
        return Ok(Judgement::Free);
    }
    let Some(entry) = entry.filter(|entry| is_of_record(info, entry)) else {
        return Err(format!(
            "there is a ublk device {number} already, and not one that waits for another server: {}",
            way_out(number)
        ));
    };
    if let Some(name) = image.files.first().map(|file| &file.name)
        && entry.image.files.first().is_none_or(|file| file.name != *name)
    {
        return Err(is_of_other(number, &entry.image, name));
    }
    let names =
        |image: &Image| image.files.iter().map(|file| file.name.clone()).collect::<Vec<_>>();
    let which = if entry.image.below != image.below {
        format!("{} with other backing files", named(&entry.image))
    } else if names(&entry.image) != names(image) {
        format!("{} with another data file", named(&entry.image))
    } else if let Some(ImageFile { name, .. }) = entry
        .image
        .files
        .iter()
        .zip(&image.files)
        .find_map(|(old, new)| (old != new).then_some(old))
    {
        format!("another file that had the name '{}'", shown(name))
    } else if entry.recovering && info.queues > 1 {
        return Err(format!(
            "/dev/ublkb{number} has lost a server that was just taking it over, and cannot be taken over any more: {}",
            way_out(number)
        ));
    } else {
        return Ok(if info.state == LIVE { Judgement::Ends } else { Judgement::Waits });
    };
    Err(format!("/dev/ublkb{number} is of {which}: {}", way_out(number)))
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
    use super::super::image::{Moment, Seen};
    use super::super::wire::{Basic, QUIESCED, feature};
    use super::*;

    fn image(name: &str, inode: u64) -> Image {
        let id = FileId { device: 1, inode };
        Image { files: vec![ImageFile { name: name.into(), id, seen: None }], below: 3 }
    }

    #[test]
    fn only_the_device_of_the_record_is_taken_over_and_only_for_its_image() {
        let ours = image("/images/vm.qcow2", 7);
        let (nonce, keeper, recovering, image) = (99, 1, false, ours.clone());
        let entry = Entry { nonce, keeper, recovering, image, left: None, until: None };
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
        let born = |seconds| {
            let mut image = ours.clone();
            let born = Moment { seconds, nanoseconds: 0 };
            image.files[0].seen = Some(Seen { device: 1, inode: 7, born });
            image
        };
        let with_data = |name: &str, inode| {
            let files = [ours.clone(), image(name, inode)].map(|image| image.files).concat();
            Image { files, below: 3 }
        };
        for (of, with, why) in [
            (&ours, image("/images/b", 7), "is of '/images/vm.qcow2', not of '/images/b'"),
            (
                &ours,
                image("/images/vm.qcow2", 8),
                "another file that had the name '/images/vm.qcow2'",
            ),
            (&born(1), born(2), "another file that had the name '/images/vm.qcow2'"),
            (
                &ours,
                Image { below: 4, ..ours.clone() },
                "'/images/vm.qcow2' with other backing files",
            ),
            (&ours, with_data("/data", 9), "'/images/vm.qcow2' with another data file"),
            (&with_data("/data", 9), ours.clone(), "'/images/vm.qcow2' with another data file"),
            (
                &with_data("/data", 9),
                with_data("/d", 9),
                "'/images/vm.qcow2' with another data file",
            ),
            (
                &with_data("/data", 9),
                with_data("/data", 8),
                "another file that had the name '/data'",
            ),
        ] {
            let entry = Entry { image: of.clone(), ..entry.clone() };
            assert_eq!(judge(&waits, Some(&entry), of), Ok(Judgement::Waits));
            let refused = judge(&waits, Some(&entry), &with).unwrap_err();
            assert!(refused.contains(why) && refused.contains("'ublk del -n 5'"), "{refused}");
        }
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
    fn new_stamps_are_only_those_of_files_that_the_server_had_locked() {
        let stamp = |length| Some(Stamp { length, ..Stamp::default() });
        let (before, after) = ([stamp(1), stamp(2)], [stamp(3), stamp(4)]);
        assert_eq!(merged(&before, &after, &[true, false]), [stamp(3), stamp(2)]);
        assert_eq!(merged(&before, &after, &[false, true]), [stamp(1), stamp(4)]);
    }

    #[test]
    fn numbers_differ() {
        assert_ne!(random().unwrap(), random().unwrap());
    }
}
