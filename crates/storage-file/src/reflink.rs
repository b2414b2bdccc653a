//! Sharing the space of another file's bytes.

use super::landing::unblocked;
use super::open::Kind;
use super::storage::FileStorage;
use super::sys;
use isobath_storage::{Result, Storage};
use std::io;

impl FileStorage {
    /// Clones a range of `from`; `Ok(Ok(false))` if the file system cannot.
    pub(super) async fn reflink(
        &self,
        from: &Self,
        from_offset: u64,
        to_offset: u64,
        length: u64,
    ) -> Result<io::Result<bool>> {
        if length == 0 {
            return Ok(Ok(true));
        }
        if self.capabilities().clone_alignment.is_none() || from.kind != Kind::Regular {
            return Ok(Ok(false));
        }
        let source = from.target().await?;
        let target = match self.kept() {
            Ok(target) => target,
            Err(error) => return Ok(Err(error)),
        };
        let guard = match &self.direct {
            Some(direct) => Some(direct.share(&target.lease, to_offset, to_offset + length).await),
            None => None,
        };
        self.landed().await;
        let landing = target.landing.clone();
        let call = unblocked(&landing, move || {
            let _guard = guard;
            sys::clone_range(&source.file, from_offset, &target.file, to_offset, length)
        });
        Ok(match call.await {
            Ok(()) => Ok(true),
            Err(error) if declined(&error) => Ok(false),
            Err(error) => Err(error),
        })
    }

    pub(super) fn find_clone_alignment(&self) -> Option<u64> {
        if self.kind != Kind::Regular || self.writing.has_ended() {
            return None;
        }
        let target = self.kept().ok()?;
        if !sys::can_clone(&target.file) {
            return None;
        }
        sys::block_size(&target.file).ok().filter(|block| block.is_power_of_two())
    }
}

/// Whether the file system does not support this clone, as opposed to having failed: another file system, an alignment,
/// an unsupported kind of file.
fn declined(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    matches!(
        code,
        Some(
            libc::EOPNOTSUPP
                | libc::ENOTTY
                | libc::ENOSYS
                | libc::EXDEV
                | libc::EINVAL
                | libc::EPERM
                | libc::ETXTBSY
                | libc::EBUSY
        )
    )
}
