//! The ways in which the two programs may judge a damaged image differently. Each has a section of its
//! name in `docs/compatibility.md`, which gives the reason.

use std::fmt;

/// An accepted disagreement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Isobath does not open an image for reading that QEMU opens.
    OpenedByQemuOnly,
    /// QEMU does not open an image for reading that Isobath opens.
    OpenedByIsobathOnly,
    /// Isobath reads no byte where QEMU reads some.
    ReadByQemuOnly,
    /// QEMU reads no byte where Isobath reads some.
    ReadByIsobathOnly,
    /// Isobath's check finds errors, QEMU's does not.
    FoundByIsobathOnly,
    /// Isobath's check refuses an image that QEMU's examines.
    ExaminedByQemuOnly,
    /// QEMU's check refuses an image that Isobath's examines, and finds fault with.
    ExaminedByIsobathOnly,
    /// Both find errors, but not as many of them.
    CountedDifferently,
    /// Isobath writes, and QEMU finds errors and does not.
    WrittenByIsobathOnly,
    /// QEMU writes, and Isobath finds errors and does not.
    WrittenByQemuOnly,
    /// A write changes other parts of the disk as well, since refcounts or flags say too little.
    RefcountsTooLow,
}

impl Kind {
    pub(crate) const ALL: [Self; 11] = [
        Self::OpenedByQemuOnly,
        Self::OpenedByIsobathOnly,
        Self::ReadByQemuOnly,
        Self::ReadByIsobathOnly,
        Self::FoundByIsobathOnly,
        Self::ExaminedByQemuOnly,
        Self::ExaminedByIsobathOnly,
        Self::CountedDifferently,
        Self::WrittenByIsobathOnly,
        Self::WrittenByQemuOnly,
        Self::RefcountsTooLow,
    ];

    /// As the documentation calls it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::OpenedByQemuOnly => "opened-by-qemu-only",
            Self::OpenedByIsobathOnly => "opened-by-isobath-only",
            Self::ReadByQemuOnly => "read-by-qemu-only",
            Self::ReadByIsobathOnly => "read-by-isobath-only",
            Self::FoundByIsobathOnly => "found-by-isobath-only",
            Self::ExaminedByQemuOnly => "examined-by-qemu-only",
            Self::ExaminedByIsobathOnly => "examined-by-isobath-only",
            Self::CountedDifferently => "counted-differently",
            Self::WrittenByIsobathOnly => "written-by-isobath-only",
            Self::WrittenByQemuOnly => "written-by-qemu-only",
            Self::RefcountsTooLow => "refcounts-too-low",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[test]
fn every_accepted_disagreement_is_documented() {
    let page = include_str!("../../../../../docs/compatibility.md");
    let documented = page.lines().filter_map(|line| line.strip_prefix("### `")?.strip_suffix('`'));
    let documented: Vec<&str> = documented.collect();
    assert_eq!(documented, Kind::ALL.map(Kind::name));
}
