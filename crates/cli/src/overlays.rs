//! Local images above chains in stores, for what is written.

use crate::failure::Failure;
use crate::host::{is_file_name, is_stored};
use crate::stored;
use isobath_disk::{
    Disk, DiskError, Forked, ImageFormat, Layer, LiveDisk, NewDisk, OpenOptions, Secrets, Trust,
    fork, see_layers,
};
use isobath_image::open::referenced_file;
use isobath_remote::Address;
use isobath_remote::served::{Chain, Pinned};
use isobath_storage::{Host, Locking, Storage, StorageExt, is_descriptor_set, shown, word};
use std::collections::HashSet;
use std::fmt::Display;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Whether there is a file for an overlay with this name.
///
/// # Errors
/// What has the name cannot be an overlay: it is not a regular file, or has nothing in it.
pub(crate) fn exists(overlay: &Path) -> Result<bool, Failure> {
    let wrong = |what: &dyn Display| {
        Err(Failure::new(format_args!("the overlay '{}' {what}", shown(overlay))))
    };
    if !is_file_name(overlay) || is_descriptor_set(overlay) {
        return wrong(
            &"must be a file: a name that looks like another thing is one with './' in front",
        );
    }
    match fs::metadata(overlay) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => {
            wrong(&format_args!("cannot be examined: {}", isobath_storage::cause(&error)))
        }
        Ok(found) if !found.is_file() => wrong(
            &"is not a regular file: an overlay is made under a name that is free, and what is there stays",
        ),
        Ok(found) if found.len() == 0 => wrong(
            &"is an empty file: another program is about to write it, or was interrupted. If none uses it, remove it, \
              and the overlay is made anew",
        ),
        Ok(_) => Ok(true),
    }
}

/// The lowest of the local images above a chain.
pub(crate) struct Lowest {
    image: PathBuf,
    /// The layers that its header names.
    pinned: Pinned,
    /// The format of these in its header.
    format: Option<String>,
}

impl Lowest {
    /// The command by which it is led to the same layers under another address.
    fn rebase(&self, address: &str) -> String {
        format!(
            "'isobath rebase -u -F {} -b {} {}'",
            word(self.format.as_deref().unwrap_or("FORMAT")),
            word(&self.pinned.at(address)),
            word(&self.image)
        )
    }
}

/// Examines the headers of an overlay, which is to be opened `writable` or not, and of the local images below it,
/// without the chain. Each is shown to `see`.
///
/// # Errors
/// They do not lead to the chain at `address`, or cannot be read.
pub(crate) async fn examine<H: Host>(
    host: &H,
    overlay: &Path,
    address: &Address,
    writable: bool,
    mut see: impl FnMut(&Layer<H::File>) -> Result<(), Failure>,
) -> Result<Lowest, Failure> {
    let wrong = |image: &Path, what: &dyn Display| {
        let of =
            if image == overlay { String::new() } else { format!(" above '{}'", shown(image)) };
        Failure::new(format_args!(
            "'{}'{of} is no overlay of '{address}': {what}; expected is '{address}@sha256:DIGEST'. An overlay is made \
             under a name that is free",
            shown(overlay)
        ))
    };
    let alone = OpenOptions::new().backing(false).locking(Locking::Unlocked);
    let alone = alone.secrets(Secrets::unneeded());
    let mut next = (overlay.to_owned(), Some(ImageFormat::Qcow2));
    let mut seen = HashSet::new();
    loop {
        let (image, format) = next;
        let (mut shown_to, mut head) = (Ok(()), None);
        let look = |layer: &Layer<H::File>| {
            let name = layer.name().to_owned();
            head = Some((layer.storage().id(), name, layer.header(), layer.format()));
            shown_to = see(layer);
            Ok::<_, DiskError>(())
        };
        let looked = see_layers(host, &image, &alone.clone().format(format), look).await;
        looked.map_err(|error| wrong(&image, &error))?;
        shown_to?;
        let Some((id, name, header, format)) = head else { unreachable!("a disk has a layer") };
        if !seen.insert(id) {
            return Err(wrong(&image, &"the names in the headers lead in a circle"));
        }
        let named = header.as_ref().and_then(|header| header.backing_file.as_deref());
        let backing = header.as_ref().and_then(|header| header.backing_format());
        let read_only = if writable { "" } else { "--read-only " };
        let Some(named) = named else {
            let lowest = shown(&image);
            let why = match format {
                ImageFormat::Qcow2 => format!("the header of '{lowest}' names no backing file"),
                format => format!("'{lowest}' below it is a {} image", format.name()),
            };
            return Err(Failure::new(format_args!(
                "'{}' is no overlay of '{address}': {why}. If the disk is whole, as after a stream, it is served \
                 alone, with 'isobath serve {read_only}{}'. An overlay is made under a name that is free",
                shown(overlay),
                word(overlay)
            )));
        };
        let escaped = named.escape_debug();
        match Pinned::parse(named) {
            Some(pinned) => {
                let format = backing.map(str::to_owned);
                let lowest = Lowest { image: image.clone(), pinned, format };
                let other = &lowest.pinned.address;
                // Two ways to write a directory's address are two names, of which images have one.
                if other.to_string() == address.to_string() {
                    return Ok(lowest);
                }
                let rebase = lowest.rebase(&address.to_string());
                let rebase = format!("; if they are in '{address}' now, {rebase} leads it there");
                let way_out = format!(
                    "'isobath serve {read_only}{} --overlay {}' serves it{}",
                    word(&other.to_string()),
                    word(overlay),
                    if writable { &rebase } else { "" }
                );
                return Err(wrong(
                    &image,
                    &format_args!("its header names '{escaped}', layers of '{other}' ({way_out})"),
                ));
            }
            None if is_stored(Path::new(named)) => {
                return Err(wrong(
                    &image,
                    &format_args!("its header names '{escaped}', which does not say which layers"),
                ));
            }
            None => {}
        }
        let below = referenced_file(host, &name, "backing file", named, &Trust::Full)
            .map_err(|error| wrong(&image, &error))?;
        if !is_file_name(&below) {
            return Err(wrong(
                &image,
                &format_args!("its header names '{escaped}', which is no file"),
            ));
        }
        next = (below, backing.and_then(ImageFormat::of_backing));
    }
}

/// Makes sure that there is an overlay of a chain: if there is no file of its name, it is made, durably.
///
/// # Errors
/// There is a file that is none, or one over other layers than the chain has. There is none, and none is to be made.
pub(crate) async fn prepare<H: Host + Clone>(
    host: &H,
    overlay: &Path,
    chain: &Chain,
    writable: bool,
) -> Result<(), Failure> {
    if exists(overlay)? {
        let lowest = examine(host, overlay, chain.address(), writable, |_| Ok(())).await?;
        return chain.check(&lowest.pinned).map_err(|error| {
            let rebase = lowest.rebase("CHAIN");
            let elsewhere = format!(
                "; or push them under another name, CHAIN, and {rebase} leads the image there"
            );
            let way_out = if writable && chain.has_pins() { &elsewhere } else { "" };
            lost(overlay, &format_args!("{error}{way_out}"))
        });
    }
    if !writable {
        return Err(Failure::new(format_args!(
            "there is no overlay '{}', and a server that only reads makes none: leave out --overlay",
            shown(overlay)
        )));
    }
    let new = new_overlay(chain)?;
    check_plain(host, overlay, chain).await?;
    match fork(host, &[overlay.to_owned()], &new, &|_| true).await? {
        Forked::All(_) => Ok(()),
        Forked::Stopped(_) => unreachable!("nothing stops it"),
    }
}

/// Checks that a new overlay, which is not encrypted, may be above a chain.
///
/// # Errors
/// The chain's top layer is encrypted, or cannot be read.
pub(crate) async fn check_plain<H: Host + Clone>(
    host: &H,
    overlay: &Path,
    chain: &Chain,
) -> Result<(), Failure> {
    let top = chain.pinned()?.to_string();
    let alone = OpenOptions::new().backing(false).index(false).secrets(Secrets::unneeded());
    let alone = alone.format(stored::format_of(chain.format()));
    let below = Disk::open(host.clone(), Path::new(&top), &alone).await?;
    let is_encrypted = below.layers().any(|layer| layer.is_encrypted());
    below.close().await?;
    if !is_encrypted {
        return Ok(());
    }
    Err(Failure::new(format_args!(
        "the chain's top layer is encrypted, and a new overlay '{}' would not be: make it with 'isobath create -u -f \
         qcow2 --object secret,id=key,file=FILE -o encrypt.format=luks,encrypt.key-secret=key -b {} -F {} {} {}'",
        shown(overlay),
        word(&top),
        chain.format().name(),
        word(overlay),
        chain.size()
    )))
}

/// A new image above a chain.
///
/// # Errors
/// The chain's layers have no pins. The store does not say what the chain is now: there may be other layers by now, and
/// an image above those that are known would stay above them.
pub(crate) fn new_overlay(chain: &Chain) -> Result<NewDisk, Failure> {
    if let Some(why) = chain.last_known() {
        return Err(Failure::new(format_args!(
            "'{}' is known as it was when it was last read, and may be another chain by now, so that no new image is \
             made above it: {why}",
            chain.address()
        )));
    }
    Ok(NewDisk::overlay(chain.pinned()?.to_string(), chain.format().name()).index(false))
}

/// Checks that a disk that was opened by the name of an overlay is above a chain: what had the name before, another
/// program may have replaced.
///
/// # Errors
/// It is above something else.
pub(crate) fn check_opened<H: Host>(
    disk: &LiveDisk<H>,
    overlay: &Path,
    chain: &Chain,
) -> Result<(), Failure> {
    let layers = disk.layers();
    let is_device = |layer: &Layer<H::File>| layer.storage().capabilities().is_device;
    if layers.first().is_some_and(|top| is_device(top)) {
        return Err(Failure::new(format_args!("the overlay '{}' is a device", shown(overlay))));
    }
    let highest = layers.iter().find(|layer| is_stored(layer.name()));
    let pinned = highest.and_then(|layer| Pinned::parse(layer.name().to_str()?));
    match pinned {
        Some(pinned) => chain.check(&pinned).map_err(|error| lost(overlay, &error)),
        None => Err(Failure::new(format_args!(
            "'{}' leads to no layer of '{}': another program has replaced it just now",
            shown(overlay),
            chain.address()
        ))),
    }
}

/// Refuses an image of the command line that is above a chain in a store, and was not given as an overlay of it.
///
/// # Errors
/// It is such an image.
pub(crate) fn check_none<H: Host>(disk: &LiveDisk<H>, image: &Path) -> Result<(), Failure> {
    let layers = disk.layers();
    let mut stored = layers.iter().filter_map(|layer| Pinned::parse(layer.name().to_str()?));
    match stored.next() {
        None => Ok(()),
        Some(Pinned { address, .. }) => Err(Failure::new(format_args!(
            "'{}' is above a chain in a store: serve it with '{} --overlay {}'",
            shown(image),
            word(&address.to_string()),
            word(image)
        ))),
    }
}

fn lost(overlay: &Path, error: &dyn Display) -> Failure {
    Failure::new(error).context(format_args!("the overlay '{}'", shown(overlay)))
}
