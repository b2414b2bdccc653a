//! What the users of a cache in a process need until the last of them has ended: its files, and the thread that looks
//! after them.

use super::common::Common;
use super::directory::Directory;
use super::pair::{LayerKey, Pair};
use super::tidy::{self, Rooms};
use super::usage::Usage;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::thread;
use std::time::Duration;

/// How often the thread checks whether anything is to be done.
const LOOK: Duration = Duration::from_secs(5);

/// How long nothing is evicted after nothing could be.
const PAUSE: Duration = Duration::from_secs(1);

/// Descriptors of a layer's files, and the part of those that the process may have which all layers may take.
const FILES: u64 = 2;
pub(super) const PART: u64 = 4;

/// The files of a layer that are in use, of which all but one are detached. Locked while they are opened.
type Slot = Mutex<Vec<Weak<Pair>>>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
pub(super) struct Upkeep {
    pub(super) rooms: Rooms,
    pub(super) common: Arc<Common>,
    slots: Mutex<HashMap<LayerKey, Arc<Slot>>>,
    /// A file without data, in place of those of layers that can have none, and its length.
    nothing: Arc<File>,
    longest: Mutex<u64>,
    /// How often the thread has looked after everything.
    pub(super) rounds: AtomicU64,
}

impl Upkeep {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system has no memory, descriptors or threads.
    pub(super) fn start(rooms: Rooms, limit: u64) -> io::Result<Arc<Self>> {
        let usage = Usage::open(&rooms.root, limit)?;
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let nothing = Arc::new(File::from(rustix::fs::memfd_create("isobath-cache", flags)?));
        let (wake, woken) = sync_channel(1);
        let common = Arc::new(Common::new(usage, limit, wake));
        common.wake();
        let (slots, longest) = (Mutex::default(), Mutex::new(0));
        let rounds = AtomicU64::new(0);
        let upkeep = Arc::new(Self { rooms, common, slots, nothing, longest, rounds });
        let weak = Arc::downgrade(&upkeep);
        let thread = thread::Builder::new().name("cache".to_owned());
        thread.spawn(move || attend(&weak, &woken))?;
        Ok(upkeep)
    }

    /// A file of at least so many bytes that are not there.
    ///
    /// # Errors
    /// There is no file of this length.
    pub(super) fn nothing(&self, length: u64) -> io::Result<Arc<File>> {
        let mut longest = lock(&self.longest);
        if *longest < length {
            self.nothing.set_len(length)?;
            *longest = length;
        }
        Ok(Arc::clone(&self.nothing))
    }

    fn slot(&self, key: &LayerKey) -> Arc<Slot> {
        let mut slots = lock(&self.slots);
        slots.retain(|other, slot| other == key || Arc::strong_count(slot) > 1 || is_used(slot));
        Arc::clone(slots.entry(*key).or_default())
    }

    /// Whether the files of one more layer are within this part of the descriptors that the process may have.
    pub(super) fn has_descriptors(&self, part: u64) -> bool {
        within_descriptors(self.files_open() + 1, part)
    }

    /// Of how many layers the files are open, or are just opened.
    fn files_open(&self) -> u64 {
        let slots = lock(&self.slots);
        let open = slots.values().map(|slot| match slot.try_lock() {
            Ok(used) => used.iter().filter(|pair| pair.strong_count() > 0).count(),
            Err(_) => 1,
        });
        open.sum::<usize>() as u64
    }

    /// The files of a layer, which are opened if this process does not use them, and created if there are none.
    ///
    /// # Errors
    /// They cannot be opened, or the process has too many files open.
    pub(super) fn open(&self, key: &LayerKey) -> io::Result<Arc<Pair>> {
        let slot = self.slot(key);
        let mut used = lock(&slot);
        if let Some(pair) = in_use(&mut used) {
            return Ok(pair);
        }
        // This slot, which is locked, counts already.
        let layers = self.files_open();
        if !within_descriptors(layers, PART) {
            return Err(io::Error::other(format!(
                "the files of {layers} layers are too many for this process's limit of open files (RLIMIT_NOFILE)"
            )));
        }
        let pair = Arc::new(Pair::open(&self.rooms.layers, key)?);
        used.push(Arc::downgrade(&pair));
        Ok(pair)
    }

    /// The files of a layer; `None` if there are none. Waits for nobody.
    ///
    /// # Errors
    /// They cannot be opened, or somebody else is just opening them.
    fn find(&self, key: &LayerKey) -> io::Result<Option<Arc<Pair>>> {
        let slot = self.slot(key);
        let mut used = match slot.try_lock() {
            Ok(used) => used,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(io::ErrorKind::ResourceBusy.into()),
        };
        if let Some(pair) = in_use(&mut used) {
            return Ok(Some(pair));
        }
        let Some(pair) = Pair::find(&self.rooms.layers, key)?.map(Arc::new) else {
            return Ok(None);
        };
        used.push(Arc::downgrade(&pair));
        Ok(Some(pair))
    }

    /// The files of all layers in use, except those that are just opened.
    fn used(&self) -> Vec<Arc<Pair>> {
        let slots = lock(&self.slots);
        let mut all = Vec::new();
        for used in slots.values().filter_map(|slot| slot.try_lock().ok()) {
            all.extend(used.iter().filter_map(Weak::upgrade));
        }
        all
    }

    /// Counts the files, and evicts what is too much; how many blocks and objects were evicted, `None` if another
    /// process is doing that.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(super) fn evict(&self) -> io::Result<Option<u64>> {
        self.look_after_files()?;
        tidy::run(&self.rooms, &self.common, |key| self.find(key))
    }

    /// Sees what has become of the files in use: whether they still have names, and whether the kernel has failed to
    /// write them.
    fn look_after_files(&self) -> io::Result<()> {
        let layers: &Directory = &self.rooms.layers;
        let used = self.used();
        for pair in &used {
            pair.look_for_losses(layers);
            pair.look_for_names();
        }
        if used.iter().any(|pair| pair.is_lost())
            && let Some(_alone) = layers.try_alone()?
        {
            for pair in &used {
                pair.leave_if_lost();
            }
        }
        self.common.usage.look_after(&self.rooms.root)
    }
}

fn in_use(slot: &mut Vec<Weak<Pair>>) -> Option<Arc<Pair>> {
    slot.retain(|pair| pair.strong_count() > 0);
    slot.iter().filter_map(Weak::upgrade).find(|pair| !pair.is_lost())
}

/// Whether the files of so many layers are within this part of the descriptors that the process may have.
fn within_descriptors(layers: u64, part: u64) -> bool {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.current.is_none_or(|most| layers * FILES <= most / part)
}

fn is_used(slot: &Slot) -> bool {
    slot.try_lock().map_or(true, |used| used.iter().any(|pair| pair.strong_count() > 0))
}

fn attend(upkeep: &Weak<Upkeep>, woken: &Receiver<()>) {
    loop {
        let woken = woken.recv_timeout(LOOK);
        let Some(upkeep) = upkeep.upgrade() else { return };
        upkeep.common.usage.advance_with_time();
        let looked = upkeep.look_after_files();
        if let Err(error) = &looked {
            upkeep.common.warn(error);
        }
        match woken {
            // Another process, which has a higher limit, may have filled it.
            Err(RecvTimeoutError::Timeout) if !upkeep.common.is_high() => {}
            Ok(()) | Err(RecvTimeoutError::Timeout) => {
                let evicted = upkeep.evict();
                if let Err(error) = &evicted {
                    upkeep.common.warn(error);
                }
                upkeep.rounds.fetch_add(1, Ordering::Relaxed);
                let is_in_vain = !matches!(evicted, Ok(None | Some(1..)));
                let is_full = upkeep.common.is_high() && is_in_vain;
                drop(upkeep);
                if is_full {
                    thread::sleep(PAUSE);
                }
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
