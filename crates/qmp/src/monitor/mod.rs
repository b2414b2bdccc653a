//! The objects that commands act on: the served disks, their jobs and exports.
//!
//! Commands that change something are executed one at a time, in order of arrival, as in QEMU. Jobs run as tasks on the
//! monitor's thread. Their events are sent before the reply to the command that caused them.

mod arguments;
mod blockdev;
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
use isobath_ring::yield_now;
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
use throttle::Filter;

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
    names: RefCell<Names>,
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
    events: Events,
    event_queue: Arc<EventQueue>,
    /// Held by commands that change something.
    order: isobath_sync::AsyncMutex<()>,
    quit: Cell<bool>,
    ending: Cell<bool>,
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
            events,
            event_queue,
            order: isobath_sync::AsyncMutex::default(),
            quit: Cell::new(false),
            ending: Cell::new(false),
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
        loop {
            let changed = self.changed.listen();
            if self.quit.get() {
                return;
            }
            changed.await;
        }
    }

    /// Shuts down: notifies clients, cancels jobs (which can be restarted later), and closes the exports with their own
    /// servers and the disks added by `blockdev-add`. Shared servers, and the disks passed to [`new`](Self::new), are
    /// left to the caller.
    pub async fn end(&self) {
        self.ending.set(true);
        let reason = if self.quit.get() { "host-qmp-quit" } else { "host-signal" };
        self.events.emit("SHUTDOWN", json!({"guest": false, "reason": reason}));
        self.let_pass();
        self.end_stop();
        let _order = self.order.lock().await;
        self.end_jobs().await;
        self.close_exports().await;
        let added: Vec<_> = self.drives().into_iter().filter(|drive| drive.is_added()).collect();
        for drive in added {
            if let Err(error) = drive.close().await {
                tracing::warn!(%error, "cannot close a disk");
            }
        }
        self.pass_on();
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
                let _order = self.order.lock().await;
                self.change(command, arguments, client).await?;
                Ok(json!({}))
            }
        }
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
        if self.ending.get() {
            return Err(QmpError::of(ErrorClass::GenericError, "the server is shutting down"));
        }
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
