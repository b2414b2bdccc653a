//! Proof that the log knows of the data that a new entry refers to.

/// Proof that the log knows of data that was written to a new place: its next record will contain checksums of the
/// data, or waits until it is durable. A caller that [records](crate::tables::Tables::record) an entry that refers to
/// such data must present this, so that no crash leaves the entry without the data.
#[derive(Clone, Copy, Debug)]
pub struct Checksummed(());

impl Checksummed {
    /// For [`DataJournal`](crate::durability::data_journal::DataJournal), which knows of the data.
    pub(crate) const fn new() -> Self {
        Self(())
    }
}
