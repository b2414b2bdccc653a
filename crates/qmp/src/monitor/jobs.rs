//! Block jobs: their start, events and verbs.

use super::arguments::{Arguments, flag, integer, is_well_formed, optional_text, text};
use super::exports::address_of;
use super::job_layers::JobLayers;
use super::names::Found;
use super::pacing::{on_error, pacing};
use super::request::JobRequest;
use super::snapshot::check_root;
use super::{Drive, Monitor, PATIENCE, Result};
use crate::error::{ErrorClass, QmpError};
use event_listener::{Event, EventListener};
use isobath_disk::pausing::Pause;
use isobath_disk::{DiskError, IoFailure, Layer};
use isobath_jobs::{
    CommitOptions, IoStatus, Job, JobEvent, JobOptions, JobStatus, MirrorOptions, MirrorSync,
    StreamOptions,
};
use isobath_ring::{first, spawn, timeout};
use isobath_storage::{Host, StorageExt};
use parking_lot::Mutex;
use serde_json::json;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

/// The longest job id.
const LONGEST: usize = 255;

/// A job that was started here.
pub(super) struct Started<H: Host> {
    pub(super) job: Arc<Job>,
    /// `None` once the job has concluded, although it is known until it is dismissed.
    disks: RefCell<Option<Disks<H>>>,
    /// The disk's name.
    name: RefCell<String>,
    pub(super) request: JobRequest,
    /// A user paused it.
    pub(super) paused: Cell<bool>,
    /// It was cancelled.
    cancelled: Cell<bool>,
    /// Notified to drop its work.
    given_up: Event,
}

/// The disks that a job uses.
struct Disks<H: Host> {
    drive: Rc<Drive<H>>,
    /// The one that a mirror writes to.
    target: Option<Rc<Drive<H>>>,
}

impl<H: Host> Started<H> {
    /// Whether it uses the disk.
    fn uses(&self, drive: &Drive<H>) -> bool {
        let is_it = |other: &Drive<H>| std::ptr::eq(other, drive);
        self.disks.borrow().as_ref().is_some_and(|Disks { drive, target }| {
            is_it(drive) || target.as_deref().is_some_and(is_it)
        })
    }

    /// Why it did not succeed.
    pub(super) fn error(&self) -> Option<String> {
        let cancelled = self.cancelled.get().then(|| "Operation canceled".to_owned());
        self.job.error().map(|error| error.to_string()).or(cancelled)
    }
}

/// Events that jobs and disks have queued, until they are forwarded.
#[derive(Default)]
pub(super) struct EventQueue {
    queued: Mutex<VecDeque<QueuedEvent>>,
    /// Requests that failed, with their disks' addresses.
    failed: Mutex<VecDeque<(usize, IoFailure)>>,
    /// Failures that have paused disks, with the disks' addresses.
    paused: Mutex<VecDeque<(usize, Pause)>>,
    more: Event,
}

/// An event that a job queued, and the job's state at that moment.
struct QueuedEvent {
    id: String,
    kind: &'static str,
    event: JobEvent,
    current: u64,
    total: u64,
    speed: u64,
    error: Option<String>,
}

impl EventQueue {
    pub(super) fn listen(&self) -> EventListener {
        self.more.listen()
    }

    /// Receives a disk's failures from now on.
    pub(super) fn attend<H: Host>(self: &Arc<Self>, drive: &Drive<H>) {
        let (event_queue, address) = (Arc::clone(self), address_of(drive));
        drive.disk().on_failure(Box::new(move |failure| {
            event_queue.failed.lock().push_back((address, failure));
            event_queue.more.notify(usize::MAX);
        }));
        let event_queue = Arc::clone(self);
        drive.disk().pausing().on_pause(Box::new(move |pause| {
            event_queue.paused.lock().push_back((address, pause));
            event_queue.more.notify(usize::MAX);
        }));
    }

    fn push(&self, job: &Job, event: JobEvent) {
        let progress = job.progress();
        self.queued.lock().push_back(QueuedEvent {
            id: job.id().to_owned(),
            kind: job.kind().name(),
            event,
            current: progress.current,
            total: progress.total,
            speed: job.speed(),
            error: job.error().map(|error| error.to_string()),
        });
        self.more.notify(usize::MAX);
    }
}

impl<H: Host + Clone> Monitor<H> {
    pub(super) fn block_stream(&self, arguments: &Arguments) -> Result<()> {
        self.prune_names();
        let both = |one: &str, other: &str| {
            let given = |name| optional_text(arguments, name).is_some();
            if given(one) && given(other) {
                let text = format!("'{one}' and '{other}' cannot be specified at the same time");
                return Err(QmpError::new(text));
            }
            Ok(())
        };
        both("base", "base-node")?;
        both("base", "bottom")?;
        both("base-node", "bottom")?;
        let device = text(arguments, "device");
        let found = self.look_up(device, device)?;
        let base = self.base_layer(&found, arguments)?.or(self.above_bottom(&found, arguments)?);
        if base.is_none() && optional_text(arguments, "backing-file").is_some() {
            let text = "backing file specified, but streaming the entire chain";
            return Err(QmpError::new(text));
        }
        let top = (found.depth > 0).then_some(found.layer);
        self.start(&found.drive, "block-stream", &JobLayers { top, base }, None, arguments)
    }

    pub(super) fn block_commit(&self, arguments: &Arguments) -> Result<()> {
        self.prune_names();
        for (one, other) in [("base-node", "base"), ("top-node", "top")] {
            if optional_text(arguments, one).is_some() && optional_text(arguments, other).is_some()
            {
                return Err(QmpError::new(format_args!(
                    "'{one}' and '{other}' are mutually exclusive"
                )));
            }
        }
        let device = text(arguments, "device");
        let found = self.look_up(device, device).map_err(|_| {
            let text = format!("Device '{device}' not found");
            QmpError::of(ErrorClass::DeviceNotFound, text)
        })?;
        check_root(&found)?;
        let top = match optional_text(arguments, "top") {
            Some(name) => Some(self.layer_of_file(&found, 0, name)?),
            None => self.layer_of_node(&found, 0, arguments, "top-node")?,
        };
        let root = found.drive.root();
        let top = top.filter(|top| Some(top.storage().id()) != root);
        let base = self.base_layer(&found, arguments)?;
        if top.is_none() && optional_text(arguments, "backing-file").is_some() {
            let text = "'backing-file' specified, but 'top' is the active layer";
            return Err(QmpError::new(text));
        }
        self.start(&found.drive, "block-commit", &JobLayers { top, base }, None, arguments)
    }

    pub(super) fn blockdev_mirror(&self, arguments: &Arguments) -> Result<()> {
        self.prune_names();
        let device = text(arguments, "device");
        let found = self.look_up(device, device)?;
        let name = text(arguments, "target");
        let target = self.look_up(name, name)?;
        check_root(&found)?;
        check_root(&target)?;
        let refuse = |text: String| Err(QmpError::new(text));
        if optional_text(arguments, "copy-mode") == Some("write-blocking") {
            return refuse("copy-mode 'write-blocking' is not supported; use 'background'".into());
        }
        if let Some(replaced) = optional_text(arguments, "replaces")
            && replaced != self.root_name(&found.drive)
        {
            return refuse(format!("'{replaced}' cannot be replaced; only the root node can"));
        }
        if !target.drive.device().is_empty() {
            return refuse(format!("Node '{name}' is used by device '{}'", target.drive.device()));
        }
        if let Some(export) = self.export_of(&target.drive) {
            return refuse(format!("Node '{name}' is exported as '{export}'"));
        }
        if Rc::ptr_eq(&found.drive, &target.drive) {
            return refuse("Can't mirror node into itself".into());
        }
        self.check_no_job(&target.drive)?;
        let between = JobLayers { top: None, base: None };
        let target = Some(target.drive);
        self.start(&found.drive, "blockdev-mirror", &between, target, arguments)
    }

    /// Starts a job whose arguments are all resolved.
    pub(super) fn start(
        &self,
        drive: &Rc<Drive<H>>,
        command: &'static str,
        layers: &JobLayers<H::File>,
        target: Option<Rc<Drive<H>>>,
        arguments: &Arguments,
    ) -> Result<()> {
        let id = optional_text(arguments, "job-id").unwrap_or(drive.device()).to_owned();
        if !is_well_formed(&id, LONGEST) {
            return Err(QmpError::new(format_args!("Invalid job ID '{id}'")));
        }
        if self.find_job(&id).is_some() {
            return Err(QmpError::new(format_args!("Job ID '{id}' already in use")));
        }
        self.check_no_job(drive)?;
        let options = self.job_options(&id, arguments)?;
        let (top, base) = layers.ids();
        let backing_file = optional_text(arguments, "backing-file").map(str::to_owned);
        let disk = drive.disk();
        let request = JobRequest::new(command, &id, drive, layers, arguments);
        let refused = |error: DiskError| QmpError::new(error);
        match command {
            "block-stream" => {
                let change_snapshots = flag(arguments, "change-snapshots").unwrap_or(false);
                let stream = StreamOptions { top, base, backing_file, change_snapshots };
                let (job, work) = isobath_jobs::stream(disk, stream, options).map_err(refused)?;
                self.run_job(job, work, drive, None, request);
            }
            "block-commit" => {
                let commit = CommitOptions { top, base, backing_file, keep_chain: false };
                let (job, work) = isobath_jobs::commit(disk, commit, options).map_err(refused)?;
                self.run_job(job, work, drive, None, request);
            }
            _ => {
                let Some(target) = target else {
                    return Err(QmpError::new("Parameter 'target' is missing"));
                };
                let sync = match text(arguments, "sync") {
                    "top" => MirrorSync::Top,
                    "none" => MirrorSync::None,
                    _ => MirrorSync::Full,
                };
                let mirror =
                    isobath_jobs::mirror(disk, target.disk(), MirrorOptions { sync }, options);
                let (job, work) = mirror.map_err(refused)?;
                self.run_job(job, work, drive, Some(target), request);
            }
        }
        Ok(())
    }

    fn run_job(
        &self,
        job: Arc<Job>,
        work: impl Future<Output = ()> + 'static,
        drive: &Rc<Drive<H>>,
        target: Option<Rc<Drive<H>>>,
        request: JobRequest,
    ) {
        self.interrupted.borrow_mut().retain(|other| {
            let same = other.id() == request.id();
            if same {
                other.remove();
            }
            !same
        });
        request.keep();
        let name = RefCell::new(self.name_of(drive));
        let disks = RefCell::new(Some(Disks { drive: Rc::clone(drive), target }));
        let (paused, cancelled) = (Cell::new(false), Cell::new(false));
        let given_up = Event::new();
        let work = first(work, given_up.listen());
        let started = Started { job, disks, name, request, paused, cancelled, given_up };
        self.jobs.borrow_mut().push(Rc::new(started));
        drop(spawn(work));
    }

    fn job_options(&self, id: &str, arguments: &Arguments) -> Result<JobOptions> {
        let Ok(speed) = u64::try_from(integer(arguments, "speed").unwrap_or(0)) else {
            return Err(QmpError::new("Parameter 'speed' expects a non-negative value"));
        };
        let event_queue = Arc::clone(&self.event_queue);
        Ok(JobOptions {
            speed,
            pacing: pacing(arguments)?,
            on_error: on_error(arguments)?,
            auto_finalize: flag(arguments, "auto-finalize").unwrap_or(true),
            auto_dismiss: flag(arguments, "auto-dismiss").unwrap_or(true),
            listener: Some(Arc::new(move |job: &Job, event| event_queue.push(job, event))),
            ..JobOptions::new(id)
        })
    }

    pub(super) fn find_job(&self, id: &str) -> Option<Rc<Started<H>>> {
        self.jobs.borrow().iter().find(|started| started.job.id() == id).cloned()
    }

    /// Fails if a job uses the disk.
    pub(super) fn check_no_job(&self, drive: &Drive<H>) -> Result<()> {
        let jobs = self.jobs.borrow();
        let busy = jobs
            .iter()
            .find(|started| started.job.status() != JobStatus::Concluded && started.uses(drive));
        match busy {
            Some(started) => Err(QmpError::new(format_args!(
                "Node '{}' is busy: block device is in use by block job: {}",
                self.root_name(drive),
                started.job.kind().name()
            ))),
            None => Ok(()),
        }
    }

    /// The layer named by `base` or `base-node`.
    fn base_layer(
        &self,
        found: &Found<H>,
        arguments: &Arguments,
    ) -> Result<Option<Arc<Layer<H::File>>>> {
        match optional_text(arguments, "base") {
            Some(name) => self.layer_of_file(found, found.depth + 1, name).map(Some),
            None => self.layer_of_node(found, found.depth + 1, arguments, "base-node"),
        }
    }

    /// The layer below the one named by `bottom`.
    fn above_bottom(
        &self,
        found: &Found<H>,
        arguments: &Arguments,
    ) -> Result<Option<Arc<Layer<H::File>>>> {
        let bottom = self.layer_of_node(found, found.depth, arguments, "bottom")?;
        let Some(bottom) = bottom else { return Ok(None) };
        let layers = found.drive.layers();
        let at = layers.iter().position(|layer| layer.storage().id() == bottom.storage().id());
        Ok(at.and_then(|at| layers.get(at + 1).map(Arc::clone)))
    }

    /// The layer whose node an argument names, at depth `from` or deeper.
    fn layer_of_node(
        &self,
        found: &Found<H>,
        from: usize,
        arguments: &Arguments,
        argument: &str,
    ) -> Result<Option<Arc<Layer<H::File>>>> {
        let Some(name) = optional_text(arguments, argument) else { return Ok(None) };
        let named = self.look_up("", name)?;
        if !Rc::ptr_eq(&named.drive, &found.drive) || named.depth < from {
            return Err(QmpError::new(format_args!(
                "Node '{name}' is not a backing image of '{}'",
                text(arguments, "device")
            )));
        }
        Ok(Some(named.layer))
    }

    /// The layer whose image has this name, at depth `from` or deeper: by its path, or by its name in the header of the
    /// layer above.
    pub(super) fn layer_of_file(
        &self,
        found: &Found<H>,
        from: usize,
        name: &str,
    ) -> Result<Arc<Layer<H::File>>> {
        let layers = found.drive.layers();
        let path = Path::new(name);
        let canonical = self.host.canonical(path).ok();
        let mut above = None;
        for (depth, layer) in layers.iter().enumerate() {
            let named: Option<String> = above.replace(layer).and_then(|above: &Arc<Layer<_>>| {
                above.header().and_then(|header| header.backing_file)
            });
            let same = layer.name() == path
                || named.as_deref() == Some(name)
                || canonical.is_some() && self.host.canonical(layer.name()).ok() == canonical;
            if same && depth >= from {
                return Ok(Arc::clone(layer));
            }
        }
        Err(QmpError::new(format_args!("Can't find '{name}' in the backing chain")))
    }

    pub(super) fn job_verb(&self, command: &str, arguments: &Arguments) -> Result<()> {
        let id = match optional_text(arguments, "device") {
            Some(id) => id,
            None => text(arguments, "id"),
        };
        let block_job = command.starts_with("block-job-");
        let Some(started) = self.find_job(id) else {
            return Err(if block_job {
                let text = format!("Block job '{id}' not found");
                QmpError::of(ErrorClass::DeviceNotActive, text)
            } else {
                QmpError::new("Job not found")
            });
        };
        let job = &started.job;
        let waits = started.paused.get() || job.io_status() != IoStatus::Ok;
        let refused = |text: &str| Err(QmpError::new(text));
        let verb = command.trim_start_matches("block-").trim_start_matches("job-");
        let done = match verb {
            "pause" if waits => return refused("Job is already paused"),
            "pause" => job.pause().inspect(|()| started.paused.set(true)),
            "resume" if !waits => return refused("Can't resume a job that was not paused"),
            "resume" => job.resume().inspect(|()| started.paused.set(false)),
            "cancel" => {
                let force = !block_job || flag(arguments, "force").unwrap_or(false);
                if waits && !force {
                    return refused(&format!(
                        "The block job for device '{id}' is currently paused"
                    ));
                }
                job.cancel(force).inspect(|()| started.paused.set(false))
            }
            "complete" => job.complete(),
            "finalize" => job.finalize(),
            "dismiss" => job.dismiss(),
            _ => match u64::try_from(integer(arguments, "speed").unwrap_or(-1)) {
                Ok(speed) => job.set_speed(speed),
                Err(_) => return refused("Parameter 'speed' expects a non-negative value"),
            },
        };
        done.map_err(QmpError::new)
    }

    /// Forwards events that jobs and disks have queued since the last call.
    pub(super) fn pass_on(&self) {
        loop {
            let Some(queued) = self.event_queue.queued.lock().pop_front() else { break };
            self.tell(queued);
        }
        loop {
            let Some((address, failure)) = self.event_queue.failed.lock().pop_front() else {
                break;
            };
            self.tell_failure(address, &failure);
        }
        loop {
            let Some((address, pause)) = self.event_queue.paused.lock().pop_front() else { break };
            self.tell_pause(address, &pause);
        }
        // A disk that was paused may have been removed.
        self.tell_if_it_runs();
    }

    fn tell_failure(&self, address: usize, failure: &IoFailure) {
        let drives = self.drives();
        let Some(drive) = drives.iter().find(|drive| address_of(drive) == address) else { return };
        let data = json!({
            "device": drive.device(),
            "node-name": self.root_name(drive),
            "operation": if failure.read { "read" } else { "write" },
            "action": "report",
            "nospace": failure.no_space,
            "reason": failure.reason,
        });
        self.events.emit("BLOCK_IO_ERROR", data);
    }

    fn tell(&self, queued: QueuedEvent) {
        let QueuedEvent { id, kind, event, current, total, speed, error } = queued;
        let progress = json!({
            "type": kind, "device": id, "len": total, "offset": current, "speed": speed,
        });
        match event {
            JobEvent::Status(status) => {
                let data = json!({"status": status.name(), "id": id});
                self.events.emit("JOB_STATUS_CHANGE", data);
                if status == JobStatus::Concluded {
                    self.let_go(&id);
                }
                if status == JobStatus::Null {
                    self.keep_record(&id);
                    self.jobs.borrow_mut().retain(|started| started.job.id() != id);
                }
            }
            JobEvent::Error { read, action } => {
                let operation = if read { "read" } else { "write" };
                let data = json!({"device": id, "operation": operation, "action": action});
                self.events.emit("BLOCK_JOB_ERROR", data);
            }
            JobEvent::Ready => self.events.emit("BLOCK_JOB_READY", progress),
            JobEvent::Pending => {
                self.events.emit("BLOCK_JOB_PENDING", json!({"type": kind, "id": id}));
            }
            JobEvent::Completed => {
                let mut data = progress;
                let failed = error.is_some();
                if let (Some(data), Some(error)) = (data.as_object_mut(), error) {
                    data.insert("error".into(), error.into());
                }
                self.events.emit("BLOCK_JOB_COMPLETED", data);
                self.ended(&id, !failed);
            }
            JobEvent::Cancelled => {
                self.events.emit("BLOCK_JOB_CANCELLED", progress);
                if let Some(started) = self.find_job(&id) {
                    started.cancelled.set(true);
                }
                self.ended(&id, false);
            }
        }
    }

    /// Handles the end of a job: it need not be restarted, unless it ended because the server did.
    fn ended(&self, id: &str, well: bool) {
        let Some(started) = self.find_job(id) else { return };
        if well || !self.ending.get() {
            started.request.remove();
        }
        if let Some(Disks { drive, target: Some(target) }) = &*started.disks.borrow()
            && well
            && drive.root() == target.root()
        {
            // The disk switched to the target's image, which is no longer a separate node.
            target.take();
            self.names.borrow_mut().hand_over(target, drive);
            self.drives.borrow_mut().retain(|drive| !Rc::ptr_eq(drive, target));
        }
    }

    /// Lets go of a job's disks: they can be removed, and their images used by others, before it is dismissed.
    fn let_go(&self, id: &str) {
        let Some(started) = self.find_job(id) else { return };
        started.name.replace(self.name_of_disk(&started));
        started.disks.take();
    }

    /// The name of a job's disk.
    pub(super) fn name_of_disk(&self, started: &Started<H>) -> String {
        match &*started.disks.borrow() {
            Some(disks) => self.name_of(&disks.drive),
            None => started.name.borrow().clone(),
        }
    }

    /// Cancels every job and waits for it to end. One that takes too long is given up, with what it was waiting for.
    pub(super) async fn end_jobs(&self) {
        let jobs = self.jobs.borrow().clone();
        for started in &jobs {
            // A job that has already ended cannot be cancelled.
            let _ = started.job.cancel(true);
        }
        if timeout(PATIENCE, self.jobs_ended(&jobs)).await.is_err() {
            tracing::warn!("a cancelled job does not end; it is given up");
            self.save().await;
            for started in &jobs {
                started.given_up.notify(1);
            }
        }
    }

    async fn jobs_ended(&self, jobs: &[Rc<Started<H>>]) {
        for started in jobs {
            loop {
                let changed = started.job.changed();
                match started.job.status() {
                    JobStatus::Null => break,
                    JobStatus::Concluded if !started.job.options().auto_dismiss => {
                        let _ = started.job.dismiss();
                        break;
                    }
                    _ => {}
                }
                changed.await;
                self.pass_on();
            }
        }
    }
}
