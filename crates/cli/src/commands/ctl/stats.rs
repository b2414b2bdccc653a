//! `isobath ctl SOCKET stats`

use super::{Session, entries, number, refuse_watch, table, text, watch};
use crate::failure::{Failure, Outcome};
use crate::options::OutputFormat;
use crate::size;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Show I/O statistics of the disks: requests, bytes, latency, map hits
#[derive(clap::Args)]
pub(super) struct Stats {
    /// Show the rates of the last second, every second until Ctrl-C
    #[arg(long)]
    watch: bool,
    /// Output format
    #[arg(long, value_name = "FMT", default_value = "human")]
    output: OutputFormat,
}

impl Stats {
    pub(super) fn run(&self, session: &mut Session<'_>) -> Outcome {
        if self.output == OutputFormat::Json {
            refuse_watch(self.watch)?;
            let stats = as_json(session)?;
            session.print(&stats)?;
            return Ok(0);
        }
        let mut last = None;
        if self.watch {
            return watch(session, Duration::from_secs(1), move |session| show(session, &mut last));
        }
        let shown = show(session, &mut last)?;
        session.out.write_all(shown.as_bytes())?;
        Ok(0)
    }
}

/// The totals of each disk since the server started, as JSON.
fn as_json(session: &mut Session<'_>) -> Result<Value, Failure> {
    let stats = session.ask("query-blockstats", json!({}))?;
    let disks = session.ask_isobath("x-isobath-query-disks", json!({}))?.unwrap_or_default();
    let rows = entries(&stats).map(|disk| {
        let device = text(disk, "device");
        let figures = disk.get("stats").unwrap_or(&Value::Null);
        let more = more_of(&disks, device);
        let kind = |name: &str, bytes: bool| {
            let figure = |what: &str| number(figures, &format!("{name}_{what}"));
            let mut all =
                json!({"requests": figure("operations"), "time-ns": figure("total_time_ns")});
            if bytes {
                all["bytes"] = figure("bytes").into();
            }
            all
        };
        let hits = more.and_then(|more| more.get("map")).map(hits_of);
        json!({
            "disk": device,
            "layers": more.map(|more| number(more, "layers")),
            "read": kind("rd", true),
            "write": kind("wr", true),
            "flush": kind("flush", false),
            "map": hits.map(|(hits, all)| json!({"lookups": all, "hits": hits})),
        })
    });
    Ok(Value::Array(rows.collect()))
}

/// What only Isobath knows of a disk.
fn more_of<'a>(disks: &'a Value, device: &str) -> Option<&'a Value> {
    entries(disks.get("disks")?).find(|disk| text(disk, "device") == device)
}

/// The hits of a map, and all lookups.
fn hits_of(map: &Value) -> (u64, u64) {
    let hits = number(map, "hits") + number(map, "unallocated-hits");
    (hits, hits + number(map, "misses"))
}

/// A server's counters, and when they were read.
struct Look {
    at: Instant,
    stats: Value,
}

const HEAD: [&str; 11] = [
    "DISK",
    "LAYERS",
    "READ",
    "",
    "WRITE",
    "",
    "FLUSH",
    "READ TIME",
    "WRITE TIME",
    "FLUSH TIME",
    "MAP HITS",
];

/// The rates per second since the last sample; the first time, the totals since the server started.
fn show(session: &mut Session<'_>, last: &mut Option<Look>) -> Result<String, Failure> {
    let stats = session.ask("query-blockstats", json!({}))?;
    let disks = session.ask_isobath("x-isobath-query-disks", json!({}))?.unwrap_or_default();
    let now = Look { at: Instant::now(), stats };
    let seconds = last.as_ref().map(|last| (now.at - last.at).as_secs_f64());
    let mut rows = vec![HEAD.map(String::from).to_vec()];
    for disk in entries(&now.stats) {
        let device = text(disk, "device");
        let before = last.as_ref().and_then(|last| {
            entries(&last.stats).find(|disk| text(disk, "device") == device)?.get("stats")
        });
        let figures = disk.get("stats").unwrap_or(&Value::Null);
        rows.push(row(device, figures, before, seconds, more_of(&disks, device)));
    }
    *last = Some(now);
    Ok(table(&rows))
}

fn row(
    device: &str,
    figures: &Value,
    before: Option<&Value>,
    seconds: Option<f64>,
    more: Option<&Value>,
) -> Vec<String> {
    let since = |name: &str| {
        number(figures, name).saturating_sub(before.map_or(0, |before| number(before, name)))
    };
    let count = |name: &str| match seconds {
        Some(seconds) => format!("{:.0}/s", since(name) as f64 / seconds),
        None => since(name).to_string(),
    };
    let bytes = |name: &str| match seconds {
        Some(seconds) => format!("{}/s", size::human((since(name) as f64 / seconds) as u64)),
        None => size::human(since(name)),
    };
    let latency = |time: &str, count: &str| match since(count) {
        0 => "-".to_owned(),
        count => microseconds(since(time) as f64 / 1000.0 / count as f64),
    };
    let layers = more.map(|more| number(more, "layers").to_string());
    let hits = more.and_then(|more| more.get("map")).map(|map| match hits_of(map) {
        (_, 0) => "-".to_owned(),
        (hits, all) => format!("{:.1}%", hits as f64 * 100.0 / all as f64),
    });
    vec![
        device.to_owned(),
        layers.unwrap_or_else(|| "-".into()),
        count("rd_operations"),
        bytes("rd_bytes"),
        count("wr_operations"),
        bytes("wr_bytes"),
        count("flush_operations"),
        latency("rd_total_time_ns", "rd_operations"),
        latency("wr_total_time_ns", "wr_operations"),
        latency("flush_total_time_ns", "flush_operations"),
        hits.unwrap_or_else(|| "-".into()),
    ]
}

fn microseconds(time: f64) -> String {
    if time < 1000.0 { format!("{time:.0} us") } else { format!("{:.1} ms", time / 1000.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_totals_and_then_rates() {
        let figures = |reads: u64| {
            json!({"rd_operations": reads, "rd_bytes": reads * 4096,
                   "rd_total_time_ns": reads * 2_500_000})
        };
        let totals = row("d", &figures(10), None, None, None);
        assert_eq!(totals[2..4], ["10", "40 KiB"]);
        assert_eq!(totals[7..9], ["2.5 ms", "-"]);
        let rates = row("d", &figures(30), Some(&figures(10)), Some(2.0), None);
        assert_eq!(rates[2..4], ["10/s", "40 KiB/s"]);
        assert_eq!(microseconds(12.3), "12 us");
    }
}
