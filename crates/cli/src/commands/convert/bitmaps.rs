//! The persistent bitmaps that `convert` copies.

use super::Args;
use crate::failure::Failure;
use crate::host::images;
use crate::image_name::{Image, reason};
use crate::{messages, options};
use isobath_disk::{BitmapAction, BitmapBits, BitmapEditor, info, read_bitmap};

/// A bitmap of the source.
pub(super) struct Copied {
    name: String,
    granularity: u64,
    enabled: bool,
    bits: BitmapBits,
}

/// The bitmaps of a source.
pub(super) async fn of(source: &Image, args: &Args) -> Result<Vec<Copied>, Failure> {
    let open = source.options(false, options::locking(args.force_share));
    let look = source.look(options::locking(args.force_share));
    let found = info(images(), &source.path, &look).await.map_err(|error| source.failed(&error))?;
    let Some(qcow2) = found.qcow2.filter(|qcow2| qcow2.version >= 3) else {
        return Err(Failure::new("Source lacks bitmap support"));
    };
    let mut copied = Vec::new();
    for bitmap in qcow2.bitmaps {
        let name = options::printable(&bitmap.name);
        if bitmap.in_use && args.skip_broken_bitmaps {
            messages::complain(format_args!("warning: Skipping inconsistent bitmap '{name}'"));
            continue;
        }
        if bitmap.in_use {
            return Err(Failure::new(format_args!(
                "Cannot copy inconsistent bitmap '{name}'\nTry --skip-broken-bitmaps, or use \
                 'qemu-img bitmap --remove'"
            )));
        }
        let bits = read_bitmap(images(), &source.path, &open, &bitmap.name).await;
        let bits = bits.map_err(|error| {
            Failure::new(format_args!("Failed to read bitmap {name}: {}", reason(&error)))
        })?;
        copied.push(Copied {
            name: bitmap.name,
            granularity: bitmap.granularity,
            enabled: bitmap.auto,
            bits,
        });
    }
    Ok(copied)
}

/// Adds the bitmaps to the target.
pub(super) async fn copy(bitmaps: Vec<Copied>, target: &Image) -> Result<(), Failure> {
    let options = target.writable(false)?;
    let editor = Box::pin(BitmapEditor::open(images(), &target.path, &options)).await;
    let mut editor = editor.map_err(|error| target.failed(&error))?;
    for bitmap in bitmaps {
        let mut actions =
            vec![BitmapAction::Add(Some(bitmap.granularity)), BitmapAction::MergeFrom(bitmap.bits)];
        if !bitmap.enabled {
            actions.push(BitmapAction::Disable);
        }
        for action in actions {
            editor.apply(&bitmap.name, &action).await.map_err(|error| {
                let name = options::printable(&bitmap.name);
                let reason = reason(&error);
                Failure::new(format_args!("Failed to populate bitmap {name}: {reason}"))
            })?;
        }
    }
    Ok(Box::pin(editor.finish()).await?)
}
