//! Commands that query jobs.

use super::Monitor;
use super::jobs::Started;
use isobath_jobs::{IoStatus, JobStatus};
use isobath_storage::Host;
use serde_json::{Value, json};

/// The number of records kept of jobs that are gone.
const RECORDS: usize = 16;

impl<H: Host + Clone> Monitor<H> {
    pub(super) fn query_jobs(&self) -> Value {
        let jobs = self.jobs.borrow();
        let infos = jobs.iter().map(|started| {
            let job = &started.job;
            let progress = job.progress();
            with_error(
                json!({
                    "id": job.id(),
                    "type": job.kind().name(),
                    "status": job.status().name(),
                    "current-progress": progress.current,
                    "total-progress": progress.total,
                }),
                started.error(),
            )
        });
        infos.collect()
    }

    pub(super) fn query_block_jobs(&self) -> Value {
        let jobs = self.jobs.borrow();
        let infos = jobs.iter().map(|started| {
            let job = &started.job;
            let progress = job.progress();
            let status = job.status();
            let io_status = job.io_status();
            with_error(
                json!({
                    "type": job.kind().name(),
                    "device": job.id(),
                    "len": progress.total,
                    "offset": progress.current,
                    "busy": status == JobStatus::Running && !job.yields(),
                    "paused": started.paused.get() || io_status != IoStatus::Ok,
                    "speed": job.speed(),
                    "io-status": match io_status {
                        IoStatus::Ok => "ok",
                        IoStatus::Failed => "failed",
                        IoStatus::NoSpace => "nospace",
                    },
                    "ready": matches!(status, JobStatus::Ready | JobStatus::Standby),
                    "status": status.name(),
                    "auto-finalize": job.options().auto_finalize,
                    "auto-dismiss": job.options().auto_dismiss,
                }),
                started.error(),
            )
        });
        infos.collect()
    }

    /// Information for which QEMU's queries have no members, and jobs that an earlier server was running.
    pub(super) fn query_more_of_jobs(&self) -> Value {
        let jobs = self.jobs.borrow();
        let running = jobs.iter().map(|started| {
            let progress = started.job.progress();
            let mut info = started.request.to_json(false);
            if let Some(info) = info.as_object_mut() {
                info.insert("yields".into(), started.job.yields().into());
                info.insert("copied".into(), progress.copied.into());
                info.insert("cloned".into(), progress.cloned.into());
                if let Some(forecast) = started.job.forecast() {
                    info.insert("misses-deadline".into(), forecast.misses_deadline.into());
                }
            }
            info
        });
        let mut all: Vec<Value> = running.collect();
        all.extend(self.interrupted.borrow().iter().map(|request| request.to_json(true)));
        all.into()
    }

    /// The activity of jobs and their guests over time: first the most recent that are gone, then the current ones.
    pub(super) fn query_job_records(&self) -> Value {
        let jobs = self.jobs.borrow();
        let gone = self.records.borrow().clone();
        gone.into_iter().chain(jobs.iter().map(|started| record(started))).collect()
    }

    /// Keeps the record of a job that is removed.
    pub(super) fn keep_record(&self, id: &str) {
        let Some(started) = self.find_job(id) else { return };
        let mut records = self.records.borrow_mut();
        records.push_back(record(&started));
        if records.len() > RECORDS {
            records.pop_front();
        }
    }
}

fn record<H: Host>(started: &Started<H>) -> Value {
    let job = &started.job;
    let record = serde_json::to_value(job.record()).unwrap_or_default();
    json!({"id": job.id(), "type": job.kind().name(), "record": record})
}

fn with_error(mut info: Value, error: Option<String>) -> Value {
    if let (Some(info), Some(error)) = (info.as_object_mut(), error) {
        info.insert("error".into(), error.into());
    }
    info
}
