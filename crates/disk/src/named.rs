//! Whether what is open below a layer is what its header names.

use crate::disk::Disk;
use isobath_image::layer::{ImageFormat, Layer};
use isobath_image::name::{backing_format, name_in_header};
use isobath_image::options::Trust;
use isobath_storage::{FileId, Host, Storage, StorageExt};
use std::path::Path;

/// Whether the header of an image says that its backing file has the format in which it was opened. If it names none,
/// that is detected.
pub(crate) fn has_format<S: Storage>(layer: &Layer<S>, below: &Layer<S>) -> bool {
    let Some(header) = layer.header() else { return false };
    let name = header.backing_file.as_deref().unwrap_or_default();
    match backing_format(layer.name(), name, header.backing_format()) {
        Ok(Some(named)) => ImageFormat::of_backing(&named) == Some(below.format()),
        Ok(None) => below.format() != ImageFormat::Raw || below.is_detected_raw(),
        Err(_) => false,
    }
}

impl<H: Host> Disk<H> {
    /// Whether the backing file that the header of `layer` names is the one that is open as `below`.
    pub(crate) fn leads_to(&self, layer: &Layer<H::File>, below: &Layer<H::File>) -> bool {
        let named = layer.header().and_then(|header| header.backing_file);
        let file = below.storage().id();
        named.is_some_and(|named| self.names(layer, "backing file", &named, (below.name(), file)))
    }

    /// Whether a name in the header of `layer` is that of an open file, or leads to it.
    pub(crate) fn names(
        &self,
        layer: &Layer<H::File>,
        field: &str,
        name: &str,
        (path, file): (&Path, FileId),
    ) -> bool {
        let Ok(plain) = name_in_header(&*self.host, layer.name(), field, name, &Trust::Full) else {
            return false;
        };
        let named = self.host.resolve(layer.name(), &plain);
        named == path || matches!(self.host.find(&named), Ok(Some(found)) if found == file)
    }
}
