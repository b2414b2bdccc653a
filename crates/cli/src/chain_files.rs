//! Finds the images of a chain by name.

use crate::failure::Failure;
use crate::host::images;
use crate::options::printable;
use isobath_disk::{Layer, LayerIndex, Trust};
use isobath_image::name::name_in_header;
use isobath_storage::{Host, Storage};
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// The layer called `name`: the name in its overlay's header, a path relative to that overlay's directory, or a path.
/// `layers` starts with the active one.
pub(crate) fn find<S: Storage>(layers: &[Arc<Layer<S>>], name: &str) -> Option<LayerIndex> {
    let index = |place: usize| u16::try_from(layers.len() - 1 - place).ok().map(LayerIndex::new);
    let named = |(overlay, layer): (&Arc<Layer<S>>, &Arc<Layer<S>>)| {
        let stored = overlay.header().and_then(|header| header.backing_file);
        let beside = overlay.name().parent().map(|directory| directory.join(name));
        stored.is_some_and(|stored| stored == name && leads_to(overlay, &stored, layer))
            || beside.is_some_and(|beside| same_file(&beside, layer.name()))
    };
    let stored = layers.iter().zip(layers.iter().skip(1)).position(named);
    let given = || layers.iter().position(|layer| same_file(Path::new(name), layer.name()));
    index(stored.map(|place| place + 1).or_else(given)?)
}

/// Whether the layer is what its overlay's header names. Another backing file may have been given instead.
fn leads_to<S: Storage>(overlay: &Layer<S>, stored: &str, layer: &Layer<S>) -> bool {
    let named = name_in_header(images(), overlay.name(), "backing file", stored, &Trust::Full);
    let Ok(named) = named else { return false };
    let path = images().resolve(overlay.name(), &named);
    path == layer.name() || images().find(&path).is_ok_and(|id| id == Some(layer.storage().id()))
}

fn same_file(one: &Path, other: &Path) -> bool {
    match (fs::canonicalize(one), fs::canonicalize(other)) {
        (Ok(one), Ok(other)) => one == other,
        _ => false,
    }
}

/// Like [`find`], but the layer must exist.
///
/// # Errors
/// QEMU's, if there is no such layer.
pub(crate) fn required<S: Storage>(
    layers: &[Arc<Layer<S>>],
    name: &str,
    image: &Path,
) -> Result<LayerIndex, Failure> {
    find(layers, name).ok_or_else(|| {
        let (name, image) = (printable(name), printable(&image.to_string_lossy()));
        Failure::new(format_args!("Did not find '{name}' in the backing chain of '{image}'"))
    })
}
