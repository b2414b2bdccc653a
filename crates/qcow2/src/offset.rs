//! Offsets and cluster numbers as types, so that a guest's and a file's cannot be mistaken.

use std::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u64);

        impl $name {
            /// The value as a type.
            #[inline]
            pub const fn new(value: u64) -> Self {
                Self(value)
            }

            /// The bare value.
            #[inline]
            pub const fn get(self) -> u64 {
                self.0
            }

            /// `self + by`, or `None` where that exceeds 64 bits.
            #[inline]
            pub const fn checked_add(self, by: u64) -> Option<Self> {
                match self.0.checked_add(by) {
                    Some(sum) => Some(Self(sum)),
                    None => None,
                }
            }

            /// `self - by`, or `None` where that is negative.
            #[inline]
            pub const fn checked_sub(self, by: u64) -> Option<Self> {
                match self.0.checked_sub(by) {
                    Some(rest) => Some(Self(rest)),
                    None => None,
                }
            }
        }
    };
}

number! {
    /// A byte offset into the virtual disk.
    GuestOffset
}
number! {
    /// A byte offset into an image file (or into its external data file).
    HostOffset
}
number! {
    /// The number of a guest cluster: the guest offset divided by the cluster size.
    ClusterIndex
}
number! {
    /// The number of a host cluster: the host offset divided by the cluster size.
    HostCluster
}

impl fmt::Display for GuestOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for HostOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for ClusterIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for HostCluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_print_in_hex_and_indices_in_decimal() {
        assert_eq!(HostOffset::new(0x50000).to_string(), "0x50000");
        assert_eq!(GuestOffset::new(512).to_string(), "0x200");
        assert_eq!(ClusterIndex::new(17).to_string(), "17");
        assert_eq!(HostCluster::new(17).to_string(), "17");
    }

    #[test]
    fn arithmetic_is_checked() {
        assert_eq!(HostOffset::new(1).checked_add(2), Some(HostOffset::new(3)));
        assert_eq!(HostOffset::new(u64::MAX).checked_add(1), None);
        assert_eq!(GuestOffset::new(1).checked_sub(2), None);
        assert_eq!(GuestOffset::new(3).checked_sub(2), Some(GuestOffset::new(1)));
    }
}
