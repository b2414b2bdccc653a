//! What a new entry needs of the data that it refers to.

/// Says that the log knows of data that was written to a new place: its next record will have checksums of it, or
/// waits until it is durable. Whoever [records](crate::tables::Tables::record) an entry that refers to such data
/// shows this, so that no crash leaves the entry without the data.
#[derive(Clone, Copy, Debug)]
pub struct Checksummed(());

impl Checksummed {
    /// For [`DataJournal`](crate::durability::data_journal::DataJournal), which has been told of the data.
    pub(crate) const fn new() -> Self {
        Self(())
    }
}
