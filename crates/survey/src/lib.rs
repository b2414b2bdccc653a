//! Surveys a fleet of backing chains: how long they are, how often snapshots are taken, what they cost, and which
//! should be merged.
//!
//! [`survey`] walks directories and reads headers; it writes nothing and takes no image locks. It keeps 72 bytes and a
//! file name per image, and some 60 bytes more once images are linked into chains; each directory's name is kept once.
//! [`Report`] summarizes the survey, [`render`] prints it.
//!
//! The metrics are those of section III of "SVD: A Scalable Virtual Disk" (chain lengths over chains and over files,
//! the longest chain over time, the time between snapshots) and its cost model, equation (1); see [`cost`].

mod chain;
mod clusters;
pub mod cost;
mod fleet;
mod link;
mod name;
mod probe;
mod problem;
pub mod render;
mod report;
mod statistics;
mod tree;
mod walk;

pub use chain::{Advice, ChainRow, SortBy};
pub use name::{exact, shown};
pub use problem::{MAX_PROBLEMS, Problem, Problems, Trouble};
pub use report::{Clusters, Counts, Report, SpaceUsed};
pub use statistics::{Bin, LengthShare, Lengths, Spread, Timeline};

use fleet::Fleet;
use link::Links;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Options of a survey.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads that read directories and images; at least 1.
    pub threads: usize,
    /// Do not cross file system boundaries.
    pub one_file_system: bool,
    /// Date a snapshot by its file's birth time, if the file system records it; otherwise by the last write.
    pub births: bool,
    /// Read the L1 and L2 tables too, to count clusters that no disk can see.
    pub clusters: bool,
    /// Chains of this length or more are worth merging.
    pub merge_at: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            threads: std::thread::available_parallelism().map_or(1, usize::from).max(2),
            one_file_system: false,
            births: true,
            clusters: false,
            merge_at: cost::STREAMING_THRESHOLD,
        }
    }
}

/// The current phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Reading directories.
    Walking,
    /// Linking images into chains.
    Linking,
    /// Reading tables.
    Counting,
}

/// The progress of a survey, and a way to end it early.
#[derive(Debug, Default)]
pub struct Progress {
    pub(crate) directories: AtomicU64,
    pub(crate) files: AtomicU64,
    pub(crate) images: AtomicU64,
    pub(crate) links: AtomicU64,
    pub(crate) special: AtomicU64,
    pub(crate) mounts: AtomicU64,
    pub(crate) counted: AtomicU64,
    phase: AtomicU8,
    stopped: AtomicBool,
}

impl Progress {
    /// Ends the survey as soon as possible, with partial results. May be called from a signal
    /// handler.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Whether [`stop`](Self::stop) was called.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// The current phase.
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::Walking,
            1 => Phase::Linking,
            _ => Phase::Counting,
        }
    }

    /// Directories read, files examined, images found.
    pub fn walked(&self) -> (u64, u64, u64) {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (load(&self.directories), load(&self.files), load(&self.images))
    }

    /// Images whose tables were read.
    pub fn counted(&self) -> u64 {
        self.counted.load(Ordering::Relaxed)
    }

    fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Relaxed);
    }
}

/// A path that cannot be surveyed.
#[derive(Debug)]
pub struct SurveyError {
    path: PathBuf,
    reason: String,
}

impl SurveyError {
    fn new(path: &Path, reason: impl fmt::Display) -> Self {
        Self { path: path.to_owned(), reason: reason.to_string() }
    }
}

impl fmt::Display for SurveyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use std::os::unix::ffi::OsStrExt;
        write!(f, "'{}': {}", shown(self.path.as_os_str().as_bytes()), self.reason)
    }
}

impl std::error::Error for SurveyError {}

/// A surveyed fleet.
#[derive(Debug)]
pub struct Survey {
    fleet: Fleet,
    links: Links,
    clusters: Option<clusters::Counted>,
    sums: Vec<chain::Sums>,
    options: Options,
    counts: Counts,
    paths: Vec<PathBuf>,
    /// Seconds since 1970.
    taken_at: i64,
    seconds: f64,
    interrupted: bool,
}

/// Surveys every qcow2 image under the paths, which may be directories or files.
///
/// # Errors
/// If a path cannot be accessed, or is neither a directory nor a regular file. Problems below the paths are listed in
/// the [`Report`].
pub fn survey(
    paths: &[PathBuf],
    options: &Options,
    progress: &Progress,
) -> Result<Survey, SurveyError> {
    let begin = Instant::now();
    let taken_at = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .ok()
        .and_then(|since| i64::try_from(since.as_secs()).ok())
        .unwrap_or(0);
    let mut fleet = walk::walk(paths, options, progress)?;
    progress.enter(Phase::Linking);
    let links = link::link(&mut fleet, paths, options, progress);
    let clusters = options.clusters.then(|| {
        progress.enter(Phase::Counting);
        clusters::count(&mut fleet, &links, options, progress)
    });
    let sums = chain::sums(&fleet, &links, clusters.as_ref());
    let counts = Counts::of(&fleet, &links, progress);
    Ok(Survey {
        fleet,
        links,
        clusters,
        sums,
        options: options.clone(),
        counts,
        paths: paths.to_vec(),
        taken_at,
        seconds: begin.elapsed().as_secs_f64(),
        interrupted: progress.is_stopped(),
    })
}
