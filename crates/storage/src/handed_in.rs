//! Names of files that were handed in as descriptors.

use std::path::Path;

/// How the name of a descriptor set begins, before its number.
pub const DESCRIPTOR_SETS: &str = "/dev/fdset/";

/// Whether a name is that of a set of descriptors that were handed in: nothing else can be found by it or beside it,
/// and no other program opens the file by it.
pub fn is_descriptor_set(name: &Path) -> bool {
    name.to_str().is_some_and(|name| name.starts_with(DESCRIPTOR_SETS))
}
