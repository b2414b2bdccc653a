//! The metrics as text.

use crate::monitor::{Drive, Monitor};
use crate::server::Server;
use isobath_disk::RequestStats;
use isobath_disk::live::LATENCY_BUCKETS;
use isobath_storage::Host;
use isobath_storage_file::syncs;
use std::fmt::{Display, Write};

/// Metrics in the text format, one family after another.
#[derive(Default)]
struct Text(String);

impl Text {
    /// Begins a family of metrics.
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.0.push_str(name);
        for (index, (label, text)) in labels.iter().enumerate() {
            let begin = if index == 0 { '{' } else { ',' };
            let _ = write!(self.0, "{begin}{label}=\"{}\"", escaped(text));
        }
        let end = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.0, "{end} {value}");
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// All metrics.
pub(super) fn metrics<H: Host + Clone>(server: &Server<Monitor<H>>) -> String {
    let monitor = server.service();
    let drives: Vec<_> =
        monitor.drives().into_iter().map(|drive| (monitor.name_of(&drive), drive)).collect();
    let mut text = Text::default();
    requests(&mut text, &drives);
    gauges(&mut text, &drives);
    map(&mut text, &drives);
    text.family("isobath_host_syncs_total", "counter", "fdatasync calls for all images.");
    text.sample("isobath_host_syncs_total", &[], syncs());
    monitor_metrics(&mut text, monitor);
    text.family("isobath_qmp_clients", "gauge", "Clients connected to the control sockets.");
    text.sample("isobath_qmp_clients", &[], server.sessions());
    text.0
}

type Drives<H> = [(String, std::rc::Rc<Drive<H>>)];

fn requests<H: Host>(text: &mut Text, drives: &Drives<H>) {
    let kinds = |drive: &Drive<H>| {
        let io = drive.disk().io_stats();
        [("read", io.reads), ("write", io.writes), ("flush", io.flushes), ("unmap", io.unmaps)]
    };
    let mut counter = |name: &str, help: &str, value: fn(&RequestStats) -> u64| {
        text.family(name, "counter", help);
        for (disk, drive) in drives {
            for (kind, stats) in kinds(drive) {
                text.sample(name, &[("disk", disk), ("operation", kind)], value(&stats));
            }
        }
    };
    counter("isobath_requests_total", "Requests that succeeded.", |stats| stats.requests);
    counter("isobath_requests_failed_total", "Requests that failed.", |stats| stats.failed);
    counter("isobath_request_bytes_total", "Bytes in requests that succeeded.", |stats| {
        stats.bytes
    });
    let name = "isobath_request_seconds";
    text.family(name, "histogram", "Time from a request's arrival to its reply.");
    for (disk, drive) in drives {
        for (kind, stats) in kinds(drive) {
            let mut sum = 0;
            for (index, count) in stats.histogram.iter().enumerate() {
                sum += count;
                let end = if index + 1 == LATENCY_BUCKETS {
                    "+Inf".to_owned()
                } else {
                    ((1u64 << index) as f64 / 1e6).to_string()
                };
                let labels = [("disk", disk.as_str()), ("operation", kind), ("le", &end)];
                text.sample(&format!("{name}_bucket"), &labels, sum);
            }
            let labels = [("disk", disk.as_str()), ("operation", kind)];
            text.sample(&format!("{name}_sum"), &labels, stats.latency.as_secs_f64());
            text.sample(&format!("{name}_count"), &labels, sum);
        }
    }
}

fn gauges<H: Host>(text: &mut Text, drives: &Drives<H>) {
    let mut gauge = |name: &str, help: &str, value: &dyn Fn(&Drive<H>) -> u64| {
        text.family(name, "gauge", help);
        for (disk, drive) in drives {
            text.sample(name, &[("disk", disk)], value(drive));
        }
    };
    gauge("isobath_requests_in_flight", "Requests in flight.", &|drive| {
        drive.disk().io_stats().in_flight.into()
    });
    gauge(
        "isobath_disk_paused",
        "1 while the disk is paused by a failure, or stopped.",
        &|drive| {
            let state = drive.disk().pausing().state();
            u64::from(state.stopped || !state.failures.is_empty())
        },
    );
    gauge("isobath_requests_held", "Requests that wait until the disk continues.", &|drive| {
        drive.disk().pausing().state().waiting as u64
    });
    gauge("isobath_disk_size_bytes", "Size of the disk.", &|drive| drive.disk().size());
    gauge("isobath_chain_layers", "Layers in the chain.", &|drive| drive.disk().depth() as u64);
    gauge("isobath_chain_indexed_layers", "Layers covered by a direct-access index.", &|drive| {
        drive.disk().indexed_layers() as u64
    });
    gauge("isobath_map_bytes", "Memory used by the map.", &|drive| drive.disk().map_stats().bytes);
    gauge("isobath_map_budget_bytes", "Memory limit of the map.", &|drive| {
        drive.disk().map_stats().budget
    });
}

fn map<H: Host>(text: &mut Text, drives: &Drives<H>) {
    let name = "isobath_map_lookups_total";
    text.family(name, "counter", "Lookups in the map since it was created.");
    for (disk, drive) in drives {
        let stats = drive.disk().map_stats();
        for (result, count) in
            [("hit", stats.hits), ("unallocated", stats.unallocated_hits), ("miss", stats.misses)]
        {
            text.sample(name, &[("disk", disk), ("result", result)], count);
        }
    }
}

fn monitor_metrics<H: Host + Clone>(text: &mut Text, monitor: &Monitor<H>) {
    let jobs = monitor.running_jobs();
    let mut gauge = |name: &str, help: &str, value: fn(&isobath_jobs::Job) -> u64| {
        text.family(name, "gauge", help);
        for (disk, job) in &jobs {
            let labels = [
                ("disk", disk.as_str()),
                ("job", job.id()),
                ("kind", job.kind().name()),
                ("status", job.status().name()),
            ];
            text.sample(name, &labels, value(job));
        }
    };
    gauge("isobath_job_done_bytes", "A job's progress.", |job| job.progress().current);
    gauge("isobath_job_bytes", "A job's total work.", |job| job.progress().total);
    gauge("isobath_job_copied_bytes", "Bytes that a job has copied.", |job| job.progress().copied);
    gauge("isobath_job_yields", "1 while a job is throttled for guest I/O.", |job| {
        job.yields().into()
    });
    text.family("isobath_export_clients", "gauge", "Clients connected to an export.");
    for (export, clients) in monitor.export_clients() {
        text.sample("isobath_export_clients", &[("export", &export)], clients);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped() {
        let mut text = Text::default();
        text.family("m", "gauge", "Help.");
        text.sample("m", &[("a", "x\"\\\n"), ("b", "é")], 1.5);
        text.sample("m", &[], 2);
        let expected = "# HELP m Help.\n# TYPE m gauge\nm{a=\"x\\\"\\\\\\n\",b=\"é\"} 1.5\nm 2\n";
        assert_eq!(text.0, expected);
    }
}
