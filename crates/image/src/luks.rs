//! Files that are encrypted as a whole, behind a header of LUKS version 1: QEMU's format `luks`.
//!
//! The layer is one of a raw disk, whose storage is the rest of the file [through the
//! cipher](Storage::through_cipher). A sector's initialization vector is its number on the disk.

use crate::encryption::{Key, Protection, Unlocked, derive, read_area};
use crate::layer::Layer;
use crate::{DiskError, Result};
use isobath_luks::{Cipher, HEADER_LENGTH, Header, Info};
use isobath_storage::{IoBuf, SectorCipher, Storage};
use std::path::Path;
use std::sync::Arc;

/// How far key material may reach into the file, in bytes. Eight key slots take less than 2 MiB.
const MOST_AREA: u64 = 32 << 20;

/// The cipher of a disk.
#[derive(Debug)]
struct Data(Cipher);

impl SectorCipher for Data {
    fn encrypt(&self, sector: u64, bytes: &mut [u8]) {
        self.0.encrypt(sector, bytes);
    }

    fn decrypt(&self, sector: u64, bytes: &mut [u8]) {
        self.0.decrypt(sector, bytes);
    }
}

/// Opens the disk in a file that is encrypted as a whole.
///
/// # Errors
/// If the header cannot be used; if the key is needed, and there is no secret or the wrong one; if the storage fails.
pub(crate) async fn open<S: Storage>(name: &Path, file: S, key: &Key) -> Result<Layer<S>> {
    let (header, _) = read_header(&file, name).await?;
    let (offset, info) = (header.payload_offset(), header.info());
    let unlocked = match key {
        Key::Unneeded => None,
        Key::Known(Some(unlocked)) => Some(unlocked.clone()),
        Key::Secret(Some(secret)) => {
            let area = read_area(&file, name, 0, header.used_length()).await?;
            Some(derive(name, header, area, Arc::clone(secret)).await?)
        }
        Key::Known(None) | Key::Secret(None) => return Err(locked(name)),
    };
    let cipher = unlocked.as_ref().map(|Unlocked { cipher, .. }| {
        let cipher: Arc<dyn SectorCipher> = Arc::new(Data(cipher.clone()));
        cipher
    });
    let protection = unlocked.map_or(Protection::Locked, Protection::Unlocked);
    let storage = file.through_cipher(offset, cipher).await?;
    let length = storage.len().await?;
    Ok(Layer::luks(name.to_owned(), Arc::new(storage), length, protection, info))
}

/// Reads the header of a file, with the file's length in bytes. The data begins within the file.
///
/// # Errors
/// If the header cannot be used, or the storage fails.
pub(crate) async fn read_header<S: Storage>(file: &S, name: &Path) -> Result<(Header, u64)> {
    let refused = |reason: String| DiskError::Refused { image: name.to_owned(), reason };
    let length = file.len().await?;
    let start = file.read_at(0, IoBuf::zeroed(HEADER_LENGTH)).await?;
    let header = Header::parse(&start, length).map_err(|error| refused(error.to_string()))?;
    let (used, payload) = (header.used_length(), header.payload_offset());
    if used > MOST_AREA {
        return Err(refused(format!(
            "LUKS header: key material ends at {used}: supported are {MOST_AREA} bytes before the data"
        )));
    }
    if payload > length {
        return Err(refused(format!(
            "LUKS header: payload-offset is {payload}, past the end of the file ({length} bytes): the file is \
             truncated; restore it from a backup"
        )));
    }
    Ok((header, length))
}

/// What the header of a file says, with the size of the disk in bytes.
///
/// # Errors
/// If the header cannot be used, or the storage fails.
pub async fn info<S: Storage>(file: &S, name: &Path) -> Result<(Info, u64)> {
    let (header, length) = read_header(file, name).await?;
    Ok((header.info(), length - header.payload_offset()))
}

/// The error of an encrypted file without a secret.
pub(crate) fn locked(name: &Path) -> DiskError {
    let reason = "Parameter 'key-secret' is required for cipher".to_owned();
    DiskError::Refused { image: name.to_owned(), reason }
}
