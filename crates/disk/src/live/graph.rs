//! Changing the layers of a chain while requests run.

use super::{LiveDisk, backing_name};
use crate::disk::Disk;
use crate::named::has_format;
use isobath_chain::chain::{Chain, LayerIndex};
use isobath_chain::chain_index::ChainIndex;
use isobath_chain::index;
use isobath_chain::map::{Map, Unit, UnitKind};
use isobath_image::durability::MetadataMode;
use isobath_image::layer::{ImageFormat, Layer};
use isobath_image::name::name_in_header;
use isobath_image::open::{DATA_FILE, open_again};
use isobath_image::options::{Below, OpenOptions, Trust};
use isobath_image::sabotage::{self, Sabotage};
use isobath_image::{DiskError, Result, invariant};
use isobath_storage::{FileId, Host, Storage, StorageExt, is_descriptor_set};
use std::cell::Cell;
use std::future::Future;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A change that removes layers without changing the contents. Layers have their old numbers.
pub struct Shortening<S> {
    /// The layers removed.
    pub removed: Range<u16>,
    /// A layer whose image was changed, in its new state.
    pub changed: Option<(LayerIndex, Arc<Layer<S>>)>,
    /// Only the active layer is left.
    pub alone: bool,
}

impl<H: Host> LiveDisk<H> {
    /// The layer whose image is in this file.
    ///
    /// # Errors
    /// If there is none.
    pub fn layer_of(&self, file: Option<FileId>) -> Result<Option<LayerIndex>> {
        let Some(file) = file else { return Ok(None) };
        let disk = self.current();
        let mut layers = disk.chain.layers();
        match layers.find(|(_, layer)| layer.storage().id() == file) {
            Some((index, _)) => Ok(Some(index)),
            None => Err(disk.refused("the given image is not part of the chain")),
        }
    }

    /// Excludes other changes of the chain until the returned guard is dropped.
    pub async fn hold_graph(&self) -> isobath_sync::AsyncMutexGuard<'_, ()> {
        self.graph.lock().await
    }

    /// Installs a shorter chain. `unit` returns the new place of a removed layer's unit, or `None` if that must be
    /// looked up. The caller holds the graph.
    pub async fn shorten(
        &self,
        change: Shortening<H::File>,
        unit: impl Fn(u64, Unit) -> Option<Unit>,
    ) -> Result<()> {
        let done = Box::pin(self.take_out(change, unit)).await;
        self.or_stop(done)
    }

    async fn take_out(
        &self,
        change: Shortening<H::File>,
        unit: impl Fn(u64, Unit) -> Option<Unit>,
    ) -> Result<()> {
        let disk = self.current();
        self.finish_retiring(&disk).await?;
        let Shortening { removed, changed, alone } = change;
        let mut layers = Vec::with_capacity(disk.depth());
        for (index, layer) in disk.chain.layers() {
            match &changed {
                Some((at, layer)) if *at == index => layers.push(Arc::clone(layer)),
                _ if removed.contains(&index.get()) => {}
                _ => layers.push(Arc::clone(layer)),
            }
        }
        check_shortened(layers.len(), disk.depth(), &removed, alone, disk.name())?;
        let chain = Chain::stacked(layers);
        let same = changed.iter().map(|(at, _)| at.get()).chain([removed.start]).min();
        chain.set_index(self.index_again(&disk.chain, same.unwrap_or(0).into(), &chain).await);
        let active = chain.active_index();
        let count = removed.end - removed.start;
        let quiet = self.gate.quiet().await;
        let map = Arc::clone(&disk.map);
        let next = disk.successor(chain, Arc::clone(&map), disk.writer.clone(), None)?;
        let stray = Cell::new(false);
        if shows_more(&disk.chain, &next.chain, &removed) {
            // The map contains nothing that a layer's size hid, because it was never requested.
            map.clear();
        } else {
            let changed = changed.map(|(at, _)| at);
            map.rewrite(|guest, old| {
                let layer = old.layer().get();
                if moves(old) && changed == Some(old.layer()) {
                    None
                } else if old.kind() == UnitKind::Absent || layer < removed.start {
                    Some(old)
                } else if layer >= removed.end {
                    let gone = if sabotage::is(Sabotage::OldNumbers) { 0 } else { count };
                    Some(old.in_layer(LayerIndex::new(layer - gone)))
                } else {
                    let new = unit(guest, old);
                    stray.set(stray.get() || new.is_some_and(|new| new.layer() > active));
                    new.filter(|new| new.layer() <= active)
                }
            });
        }
        if let Some(qcow2) = disk.writer.as_ref().and_then(|writer| writer.qcow2()) {
            qcow2.set_alone(alone || qcow2.alone());
        }
        self.replace(&disk, Arc::new(next))?;
        drop(quiet);
        invariant(!stray.get(), disk.name(), "what a removed layer had is in a layer that stays")
    }

    /// Runs `work` while no request does. The caller holds the graph.
    pub async fn while_quiet<T, F: Future<Output = T>>(
        &self,
        work: impl FnOnce(Arc<Disk<H>>) -> F,
    ) -> T {
        let _quiet = self.gate.quiet().await;
        work(self.current()).await
    }

    /// Replaces the disk with another one, which was opened with `given` below it, after `last` has made sure that it
    /// has the same contents; no changes happen meanwhile. The caller holds the graph. Returns the former disk.
    pub async fn go_on_in<F: Future<Output = Result<()>>>(
        &self,
        other: Arc<Disk<H>>,
        given: Vec<Below>,
        last: impl FnOnce(Arc<Disk<H>>) -> F,
    ) -> Result<Arc<Disk<H>>> {
        let _quiet = self.gate.quiet().await;
        let disk = self.current();
        last(Arc::clone(&disk)).await?;
        let same = other.size() == disk.size();
        invariant(same, disk.name(), "an image that takes a disk's place has the disk's size")?;
        if self.options.load().restart_log && !sabotage::is(Sabotage::NoNewLog) {
            // Nobody has relied on its contents so far.
            other.begin_restart_log().await?;
            other.flush().await?;
        }
        let replaced = self.replace(&disk, Arc::clone(&other));
        self.or_stop(replaced)?;
        let options = (*self.options()).clone();
        // Above layers that are read over a network none is used.
        let index = options.index && !other.is_above_kept();
        self.options.store(Arc::new(options.backing_files(given).index(index)));
        if let Some(writer) = &other.writer {
            writer.own_readers().await;
        }
        Ok(disk)
    }

    /// Opens a read-only layer, with those below it, as a disk that may be changed; other programs are kept out of it.
    /// The chain continues to read the layer. Must be followed by [`close_lower`](Self::close_lower).
    pub async fn open_lower(&self, top: LayerIndex) -> Result<Disk<H>> {
        let disk = self.current();
        let layer = disk.layer(top)?;
        {
            // Another writer before may have ended without a change of the chain.
            let _quiet = self.gate.quiet().await;
            disk.map.rewrite(|_, old| (old.layer() != top || !moves(old)).then_some(old));
        }
        layer.admit_writer(true).await?;
        // To the readers here, everything that the writer adds is data.
        layer.give_out(u64::MAX >> 1);
        let opened = self.open_writable(&disk, top).await;
        if opened.is_err() {
            self.forget_lower(top).await?;
        }
        opened
    }

    async fn open_writable(&self, disk: &Disk<H>, top: LayerIndex) -> Result<Disk<H>> {
        let layer = disk.layer(top)?;
        let mut options = (*self.options()).clone().writable(true);
        // The layer's version may not support a journal.
        if options.metadata != MetadataMode::Ordered {
            options.metadata = MetadataMode::Auto;
        }
        let opened = open_again(disk.host(), layer, &options).await?;
        let below = disk.chain.layers().take(top.get() as usize);
        let mut layers: Vec<_> = below.map(|(_, layer)| Arc::clone(layer)).collect();
        layers.push(Arc::new(opened));
        let chain = Chain::stacked(layers);
        chain.set_index(self.index_again(&disk.chain, top.get().into(), &chain).await);
        let disk = Disk::of_chain(Arc::clone(&disk.host), chain, &options).await?;
        if let Some(writer) = &disk.writer {
            writer.keep_readable().await;
        }
        Ok(disk)
    }

    /// Ends what [`open_lower`](Self::open_lower) began and returns the layer in its new state, read-only.
    pub async fn close_lower(
        &self,
        top: LayerIndex,
        lower: &Disk<H>,
    ) -> Result<Arc<Layer<H::File>>> {
        let disk = self.current();
        let (there, closed) = (disk.layer(top)?, lower.chain.active());
        let same = there.storage().id() == closed.storage().id();
        invariant(same, there.name(), "a layer that is closed is the one that was opened there")?;
        lower.close().await?;
        let layer = Arc::clone(lower.chain.active());
        layer.note_new_tables().await?;
        layer.retire().await?;
        self.forget_lower(top).await?;
        Ok(layer)
    }

    /// Makes the chain's own handle of a layer that was open for writing keep writers out again.
    pub async fn forget_lower(&self, top: LayerIndex) -> Result<()> {
        if let Some(layer) = self.current().chain.get(top) {
            layer.admit_writer(false).await?;
        }
        Ok(())
    }

    /// Changes a layer's backing file name, or removes it, durably.
    pub async fn set_backing(
        &self,
        of: LayerIndex,
        backing: Option<(&str, ImageFormat)>,
    ) -> Result<()> {
        let disk = self.current();
        let named = backing.map(|(name, format)| (name, format.name()));
        if of == disk.active_index() {
            return disk.set_backing(named).await;
        }
        let layer = disk.layer(of)?;
        layer.admit_writer(true).await?;
        let changed = async {
            let options = (*self.options()).clone().writable(true);
            open_again(disk.host(), layer, &options).await?.edit_backing(named).await
        };
        let changed = changed.await;
        layer.admit_writer(false).await?;
        changed?;
        if let Some(qcow2) = layer.as_qcow2() {
            let owned = named.map(|(name, format)| (name.to_owned(), Some(format.to_owned())));
            qcow2.header.write().set_backing(owned);
        }
        Ok(())
    }

    /// Replaces a layer with the current state of its image. The caller holds the graph.
    pub async fn renew(&self, at: LayerIndex, layer: Arc<Layer<H::File>>) -> Result<()> {
        let removed = at.get()..at.get();
        let change = Shortening { removed, changed: Some((at, layer)), alone: false };
        self.shorten(change, |_, unit| Some(unit)).await
    }

    /// Releases everything that the active image holds, so that its backing file shows everywhere (QEMU's
    /// `bdrv_make_empty`). The backing file holds it too, as after a commit: the disk reads as before, and bitmaps stay
    /// as they are. Requests wait meanwhile. After a crash a part of the image is empty.
    ///
    /// # Errors
    /// If the disk is read-only, or its active image is not a qcow2 overlay or has a raw external data file; or if the
    /// storage fails.
    pub async fn make_empty(&self) -> Result<()> {
        let _graph = self.graph.lock().await;
        let disk = self.current();
        self.finish_retiring(&disk).await?;
        let _quiet = self.gate.quiet().await;
        // It says of what was emptied that no layer has it, also if this is given up before its end.
        let _forgotten = Forgotten(&disk.map);
        disk.or_mark_corrupt(disk.make_empty().await).await
    }

    pub(super) fn may_use_index(&self) -> bool {
        self.options.load().may_use_index()
    }

    /// The index of a chain that has been changed, whose lowest `same` layers are those of `before`.
    async fn index_again(
        &self,
        before: &Chain<H::File>,
        same: usize,
        chain: &Chain<H::File>,
    ) -> Option<Arc<ChainIndex<H::File>>> {
        let found = if self.may_use_index() { index::find_again(chain).await } else { None };
        found.or_else(|| index::kept_beside(before, same))
    }
}

/// Whether a writer of the unit's layer may have put the data elsewhere, although the unit was not written: it moves a
/// compressed cluster as a whole when a part is written. What it left is kept until it ends, and is free space then.
fn moves(unit: Unit) -> bool {
    unit.kind() == UnitKind::Compressed
}

/// A map that is cleared when this is dropped.
struct Forgotten<'a>(&'a Map);

impl Drop for Forgotten<'_> {
    fn drop(&mut self) {
        self.0.clear();
    }
}

/// Checks that of `before` layers all are left but those that were removed, and only one if it is to be alone.
fn check_shortened(
    left: usize,
    before: usize,
    removed: &Range<u16>,
    alone: bool,
    name: &Path,
) -> Result<()> {
    let ordered = removed.start <= removed.end;
    let others = ordered && left + removed.len() == before;
    invariant(others, name, "a shorter chain lacks the layers that were removed, and no others")?;
    invariant(!alone || left == 1, name, "an image is alone once it is the only layer")
}

/// Whether more of some layer is visible in the chain `after` than in `before`, from which the layers `removed` were
/// taken: a layer above has grown, or is gone.
fn shows_more<S: Storage>(before: &Chain<S>, after: &Chain<S>, removed: &Range<u16>) -> bool {
    let stay = before.layers().filter(|(index, _)| !removed.contains(&index.get()));
    stay.zip(after.layers()).any(|((_, before), (_, after))| after.visible() > before.visible())
}

impl<H: Host> Disk<H> {
    /// The name by which the header of the layer `top` should refer to the image below layer `next`: the one in
    /// `next`, if it means the same there; otherwise what the names that lead there make together, which is relative
    /// as long as they are: a tree of images can be copied or moved.
    pub fn name_below(&self, next: LayerIndex, top: LayerIndex) -> Result<String> {
        let layer = |index| self.layer(index);
        let (overlay, next_layer) = (layer(top)?, layer(next)?);
        let below = layer(LayerIndex::new(next.get().saturating_sub(1)))?;
        if let (Some(_), Some(name)) = (self.host.kept(below.name()), below.name().to_str()) {
            return Ok(name.to_owned());
        }
        let named = next_layer.header().and_then(|header| header.backing_file).filter(|name| {
            let beside = next_layer.name().parent() == overlay.name().parent();
            Path::new(name).is_absolute() || beside && !is_descriptor_set(overlay.name())
        });
        // Another backing file may have been given when the chain was opened.
        if let Some(name) = named.filter(|_| self.leads_to(next_layer, below)) {
            return Ok(name);
        }
        if sabotage::is(Sabotage::AbsoluteNames) {
            return Ok(below.name().to_string_lossy().into_owned());
        }
        let mut joined = PathBuf::new();
        for (_, link) in self.chain.top_down().filter(|(index, _)| (next..=top).contains(index)) {
            let name = link.header().and_then(|header| header.backing_file).unwrap_or_default();
            let named =
                name_in_header(&*self.host, link.name(), "backing file", &name, &Trust::Full);
            let Ok(plain) = named else { break };
            joined = if self.host.protocol_name(&plain) {
                PathBuf::from(&*plain)
            } else {
                joined.parent().unwrap_or(Path::new("")).join(&*plain)
            };
        }
        // A chain may have been put together under other names.
        let means = self.host.resolve(overlay.name(), &joined.to_string_lossy());
        match joined.to_str() {
            Some(name) if means == below.name() => Ok(name.to_owned()),
            _ => backing_name(below.name(), overlay.name()),
        }
    }

    /// Whether there are layers that their host keeps as they are.
    fn is_above_kept(&self) -> bool {
        self.layers().any(|layer| self.host.kept(layer.name()).is_some())
    }

    /// Refuses to change a layer that its host keeps as it is.
    ///
    /// # Errors
    /// If it is such a layer.
    pub fn check_changeable(&self, index: LayerIndex) -> Result<()> {
        let layer = self.layer(index)?;
        if self.host.kept(layer.name()).is_none() {
            return Ok(());
        }
        Err(DiskError::Refused {
            image: layer.name().to_owned(),
            reason: "it is a layer of a chain in a store, which is only read: name a layer above the chain".into(),
        })
    }

    /// Checks a name that somebody gives the layer `of` for its backing file, which is to be the layer `base`. Above
    /// layers that their host keeps it must lead to the base: nothing else that the disk could be opened by does.
    ///
    /// # Errors
    /// If it leads elsewhere.
    pub fn check_name_given(&self, of: LayerIndex, base: LayerIndex, name: &str) -> Result<()> {
        if !self.is_above_kept() {
            return Ok(());
        }
        let (of, base) = (self.layer(of)?, self.layer(base)?);
        if self.names(of, "backing file", name, (base.name(), base.storage().id())) {
            return Ok(());
        }
        Err(DiskError::Refused {
            image: of.name().to_owned(),
            reason: format!(
                "the disk is above a chain in a store, and the name '{}' for its backing file does not lead to '{}'; \
                 leave out 'backing-file'",
                name.escape_debug(),
                isobath_storage::shown(base.name())
            ),
        })
    }

    /// Checks that a disk which is to take the place of this one, with a copy of the active image's data alone, has the
    /// same layers below, if the host of either keeps some: what it shows there must be what this one shows.
    ///
    /// # Errors
    /// If it has others.
    pub fn check_same_below(&self, target: &Self) -> Result<()> {
        let below = |disk: &Self| -> Vec<_> {
            disk.layers().skip(1).map(|layer| (layer.storage().id(), layer.format())).collect()
        };
        if !self.is_above_kept() && !target.is_above_kept() || below(self) == below(target) {
            return Ok(());
        }
        let must = match self.layers().nth(1) {
            Some(layer) => format!(
                "the backing file '{}' of the disk to mirror, and all below that, below it, too: 'isobath create -u -f \
                 qcow2 -b {} -F {} IMAGE {}' makes such an image",
                isobath_storage::shown(layer.name()),
                isobath_storage::word(layer.name()),
                layer.format().name(),
                self.size()
            ),
            None => "nothing below it, as the disk to mirror has".to_owned(),
        };
        Err(target.refused(format!(
            "the active image alone is copied, above a chain in a store: the target must have {must}; or copy \
             everything, with 'sync': 'full'"
        )))
    }

    /// Checks that a disk which is to take the place of this one, and was opened with these options, has below it what
    /// the headers lead to, if the host of either keeps some of the layers: by those it will be opened again.
    ///
    /// # Errors
    /// If it was opened with other files.
    pub fn check_leads_below(&self, target: &Self, opened: &OpenOptions) -> Result<()> {
        if self.is_above_kept() || target.is_above_kept() {
            return target.check_opened_as_named(opened);
        }
        Ok(())
    }

    /// Refuses what will be found by the names in the images' headers, if other files were given when the disk was
    /// opened with `options`: who opened it by those names would read another disk.
    ///
    /// # Errors
    /// If a header names another backing file, another format of it, or another data file than the disk has.
    pub(super) fn check_opened_as_named(&self, options: &OpenOptions) -> Result<()> {
        let other = |layer: &Layer<H::File>, what: &str, way_out: &str| {
            Err(DiskError::Refused {
                image: layer.name().to_owned(),
                reason: format!(
                    "its header does not name the {what} with which it was opened, so that it is another disk for \
                     everyone who opens it by its name; have the image name that one first, with {way_out}, and open \
                     it again"
                ),
            })
        };
        let mut layers = self.chain.top_down().map(|(_, layer)| layer).peekable();
        let given = options.backing_files.iter().any(|below| below.given().is_some());
        while let Some(layer) = layers.next() {
            match layers.peek() {
                // Of these the host says what is below.
                Some(_) if self.host.kept(layer.name()).is_some() => {}
                Some(below) if given && !self.leads_to(layer, below) => {
                    return other(layer, "backing file", "'isobath rebase -u'");
                }
                // Nor does a header decide the format of one that is kept.
                Some(below) if self.host.kept(below.name()).is_some() => {}
                Some(below) if given && !has_format(layer, below) => {
                    return other(layer, "format of the backing file", "'isobath rebase -u -F'");
                }
                None if layer.header().is_some_and(|header| header.backing_file.is_some()) => {
                    return Err(DiskError::Refused {
                        image: layer.name().to_owned(),
                        reason: "it was opened without the backing file that its header names, so that it is another \
                                 disk for everyone who opens it by its name; open it with that file, or remove the \
                                 name first, with 'isobath rebase -u -b \"\"'"
                            .into(),
                    });
                }
                _ => {}
            }
        }
        for (_, layer) in self.chain.top_down() {
            let Some(given) = layer.given_data_file() else { continue };
            let named = layer.header().and_then(|header| header.data_file().map(str::to_owned));
            let data = (given, layer.data().id());
            if !named.is_some_and(|named| self.names(layer, DATA_FILE, &named, data)) {
                return other(
                    layer,
                    "data file",
                    "'isobath amend --data-file FILE -o data_file=PATH'",
                );
            }
        }
        Ok(())
    }

    /// Changes the active image's backing file name, or removes it, durably.
    pub async fn set_backing(&self, backing: Option<(&str, &str)>) -> Result<()> {
        let writer = self.writer()?;
        let _alone = writer.resizing.lock().await;
        writer.exclusively(|| self.chain.active().edit_backing(backing)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ZeroFlags;
    use crate::live::DirtyMap;
    use crate::testing::{CLUSTER, SIZE, chain_of, disk, live, must_violate, open, open_as};
    use futures_executor::block_on;
    use futures_util::FutureExt;
    use isobath_chain::create::{NewDisk, Preallocation, create};
    use isobath_image::layer::ImageFormat;
    use isobath_image::options::{BackingFile, OpenOptions};
    use isobath_storage::IoBuf;
    use isobath_storage::memory::MemoryHost;
    use std::pin::Pin;

    fn shorten(
        live: &LiveDisk<MemoryHost>,
        removed: Range<u16>,
        alone: bool,
        unit: impl Fn(u64, Unit) -> Option<Unit>,
    ) -> Result<()> {
        block_on(Box::pin(live.shorten(Shortening { removed, changed: None, alone }, unit)))
    }

    #[test]
    fn a_chain_loses_what_was_removed() {
        let others = "a shorter chain lacks the layers that were removed, and no others";
        let alone = "an image is alone once it is the only layer";
        #[allow(clippy::reversed_empty_ranges)]
        let cases = [(1..4, false, others), (2..1, false, others), (1..2, true, alone)];
        for (removed, is_alone, what) in cases {
            let live = live(chain_of(3));
            must_violate(shorten(&live, removed, is_alone, |_, unit| Some(unit)), what);
            assert_eq!(live.depth(), 3);
            assert!(matches!(live.current().writer(), Err(DiskError::Poisoned { .. })));
        }
        let live = live(chain_of(3));
        shorten(&live, 0..2, true, |_, _| None).unwrap();
        assert_eq!(live.depth(), 1);
        assert!(live.current().writer().is_ok());
    }

    /// Of a raw image whose format was detected a guest must not make another one.
    #[test]
    fn an_image_is_opened_again_alone_and_as_what_it_is() {
        let host = MemoryHost::new();
        host.insert("raw", &vec![0; SIZE as usize]);
        let raw = Some(ImageFormat::Raw);
        for (format, detected) in [(None, true), (raw, false)] {
            let options = OpenOptions::new().writable(true).format(format);
            let live = live(open_as(&host, "raw", &options));
            assert_eq!(live.options_alone().format, format);
            assert_eq!(live.current().chain.active().is_detected_raw(), detected);
        }
        let live = live(chain_of(2));
        let options = live.options_alone();
        assert_eq!((options.format, options.backing), (Some(ImageFormat::Qcow2), false));
        // What was given below it is so no longer.
        let given = vec![Below::Nothing];
        live.options.store(Arc::new((*live.options()).clone().backing_files(given)));
        assert!(live.options_alone().backing_files.is_empty());
    }

    type Request<'a> = Pin<Box<dyn Future<Output = bool> + 'a>>;

    /// A former chain's layers are locked for as long as anything holds it.
    #[test]
    fn requests_that_wait_hold_no_chain_that_is_gone() {
        let (live, next) = (live(chain_of(2)), Arc::new(disk()));
        let former = Arc::downgrade(&live.current());
        let quiet = block_on(live.gate.quiet());
        let mut requests: [(&str, Request<'_>); 4] = [
            ("read", Box::pin(async { live.read(0, IoBuf::zeroed(512)).await.is_ok() })),
            ("write", Box::pin(async { live.write(0, IoBuf::zeroed(512)).await.is_ok() })),
            (
                "zeroes",
                Box::pin(async { live.write_zeroes(0, 512, ZeroFlags::default()).await.is_ok() }),
            ),
            ("discard", Box::pin(async { live.discard(0, CLUSTER).await.is_ok() })),
        ];
        for (name, request) in &mut requests {
            assert!(request.as_mut().now_or_never().is_none(), "{name}");
        }
        let old = live.current();
        live.replace(&old, next).unwrap();
        drop(old);
        assert!(former.upgrade().is_none());
        drop(quiet);
        for (name, request) in requests {
            assert!(block_on(request), "{name}");
        }
    }

    #[test]
    fn a_layer_is_closed_where_it_was_opened() {
        let live = live(chain_of(3));
        let lower = block_on(Box::pin(live.open_lower(LayerIndex::new(1)))).unwrap();
        let close = |at| block_on(Box::pin(live.close_lower(LayerIndex::new(at), &lower)));
        let there = "a layer that is closed is the one that was opened there";
        must_violate(close(0).map(drop), there);
        assert_eq!(close(1).unwrap().storage().id(), lower.chain.active().storage().id());
    }

    /// Opens "3", above "2", with the backing file "other" in place of the one that "2" names.
    fn over_another(format: Option<ImageFormat>, name: &str) -> Arc<LiveDisk<MemoryHost>> {
        let host = chain_of(4).host().clone();
        let new = NewDisk::new(SIZE);
        block_on(Box::pin(create(&host, Path::new("other"), &new))).unwrap();
        let file = BackingFile { name: name.into(), format };
        let below = vec![Below::Named, Below::Given(file)];
        let options = OpenOptions::new().writable(true).backing_files(below);
        let opened = LiveDisk::open(host, Path::new("3"), &options);
        block_on(Box::pin(opened)).unwrap()
    }

    #[test]
    fn what_becomes_the_backing_file_is_named_as_it_was_opened() {
        for (name, depth) in [("other", 3), ("1", 4)] {
            let live = over_another(None, name);
            assert_eq!(live.depth(), depth);
            let disk = live.current();
            let top = disk.active_index();
            let next = LayerIndex::new(top.get() - 1);
            assert_eq!(disk.name_below(next, top).unwrap(), name);
        }
    }

    #[test]
    fn a_disk_that_its_headers_do_not_lead_to_has_no_snapshot() {
        let refused = |live: &LiveDisk<MemoryHost>| {
            let options = live.options();
            live.current().check_opened_as_named(&options).map_err(|error| error.to_string())
        };
        assert_eq!(refused(&over_another(None, "1")), Ok(()));
        assert_eq!(refused(&live(chain_of(3))), Ok(()));
        let error = refused(&over_another(None, "other")).unwrap_err();
        assert!(error.starts_with("'2': its header does not name the backing file"), "{error}");
        let error = refused(&over_another(Some(ImageFormat::Raw), "1")).unwrap_err();
        let what = "'2': its header does not name the format of the backing file";
        assert!(error.starts_with(what), "{error}");
        for below in [vec![Below::Nothing], vec![Below::Named, Below::Nothing]] {
            let host = chain_of(3).host().clone();
            let options = OpenOptions::new().writable(true).backing_files(below);
            let opened = LiveDisk::open(host, Path::new("2"), &options);
            let error = refused(&block_on(Box::pin(opened)).unwrap()).unwrap_err();
            assert!(error.contains("without the backing file that its header names"), "{error}");
        }
    }

    #[test]
    fn the_active_layer_is_not_removed() {
        let live = live(chain_of(3));
        let removed = shorten(&live, 2..3, false, |_, unit| Some(unit));
        must_violate(removed, "a disk's writer writes its active layer");
    }

    #[test]
    fn what_a_removed_layer_had_stays() {
        let disk = chain_of(3);
        let host = disk.host().clone();
        drop(disk);
        let middle = open(&host, "1");
        block_on(middle.write(0, IoBuf::copy_of(&[7; 4]))).unwrap();
        block_on(Box::pin(middle.close())).unwrap();
        drop(middle);
        let live = live(open(&host, "2"));
        let read = |live: &LiveDisk<MemoryHost>| block_on(live.read(0, IoBuf::zeroed(4))).unwrap();
        // The second read puts the layers' slice into the map.
        for _ in 0..2 {
            assert_eq!(*read(&live), [7; 4]);
        }
        // A layer above the active one.
        let stray = |_, unit: Unit| Some(unit.in_layer(LayerIndex::new(2)));
        let removed = shorten(&live, 1..2, false, stray);
        must_violate(removed, "what a removed layer had is in a layer that stays");
        assert_eq!((live.depth(), &*read(&live)), (2, &[0; 4][..]));
    }

    #[test]
    fn a_change_that_is_given_up_is_tracked() {
        let live = live(disk());
        let map = Arc::new(DirtyMap::new(SIZE, 16));
        live.track(&map);
        let disk = live.current();
        let held = block_on(disk.writer().unwrap().ranges.lock(0..CLUSTER));
        let requests: [(&str, Request<'_>); 3] = [
            ("write", Box::pin(async { live.write(0, IoBuf::zeroed(512)).await.is_ok() })),
            (
                "zeroes",
                Box::pin(async { live.write_zeroes(0, 512, ZeroFlags::default()).await.is_ok() }),
            ),
            ("discard", Box::pin(async { live.discard(0, CLUSTER).await.is_ok() })),
        ];
        for (name, mut request) in requests {
            assert!(request.as_mut().now_or_never().is_none(), "{name}");
            drop(request);
            assert_eq!(map.take(SIZE), Some(0..CLUSTER), "{name}");
        }
        drop(held);
    }

    #[test]
    fn who_waits_for_another_size_hears_of_it_when_another_image_has_taken_the_disks_place() {
        let live = live(chain_of(2));
        let mut waiting = Box::pin(live.resized(SIZE));
        assert!((&mut waiting).now_or_never().is_none());
        let next = Arc::new(disk());
        block_on(Box::pin(live.go_on_in(next, Vec::new(), async |_| Ok(())))).unwrap();
        assert!((&mut waiting).now_or_never().is_none());
        block_on(Box::pin(live.resize(2 * SIZE, Preallocation::Off, false))).unwrap();
        assert!(waiting.now_or_never().is_some());
    }

    #[test]
    fn an_image_of_another_size_does_not_take_a_disks_place() {
        let live = live(chain_of(2));
        let next = disk();
        block_on(Box::pin(next.resize(2 * SIZE, Preallocation::Off, false))).unwrap();
        let gone_on =
            block_on(Box::pin(live.go_on_in(Arc::new(next), Vec::new(), async |_| Ok(()))));
        must_violate(gone_on.map(drop), "an image that takes a disk's place has the disk's size");
        assert_eq!(live.depth(), 2);
    }
}
