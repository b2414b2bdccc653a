//! `isobath fork`

use crate::commands::create;
use crate::failure::{Failure, Outcome};
use crate::host::images;
use crate::workers::{self, Progress};
use crate::{messages, options, runtime};
use isobath_disk::{ImageFormat, NewDisk, Preallocation, fork};
use isobath_ring::Signals;
use isobath_storage::{Host, shown};
use std::cell::Cell;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// The most images of one command: each keeps a descriptor until all are made.
const MOST: u64 = 65_536;

/// Create many overlays of one base
///
/// All of them are made, or none: if one cannot be, or the command is interrupted, those that were made are removed. No
/// file is overwritten. The base may not be in use for writing, and its chain is read once, however many overlays there
/// are.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The base's format
    #[arg(short = 'F', long, value_name = "FMT", default_value = "qcow2")]
    backing_format: String,
    /// Make so many overlays; '{}' in the name of OVERLAY stands for the number of each
    #[arg(short = 'n', long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..=MOST))]
    count: Option<u64>,
    /// The number of the first
    #[arg(long, value_name = "NUMBER", default_value_t = 1, requires = "count")]
    first: u64,
    /// Options as NAME=VALUE, separated by commas, as for 'create -f qcow2'
    #[arg(short, long, value_name = "OPTIONS", value_parser = options::list)]
    options: Vec<String>,
    /// Do not write a direct-access index of the layers below
    #[arg(long)]
    no_index: bool,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    /// The base
    base: PathBuf,
    /// The new overlays
    #[arg(required = true, value_name = "OVERLAY")]
    overlays: Vec<PathBuf>,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let names = names(args)?;
    let new = new_disk(args, &names)?;
    let total = names.len() as u64;
    let index_left = runtime::block_on(async || {
        let mut signals = Signals::new(&[libc::SIGINT, libc::SIGTERM])?;
        let interrupted = Cell::new(None);
        let made = Rc::new(Cell::new(0));
        let shown = Progress::show(args.progress && !args.quiet, {
            let made = Rc::clone(&made);
            move || (made.get(), total)
        });
        let go_on = |count: usize| {
            made.set(count as u64);
            interrupted.get().is_none()
        };
        let work = fork(images(), &names, &new, &go_on);
        let forks =
            workers::until_signal(work, &mut signals, |signal| interrupted.set(Some(signal))).await;
        shown.end(matches!(forks, Ok(Some(_))));
        match (forks?, interrupted.get()) {
            // A signal that comes when all is done has come too late.
            (Some(forks), _) => Ok(forks.is_index_left()),
            (None, signal) => {
                let failure = Failure::new("interrupted; the overlays made so far were removed");
                Err(failure.with_code(128 + signal.unwrap_or(libc::SIGINT) as u8))
            }
        }
    })?;
    if !args.quiet {
        let what = if total == 1 { "overlay" } else { "overlays" };
        writeln!(out, "Created {total} {what} of '{}'.", shown(&args.base))?;
        if index_left {
            messages::note_index_left(&names[0]);
        }
    }
    Ok(0)
}

/// The names of the overlays.
fn names(args: &Args) -> Result<Vec<PathBuf>, Failure> {
    let Some(count) = args.count else { return Ok(args.overlays.clone()) };
    let [pattern] = args.overlays.as_slice() else {
        return Err(Failure::usage(
            "with --count there is one name, in which '{}' stands for the number",
        ));
    };
    let text = pattern.to_str().ok_or_else(|| {
        Failure::new(format_args!("with --count the name '{}' must be UTF-8", shown(pattern)))
    })?;
    let Some((before, after)) = text.split_once("{}").filter(|(_, after)| !after.contains("{}"))
    else {
        return Err(Failure::usage(format_args!(
            "the name '{}' must have '{{}}' once, for the number of each overlay",
            shown(pattern)
        )));
    };
    let last = args
        .first
        .checked_add(count - 1)
        .ok_or_else(|| Failure::usage(format_args!("the number {} is too large", args.first)))?;
    Ok((args.first..=last).map(|number| format!("{before}{number}{after}").into()).collect())
}

/// The images that are to be made.
fn new_disk(args: &Args, names: &[PathBuf]) -> Result<NewDisk, Failure> {
    let refused = |error: String| Failure::new(error).context(names[0].display());
    let mut new = NewDisk::default().format(ImageFormat::Qcow2).index(!args.no_index);
    create::apply_all(&mut new, &options::parse(&args.options)).map_err(refused)?;
    if new.backing_file.is_some() || new.backing_format.is_some() {
        let text = "the base is named by its own argument, and its format by --backing-format";
        return Err(Failure::new(text));
    }
    if new.preallocation != Preallocation::Off {
        return Err(Failure::new("overlays that are made together cannot be preallocated"));
    }
    new.backing_file = Some(in_headers(&args.base, names)?);
    new.backing_format = Some(args.backing_format.clone());
    Ok(new)
}

/// The base's name as the overlays hold it: that of the file if all of them are in its directory, else with the path.
fn in_headers(base: &Path, names: &[PathBuf]) -> Result<String, Failure> {
    let text = base.to_str().ok_or_else(|| {
        Failure::new(format_args!("the base's name '{}' must be UTF-8", shown(base)))
    })?;
    if images().protocol_name(text) {
        return Ok(text.to_owned());
    }
    let directory = |name: &Path| {
        let parent = name.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        let found = parent.canonicalize();
        found.map_err(|error| {
            let cause = isobath_storage::cause(&error);
            Failure::new(format_args!("the directory '{}': {cause}", shown(parent)))
        })
    };
    let Some(file) = base.file_name().and_then(|file| file.to_str()) else {
        return Err(Failure::new(format_args!("'{}' is not the name of a file", shown(base))));
    };
    let place = directory(base)?;
    let mut beside = !file.contains(':');
    for name in names {
        beside &= directory(name)? == place;
    }
    if beside {
        return Ok(file.to_owned());
    }
    place
        .join(file)
        .to_str()
        .map(str::to_owned)
        .ok_or_else(|| Failure::new(format_args!("the path of '{}' must be UTF-8", shown(base))))
}
