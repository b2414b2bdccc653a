//! A survey for a terminal.

use super::Listing;
use super::format::{bytes, date, microseconds, number, percent, span, time};
use crate::{Advice, Report, Survey, cost, shown};
use std::io::{self, Write};

/// Lengths for which the cumulative share of chains is printed.
const STEPS: [u32; 9] = [1, 2, 5, 10, 20, 30, 100, 300, 1000];
/// The number of problems that are listed individually.
const PROBLEMS: usize = 20;

/// The summary, the first chains and the first problems.
///
/// # Errors
/// If writing to `out` fails.
pub fn text(
    survey: &Survey,
    report: &Report,
    listing: Listing,
    out: &mut dyn Write,
) -> io::Result<()> {
    found(report, out)?;
    if report.counts.chains > 0 {
        lengths(report, out)?;
        snapshots(report, out)?;
        held(report, out)?;
        chains(survey, listing, out)?;
        advice(report, out)?;
    }
    problems(report, out)
}

fn found(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let counts = &report.counts;
    writeln!(
        out,
        "{} in {}, {:.1} s, {}",
        counted(counts.files, "file", "files"),
        counted(counts.directories, "directory", "directories"),
        report.seconds,
        time(report.taken_at),
    )?;
    if report.interrupted {
        writeln!(out, "INTERRUPTED: partial results, chains may be longer")?;
    }
    writeln!(
        out,
        "{} {} {}, {} in all",
        counted(counts.images, "qcow2 image", "qcow2 images"),
        if counts.images == 1 { "forms" } else { "form" },
        counted(counts.chains, "chain", "chains"),
        counted(counts.files_in_chains, "file", "files"),
    )?;
    let also = [
        (counts.shared, ("file", "files"), " shared by several overlays"),
        (counts.raw_bases, ("base that is", "bases that are"), " not qcow2"),
        (counts.outside, ("file", "files"), " outside the paths surveyed"),
        (counts.incomplete, ("incomplete chain", "incomplete chains"), ""),
        (counts.in_loops, ("image", "images"), " in loops, not part of any chain"),
        (counts.broken, ("image", "images"), " with an unusable header"),
        (counts.encrypted, ("encrypted image", "encrypted images"), ""),
        (counts.indexed, ("image", "images"), " with a direct-access index"),
        (counts.other_names, ("further name of a file", "further names of the same files"), ""),
        (counts.symbolic_links, ("symbolic link", "symbolic links"), ", not followed"),
        (
            counts.special_files,
            ("FIFO, socket or device", "FIFOs, sockets and devices"),
            ", not opened",
        ),
        (counts.other_file_systems, ("other file system", "other file systems"), ", not entered"),
    ];
    for (count, (one, many), more) in also.into_iter().filter(|(count, ..)| *count > 0) {
        let what = if count == 1 { one } else { many };
        writeln!(out, "{:>12} {what}{more}", number(count))?;
    }
    Ok(())
}

/// A number of things.
fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{} {}", number(count), if count == 1 { one } else { many })
}

fn lengths(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let lengths = &report.lengths;
    writeln!(
        out,
        "\nChain length: median {}, mean {:.1}, 90th percentile {}, 99th percentile {}, longest {}",
        lengths.median, lengths.mean, lengths.p90, lengths.p99, lengths.longest,
    )?;
    writeln!(out, "{:>12} {:>10} {:>10}", "length", "of chains", "of files")?;
    for step in STEPS.into_iter().filter(|&step| step < lengths.longest).chain([lengths.longest]) {
        let (chains, files) = lengths.up_to(step);
        let up_to = format!("<= {step}");
        writeln!(out, "{up_to:>12} {:>10} {:>10}", percent(chains), percent(files))?;
    }
    Ok(())
}

fn snapshots(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let (intervals, ages) = (&report.intervals, &report.ages);
    if intervals.count > 0 {
        let share = |at: usize| {
            let most = intervals.at_most.get(at).copied().unwrap_or(0);
            percent(most as f64 / intervals.count as f64)
        };
        writeln!(
            out,
            "\nTime between layers: median {}, 10th percentile {}; within an hour {}, a day {}, a \
             week {}",
            span(intervals.median),
            span(intervals.p10),
            share(1),
            share(2),
            share(3),
        )?;
    } else {
        writeln!(out)?;
    }
    if ages.count > 0 {
        writeln!(
            out,
            "Age of backing files: median {}, oldest {}",
            span(ages.median),
            span(ages.most)
        )?;
    }
    if let (Some(first), Some(last)) = (report.longest.first(), report.longest.last()) {
        writeln!(
            out,
            "Longest chain: {} on {}, {} since {}",
            first.1,
            date(first.0),
            last.1,
            date(last.0)
        )?;
    }
    let notes = [
        (
            report.clones,
            ("overlay of a shared file", "overlays of shared files"),
            ", not counted as snapshots",
        ),
        (
            report.out_of_order,
            ("layer", "layers"),
            " older than the one below, not counted as snapshots",
        ),
        (report.counts.without_birth, ("file dated by its", "files dated by their"), " last write"),
    ];
    for (count, (one, many), more) in notes.into_iter().filter(|(count, ..)| *count > 0) {
        let what = if count == 1 { one } else { many };
        writeln!(out, "{:>12} {what}{more}", number(count))?;
    }
    Ok(())
}

fn held(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let held = &report.held;
    writeln!(
        out,
        "\nFiles hold {} for disks of {}: active images {}, layers below {} ({} shared)",
        bytes(held.held_bytes),
        bytes(held.disk_bytes),
        bytes(held.active_bytes),
        bytes(held.lower_bytes),
        bytes(held.shared_bytes),
    )?;
    match &report.clusters {
        Some(clusters) => writeln!(
            out,
            "At least {} of the {} in clusters is hidden from every disk ({} counted)",
            bytes(clusters.hidden_bytes),
            bytes(clusters.data_bytes),
            counted(clusters.images, "image", "images"),
        )?,
        None => writeln!(out, "Bytes that no disk can see were not counted; use --bytes")?,
    }
    writeln!(
        out,
        "Memory for all chains: QEMU up to {}, isobath up to {}",
        bytes(report.qemu_memory_bytes),
        bytes(report.isobath_memory_bytes),
    )
}

fn chains(survey: &Survey, listing: Listing, out: &mut dyn Write) -> io::Result<()> {
    let rows = survey.top(listing.count, listing.sort);
    if rows.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\n{:>7} {:>10} {:>10} {:>11} {:>11} {:>10} {:>10}  {:<12} image",
        "length", "held", "hidden", "cold QEMU", "isobath", "mem. QEMU", "isobath", "advice",
    )?;
    for row in rows {
        let advice = match row.advice {
            Advice::Merge => format!("merge to {}", row.length_after),
            other => other.word().to_owned(),
        };
        let cold = if row.indexed { row.indexed_cold_us } else { row.isobath_cold_us };
        writeln!(
            out,
            "{:>7} {:>10} {:>10} {:>11} {:>11} {:>10} {:>10}  {advice:<12} {}",
            format!("{}{}", number(row.length.into()), if row.whole { "" } else { "+" }),
            bytes(row.held_bytes),
            row.hidden_bytes.map_or_else(|| "-".to_owned(), bytes),
            microseconds(row.qemu_cold_us),
            microseconds(cold),
            bytes(row.qemu_memory_bytes),
            bytes(row.isobath_memory_bytes),
            for_people(&row.image),
        )?;
    }
    Ok(())
}

/// An [`exact`](crate::name::exact) name with control characters escaped.
pub(super) fn for_people(exact: &str) -> String {
    // Backslashes are already doubled, and must not be doubled again.
    let parts: Vec<String> = exact.split('\\').map(|part| shown(part.as_bytes())).collect();
    parts.join("\\")
}

fn advice(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    let parts: Vec<String> = report
        .advice
        .iter()
        .filter(|(_, count)| *count > 0)
        .map(|(advice, count)| format!("{} {}", advice.word(), number(*count)))
        .collect();
    writeln!(out, "\nAdvice: {}", parts.join(", "))?;
    if report.files_merged > 0 {
        writeln!(
            out,
            "Merging removes {}; an index reduces a cold lookup to one read, {}",
            counted(report.files_merged, "file", "files"),
            microseconds(cost::indexed_cold() / 1000.0),
        )?;
    }
    Ok(())
}

fn problems(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    if report.problems.total() == 0 {
        return Ok(());
    }
    writeln!(out, "\nProblems: {}", number(report.problems.total()))?;
    for (trouble, count) in report.problems.counts() {
        writeln!(out, "{:>12} {}", number(count), trouble.text())?;
    }
    for problem in report.problems.list().iter().take(PROBLEMS) {
        writeln!(
            out,
            "  {}: {} ({})",
            shown(&problem.image),
            problem.trouble.text(),
            for_people(&problem.detail)
        )?;
    }
    let more = report.problems.total().saturating_sub(PROBLEMS as u64);
    if more > 0 {
        writeln!(out, "  and {} more; --output json lists them", number(more))?;
    }
    Ok(())
}
