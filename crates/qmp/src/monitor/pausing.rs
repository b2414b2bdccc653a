//! Disks that pause when the storage fails: policies, the state of the whole, `stop` and `cont`.

use super::arguments::{Arguments, optional_text};
use super::exports::address_of;
use super::{Drive, Monitor, Result};
use crate::error::{ErrorClass, QmpError};
use isobath_disk::pausing::{OnFailure, Pause, PauseState, Policies};
use isobath_storage::Host;
use serde_json::{Map, Value, json};
use std::rc::Rc;

/// QEMU's `BlockDeviceIoStatus` of a disk.
pub(super) fn io_status(state: &PauseState) -> &'static str {
    match &state.failures[..] {
        [] => "ok",
        failures if failures.iter().all(|failure| failure.no_space) => "nospace",
        _ => "failed",
    }
}

const fn operation(pause: &Pause) -> &'static str {
    if pause.read { "read" } else { "write" }
}

/// Adds what only Isobath tells of a disk's pauses.
pub(super) fn describe(state: &PauseState, info: &mut Map<String, Value>) {
    let failures = state.failures.iter().map(|pause| {
        json!({
            "operation": operation(pause),
            "nospace": pause.no_space,
            "reason": pause.reason,
        })
    });
    info.insert("werror".into(), state.policies.writes.name().into());
    info.insert("rerror".into(), state.policies.reads.name().into());
    info.insert("stopped".into(), state.stopped.into());
    info.insert("held".into(), state.waiting.into());
    info.insert("failures".into(), failures.collect());
    if let Some(paused) = state.paused_for {
        info.insert("paused-seconds".into(), paused.as_secs().into());
    }
}

impl<H: Host + Clone> Monitor<H> {
    /// Sets what becomes of the requests of a disk's clients when the storage fails.
    pub(super) fn set_on_failure(&self, arguments: &Arguments) -> Result<()> {
        let name = optional_text(arguments, "id").unwrap_or_default();
        let drive = self.find_disk(name).ok_or_else(|| {
            QmpError::of(ErrorClass::DeviceNotFound, format_args!("Device '{name}' not found"))
        })?;
        let pausing = drive.disk().pausing();
        let named = |argument: &str| optional_text(arguments, argument);
        let chosen = |argument: &str, now: OnFailure| {
            named(argument).and_then(OnFailure::from_name).unwrap_or(now)
        };
        let now = pausing.state().policies;
        let reads = chosen("rerror", now.reads);
        pausing.set_policies(Policies { reads, writes: chosen("werror", now.writes) });
        self.tell_if_it_runs();
        Ok(())
    }

    /// Keeps the requests of all disks' clients waiting, waits for those in flight, and makes what they wrote durable.
    pub(super) async fn stop(&self) -> Result<()> {
        self.stopped.set(true);
        let drives = self.drives();
        for drive in &drives {
            drive.disk().pausing().stop();
        }
        self.tell_that_it_stopped();
        let mut failures = Vec::new();
        for drive in &drives {
            if let Err(error) = drive.disk().settle().await {
                failures.push(format!("{}: {error}", self.name_of(drive)));
            }
        }
        if failures.is_empty() {
            return Ok(());
        }
        let failures = failures.join("; ");
        Err(QmpError::new(format_args!("All is stopped, but not all is durable: {failures}")))
    }

    /// Ends the wait of a `stop` for requests.
    pub(super) fn end_stop(&self) {
        for drive in self.drives() {
            drive.disk().pausing().end();
        }
    }

    /// Lets the requests of all disks be carried out, those that failed once more.
    pub(super) fn resume(&self) {
        self.pass_on();
        self.stopped.set(false);
        for drive in self.drives() {
            drive.disk().pausing().resume();
        }
        self.tell_if_it_runs();
    }

    /// Receives a disk's failures from now on. One that is added while all are stopped is stopped, too.
    pub(super) fn attend(&self, drive: &Drive<H>) {
        self.event_queue.attend(drive);
        if self.stopped.get() {
            drive.disk().pausing().stop();
        }
    }

    pub(super) fn query_status(&self) -> Value {
        let status = self.status();
        json!({"running": status == "running", "singlestep": false, "status": status})
    }

    /// QEMU's `RunState`.
    fn status(&self) -> &'static str {
        let drives = self.drives();
        let states = || drives.iter().map(|drive| drive.disk().pausing().state());
        if states().any(|state| !state.failures.is_empty()) {
            return "io-error";
        }
        if self.stopped.get() { "paused" } else { "running" }
    }

    /// Announces that a failure has paused a disk.
    pub(super) fn tell_pause(&self, address: usize, pause: &Pause) {
        let drives = self.drives();
        let Some(drive) = drives.iter().find(|drive| address_of(drive) == address) else { return };
        self.warn_of_pause(drive, pause);
        let data = json!({
            "device": drive.device(),
            "node-name": self.root_name(drive),
            "operation": operation(pause),
            "action": "stop",
            "nospace": pause.no_space,
            "reason": pause.reason,
        });
        self.events.emit("BLOCK_IO_ERROR", data);
        // It may have continued since.
        if self.status() != "running" {
            self.tell_that_it_stopped();
        }
    }

    fn warn_of_pause(&self, drive: &Rc<Drive<H>>, pause: &Pause) {
        let disk = self.name_of(drive);
        let (what, reason) = (operation(pause), &pause.reason);
        tracing::error!(
            disk,
            "a {what} failed, and the disk pauses: {reason}; remove the cause, and then let it go on \
             with 'isobath ctl SOCKET cont'"
        );
    }

    fn tell_that_it_stopped(&self) {
        if self.running.replace(false) {
            self.events.emit("STOP", json!({}));
        }
    }

    pub(super) fn tell_if_it_runs(&self) {
        if !self.running.get() && self.status() == "running" {
            self.running.set(true);
            self.events.emit("RESUME", json!({}));
        }
    }
}
