//! The secrets that unlock an encrypted image.

use crate::change::Change;
use crate::encryption::{Secret, SlotState, keys_on_thread, locked, read_area};
use crate::options::OpenOptions;
use crate::{DiskError, Result};
use isobath_luks::{Amend, Header, Write, system_random};
use isobath_storage::{Host, IoBuf, Storage, StorageExt};
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

/// Changes the secrets that unlock an image that nobody uses; its data stays as it is. `options` have a secret that
/// unlocks it. With `force`, an active key slot is overwritten, and the last one erased, after which nobody can read
/// the data. After a crash the secrets that do not change still unlock the image.
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
    let opened = Change::begin(host, name, options, "encryption").await?;
    let layer = opened.close().await?;
    let area = layer.header().and_then(|header| header.encryption());
    let Some((offset, length)) = area else {
        return Err(refused("Can't amend encryption options - encryption not present".into()));
    };
    let Some(secret) = options.secrets.at(0).cloned() else { return Err(locked(name)) };
    let area = read_area(&**layer.storage(), name, offset.get(), length).await?;
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
    let changed = changed.await?.map_err(|error| refused(error.to_string()))?;
    for Write { offset: at, bytes } in changed.writes {
        layer.storage().write_at(offset.get() + at, IoBuf::copy_of(&bytes)).await?;
        layer.storage().flush().await?;
    }
    Ok(())
}
