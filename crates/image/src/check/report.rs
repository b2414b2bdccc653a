//! What a check may do, and what it says.

use isobath_formats::Format;

/// What a check may change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Repair {
    /// Nothing; the image is opened read-only.
    #[default]
    None,
    /// Refcounts that are too high (`-r leaks`).
    Leaks,
    /// Everything that can be repaired without guessing (`-r all`).
    All,
}

/// An event that a check reports while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckEvent<'a> {
    /// Something is wrong, or is being repaired: one line for the user, as QEMU words it.
    Finding(&'a str),
    /// The same, for formats of which QEMU's program says it with its own name in front.
    Complaint(&'a str),
    /// The number of L2 tables read so far, and the total.
    Progress {
        /// Tables read.
        done: u64,
        /// Tables to read.
        total: u64,
    },
}

/// What a check found. The numbers are those of `qemu-img check`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// One past the last host cluster in use, in bytes.
    pub image_end_offset: u64,
    /// Guest clusters of the disk.
    pub total_clusters: u64,
    /// Guest clusters with data in the image.
    pub allocated_clusters: u64,
    /// Allocated guest clusters that do not follow their predecessor in the file.
    pub fragmented_clusters: u64,
    /// Allocated guest clusters that are compressed.
    pub compressed_clusters: u64,
    /// Errors that remain.
    pub corruptions: u64,
    /// Clusters that remain marked as in use although nothing refers to them.
    pub leaks: u64,
    /// Errors that were repaired.
    pub corruptions_fixed: u64,
    /// Leaked clusters that were freed.
    pub leaks_fixed: u64,
    /// Structures that could not be examined, so that the rest of the report is incomplete.
    pub check_errors: u64,
    /// The format of an image that is not a qcow2 image.
    pub foreign: Option<Format>,
    /// The check has ended at the first error, as QEMU's does for some formats.
    pub ended_early: bool,
}

impl CheckReport {
    /// Whether nothing wrong remains.
    pub fn is_clean(&self) -> bool {
        self.corruptions == 0 && self.leaks == 0 && self.check_errors == 0
    }
}
