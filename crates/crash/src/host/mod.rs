//! Simulated files in memory, with delays and a record of everything.

mod faults;
mod file;
mod memory;
mod world;

pub use faults::{Effect, Faults, FlushFault, Kind, Rule};
pub use file::{Planned, SimFile};
pub use memory::{Killed, Memories};

use crate::clock::SimClock;
use crate::content::Content;
use crate::guest::SECTOR;
use crate::record::{Files, Record, Tick};
use isobath_storage::{Host, OpenMode, Operation, Result, StorageError};
use isobath_storage_test::any::{AnyHost, ToAny};
use parking_lot::Mutex;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use world::World;

/// The memory that a killed server left, and whether it is accessible.
#[derive(Clone, Debug, Default)]
pub enum Access {
    /// There is none.
    #[default]
    None,
    /// It is there.
    Left(Memories),
    /// It exists but cannot be accessed, for this reason.
    Denied(Memories, i32),
}

/// How the host behaves.
#[derive(Clone, Debug)]
pub struct Conduct {
    /// Seed of its random choices.
    pub seed: u64,
    /// The most turns that an operation waits before it takes effect, and again before it completes.
    pub delay: u32,
    /// Whether changes are recorded.
    pub record: bool,
    /// What a discarded range reads as: 0, another byte, or `None` for its old contents.
    pub discarded: Option<u8>,
    /// Bytes that the device writes atomically, which it reports.
    pub atomic: u64,
    /// What goes wrong.
    pub faults: Faults,
    /// The clock for the time that operations take.
    pub clock: Option<SimClock>,
    /// Files are block devices, which keep their length.
    pub fixed: bool,
    /// Files can share space, in blocks of this many bytes.
    pub clones: Option<u64>,
    /// The number of moments for which to keep the state that a kill would leave.
    pub kills: usize,
    /// What a killed server left.
    pub access: Access,
}

impl Default for Conduct {
    fn default() -> Self {
        Self {
            seed: 0,
            delay: 0,
            record: false,
            discarded: Some(0),
            atomic: SECTOR,
            faults: Faults::default(),
            clock: None,
            fixed: false,
            clones: None,
            kills: 0,
            access: Access::None,
        }
    }
}

/// A host of simulated files. Clones share them.
#[derive(Clone)]
pub struct SimHost(Arc<Mutex<World>>);

/// The simulated files as the engine sees them. It is compiled for [`AnyHost`] only, once for all tests.
#[derive(Clone)]
struct Simulated(SimHost);

impl SimHost {
    /// A host of these files.
    pub fn new(files: Files, conduct: Conduct) -> Self {
        Self(Arc::new(Mutex::new(World::new(files, conduct))))
    }

    /// The files for the engine.
    pub fn any(&self) -> AnyHost {
        Simulated(self.clone()).any()
    }

    /// Whether files are block devices.
    pub fn is_fixed(&self) -> bool {
        self.0.lock().conduct.fixed
    }

    /// Keeps the state that a kill would leave now. Returns the moment.
    pub fn keep_killed(&self) -> Tick {
        self.0.lock().keep_killed()
    }

    /// Reserves names of files that may be created later, with their earlier contents. Call this before anything
    /// happens.
    pub fn reserve(&self, names: impl IntoIterator<Item = PathBuf>, content: &Arc<Content>) {
        let mut world = self.0.lock();
        for name in names {
            let number = world.reserve(name);
            world.files[number].1 = Arc::clone(content);
            if world.conduct.record {
                world.restart();
            }
        }
    }

    /// Adds a file, or replaces it.
    pub fn insert(&self, name: impl Into<PathBuf>, content: Content) {
        let name = name.into();
        let mut world = self.0.lock();
        let number = world.number(&name).unwrap_or_else(|| world.reserve(name));
        world.absent[number] = false;
        world.files[number].1 = Arc::new(content);
    }

    /// The contents of a file; empty if there is none.
    pub fn contents(&self, name: impl AsRef<Path>) -> Arc<Content> {
        let world = self.0.lock();
        world.number(name.as_ref()).map_or_else(Arc::default, |at| Arc::clone(&world.files[at].1))
    }

    /// The tick of a new event, for example of the guest.
    pub fn tick(&self) -> Tick {
        self.0.lock().now()
    }

    /// When the first fault struck, or [`NEVER`](crate::record::NEVER).
    pub fn struck(&self) -> Tick {
        self.0.lock().struck
    }

    /// Ends all faults.
    pub fn heal(&self) {
        self.0.lock().conduct.faults = Faults::default();
    }

    /// The files as reads see them now.
    pub fn files(&self) -> Files {
        self.0.lock().files.clone()
    }

    /// What a discarded range reads as; see [`Conduct::discarded`].
    pub fn discarded(&self) -> Option<u8> {
        self.0.lock().conduct.discarded
    }

    /// The record of everything so far.
    pub fn record(&self) -> Record {
        self.0.lock().record()
    }

    /// The states that kills would have left, in no particular order.
    pub fn killed(&self) -> Vec<Killed> {
        let world = self.0.lock();
        [world.killed.clone(), world.killed_on_demand.clone()].concat()
    }
}

fn error(operation: Operation, name: &Path, code: i32) -> StorageError {
    StorageError::new(operation, name, io::Error::from_raw_os_error(code))
}

/// The error for a file that another user has open.
fn busy(name: &Path) -> StorageError {
    let text = format!("Failed to get \"write\" lock of {}: it is in use", name.display());
    StorageError::new(Operation::Lock, name, io::Error::new(io::ErrorKind::ResourceBusy, text))
}

impl SimHost {
    /// Opens the file with this number as an ordinary user.
    fn attach(&self, number: usize, name: &Path, mode: OpenMode) -> Result<SimFile> {
        let mut world = self.0.lock();
        let locked = mode.locking.denies_writing();
        if locked {
            let users = &mut world.users[number];
            if users.writers > 0 || mode.writable && users.readers > 0 {
                return Err(busy(name));
            }
            let count = if mode.writable { &mut users.writers } else { &mut users.readers };
            *count += 1;
        }
        let conduct = &world.conduct;
        Ok(SimFile {
            gains: conduct.seed & 2 > 0 && !conduct.fixed,
            atomic: conduct.atomic,
            fixed: conduct.fixed,
            clones: conduct.clones,
            host: self.clone(),
            name: name.to_owned(),
            number,
            writable: AtomicBool::new(mode.writable),
            role: Mutex::new(file::Role { locked, admits: false }),
        })
    }
}

impl Host for Simulated {
    type File = SimFile;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<SimFile> {
        let number = {
            let world = self.0.0.lock();
            world.number(name).filter(|number| !world.absent[*number])
        };
        let number = number.ok_or_else(|| error(Operation::Open, name, libc::ENOENT))?;
        self.0.attach(number, name, mode)
    }

    async fn create(&self, name: &Path, mode: OpenMode) -> Result<SimFile> {
        let number = {
            let mut world = self.0.0.lock();
            match world.number(name) {
                Some(number) => number,
                // Names of recorded files are reserved beforehand.
                None if world.conduct.record => {
                    return Err(error(Operation::Create, name, libc::EROFS));
                }
                None => world.reserve(name.to_owned()),
            }
        };
        let file = self.0.attach(number, name, OpenMode { writable: true, ..mode })?;
        self.0.0.lock().absent[number] = false;
        isobath_storage::Storage::set_len(&file, 0).await?;
        Ok(file)
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        let mut world = self.0.0.lock();
        match world.number(name) {
            Some(number) if !world.absent[number] => {
                world.absent[number] = true;
                Ok(())
            }
            _ => Err(error(Operation::Remove, name, libc::ENOENT)),
        }
    }

    async fn remove_file(&self, name: &Path, file: &SimFile) -> Result<bool> {
        let mut world = self.0.0.lock();
        let is_here = world.number(name) == Some(file.number) && !world.absent[file.number];
        if is_here {
            world.absent[file.number] = true;
        }
        Ok(is_here)
    }
}
