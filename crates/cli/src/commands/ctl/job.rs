//! Commands on a job.

use super::follow::{Readiness, follow};
use super::list::names;
use super::{Session, entries, speed, text};
use crate::failure::{Failure, Outcome};
use isobath_qmp::client::ClientError;
use serde_json::json;

/// A job.
#[derive(clap::Args)]
pub(super) struct VerbOfJob {
    /// The job's name
    job: Option<String>,
    /// With 'cancel': end a job that is ready without keeping its target consistent
    #[arg(long, hide = true)]
    force: bool,
}

/// What to do with a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Pause,
    Resume,
    Cancel,
    Complete,
    Finalize,
    Dismiss,
}

impl VerbOfJob {
    pub(super) fn run(&self, verb: Verb, session: &mut Session<'_>) -> Outcome {
        let Some(job) = &self.job else { return Err(nameless(session)?) };
        let id = json!({"id": job});
        match verb {
            Verb::Pause => session.ask("job-pause", id)?,
            Verb::Resume if is_interrupted(session, job)? => {
                session.ask("x-isobath-restart-job", id)?
            }
            Verb::Resume => session.ask("job-resume", id)?,
            Verb::Cancel => {
                let arguments = json!({"device": job, "force": self.force});
                match session.client.execute("block-job-cancel", arguments) {
                    // Cancel even a paused job, as requested.
                    Err(ClientError::Refused { description, .. })
                        if description.contains("is currently paused") =>
                    {
                        session.ask("job-cancel", id)?
                    }
                    result => result.map_err(Failure::new)?,
                }
            }
            Verb::Complete => session.ask("job-complete", id)?,
            Verb::Finalize => session.ask("job-finalize", id)?,
            Verb::Dismiss if is_interrupted(session, job)? => {
                session.ask("x-isobath-forget-job", id)?
            }
            Verb::Dismiss => session.ask("job-dismiss", id)?,
        };
        Ok(0)
    }
}

/// The error of a command that names no job: it lists those that there are.
fn nameless(session: &mut Session<'_>) -> Result<Failure, Failure> {
    let names = names(session)?;
    let jobs = match &names[..] {
        [] => "there are none".to_owned(),
        names => format!("name one of: {}", names.join(", ")),
    };
    Ok(Failure::usage(format_args!("the job is missing; {jobs}")))
}

/// Whether an earlier server started the job.
fn is_interrupted(session: &mut Session<'_>, job: &str) -> Result<bool, Failure> {
    let jobs = session.ask_isobath("x-isobath-query-jobs", json!({}))?.unwrap_or_default();
    let mut jobs = entries(&jobs).filter(|known| text(known, "id") == job);
    Ok(jobs.next().is_some_and(|known| known.get("interrupted") == Some(&json!(true))))
}

/// Change a job's speed limit
#[derive(clap::Args)]
pub(super) struct Speed {
    /// The job's name
    job: String,
    /// Bytes per second, such as 100M; 0 means no limit
    #[arg(value_parser = speed)]
    speed: u64,
}

impl Speed {
    pub(super) fn run(&self, session: &mut Session<'_>) -> Outcome {
        let arguments = json!({"device": self.job, "speed": self.speed});
        session.ask("block-job-set-speed", arguments)?;
        Ok(0)
    }
}

/// Follow a job's progress until it ends
#[derive(clap::Args)]
pub(super) struct Follow {
    /// The job's name
    job: String,
}

impl Follow {
    pub(super) fn run(&self, session: &mut Session<'_>) -> Outcome {
        let jobs = session.ask("query-block-jobs", json!({}))?;
        if !entries(&jobs).any(|job| text(job, "device") == self.job) {
            return Err(Failure::new(format_args!("no such job: '{}'", self.job)));
        }
        follow(session, &self.job, Readiness::Leave)
    }
}
