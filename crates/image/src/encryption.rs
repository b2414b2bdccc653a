//! Encrypted images: guest data is decrypted after it is read and encrypted before it is written, and is ciphertext
//! everywhere below, such as in a journal or in a restart log.
//!
//! The initialization vector of a sector is its offset in the file that holds the data, in sectors (section
//! "Data encryption" of the qcow2 specification). A host cluster's bytes therefore mean nothing elsewhere.

use crate::{DiskError, Result, always, invariant};
use event_listener::Event;
use isobath_luks::{Cipher, HEADER_LENGTH, Header};
pub use isobath_luks::{
    CipherAlgorithm, CipherMode, CreateOptions, Hash, Info, IvGenerator, MAX_SECRET, Secret,
    SlotState,
};

use isobath_storage::{IoBuf, Storage};
use parking_lot::Mutex;
use std::path::Path;
use std::sync::Arc;
use std::thread;

/// Bytes that are encrypted as one.
pub const SECTOR: u64 = 512;

/// The secrets of a chain's encrypted images.
#[derive(Clone, Debug, Default)]
pub struct Secrets {
    /// By the number of images above.
    by_depth: Vec<Option<Arc<Secret>>>,
    /// Those that names in headers may give.
    by_id: Option<ById>,
    /// No data is read.
    unneeded: bool,
}

/// How a secret is found by its ID: `None` if there is none of this ID, an error if it cannot be read.
type Find = dyn Fn(&str) -> Option<FoundSecret> + Send + Sync;

/// A secret that was looked for, or why it cannot be read.
pub type FoundSecret = std::result::Result<Arc<Secret>, String>;

#[derive(Clone)]
struct ById(Arc<Find>);

impl std::fmt::Debug for ById {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ById")
    }
}

impl Secrets {
    /// For a chain of which only the images' own structures are used.
    pub const fn unneeded() -> Self {
        Self { by_depth: Vec::new(), by_id: None, unneeded: true }
    }

    /// Also those that `find` finds, by the IDs that the names of backing files give (`encrypt.key-secret` in a `json:`
    /// description).
    #[must_use]
    pub fn with_ids(
        mut self,
        find: impl Fn(&str) -> Option<FoundSecret> + Send + Sync + 'static,
    ) -> Self {
        self.by_id = Some(ById(Arc::new(find)));
        self
    }

    /// The key for the image with `depth` images above it, whose name gives the ID of its secret. A secret that was set
    /// for this image goes before that, and one for images above is used if there is none of this ID.
    ///
    /// # Errors
    /// If there is no secret, or the one of this ID cannot be read: the reason.
    pub fn key_named(&self, depth: usize, id: &str) -> std::result::Result<Key, String> {
        let own = self.by_depth.get(depth).is_some_and(Option::is_some);
        if self.unneeded || own {
            return Ok(self.key(depth));
        }
        match self.by_id.as_ref().and_then(|ById(find)| find(id)) {
            Some(found) => found.map(|secret| Key::Secret(Some(secret))),
            None if self.at(depth).is_some() => Ok(self.key(depth)),
            None => Err(format!("No secret with id '{}'", id.escape_debug())),
        }
    }

    /// The key for the image with `depth` images above it.
    pub fn key(&self, depth: usize) -> Key {
        if self.unneeded { Key::Unneeded } else { Key::Secret(self.at(depth).cloned()) }
    }

    /// Sets the secret of the image with `depth` images above it, and of those below that have none of their own.
    pub fn set(&mut self, depth: usize, secret: Arc<Secret>) {
        if self.by_depth.len() <= depth {
            self.by_depth.resize(depth + 1, None);
        }
        self.by_depth[depth] = Some(secret);
    }

    /// The secret of the image with `depth` images above it: its own, or that of the next image above that has one.
    pub fn at(&self, depth: usize) -> Option<&Arc<Secret>> {
        let known = self.by_depth.get(..=depth).unwrap_or(&self.by_depth);
        known.iter().rev().flatten().next()
    }
}

impl From<Secret> for Secrets {
    fn from(secret: Secret) -> Self {
        Self { by_depth: vec![Some(Arc::new(secret))], ..Self::default() }
    }
}

/// How an image's data is decrypted, if it is encrypted.
#[derive(Clone, Debug)]
pub enum Key {
    /// With the key that a secret unlocks.
    Secret(Option<Arc<Secret>>),
    /// As where the image is open already.
    Known(Option<Unlocked>),
    /// Not at all: only the image's own structures are used.
    Unneeded,
}

/// Whether a layer's data is encrypted.
#[derive(Clone, Debug)]
pub enum Protection {
    /// It is not.
    None,
    /// It is, and is not accessible: the layer was opened for its structures.
    Locked,
    /// It is, and is accessible.
    Unlocked(Unlocked),
}

/// What an encrypted image was unlocked with, and what its data is decrypted with.
#[derive(Clone, Debug)]
pub struct Unlocked {
    pub(crate) cipher: Cipher,
    pub(crate) secret: Arc<Secret>,
}

/// Finds out how to decrypt the data of an image.
///
/// # Errors
/// If there is no secret, or the wrong one; or if the encryption header is damaged, or asks for what is not supported.
pub(crate) async fn unlock<S: Storage>(
    storage: &S,
    name: &Path,
    header: &isobath_qcow2::Header,
    key: &Key,
) -> Result<Protection> {
    let Some((offset, length)) = header.encryption() else { return Ok(Protection::None) };
    let refused = |reason: String| DiskError::Refused { image: name.to_owned(), reason };
    let secret = match key {
        Key::Unneeded => return Ok(Protection::Locked),
        Key::Known(Some(unlocked)) => return Ok(Protection::Unlocked(unlocked.clone())),
        Key::Secret(Some(secret)) => Arc::clone(secret),
        Key::Known(None) | Key::Secret(None) => return Err(locked(name)),
    };
    let area = read_area(storage, name, offset.get(), length).await?;
    let header = Header::parse(&area, length).map_err(|error| refused(error.to_string()))?;
    derive(name, header, area, secret).await.map(Protection::Unlocked)
}

/// Derives the key that a secret unlocks, which takes long. `area` is the header area.
pub(crate) async fn derive(
    name: &Path,
    header: Header,
    area: IoBuf,
    secret: Arc<Secret>,
) -> Result<Unlocked> {
    let own = Arc::clone(&secret);
    let cipher = keys_on_thread(name, move || {
        let (_, key) = header.unlock(&area, &own)?;
        header.cipher(&key)
    });
    let cipher = cipher.await?.map_err(|error: isobath_luks::Error| DiskError::Refused {
        image: name.to_owned(),
        reason: error.to_string(),
    })?;
    Ok(Unlocked { cipher, secret })
}

/// What an image's encryption header says; `None` if the image is not encrypted, or the header
/// is not one that could be used.
///
/// # Errors
/// If the storage fails.
pub async fn read_header<S: Storage>(
    storage: &S,
    header: &isobath_qcow2::Header,
) -> Result<Option<Info>> {
    let Some((offset, length)) = header.encryption() else { return Ok(None) };
    let start = storage.read_at(offset.get(), IoBuf::zeroed(HEADER_LENGTH)).await?;
    Ok(Header::parse(&start, length).ok().map(|header| header.info()))
}

/// Reads an encryption header.
pub(crate) async fn read_area<S: Storage>(
    storage: &S,
    name: &Path,
    offset: u64,
    length: u64,
) -> Result<IoBuf> {
    let file = storage.len().await?;
    if offset.checked_add(length).is_none_or(|end| end > file.next_multiple_of(SECTOR)) {
        return Err(DiskError::Refused {
            image: name.to_owned(),
            reason: format!(
                "its encryption header ({length} bytes at {offset:#x}) reaches past the end of the \
                 file ({file} bytes): the file is truncated; restore it from a backup"
            ),
        });
    }
    Ok(storage.read_at(offset, IoBuf::zeroed(length as usize)).await?)
}

/// The error of an encrypted image without a secret.
pub(crate) fn locked(name: &Path) -> DiskError {
    let reason = "Parameter 'encrypt.key-secret' is required for cipher".to_owned();
    DiskError::Refused { image: name.to_owned(), reason }
}

/// The result of long work that is done on a thread of its own; `None` if it panicked.
pub async fn on_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    struct Ending(Arc<Event>);
    impl Drop for Ending {
        fn drop(&mut self) {
            self.0.notify(usize::MAX);
        }
    }
    let (result, ended) = (Arc::new(Mutex::new(None)), Arc::new(Event::new()));
    let listener = ended.listen();
    let ending = Ending(ended);
    let theirs = Arc::clone(&result);
    let started = thread::Builder::new().name("keys".into()).spawn(move || {
        let _ending = ending;
        let done = work();
        *theirs.lock() = Some(done);
    });
    started.ok()?;
    listener.await;
    result.lock().take()
}

/// The result of work with the keys of an image, which takes long and is done on a thread of its own.
///
/// # Errors
/// [`DiskError::Internal`] if it panicked.
pub async fn keys_on_thread<T: Send + 'static>(
    image: &Path,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    always(on_thread(work).await, image, "work with keys ends, whatever it finds")
}

/// Reads a range of decrypted bytes: whole sectors with `read`, which returns bytes as they are stored.
pub(crate) async fn read_through(
    cipher: &Cipher,
    at: u64,
    mut buf: IoBuf,
    read: impl AsyncFnOnce(u64, IoBuf) -> Result<IoBuf>,
) -> Result<IoBuf> {
    let end = at + buf.len() as u64;
    let sectors = at / SECTOR * SECTOR..end.next_multiple_of(SECTOR);
    // Nobody else may change the bytes while they are decrypted.
    if sectors == (at..end) && !buf.is_shared() {
        let mut buf = read(at, buf).await?;
        cipher.decrypt(at / SECTOR, &mut buf);
        return Ok(buf);
    }
    let whole = IoBuf::zeroed((sectors.end - sectors.start) as usize);
    let mut whole = read(sectors.start, whole).await?;
    cipher.decrypt(sectors.start / SECTOR, &mut whole);
    let from = (at - sectors.start) as usize;
    let length = buf.len();
    buf.copy_from_slice(&whole[from..from + length]);
    Ok(buf)
}

/// The bytes to store at `at` for the buffers, which are whole sectors together.
pub(crate) fn encrypted(cipher: &Cipher, image: &Path, at: u64, bufs: &[IoBuf]) -> Result<IoBuf> {
    let length: usize = bufs.iter().map(IoBuf::len).sum();
    let whole = at.is_multiple_of(SECTOR) && (length as u64).is_multiple_of(SECTOR);
    invariant(whole, image, "encrypted data is written in whole sectors")?;
    let mut stored = IoBuf::zeroed(length);
    let mut next = 0;
    for buf in bufs {
        buf.copy_to(&mut stored[next..next + buf.len()]);
        next += buf.len();
    }
    cipher.encrypt(at / SECTOR, &mut stored);
    Ok(stored)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::must_violate;
    use futures_executor::block_on;
    use isobath_luks::system_random;
    use std::time::Duration;

    #[test]
    fn an_image_without_a_secret_takes_that_of_the_next_above() {
        let secret = |text: &str| Arc::new(Secret::new(text.as_bytes().to_vec()).unwrap());
        let mut secrets = Secrets::default();
        assert!(secrets.at(0).is_none() && secrets.at(9).is_none());
        let (first, third) = (secret("a"), secret("b"));
        secrets.set(3, Arc::clone(&third));
        assert!(secrets.at(2).is_none());
        secrets.set(1, Arc::clone(&first));
        for (depth, expected) in [(1, &first), (2, &first), (3, &third), (1000, &third)] {
            assert!(Arc::ptr_eq(secrets.at(depth).unwrap(), expected), "{depth}");
        }
        assert!(secrets.at(0).is_none());
    }

    #[test]
    fn a_secret_that_a_name_gives_goes_before_that_of_images_above() {
        let secret = |text: &str| Arc::new(Secret::new(text.as_bytes().to_vec()).unwrap());
        let (given, named) = (secret("a"), secret("b"));
        let found = Arc::clone(&named);
        let secrets = Secrets::default().with_ids(move |id| match id {
            "s" => Some(Ok(Arc::clone(&found))),
            "unread" => Some(Err("cannot read it".into())),
            _ => None,
        });
        let key = |secrets: &Secrets, depth, id| match secrets.key_named(depth, id) {
            Ok(Key::Secret(Some(secret))) => Ok(secret),
            Ok(_) => panic!("no secret"),
            Err(error) => Err(error),
        };
        assert!(key(&secrets, 1, "t").unwrap_err().contains("No secret with id 't'"));
        let mut all = secrets;
        all.set(0, Arc::clone(&given));
        for (depth, id, expected) in [(0, "s", &given), (1, "s", &named), (1, "t", &given)] {
            assert!(Arc::ptr_eq(&key(&all, depth, id).unwrap(), expected), "{depth} {id}");
        }
        assert_eq!(key(&all, 1, "unread").unwrap_err(), "cannot read it");
        assert!(matches!(Secrets::unneeded().key_named(0, "t"), Ok(Key::Unneeded)));
    }

    #[test]
    fn work_on_a_thread_ends_even_if_it_panics() {
        assert_eq!(block_on(on_thread(|| 7)), Some(7));
        assert_eq!(block_on(on_thread(|| -> u8 { panic!("this panic is part of a test") })), None);
    }

    #[test]
    fn work_with_keys_ends() {
        let work = || -> u8 { panic!("this panic is part of a test") };
        let done = block_on(keys_on_thread(Path::new("image"), work));
        must_violate(done, "work with keys ends, whatever it finds");
    }

    #[test]
    fn whole_sectors_are_encrypted() {
        let options = CreateOptions { iter_time: Duration::from_millis(1), ..Default::default() };
        let secret = Secret::new(b"secret".to_vec()).unwrap();
        let made = options.create(&secret, &mut system_random).unwrap();
        let cipher = made.header.cipher(&made.key).unwrap();
        let stored = |at, length| {
            let bufs = [IoBuf::zeroed(500), IoBuf::zeroed(length)];
            encrypted(&cipher, Path::new("image"), at, &bufs).map(|stored| stored.len())
        };
        assert_eq!(stored(512, 12).unwrap(), 512);
        let whole = "encrypted data is written in whole sectors";
        must_violate(stored(512, 11), whole);
        must_violate(stored(511, 12), whole);
    }
}
