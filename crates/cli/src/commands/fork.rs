//! `isobath fork`

use crate::commands::create;
use crate::failure::{Failure, Outcome};
use crate::host::images;
use crate::image_name::{Naming, is_of_kind};
use crate::stored::{self, CacheOptions};
use crate::workers::{self, Progress};
use crate::{descriptors, messages, options, overlays, runtime};
use isobath_disk::{DiskError, Forked, ImageFormat, NewDisk, Preallocation, fork};
use isobath_remote::served::Chain;
use isobath_ring::Signals;
use isobath_storage::{Host, shown};
use std::cell::Cell;
use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;

/// The most images of one command: each keeps a descriptor until all are made.
const MOST: u64 = 65_536;

/// Descriptors that are needed besides: what is being written has another one, and the program and the base's chain
/// have theirs.
const DESCRIPTORS: u64 = 256;

/// Create many overlays of one base
///
/// All of them are made, or none: if one cannot be, or the command is interrupted, those that were made are removed. No
/// file is overwritten. The base may not be in use for writing, and its chain is read once, however many overlays there
/// are.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The base's format [default: qcow2, or that of a chain in a store]
    #[arg(short = 'F', long, value_name = "FMT")]
    backing_format: Option<String>,
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
    #[command(flatten)]
    stored: CacheOptions,
    /// The base: an image, or a chain in a store, named as for 'isobath pull'
    base: PathBuf,
    /// The new overlays
    #[arg(required = true, value_name = "OVERLAY")]
    overlays: Vec<PathBuf>,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let given = options::parse(&args.options);
    if given.iter().any(|(name, _)| name == "help" || name == "?") {
        return create::help(ImageFormat::Qcow2, true, out);
    }
    let names = names(args)?;
    let chain = match stored::address(&args.base)? {
        Some(address) => Some(args.stored.open_now(&address)?),
        None => None,
    };
    let new = new_disk(args, &given, &names, chain.as_deref())?;
    let index_left = runtime::block_on(async || {
        if let Some(chain) = &chain {
            overlays::check_plain(images(), &names[0], chain).await?;
        }
        make(args, &names, &new).await
    })?;
    if !args.quiet {
        let what = if names.len() == 1 { "overlay" } else { "overlays" };
        let told = writeln!(out, "Created {} {what} of '{}'.", names.len(), shown(&args.base));
        told.and_then(|()| out.flush())
            .map_err(|error| Failure::from(error).context("all overlays were made, and stay"))?;
        if index_left {
            messages::note_index_left(&names[0]);
        }
    }
    Ok(0)
}

/// Makes the overlays. Returns whether there was too much to read for their index.
async fn make(args: &Args, names: &[PathBuf], new: &NewDisk) -> Result<bool, Failure> {
    let mut signals = Signals::new(&[libc::SIGINT, libc::SIGTERM])?;
    let interrupted = Cell::new(None);
    let begun = Cell::new(false);
    let made = Rc::new(Cell::new(0));
    let total = names.len() as u64;
    let shown = Progress::show(args.progress && !args.quiet, {
        let made = Rc::clone(&made);
        move || (made.get(), total)
    });
    let go_on = |count: usize| {
        begun.set(true);
        made.set(count as u64);
        interrupted.get().is_none()
    };
    let stopped = |signal: i32, left: usize| {
        let what = match left {
            0 => "the overlays made so far were removed".to_owned(),
            left => format!("{left} of the overlays made so far could not be removed"),
        };
        let failure = Failure::new(format_args!("interrupted; {what}"));
        failure.with_code(128 + signal as u8)
    };
    let mut work = pin!(fork(images(), names, new, &go_on));
    let forked = match workers::unless_signal(work.as_mut(), &mut signals).await {
        Ok(forked) => forked,
        // There is nothing yet that would have to be removed.
        Err(signal) if !begun.get() => return Err(stopped(signal, 0)),
        Err(signal) => {
            interrupted.set(Some(signal));
            work.await
        }
    };
    shown.end(matches!(forked, Ok(Forked::All(_))));
    let failed = |error: DiskError| match &error {
        DiskError::Format { .. } => match create::contradiction(new) {
            Some(reason) => Failure::new(reason).context(names[0].display()),
            None => error.into(),
        },
        _ => error.into(),
    };
    match forked.map_err(failed)? {
        // A signal that comes when all is done has come too late.
        Forked::All(forks) => Ok(forks.is_index_left()),
        Forked::Stopped(left) => Err(stopped(interrupted.get().unwrap_or(libc::SIGINT), left)),
    }
}

/// The names of the overlays.
fn names(args: &Args) -> Result<Vec<PathBuf>, Failure> {
    let names = match args.count {
        Some(count) => numbered(args, count)?,
        None => args.overlays.clone(),
    };
    let most = descriptors::limit().saturating_sub(DESCRIPTORS);
    if names.len() as u64 > most {
        return Err(Failure::new(format_args!(
            "{} overlays are too many for the limit on open files: at most {most} can be made at once; raise it \
             (ulimit -n), or make fewer",
            names.len()
        )));
    }
    let target = |name: &PathBuf| {
        let target = Naming::target(name).and_then(|target| match target.device {
            Some(driver) => Err(format!("an overlay is a new file, and not a '{driver}'")),
            None => Ok(target.path),
        });
        target.map_err(|error| Failure::new(error).context(name.display()))
    };
    names.iter().map(target).collect()
}

/// The names with their numbers.
fn numbered(args: &Args, count: u64) -> Result<Vec<PathBuf>, Failure> {
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
    let last = args.first.checked_add(count - 1);
    let last =
        last.ok_or_else(|| Failure::usage(format_args!("the number {} is too large", args.first)))?;
    Ok((args.first..=last).map(|number| format!("{before}{number}{after}").into()).collect())
}

/// The images that are to be made.
fn new_disk(
    args: &Args,
    given: &[(String, String)],
    names: &[PathBuf],
    chain: Option<&Chain>,
) -> Result<NewDisk, Failure> {
    let refused = |error: &dyn Display| Failure::new(error).context(names[0].display());
    let mut new = NewDisk::default().format(ImageFormat::Qcow2).index(!args.no_index);
    if given.iter().any(|(name, _)| create::is_encryption(&new, name)) {
        let text = "overlays that are made together cannot be encrypted: each has a key of its own";
        return Err(Failure::new(text));
    }
    create::apply_all(&mut new, given).map_err(|error| refused(&error))?;
    if new.backing_file.is_some() || new.backing_format.is_some() {
        let text = "the base is named by its own argument, and its format by --backing-format";
        return Err(Failure::new(text));
    }
    if new.preallocation != Preallocation::Off {
        return Err(Failure::new("overlays that are made together cannot be preallocated"));
    }
    if let Some(chain) = chain {
        let above = overlays::new_overlay(chain)?;
        if args.backing_format.is_some() && args.backing_format != above.backing_format {
            return Err(Failure::new(
                "the formats of a chain in a store are those of its manifest: leave out --backing-format",
            ));
        }
        new.backing_file = above.backing_file;
        new.backing_format = above.backing_format;
        return Ok(new.index(false));
    }
    let base = in_headers(&args.base, names)?;
    let below = images().resolve(&names[0], &base);
    let format = args.backing_format.as_deref().unwrap_or("qcow2");
    is_of_kind(format, &below.to_string_lossy()).map_err(|error| refused(&error))?;
    new.backing_file = Some(base);
    new.backing_format = Some(format.to_owned());
    Ok(new)
}

/// The base's name as the overlays hold it: that of the file if all of them are in its directory, else with the path.
fn in_headers(base: &Path, names: &[PathBuf]) -> Result<String, Failure> {
    if let Some(text) = base.to_str().filter(|text| images().protocol_name(text)) {
        return Ok(text.to_owned());
    }
    let base =
        Naming::target(base).map_err(|error| Failure::new(error).context(base.display()))?.path;
    let directory = |name: &Path| {
        let parent = name.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        let found = parent.canonicalize();
        found.map_err(|error| {
            let cause = isobath_storage::cause(&error);
            Failure::new(format_args!("the directory '{}': {cause}", shown(parent)))
        })
    };
    let file = base.file_name().ok_or_else(|| {
        Failure::new(format_args!("'{}' is not the name of a file", shown(&base)))
    })?;
    let place = directory(&base)?;
    let mut beside = true;
    for name in names {
        beside &= directory(name)? == place;
    }
    let path = place.join(file);
    let name = if beside { Path::new(file) } else { &path };
    match name.to_str() {
        // In a header it would be a protocol's.
        Some(text) if beside && text.contains(':') => Ok(format!("./{text}")),
        Some(text) => Ok(text.to_owned()),
        None => Err(Failure::new(format_args!("the path of '{}' must be UTF-8", shown(&base)))),
    }
}
