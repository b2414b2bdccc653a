//! `isobath chain retain`

mod online;
mod policy;

use super::doomed::Doomed;
use super::merge::{Shared, chain_of, merge_away};
use super::note;
use super::unfinished::Unfinished;
use super::users::{Users, directories, each_file, header, identity};
use crate::failure::{Failure, Outcome};
use crate::host::{images, only_files};
use crate::options::printable;
use crate::{calendar, messages, runtime, size};
use isobath_disk::{Disk, ImageFormat, OpenOptions, Secrets};
use isobath_storage::word;
use policy::Policy;
use std::fmt::Write as _;
use std::fs::{self, File, FileTimes};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{iter, mem};

/// Remove the snapshots of a chain that a policy does not keep
///
/// Prints a plan; --apply carries it out. A snapshot is a layer below the active image: the disk as it was when the
/// layer's overlay was created. Removing one merges its layer into the next one above that is kept, or into the active
/// image, and deletes its file. The base always stays, and so does every layer that another image needs, with all
/// layers below it; such images are searched for in and below the directories of the chain and of --search. The command
/// can be interrupted at any time: the disk's contents do not change, and the next run continues.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Which snapshots to keep: AGE:FREQUENCY,... in order of increasing age, such as 24h:all,30d:daily,1y:monthly.
    /// Ages are in hours, days, weeks, months or years (h, d, w, m, y), or 'forever'; the last snapshot of each hour,
    /// day, week, month or year is kept. Snapshots older than the last age are removed
    #[arg(long, value_name = "POLICY")]
    keep: Option<Policy>,
    /// Keep this many of the newest snapshots, regardless of age
    #[arg(long, value_name = "N", default_value_t = 0)]
    keep_last: usize,
    /// Carry out the plan
    #[arg(long)]
    apply: bool,
    /// How to date a snapshot: by the birth of the overlay's file (or the layer's last write, where the file system
    /// records no birth time), or by the layer's last write
    #[arg(long, value_name = "WHAT", default_value = "birth")]
    times: Times,
    /// Another directory to search, with all directories below it, for images that need the layers; can be repeated
    #[arg(long, value_name = "DIR")]
    search: Vec<PathBuf>,
    /// QMP address of the server that has the chain open, a socket file or HOST:PORT; the server merges the layers
    #[arg(long, value_name = "SOCKET")]
    qmp: Option<String>,
    /// With --qmp: the disk's name [default: the disk with IMAGE, or the only one]
    #[arg(long, value_name = "NAME")]
    disk: Option<String>,
    #[command(flatten)]
    shared: Shared,
    /// The chain's active image; not needed with --qmp
    image: Option<PathBuf>,
}

/// Maximum number of layers merged at once. Each needs a file descriptor.
const MOST_AT_ONCE: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Times {
    /// Birth time
    Birth,
    /// Last write
    Modified,
}

/// What happens to a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Fate {
    /// It stays, for this reason.
    Stays(String),
    /// It is merged into the layer with this number.
    Merged(usize),
}

/// A layer of a [`Plan`], in which the base comes first.
struct Planned {
    file: PathBuf,
    /// When the snapshot was taken, in seconds since 1970; `None` for the active image.
    taken: Option<i64>,
    allocated: u64,
    fate: Fate,
}

struct Plan(Vec<Planned>);

/// Consecutive layers to merge into a layer above them.
struct Merge {
    layers: Range<usize>,
    target: usize,
}

impl Merge {
    /// Splits the merge into batches that are small enough to keep all files open, the highest layers first.
    fn batches(&self) -> impl Iterator<Item = Self> {
        let (mut end, first, target) = (self.layers.end, self.layers.start, self.target);
        iter::from_fn(move || {
            let start = end.saturating_sub(MOST_AT_ONCE).max(first);
            let layers = start..mem::replace(&mut end, start);
            (!layers.is_empty()).then_some(Self { layers, target })
        })
    }
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    if args.keep.is_none() && args.keep_last == 0 {
        return Err(Failure::usage("Must specify which snapshots to keep (--keep or --keep-last)"));
    }
    let (mut place, files) = match (&args.qmp, &args.image) {
        (Some(address), _) => {
            let served = online::Served::find(address, args.disk.as_deref(), out)?;
            let files = served.files()?;
            (Place::Server(Box::new(served)), files)
        }
        (None, Some(image)) => (Place::Here(out), files_of(image)?),
        (None, None) => return Err(Failure::usage("Expecting one image file name")),
    };
    let plan = Plan::make(args, &files)?;
    if !args.shared.quiet {
        place.print(&plan.describe())?;
    }
    if !args.apply {
        return Ok(0);
    }
    let mut whole = leftovers(&files, &args.search)?;
    for merge in plan.merges() {
        for batch in merge.batches() {
            let done = match &mut place {
                Place::Server(served) => {
                    let files = plan.fingerprints(&batch);
                    served.merge(batch.layers.start, batch.target, &args.shared)?;
                    let remove = plan.remove_merged(&batch, &files, &args.search);
                    runtime::block_on(async || remove.await)?
                }
                Place::Here(_) => {
                    runtime::block_on(async || Box::pin(plan.merge(&batch, args)).await)?
                }
            };
            whole &= done;
            if !done {
                break;
            }
        }
    }
    if matches!(place, Place::Here(_)) {
        plan.renew_index()?;
    }
    if !args.shared.quiet {
        let but = if whole { "" } else { ", except for files that stay" };
        place.print(&format!("The plan was carried out{but}.\n"))?;
    }
    Ok(u8::from(!whole))
}

/// Reports files of layers that a killed command may have merged but not deleted. Returns whether there are none.
fn leftovers(chain: &[PathBuf], search: &[PathBuf]) -> Result<bool, Failure> {
    let Some(active) = chain.last() else { return Ok(true) };
    let mut none = true;
    each_file(&directories(chain.iter().map(PathBuf::as_path), search), |file| {
        if !file.is_symlink() && Unfinished::of(file, chain).is_some() {
            none = false;
            let file = file.strip_prefix(".").unwrap_or(file);
            messages::complain(format_args!(
                "'{}' stays: a command that removed it from the chain was killed; 'isobath chain delete {} {}' deletes \
                 it",
                isobath_storage::shown(file),
                word(active),
                word(file)
            ));
        }
        Ok(())
    })?;
    Ok(none)
}

/// Who changes the chain.
enum Place<'a> {
    /// The server that uses it.
    Server(Box<online::Served<'a>>),
    /// This program, with its output.
    Here(&'a mut dyn Write),
}

impl Place<'_> {
    fn print(&mut self, text: &str) -> Result<(), Failure> {
        match self {
            Self::Server(served) => served.print(text),
            Self::Here(out) => Ok(out.write_all(text.as_bytes())?),
        }
    }
}

/// The files of a chain, the base first.
fn files_of(image: &Path) -> Result<Vec<PathBuf>, Failure> {
    only_files(image, "'chain retain'")?;
    let mut files = runtime::block_on(async || chain_of(image).await)?;
    for file in &files {
        only_files(file, "'chain retain'")?;
    }
    files.reverse();
    Ok(files)
}

fn unreadable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format_args!("'{}': {error}", path.display()))
}

fn since_1970(time: SystemTime) -> i64 {
    let signed = |time: Duration| i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    time.duration_since(UNIX_EPOCH).map_or_else(|before| -signed(before.duration()), signed)
}

impl Plan {
    /// Examines the files, and decides the fate of each layer.
    fn make(args: &Args, files: &[PathBuf]) -> Result<Self, Failure> {
        let active = files.len().saturating_sub(1);
        let users = Users::find(&directories(files.iter().map(PathBuf::as_path), &args.search))?;
        let mut needed = None;
        for (number, pair) in files.windows(2).enumerate() {
            let [layer, overlay] = pair else { continue };
            let id = |path: &Path| identity(path).map_err(|error| unreadable(path, &error));
            let own = id(overlay)?;
            let other = |user: &&PathBuf| identity(user).is_ok_and(|id| id != own);
            if let Some(user) = users.of(id(layer)?).iter().find(other) {
                needed = Some((number, user.clone()));
            }
        }
        let mut layers = Vec::new();
        let mut with_snapshots = Vec::new();
        for (number, file) in files.iter().enumerate() {
            use std::os::unix::fs::MetadataExt;
            let metadata = fs::metadata(file).map_err(|error| unreadable(file, &error))?;
            let taken = match files.get(number + 1) {
                None => None,
                Some(overlay) => {
                    let born = fs::metadata(overlay).and_then(|overlay| overlay.created());
                    let born = born.ok().filter(|_| args.times == Times::Birth);
                    let modified = metadata.modified().map_err(|error| unreadable(file, &error))?;
                    Some(since_1970(born.unwrap_or(modified)))
                }
            };
            with_snapshots.push(header(file)?.is_some_and(|header| header.nb_snapshots > 0));
            layers.push(Planned {
                file: file.clone(),
                taken,
                allocated: metadata.blocks() * 512,
                fate: Fate::Stays(String::new()),
            });
        }
        // The base is the state of the disk when the first overlay was created; it stays.
        let taken: Vec<i64> = layers.iter().skip(1).filter_map(|layer| layer.taken).collect();
        let policy = args.keep.clone().unwrap_or_default();
        let keeps = policy.keeps(&taken, since_1970(SystemTime::now()), args.keep_last);
        let mut target = active;
        for number in (0..layers.len()).rev() {
            let rule = number.checked_sub(1).and_then(|place| keeps.get(place)).cloned();
            let fate = match (&needed, rule) {
                (Some((last, user)), _) if number <= *last && number != active => {
                    let user = printable(&user.to_string_lossy());
                    let what = if number == *last { "it" } else { "a layer above" };
                    Fate::Stays(format!("stays: '{user}' needs {what}"))
                }
                _ if number == active => Fate::Stays("active image".into()),
                _ if number == 0 => Fate::Stays("base".into()),
                _ if with_snapshots.get(number) == Some(&true) => {
                    Fate::Stays("stays: it has internal snapshots".into())
                }
                (_, Some(Some(rule))) => Fate::Stays(format!("kept: {rule}")),
                _ if with_snapshots.get(target) == Some(&true) && !args.shared.change_snapshots => {
                    Fate::Stays("stays: internal snapshots of the layer above need it".into())
                }
                _ => Fate::Merged(target),
            };
            if matches!(fate, Fate::Stays(_)) {
                target = number;
            }
            if let Some(layer) = layers.get_mut(number) {
                layer.fate = fate;
            }
        }
        Ok(Self(layers))
    }

    /// The merges, the lowest ones first.
    fn merges(&self) -> Vec<Merge> {
        let mut merges: Vec<Merge> = Vec::new();
        for (number, layer) in self.0.iter().enumerate() {
            let Fate::Merged(target) = layer.fate else { continue };
            match merges.last_mut() {
                Some(merge) if merge.target == target => merge.layers.end = number + 1,
                _ => merges.push(Merge { layers: number..number + 1, target }),
            }
        }
        merges
    }

    fn file(&self, number: usize) -> &Path {
        self.0.get(number).map_or(Path::new(""), |layer| &layer.file)
    }

    /// The plan as a table of the layers.
    fn describe(&self) -> String {
        let mut text = format!("{:<20} {:>10}  {:<28} {}\n", "TAKEN", "ON DISK", "WHAT", "LAYER");
        for layer in self.0.iter().rev() {
            let what = match &layer.fate {
                Fate::Stays(why) => why.clone(),
                Fate::Merged(target) => {
                    let name = self.file(*target).file_name().unwrap_or_default();
                    format!("removed: merged into {}", name.display())
                }
            };
            let taken = layer.taken.map_or_else(|| "-".to_owned(), calendar::shown);
            let size = size::human(layer.allocated);
            let (what, file) = (printable(&what), printable(&layer.file.to_string_lossy()));
            let _ = writeln!(text, "{taken:<20} {size:>10}  {what:<28} {file}");
        }
        let removed = |layer: &&Planned| matches!(layer.fate, Fate::Merged(_));
        let count = self.0.iter().filter(removed).count();
        let bytes = self.0.iter().filter(removed).map(|layer| layer.allocated).sum();
        let _ = match count {
            0 => writeln!(text, "No layers to remove."),
            _ => writeln!(
                text,
                "{count} of {} layers to remove. Their files use {}; data that no layer above \
                 hides moves up.",
                self.0.len(),
                size::human(bytes)
            ),
        };
        text
    }

    /// Merges layers and deletes their files, unless another program uses one of them. Returns whether everything was
    /// done.
    async fn merge(&self, merge: &Merge, args: &Args) -> Result<bool, Failure> {
        let mut doomed = Vec::new();
        for number in merge.layers.clone() {
            match Doomed::lock(self.file(number)).await {
                Ok(locked) => doomed.push(locked),
                Err(used) => {
                    messages::complain(used.message.unwrap_or_default());
                    return Ok(false);
                }
            }
        }
        let to = self.file(merge.target);
        let before = fs::metadata(to).and_then(|metadata| metadata.modified());
        let merged = merge_away(doomed, ImageFormat::Qcow2, to, &args.shared).await?;
        if args.times == Times::Modified && merge.target + 1 < self.0.len() {
            // Restore the mtime, so that the next run sees the snapshot's true age. The image is still locked.
            let dated = before.and_then(|before| {
                let times = FileTimes::new().set_modified(before);
                File::options().write(true).open(to)?.set_times(times)
            });
            dated.map_err(|error| unreadable(to, &error))?;
        }
        let whole = self.delete(merge, merged.layers, &args.search)?;
        drop(merged.overlay);
        Ok(whole)
    }

    /// The [fingerprints](note::fingerprint) of the layers' files.
    fn fingerprints(&self, merge: &Merge) -> Vec<Option<String>> {
        let numbers = merge.layers.clone();
        numbers.map(|number| note::fingerprint(self.file(number)).ok()).collect()
    }

    /// Deletes the files of layers that a server has merged, if they are unchanged.
    async fn remove_merged(
        &self,
        merge: &Merge,
        before: &[Option<String>],
        search: &[PathBuf],
    ) -> Result<bool, Failure> {
        let mut locked = Vec::new();
        for (number, before) in merge.layers.clone().zip(before) {
            let file = self.file(number);
            let one = Doomed::lock(file).await;
            let same = before.is_some() && *before == note::fingerprint(file).ok();
            locked.push(if same || one.is_err() {
                one
            } else {
                Err(Failure::new(format_args!(
                    "'{}' stays: another program has changed it",
                    file.display()
                )))
            });
        }
        self.delete(merge, locked, search)
    }

    /// Deletes the locked files of merged layers. A file that is in use, or that an image newer than the plan needs, is
    /// kept, and so are the files below it. Returns whether all files were deleted.
    fn delete(
        &self,
        merge: &Merge,
        locked: Vec<Result<Doomed, Failure>>,
        search: &[PathBuf],
    ) -> Result<bool, Failure> {
        let files = self.0.iter().map(|layer| layer.file.as_path());
        let users = Users::find(&directories(files, search))?;
        // From the top down, so that the files below a kept one are kept too.
        for (number, doomed) in merge.layers.clone().zip(locked).rev() {
            let overlay = (number + 1 < merge.target).then(|| self.file(number + 1));
            let own = overlay.and_then(|overlay| identity(overlay).ok());
            match doomed.and_then(|doomed| doomed.delete(&users, own)) {
                Ok(None) => continue,
                Ok(Some(user)) => {
                    let stay = merge.layers.start..=number;
                    stay.for_each(|number| note::forget(self.file(number)));
                    let (file, user) = (self.file(number).display(), user.display());
                    messages::complain(format_args!("'{file}' stays: '{user}' needs it"));
                }
                Err(kept) => messages::complain(kept.message.unwrap_or_default()),
            }
            return Ok(false);
        }
        Ok(true)
    }

    /// Rewrites the active image's index, if it has one, since it describes layers that are gone.
    fn renew_index(&self) -> Result<(), Failure> {
        let Some(active) = self.0.last() else { return Ok(()) };
        runtime::block_on(async || {
            let options = OpenOptions::new().writable(true).heads(false);
            let options = options.secrets(Secrets::unneeded());
            let disk = Disk::open(images().clone(), &active.file, &options).await?;
            let qcow2 = disk.layers().next().and_then(|layer| layer.header());
            let indexed = qcow2.is_some_and(|header| header.index().is_some());
            if indexed && disk.depth() > 1 {
                Box::pin(disk.write_index(|_| {})).await?;
            }
            Ok(disk.close().await?)
        })
    }
}
