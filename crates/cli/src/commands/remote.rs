//! `isobath remote`: what keeps a store of chains in order.

use crate::failure::{Failure, Outcome};
use crate::store::{self, StoreOptions};
use crate::{json, messages, options, runtime, size};
use clap::Subcommand;
use isobath_remote::{
    Address, BLOCK, Checked, Collection, Depth, Listed, MAX_TRACE, Place, Progress, Replace, Store,
    Trace, check, collect, list, remove, set_trace,
};
use serde_json::{Value, json};
use std::fmt::Display;
use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::Duration;

/// List, verify and remove chains in a directory or an object store
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Ls(ListArgs),
    Verify(VerifyArgs),
    Trace(TraceArgs),
    Rm(RemoveArgs),
    Gc(CollectArgs),
}

/// List the chains of a store
#[derive(clap::Args)]
struct ListArgs {
    /// Output format
    #[arg(long, value_name = "FMT", default_value = "human")]
    output: options::OutputFormat,
    #[command(flatten)]
    store: StoreOptions,
    #[arg(help = store::STORE)]
    remote: String,
}

/// Verify that everything that a chain needs is in the store
///
/// Exit codes: 0 all of it is there and matches its digests; 1 that could not be found out; 2 something is missing or
/// damaged.
#[derive(clap::Args)]
struct VerifyArgs {
    /// Look only for the objects and their lengths, without reading them
    #[arg(long)]
    quick: bool,
    /// Output format
    #[arg(long, value_name = "FMT", default_value = "human")]
    output: options::OutputFormat,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    store: StoreOptions,
    #[arg(help = store::CHAIN)]
    remote: String,
}

/// Have the servers of a chain fetch ahead what was recorded
///
/// 'isobath serve --record-trace' records what is read, such as by a machine that boots. Servers that start later fetch
/// it in the same order while nothing else waits to be fetched. A chain has one trace; it stays when layers are pushed
/// on top.
#[derive(clap::Args)]
struct TraceArgs {
    /// Have them fetch nothing ahead
    #[arg(long, conflicts_with = "trace")]
    remove: bool,
    /// Use a store that cannot replace an object only if it is unchanged: what is pushed to the chain at the same time
    /// may be lost
    #[arg(long)]
    overwrite: bool,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    store: StoreOptions,
    #[arg(help = store::CHAIN)]
    remote: String,
    /// The file that was recorded
    #[arg(value_name = "FILE", required_unless_present = "remove")]
    trace: Option<PathBuf>,
}

/// Remove a chain from a store
///
/// Its layers stay until 'isobath remote gc' removes those that no other chain needs.
#[derive(clap::Args)]
struct RemoveArgs {
    #[command(flatten)]
    store: StoreOptions,
    #[arg(help = store::CHAIN)]
    remote: String,
}

/// Remove the objects of a store that no chain needs
#[derive(clap::Args)]
struct CollectArgs {
    /// How long an object stays after it was put, although no chain needs it: a number with s, m, h or d
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = time)]
    grace: Duration,
    /// Only say what would be removed
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Begin although the store says that another gc is at work, which was killed
    #[arg(long)]
    break_lock: bool,
    /// Output format
    #[arg(long, value_name = "FMT", default_value = "human")]
    output: options::OutputFormat,
    #[command(flatten)]
    store: StoreOptions,
    #[arg(help = store::STORE)]
    remote: String,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    match &args.command {
        Command::Ls(args) => ls(args, out),
        Command::Verify(args) => verify(args, out),
        Command::Trace(args) => trace(args, out),
        Command::Rm(args) => rm(args),
        Command::Gc(args) => gc(args, out),
    }
}

/// Parses a time such as `24h`.
fn time(text: &str) -> Result<Duration, String> {
    let units = [("s", 1), ("m", 60), ("h", 3600), ("d", 86_400)];
    let parsed = units.iter().find_map(|(unit, seconds)| {
        let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
        number.checked_mul(*seconds)
    });
    let seconds = parsed.filter(|seconds| *seconds <= 86_400 * 36_500);
    seconds
        .map(Duration::from_secs)
        .ok_or_else(|| "expected a number with s, m, h or d, such as 24h".to_owned())
}

/// Does work that changes nothing that an interruption could leave half done.
fn block<T: Send + 'static>(
    store: &StoreOptions,
    place: &Place,
    progress: bool,
    work: impl FnOnce(&dyn Store, &Progress) -> isobath_remote::Result<T> + Send + 'static,
) -> Result<T, Failure> {
    runtime::block_on(async || {
        store.run(place, progress, "the chains are as they were", work).await
    })
}

fn ls(args: &ListArgs, out: &mut dyn Write) -> Outcome {
    let place = Place::parse(&args.remote)?;
    let listed = block(&args.store, &place, false, |store, _| list(store))?;
    if args.output == options::OutputFormat::Json {
        json::print(out, &listed.iter().map(described).collect::<Value>())?;
        return Ok(0);
    }
    let width = listed.iter().map(|one| one.name.len()).max().unwrap_or(0).max(4);
    if !listed.is_empty() {
        writeln!(
            out,
            "{:<width$}  {:>6}  {:>10}  {:>10}  {:>10}",
            "NAME", "LAYERS", "DISK", "STORED", "SHARED"
        )?;
    }
    for Listed { name, chain } in &listed {
        match chain {
            Ok(chain) => {
                let [disk, stored, shared] =
                    [chain.size, chain.bytes, chain.shared].map(size::human);
                writeln!(
                    out,
                    "{name:<width$}  {:>6}  {disk:>10}  {stored:>10}  {shared:>10}",
                    chain.layers
                )?;
            }
            Err(_) => writeln!(out, "{name:<width$}  {:>6}", "-")?,
        }
    }
    out.flush()?;
    for problem in listed.iter().filter_map(|one| one.chain.as_ref().err()) {
        messages::complain(problem);
    }
    Ok(0)
}

fn described(listed: &Listed) -> Value {
    match &listed.chain {
        Ok(chain) => json!({
            "name": listed.name,
            "layers": chain.layers,
            "virtual-size": chain.size,
            "stored-bytes": chain.bytes,
            "shared-bytes": chain.shared,
        }),
        Err(problem) => json!({ "name": listed.name, "problem": problem }),
    }
}

fn verify(args: &VerifyArgs, out: &mut dyn Write) -> Outcome {
    let address = Address::parse(&args.remote)?;
    let depth = if args.quick { Depth::Lengths } else { Depth::Digests };
    let name = address.name.clone();
    let work =
        move |store: &dyn Store, progress: &Progress| match check(store, &name, depth, progress) {
            // That a manifest is damaged is a finding, too.
            Err(isobath_remote::Error::Damaged(problem)) => {
                Ok(Checked { problems: vec![problem], ..Checked::default() })
            }
            checked => checked,
        };
    let checked = block(&args.store, &address.place, args.progress && !args.quiet, work)?;
    if args.output == options::OutputFormat::Json {
        let found = json!({
            "remote": address.to_string(),
            "layers": checked.layers,
            "objects": checked.objects,
            "problems": checked.problems,
        });
        json::print(out, &found)?;
    } else {
        checked.problems.iter().for_each(messages::complain);
        if checked.problems.is_empty() && !args.quiet {
            let how =
                if args.quick { "are there, with their lengths" } else { "match their digests" };
            writeln!(out, "{} layers, {} objects: all {how}.", checked.layers, checked.objects)?;
        }
    }
    Ok(if checked.problems.is_empty() { 0 } else { 2 })
}

fn trace(args: &TraceArgs, out: &mut dyn Write) -> Outcome {
    let address = Address::parse(&args.remote)?;
    let read = |path: &PathBuf| {
        let failed = |error: &dyn Display| {
            let what = format!("cannot use the trace '{}'", isobath_storage::shown(path));
            Failure::new(error).context(what)
        };
        let mut bytes = Vec::new();
        let read = File::open(path)
            .and_then(|file| file.take(MAX_TRACE + 1).read_to_end(&mut bytes))
            .map_err(|error| failed(&isobath_storage::cause(&error)));
        read.and_then(|_| Trace::decode(&bytes).map_err(|error| failed(&error)))
    };
    let trace = args.trace.as_ref().map(read).transpose()?;
    let replace = if args.overwrite { Replace::Any } else { Replace::Unchanged };
    let name = address.name.clone();
    let work = move |store: &dyn Store, progress: &Progress| {
        set_trace(store, &name, trace.as_ref(), replace, progress)
    };
    let blocks = block(&args.store, &address.place, false, work)?;
    if !args.quiet {
        match blocks {
            0 => writeln!(out, "Servers of '{address}' fetch nothing ahead.")?,
            _ => writeln!(
                out,
                "Servers of '{address}' fetch {blocks} blocks ahead ({}).",
                size::human(blocks.saturating_mul(BLOCK))
            )?,
        }
    }
    Ok(0)
}

fn rm(args: &RemoveArgs) -> Outcome {
    let address = Address::parse(&args.remote)?;
    let name = address.name.clone();
    block(&args.store, &address.place, false, move |store, _| remove(store, &name))?;
    Ok(0)
}

fn gc(args: &CollectArgs, out: &mut dyn Write) -> Outcome {
    let place = Place::parse(&args.remote)?;
    let how = Collection { grace: args.grace, dry_run: args.dry_run, break_lock: args.break_lock };
    let collected =
        block(&args.store, &place, false, move |store, progress| collect(store, &how, progress))?;
    if args.output == options::OutputFormat::Json {
        let done = json!({
            "chains": collected.chains,
            "objects-removed": collected.objects,
            "bytes-removed": collected.bytes,
            "objects-too-young": collected.young,
            "dry-run": args.dry_run,
        });
        json::print(out, &done)?;
        return Ok(0);
    }
    let would = if args.dry_run { "Would remove" } else { "Removed" };
    writeln!(
        out,
        "{would} {} objects ({}) that none of {} chains needs; {} more are younger than the grace time.",
        collected.objects,
        size::human(collected.bytes),
        collected.chains,
        collected.young
    )?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_a_unit() {
        for (text, seconds) in
            [("0s", 0), ("90s", 90), ("5m", 300), ("24h", 86_400), ("7d", 604_800)]
        {
            assert_eq!(time(text), Ok(Duration::from_secs(seconds)));
        }
        for wrong in
            ["", "24", "h", "-1h", "1w", "1 h", "99999999999999999999d", "1844674407370955161m"]
        {
            assert!(time(wrong).is_err(), "{wrong}");
        }
    }
}
