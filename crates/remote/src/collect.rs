//! Removes chains from a store, and the objects that no chain needs.

use crate::digest::unique;
use crate::error::{Error, Result};
use crate::keys;
use crate::manifest::{MAX_MANIFEST, Manifest};
use crate::progress::Progress;
use crate::store::{Outcome, Store};
use std::collections::HashSet;
use std::time::{Duration, SystemTime};

/// The note of a push counts at least so long: it is renewed every ten minutes.
const LEAST_OF_NOTES: Duration = Duration::from_hours(1);

/// How objects are collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Collection {
    /// How long an object stays after it was put, although nothing needs it.
    pub grace: Duration,
    /// Only say what would be removed.
    pub dry_run: bool,
    /// Begin although another collection has, which was killed.
    pub break_lock: bool,
}

/// What a collection removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Chains in the store.
    pub chains: usize,
    /// Objects that were removed, or would be.
    pub objects: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Objects that nothing needs, and that are too young.
    pub young: usize,
}

/// Removes a chain's manifest. Its layers stay until they are collected.
///
/// # Errors
/// There is no such chain; those of the store.
pub fn remove(store: &dyn Store, name: &str) -> Result<()> {
    let key = keys::manifest(name);
    if store.head(&key)?.is_none() {
        return Err(Error::refused(format_args!("the store has no chain '{name}'")));
    }
    store.delete(&key)
}

/// Removes the objects that no chain needs. No push that is at work loses anything by it: see decision 0049 for why.
///
/// # Errors
/// A push is at work, or another collection; a manifest is damaged or of a later version, so that it is unknown what it
/// needs; those of the store.
pub fn collect(store: &dyn Store, how: &Collection, progress: &Progress) -> Result<Collected> {
    let lock = Lock::take(store, how)?;
    let mut removals = Removals { store, dry_run: how.dry_run, in_doubt: false };
    let collected = lock.now().and_then(|now| locked(&mut removals, how, now, progress));
    // A removal whose outcome is unknown may still take effect: no push must find the object meanwhile. The collection
    // whose lock was broken may have left one.
    if removals.in_doubt || (lock.broken && collected.is_err()) {
        return collected.map_err(stays);
    }
    if lock.broken
        && let Ok(collected) = &collected
    {
        if how.dry_run {
            return Ok(collected.clone());
        }
        // What the other may have removed, and is not removed again here.
        if collected.young > 0 && lock.reaches.is_none_or(|grace| how.grace > grace) {
            let shorter = lock.reaches.map_or_else(
                || "shorter --grace".to_owned(),
                |grace| format!("--grace of at most {} seconds", grace.as_secs()),
            );
            return Err(stays(Error::Refused(format!(
                "{} objects that no chain needs are younger than --grace: the collection whose lock was broken may \
                 have been removing them, and that can take effect later; use a {shorter}",
                collected.young
            ))));
        }
    }
    match (collected, lock.release()) {
        (Ok(collected), Ok(())) => Ok(collected),
        (Err(error), Ok(())) => Err(error),
        (Ok(_), Err(error)) | (Err(error), Err(_)) => Err(stays(error)),
    }
}

/// An error after which the lock is still there.
fn stays(error: Error) -> Error {
    error.and(format_args!(
        "the lock '{}' is still in the store: no push begins until 'isobath remote gc --break-lock' has ended without \
         an error, and not with --dry-run",
        keys::COLLECTOR
    ))
}

/// An error after which the lock may be there.
fn may_stay(error: Error) -> Error {
    error.and(format_args!(
        "the lock '{}' may be in the store: if no push begins, use 'isobath remote gc --break-lock'",
        keys::COLLECTOR
    ))
}

/// What is removed, and whether the outcome of a removal is unknown.
struct Removals<'s> {
    store: &'s dyn Store,
    dry_run: bool,
    in_doubt: bool,
}

impl Removals<'_> {
    fn delete(&mut self, key: &str) -> Result<()> {
        if self.dry_run {
            return Ok(());
        }
        let deleted = self.store.delete(key);
        self.in_doubt |= matches!(deleted, Err(Error::Store(_) | Error::Unknown(_)));
        deleted
    }
}

/// A time without parts of a second, of which the time of the lock has none: some stores list them.
fn whole_seconds(time: SystemTime) -> SystemTime {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    SystemTime::UNIX_EPOCH + Duration::from_secs(since.as_secs())
}

fn locked(
    removals: &mut Removals<'_>,
    how: &Collection,
    now: SystemTime,
    progress: &Progress,
) -> Result<Collected> {
    let store = removals.store;
    let is_older = |modified: SystemTime, than: Duration| {
        now.duration_since(whole_seconds(modified)).is_ok_and(|age| age >= than)
    };
    // The order matters: notes, objects, manifests.
    for note in store.list(keys::PUSHES)? {
        if !is_older(note.found.modified, how.grace.max(LEAST_OF_NOTES)) {
            return Err(Error::Conflict(format!(
                "a push to this store is at work, or was killed less than {} minutes ago ('{}'): collect later",
                how.grace.max(LEAST_OF_NOTES).as_secs() / 60,
                note.key
            )));
        }
        removals.delete(&note.key)?;
    }
    let mut entries = Vec::new();
    for kind in keys::KINDS {
        progress.check()?;
        entries.extend(store.list(kind)?);
    }
    let (mut needed, mut collected) = (HashSet::new(), Collected::default());
    for entry in store.list(keys::MANIFESTS)? {
        progress.check()?;
        let Some(name) = keys::name(&entry.key) else {
            return Err(Error::damaged(format_args!(
                "'{}' is not the name of a manifest, so that it is unknown what it needs: nothing was removed",
                entry.key
            )));
        };
        let Some((bytes, _)) = store.get(&entry.key, MAX_MANIFEST)? else { continue };
        let manifest = Manifest::decode(name, &bytes);
        let manifest = manifest
            .map_err(|error| Error::damaged(format_args!("{error}; nothing was removed")))?;
        needed.extend(manifest.objects().map(|(key, _)| key));
        collected.chains += 1;
    }
    for entry in entries.iter().filter(|entry| !needed.contains(&entry.key)) {
        progress.check()?;
        if !is_older(entry.found.modified, how.grace) {
            collected.young += 1;
            continue;
        }
        removals.delete(&entry.key)?;
        collected.objects += 1;
        // Lengths are what the store says.
        collected.bytes = collected.bytes.saturating_add(entry.found.length);
    }
    if !how.dry_run
        && let Some(before) = now.checked_sub(how.grace.max(LEAST_OF_NOTES))
    {
        store.sweep(before)?;
    }
    Ok(collected)
}

/// Keeps pushes from beginning, and other collections.
struct Lock<'s> {
    store: &'s dyn Store,
    /// Another collection had it, which did not end.
    broken: bool,
    /// The shortest grace of the collections whose locks were broken; `None` if one did not say. What was younger was
    /// removed by none of them.
    reaches: Option<Duration>,
}

/// What a lock contains: a line that no other collection writes, with the grace in seconds.
struct Line(String);

impl Line {
    const MOST: u64 = 256;

    fn new(reaches: Option<Duration>) -> Result<Self> {
        let grace = reaches.map_or_else(String::new, |grace| format!(" grace {}", grace.as_secs()));
        Ok(Self(format!("isobath remote gc {}{grace}\n", unique()?)))
    }

    /// The grace of the collection that has written these bytes.
    fn grace(bytes: &[u8]) -> Option<Duration> {
        let (_, grace) = std::str::from_utf8(bytes).ok()?.trim_end().rsplit_once(" grace ")?;
        grace.parse().ok().map(Duration::from_secs)
    }
}

impl<'s> Lock<'s> {
    fn take(store: &'s dyn Store, how: &Collection) -> Result<Self> {
        // One that only says what it would remove removes nothing, however young.
        let own = if how.dry_run { Duration::MAX } else { how.grace };
        if how.break_lock {
            let (broken, reaches) = match store.get(keys::COLLECTOR, Line::MOST) {
                Ok(Some((line, _))) => (true, Line::grace(&line)),
                Ok(None) => (false, Some(Duration::MAX)),
                Err(Error::Damaged(_)) => (true, None),
                Err(error) => return Err(error),
            };
            let Line(text) = Line::new(reaches.map(|grace| grace.min(own)))?;
            let lock = Self { store, broken, reaches };
            let put = store.put(keys::COLLECTOR, text.as_bytes()).map(|()| lock);
            return put.map_err(|error| match error {
                error if broken => stays(error),
                error => may_stay(error),
            });
        }
        let Line(text) = Line::new(Some(own))?;
        let lock = Self { store, broken: false, reaches: Some(own) };
        match store.put_if(keys::COLLECTOR, text.as_bytes(), None) {
            Ok(Outcome::Done) => Ok(lock),
            Ok(Outcome::Unsupported) => Err(Error::refused(
                "this store cannot create an object only if there is none, so that two collections could be at work: \
                 if there is no other, use --break-lock",
            )),
            Ok(Outcome::Changed) => Err(Error::Conflict(format!(
                "another 'isobath remote gc' is at work in this store ('{}'): if it was killed, use --break-lock",
                keys::COLLECTOR
            ))),
            // Nothing was put.
            Err(error @ Error::Interrupted) => Err(error),
            // It was perhaps put, but is perhaps not durable.
            Err(error @ Error::Local(_)) => match store.head(keys::COLLECTOR) {
                Ok(None) => Err(error),
                _ => Err(may_stay(error)),
            },
            // The put may have succeeded without our knowledge.
            Err(error) => match store.get(keys::COLLECTOR, text.len() as u64) {
                Ok(Some((now, _))) if now == text.as_bytes() => Ok(lock),
                _ if matches!(error, Error::Unsettled(_) | Error::Unknown(_)) => {
                    Err(may_stay(error))
                }
                _ => Err(error),
            },
        }
    }

    /// The time by the store's clock, with which the objects' times are compared.
    fn now(&self) -> Result<SystemTime> {
        let found = self.store.head(keys::COLLECTOR)?;
        let found = found.ok_or_else(|| {
            Error::Conflict("another collection has removed this one's lock".to_owned())
        });
        found.map(|found| found.modified)
    }

    fn release(self) -> Result<()> {
        self.store.delete(keys::COLLECTOR)
    }
}
