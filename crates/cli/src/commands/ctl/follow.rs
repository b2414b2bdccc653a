//! Shows a job's progress until it ends.

use super::pace::{Pace, short};
use super::{Session, entries, interrupted, number, text};
use crate::failure::{Failure, Outcome};
use crate::size;
use indicatif::{ProgressBar, ProgressStyle};
use isobath_storage::word;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often a job is queried.
const LOOK: Duration = Duration::from_millis(250);

/// How long to wait for the last event of a job that is gone.
const PATIENCE: Duration = Duration::from_secs(2);

/// What to do with a job that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readiness {
    /// It never becomes ready.
    Never,
    /// Complete it.
    Complete,
    /// Leave it to the user.
    Leave,
}

/// Follows a job to its end. Ctrl-C leaves it running.
pub(super) fn follow(session: &mut Session<'_>, id: &str, readiness: Readiness) -> Outcome {
    let stop = interrupted()?;
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("{prefix} {wide_bar} {percent:>3}%  {msg}") {
        bar.set_style(style);
    }
    bar.set_prefix(id.to_owned());
    let begin = Instant::now();
    let mut shown = Shown::default();
    let mut look = begin;
    // When the job was first missing: its last event may still arrive.
    let mut gone = None;
    let mut told_to_complete = false;
    let ending = loop {
        if stop.load(Ordering::Relaxed) {
            bar.finish_and_clear();
            let (address, name) = (word(&session.address), word(id));
            writeln!(
                session.out,
                "The job '{id}' is still running. To follow it again: 'isobath ctl {address} \
                 follow {name}'. To cancel it: 'isobath ctl {address} cancel {name}'."
            )?;
            return Ok(0);
        }
        if Instant::now() >= look {
            look = Instant::now() + LOOK;
            match shown.look(session, id, &bar, begin.elapsed())? {
                Some(status) if status == "ready" => match readiness {
                    Readiness::Complete if told_to_complete => {}
                    Readiness::Complete => {
                        told_to_complete = true;
                        // It may have just ended.
                        let _ = session.client.execute("job-complete", json!({"id": id}));
                    }
                    Readiness::Leave => break Ending::Ready,
                    Readiness::Never => {}
                },
                Some(status) if status == "pending" && !shown.finalizes => break Ending::Pending,
                Some(_) => {}
                None => match gone {
                    Some(since) if Instant::now() > since + PATIENCE => break Ending::Gone,
                    Some(_) => {}
                    None => gone = Some(Instant::now()),
                },
            }
        }
        let Some(event) = session.client.event(LOOK).map_err(Failure::new)? else { continue };
        let of = |name: &str| text(&event.data, name) == id;
        match event.name.as_str() {
            "BLOCK_JOB_COMPLETED" if of("device") => break Ending::Completed(event.data),
            "BLOCK_JOB_CANCELLED" if of("device") => break Ending::Cancelled,
            "BLOCK_JOB_READY" if of("device") => look = Instant::now(),
            "JOB_STATUS_CHANGE" if of("id") => look = Instant::now(),
            "BLOCK_JOB_ERROR" if of("device") => {
                let (operation, action) =
                    (text(&event.data, "operation"), text(&event.data, "action"));
                bar.println(format!("{id}: a {operation} failed; {action}"));
            }
            _ => {}
        }
    };
    bar.finish_and_clear();
    let (address, name) = (word(&session.address), word(id));
    let took = begin.elapsed().as_secs_f64();
    match ending {
        Ending::Completed(data) => {
            let error = text(&data, "error");
            if !error.is_empty() {
                return Err(Failure::new(format_args!("the job '{id}' failed: {error}")));
            }
            let copied = shown.copied.map(|bytes| format!(", {} copied", size::human(bytes)));
            writeln!(
                session.out,
                "{id}: done, {} in {took:.1} s{}",
                size::human(number(&data, "offset")),
                copied.unwrap_or_default()
            )?;
            Ok(0)
        }
        Ending::Cancelled => Err(Failure::new(format_args!("the job '{id}' was cancelled"))),
        Ending::Gone => {
            writeln!(session.out, "{id}: ended")?;
            Ok(0)
        }
        Ending::Ready => {
            writeln!(
                session.out,
                "{id}: ready; new writes go to both images. To switch over: 'isobath ctl {address} \
                 complete {name}'. To end the job: 'isobath ctl {address} cancel {name}'."
            )?;
            Ok(0)
        }
        Ending::Pending => {
            writeln!(
                session.out,
                "{id}: pending. To change the chain: 'isobath ctl {address} finalize {name}'. To \
                 leave it unchanged: 'isobath ctl {address} cancel {name}'."
            )?;
            Ok(0)
        }
    }
}

enum Ending {
    Completed(Value),
    Cancelled,
    Ready,
    Pending,
    /// It ended before it could be queried.
    Gone,
}

/// What is known about the job.
#[derive(Default)]
struct Shown {
    copied: Option<u64>,
    finalizes: bool,
    pace: Pace,
}

impl Shown {
    /// Queries the job and returns its state; `None` if there is no such job.
    fn look(
        &mut self,
        session: &mut Session<'_>,
        id: &str,
        bar: &ProgressBar,
        now: Duration,
    ) -> Result<Option<String>, Failure> {
        let jobs = session.ask("query-block-jobs", json!({}))?;
        let Some(job) = entries(&jobs).find(|job| text(job, "device") == id) else {
            return Ok(None);
        };
        bar.set_length(number(job, "len"));
        bar.set_position(number(job, "offset"));
        self.finalizes = job.get("auto-finalize") == Some(&Value::Bool(true));
        let status = text(job, "status").to_owned();
        let more = session.ask_isobath("x-isobath-query-jobs", json!({}))?.unwrap_or_default();
        let more = entries(&more).find(|more| text(more, "id") == id);
        if let Some(copied) = more.and_then(|more| more.get("copied")).and_then(Value::as_u64) {
            self.copied = Some(copied);
        }
        let (length, offset) = (number(job, "len"), number(job, "offset"));
        // QEMU does not say what was copied.
        self.pace.look(now, offset, self.copied.unwrap_or(offset));
        let rate = self.pace.rate().map(|rate| format!("{}/s", size::human(rate)));
        bar.set_message(format!(
            "{:>11}  {:>4} left  {}",
            rate.unwrap_or_else(|| "-".into()),
            short(self.pace.left(length)),
            state(job, more)
        ));
        Ok(Some(status))
    }
}

/// A job's state in words.
pub(super) fn state(job: &Value, more: Option<&Value>) -> String {
    let is = |name: &str| more.and_then(|more| more.get(name)) == Some(&Value::Bool(true));
    let mut state = text(job, "status").to_owned();
    match text(job, "io-status") {
        "failed" => state += ", paused after an error",
        "nospace" => state += ", paused: no space left",
        _ if state == "running" && is("yields") => state += ", throttled for guest I/O",
        _ => {}
    }
    if is("misses-deadline") {
        state += ", will miss its deadline";
    }
    state
}
