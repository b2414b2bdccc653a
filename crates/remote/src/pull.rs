//! Makes a chain of files again.

use crate::checksums::{Checksums, Part};
use crate::digest::{BLOCK, Digest, Hasher, unique};
use crate::error::{Error, Result, shown};
use crate::heads::{Head, Heads, MOST_HEADER};
use crate::keys;
use crate::local::{open_file, rename_new};
use crate::manifest::{Format, Layer, MAX_MANIFEST, Manifest, is_file};
use crate::progress::Progress;
use crate::recorded::{self, Comparison};
use crate::store::Store;
use crate::work;
use isobath_qcow2::Header;
use isobath_qcow2::text::Shown;
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Layers that are fetched at once, and pieces of each.
const LAYERS_AT_ONCE: usize = 4;
const PIECES_AT_ONCE: usize = 4;

/// Bytes that are fetched with one request: whole blocks.
const PIECE: u64 = 16 * BLOCK;

/// What the name of a file begins with that is not whole.
const TEMPORARY: &str = ".isobath-pull-";

/// Where the files go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The directory of all of them.
    pub directory: PathBuf,
    /// The name of the top layer's file; `None` gives it the name that it had.
    pub name: Option<String>,
}

/// Which names the files below the top get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Names {
    /// Those in the headers of the layers above, which must not have a directory; all files are as they were pushed.
    #[default]
    Kept,
    /// The names that the files had. The headers above are changed to name them.
    Rebased,
}

/// What a pull did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pulled {
    /// The top layer's file.
    pub image: PathBuf,
    /// Layers of the chain.
    pub layers: usize,
    /// Layers that were fetched; the others were there.
    pub fetched: usize,
    /// Bytes of these.
    pub bytes: u64,
}

/// A file to be made.
struct Wanted<'m> {
    layer: &'m Layer,
    name: String,
    /// The file below, if it goes into the header.
    rebased: Option<Below>,
}

/// A file below: its name and its format.
struct Below {
    name: String,
    format: Format,
}

/// Makes a chain's files, from the base to the top. A file appears under its name when it is whole, matches its digest
/// and is durable. One that is there already and matches is kept; none is replaced.
///
/// # Errors
/// There is no such chain, or it is damaged; the files cannot have the names; another file has one of them; those of
/// the store and of files.
pub fn pull(
    store: &dyn Store,
    name: &str,
    target: &Target,
    names: Names,
    progress: &Progress,
) -> Result<Pulled> {
    let manifest = manifest(store, name)?;
    let wanted = wanted(&manifest, target, names)?;
    let heads = match names {
        Names::Kept => None,
        Names::Rebased => Some(heads(store, &manifest)?),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(&target.directory, flags, Mode::empty());
    let directory =
        directory.map_err(|error| Error::local("open the directory", &target.directory, error))?;
    let files = Files { path: &target.directory, directory, progress };
    files.sweep()?;
    for one in &wanted {
        progress.expect(one.layer.length);
        // What cannot be made is found before anything is fetched.
        let there = open_file(&files.directory, Path::new(&one.name));
        let there = there.map_err(|error| files.failed("open", &one.name, error))?;
        if let Some(file) = there {
            let length =
                file.metadata().map_err(|error| files.failed("examine", &one.name, error))?.len();
            if one.rebased.is_none() && length != one.layer.length {
                return Err(files.is_another(&one.name));
            }
        }
    }
    let fetched = |number: usize| {
        let Some(one) = wanted.get(number) else { unreachable!("each number is that of a layer") };
        let head = heads.as_ref().and_then(|heads| heads.layers().get(number));
        make(store, &files, one, head)
    };
    // Whoever sees the top sees all of the chain.
    let top = wanted.len() - 1;
    let mut done = work::each(top, LAYERS_AT_ONCE, fetched)?;
    done.push(fetched(top)?);
    let bytes =
        wanted.iter().zip(&done).filter(|(_, done)| **done).map(|(one, _)| one.layer.length);
    let image = wanted.last().map(|top| target.directory.join(&top.name)).unwrap_or_default();
    Ok(Pulled {
        image,
        layers: wanted.len(),
        fetched: done.iter().filter(|done| **done).count(),
        bytes: bytes.sum(),
    })
}

/// A chain's manifest.
pub(crate) fn manifest(store: &dyn Store, name: &str) -> Result<Manifest> {
    let Some((bytes, _)) = store.get(&keys::manifest(name), MAX_MANIFEST)? else {
        return Err(Error::refused(format_args!("the store has no chain '{name}'")));
    };
    Manifest::decode(name, &bytes)
}

/// The heads of a chain's layers.
pub(crate) fn heads(store: &dyn Store, manifest: &Manifest) -> Result<Heads> {
    let object = &manifest.heads;
    let bytes = digested(store, &keys::heads(&object.digest), object.length, &object.digest)?;
    Heads::decode(&bytes, manifest.layers.len())
}

/// An object in one piece, which must match its digest. It takes no more memory than is there of it.
fn digested(store: &dyn Store, key: &str, length: u64, digest: &Digest) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < length {
        let at = bytes.len() as u64;
        bytes.extend_from_slice(&store.read(key, at, PIECE.min(length - at) as usize)?);
    }
    if Digest::of(&bytes) == *digest { Ok(bytes) } else { Err(Error::mismatch(key)) }
}

/// The name of each layer's file.
fn wanted<'m>(manifest: &'m Manifest, target: &Target, names: Names) -> Result<Vec<Wanted<'m>>> {
    let mut wanted: Vec<Wanted<'m>> = Vec::new();
    let mut taken: HashMap<String, usize> = HashMap::new();
    let top = manifest.layers.len() - 1;
    let of_top = match (&target.name, manifest.layers.last()) {
        (Some(name), _) => name.clone(),
        (None, Some(layer)) => layer.file.clone(),
        (None, None) => String::new(),
    };
    for (number, layer) in manifest.layers.iter().enumerate() {
        let above = manifest.layers.get(number + 1).and_then(|above| above.backing.as_ref());
        let name = match (above, names) {
            _ if number == top => of_top.clone(),
            (Some(name), Names::Kept) => {
                if !is_plain(name) {
                    return Err(Error::refused(format_args!(
                        "layer {number} is '{}' to the layer above, which is not the name of a file in the same \
                         directory: with --rebase-names the layers get the names of their files",
                        Shown(name)
                    )));
                }
                name.clone()
            }
            _ if taken.contains_key(&layer.file)
                || layer.file == of_top
                || !is_plain(&layer.file) =>
            {
                format!(
                    "layer-{number}-{}",
                    Digest::of(layer.digest.to_string().as_bytes())
                        .to_string()
                        .get(..8)
                        .unwrap_or_default()
                )
            }
            _ => layer.file.clone(),
        };
        // The user may give the image any name.
        let given = number == top && target.name.is_some();
        if !is_file(&name) || name.starts_with(TEMPORARY) || (!given && name.starts_with('.')) {
            return Err(Error::refused(format_args!(
                "the file of layer {number} cannot have the name '{}'; give another with IMAGE",
                Shown(&name)
            )));
        }
        if let Some(other) = taken.insert(name.clone(), number) {
            return Err(Error::refused(format_args!(
                "the layers {other} and {number} would both be '{}': give the image another name with IMAGE, or use \
                 --rebase-names",
                Shown(&name)
            )));
        }
        let below = wanted.last().filter(|_| names == Names::Rebased);
        let below =
            below.map(|below| Below { name: below.name.clone(), format: below.layer.format });
        let rebased = below.filter(|below| layer.backing.as_ref() != Some(&below.name));
        wanted.push(Wanted { layer, name, rebased });
    }
    Ok(wanted)
}

/// Whether a name that a store gives is that of a file in the directory of the image, and nothing else to any program:
/// nor one that is hidden, as the files are that shells and other programs read.
fn is_plain(name: &str) -> bool {
    is_file(name) && !name.contains(':') && !name.starts_with('.')
}

/// The directory, and what is done there.
struct Files<'t> {
    path: &'t Path,
    directory: OwnedFd,
    progress: &'t Progress,
}

impl Files<'_> {
    fn failed(&self, what: &str, name: &str, error: impl std::fmt::Display) -> Error {
        Error::local(what, &self.path.join(name), error)
    }

    fn is_another(&self, name: &str) -> Error {
        Error::refused(format_args!(
            "'{}' exists, and is not the layer that it would become: it was left as it is; pull into another \
             directory, or move it away",
            shown(&self.path.join(name))
        ))
    }

    /// Removes what pulls left that were killed: files that nobody has locked.
    fn sweep(&self) -> Result<()> {
        let entries = rustix::fs::Dir::read_from(&self.directory);
        for entry in entries.map_err(|error| self.failed("read the directory", ".", error))? {
            let entry = entry.map_err(|error| self.failed("read the directory", ".", error))?;
            let Some(name) =
                entry.file_name().to_str().ok().filter(|name| name.starts_with(TEMPORARY))
            else {
                continue;
            };
            // One that cannot be opened is not ours.
            let Ok(Some(file)) = open_file(&self.directory, Path::new(name)) else { continue };
            if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
                // Somebody else may have removed it.
                let _ = rustix::fs::unlinkat(&self.directory, name, AtFlags::empty());
            }
        }
        Ok(())
    }

    /// A new file without a final name, which is locked.
    fn temporary(&self) -> Result<Temporary<'_>> {
        loop {
            let name = format!("{TEMPORARY}{}", unique()?);
            let flags =
                OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file =
                rustix::fs::openat(&self.directory, &*name, flags, Mode::from_raw_mode(0o666));
            let file = File::from(file.map_err(|error| self.failed("create", &name, error))?);
            let temporary = Temporary { files: self, name, file, kept: false };
            let locked =
                rustix::fs::flock(&temporary.file, FlockOperation::NonBlockingLockExclusive);
            // Another pull may have taken it for one that was left, before it was locked.
            let links = temporary.file.metadata().map(|metadata| metadata.nlink());
            match (locked, links) {
                (Ok(()), Ok(1..)) => return Ok(temporary),
                (Ok(()) | Err(Errno::WOULDBLOCK), _) => {}
                (Err(error), _) => return Err(self.failed("lock", &temporary.name, error)),
            }
        }
    }
}

/// A file that is not whole.
struct Temporary<'f> {
    files: &'f Files<'f>,
    name: String,
    file: File,
    kept: bool,
}

impl Temporary<'_> {
    /// Gives it its name, when it is durable.
    fn keep(mut self, name: &str) -> Result<()> {
        let files = self.files;
        self.file.sync_all().map_err(|error| files.failed("flush", name, error))?;
        match rename_new(&files.directory, Path::new(&self.name), Path::new(name)) {
            Ok(()) => self.kept = true,
            Err(Errno::EXIST) => return Err(files.is_another(name)),
            Err(error) => return Err(files.failed("create", name, error)),
        }
        rustix::fs::fsync(&files.directory)
            .map_err(|error| files.failed("flush the directory of", name, error))
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        if !self.kept {
            // The next pull removes what stays.
            let _ = rustix::fs::unlinkat(&self.files.directory, &*self.name, AtFlags::empty());
        }
    }
}

/// Makes one file; `false` if it was there.
fn make(
    store: &dyn Store,
    files: &Files<'_>,
    one: &Wanted<'_>,
    head: Option<&Head>,
) -> Result<bool> {
    files.progress.check()?;
    let there = open_file(&files.directory, Path::new(&one.name));
    if let Some(file) = there.map_err(|error| files.failed("open", &one.name, error))? {
        if !is_layer(files, file, one, head)? {
            return Err(files.is_another(&one.name));
        }
        files.progress.add(one.layer.length);
        return Ok(false);
    }
    let temporary = files.temporary()?;
    fetch(store, files, one, &temporary.file)?;
    describes(one, &temporary.file).map_err(|error| error.of(&files.path.join(&one.name)))?;
    if let Some(head) = head {
        matches_head(files, one, head, &temporary.file)?;
    }
    if let Some(below) = &one.rebased {
        rebase(files, one, below, &temporary.file)?;
    }
    temporary.keep(&one.name)?;
    Ok(true)
}

/// Fetches a layer into a file.
fn fetch(store: &dyn Store, files: &Files<'_>, one: &Wanted<'_>, file: &File) -> Result<()> {
    let Layer { digest, length, .. } = one.layer;
    let key = keys::layer(digest);
    match store.head(&key)? {
        None => return Err(Error::missing(&key)),
        Some(found) if found.length != *length => return Err(Error::mismatch(&key)),
        Some(_) => {}
    }
    file.set_len(*length).map_err(|error| files.failed("write", &one.name, error))?;
    let mut checksums = Checksums::of(store, one.layer);
    let mut hasher = Hasher::default();
    while let Some(part) = checksums.next()? {
        fetch_part(store, files, one, &part, file, &mut hasher)?;
    }
    if hasher.finish() == *digest { Ok(()) } else { Err(Error::mismatch(&key)) }
}

/// Fetches a part of a layer.
fn fetch_part(
    store: &dyn Store,
    files: &Files<'_>,
    one: &Wanted<'_>,
    part: &Part,
    file: &File,
    hasher: &mut Hasher,
) -> Result<()> {
    let key = keys::layer(&one.layer.digest);
    let mut first = part.range.start;
    while first < part.range.end {
        let count = (part.range.end - first).div_ceil(PIECE).min(PIECES_AT_ONCE as u64);
        let fetched = work::each(count as usize, PIECES_AT_ONCE, |number| {
            files.progress.check()?;
            let at = first + number as u64 * PIECE;
            let size = PIECE.min(part.range.end - at) as usize;
            let bytes = store.read(&key, at, size)?;
            if part.mismatch(at, &bytes).is_none() {
                return Ok(bytes);
            }
            // It may have been damaged on its way.
            let bytes = store.read(&key, at, size)?;
            match part.mismatch(at, &bytes) {
                None => Ok(bytes),
                Some(at) => Err(Error::damaged(format_args!(
                    "'{key}' in the store does not match '{}' at byte {at}: see with 'isobath remote verify' which of \
                     them is damaged, remove it, and push the chain again from where it is whole",
                    keys::table(&one.layer.table)
                ))),
            }
        })?;
        for bytes in fetched {
            hasher.update(&bytes);
            for (block, at) in bytes.chunks(BLOCK as usize).zip((first..).step_by(BLOCK as usize)) {
                // What is zero stays a hole.
                if block.iter().any(|byte| *byte != 0) {
                    let written = file.write_all_at(block, at);
                    written.map_err(|error| files.failed("write", &one.name, error))?;
                }
            }
            files.progress.add(bytes.len() as u64);
            first += bytes.len() as u64;
        }
    }
    Ok(())
}

/// As many of a file's first bytes as the longest header cluster, or all of one that is shorter.
fn start(file: &File) -> std::io::Result<Vec<u8>> {
    let length = file.metadata()?.len();
    let mut start = vec![0; length.min(Header::MAX_LENGTH as u64) as usize];
    file.read_exact_at(&mut start, 0)?;
    Ok(start)
}

/// The header cluster of a file, or all of one that is shorter.
fn cluster(file: &File) -> std::io::Result<Vec<u8>> {
    let mut start = start(file)?;
    if let Ok(used) = Header::probe_length(&start) {
        start.truncate(used);
    }
    Ok(start)
}

/// Compares what a file's header says with what the manifest says of it.
fn describes(one: &Wanted<'_>, file: &File) -> Result<()> {
    let layer = one.layer;
    let lies = |what: &str| {
        Error::damaged(format_args!(
            "the manifest says of this layer another {what} than its header"
        ))
    };
    if layer.format == Format::Raw {
        return if layer.size == layer.length.next_multiple_of(512) {
            Ok(())
        } else {
            Err(lies("size"))
        };
    }
    let cluster =
        cluster(file).map_err(|error| Error::local("read", Path::new(&one.name), error))?;
    let header = Header::parse(&cluster).map_err(Error::damaged)?;
    if header.disk_size() != layer.size {
        return Err(lies("size"));
    }
    if header.backing_file != layer.backing {
        return Err(lies("backing file"));
    }
    if header.backing_format().filter(|_| header.backing_file.is_some())
        != layer.backing_format.as_deref()
    {
        return Err(lies("format of the backing file"));
    }
    if header.data_file().is_some() {
        return Err(Error::damaged(
            "this layer has an external data file, which no layer in a store has",
        ));
    }
    Ok(())
}

/// Compares what the heads have of a layer with its file.
fn matches_head(files: &Files<'_>, one: &Wanted<'_>, head: &Head, file: &File) -> Result<()> {
    let Layer { digest, length, format, .. } = one.layer;
    let failed = |error| files.failed("read", &one.name, error);
    let start = start(file).map_err(failed)?;
    let mut compared = Comparison::new(head, *format, *length, &start);
    let place = compared.l1();
    let mut table = vec![0; (place.end - place.start) as usize];
    file.read_exact_at(&mut table, place.start).map_err(failed)?;
    compared.show(place.start, &table);
    if compared.differs() {
        return Err(Error::damaged(recorded::differ(digest)));
    }
    Ok(())
}

/// The writes that make a header name the file below.
fn edits(one: &Wanted<'_>, below: &Below, cluster: &[u8]) -> Result<Vec<(usize, Vec<u8>)>> {
    let writes = Header::edit_backing(cluster, Some((&below.name, below.format.name())));
    writes.map_err(|error| {
        Error::refused(format_args!(
            "layer '{}' cannot name '{}': {error}",
            Shown(&one.name),
            Shown(&below.name)
        ))
    })
}

fn rebase(files: &Files<'_>, one: &Wanted<'_>, below: &Below, file: &File) -> Result<()> {
    let cluster = cluster(file).map_err(|error| files.failed("read", &one.name, error))?;
    for (at, bytes) in edits(one, below, &cluster)? {
        file.write_all_at(&bytes, at as u64)
            .map_err(|error| files.failed("write", &one.name, error))?;
    }
    Ok(())
}

/// Whether a file is what a pull would make. Of one with another backing file in its header, the header that was pushed
/// is in the heads: with it the file must match the digest, and with the name changed it must be the file's.
fn is_layer(
    files: &Files<'_>,
    mut file: File,
    one: &Wanted<'_>,
    head: Option<&Head>,
) -> Result<bool> {
    let failed = |error| files.failed("read", &one.name, error);
    let length = file.metadata().map_err(failed)?.len();
    if length != one.layer.length {
        return Ok(false);
    }
    let mut start = Vec::new();
    if let Some(below) = &one.rebased {
        let now = cluster(&file).map_err(failed)?;
        // What is recorded of a short cluster may go on behind it.
        let fits = |head: &&Head| {
            !head.header.is_empty() && head.header.len() <= now.len().max(MOST_HEADER)
        };
        let Some(head) = head.filter(fits) else { return Ok(false) };
        start.clone_from(&head.header);
        start.resize(now.len(), 0);
        let mut changed = start.clone();
        for (at, bytes) in edits(one, below, &start)? {
            let Some(place) = at.checked_add(bytes.len()).and_then(|end| changed.get_mut(at..end))
            else {
                return Ok(false);
            };
            place.copy_from_slice(&bytes);
        }
        if changed != now {
            return Ok(false);
        }
    }
    let mut hasher = Hasher::default();
    hasher.update(&start);
    file.seek(std::io::SeekFrom::Start(start.len() as u64)).map_err(failed)?;
    let mut buffer = vec![0; PIECE as usize];
    loop {
        files.progress.check()?;
        match file.read(&mut buffer).map_err(failed)? {
            0 => return Ok(hasher.finish() == one.layer.digest),
            read => hasher.update(buffer.get(..read).unwrap_or_default()),
        }
    }
}
