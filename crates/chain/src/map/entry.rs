//! One unit of the map, packed into 64 bits.

use crate::chain::LayerIndex;

/// Bits of the payload: a host offset in units, or an index into a slice's compressed clusters.
const PAYLOAD_BITS: u32 = 44;
const PAYLOAD_MASK: u64 = (1 << PAYLOAD_BITS) - 1;
const LAYER_SHIFT: u32 = PAYLOAD_BITS;
const LAYER_MASK: u64 = 0xffff << LAYER_SHIFT;
const IN_PLACE: u64 = 1 << 60;
const KIND_SHIFT: u32 = 61;

/// The source of one unit of guest bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitKind {
    /// No layer has it: it reads as zeroes.
    Absent,
    /// A layer marks it as zeroes.
    Zero,
    /// Plain data at a host offset of a layer's data file.
    Data,
    /// Part of a compressed cluster of a layer.
    Compressed,
    /// A layer's tables are not valid here.
    Invalid,
}

/// A packed unit: kind (3 bits), may be written in place (1), layer (16), payload (44).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit(u64);

impl Unit {
    /// No layer has it.
    pub const ABSENT: Self = Self(0);

    /// Zeroes that a layer has.
    pub fn zero(layer: LayerIndex) -> Self {
        Self(1 << KIND_SHIFT | u64::from(layer.get()) << LAYER_SHIFT)
    }

    /// A unit for which the layer's tables are invalid.
    pub fn invalid(layer: LayerIndex) -> Self {
        Self(4 << KIND_SHIFT | u64::from(layer.get()) << LAYER_SHIFT)
    }

    /// Data at `host` bytes in the layer's data file, or `None` if that offset, in units, does not fit into 44 bits.
    pub fn data(layer: LayerIndex, host: u64, unit_bits: u32, in_place: bool) -> Option<Self> {
        let payload = host >> unit_bits;
        let flag = if in_place { IN_PLACE } else { 0 };
        let layer = u64::from(layer.get()) << LAYER_SHIFT;
        (payload <= PAYLOAD_MASK).then_some(Self(2 << KIND_SHIFT | flag | layer | payload))
    }

    /// Part of the compressed cluster that the slice keeps at `index`.
    pub fn compressed(layer: LayerIndex, index: u32) -> Self {
        Self(3 << KIND_SHIFT | u64::from(layer.get()) << LAYER_SHIFT | u64::from(index))
    }

    /// The unit with these [bits](Self::bits).
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The unit as a number.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Its kind.
    pub const fn kind(self) -> UnitKind {
        match self.0 >> KIND_SHIFT {
            1 => UnitKind::Zero,
            2 => UnitKind::Data,
            3 => UnitKind::Compressed,
            4 => UnitKind::Invalid,
            _ => UnitKind::Absent,
        }
    }

    /// The layer that has it.
    pub const fn layer(self) -> LayerIndex {
        LayerIndex::new((self.0 >> LAYER_SHIFT) as u16)
    }

    /// Whether it gives the place of the bytes by itself.
    pub fn is_plain(self) -> bool {
        matches!(self.kind(), UnitKind::Data | UnitKind::Zero)
    }

    /// The same in another layer.
    #[must_use]
    pub fn in_layer(self, layer: LayerIndex) -> Self {
        if self.kind() as u8 == UnitKind::Absent as u8 {
            return self;
        }
        Self(self.0 & !LAYER_MASK | u64::from(layer.get()) << LAYER_SHIFT)
    }

    /// Whether a write may go in place.
    pub const fn in_place(self) -> bool {
        self.0 & IN_PLACE != 0
    }

    /// The host offset of a data unit, in bytes.
    pub const fn host(self, unit_bits: u32) -> u64 {
        (self.0 & PAYLOAD_MASK) << unit_bits
    }

    /// The index of a compressed unit's cluster in its slice.
    pub const fn compressed_index(self) -> u32 {
        (self.0 & PAYLOAD_MASK) as u32
    }

    /// Whether `next`, the unit right after this one, continues the same extent.
    pub fn continues(self, next: Self) -> bool {
        match self.kind() {
            UnitKind::Data => self.0 + 1 == next.0 && (self.0 & PAYLOAD_MASK) != PAYLOAD_MASK,
            _ => self == next,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_gives_back_what_was_packed() {
        let layer = LayerIndex::new(u16::MAX);
        let unit = Unit::data(layer, 5 << 16, 16, true).unwrap();
        assert_eq!((unit.kind(), unit.layer(), unit.in_place()), (UnitKind::Data, layer, true));
        assert_eq!(unit.host(16), 5 << 16);
        assert!(Unit::data(layer, 1 << 60, 16, true).is_none());
        let unit = Unit::compressed(layer, 7);
        assert_eq!((unit.kind(), unit.layer()), (UnitKind::Compressed, layer));
        assert_eq!(unit.compressed_index(), 7);
        assert_eq!(Unit::ABSENT.kind(), UnitKind::Absent);
        assert_eq!(Unit::zero(layer).kind(), UnitKind::Zero);
    }

    #[test]
    fn only_adjacent_host_units_make_one_extent() {
        let at = |n: u64, layer| Unit::data(LayerIndex::new(layer), n << 16, 16, false).unwrap();
        assert!(at(1, 0).continues(at(2, 0)));
        assert!(!at(1, 0).continues(at(3, 0)));
        assert!(!at(1, 0).continues(at(2, 1)));
        assert!(!at((1 << 44) - 1, 0).continues(at(0, 1)));
        assert!(Unit::ABSENT.continues(Unit::ABSENT));
        assert!(!Unit::ABSENT.continues(Unit::zero(LayerIndex::new(0))));
    }
}
