//! What a crash has lost; the paper distinguishes guest data, metadata and the journal.

use super::oracle::{SECTOR, is_filled};
use isobath_qcow2::Header;
use std::ops::AddAssign;

/// The number of states that lost something, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Guest data.
    pub data: u64,
    /// Header, tables and refcounts; for a guest's image its data too, which cannot be distinguished from them.
    pub metadata: u64,
    /// Records of the journal.
    pub journal: u64,
}

impl AddAssign for Losses {
    fn add_assign(&mut self, other: Self) {
        self.data += other.data;
        self.metadata += other.metadata;
        self.journal += other.journal;
    }
}

impl Losses {
    /// The losses of one state; `whole` is the image if nothing had been lost.
    pub fn of(state: &[u8], whole: &[u8]) -> Self {
        let header = Header::parse(whole).ok();
        let journal = header.as_ref().and_then(Header::journal).map(|journal| {
            let start = journal.area_offset.get() as usize;
            start..start + journal.area_length as usize
        });
        let sector = |bytes: &'_ [u8], at: usize| {
            let mut sector = [0; SECTOR];
            let there = bytes.get(at..).unwrap_or_default();
            let count = there.len().min(SECTOR);
            sector[..count].copy_from_slice(&there[..count]);
            sector
        };
        let (mut data, mut metadata, mut records) = (false, false, false);
        for at in (0..state.len().max(whole.len())).step_by(SECTOR) {
            let (here, there) = (sector(state, at), sector(whole, at));
            if here == there {
                continue;
            }
            if journal.as_ref().is_some_and(|journal| journal.contains(&at)) {
                records = true;
            } else if is_filled(&here) || is_filled(&there) {
                data = true;
            } else {
                metadata = true;
            }
        }
        Self { data: data.into(), metadata: metadata.into(), journal: records.into() }
    }
}
