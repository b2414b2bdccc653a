//! Memory that other processes have left. It is read once, and never mapped.

use super::mapped::Held;
use super::shelf::{Shelf, Spot, Whose};
use isobath_ring::place::identity_of;
use isobath_storage::restart_memory::{Mark, RESTART_MEMORY_BYTES, RestartMemory};
use isobath_storage::shown;
use rustix::fs::OFlags;
use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicU64, Ordering};

/// The contents of a file.
pub(super) struct Found {
    held: Held,
    words: Box<[AtomicU64]>,
}

impl RestartMemory for Found {
    fn words(&self) -> &[AtomicU64] {
        &self.words
    }

    fn store(&self, place: usize, value: u64) -> io::Result<()> {
        let word = self.words.get(place).ok_or(io::ErrorKind::InvalidInput)?;
        let at = (place * size_of::<u64>()) as u64;
        self.held.file.write_all_at(&value.to_ne_bytes(), at)?;
        word.store(value, Ordering::Release);
        Ok(())
    }

    fn name(&self) -> String {
        self.held.name()
    }

    fn remove(&self) {
        self.held.remove();
    }

    fn is_there(&self) -> bool {
        self.held.place.holds(self.held.id)
    }

    fn set_aside(&self) -> io::Result<Option<String>> {
        self.held.set_aside()
    }
}

/// The memory that begins like this, to change it or only to read it.
///
/// # Errors
/// If it may be there, but cannot be used: `WouldBlock` if another process uses it.
pub(super) fn find(shelf: &Shelf, mark: Mark, change: bool) -> io::Result<Option<Found>> {
    for spot in shelf.spots()? {
        let used = if spot.whose == Whose::Others {
            refuse_match(&spot, mark).map(|()| None)
        } else {
            found(&spot, mark, change)
        };
        let used = used.map_err(|error| explained(&spot, &error))?;
        if used.is_some() {
            return Ok(used);
        }
    }
    Ok(None)
}

/// Memory of this user or the image's owner that nobody uses. It has no words.
///
/// # Errors
/// If it cannot be looked for.
pub(super) fn stale(shelf: &Shelf) -> io::Result<Option<Found>> {
    for Spot { whose, place, .. } in shelf.spots()? {
        if whose == Whose::Others {
            continue;
        }
        if let Ok(file) = place.open(OFlags::RDONLY)
            && file.try_lock().is_ok()
        {
            let held = Held { id: identity_of(&file)?, place, file };
            return Ok(Some(Found { held, words: Box::default() }));
        }
    }
    Ok(None)
}

fn explained(spot: &Spot, error: &io::Error) -> io::Error {
    let reason = match error.kind() {
        io::ErrorKind::WouldBlock => "another process is using it".into(),
        io::ErrorKind::PermissionDenied if error.raw_os_error().is_some() => {
            format!("{error}; open the image as the user who owns it")
        }
        _ => error.to_string(),
    };
    let text = format!(
        "the restart memory '{}', which may hold acknowledged writes of a killed process: {reason}",
        shown(spot.place.path())
    );
    io::Error::new(error.kind(), text)
}

fn refused(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, reason)
}

/// Memory of a user who is neither this one nor the image's owner is not used. One that fits the image is not passed
/// over either, nor one that cannot be read: who left it may write to the image, and was maybe its server.
fn refuse_match(spot: &Spot, mark: Mark) -> io::Result<()> {
    let begins = spot.place.open(OFlags::RDONLY).and_then(|file| begins(&file, mark));
    let user = spot.user;
    match begins {
        Ok(true) => Err(refused(&format!(
            "it belongs to the user {user}, who does not own the image; open the image as that user"
        ))),
        Ok(false) => Ok(()),
        Err(error) if is_theirs(&error) => {
            let file = shown(spot.place.path());
            tracing::error!(%file, user, %error, "what another user has left is no restart log");
            Ok(())
        }
        // Only that user can say how long that lasts.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(refused(&format!(
            "the user {user}, who does not own the image, keeps it from being opened"
        ))),
        Err(error) => Err(error),
    }
}

/// Whether an error says that it is not a log.
pub(super) fn is_theirs(error: &io::Error) -> bool {
    let kinds = [io::ErrorKind::NotFound, io::ErrorKind::InvalidInput, io::ErrorKind::IsADirectory];
    kinds.contains(&error.kind()) || matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENXIO))
}

fn found(spot: &Spot, mark: Mark, change: bool) -> io::Result<Option<Found>> {
    let file = match spot.place.open(if change { OFlags::RDWR } else { OFlags::RDONLY }) {
        // Its user has removed it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    if !begins(&file, mark)? {
        return Ok(None);
    }
    let locked = if change { file.try_lock() } else { file.try_lock_shared() };
    locked.map_err(|error| match error {
        TryLockError::WouldBlock => io::Error::from(io::ErrorKind::WouldBlock),
        TryLockError::Error(error) => error,
    })?;
    let is = file.metadata()?;
    if is.nlink() == 0 {
        return Ok(None);
    }
    if is.nlink() != 1 || is.mode() & 0o077 != 0 {
        return Err(refused("another user may have written to it"));
    }
    let words = contents(&file)?;
    let held = Held { place: spot.place.clone(), id: identity_of(&file)?, file };
    Ok(Some(Found { held, words }))
}

/// Whether a file begins with these words.
fn begins(file: &File, mark: Mark) -> io::Result<bool> {
    let mut head = [0; size_of::<Mark>()];
    match file.read_exact_at(&mut head, 0) {
        // Its user was killed before there was anything in it.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        read => read.map(|()| numbers(&head).eq(mark)),
    }
}

fn contents(file: &File) -> io::Result<Box<[AtomicU64]>> {
    let mut bytes = vec![0; RESTART_MEMORY_BYTES];
    file.read_exact_at(&mut bytes, 0).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            io::Error::new(io::ErrorKind::InvalidData, "it is damaged: it is too short")
        }
        _ => error,
    })?;
    if file.metadata()?.len() != RESTART_MEMORY_BYTES as u64 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it has the wrong length"));
    }
    Ok(numbers(&bytes).map(AtomicU64::new).collect())
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = u64> {
    let (words, _) = bytes.as_chunks();
    words.iter().map(|word| u64::from_ne_bytes(*word))
}
