//! Entries of the tables that say where clusters of metadata are: the L1 table and the refcount table.

/// Bits 9 to 55: the offset, for entries of L1, L2 and bitmap tables.
pub(crate) const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;

/// A type for the entries of `$table`, each of which holds the host offset of `$target`, in the bits of `$offset`. An
/// offset of 0 means that there is none; `$nothing` says what that amounts to. `$field` names the offset in errors.
macro_rules! table_entry {
    (
        $(#[$doc:meta])*
        $name:ident: $target:literal in $table:literal, $nothing:literal
        field $field:literal, offset $offset:expr, reserved $reserved:expr
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name(u64);

        impl $name {
            /// The entry with this offset and no other bit set.
            fn at(
                offset: crate::offset::HostOffset,
                geometry: &crate::geometry::Geometry,
            ) -> Result<Self, crate::error::FormatError> {
                geometry.check_offset($field, offset)?;
                if offset.get() == 0 {
                    let reason = "is the offset of the header";
                    return Err(crate::error::FormatError::invalid($field, 0, reason));
                }
                Ok(Self(offset.get()))
            }

            #[doc = concat!("The entry where there is no ", $target, $nothing, ".")]
            pub const fn unallocated() -> Self {
                Self(0)
            }

            /// The entry with this value on disk.
            pub const fn from_raw(raw: u64) -> Self {
                Self(raw)
            }

            /// The value on disk.
            pub const fn raw(self) -> u64 {
                self.0
            }

            #[doc = concat!("Where the ", $target, " is; `None` if there is none", $nothing, ".")]
            /// Reserved bits are ignored, as QEMU does; see [`reserved_bits`](Self::reserved_bits).
            ///
            /// # Errors
            /// If the offset is not aligned to a cluster, or not below 2^56.
            #[inline]
            pub fn offset(
                self,
                geometry: &crate::geometry::Geometry,
            ) -> Result<Option<crate::offset::HostOffset>, crate::error::FormatError> {
                let offset = self.0 & $offset;
                if offset == 0 {
                    return Ok(None);
                }
                geometry.check_offset($field, crate::offset::HostOffset::new(offset)).map(Some)
            }

            /// Reserved bits that are set; a check reports them.
            pub const fn reserved_bits(self) -> u64 {
                self.0 & $reserved
            }

            #[doc = concat!("Entry `index` of the bytes of ", $table, "; `None` past its end.")]
            #[inline]
            pub fn read(table: &[u8], index: usize) -> Option<Self> {
                crate::bytes::entry64(table, index).map(Self)
            }

            #[doc = concat!("Puts the entry at `index` of the bytes of ", $table, "; `None`, and")]
            /// nothing written, past its end.
            #[inline]
            #[must_use = "nothing is written past the table's end"]
            pub fn write(self, table: &mut [u8], index: usize) -> Option<()> {
                crate::bytes::put_entry64(table, index, self.0)
            }
        }
    };
}
pub(crate) use table_entry;
