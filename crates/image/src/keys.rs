//! The secrets that unlock an encrypted image.

use crate::change::Change;
use crate::encryption::{Secret, SlotState, keys_on_thread, locked, read_area};
use crate::layer::ImageFormat;
use crate::luks;
use crate::options::OpenOptions;
use crate::{DiskError, Result};
use isobath_luks::{Amend, Header, Write, system_random};
use isobath_storage::{Host, IoBuf, Storage};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A change of the secrets that unlock an image: the options of `qemu-img amend`.
#[derive(Clone, Debug)]
pub struct KeyChange {
    /// Whether a key slot is filled or erased.
    pub state: SlotState,
    /// The key slot. Without it, the first free one is filled, or all that `old_secret` unlocks are erased.
    pub slot: Option<i64>,
    /// The secret for a slot that is filled.
    pub new_secret: Option<Arc<Secret>>,
    /// The secret of slots that are erased.
    pub old_secret: Option<Arc<Secret>>,
    /// How long this machine takes to derive the key of a slot that is filled; 2 seconds if it is not given.
    pub iter_time: Option<Duration>,
}

/// Changes the secrets that unlock an image that nobody uses, in the format that `options` name, or qcow2; its data
/// stays as it is. `options` have a secret that unlocks it. With `force`, an active key slot is overwritten, and the
/// last one erased, after which nobody can read the data. After a crash the secrets that do not change still unlock the
/// image.
///
/// # Errors
/// If the image is not encrypted or cannot be unlocked or opened for writing, or the change is not possible without
/// `force`; or if the storage fails.
pub async fn change_keys<H: Host>(
    host: &H,
    name: &Path,
    options: &OpenOptions,
    change: KeyChange,
    force: bool,
) -> Result<()> {
    let refused = |reason: String| DiskError::Refused { image: name.to_owned(), reason };
    if options.format == Some(ImageFormat::Luks) {
        let file = host.open(name, options.mode(true)).await?;
        let (header, length) = luks::read_header(&file, name).await?;
        let Some(secret) = options.secrets.at(0).cloned() else { return Err(luks::locked(name)) };
        let area = read_area(&file, name, 0, header.used_length()).await?;
        return change_area(&file, name, (0, length), area, secret, change, force).await;
    }
    let opened = Change::begin(host, name, options, "encryption").await?;
    let layer = opened.close().await?;
    let area = layer.header().and_then(|header| header.encryption());
    let Some((offset, length)) = area else {
        return Err(refused("Can't amend encryption options - encryption not present".into()));
    };
    let Some(secret) = options.secrets.at(0).cloned() else { return Err(locked(name)) };
    let area = read_area(&**layer.storage(), name, offset.get(), length).await?;
    let place = (offset.get(), length);
    change_area(&**layer.storage(), name, place, area, secret, change, force).await
}

/// Changes the key slots of a header area, which is at `place.0` in the file and `place.1` bytes long; `area` is the
/// beginning of it, with all key material.
async fn change_area<S: Storage>(
    file: &S,
    name: &Path,
    (offset, length): (u64, u64),
    area: IoBuf,
    secret: Arc<Secret>,
    change: KeyChange,
    force: bool,
) -> Result<()> {
    let changed = keys_on_thread(name, move || {
        let header = Header::parse(&area, length)?;
        let (_, key) = header.unlock(&area, &secret)?;
        let amend = Amend {
            state: change.state,
            slot: change.slot,
            new_secret: change.new_secret.as_deref(),
            old_secret: change.old_secret.as_deref(),
            iter_time: change.iter_time,
            force,
        };
        header.amend(&area, &key, &amend, &mut system_random)
    });
    let changed = changed.await?.map_err(|error| DiskError::Refused {
        image: name.to_owned(),
        reason: error.to_string(),
    })?;
    for Write { offset: at, bytes } in changed.writes {
        file.write_at(offset + at, IoBuf::copy_of(&bytes)).await?;
        file.flush().await?;
    }
    Ok(())
}
