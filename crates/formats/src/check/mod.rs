//! Checks of images: what QEMU checks of each format, and whether two blocks have the same bytes of the file.

mod qed;
mod used;
mod vdi;
mod vhdx;

use crate::error::{Error, Result};
use crate::image::{Format, Image, Tables};
use isobath_qcow2::FormatErrorKind;
use isobath_storage::{IoBuf, Storage};
use std::fmt;

/// Bytes of a table that are read at a time.
const PIECE: u64 = 1 << 20;

/// The most errors of one image that are told; the others are only counted.
const MOST_TOLD: u64 = 1000;

/// What a check found. The numbers are those of `qemu-img check`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Blocks of the disk; 0 if the format's check does not count them.
    pub total: u64,
    /// Blocks of the disk with data in the image.
    pub allocated: u64,
    /// Of these, those that do not follow their predecessor in the file.
    pub fragmented: u64,
    /// Errors that remain.
    pub corruptions: u64,
    /// Errors that were repaired.
    pub corruptions_fixed: u64,
    /// Blocks of the file that nothing refers to.
    pub leaks: u64,
    /// The check has ended at the first error, as QEMU's does for this format.
    pub ended_early: bool,
}

/// The errors of a check, which go to whoever has asked for it.
struct Findings<'a> {
    found: Found,
    tell: &'a mut dyn FnMut(&str),
}

impl Findings<'_> {
    /// An error; its text is made only if it is told.
    fn corruption(&mut self, text: fmt::Arguments<'_>) {
        if self.tells() {
            self.found.corruptions += 1;
            (self.tell)(&text.to_string());
        } else {
            self.only_counted(1);
        }
    }

    /// Whether the next error is told.
    const fn tells(&self) -> bool {
        self.found.corruptions < MOST_TOLD
    }

    /// Errors after the [`MOST_TOLD`].
    fn only_counted(&mut self, errors: u64) {
        if errors > 0 && self.found.corruptions == MOST_TOLD {
            (self.tell)("ERROR: there are more errors, which are only counted");
        }
        self.found.corruptions += errors;
    }
}

impl<S: Storage> Image<S> {
    /// Checks the image's tables, and calls `tell` with a line for each error. Returns `None` if there is no check for
    /// its format.
    ///
    /// With `repair`, invalid entries of a QED image are cleared, and it is marked as closed once nothing is wrong with
    /// it: its file must be writable, and used by nobody else. Other formats have no repair.
    ///
    /// # Errors
    /// If a table cannot be read or written, or takes too much memory to be checked.
    pub async fn check(&self, repair: bool, tell: &mut dyn FnMut(&str)) -> Result<Option<Found>> {
        let mut findings = Findings { found: Found::default(), tell };
        let file = self.files.file(0)?;
        match &self.tables {
            Tables::Vpc(_) => return Ok(None),
            Tables::Vmdk(_) => self.check_runs(&mut findings).await?,
            Tables::Vdi(vdi) => vdi.check(file, self.size, &mut findings).await?,
            Tables::Vhdx(vhdx) => vhdx.check(file, &mut findings).await?,
            Tables::Qed(qed) => qed.check(file, self.size, repair, &mut findings).await?,
        }
        Ok(Some(findings.found))
    }

    /// Looks up the whole disk, up to the first error.
    async fn check_runs(&self, findings: &mut Findings<'_>) -> Result<()> {
        let mut at = 0;
        while at < self.size {
            match self.run(at, self.size - at).await {
                Ok(run) => at += run.length,
                Err(Error::Format { source, .. }) => {
                    let sector = at / 512;
                    match source.kind() {
                        FormatErrorKind::Truncated => findings.corruption(format_args!(
                            "ERROR: cluster offset for sector {sector} points after EOF"
                        )),
                        _ => findings.corruption(format_args!(
                            "ERROR: could not get cluster_offset for sector {sector}: {source}"
                        )),
                    }
                    findings.found.ended_early = true;
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Format {
    /// Whether `qemu-img check` checks images of the format.
    pub const fn can_be_checked(self) -> bool {
        !matches!(self, Self::Vpc)
    }

    /// Whether `qemu-img check -r` does. Of a VHDX it only replays the log.
    pub const fn can_be_repaired(self) -> bool {
        matches!(self, Self::Vhdx | Self::Qed)
    }
}

/// Calls `each` with the number and the value of every entry of a table of 4 or 8 bytes each, in order.
async fn entries<S: Storage, const N: usize>(
    storage: &S,
    offset: u64,
    count: u64,
    mut each: impl FnMut(u64, [u8; N]) -> Result<()>,
) -> Result<()> {
    let mut first = 0;
    while first < count {
        let bytes = piece::<S, N>(storage, offset, first, count).await?;
        let (all, _) = bytes.as_chunks::<N>();
        for (number, entry) in (first..).zip(all) {
            each(number, *entry)?;
        }
        first += all.len() as u64;
    }
    Ok(())
}

/// Entries of a table from `first` on, at least one and at most a [`PIECE`] of them.
async fn piece<S: Storage, const N: usize>(
    storage: &S,
    offset: u64,
    first: u64,
    count: u64,
) -> Result<IoBuf> {
    let size = N as u64;
    let here = (PIECE / size).min(count - first);
    let bytes = IoBuf::zeroed((here * size) as usize);
    Ok(storage.read_at(offset + first * size, bytes).await?)
}
