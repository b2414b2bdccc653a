//! The qcow2 image format: parse and encode, with no I/O.
//!
//! Everything here works on bytes that someone else has read or will write. Parsers take hostile
//! bytes: they never panic, allocate in proportion to what they are given, and refuse with a
//! [`FormatError`] that names the field, its value and what to do. Section names refer to the qcow2
//! specification (`docs/interop/qcow2` in QEMU's sources).
//!
//! - [`Header`]: the first cluster, with its [`Extension`]s; [`Geometry`]: the sizes it fixes.
//! - [`L1Entry`], [`L2Entry`], [`ClusterKind`]: where guest clusters are.
//! - [`RefcountTableEntry`], [`RefcountOrder`]: which host clusters are in use.
//! - [`compress`]: compressed clusters; [`Snapshot`]: internal snapshots; [`Bitmap`]: persistent
//!   bitmaps.
//! - [`index`]: the direct-access index, an extension of the format; [`Head`]: what it has of a layer to open it.
//! - [`journal`]: the metadata journal, another extension; [`embedded`]: mappings that lie in the data.
//! - [`NewImage`]: what to write for a new image.

// A `Geometry` goes by reference everywhere, as in the public functions.
#![allow(clippy::trivially_copy_pass_by_ref)]

pub mod bitmap;
pub mod compress;
pub mod create;
pub mod embedded;
pub mod error;
pub mod extension;
pub mod features;
pub mod geometry;
pub mod head;
pub mod header;
pub mod index;
pub mod journal;
pub mod l1;
pub mod l2;
pub mod offset;
pub mod probe;
pub mod refcount;
mod refcount_order;
pub mod snapshot;
pub mod text;

mod bit_set;
mod bytes;
mod checksum;
mod lsn;
mod table_entry;

pub use bitmap::{Bitmap, BitmapCluster, BitmapFlags};
pub use checksum::Crc32c;
pub use compress::CompressionType;
pub use create::{NewImage, Plan};
pub use error::{FormatError, FormatErrorKind};
pub use extension::{BitmapsExtension, Extension};
pub use features::{
    AutoclearFeatures, CompatibleFeatures, FeatureKind, FeatureName, FeatureNameTable,
    IncompatibleFeatures,
};
pub use geometry::{Geometry, GuestPosition};
pub use head::Head;
pub use header::{Header, ParseMode, is_qcow2};
pub use l1::L1Entry;
pub use l2::{ClusterKind, CompressedCluster, L2Entry};
pub use lsn::Lsn;
pub use offset::{ClusterIndex, GuestOffset, HostCluster, HostOffset};
pub use refcount::{RefcountOrder, RefcountTableEntry};
pub use snapshot::Snapshot;
