//! Sets of descriptors that were handed in, which are opened by the names `/dev/fdset/N`, as QEMU's.
//!
//! A set holds descriptors of one file, opened in different ways. To open it is to copy the one that fits: no right to
//! the file is needed, and its name does not matter. A set lasts until it has neither descriptors nor copies in use.

use super::handed_in::HandedIn;
use isobath_storage::{DESCRIPTOR_SETS, OpenMode};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;

static SETS: Mutex<Sets> = Mutex::new(Sets(BTreeMap::new()));

struct Sets(BTreeMap<u64, Set>);

#[derive(Default)]
struct Set {
    members: Vec<Member>,
    /// Copies in use.
    copies: usize,
}

struct Member {
    file: HandedIn,
    opaque: Option<String>,
    /// Nobody who may leave has handed it in.
    stays: bool,
}

/// A set, as it is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescriptorSet {
    /// Its number.
    pub number: u64,
    /// Its descriptors, each with the text that it was given.
    pub descriptors: Vec<(RawFd, Option<String>)>,
}

/// Adds a descriptor to a set, or to a new one; gives the number of the set. One that `stays` is kept when
/// [no client is left](forget_unused).
pub fn add(file: HandedIn, set: Option<u64>, opaque: Option<String>, stays: bool) -> u64 {
    let sets = &mut SETS.lock().0;
    let free = || (0..=u64::MAX).find(|number| !sets.contains_key(number)).unwrap_or(0);
    let number = set.unwrap_or_else(free);
    sets.entry(number).or_default().members.push(Member { file, opaque, stays });
    number
}

/// Closes a descriptor of a set, or all of them. Copies in use stay. Returns whether there was one.
pub fn remove(set: u64, descriptor: Option<RawFd>) -> bool {
    let mut sets = SETS.lock();
    let Some(found) = sets.0.get_mut(&set) else { return false };
    let before = found.members.len();
    let kept = |member: &Member| descriptor.is_some_and(|one| member.file.as_raw_fd() != one);
    found.members.retain(kept);
    let removed = found.members.len() < before;
    sets.forget_empty(set);
    removed
}

/// Closes the descriptors that clients have handed in to sets that nothing has opened: the last client has left.
pub fn forget_unused() {
    let mut sets = SETS.lock();
    for set in sets.0.values_mut().filter(|set| set.copies == 0) {
        set.members.retain(|member| member.stays);
    }
    sets.0.retain(|_, set| !set.is_empty());
}

/// All sets.
pub fn all() -> Vec<DescriptorSet> {
    let shown = |(number, set): (&u64, &Set)| DescriptorSet {
        number: *number,
        descriptors: set
            .members
            .iter()
            .map(|member| (member.file.as_raw_fd(), member.opaque.clone()))
            .collect(),
    };
    SETS.lock().0.iter().map(shown).collect()
}

/// The number in the name of a set that there is.
pub(super) fn of_name(name: &Path) -> io::Result<u64> {
    let text =
        name.to_str().and_then(|name| name.strip_prefix(DESCRIPTOR_SETS)).unwrap_or_default();
    // A set has one name.
    let number = text.parse::<u64>().ok().filter(|number| number.to_string() == text);
    let Some(number) = number else {
        let text = format!(
            "'{}' is no descriptor set: an image that was handed in as a descriptor has no directory in which relative \
             names could be found",
            text.escape_debug()
        );
        return Err(io::Error::new(io::ErrorKind::NotFound, text));
    };
    if SETS.lock().0.contains_key(&number) {
        return Ok(number);
    }
    let text = format!(
        "there is no descriptor set {number}; hand in a descriptor with --add-fd or QMP's add-fd"
    );
    Err(io::Error::new(io::ErrorKind::NotFound, text))
}

/// A copy of a set's descriptor is in use until this is dropped.
pub(super) struct InUse(u64);

impl Drop for InUse {
    fn drop(&mut self) {
        let mut sets = SETS.lock();
        if let Some(set) = sets.0.get_mut(&self.0) {
            set.copies -= 1;
        }
        sets.forget_empty(self.0);
    }
}

/// Copies the descriptor of a set that fits a mode.
///
/// # Errors
/// There is no such set, or none of its descriptors fits.
pub(super) fn open(name: &Path, mode: OpenMode) -> io::Result<(File, InUse)> {
    let number = of_name(name)?;
    let mut sets = SETS.lock();
    let Some(set) = sets.0.get_mut(&number) else {
        return Err(io::ErrorKind::NotFound.into());
    };
    let copy = File::from(set.fitting(mode)?.try_clone()?);
    set.copies += 1;
    Ok((copy, InUse(number)))
}

/// Copies the descriptor of a file that a set has been opened as, even if the set has none any more.
///
/// # Errors
/// There is no such set, or no more descriptors.
pub(super) fn copy(name: &Path, file: &OwnedFd) -> io::Result<(File, InUse)> {
    let number = of_name(name)?;
    let mut sets = SETS.lock();
    let Some(set) = sets.0.get_mut(&number) else {
        return Err(io::ErrorKind::NotFound.into());
    };
    let copy = File::from(file.try_clone()?);
    set.copies += 1;
    Ok((copy, InUse(number)))
}

impl Sets {
    fn forget_empty(&mut self, number: u64) {
        if self.0.get(&number).is_some_and(Set::is_empty) {
            self.0.remove(&number);
        }
    }
}

impl Set {
    fn is_empty(&self) -> bool {
        self.members.is_empty() && self.copies == 0
    }

    /// The descriptor that fits a mode. A reader also takes one that could write. Neither its mode nor whether it
    /// bypasses the page cache can be changed: others may have copies of it.
    fn fitting(&self, mode: OpenMode) -> io::Result<&OwnedFd> {
        let mut found = Vec::new();
        for member in &self.members {
            let file = member.file.file();
            let flags = super::sys::status(file)?;
            if flags & libc::O_PATH == 0 {
                found.push((flags, file));
            }
        }
        let refused = |kind, text: &str| Err(io::Error::new(kind, text));
        let access =
            if mode.writable { &[libc::O_RDWR][..] } else { &[libc::O_RDONLY, libc::O_RDWR] };
        let is_fit = |flags: i32| access.contains(&(flags & libc::O_ACCMODE));
        found.retain(|(flags, _)| is_fit(*flags));
        if found.is_empty() {
            let what = if mode.writable { "reading and writing" } else { "reading" };
            let text = format!("its descriptor set has none that is open for {what}");
            return refused(io::ErrorKind::PermissionDenied, &text);
        }
        if mode.writable {
            found.retain(|(flags, _)| flags & libc::O_APPEND == 0);
        }
        if found.is_empty() {
            let text =
                "its descriptor is open for appending, so that all writes would go to its end";
            return refused(io::ErrorKind::InvalidInput, text);
        }
        found.retain(|(flags, _)| (flags & libc::O_DIRECT != 0) == mode.direct);
        found.sort_by_key(|(flags, _)| flags & libc::O_ACCMODE != libc::O_RDONLY);
        match found.first() {
            Some((_, file)) => Ok(file),
            None if mode.direct => refused(
                io::ErrorKind::InvalidInput,
                "its descriptor uses the page cache; hand in one that was opened with O_DIRECT, or use the page cache \
                 (--cache writeback)",
            ),
            None => refused(
                io::ErrorKind::InvalidInput,
                "its descriptor was opened with O_DIRECT; hand in one without, or bypass the page cache (--cache none)",
            ),
        }
    }
}
