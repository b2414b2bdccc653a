//! Walking directories, on several threads.

use crate::fleet::{Fleet, Seen};
use crate::name;
use crate::probe::{self, Id, Kind};
use crate::problem::Trouble;
use crate::tree::{Entry, Tree, entries};
use crate::{Options, Progress, SurveyError};
use parking_lot::{Condvar, Mutex};
use rustix::fs::FileType;
use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

/// The number of file names in one task.
const BATCH: usize = 128;
/// The maximum number of waiting tasks; beyond it, the thread that finds files probes them itself.
const MAX_WAITING: usize = 1024;

/// A file that was opened, or why it was not.
type Opened = io::Result<(File, Metadata)>;

enum Task {
    Directory { tree: Arc<Tree>, path: PathBuf, device: u64 },
    Files { tree: Arc<Tree>, directory: Arc<Path>, names: Vec<OsString> },
    File(PathBuf),
}

struct Queue {
    tasks: Vec<Task>,
    /// The number of working threads, which may still add tasks.
    busy: usize,
}

struct Walk<'a> {
    options: &'a Options,
    progress: &'a Progress,
    queue: Mutex<Queue>,
    changed: Condvar,
    fleet: Mutex<Fleet>,
}

/// Probes every regular file below the paths; returns the qcow2 images among them.
pub(crate) fn walk(
    paths: &[PathBuf],
    options: &Options,
    progress: &Progress,
) -> Result<Fleet, SurveyError> {
    let mut tasks = Vec::new();
    for path in paths {
        let failed =
            |error: io::Error| SurveyError::new(path, format_args!("cannot access it: {error}"));
        let data = fs::metadata(path).map_err(failed)?;
        if data.is_dir() {
            let tree = Arc::new(Tree::open(path).map_err(failed)?);
            tasks.push(Task::Directory { tree, path: path.clone(), device: data.dev() });
        } else if data.is_file() {
            tasks.push(Task::File(path.clone()));
        } else {
            return Err(SurveyError::new(path, "it is neither a directory nor a regular file"));
        }
    }
    let walk = Walk {
        options,
        progress,
        queue: Mutex::new(Queue { tasks, busy: 0 }),
        changed: Condvar::new(),
        fleet: Mutex::default(),
    };
    thread::scope(|scope| {
        for _ in 1..options.threads.max(1) {
            // If no thread can be started, this one does all the work.
            let _ = thread::Builder::new().spawn_scoped(scope, || walk.work());
        }
        walk.work();
    });
    Ok(walk.fleet.into_inner())
}

impl Walk<'_> {
    fn work(&self) {
        let mut queue = self.queue.lock();
        while !self.progress.is_stopped() {
            if let Some(task) = queue.tasks.pop() {
                queue.busy += 1;
                drop(queue);
                match task {
                    Task::Directory { tree, path, device } => self.directory(&tree, &path, device),
                    Task::Files { tree, directory, names } => self.files(&tree, &directory, names),
                    Task::File(path) => {
                        self.take(self.file(&path, probe::open(&path)).into_iter().collect());
                    }
                }
                queue = self.queue.lock();
                queue.busy -= 1;
            } else if queue.busy == 0 {
                break;
            } else {
                self.changed.wait(&mut queue);
            }
        }
        self.changed.notify_all();
    }

    /// Adds a task, or returns it if too many are waiting.
    fn hand_on(&self, task: Task) -> Option<Task> {
        let mut queue = self.queue.lock();
        // Directories are always accepted: they are on top of the stack, and few compared with files.
        if queue.tasks.len() >= MAX_WAITING && matches!(task, Task::Files { .. }) {
            return Some(task);
        }
        queue.tasks.push(task);
        drop(queue);
        self.changed.notify_one();
        None
    }

    fn directory(&self, tree: &Arc<Tree>, path: &Path, device: u64) {
        let failed = |error: &io::Error| self.problem(path, Trouble::of_image(error), error);
        let opened = tree.directory(path);
        let opened = opened.and_then(|directory| Ok((directory.metadata()?.dev(), directory)));
        let (own_device, directory) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                self.progress.directories.fetch_add(1, Relaxed);
                return failed(&error);
            }
        };
        if self.options.one_file_system && own_device != device {
            self.progress.mounts.fetch_add(1, Relaxed);
            return;
        }
        self.progress.directories.fetch_add(1, Relaxed);
        let shared: Arc<Path> = path.into();
        let mut names = Vec::new();
        let flush = |names: &mut Vec<OsString>| {
            let (tree, directory) = (Arc::clone(tree), Arc::clone(&shared));
            let task = Task::Files { tree, directory, names: std::mem::take(names) };
            if let Some(Task::Files { tree, directory, names }) = self.hand_on(task) {
                self.files(&tree, &directory, names);
            }
        };
        let entries = match entries(&directory) {
            Ok(entries) => entries,
            Err(error) => return failed(&error),
        };
        for entry in entries {
            if self.progress.is_stopped() {
                return;
            }
            let Entry { name, kind } = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    failed(&error);
                    break;
                }
            };
            match kind {
                FileType::Directory => {
                    let (tree, path) = (Arc::clone(tree), path.join(name));
                    self.hand_on(Task::Directory { tree, path, device });
                }
                FileType::RegularFile => {
                    names.push(name);
                    if names.len() == BATCH {
                        flush(&mut names);
                    }
                }
                FileType::Symlink => {
                    self.progress.links.fetch_add(1, Relaxed);
                }
                _ => {
                    self.progress.special.fetch_add(1, Relaxed);
                }
            }
        }
        if !names.is_empty() {
            flush(&mut names);
        }
    }

    fn files(&self, tree: &Tree, directory: &Path, names: Vec<OsString>) {
        let found = names
            .into_iter()
            .take_while(|_| !self.progress.is_stopped())
            .filter_map(|name| {
                let path = directory.join(name);
                self.file(&path, tree.file(&path))
            })
            .collect();
        self.take(found);
    }

    /// Probes a file; returns it if it is an image.
    fn file(&self, path: &Path, opened: Opened) -> Option<(Seen, Option<(Trouble, String)>)> {
        self.progress.files.fetch_add(1, Relaxed);
        match opened.and_then(|opened| look(path.to_owned(), &opened, false)) {
            Ok((seen, _)) if matches!(seen.kind, Kind::Other(_)) => None,
            Ok(found) => Some(found),
            Err(error) => {
                // A file removed meanwhile is ignored.
                if error.kind() != io::ErrorKind::NotFound {
                    self.problem(path, Trouble::of_image(&error), &error);
                }
                None
            }
        }
    }

    fn take(&self, found: Vec<(Seen, Option<(Trouble, String)>)>) {
        if found.is_empty() {
            return;
        }
        self.progress.images.fetch_add(found.len() as u64, Relaxed);
        let mut fleet = self.fleet.lock();
        for (seen, trouble) in found {
            let path = seen.path.as_os_str().as_bytes();
            if let Some((trouble, detail)) = trouble {
                fleet.problems.add(path, trouble, detail);
            }
            if fleet.add(&seen, self.options.births).is_none() {
                fleet.problems.add(path, Trouble::Unreadable, "too many images");
            }
        }
    }

    fn problem(&self, path: &Path, trouble: Trouble, detail: &io::Error) {
        self.fleet.lock().problems.add(path.as_os_str().as_bytes(), trouble, detail);
    }
}

/// Probes a file that is open, and resolves its backing file's name.
pub(crate) fn look(
    path: PathBuf,
    (file, data): &(File, Metadata),
    outside: bool,
) -> io::Result<(Seen, Option<(Trouble, String)>)> {
    let (facts, kind) = probe::facts_and_kind(&path, file, data)?;
    let mut backing: Option<Id> = None;
    let trouble = match &kind {
        Kind::Other(_) => None,
        Kind::Broken(error) => Some((Trouble::BadHeader, error.to_string())),
        Kind::Qcow2(summary) => {
            summary.backing.as_ref().and_then(|named| match probe::find(&path, named) {
                Ok((_, id)) => {
                    backing = Some(id);
                    None
                }
                Err(trouble) => Some((trouble, name::exact(named.name.as_bytes()))),
            })
        }
    };
    let stored = matches!(trouble, Some((Trouble::Stored, _)));
    let cut = trouble.is_some() && !stored;
    Ok((Seen { path, facts, kind, backing, cut, stored, outside }, trouble))
}
