//! `isobath ctl SOCKET jobs`

use super::follow::state;
use super::pace::{Pace, bar, short};
use super::plot::{plot_html, plot_svg};
use super::{Session, entries, number, refuse_watch, table, text, watch};
use crate::failure::{Failure, Outcome};
use crate::options::OutputFormat;
use crate::size;
use isobath_jobs::record::JobRecord;
use isobath_storage::word;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// List jobs, including those interrupted when an earlier server ended
#[derive(clap::Args)]
pub(super) struct Jobs {
    /// Refresh every second until Ctrl-C
    #[arg(long)]
    watch: bool,
    /// Plot a job's and its guest's throughput over time to this file, SVG or HTML by its extension; recently ended
    /// jobs can be plotted too
    #[arg(long, value_name = "FILE.svg|FILE.html")]
    plot: Option<PathBuf>,
    /// The job to plot [default: the only one]
    #[arg(long, value_name = "NAME", requires = "plot")]
    job: Option<String>,
    /// Output format
    #[arg(long, value_name = "FMT", default_value = "human")]
    output: OutputFormat,
}

impl Jobs {
    pub(super) fn run(&self, session: &mut Session<'_>) -> Outcome {
        if let Some(file) = &self.plot {
            return plot(session, self.job.as_deref(), file);
        }
        if self.output == OutputFormat::Json {
            refuse_watch(self.watch)?;
            let jobs = as_json(session)?;
            session.print(&jobs)?;
            return Ok(0);
        }
        if self.watch {
            let begin = Instant::now();
            let mut paces = Paces::new();
            return watch(session, Duration::from_secs(1), |session| {
                list(session, Some((begin.elapsed(), &mut paces)))
            });
        }
        let shown = list(session, None)?;
        session.out.write_all(shown.as_bytes())?;
        Ok(0)
    }
}

/// The jobs, and those that an earlier server started, as JSON.
fn as_json(session: &mut Session<'_>) -> Result<Value, Failure> {
    let jobs = session.ask("query-block-jobs", json!({}))?;
    let more = session.ask_isobath("x-isobath-query-jobs", json!({}))?.unwrap_or_default();
    let running = entries(&jobs).map(|job| {
        let id = text(job, "device");
        let more = entries(&more).find(|more| text(more, "id") == id);
        json!({
            "job": id,
            "kind": text(job, "type"),
            "status": text(job, "status"),
            "done": number(job, "offset"),
            "length": number(job, "len"),
            "copied": more.map(|more| number(more, "copied")),
            "speed": number(job, "speed"),
            "error": Some(text(job, "error")).filter(|error| !error.is_empty()),
            "interrupted": false,
        })
    });
    let interrupted = interrupted_jobs(&more).map(|job| {
        json!({
            "job": text(job, "id"),
            "kind": text(job, "command").trim_start_matches("block-"),
            "interrupted": true,
        })
    });
    Ok(Value::Array(running.chain(interrupted).collect()))
}

/// Those that an earlier server started.
fn interrupted_jobs(more: &Value) -> impl Iterator<Item = &Value> {
    entries(more).filter(|job| job.get("interrupted") == Some(&Value::Bool(true)))
}

/// The names of all jobs.
pub(super) fn names(session: &mut Session<'_>) -> Result<Vec<String>, Failure> {
    let jobs = as_json(session)?;
    Ok(entries(&jobs).map(|job| text(job, "job").to_owned()).collect())
}

/// The paces of the jobs that the last look saw, by name.
type Paces = HashMap<String, Pace>;

/// The jobs as a table; with the paces of those that were seen before, and the time, also how fast they get on.
fn list(
    session: &mut Session<'_>,
    paces: Option<(Duration, &mut Paces)>,
) -> Result<String, Failure> {
    let jobs = session.ask("query-block-jobs", json!({}))?;
    let more = session.ask_isobath("x-isobath-query-jobs", json!({}))?.unwrap_or_default();
    Ok(tabulated(&jobs, &more, &session.address, paces))
}

/// The table of `jobs`, as any server describes them, with what Isobath's says `more` of them.
fn tabulated(
    jobs: &Value,
    more: &Value,
    address: &str,
    mut paces: Option<(Duration, &mut Paces)>,
) -> String {
    if let Some((_, paces)) = &mut paces {
        // A later job of the same name has a pace of its own.
        paces.retain(|id, _| entries(jobs).any(|job| text(job, "device") == id));
    }
    let heads: &[&str] = match paces {
        Some(_) => &["JOB", "KIND", "DONE", "OF", "COPIED", "RATE", "LEFT", "LIMIT", "STATE"],
        None => &["JOB", "KIND", "DONE", "OF", "COPIED", "LIMIT", "STATE"],
    };
    let mut rows = vec![heads.iter().map(ToString::to_string).collect::<Vec<_>>()];
    for job in entries(jobs) {
        let id = text(job, "device");
        let more = entries(more).find(|more| text(more, "id") == id);
        let (offset, total) = (number(job, "offset"), number(job, "len"));
        let share = if total == 0 { 0.0 } else { offset as f64 * 100.0 / total as f64 };
        let limit = match number(job, "speed") {
            0 => "none".to_owned(),
            speed => format!("{}/s", size::human(speed)),
        };
        let mut words = state(job, more);
        if !text(job, "error").is_empty() {
            words.extend([": ", text(job, "error")]);
        }
        // QEMU does not say what was copied.
        let copied = more.and_then(|more| more.get("copied")).and_then(Value::as_u64);
        let mut row = vec![id.to_owned(), text(job, "type").to_owned(), format!("{share:.0}%")];
        row.extend([size::human(total), copied.map_or_else(|| "-".into(), size::human)]);
        if let Some((now, paces)) = &mut paces {
            let pace = paces.entry(id.to_owned()).or_default();
            pace.look(*now, offset, copied.unwrap_or(offset));
            let rate = pace.rate().map(|rate| format!("{}/s", size::human(rate)));
            row.extend([rate.unwrap_or_else(|| "-".into()), short(pace.left(total))]);
            if let Some(done) = row.get_mut(2) {
                *done = format!("{} {done:>4}", bar(share / 100.0));
            }
        }
        row.extend([limit, words]);
        rows.push(row);
    }
    for job in interrupted_jobs(more) {
        let id = text(job, "id");
        let kind = text(job, "command").trim_start_matches("block-").to_owned();
        let mut row = vec![id.to_owned(), kind];
        row.extend(vec!["-".to_owned(); heads.len() - 3]);
        row.push(format!(
            "interrupted; to restart it: 'isobath ctl {} resume {}'",
            word(address),
            word(id)
        ));
        rows.push(row);
    }
    if rows.len() == 1 { "No jobs.\n".to_owned() } else { table(&rows) }
}

fn plot(session: &mut Session<'_>, job: Option<&str>, file: &Path) -> Outcome {
    let records = session.ask("x-isobath-query-job-records", json!({}))?;
    let records: Vec<&Value> = entries(&records).collect();
    let chosen = match (job, &records[..]) {
        (Some(job), all) => all.iter().rev().find(|record| text(record, "id") == job),
        (None, [only]) => Some(only),
        (None, []) => None,
        (None, several) => {
            let names: Vec<_> = several.iter().map(|record| text(record, "id")).collect();
            return Err(Failure::new(format_args!(
                "there are records of several jobs; select one with --job: {}",
                names.join(", ")
            )));
        }
    };
    let chosen = chosen.ok_or_else(|| Failure::new("no record of this job"))?;
    let record = chosen.get("record").cloned().unwrap_or_default();
    let record: JobRecord = serde_json::from_value(record)
        .map_err(|error| Failure::new(error).context("invalid record from the server"))?;
    let title = format!("{} {}", text(chosen, "type"), text(chosen, "id"));
    let html = file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("html"));
    let drawn = if html { plot_html(&record, &title) } else { plot_svg(&record, &title) };
    fs::write(file, drawn)
        .map_err(|error| Failure::new(error).context(format_args!("'{}'", file.display())))?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The second line of what is shown of a job that is so far, under its heads.
    fn row(paces: &mut Paces, second: u64, offset: u64, more: &Value) -> HashMap<String, String> {
        let job = json!([{
            "device": "j", "type": "mirror", "status": "running",
            "offset": offset << 20, "len": 100 << 20, "speed": 0,
        }]);
        let shown = tabulated(&job, more, "q", Some((Duration::from_secs(second), paces)));
        let cells = |line: &str| {
            // The bar belongs to the share behind it.
            let line = line.replace(['█', '░'], "");
            let cells = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty());
            cells.map(str::to_owned).collect::<Vec<_>>()
        };
        let mut lines = shown.lines().map(cells);
        let (heads, row) = (lines.next().unwrap(), lines.next().unwrap());
        assert_eq!(heads.len(), row.len(), "{shown}");
        heads.into_iter().zip(row).collect()
    }

    #[test]
    fn a_job_of_qemus_has_the_rate_of_its_progress_and_nothing_copied() {
        let mut paces = Paces::new();
        let _ = row(&mut paces, 0, 4, &Value::Null);
        let shown = row(&mut paces, 1, 8, &Value::Null);
        assert_eq!((&*shown["COPIED"], &*shown["RATE"], &*shown["LEFT"]), ("-", "4 MiB/s", "23s"));
        // One of Isobath's has that of what was copied.
        let more = |copied: u64| json!([{"id": "j", "copied": copied << 20}]);
        let mut paces = Paces::new();
        let _ = row(&mut paces, 0, 4, &more(1));
        let shown = row(&mut paces, 1, 8, &more(2));
        assert_eq!((&*shown["COPIED"], &*shown["RATE"]), ("2 MiB", "1 MiB/s"));
    }

    #[test]
    fn a_later_job_of_the_same_name_has_a_pace_of_its_own() {
        let mut paces = Paces::new();
        let _ = row(&mut paces, 0, 4, &Value::Null);
        let none =
            tabulated(&json!([]), &Value::Null, "q", Some((Duration::from_secs(1), &mut paces)));
        assert_eq!(none, "No jobs.\n");
        assert_eq!(row(&mut paces, 2, 8, &Value::Null)["RATE"], "-");
    }
}
