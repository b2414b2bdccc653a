//! Sets of bits: the header's features, the flags of bitmaps.

/// A type for a field whose bits mean one thing each.
macro_rules! bit_set {
    ($(#[$doc:meta])* $name:ident($bits:ty) { $($(#[$bit_doc:meta])* $bit:ident = $n:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct $name($bits);

        impl $name {
            $($(#[$bit_doc])* pub const $bit: Self = Self(1 << $n);)*

            /// The set with these bits.
            pub const fn from_bits(bits: $bits) -> Self {
                Self(bits)
            }

            /// The bits, as on disk.
            pub const fn bits(self) -> $bits {
                self.0
            }

            /// Whether every bit of `other` is set.
            pub const fn contains(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// The set with the bits of `other` too.
            #[must_use]
            pub const fn with(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }

            /// The set without the bits of `other`.
            #[must_use]
            pub const fn without(self, other: Self) -> Self {
                Self(self.0 & !other.0)
            }
        }
    };
}
pub(crate) use bit_set;
