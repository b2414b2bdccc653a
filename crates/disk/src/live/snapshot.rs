//! Snapshots of a disk in use.
//!
//! All slow work is done before the change of the chain or after it. Before: the overlay, with its index of the layers
//! below, is created, made durable and opened for writing. Then new requests are kept out until those in flight have
//! ended, and from then on the overlay is the active layer. After: the remaining changes are written to the file of the
//! former active image, its journal is taken out of use, and its writer's locks are released. Until that is done its
//! writer serves it, and a flush makes both durable. A crash at any point leaves the old chain or the new one.

use super::LiveDisk;
use crate::disk::{Disk, Retiring};
use isobath_chain::chain::{Chain, MAX_LAYERS};
use isobath_chain::create::{NewDisk, NewEncryption, create, plan};
use isobath_chain::index;
use isobath_chain::map::Map;
use isobath_image::encryption::{Key, Secret};
use isobath_image::layer::{ImageFormat, Layer, Qcow2Layer};
use isobath_image::memory::{MemoryLimit, Reserved};
use isobath_image::name::name_in_header;
use isobath_image::open::{Opening, open_layer};
use isobath_image::options::{OpenOptions, Trust};
use isobath_image::writer::Writer;
use isobath_image::{DiskError, Result, always, invariant};
use isobath_qcow2::{Extension, IncompatibleFeatures};
use isobath_storage::{FileId, Host, Locking, OpenMode, Storage, StorageExt, is_descriptor_set};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The image that is to become the active layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Overlay {
    /// A qcow2 image to create at this path, where there is no file, an empty one or an image without data. Its cluster
    /// size is the active image's.
    Create(PathBuf),
    /// An existing image of the same size, whose header names the active image as its backing file.
    Existing(PathBuf),
}

impl Overlay {
    fn path(&self) -> &Path {
        match self {
            Self::Create(path) | Self::Existing(path) => path,
        }
    }
}

/// The limit on what an overlay takes as a layer, and what the disk takes more once it is the active one.
type Room = (Option<Arc<MemoryLimit>>, Option<Arc<Reserved>>);

impl<H: Host> LiveDisk<H> {
    /// Makes the active image a backing file and `overlay` the active image. Data written before the call is in the
    /// backing file; requests continue meanwhile. On return the former active image is a plain, durable image that
    /// other programs may read.
    ///
    /// # Errors
    /// If the disk is read-only, or the overlay cannot be created or does not fit; the chain is then unchanged. If the
    /// remaining changes of the former active image cannot be written; the overlay is in use then, and flushes fail
    /// from then on.
    pub async fn snapshot(&self, overlay: &Overlay) -> Result<()> {
        let _graph = self.graph.lock().await;
        let done = Box::pin(self.put_on(overlay)).await;
        self.or_stop(done)
    }

    /// As [`snapshot`](Self::snapshot), for a caller that holds the graph.
    async fn put_on(&self, overlay: &Overlay) -> Result<()> {
        let disk = self.current();
        // A job that starts from here on waits for the new chain.
        self.claims.check(&disk)?;
        self.finish_retiring(&disk).await?;
        let active = Arc::clone(disk.chain.active());
        let writer = Arc::clone(disk.writer.as_ref().ok_or(DiskError::ReadOnly)?);
        if disk.depth() == MAX_LAYERS {
            return Err(DiskError::Refused {
                image: overlay.path().to_owned(),
                reason: format!("the chain already has {MAX_LAYERS} layers, the maximum"),
            });
        }
        disk.check_opened_as_named(&self.options())?;
        let (room, memory) = match overlay {
            Overlay::Create(path) => self.create_overlay(&disk, path).await?,
            Overlay::Existing(_) => (self.options().memory.clone(), None),
        };
        let layer = self.open_overlay(&disk, overlay, room).await?;
        let qcow2 =
            Qcow2Layer::of(&layer).ok_or_else(|| unfit(&layer, "it is not a qcow2 image"))?;
        let memory = match (&self.options().memory, memory) {
            (Some(limit), None) => {
                let cluster = qcow2.qcow2().geometry.cluster_size();
                disk.reserve_overlay(limit, overlay.path(), cluster)?
            }
            (_, memory) => memory,
        };
        let new_writer = Writer::open(&qcow2, &self.options(), false).await?;
        let mut layers: Vec<_> = disk.chain.layers().map(|(_, layer)| Arc::clone(layer)).collect();
        layers.push(Arc::clone(&layer));
        let chain = Chain::of(layers);
        let found = if self.may_use_index() { index::find(&chain).await } else { None };
        chain.set_index(found.or_else(|| disk.chain.index()));
        let map = map_for(&disk, &chain);

        // A program that opens the new chain does not apply a restart log of this image.
        let _unlogged = writer.without_log(&disk.readers).await?;
        let quiet = self.gate.quiet().await;
        if layer.size() != disk.size() {
            return Err(unfit(&layer, "its size differs from the disk's"));
        }
        let retiring = Retiring { layer: disk.active_index(), writer };
        let next = disk.successor(chain, map, Some(Arc::new(new_writer)), Some(retiring))?;
        let next = next.taking(memory);
        check_put_on(&next.chain, &disk.chain)?;
        self.replace(&disk, Arc::new(next))?;
        drop(quiet);
        tracing::info!(
            overlay = %isobath_storage::shown(layer.name()),
            below = %isobath_storage::shown(active.name()),
            "the chain has a new active layer"
        );
        self.finish_retiring(&self.current()).await
    }

    /// Brings the file of a former active layer, if its writer still serves it, into its final state. The caller holds
    /// `graph`.
    pub async fn finish_retiring(&self, disk: &Disk<H>) -> Result<()> {
        let Some(retiring) = disk.retiring() else { return Ok(()) };
        match retiring.writer.close(&disk.readers).await {
            // An attempt before this one closed it, and then failed or was dropped.
            Ok(()) | Err(DiskError::Closed) => {}
            Err(error) => return Err(error),
        }
        if let Some(layer) = disk.chain.get(retiring.layer) {
            layer.note_new_tables().await?;
            layer.retire().await?;
            disk.retired()?;
        }
        Ok(())
    }

    /// Creates the overlay. Returns the limit on what it takes as a layer, and what the disk takes more with it: both
    /// are reserved before there is a file.
    async fn create_overlay(&self, disk: &Disk<H>, path: &Path) -> Result<Room> {
        Box::pin(self.check_nothing_lost(disk.host(), path)).await?;
        let active = disk.chain.active();
        let mut new = NewDisk::new(disk.size())
            .backing_file(backing_name(active.name(), path)?, active.format().name())
            .index(self.may_use_index());
        if let Some(qcow2) = active.as_qcow2() {
            new.cluster_size = qcow2.geometry.cluster_size();
            new.extended_l2 = qcow2.geometry.extended_l2();
        }
        if active.is_encrypted() {
            // What is written to the snapshot's overlay is no less secret.
            active.cipher()?;
            new.encryption = Some(encryption_as(active.secret(), active.name())?);
        }
        let room = match &self.options().memory {
            Some(limit) => {
                let more = disk.reserve_overlay(limit, path, new.cluster_size)?;
                let size = disk.size().next_multiple_of(512);
                let l1 = u64::from(plan(path, &new, size, None)?.header().l1_size) * 8;
                (Some(limit.part_for_layer(path, l1)?), more)
            }
            None => (None, None),
        };
        create(disk.host(), path, &new).await?;
        Ok(room)
    }

    /// Refuses to replace a file that has data: who names the overlays may not be who owns the files.
    async fn check_nothing_lost(&self, host: &H, path: &Path) -> Result<()> {
        let look = OpenMode { locking: Locking::Unlocked, ..OpenMode::default() };
        let found = match host.open(path, look).await {
            Err(error) if error.source.kind() == ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        // A device has always been something else before.
        if !found.capabilities().extends_with_zeroes || found.len().await? == 0 {
            return Ok(());
        }
        let format = Some(ImageFormat::Qcow2);
        let unlocked = OpenOptions::new().locking(Locking::Unlocked).format(format);
        let unlocked = unlocked.memory(self.options().memory.clone());
        let layer = open_layer(host, path, Opening::of(&unlocked)).await;
        match layer {
            Ok(layer) if is_blank(&layer) => return Ok(()),
            // These say nothing of the data.
            Err(error @ (DiskError::Memory { .. } | DiskError::Storage(_))) => return Err(error),
            _ => {}
        }
        Err(DiskError::Refused {
            image: path.to_owned(),
            reason: "it exists and has data, which a new image would replace; remove it, or use it as it is \
                     ('mode': 'existing', --existing)"
                .into(),
        })
    }

    /// Opens the overlay, and makes sure that it fits.
    async fn open_overlay(
        &self,
        disk: &Disk<H>,
        overlay: &Overlay,
        memory: Option<Arc<MemoryLimit>>,
    ) -> Result<Arc<Layer<H::File>>> {
        let path = overlay.path();
        let format = Some(ImageFormat::Qcow2);
        let options = self.options();
        // The disk may be in another image by now than the one that it was opened in.
        let active = disk.chain.active().secret();
        let secret = match overlay {
            Overlay::Create(_) => active,
            Overlay::Existing(_) => options.secrets.at(0).or(active),
        };
        let key = Key::Secret(secret.cloned());
        // The data file was given for the image that has been the active one.
        let own = (*options).clone().data_file(None).memory(memory);
        let opening = Opening { format, writable: true, options: &own, key: &key };
        let layer = open_layer(disk.host(), path, opening).await?;
        if disk.layers().any(|other| other.storage().id() == layer.storage().id()) {
            return Err(unfit(&layer, "it is already part of the chain"));
        }
        if layer.size() != disk.size() {
            return Err(unfit(
                &layer,
                &format!("its size is {} bytes, the disk's is {}", layer.size(), disk.size()),
            ));
        }
        let active = disk.chain.active();
        let named = layer.header().and_then(|header| header.backing_file);
        let Some(named) = named else {
            let name = if is_descriptor_set(active.name()) {
                "the file that was handed in as the active image".to_owned()
            } else {
                format!("'{}'", isobath_storage::shown(active.name()))
            };
            let reason = format!("it names no backing file; name {name} with 'qemu-img rebase -u'");
            return Err(unfit(&layer, &reason));
        };
        let host = disk.host();
        let file = name_in_header(host, path, "backing file", &named, &Trust::Full)?;
        let below = find_below(host, &host.resolve(path, &file), active.name()).await?;
        if below != active.storage().id() {
            return Err(unfit(
                &layer,
                &format!(
                    "its backing file is '{}', not the active image '{}'",
                    named.escape_debug(),
                    isobath_storage::shown(active.name())
                ),
            ));
        }
        Ok(Arc::new(layer))
    }
}

/// Which file an overlay names as the active image, which is open as `active`: another one may have its name by now.
async fn find_below<H: Host>(host: &H, named: &Path, active: &Path) -> Result<FileId> {
    // An image that was handed in may be one that nothing here has the right to open.
    if is_descriptor_set(active)
        && let Some(found) = host.find(named)?
    {
        return Ok(found);
    }
    let look = OpenMode { locking: Locking::Unlocked, ..OpenMode::default() };
    Ok(host.open(named, look).await?.id())
}

/// Whether an image has neither data nor snapshots or bitmaps, like one that has just been created.
fn is_blank<S: Storage>(layer: &Layer<S>) -> bool {
    let Some(qcow2) = layer.as_qcow2() else { return false };
    let header = layer.header();
    let is_plain = header.is_some_and(|header| {
        header.nb_snapshots == 0
            && !header.incompatible.contains(IncompatibleFeatures::DATA_FILE)
            && !header.extensions.iter().any(|one| matches!(one, Extension::Bitmaps(_)))
    });
    is_plain && qcow2.l1.read().allocated().next().is_none()
}

/// Checks that a chain is another with one more layer on the active one.
fn check_put_on<S: Storage>(next: &Chain<S>, before: &Chain<S>) -> Result<()> {
    let name = next.active().name();
    let one = next.depth() == before.depth() + 1;
    invariant(one, name, "a snapshot adds one layer")?;
    let below = next.get(before.active_index());
    let same = below.is_some_and(|below| Arc::ptr_eq(below, before.active()));
    invariant(same, name, "a snapshot puts the new layer on the active one")
}

/// The map for a disk's chain with one more layer: the current one, unless its units are too large for the new layer's
/// clusters, or the layer is not empty.
fn map_for<H: Host>(disk: &Disk<H>, chain: &Chain<H::File>) -> Arc<Map> {
    let empty = chain.active().as_qcow2().is_some_and(|qcow2| {
        let l1 = qcow2.l1.read();
        l1.allocated().next().is_none()
    });
    let bits = chain.unit_bits().min(disk.map.unit_bits());
    if empty && bits == disk.map.unit_bits() {
        return Arc::clone(&disk.map);
    }
    let budget = disk.map_stats().budget as usize;
    Arc::new(Map::new(bits, budget, chain.active_index()))
}

fn unfit<S: Storage>(layer: &Layer<S>, reason: &str) -> DiskError {
    DiskError::Refused {
        image: layer.name().to_owned(),
        reason: format!("it cannot become the active layer: {reason}"),
    }
}

/// The name for the image at `below` in the header of an image at `overlay`.
///
/// # Errors
/// The image has no name that another program could find it by.
pub fn backing_name(below: &Path, overlay: &Path) -> Result<String> {
    if is_descriptor_set(below) {
        return Err(DiskError::Refused {
            image: below.to_owned(),
            reason: "it was handed in as a descriptor, so that its name, which would be stored in an image header, is \
                     not known; give that name ('backing-file'), or for a snapshot make the overlay with it, and use \
                     the overlay as it is ('mode': 'existing')"
                .into(),
        });
    }
    let name = if below.is_absolute() {
        below.to_owned()
    } else if below.parent() == overlay.parent() {
        below.file_name().map_or_else(|| below.to_owned(), PathBuf::from)
    } else {
        std::path::absolute(below).unwrap_or_else(|_| below.to_owned())
    };
    let text = name.to_str().map(str::to_owned);
    text.ok_or_else(|| DiskError::Refused {
        image: below.to_owned(),
        reason: "its name is not UTF-8 and cannot be stored in an image header".into(),
    })
}

/// The encryption of an overlay on an encrypted layer: with the same secret.
fn encryption_as(secret: Option<&Arc<Secret>>, name: &Path) -> Result<NewEncryption> {
    let secret = always(secret, name, "an encrypted disk was opened by a secret")?;
    Ok(NewEncryption::new(Arc::clone(secret)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{CLUSTER, SIZE, chain_of, disk, live, must_violate};
    use futures_executor::block_on;
    use isobath_image::writer::QCOW2_MEMORY;
    use isobath_storage::IoBuf;
    use isobath_storage::memory::MemoryHost;

    /// Raw disks of 4 MiB under one limit: as many as fit, but not with a snapshot.
    fn full_of_raw_disks(host: &MemoryHost, limit: &Arc<MemoryLimit>) -> Vec<Arc<Live>> {
        let format = Some(ImageFormat::Raw);
        let options = OpenOptions::new().writable(true).format(format).memory(Some(limit.clone()));
        let mut disks = Vec::new();
        loop {
            let name = PathBuf::from(format!("raw{}", disks.len()));
            let new = NewDisk::new(SIZE).format(ImageFormat::Raw);
            block_on(Box::pin(create(host, &name, &new))).unwrap();
            match block_on(Box::pin(LiveDisk::open(host.clone(), &name, &options))) {
                Ok(disk) => disks.push(disk),
                Err(error) => {
                    let full = error.to_string().contains("raise the memory limit");
                    assert!(full && !disks.is_empty(), "{error}");
                    return disks;
                }
            }
        }
    }

    type Live = LiveDisk<MemoryHost>;

    fn snapshot(live: &Live, overlay: &Overlay) -> Result<()> {
        block_on(Box::pin(live.snapshot(overlay)))
    }

    fn refusal(live: &Live, overlay: &Overlay) -> String {
        snapshot(live, overlay).unwrap_err().to_string()
    }

    fn exists(host: &MemoryHost, name: &str) -> bool {
        let look = OpenMode { locking: Locking::Unlocked, ..OpenMode::default() };
        block_on(host.open(Path::new(name), look)).is_ok()
    }

    fn assert_works(live: &Live) {
        block_on(live.write(0, IoBuf::copy_of(&[7; 4096]))).unwrap();
        block_on(live.flush()).unwrap();
        assert_eq!(*block_on(live.read(0, IoBuf::zeroed(4096))).unwrap(), [7; 4096]);
    }

    #[test]
    fn a_snapshot_that_passes_the_memory_limit_is_refused_and_leaves_no_file() {
        let (host, limit) = (MemoryHost::new(), MemoryLimit::new(64 << 20));
        let mut disks = full_of_raw_disks(&host, &limit);
        let before = limit.reserved();
        let live = disks.pop().unwrap();
        let overlay = Overlay::Create("top".into());
        let refused = refusal(&live, &overlay);
        assert!(
            refused.contains("'top': the disk, once it is the active layer, may take 36.5 MiB of")
                && refused.contains("of the limit of 64.0 MiB only")
                && refused.contains("raise the memory limit, or serve less"),
            "{refused}"
        );
        assert!(!exists(&host, "top"));
        assert_eq!((limit.reserved(), live.depth()), (before, 1));
        assert_works(&live);

        drop(disks);
        // All but the L1 table of the overlay would fit.
        let alone = limit.reserved();
        let more = QCOW2_MEMORY + 8 * CLUSTER;
        let rest = limit.reserve("the rest", limit.bytes() - alone - more - 4200).unwrap();
        let refused = refusal(&live, &overlay);
        assert!(refused.contains("'top': its L1 table may take"), "{refused}");
        assert!(!exists(&host, "top"));
        assert_eq!(limit.reserved(), alone + rest.bytes());
        drop(rest);

        snapshot(&live, &overlay).unwrap();
        assert_eq!(limit.reserved(), alone + more + 4200 + 8, "an L1 table of one entry");
        assert_works(&live);
        let taken = limit.reserved();
        snapshot(&live, &Overlay::Create("higher".into())).unwrap();
        assert_eq!(limit.reserved(), taken + 4200 + 8, "one writer goes, another comes");
        block_on(Box::pin(live.close())).unwrap();
        drop(live);
        assert_eq!(limit.reserved(), 0);
    }

    #[test]
    fn an_image_that_passes_the_memory_limit_is_not_said_to_have_data() {
        let (host, limit) = (MemoryHost::new(), MemoryLimit::new(64 << 20));
        for name in ["base", "top"] {
            block_on(Box::pin(create(&host, Path::new(name), &NewDisk::new(SIZE)))).unwrap();
        }
        let options = OpenOptions::new().writable(true).memory(Some(limit.clone()));
        let opened = LiveDisk::open(host.clone(), Path::new("base"), &options);
        let live = block_on(Box::pin(opened)).unwrap();
        let rest = limit.reserve("the rest", limit.bytes() - limit.reserved()).unwrap();
        let refused = refusal(&live, &Overlay::Create("top".into()));
        assert!(refused.starts_with("'top': its L1 table may take"), "{refused}");
        drop(rest);
        snapshot(&live, &Overlay::Create("top".into())).unwrap();
        block_on(Box::pin(live.close())).unwrap();
    }

    #[test]
    fn an_overlay_with_larger_clusters_is_refused_if_it_passes_the_memory_limit() {
        let (host, limit) = (MemoryHost::new(), MemoryLimit::new(64 << 20));
        let make = |name: &str, new: &NewDisk| {
            block_on(Box::pin(create(&host, Path::new(name), new))).unwrap();
        };
        make("base", &NewDisk::new(SIZE));
        make("top", &NewDisk::new(SIZE).cluster_size(2 << 20).backing_file("base", "qcow2"));
        let options = OpenOptions::new().writable(true).memory(Some(limit.clone()));
        let opened = LiveDisk::open(host.clone(), Path::new("base"), &options);
        let live = block_on(Box::pin(opened)).unwrap();
        let before = limit.reserved();
        let overlay = Overlay::Existing("top".into());
        let refused = refusal(&live, &overlay);
        assert!(refused.contains("may take 15.5 MiB of memory"), "{refused}");
        assert_eq!((limit.reserved(), live.depth()), (before, 1));
        assert_works(&live);
        block_on(Box::pin(live.close())).unwrap();
    }

    #[test]
    fn an_overlay_is_encrypted_with_the_secret_of_the_layer_below() {
        let secret = Arc::new(Secret::new(b"secret".to_vec()).unwrap());
        encryption_as(Some(&secret), Path::new("disk")).unwrap();
        let opened = "an encrypted disk was opened by a secret";
        must_violate(encryption_as(None, Path::new("disk")).map(drop), opened);
    }

    #[test]
    fn a_snapshot_adds_one_layer_on_the_active_one() {
        let (disk, other) = (chain_of(2), chain_of(3));
        let layers = |count: usize| disk.chain.layers().take(count).map(|(_, one)| Arc::clone(one));
        let chain = |count| Chain::of(layers(count).collect());
        check_put_on(&chain(2), &chain(1)).unwrap();
        must_violate(check_put_on(&chain(2), &chain(2)), "a snapshot adds one layer");
        must_violate(check_put_on(&chain(1), &chain(2)), "a snapshot adds one layer");
        let on = "a snapshot puts the new layer on the active one";
        must_violate(check_put_on(&other.chain, &chain(2)), on);
    }

    #[test]
    fn a_chain_that_has_changed_meanwhile_is_not_replaced() {
        let live = live(disk());
        let (old, next) = (live.current(), Arc::new(disk()));
        live.replace(&old, Arc::clone(&next)).unwrap();
        let graph = "a chain changes only while its change holds the graph";
        must_violate(live.replace(&old, Arc::clone(&next)), graph);
        assert!(Arc::ptr_eq(&live.current(), &next));
        let stopped = live.or_stop(live.replace(&old, next));
        must_violate(stopped, graph);
        assert!(matches!(live.current().writer(), Err(DiskError::Poisoned { .. })));
    }

    #[test]
    fn a_backing_file_is_named_so_that_it_is_found() {
        let name = |below: &str, overlay: &str| {
            backing_name(Path::new(below), Path::new(overlay)).unwrap()
        };
        assert_eq!(name("/a/base", "/b/top"), "/a/base");
        assert_eq!(name("base", "top"), "base");
        assert_eq!(name("a/base", "a/top"), "base");
        assert!(name("a/base", "top").ends_with("/a/base"));
        let handed_in = backing_name(Path::new("/dev/fdset/1"), Path::new("/dev/fdset/2"));
        assert!(handed_in.unwrap_err().to_string().contains("handed in as a descriptor"));
    }
}
