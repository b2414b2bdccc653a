//! Commands on the open disk.

use super::opening::Opened;
use super::reopen::driver_of;
use super::report::{Done, amount};
use super::transfer::{Ended, Form, MOST, Read, Refusal, Write, failed, read_only};
use super::words::{Words, number};
use crate::commands::info::text::print_qcow2;
use isobath_disk::{ImageFormat, Preallocation, Qcow2Info};
use std::time::Instant;

/// Runs the command `name`.
pub(super) async fn carry_out(
    opened: &Opened,
    name: &str,
    words: &Words<'_>,
) -> Result<Ended, Refusal> {
    match name {
        "read" => Ok(Read::parse(words, Form::Plain)?.run(opened).await),
        "readv" => Ok(Read::parse(words, Form::Vectored)?.run(opened).await),
        "write" => Ok(Write::parse(words, Form::Plain)?.run(opened).await),
        "writev" => Ok(Write::parse(words, Form::Vectored)?.run(opened).await),
        "discard" => discard(opened, words).await,
        "truncate" => truncate(opened, words).await,
        "flush" => Ok(flush(opened).await),
        "alloc" => alloc(opened, words).await,
        "map" => map(opened).await,
        "length" => Ok(Ended::good(format!("{}\n", amount(opened.disk.size() as f64)))),
        "info" => Ok(Ended::good(info(opened))),
        _ => Err(Refusal::Usage),
    }
}

async fn flush(opened: &Opened) -> Ended {
    if opened.ignores_flushes() {
        return Ended::good(String::new());
    }
    match opened.disk.flush().await {
        Ok(()) => Ended::good(String::new()),
        Err(error) => failed("flush", error),
    }
}

async fn discard(opened: &Opened, words: &Words<'_>) -> Result<Ended, Refusal> {
    let [offset, length] = words.arguments.as_slice() else { return Err(Refusal::Usage) };
    let (offset, text) = (number(offset)?, length);
    let length = number(text)?;
    if length > MOST {
        return Err(format!("length cannot exceed {MOST}, given {text}").into());
    }
    if opened.is_read_only() {
        return Ok(read_only());
    }
    let _alone = opened.alone().await;
    let start = Instant::now();
    if !opened.ignores_discards()
        && let Err(error) = opened.disk.discard(offset, length).await
    {
        return Ok(failed("discard", error));
    }
    let done = Done { verb: "discard", offset, bytes: length, time: start.elapsed() };
    Ok(Ended::good(match (words.has('q'), words.has('C')) {
        (true, _) => String::new(),
        (false, true) => done.for_programs(),
        (false, false) => done.for_people(),
    }))
}

async fn truncate(opened: &Opened, words: &Words<'_>) -> Result<Ended, Refusal> {
    let [size] = words.arguments.as_slice() else { return Err(Refusal::Usage) };
    let size = number(size)?;
    let mode = words.value('m').unwrap_or("off");
    let Some(mode) = Preallocation::from_name(mode) else {
        return Err(Refusal::Complaint(format!("Invalid preallocation mode '{mode}'")));
    };
    if opened.is_read_only() {
        return Ok(read_only());
    }
    if let Err(error) = opened.disk.resize(size, mode, true).await {
        return Ok(Ended { reason: Some(error.to_string()), ..Ended::bad(String::new()) });
    }
    Ok(Ended::good(String::new()))
}

/// Counts the bytes of a range that the active layer itself has allocated.
async fn alloc(opened: &Opened, words: &Words<'_>) -> Result<Ended, Refusal> {
    let (offset, length) = match words.arguments.as_slice() {
        [offset] => (number(offset)?, 512),
        [offset, length] => (number(offset)?, number(length)?),
        _ => return Err(Refusal::Usage),
    };
    let length = length.min(opened.disk.size().saturating_sub(offset));
    let mut allocated = 0;
    let walk = walk(opened, offset, length, |_, count, here| {
        allocated += if here { count } else { 0 };
    });
    if let Err(error) = walk.await {
        return Ok(failed("is_allocated", error));
    }
    Ok(Ended::good(format!(
        "{allocated}/{length} bytes allocated at offset {}\n",
        amount(offset as f64)
    )))
}

/// Lists the ranges that the active layer itself has allocated.
async fn map(opened: &Opened) -> Result<Ended, Refusal> {
    let mut runs: Vec<(u64, u64, bool)> = Vec::new();
    let walk = walk(opened, 0, opened.disk.size(), |at, count, here| match runs.last_mut() {
        Some((_, length, last)) if *last == here => *length += count,
        _ => runs.push((at, count, here)),
    });
    if let Err(error) = walk.await {
        return Ok(failed("map", error));
    }
    let line = |(at, length, here): &(u64, u64, bool)| {
        let state = if *here { "    allocated" } else { "not allocated" };
        let (size, offset) = (amount(*length as f64), amount(*at as f64));
        format!("{size} ({length:#x}) bytes {state} at offset {offset} ({at:#x})\n")
    };
    Ok(Ended::good(runs.iter().map(line).collect()))
}

/// The runs of a range: offset, length, and whether the active layer has allocated it.
async fn walk(
    opened: &Opened,
    offset: u64,
    length: u64,
    mut take: impl FnMut(u64, u64, bool),
) -> isobath_disk::Result<()> {
    let (mut at, end) = (offset, offset + length);
    while at < end {
        let before = at;
        for run in opened.disk.block_status(at, end - at, 1024).await? {
            take(at, run.length, run.allocated && run.depth == 0);
            at += run.length;
        }
        if at == before {
            break;
        }
    }
    Ok(())
}

fn info(opened: &Opened) -> String {
    let layer = opened.disk.layers().next();
    if layer.is_some_and(|layer| driver_of(layer.name()) == "null-co") {
        // The format's driver, and the protocol's.
        return "format name: null-co\nformat name: null-co\n".into();
    }
    let format = layer.map_or(ImageFormat::Raw, |layer| layer.format()).name();
    let header = layer.and_then(|layer| layer.header());
    let geometry = header.as_ref().and_then(|header| header.geometry().ok());
    // The VM state lies past the end of the disk, from the next L1 entry on.
    let (cluster, state) = geometry.map_or((0, 0), |geometry| {
        let entries = geometry.l1_size_for(opened.disk.size());
        (geometry.cluster_size(), entries.saturating_mul(geometry.l1_entry_span()))
    });
    let (cluster, state) = (amount(cluster as f64), amount(state as f64));
    let mut out =
        format!("format name: {format}\ncluster size: {cluster}\nvm state offset: {state}\n")
            .into_bytes();
    if let (Some(header), Some(geometry)) = (header, geometry) {
        let qcow2 = Qcow2Info { index: None, journal: false, ..Qcow2Info::of(&header, &geometry) };
        // Writing to a vector cannot fail.
        let _ = print_qcow2(&mut out, &qcow2);
    }
    String::from_utf8_lossy(&out).into_owned()
}
