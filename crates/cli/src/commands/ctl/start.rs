//! Commands that start a job.

use super::disk::{absolute, layer};
use super::follow::{Readiness, follow};
use super::{Session, arguments, speed};
use crate::failure::{Failure, Outcome};
use serde_json::{Map, Value, json};
use std::path::PathBuf;

/// Options of all jobs.
#[derive(clap::Args)]
struct Common {
    /// A name for the job [default: the disk's name]
    #[arg(long, value_name = "NAME")]
    id: Option<String>,
    /// Speed limit in bytes per second, such as 100M
    #[arg(long, value_name = "SIZE", value_parser = speed)]
    speed: Option<u64>,
    /// Finish within this many seconds, slowing the guest down if necessary
    #[arg(long, value_name = "SECONDS")]
    deadline: Option<f64>,
    /// Limit the job's impact on the guest's bandwidth to this many percent
    #[arg(long, value_name = "PERCENT")]
    max_impact: Option<f64>,
    /// How to throttle the job for guest I/O: 'adaptive' copies mostly while the guest is idle, 'none' does not
    /// throttle, like QEMU's jobs, 'threshold' pauses while the guest is busier than a threshold
    #[arg(long, value_name = "MODE", value_parser = ["adaptive", "threshold", "none"])]
    pacing: Option<String>,
    /// With 'threshold': the threshold, as a share of the guest's mean bandwidth (up to 1), or in bytes per second
    #[arg(long, value_name = "NUMBER")]
    adaptive_threshold: Option<f64>,
    /// With 'threshold': how long to pause, in seconds
    #[arg(long, value_name = "SECONDS")]
    pause_time: Option<f64>,
    /// On an I/O error: 'report' fails the job, 'stop' pauses it, 'enospc' pauses it when there is no space left and
    /// fails it otherwise, 'ignore' continues
    #[arg(long, value_name = "ACTION", value_parser = ["report", "stop", "enospc", "ignore"])]
    on_error: Option<String>,
    /// Return as soon as the job has started
    #[arg(long)]
    detach: bool,
    /// Do not change the chain until 'finalize'
    #[arg(long)]
    no_finalize: bool,
}

impl Common {
    /// Starts a job and follows it.
    fn start(
        &self,
        session: &mut Session<'_>,
        disk: Option<&str>,
        command: &str,
        own: Value,
        readiness: Readiness,
    ) -> Outcome {
        let device = session.device(disk)?;
        let id = self.id.clone().unwrap_or_else(|| device.clone());
        let number = |value: Option<f64>| value.map(Value::from);
        let mut all = arguments([
            ("job-id", Some(id.clone().into())),
            ("device", Some(device.into())),
            ("speed", self.speed.map(Value::from)),
            ("deadline", number(self.deadline)),
            ("max-impact", number(self.max_impact)),
            ("pacing", self.pacing.clone().map(Value::from)),
            ("adaptive-threshold", number(self.adaptive_threshold)),
            ("pause-time", number(self.pause_time)),
            ("auto-finalize", self.no_finalize.then(|| false.into())),
        ]);
        let errors: &[&str] = if command == "blockdev-mirror" {
            &["on-source-error", "on-target-error"]
        } else {
            &["on-error"]
        };
        if let (Value::Object(all), Value::Object(own)) = (&mut all, own) {
            all.extend(own);
            if let Some(way) = &self.on_error {
                all.extend(errors.iter().map(|name| ((*name).to_owned(), way.clone().into())));
            }
        }
        session.ask(command, all)?;
        if self.detach {
            return Ok(0);
        }
        follow(session, &id, readiness)
    }
}

fn file_or_node(
    arguments: &mut Map<String, Value>,
    name: &str,
    file: Option<&PathBuf>,
    node: Option<&String>,
) -> Result<(), Failure> {
    if let Some(file) = file {
        arguments.insert(name.to_owned(), layer(file)?);
    }
    if let Some(node) = node {
        arguments.insert(format!("{name}-node"), node.clone().into());
    }
    Ok(())
}

/// Copy data from backing files into the active image and remove them from the chain (block-stream)
///
/// Shows progress until the job ends. Ctrl-C leaves the job running.
#[derive(clap::Args)]
pub(super) struct Stream {
    /// The backing file to keep as the new backing file [default: none]
    #[arg(long, value_name = "FILE", conflicts_with = "base_node")]
    base: Option<PathBuf>,
    /// The same, by node name
    #[arg(long, value_name = "NAME")]
    base_node: Option<String>,
    /// Backing file name to store in the overlay's header instead of the base's path
    #[arg(long, value_name = "NAME")]
    backing_file: Option<String>,
    /// Merge even if the active image has internal snapshots, whose contents then change
    #[arg(long)]
    change_snapshots: bool,
    #[command(flatten)]
    common: Common,
    /// The disk's name or a node's name [default: the only disk]
    disk: Option<String>,
}

impl Stream {
    pub(super) fn run(&self, session: &mut Session<'_>) -> Outcome {
        let mut own = Map::new();
        file_or_node(&mut own, "base", self.base.as_ref(), self.base_node.as_ref())?;
        own.extend(self.backing_file.clone().map(|name| ("backing-file".into(), name.into())));
        own.extend(self.change_snapshots.then(|| ("change-snapshots".into(), true.into())));
        self.common.start(
            session,
            self.disk.as_deref(),
            "block-stream",
            own.into(),
            Readiness::Never,
        )
    }
}

/// Copy data from overlays into a backing file and remove them from the chain (block-commit)
///
/// Shows progress until the job ends. Ctrl-C leaves the job running. If the top is the active image, the base becomes
/// the active image at the end.
#[derive(clap::Args)]
pub(super) struct Commit {
    /// The backing file to copy into [default: the chain's base]
    #[arg(long, value_name = "FILE", conflicts_with = "base_node")]
    base: Option<PathBuf>,
    /// The same, by node name
    #[arg(long, value_name = "NAME")]
    base_node: Option<String>,
    /// The topmost image to copy from [default: the active image]
    #[arg(long, value_name = "FILE", conflicts_with = "top_node")]
    top: Option<PathBuf>,
    /// The same, by node name
    #[arg(long, value_name = "NAME")]
    top_node: Option<String>,
    /// Once everything is copied, keep using the active image until 'complete'
    #[arg(long)]
    no_complete: bool,
    #[command(flatten)]
    common: Common,
    /// The disk's name or a node's name [default: the only disk]
    disk: Option<String>,
}

impl Commit {
    pub(super) fn run(&self, session: &mut Session<'_>) -> Outcome {
        let mut own = Map::new();
        file_or_node(&mut own, "base", self.base.as_ref(), self.base_node.as_ref())?;
        file_or_node(&mut own, "top", self.top.as_ref(), self.top_node.as_ref())?;
        let readiness = if self.no_complete { Readiness::Leave } else { Readiness::Complete };
        self.common.start(session, self.disk.as_deref(), "block-commit", own.into(), readiness)
    }
}

/// Copy a disk to another image and switch to it (blockdev-mirror)
///
/// Shows progress until the job ends. Ctrl-C leaves the job running.
#[derive(clap::Args)]
#[command(allow_missing_positional = true)]
pub(super) struct Mirror {
    /// What to copy: everything ('full'), the active image ('top'; the target must have the same backing file), or only
    /// new writes ('none')
    #[arg(long, value_name = "WHAT", default_value = "full", value_parser = ["full", "top", "none"])]
    sync: String,
    /// The target's format
    #[arg(short, long, value_name = "FMT", default_value = "qcow2", value_parser = ["qcow2", "raw"])]
    format: String,
    /// Once everything is copied, keep using the disk's own image until 'complete'; 'cancel' then leaves a consistent
    /// copy
    #[arg(long)]
    no_complete: bool,
    #[command(flatten)]
    common: Common,
    /// The disk's name or a node's name [default: the only disk]
    disk: Option<String>,
    /// The target: an existing image of the disk's size that is not in use
    target: PathBuf,
}

impl Mirror {
    pub(super) fn run(&self, session: &mut Session<'_>) -> Outcome {
        let node = format!("mirror-{}", std::process::id());
        let file = json!({"driver": "file", "filename": absolute(&self.target)?});
        let target = json!({"driver": self.format, "node-name": node, "file": file});
        session.ask("blockdev-add", target)?;
        let own = json!({"target": node, "sync": self.sync});
        let readiness = if self.no_complete { Readiness::Leave } else { Readiness::Complete };
        let outcome =
            self.common.start(session, self.disk.as_deref(), "blockdev-mirror", own, readiness);
        if outcome.is_err() {
            // If the job did not start, or is gone, its target is useless.
            let _ = session.ask("blockdev-del", json!({"node-name": node}));
        }
        outcome
    }
}
