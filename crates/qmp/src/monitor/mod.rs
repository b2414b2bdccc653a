//! The objects that commands act on: the served disks, their jobs and exports.
//!
//! Commands that change something are executed one at a time, in order of arrival, as in QEMU. Jobs run as tasks on the
//! monitor's thread. Their events are sent before the reply to the command that caused them.

mod arguments;
mod blockdev;
mod closing;
mod drive;
mod exports;
mod fd_sets;
mod image;
mod job_layers;
mod job_queries;
mod jobs;
mod names;
mod objects;
mod pacing;
mod pausing;
mod queries;
mod request;
mod snapshot;
mod throttle;

pub use closing::Closing;
pub use drive::Drive;

use crate::error::{ErrorClass, QmpError};
use crate::schema::Schema;
use crate::server::{ClientFiles, Events, Service};
use crate::tables::SCHEMA;
use event_listener::Event;
use exports::ExportList;
use isobath_disk::clock::SystemClock;
use isobath_disk::encryption::Secret;
use isobath_disk::throttle::{Drained, Group, Groups};
use isobath_disk::{LiveDisk, OpenOptions, Trust};
use isobath_export::registry::Frontends;
use isobath_jobs::Job;
use isobath_ring::{first, spawn, timeout, yield_now};
use isobath_storage::Host;
use isobath_storage_file::descriptor_sets;
use jobs::{EventQueue, Started};
use names::Names;
use request::JobRequest;
use serde_json::{Map, Value, json};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use throttle::Filter;

/// How long the end of the server waits for a command, or for a cancelled job, before it is given up. One that waits
/// for a slow disk is to end by itself: an image that is given up in the middle of a change has to be recovered.
const PATIENCE: Duration = Duration::from_secs(30);

/// The result of a command.
type Result<T> = std::result::Result<T, QmpError>;

/// How `blockdev-add` opens images.
pub struct Opening {
    /// The options, unless its arguments say otherwise.
    pub options: OpenOptions,
    /// How far the names in an image's header are trusted.
    pub trust: Box<TrustOf>,
}

/// Decides how far an image is trusted, when it is added, or says why it cannot be opened.
pub type TrustOf = dyn Fn() -> std::result::Result<Trust, String>;

impl From<OpenOptions> for Opening {
    /// Every image is trusted as in `options`.
    fn from(options: OpenOptions) -> Self {
        let trust = options.trust.clone();
        Self { options, trust: Box::new(move || Ok(trust.clone())) }
    }
}

/// Executes QMP commands on live disks.
pub struct Monitor<H: Host> {
    host: H,
    opening: Opening,
    drives: RefCell<Vec<Rc<Drive<H>>>>,
    /// Nodes of the driver `file` that were added and that no image uses yet.
    files: RefCell<Vec<FileNode>>,
    names: RefCell<Names<H>>,
    /// Secrets by their IDs.
    secrets: RefCell<BTreeMap<String, Arc<Secret>>>,
    throttle_groups: Groups,
    /// The groups that are objects, by their IDs: they last without members.
    throttle_objects: RefCell<BTreeMap<String, Arc<Group>>>,
    filters: RefCell<Vec<Filter<H>>>,
    /// The client has stopped all disks.
    stopped: Cell<bool>,
    /// What clients have last heard of: no disk is paused.
    running: Cell<bool>,
    /// Once the server ends: no request waits for limits.
    drained: RefCell<Vec<Drained>>,
    jobs: RefCell<Vec<Rc<Started<H>>>>,
    interrupted: RefCell<Vec<JobRequest>>,
    /// Records of jobs that are gone, the oldest first.
    records: RefCell<VecDeque<Value>>,
    frontends: Frontends<LiveDisk<H>>,
    exports: Rc<ExportList>,
    closing: Closing,
    events: Events,
    event_queue: Arc<EventQueue>,
    /// Held by commands that change something.
    order: isobath_sync::AsyncMutex<()>,
    quit: Cell<bool>,
    ending: Cell<bool>,
    /// The command in progress is given up.
    gives_up: Cell<bool>,
    /// Notified when one of the three is set.
    changed: Event,
}

/// A file that was added with `blockdev-add`.
struct FileNode {
    name: String,
    path: PathBuf,
    /// The options of the whole node.
    options: Map<String, Value>,
}

impl<H: Host + Clone> Monitor<H> {
    /// A monitor of `drives`, none of which is exported yet. It finds, beside the images, the requests of jobs that an
    /// earlier server was running.
    pub fn new(
        host: H,
        opening: impl Into<Opening>,
        drives: Vec<Drive<H>>,
        frontends: Frontends<LiveDisk<H>>,
        events: Events,
    ) -> Self {
        let event_queue = Arc::<EventQueue>::default();
        for drive in &drives {
            event_queue.attend(drive);
        }
        let interrupted = drives.iter().flat_map(request::interrupted).collect();
        Self {
            host,
            opening: opening.into(),
            drives: RefCell::new(drives.into_iter().map(Rc::new).collect()),
            files: RefCell::default(),
            names: RefCell::default(),
            secrets: RefCell::default(),
            throttle_groups: Groups::new(Arc::new(SystemClock::default())),
            throttle_objects: RefCell::default(),
            filters: RefCell::default(),
            stopped: Cell::new(false),
            running: Cell::new(true),
            drained: RefCell::default(),
            jobs: RefCell::default(),
            interrupted: RefCell::new(interrupted),
            records: RefCell::default(),
            frontends,
            exports: Rc::default(),
            closing: Closing::default(),
            events,
            event_queue,
            order: isobath_sync::AsyncMutex::default(),
            quit: Cell::new(false),
            ending: Cell::new(false),
            gives_up: Cell::new(false),
            changed: Event::new(),
        }
    }

    /// The current disks.
    pub fn drives(&self) -> Vec<Rc<Drive<H>>> {
        self.drives.borrow().clone()
    }

    /// A disk's device, or the name of its root node if it has none.
    pub(crate) fn name_of(&self, drive: &Drive<H>) -> String {
        match drive.device() {
            "" => self.root_name(drive),
            device => device.to_owned(),
        }
    }

    /// The current jobs, each with its disk's name.
    pub(crate) fn running_jobs(&self) -> Vec<(String, Arc<Job>)> {
        let jobs = self.jobs.borrow();
        jobs.iter().map(|job| (self.name_of_disk(job), Arc::clone(&job.job))).collect()
    }

    /// Forwards the jobs' events, for as long as it is polled.
    pub async fn watch(&self) {
        loop {
            let event_queue = self.event_queue.listen();
            self.pass_on();
            event_queue.await;
        }
    }

    /// Waits until a client has sent `quit`.
    pub async fn quit_requested(&self) {
        self.until(&self.quit).await;
    }

    /// Waits until one of `quit`, `ending` and `gives_up` is set.
    async fn until(&self, set: &Cell<bool>) {
        loop {
            let changed = self.changed.listen();
            if set.get() {
                return;
            }
            changed.await;
        }
    }

    /// The result of `work`, which is dropped if the server ends before it completes.
    async fn unless_ending<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let ending = async {
            self.until(&self.ending).await;
            Err(shutting_down())
        };
        first(work, ending).await
    }

    /// Shuts down: notifies clients, cancels jobs (which can be restarted later), and closes the exports with their own
    /// servers and the disks added by `blockdev-add`. Shared servers, and the disks passed to [`new`](Self::new), are
    /// left to the caller.
    ///
    /// Before anything else, waits for those exports that end only once nobody uses them.
    ///
    /// An image that is being opened is given up at once; any other command, and a job, once it takes too long. What
    /// was written is made durable before. Shared servers are stopped before disks are closed. A disk that is not
    /// closed in time, since its storage does not answer, is left to [`closing`](Self::closing).
    pub async fn end(&self) {
        self.exports_unused().await;
        self.ending.set(true);
        self.changed.notify(usize::MAX);
        let reason = if self.quit.get() { "host-qmp-quit" } else { "host-signal" };
        self.events.emit("SHUTDOWN", json!({"guest": false, "reason": reason}));
        self.let_pass();
        self.end_stop();
        if timeout(PATIENCE, self.order.lock()).await.is_err() {
            tracing::warn!("a QMP command does not end; it is given up");
            self.save().await;
            self.gives_up.set(true);
            self.changed.notify(usize::MAX);
        }
        let _order = self.order.lock().await;
        self.end_jobs().await;
        if timeout(PATIENCE, self.close_exports()).await.is_err() {
            tracing::warn!("an export's requests do not end; they are given up");
        }
        self.frontends.stop();
        for drive in self.drives().into_iter().filter(|drive| drive.is_added()) {
            self.closing.begin(drive);
        }
        if timeout(PATIENCE, self.closing.ended()).await.is_err() {
            tracing::warn!("a disk's storage does not answer; all others are closed before it");
        }
        self.pass_on();
    }

    /// Whether it [ends](Self::end), or has ended.
    pub fn is_ending(&self) -> bool {
        self.ending.get()
    }

    /// The disks that are being closed.
    pub fn closing(&self) -> Closing {
        self.closing.clone()
    }

    /// Makes what clients have written durable, and lets no more of them write.
    async fn save(&self) {
        self.frontends.stop();
        let flush = |drive: Rc<Drive<H>>| spawn(async move { drive.disk().flush().await });
        let flushes: Vec<_> = self.drives().into_iter().map(flush).collect();
        let flushed = async {
            for flushed in flushes {
                match flushed.await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::warn!(%error, "cannot flush a disk"),
                    Err(panicked) => panicked.resume(),
                }
            }
        };
        if timeout(PATIENCE, flushed).await.is_err() {
            tracing::warn!("a disk's storage does not answer a flush");
        }
    }

    async fn run(
        &self,
        command: &'static str,
        arguments: Map<String, Value>,
        client: &ClientFiles,
    ) -> Result<Value> {
        match command {
            "query-status" => Ok(self.query_status()),
            "query-block" => self.query_block().await,
            "query-named-block-nodes" => self.query_named_block_nodes(&arguments).await,
            "query-blockstats" => Ok(self.query_blockstats(&arguments)),
            "query-jobs" => Ok(self.query_jobs()),
            "query-block-jobs" => Ok(self.query_block_jobs()),
            "query-block-exports" => Ok(self.query_block_exports()),
            "add-fd" => fd_sets::add_fd(&arguments, client),
            "remove-fd" => fd_sets::remove_fd(&arguments),
            "query-fdsets" => Ok(fd_sets::query_fdsets()),
            "x-isobath-query-disks" => Ok(self.query_disks()),
            "x-isobath-query-jobs" => Ok(self.query_more_of_jobs()),
            "x-isobath-query-job-records" => Ok(self.query_job_records()),
            // These do not wait for a `stop` that waits.
            "cont" => {
                self.resume();
                Ok(json!({}))
            }
            "quit" => {
                self.quit.set(true);
                self.changed.notify(usize::MAX);
                Ok(json!({}))
            }
            _ => {
                let begun = Cell::new(false);
                let work = async {
                    let _order = self.order.lock().await;
                    // It may have waited for another one.
                    self.check_not_ending()?;
                    begun.set(true);
                    self.change(command, arguments, client).await
                };
                let given_up = async {
                    self.until(&self.gives_up).await;
                    Err(if begun.get() { given_up(command) } else { shutting_down() })
                };
                first(work, given_up).await?;
                Ok(json!({}))
            }
        }
    }

    fn check_not_ending(&self) -> Result<()> {
        if self.ending.get() { Err(shutting_down()) } else { Ok(()) }
    }

    async fn change(
        &self,
        command: &'static str,
        arguments: Map<String, Value>,
        client: &ClientFiles,
    ) -> Result<()> {
        match command {
            "blockdev-snapshot-sync" => self.snapshot_sync(&arguments).await,
            "blockdev-snapshot" => self.snapshot(&arguments).await,
            "transaction" => self.transaction(&arguments).await,
            "object-add" => self.object_add(&arguments).await,
            "object-del" => self.object_del(&arguments),
            "blockdev-add" => self.blockdev_add(arguments).await,
            "blockdev-del" => self.blockdev_del(&arguments).await,
            "block_set_io_throttle" => self.set_io_throttle(&arguments),
            "x-isobath-set-on-failure" => self.set_on_failure(&arguments),
            "stop" => self.stop().await,
            "block_resize" => self.block_resize(&arguments).await,
            "block-stream" => self.block_stream(&arguments),
            "block-commit" => self.block_commit(&arguments),
            "blockdev-mirror" => self.blockdev_mirror(&arguments),
            "x-isobath-restart-job" => self.restart_job(&arguments),
            "x-isobath-forget-job" => self.forget_job(&arguments),
            "block-export-add" => self.block_export_add(&arguments, client).await,
            "block-export-del" => self.block_export_del(&arguments),
            verb => self.job_verb(verb, &arguments),
        }
    }
}

/// The answer to a command that had begun: a snapshot may have become the active layer, and have been written to.
fn given_up(command: &str) -> QmpError {
    QmpError::new(format_args!(
        "the server is shutting down, and has given up '{command}'; whether it has taken effect is not known"
    ))
}

fn shutting_down() -> QmpError {
    QmpError::of(ErrorClass::GenericError, "the server is shutting down")
}

impl<H: Host + Clone> Service for Monitor<H> {
    fn schema(&self) -> &'static Schema {
        &SCHEMA
    }

    async fn execute(
        &self,
        command: &'static str,
        arguments: Map<String, Value>,
        client: &ClientFiles,
    ) -> std::result::Result<Value, QmpError> {
        self.check_not_ending()?;
        let result = self.run(command, arguments, client).await;
        // The events of a job that was just started or ended are sent before the reply.
        yield_now().await;
        self.pass_on();
        result
    }

    fn all_clients_left(&self) {
        descriptor_sets::forget_unused();
    }
}
