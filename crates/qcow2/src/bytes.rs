//! Big-endian numbers in byte slices, without panics.

/// `N` bytes at `at`, if they are there.
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk::<N>().copied()
}

/// The 16-bit number at `at`.
pub(crate) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    array(bytes, at).map(u16::from_be_bytes)
}

/// The 32-bit number at `at`.
pub(crate) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    array(bytes, at).map(u32::from_be_bytes)
}

/// The 64-bit number at `at`.
pub(crate) fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    array(bytes, at).map(u64::from_be_bytes)
}

/// Entry `index` of a table of 64-bit numbers.
#[inline]
pub(crate) fn entry64(table: &[u8], index: usize) -> Option<u64> {
    be64(table, index.checked_mul(8)?)
}

/// Puts entry `index` of a table of 64-bit numbers; `None` if the table is too short.
#[inline]
pub(crate) fn put_entry64(table: &mut [u8], index: usize, value: u64) -> Option<()> {
    *table.get_mut(index.checked_mul(8)?..)?.first_chunk_mut::<8>()? = value.to_be_bytes();
    Some(())
}

/// Copies `source` to `at`; `None` if it does not fit.
pub(crate) fn put(bytes: &mut [u8], at: usize, source: &[u8]) -> Option<()> {
    bytes.get_mut(at..at.checked_add(source.len())?)?.copy_from_slice(source);
    Some(())
}
