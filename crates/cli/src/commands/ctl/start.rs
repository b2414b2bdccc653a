//! Commands that start a job.

use super::disk::absolute;
use super::follow::{Readiness, follow};
use super::{Session, arguments, speed};
use crate::failure::{Failure, Outcome};
use serde_json::{Map, Value, json};
use std::path::PathBuf;

/// What all jobs are told.
#[derive(clap::Args)]
struct Common {
    /// A name for the job [default: the disk's]
    #[arg(long, value_name = "NAME")]
    id: Option<String>,
    /// Copy at most so much a second, such as 100M
    #[arg(long, value_name = "SIZE", value_parser = speed)]
    speed: Option<u64>,
    /// Be done in so many seconds, at the guest's cost if need be
    #[arg(long, value_name = "SECONDS")]
    deadline: Option<f64>,
    /// Take at most so much of the guest's bandwidth, in percent
    #[arg(long, value_name = "PERCENT")]
    max_impact: Option<f64>,
    /// How to make way for the guest: 'adaptive' copies in its pauses and little beside it, 'none' does
    /// not, as QEMU's jobs, 'threshold' pauses while the guest is busier than a threshold
    #[arg(long, value_name = "MODE", value_parser = ["adaptive", "threshold", "none"])]
    pacing: Option<String>,
    /// The threshold of 'threshold': a share of the guest's mean bandwidth up to 1, or bytes a second
    #[arg(long, value_name = "NUMBER")]
    adaptive_threshold: Option<f64>,
    /// How long 'threshold' pauses, in seconds
    #[arg(long, value_name = "SECONDS")]
    pause_time: Option<f64>,
    /// When the storage fails: 'report' ends the job, 'stop' has it wait, 'enospc' has it wait where
    /// space is missing, 'ignore' goes on with the rest
    #[arg(long, value_name = "WAY", value_parser = ["report", "stop", "enospc", "ignore"])]
    on_error: Option<String>,
    /// Return once the job has started
    #[arg(long)]
    detach: bool,
    /// Leave the change of the chain to 'finalize'
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
        arguments.insert(name.to_owned(), absolute(file)?);
    }
    if let Some(node) = node {
        arguments.insert(format!("{name}-node"), node.clone().into());
    }
    Ok(())
}

/// Bring the data of backing files into the active image, and let go of them (block-stream)
///
/// Shows how far it has come until it ends. Ctrl-C leaves the job running.
#[derive(clap::Args)]
pub(super) struct Stream {
    /// The backing file that stays below [default: none does]
    #[arg(long, value_name = "FILE", conflicts_with = "base_node")]
    base: Option<PathBuf>,
    /// The same, by its node
    #[arg(long, value_name = "NAME")]
    base_node: Option<String>,
    /// What the overlay's header says instead of the base's path
    #[arg(long, value_name = "NAME")]
    backing_file: Option<String>,
    #[command(flatten)]
    common: Common,
    /// The disk's name, or a node's [default: the only disk]
    disk: Option<String>,
}

impl Stream {
    pub(super) fn run(&self, session: &mut Session<'_>) -> Outcome {
        let mut own = Map::new();
        file_or_node(&mut own, "base", self.base.as_ref(), self.base_node.as_ref())?;
        own.extend(self.backing_file.clone().map(|name| ("backing-file".into(), name.into())));
        self.common.start(
            session,
            self.disk.as_deref(),
            "block-stream",
            own.into(),
            Readiness::Never,
        )
    }
}

/// Bring the data of overlays into a backing file, and let go of them (block-commit)
///
/// Shows how far it has come until it ends. Ctrl-C leaves the job running. With the active image as top,
/// the base takes its place in the end.
#[derive(clap::Args)]
pub(super) struct Commit {
    /// The backing file that takes the data [default: the base of the chain]
    #[arg(long, value_name = "FILE", conflicts_with = "base_node")]
    base: Option<PathBuf>,
    /// The same, by its node
    #[arg(long, value_name = "NAME")]
    base_node: Option<String>,
    /// The uppermost image whose data goes down [default: the active image]
    #[arg(long, value_name = "FILE", conflicts_with = "top_node")]
    top: Option<PathBuf>,
    /// The same, by its node
    #[arg(long, value_name = "NAME")]
    top_node: Option<String>,
    /// Leave the active image in use once all is copied, until 'complete'
    #[arg(long)]
    no_complete: bool,
    #[command(flatten)]
    common: Common,
    /// The disk's name, or a node's [default: the only disk]
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

/// Bring a disk's data into another image, and go on in that one (blockdev-mirror)
///
/// Shows how far it has come until it ends. Ctrl-C leaves the job running.
#[derive(clap::Args)]
#[command(allow_missing_positional = true)]
pub(super) struct Mirror {
    /// What is copied: everything, what the active image holds (the target has the same backing file),
    /// or only what is written from now on
    #[arg(long, value_name = "WHAT", default_value = "full", value_parser = ["full", "top", "none"])]
    sync: String,
    /// The target's format
    #[arg(short, long, value_name = "FMT", default_value = "qcow2", value_parser = ["qcow2", "raw"])]
    format: String,
    /// Leave the disk's own image in use once all is copied, until 'complete'; 'cancel' then leaves a
    /// copy
    #[arg(long)]
    no_complete: bool,
    #[command(flatten)]
    common: Common,
    /// The disk's name, or a node's [default: the only disk]
    disk: Option<String>,
    /// The target: an image of the disk's size that nobody uses
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
            // Where the job has not begun, or is gone: its target is of no use.
            let _ = session.ask("blockdev-del", json!({"node-name": node}));
        }
        outcome
    }
}
