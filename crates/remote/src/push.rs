//! Puts a chain into a store.

use crate::digest::{BLOCK, Digest, Hasher, Table, unique};
use crate::error::{Error, Result, shown};
use crate::heads::{Head, Heads, IndexHead, L1Room, MAX_LAYERS, MOST_INDEX, MOST_ROOT};
use crate::keys;
use crate::manifest::{
    Format, HeadsObject, IndexObject, Layer, MAX_MANIFEST, Manifest, TraceObject, fits,
};
use crate::progress::Progress;
use crate::recorded;
use crate::store::{Outcome, Parts, Store, Version};
use crate::work::{self, Room};
use isobath_qcow2::{Header, IncompatibleFeatures};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Layers that are read or sent at once, and parts of each.
const LAYERS_AT_ONCE: usize = 4;
const PARTS_AT_ONCE: usize = 4;

/// Bytes that are read at once: whole blocks.
const PIECE: u64 = 4 * BLOCK;

/// A layer of up to so many bytes is sent as one object, without being read again.
const SMALL: u64 = 4 << 20;

/// Bytes that are sent with one request.
const MOST_AT_ONCE: usize = 8 << 20;

/// Most bytes of parts that are read or sent at once, of all layers. A part that is longer is sent alone. Fewer parts
/// at once get through sooner where the network is slow.
const IN_FLIGHT: u64 = 64 << 20;

/// How often a push says that it is still there.
const RENEWAL: Duration = Duration::from_mins(10);

/// How often a push begins again whose note was removed.
pub(crate) const ROUNDS: usize = 3;

/// A layer on this machine. Nobody changes it while it is pushed: its image lock is held.
#[derive(Debug)]
pub struct LocalLayer {
    /// Its file's name.
    pub path: PathBuf,
    /// The file, open for reading.
    pub file: File,
    /// Its format.
    pub format: Format,
}

/// An index of all layers, whose files nobody has changed since it was made.
#[derive(Clone, Debug)]
pub struct Index {
    /// Its root, at most 1 MiB.
    pub root: Vec<u8>,
    /// The segments and pages, at most 256 MiB.
    pub bytes: Vec<u8>,
}

/// Which manifest may be replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replace {
    /// The one that was there when the push began.
    #[default]
    Unchanged,
    /// Any, also one that cannot be read, and in stores that have no conditional puts.
    Any,
}

/// What a push did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pushed {
    /// Layers of the chain.
    pub layers: usize,
    /// Layers that were sent.
    pub sent: usize,
    /// Bytes of these.
    pub bytes: u64,
}

/// What is sent and known of a layer.
struct Prepared {
    layer: Layer,
    /// The header without zeroes at its end, if it is recorded.
    header: Vec<u8>,
    l1: Option<Range<u64>>,
    /// The checksums of its blocks.
    table: Vec<u8>,
    sent: bool,
}

/// Puts a chain into a store under a name: every layer that is not there yet, and then the manifest. `layers` are from
/// the base to the top. An index that is longer than it may be, or has no bytes, is left out.
///
/// # Errors
/// A layer cannot be pushed as it is; the store fails; somebody else pushes to the name or collects objects at the same
/// time. Whatever fails, the store has the old manifest or the new one, and everything that it names.
pub fn push(
    store: &dyn Store,
    name: &str,
    layers: &[LocalLayer],
    index: Option<&Index>,
    replace: Replace,
    progress: &Progress,
) -> Result<Pushed> {
    check_layers(layers, TopIs::Closed)?;
    for layer in layers {
        progress.expect(length(layer)?);
    }
    let was = replaceable(store, name, replace)?;
    let mut sent = Pushed { layers: layers.len(), ..Pushed::default() };
    let fits = |index: &&Index| {
        let (root, bytes) = (index.root.len(), index.bytes.len() as u64);
        (1..=MOST_ROOT).contains(&root) && (1..=MOST_INDEX).contains(&bytes)
    };
    let index = index.filter(fits);
    let push =
        Push { store, name, layers, index, replace, was, room: Room::new(IN_FLIGHT), progress };
    noted(store, name, |note, done| push.round(note, &mut sent, done)).map(|()| sent)
}

/// Whether the top of a chain is closed, or in use until it is pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopIs {
    /// Nobody writes to it.
    Closed,
    /// A server writes to it, and closes it before it is pushed.
    InUse,
}

/// Fails if layers cannot be pushed, from the base to the top.
///
/// # Errors
/// One of them is not as it must be, or cannot be read.
pub fn check_layers(layers: &[LocalLayer], top: TopIs) -> Result<()> {
    if layers.is_empty() || layers.len() > MAX_LAYERS {
        return Err(Error::refused(format_args!(
            "the chain has {} layers, and 1 to {MAX_LAYERS} can be pushed",
            layers.len()
        )));
    }
    for (number, layer) in layers.iter().enumerate() {
        let is_open = top == TopIs::InUse && number + 1 == layers.len();
        describe(layer, length(layer)?, below(layers, number), is_open)?;
    }
    Ok(())
}

/// Fails if a push to this name could not begin now. Leaves nothing in the store.
///
/// # Errors
/// What has the name is not to be replaced; the store takes nothing, or cannot replace an object only if it is
/// unchanged, where that is needed; somebody collects objects; those of the store.
pub fn may_push(store: &dyn Store, name: &str, replace: Replace) -> Result<()> {
    let was = replaceable(store, name, replace)?;
    let note = Note::put(store)?;
    // The condition that the push will use.
    let takes_conditions = || {
        if was.is_none() {
            let other = Note::new(store)?;
            let outcome = store.put_if(&other.key, NOTE, None);
            // Also after an error: it may have been put.
            other.remove();
            return Ok(outcome? != Outcome::Unsupported);
        }
        let Some((_, version)) = store.get(&note.key, NOTE.len() as u64)? else { return Ok(true) };
        let outcome = store.put_if(&note.key, NOTE, Some(&version))?;
        Ok(outcome != Outcome::Unsupported)
    };
    let taken = if replace == Replace::Any { Ok(true) } else { takes_conditions() };
    note.remove();
    if taken? { Ok(()) } else { Err(unconditional(name)) }
}

/// The refusal to replace a manifest in a store without conditional puts.
fn unconditional(name: &str) -> Error {
    Error::refused(format_args!(
        "this store cannot replace an object only if it is unchanged, so that another push to '{name}' could be lost: \
         if there is none, use --overwrite"
    ))
}

/// The manifest that a push to this name replaces, if there is one.
fn replaceable(
    store: &dyn Store,
    name: &str,
    replace: Replace,
) -> Result<Option<(Vec<u8>, Version)>> {
    let was = match store.get(&keys::manifest(name), MAX_MANIFEST) {
        Ok(was) => was,
        Err(Error::Damaged(_)) if replace == Replace::Any => None,
        Err(error) => return Err(error),
    };
    if let Some((bytes, _)) = was.as_ref().filter(|_| replace == Replace::Unchanged) {
        let known = Manifest::decode(name, bytes);
        known.map_err(|error| Error::damaged(format_args!("{error}; --overwrite replaces it")))?;
    }
    Ok(was)
}

fn nobody_collects(store: &dyn Store) -> Result<()> {
    if store.head(keys::COLLECTOR)?.is_none() {
        return Ok(());
    }
    Err(Error::Conflict(
        "'isobath remote gc' is at work in this store: try again when it has ended; if it was killed, run it once more \
         with --break-lock"
            .to_owned(),
    ))
}

/// Puts what a manifest is to name, and then the manifest, while a note tells that nothing may be collected.
pub(crate) fn noted<'s>(
    store: &'s dyn Store,
    name: &str,
    mut round: impl FnMut(&Note<'s>, &mut Manifests) -> Result<()>,
) -> Result<()> {
    let mut done = Manifests::default();
    for _ in 0..ROUNDS {
        let note = Note::put(store).map_err(|error| done.told(name, error))?;
        // As long as the note is there after the manifest, nobody has collected what the manifest names.
        let stays = round(&note, &mut done).and_then(|()| note.is_there());
        match stays {
            Ok(true) => {
                note.remove();
                return Ok(());
            }
            Ok(false) => {}
            Err(error) => {
                note.remove();
                return Err(done.told(name, error));
            }
        }
    }
    Err(Error::Conflict(format!(
        "'isobath remote gc' has removed the note of this command {ROUNDS} times, as that of a push that was killed: \
         try again when no gc runs, and give that a longer --grace"
    )))
}

/// What became of the manifest in the rounds so far.
#[derive(Default)]
pub(crate) struct Manifests {
    /// The put of one has begun.
    begun: bool,
    /// The one that was put last.
    last: Option<Vec<u8>>,
}

impl Manifests {
    /// An error that ends the push, which says so if the chain is perhaps no longer what it was.
    fn told(&self, name: &str, error: Error) -> Error {
        let how = format!(
            "the manifest of '{name}' was being put, so that the chain there is the old one or the new one: try \
             again, or see with 'isobath remote verify'"
        );
        match error {
            Error::Interrupted | Error::Unsettled(_) if self.begun => Error::Unsettled(how),
            error if self.begun => error.and(how),
            error => error,
        }
    }

    /// Whether this one was put last.
    fn is_last(&self, manifest: &[u8]) -> bool {
        self.last.as_deref() == Some(manifest)
    }

    /// Puts a manifest in the place of the one that was there, and notes what became of it.
    pub(crate) fn put(
        &mut self,
        store: &dyn Store,
        name: &str,
        manifest: &[u8],
        was: Option<&(Vec<u8>, Version)>,
        replace: Replace,
    ) -> Result<()> {
        if was.is_some_and(|(bytes, _)| *bytes == manifest) {
            return Ok(());
        }
        let begun_before = std::mem::replace(&mut self.begun, true);
        let version = was.map(|(_, version)| version);
        if let Err(error) = put_manifest(store, name, manifest, version, replace) {
            let known = matches!(error, Error::Refused(_) | Error::Conflict(_) | Error::Store(_));
            self.begun = begun_before || !known;
            return Err(error);
        }
        self.last = Some(manifest.to_vec());
        Ok(())
    }
}

/// A push at work: what all of its threads share, in every round.
struct Push<'p> {
    store: &'p dyn Store,
    /// The chain's name in the store.
    name: &'p str,
    /// From the base to the top.
    layers: &'p [LocalLayer],
    index: Option<&'p Index>,
    replace: Replace,
    /// The manifest that may be replaced.
    was: Option<(Vec<u8>, Version)>,
    /// For the parts of large layers.
    room: Room,
    progress: &'p Progress,
}

impl Push<'_> {
    /// Puts everything that is not there, and the manifest.
    fn round(&self, note: &Note<'_>, sent: &mut Pushed, done: &mut Manifests) -> Result<()> {
        let prepared = work::each(self.layers.len(), LAYERS_AT_ONCE, |number| {
            let Some(local) = self.layers.get(number) else {
                unreachable!("each number is that of a layer")
            };
            self.put_layer(local, number, note).map_err(|error| error.of(&local.path))
        })?;
        sent.sent += prepared.iter().filter(|layer| layer.sent).count();
        let bytes = prepared.iter().filter(|one| one.sent).map(|one| one.layer.length);
        sent.bytes = bytes.fold(sent.bytes, u64::saturating_add);
        self.finish(prepared, done)
    }

    /// Puts a layer that is not there, with its table.
    fn put_layer(&self, local: &LocalLayer, number: usize, note: &Note<'_>) -> Result<Prepared> {
        let Self { store, progress, .. } = *self;
        let length = length(local)?;
        let (mut hasher, mut table, mut whole) = (Hasher::default(), Table::new(), Vec::new());
        let mut at = 0;
        while at < length {
            progress.wait_for(PIECE.min(length - at), || note.renew())?;
            let piece = read(local, at, PIECE.min(length - at))?;
            hasher.update(&piece);
            table.extend(&piece);
            at += piece.len() as u64;
            if length <= SMALL {
                whole.extend_from_slice(&piece);
            }
        }
        let (digest, table_digest) = (hasher.finish(), Digest::of(table.bytes()));
        let Described { size, backing, backing_format, header, l1 } =
            describe(local, length, below(self.layers, number), false)?;
        let file = local.path.file_name().map(|name| name.to_string_lossy().into_owned());
        let file = file.unwrap_or_else(|| format!("layer-{number}"));
        let (format, table_of) = (local.format, table_digest);
        let layer =
            Layer { digest, length, format, size, file, backing, backing_format, table: table_of };
        let key = keys::layer(&digest);
        let sent = if length <= SMALL {
            note.renew()?;
            put_unless_there(store, &key, &whole)?
        } else {
            let found = store.head(&key)?.is_some_and(|found| found.length == length);
            if !found {
                self.send(local, (&key, length), &table, note)?;
            }
            !found
        };
        put_unless_there(store, &keys::table(&table_digest), table.bytes())?;
        if length <= SMALL || !sent {
            progress.add(length);
        }
        Ok(Prepared { layer, header, l1, table: table.into_bytes(), sent })
    }

    /// Sends a layer in parts, to this key, of as many bytes as were hashed. Each part is compared with the table, so
    /// that what arrives is what was hashed.
    fn send(
        &self,
        local: &LocalLayer,
        (key, length): (&str, u64),
        table: &Table,
        note: &Note<'_>,
    ) -> Result<()> {
        let parts = self.store.begin(key, length)?;
        let size = parts.size();
        let count = length.div_ceil(size) as usize;
        let done = work::each(count, PARTS_AT_ONCE, |number| {
            let at = number as u64 * size;
            let _taken = self.room.take(size.min(length - at));
            self.progress.wait_for(size.min(length - at), || note.renew())?;
            let bytes = read(local, at, size.min(length - at))?;
            if table.mismatch(at / BLOCK, &bytes).is_some() {
                return Err(Error::Conflict("the file was changed while it was pushed".to_owned()));
            }
            let sent = bytes.len() as u64;
            parts.put(number as u64, bytes)?;
            self.progress.add(sent);
            Ok(())
        });
        finish_parts(parts, done.map(drop))
    }

    /// Puts the heads and the manifest.
    fn finish(&self, prepared: Vec<Prepared>, done: &mut Manifests) -> Result<()> {
        let index = self.index.map(|index| {
            let mut table = Table::new();
            table.extend(&index.bytes);
            let (digest, length) = (Digest::of(&index.bytes), index.bytes.len() as u64);
            let head = IndexHead { root: index.root.clone(), table: table.into_bytes() };
            (IndexObject { digest, length }, head, &index.bytes)
        });
        let (index, index_head) = match index {
            Some((object, head, bytes)) => {
                put_unless_there(self.store, &keys::index(&object.digest), bytes)?;
                (Some(object), Some(head))
            }
            None => (None, None),
        };
        let (layers, heads) = heads_of(self.layers, prepared, index_head)?;
        let heads = heads.encode();
        let digest = Digest::of(&heads);
        put_unless_there(self.store, &keys::heads(&digest), &heads)?;
        let heads = HeadsObject { digest, length: heads.len() as u64 };
        let trace = self.trace(&layers)?;
        let manifest = Manifest::new(heads, index, trace, layers)?.encode()?;
        self.progress.check()?;
        self.store.settle()?;
        if done.is_last(&manifest) {
            return Ok(());
        }
        let was = self.was.as_ref();
        done.put(self.store, self.name, &manifest, was, self.replace)
    }

    /// The trace that stays: that of the manifest which is replaced, if the chains have their base in common.
    fn trace(&self, layers: &[Layer]) -> Result<Option<TraceObject>> {
        let was = self.was.as_ref().and_then(|(bytes, _)| Manifest::decode(self.name, bytes).ok());
        let base = |layers: &[Layer]| layers.first().map(|base| base.digest);
        let same = was.filter(|was| base(&was.layers) == base(layers));
        let Some(trace) = same.and_then(|was| was.trace) else { return Ok(None) };
        // Before this push was noted, somebody may have removed the chain and collected what it had.
        let found = self.store.head(&keys::trace(&trace.digest))?;
        Ok(found.is_some_and(|found| found.length == trace.length).then_some(trace))
    }
}

fn put_manifest(
    store: &dyn Store,
    name: &str,
    manifest: &[u8],
    was: Option<&Version>,
    replace: Replace,
) -> Result<()> {
    let key = keys::manifest(name);
    if replace == Replace::Any {
        return store.put(&key, manifest).map_err(|error| match error {
            Error::Store(message) => Error::Unknown(message),
            error => error,
        });
    }
    match store.put_if(&key, manifest, was) {
        Ok(Outcome::Done) => Ok(()),
        Ok(Outcome::Unsupported) => Err(unconditional(name)),
        // It was perhaps put, but is perhaps not durable.
        Err(error @ Error::Local(_)) => Err(error),
        // The put may have succeeded without our knowledge.
        other => match (store.get(&key, MAX_MANIFEST), other) {
            (Ok(Some((now, _))), _) if now == manifest => Ok(()),
            (_, Err(error)) => Err(error),
            (_, Ok(_)) => Err(Error::Conflict(format!(
                "another program has pushed to '{name}' or removed it meanwhile: its manifest was left as it is; try \
                 again to replace it"
            ))),
        },
    }
}

/// Reads the L1 tables, from the base up as long as there is room, so that no others take memory.
fn heads_of(
    locals: &[LocalLayer],
    prepared: Vec<Prepared>,
    index: Option<IndexHead>,
) -> Result<(Vec<Layer>, Heads)> {
    let mut room = L1Room::default();
    let mut heads = Vec::with_capacity(prepared.len());
    let mut layers = Vec::with_capacity(prepared.len());
    for (local, one) in locals.iter().zip(prepared) {
        let mut head = Head { header: one.header, l1: Vec::new(), table: one.table };
        if let Some(place) = one.l1.filter(|_| !head.header.is_empty())
            && room.take(place.end - place.start)
        {
            head.l1 = read(local, place.start, place.end - place.start)?;
        }
        heads.push(head);
        layers.push(one.layer);
    }
    Ok((layers, Heads::new(heads, index)))
}

/// Puts an object that is named by its digest, if it is not there.
pub(crate) fn put_unless_there(store: &dyn Store, key: &str, bytes: &[u8]) -> Result<bool> {
    let found = store.head(key)?;
    if found.is_some_and(|found| found.length == bytes.len() as u64) {
        return Ok(false);
    }
    if bytes.len() <= MOST_AT_ONCE {
        return store.put(key, bytes).map(|()| true);
    }
    let parts = store.begin(key, bytes.len() as u64)?;
    let size = parts.size() as usize;
    let put = (0..)
        .zip(bytes.chunks(size))
        .try_for_each(|(number, part)| parts.put(number, part.to_vec()));
    finish_parts(parts, put).map(|()| true)
}

/// Finishes an object whose parts were put, or abandons it.
fn finish_parts(parts: Box<dyn Parts + '_>, put: Result<()>) -> Result<()> {
    if let Err(error) = put {
        // What cannot be removed now stays hidden; the first error says more.
        let _ = parts.abandon();
        return Err(error);
    }
    parts.finish()
}

fn length(layer: &LocalLayer) -> Result<u64> {
    let metadata = layer.file.metadata();
    Ok(metadata.map_err(|error| Error::local("examine", &layer.path, error))?.len())
}

fn read(layer: &LocalLayer, offset: u64, length: u64) -> Result<Vec<u8>> {
    let mut bytes = vec![0; length as usize];
    let read = layer.file.read_exact_at(&mut bytes, offset);
    read.map_err(|error| Error::local("read", &layer.path, error))?;
    Ok(bytes)
}

/// What a layer's header says.
struct Described {
    size: u64,
    backing: Option<String>,
    backing_format: Option<String>,
    /// What is recorded of the file's first bytes.
    header: Vec<u8>,
    /// The L1 table, if it is not too long to be recorded.
    l1: Option<Range<u64>>,
}

/// The format of the layer below.
fn below(layers: &[LocalLayer], number: usize) -> Option<Format> {
    number.checked_sub(1).and_then(|below| layers.get(below)).map(|below| below.format)
}

/// What is recorded of a layer of so many bytes, above one of the format `below`. One that `is_open` may be as its
/// server leaves it until it is closed.
///
/// # Errors
/// It cannot be pushed as it is.
fn describe(
    local: &LocalLayer,
    length: u64,
    below: Option<Format>,
    is_open: bool,
) -> Result<Described> {
    let path = shown(&local.path);
    if local.format == Format::Raw {
        if below.is_some() {
            return Err(Error::refused(format_args!("'{path}' is raw, but has layers below it")));
        }
        let size = length.next_multiple_of(512);
        let (backing, backing_format, header, l1) = (None, None, Vec::new(), None);
        return Ok(Described { size, backing, backing_format, header, l1 });
    }
    let start = read(local, 0, length.min(Header::MAX_LENGTH as u64))?;
    let invalid = |error| Error::refused(format_args!("'{path}': {error}"));
    let cluster = Header::probe_length(&start).map_err(invalid)?;
    let header = start.get(..cluster).unwrap_or(&start);
    let header = Header::parse(header).map_err(invalid)?;
    let features = header.incompatible;
    let way_out = if features.contains(IncompatibleFeatures::JOURNAL) && !is_open {
        Some(("was not closed and has a journal", "isobath seal"))
    } else if features.contains(IncompatibleFeatures::CORRUPT) {
        Some(("is marked as corrupt", "isobath check -r all"))
    } else if features.contains(IncompatibleFeatures::DIRTY) && !is_open {
        Some(("was not closed and is marked as dirty", "isobath check -r all"))
    } else if features.contains(IncompatibleFeatures::DATA_FILE) {
        Some(("has an external data file, which would not be pushed", "isobath convert -O qcow2"))
    } else {
        None
    };
    if let Some((what, command)) = way_out {
        return Err(Error::refused(format_args!("'{path}' {what}: run '{command}' on it first")));
    }
    match (&header.backing_file, below) {
        (Some(name), None) => {
            return Err(Error::refused(format_args!(
                "'{path}' has the backing file '{}', which is not among the layers",
                isobath_qcow2::text::Shown(name)
            )));
        }
        (None, Some(_)) => {
            return Err(Error::refused(format_args!(
                "'{path}' has no backing file, but layers below it"
            )));
        }
        _ => {}
    }
    let l1 = recorded::l1(&header, length);
    let recorded = recorded::header(start, cluster);
    let size = header.disk_size();
    let backing_format =
        header.backing_format().map(str::to_owned).filter(|_| header.backing_file.is_some());
    if let (Err(what), Some(below)) = (fits(backing_format.as_deref(), below), below) {
        return Err(Error::refused(format_args!(
            "'{path}' {what}: 'qemu-img rebase -u -F {} -b BACKING_FILE IMAGE', with the name that is there now, \
             corrects the header",
            below.name()
        )));
    }
    let backing = header.backing_file;
    Ok(Described { size, backing, backing_format, header: recorded, l1 })
}

/// The note of a push: whoever collects objects sees that layers may be needed that no manifest names yet.
pub(crate) struct Note<'s> {
    store: &'s dyn Store,
    key: String,
    renewed: Mutex<Instant>,
}

const NOTE: &[u8] = b"isobath push\n";

impl<'s> Note<'s> {
    /// One that is not in the store yet.
    fn new(store: &'s dyn Store) -> Result<Self> {
        let key = format!("{}{}", keys::PUSHES, unique()?);
        Ok(Self { store, key, renewed: Mutex::new(Instant::now()) })
    }

    /// Puts a note, and makes sure that nobody collects objects, in this order.
    fn put(store: &'s dyn Store) -> Result<Self> {
        let note = Self::new(store)?;
        match store.put(&note.key, NOTE).and_then(|()| nobody_collects(store)) {
            Ok(()) => Ok(note),
            // It may have been put, whatever failed.
            Err(error) => {
                note.remove();
                Err(error)
            }
        }
    }

    /// Puts it again if that was long ago.
    fn renew(&self) -> Result<()> {
        // Another thread that has the lock renews it.
        let Ok(mut renewed) = self.renewed.try_lock() else { return Ok(()) };
        if renewed.elapsed() < RENEWAL {
            return Ok(());
        }
        // One that was removed stays so, since what was found before may be gone. If the store has no conditional puts
        // it is not renewed, and may count as left.
        if let Some((_, version)) = self.store.get(&self.key, NOTE.len() as u64)? {
            self.store.put_if(&self.key, NOTE, Some(&version))?;
        }
        *renewed = Instant::now();
        Ok(())
    }

    fn is_there(&self) -> Result<bool> {
        Ok(self.store.head(&self.key)?.is_some())
    }

    fn remove(self) {
        // One that stays keeps objects from being collected for a while, and is removed then.
        let _ = self.store.delete(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heads::MOST_HEADER;
    use isobath_testkit::qemu;
    use std::process::Command;

    #[test]
    fn what_is_held_of_a_layer_is_no_longer_than_its_header() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.qcow2");
        let mut create = Command::new(qemu::program("qemu-img"));
        create.args(["create", "-q", "-f", "qcow2", "-o", "preallocation=full,cluster_size=2M"]);
        let _ = qemu::run(create.arg(&path).arg("4M")).ok();
        let local = LocalLayer { file: File::open(&path).unwrap(), path, format: Format::Qcow2 };
        let described = describe(&local, length(&local).unwrap(), None, false).unwrap();
        assert!(!described.header.is_empty());
        assert!(described.header.capacity() <= MOST_HEADER, "{}", described.header.capacity());
        assert!(described.l1.is_some_and(|place| place.end - place.start == 8));
    }
}
