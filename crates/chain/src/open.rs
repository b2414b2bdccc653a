//! Opening a chain: from the active layer down, by the names in the headers.

use crate::chain::{Chain, MAX_LAYERS};
use crate::index::{self, Ahead, find_whole};
use futures_util::stream::{self, StreamExt};
use isobath_image::encryption::Key;
use isobath_image::index_area::read_root;
use isobath_image::layer::{ImageFormat, Layer, ShownLog};
use isobath_image::name::{backing_format, backing_secret, check_backing_kind};
use isobath_image::offline::bring_in;
use isobath_image::open::{
    Known, Opening, format_kept, is_as_its_file, open_known_layer, open_layer, referenced_file,
};
use isobath_image::options::{BackingFile, Below, OpenOptions, Trust};
use isobath_image::{DiskError, Result};
use isobath_qcow2::IncompatibleFeatures;
use isobath_storage::{FileId, Host, Storage, StorageExt};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Layers opened together.
const OPENED_AT_ONCE: usize = 128;

/// Opens `name` and everything below it, and the index that describes it, if there is a valid one.
pub async fn open_chain<H: Host>(
    host: &H,
    name: &Path,
    options: &OpenOptions,
) -> Result<Chain<H::File>> {
    let chain = open_with_index(host, name, options).await?;
    if options.backing && options.may_use_index_beside() {
        let whole = if chain.index().is_some() { None } else { find_whole(host, &chain).await? };
        if whole.is_some() {
            chain.set_index(whole);
        }
    }
    Ok(chain)
}

/// The same, with an index that is in the files of its layers.
async fn open_with_index<H: Host>(
    host: &H,
    name: &Path,
    options: &OpenOptions,
) -> Result<Chain<H::File>> {
    if !options.backing || !options.may_use_index() {
        return open_layers(host, name, options).await;
    }
    let mut heads = Heads { allowed: options.heads, ..Heads::default() };
    let mut layers = Vec::new();
    match walk(host, name, options, &mut heads, &mut layers).await {
        Ok(()) => {
            let chain = chain_of(layers.clone());
            let index = index::find(&chain).await;
            // Heads are as good as the index that they came with.
            let covers = index.as_ref().map_or(0, |index| index.covers());
            if covers >= heads.described || unlike_its_file(&chain, covers).await.is_none() {
                chain.set_index(index);
                return Ok(chain);
            }
        }
        // What the files say may be another thing.
        Err(_) if heads.may_mislead => {}
        Err(error) => return Err(error),
    }
    // The active layer was not opened by a head.
    layers.truncate(1);
    walk(host, name, options, &mut Heads::default(), &mut layers).await?;
    let chain = chain_of(layers);
    chain.set_index(index::find(&chain).await);
    Ok(chain)
}

/// Opens `name` and everything below it, concurrently if an index lists the layers.
pub async fn open_layers<H: Host>(
    host: &H,
    name: &Path,
    options: &OpenOptions,
) -> Result<Chain<H::File>> {
    let mut layers = Vec::new();
    walk(host, name, options, &mut Heads::default(), &mut layers).await?;
    Ok(chain_of(layers))
}

/// The chain of layers that are in order from the top down.
fn chain_of<S: Storage>(mut layers: Vec<Arc<Layer<S>>>) -> Chain<S> {
    layers.reverse();
    Chain::of(layers)
}

/// The first layer from `first` up to the one below the active one, if any, of which another thing is known than what
/// its file says, or whose file cannot be read.
pub async fn unlike_its_file<S: Storage>(chain: &Chain<S>, first: usize) -> Option<Arc<Layer<S>>> {
    let below: Vec<_> = chain.layers().take(chain.depth() - 1).skip(first).collect();
    let same = below.iter().map(|(_, layer)| is_as_its_file(layer));
    let mut same = stream::iter(same).buffered(OPENED_AT_ONCE);
    for (_, layer) in &below {
        if !same.next().await.is_some_and(|same| same.is_ok_and(|same| same)) {
            return Some(Arc::clone(layer));
        }
    }
    None
}

/// The heads by which layers are opened without being read.
#[derive(Default)]
struct Heads {
    /// Whether they are used at all.
    allowed: bool,
    /// The most layers, from the base, that an index describes whose heads were used.
    described: usize,
    /// Whether the chain has such a layer, so that what comes next may be another thing than what the files say.
    may_mislead: bool,
}

/// Opens `name`, if it is not open as the first of `layers` already, and everything below it. The layers that were
/// opened, from the top down, are in `layers` also if a later one fails.
async fn walk<H: Host>(
    host: &H,
    name: &Path,
    options: &OpenOptions,
    heads: &mut Heads,
    layers: &mut Vec<Arc<Layer<H::File>>>,
) -> Result<()> {
    let mut active = layers.pop();
    let mut seen: HashSet<FileId> = HashSet::new();
    let mut next = Some(Next { name: name.to_owned(), format: options.format, description: None });
    let mut visible = u64::MAX;
    let mut ahead = OpenedAhead::default();
    let below = options.clone().snapshot(None).data_file(None).named(true).only_with_log(false);
    let as_given = below.clone().named(false);
    let own = |depth: usize| match depth.checked_sub(1) {
        None => options,
        Some(above) if options.below(above).given().is_some() => &as_given,
        Some(_) => &below,
    };
    while let Some(Next { name, format, description }) = next.take() {
        if layers.len() == MAX_LAYERS {
            return Err(DiskError::Refused {
                image: name,
                reason: format!("its chain has more than {MAX_LAYERS} layers"),
            });
        }
        let writable = options.writable && layers.is_empty();
        let opened = match key_of(&name, description.as_deref(), options, layers.len()) {
            Ok(key) => {
                let opening = Opening { format, writable, options: own(layers.len()), key: &key };
                let opened = match (active.take(), ahead.take(&name, format)) {
                    (Some(layer), _) => Ok(layer),
                    (None, Some(AheadLayer { layer, by_head })) => {
                        heads.may_mislead |= by_head;
                        Ok(Arc::new(layer))
                    }
                    (None, None) => open_layer(host, &name, opening).await.map(Arc::new),
                };
                match opened {
                    Ok(layer) if !writable && (options.writable || options.bring_in) => {
                        let durable = Box::pin(durable(host, layer, opening)).await;
                        // The refusal may be one that is given once.
                        heads.may_mislead &= durable.is_ok();
                        durable
                    }
                    opened => opened,
                }
            }
            Err(error) => Err(error),
        };
        let layer = match (opened, layers.last()) {
            (Ok(layer), _) => layer,
            (Err(error), None) => return Err(error),
            (Err(error), Some(above)) => {
                return Err(DiskError::Backing {
                    overlay: above.name().to_owned(),
                    source: Box::new(error),
                });
            }
        };
        if let (Some(description), Some(above)) = (&description, layers.last()) {
            check_backing_kind(above.name(), description, &**layer.storage())?;
        }
        if !seen.insert(layer.storage().id()) {
            return Err(DiskError::Refused {
                image: layer.name().to_owned(),
                reason: "it is its own backing file, directly or through others; repair the chain \
                         with 'qemu-img rebase -u'"
                    .into(),
            });
        }
        layer.limit_visible(visible);
        visible = layer.visible();
        if options.backing {
            next = match options.below(layers.len()) {
                below if host.kept(layer.name()).is_some() => {
                    below_kept(host, layer.name(), below)?.map(|file| Next {
                        name: file.name,
                        format: file.format,
                        description: None,
                    })
                }
                Below::Named => backing_of(host, &layer, None, &options.trust)?,
                Below::NamedWithFormat(format) => {
                    backing_of(host, &layer, Some(*format), &options.trust)?
                }
                Below::Nothing => None,
                Below::Given(file) => Some(given(&layer, file, &options.trust)?),
                Below::Beneath(file) => Some(beneath(&layer, file)?),
            };
            if next.is_some() && ahead.is_empty() && options.may_use_index() {
                ahead = open_ahead(host, &layer, layers.len(), &below, heads).await;
            }
        }
        layers.push(layer);
    }
    Ok(())
}

/// The next layer of a chain that is being opened.
struct Next {
    name: PathBuf,
    format: Option<ImageFormat>,
    /// The name in the header above, if it is a description.
    description: Option<String>,
}

/// How the image `name` is unlocked, which has `depth` others above it: the header above may describe it.
fn key_of(
    name: &Path,
    description: Option<&str>,
    options: &OpenOptions,
    depth: usize,
) -> Result<Key> {
    // Whoever made an untrusted image does not choose among secrets.
    let id = description.filter(|_| options.trust == Trust::Full).and_then(backing_secret);
    let Some(id) = id else { return Ok(options.secrets.key(depth)) };
    let key = options.secrets.key_named(depth, &id);
    key.map_err(|reason| DiskError::Refused { image: name.to_owned(), reason })
}

/// Makes a layer durable that says that it was not closed, before anything is written above it: what a guest flushes to
/// the overlay must make durable what it wrote before, too. The process that had the layer open may have been killed
/// before it flushed.
async fn durable<H: Host>(
    host: &H,
    layer: Arc<Layer<H::File>>,
    opening: Opening<'_>,
) -> Result<Arc<Layer<H::File>>> {
    let layer = without_log(host, layer, opening).await?;
    let unclosed = [IncompatibleFeatures::JOURNAL, IncompatibleFeatures::DIRTY];
    let header = layer.header();
    if header.is_some_and(|header| unclosed.iter().any(|bit| header.incompatible.contains(*bit))) {
        for file in layer.files() {
            match file.flush().await {
                // A file system that cannot be written to has nothing to make durable.
                Err(error) if matches!(error.errno(), libc::EINVAL | libc::EROFS) => {}
                flushed => flushed?,
            }
        }
    }
    Ok(layer)
}

/// Brings what only a killed server's restart log has of a layer into its image.
async fn without_log<H: Host>(
    host: &H,
    layer: Arc<Layer<H::File>>,
    opening: Opening<'_>,
) -> Result<Arc<Layer<H::File>>> {
    let name = layer.name().to_owned();
    let refused = |reason: String| DiskError::Refused { image: name.clone(), reason };
    let unfit = |what: &str| {
        refused(format!(
            "its server was killed, and the log of its unflushed writes does not match it: nothing is written above \
             it; {what}, and the image is then as after a power failure"
        ))
    };
    match layer.shown_log() {
        ShownLog::None => return Ok(layer),
        ShownLog::Overlaid => {}
        ShownLog::Unfit => return Err(unfit("'isobath check -r leaks' on it sets the log aside")),
    }
    // The lock on what is read keeps writers out.
    drop(layer);
    let own = opening.options.clone().format(opening.format);
    let brought = bring_in(host, &name, &own).await.map_err(|error| {
        refused(format!(
            "its server was killed, and its unflushed writes are in this machine's memory only; they must be in the \
             image before anything is written above it: {error}"
        ))
    })?;
    if brought == ShownLog::Unfit {
        return Err(unfit("the log was set aside: open the chain once more to go on"));
    }
    let layer = open_layer(host, &name, opening).await?;
    if layer.shown_log() == ShownLog::None {
        return Ok(Arc::new(layer));
    }
    Err(refused("its server was killed once more while it was being opened; try again".into()))
}

/// A layer opened because an index names it.
struct AheadLayer<S> {
    layer: Layer<S>,
    /// Nothing was read of it.
    by_head: bool,
}

/// Layers opened because an index names them, the next one of the chain last. Each is used only
/// where the header above it names the very same file.
struct OpenedAhead<S> {
    layers: Vec<AheadLayer<S>>,
}

impl<S> Default for OpenedAhead<S> {
    fn default() -> Self {
        Self { layers: Vec::new() }
    }
}

impl<S: Storage> OpenedAhead<S> {
    fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// The next layer, if it is the one that the chain needs; otherwise none of the following layers is either.
    fn take(&mut self, name: &Path, format: Option<ImageFormat>) -> Option<AheadLayer<S>> {
        let next = self.layers.pop()?;
        // If the format is not named it is probed, which detects qcow2.
        let expected = format.unwrap_or(ImageFormat::Qcow2);
        if next.layer.name() != name || next.layer.format() != expected {
            self.layers.clear();
            return None;
        }
        Some(next)
    }
}

/// Opens the layers below `holder`, above which there are `above`, that its index names, many at once.
async fn open_ahead<H: Host>(
    host: &H,
    holder: &Arc<Layer<H::File>>,
    above: usize,
    below: &OpenOptions,
    heads: &mut Heads,
) -> OpenedAhead<H::File> {
    let Some(root) = read_root(holder).await else { return OpenedAhead::default() };
    if root.covers != root.position {
        return OpenedAhead::default();
    }
    let covers = root.covers as usize;
    let mut ahead = Ahead::new(root);
    let mut referrer = holder.name().to_owned();
    // From the top down, in the order in which the names become known.
    let mut opened = Opened { layers: Vec::with_capacity(covers), files: HashSet::new() };
    loop {
        read_chapters(&mut ahead, holder, &opened.layers, heads.allowed).await;
        let mut wanted = Vec::new();
        let mut depth = above + opened.layers.len();
        for number in (ahead.lowest()..covers - opened.layers.len()).rev() {
            let Some(record) = ahead.record(number) else { break };
            let path = referenced_file(host, &referrer, "backing file", &record.name, &below.trust);
            let Ok(path) = path else { break };
            referrer.clone_from(&path);
            depth += 1;
            let Ok(key) = key_of(&path, Some(&record.name), below, depth) else { break };
            let (format, known) = (record.format.into(), ahead.known(number));
            wanted.push(Wanted { path, format, key, known });
        }
        if wanted.is_empty() {
            break;
        }
        open_wanted(host, &wanted, below, &mut opened).await;
        if covers - opened.layers.len() != ahead.lowest() {
            break;
        }
        ahead.drop_heads();
    }
    let mut layers = opened.layers;
    if layers.iter().any(|opened| opened.by_head) {
        heads.described = heads.described.max(covers);
    }
    layers.reverse();
    OpenedAhead { layers }
}

/// Reads chapters that are in `holder` or in layers that are open, with their heads if these are used: as many as give
/// enough to do.
async fn read_chapters<S: Storage>(
    ahead: &mut Ahead,
    holder: &Layer<S>,
    layers: &[AheadLayer<S>],
    with_heads: bool,
) {
    let (position, covers) = (ahead.root.position as usize, ahead.root.covers as usize);
    while !ahead.has_many_heads()
        && let Some(chapter) = ahead.next_chapter().map(|chapter| chapter.layer as usize)
    {
        let open = layers.get((covers - 1).wrapping_sub(chapter)).map(|opened| &opened.layer);
        let file = if chapter == position { Some(holder) } else { open };
        let read = match file {
            Some(file) if with_heads => ahead.read_chapter_and_heads(file).await,
            Some(file) => ahead.read_chapter(file).await,
            None => false,
        };
        if !read {
            break;
        }
    }
}

/// A layer that an index names.
struct Wanted<'a> {
    path: PathBuf,
    format: ImageFormat,
    key: Key,
    known: Option<Known<'a>>,
}

/// Layers that were opened because an index names them, from the top down.
struct Opened<S> {
    layers: Vec<AheadLayer<S>>,
    files: HashSet<FileId>,
}

/// Opens layers, up to the first that cannot be opened: opening it again by the header's name reports the error. So
/// does one whose file is already among them.
async fn open_wanted<H: Host>(
    host: &H,
    wanted: &[Wanted<'_>],
    options: &OpenOptions,
    opened: &mut Opened<H::File>,
) {
    let opening = wanted.iter().map(|Wanted { path, format, key, known }| async move {
        let opening = Opening { format: Some(*format), writable: false, options, key };
        match known {
            Some(known) => open_known_layer(host, path, opening, *known).await,
            None => Ok((open_layer(host, path, opening).await?, false)),
        }
    });
    let mut opening = stream::iter(opening).buffered(OPENED_AT_ONCE);
    while let Some(Ok((layer, by_head))) = opening.next().await {
        if !opened.files.insert(layer.storage().id()) {
            break;
        }
        opened.layers.push(AheadLayer { layer, by_head });
    }
}

/// The name and format of a backing file that was given for a layer, whose header must name another: what is written to
/// an image without a backing file relies on that.
fn given<S: Storage>(layer: &Layer<S>, file: &BackingFile, trust: &Trust) -> Result<Next> {
    let header = layer.header().filter(|header| header.backing_file.is_some());
    let name = header.as_ref().and_then(|header| header.backing_file.as_deref());
    check_replaced(layer.name(), name.is_some())?;
    let named = header.as_ref().and_then(|header| header.backing_format());
    let named = (name.unwrap_or_default(), named);
    let format = format_of_given(layer.name(), file, named, trust)?;
    Ok(Next { name: file.name.clone(), format, description: None })
}

/// The name and format of a file that a layer is an increment of, whatever its header names.
fn beneath<S: Storage>(layer: &Layer<S>, file: &BackingFile) -> Result<Next> {
    let format = format_beneath(layer.name(), file)?;
    Ok(Next { name: file.name.clone(), format: Some(format), description: None })
}

/// The format of a file that `image` is an increment of, which nothing else says.
pub(crate) fn format_beneath(image: &Path, file: &BackingFile) -> Result<ImageFormat> {
    file.format.ok_or_else(|| DiskError::Refused {
        image: image.to_owned(),
        reason: format!(
            "the format of '{}' below it is not given",
            isobath_storage::shown(&file.name)
        ),
    })
}

/// The format of a backing file that was given for `image`, whose header names its own, and perhaps that one's format.
/// As in QEMU, that counts if none was given, also if the name describes it: a file that is said to be raw is not
/// probed. An untrusted image does not decide it.
pub(crate) fn format_of_given(
    image: &Path,
    file: &BackingFile,
    (named, format): (&str, Option<&str>),
    trust: &Trust,
) -> Result<Option<ImageFormat>> {
    if file.format.is_some() {
        return Ok(file.format);
    }
    if *trust != Trust::Full {
        return Err(DiskError::Refused {
            image: image.to_owned(),
            reason: format!(
                "it is untrusted, and does not decide how the backing file '{}' that was given for it is read; give \
                 that file's format as well (--backing-file-format, or backing.driver with --image-opts)",
                isobath_storage::shown(&file.name)
            ),
        });
    }
    let named = backing_format(image, named, format)?;
    named.map(|named| known_format(image, &named)).transpose()
}

/// The format that a header names for its backing file.
fn known_format(image: &Path, format: &str) -> Result<ImageFormat> {
    ImageFormat::of_backing(format).ok_or_else(|| DiskError::Refused {
        image: image.to_owned(),
        reason: format!("Could not open backing file: Unknown driver '{}'", format.escape_debug()),
    })
}

/// Refuses another backing file for an image whose header names none.
pub(crate) fn check_replaced(image: &Path, names_one: bool) -> Result<()> {
    if names_one {
        return Ok(());
    }
    Err(DiskError::Refused {
        image: image.to_owned(),
        reason:
            "it has no backing file, so none can be given for it; add one with 'isobath rebase'"
                .into(),
    })
}

/// The error for an untrusted image that does not name its backing file's format.
pub(crate) fn unnamed_format(image: PathBuf) -> DiskError {
    DiskError::Refused {
        image,
        reason: "it does not name its backing file's format, and an untrusted image's backing file is not probed; name \
                 it with 'qemu-img rebase -u -F FORMAT'"
            .into(),
    }
}

/// The name and format of a layer's backing file.
fn backing_of<H: Host>(
    host: &H,
    layer: &Layer<H::File>,
    format: Option<ImageFormat>,
    trust: &Trust,
) -> Result<Option<Next>> {
    let Some(header) = layer.header() else { return Ok(None) };
    let Some(name) = &header.backing_file else { return Ok(None) };
    let path = referenced_file(host, layer.name(), "backing file", name, trust)?;
    let named = backing_format(layer.name(), name, header.backing_format())?;
    let format = match named {
        _ if format.is_some() => format,
        Some(format) => {
            let format = known_format(layer.name(), &format)?;
            check_named_format(host, layer.name(), &path, format)?;
            Some(format)
        }
        None if *trust != Trust::Full => {
            return Err(unnamed_format(layer.name().to_owned()));
        }
        None => None,
    };
    let description = name.starts_with("json:").then(|| name.clone());
    Ok(Some(Next { name: path, format, description }))
}

/// Checks the format that the header of `image` gives its backing file.
///
/// # Errors
/// If that is a layer that the host keeps, of another format.
pub(crate) fn check_named_format<H: Host>(
    host: &H,
    image: &Path,
    backing: &Path,
    format: ImageFormat,
) -> Result<()> {
    let Some(kept) = host.kept(backing) else { return Ok(()) };
    if ImageFormat::from_name(kept.format) == Some(format) {
        return Ok(());
    }
    let shown = isobath_storage::shown(backing);
    let (name, backing) = (isobath_storage::word(image), isobath_storage::word(backing));
    Err(DiskError::Refused {
        image: image.to_owned(),
        reason: format!(
            "its header says that its backing file '{shown}' has the format '{}', but the manifest of the chain \
             says that this layer is '{own}'; 'isobath rebase -u -F {own} -b {backing} {name}' corrects the header",
            format.name(),
            own = kept.format,
        ),
    })
}

/// What is below a layer that the host keeps, whatever its header names.
///
/// # Errors
/// If something else is given for it.
pub(crate) fn below_kept<H: Host>(
    host: &H,
    layer: &Path,
    given: &Below,
) -> Result<Option<BackingFile>> {
    let name = host.kept(layer).and_then(|kept| kept.below);
    let fits = match given {
        Below::Named | Below::NamedWithFormat(_) => true,
        Below::Nothing => name.is_none(),
        Below::Given(file) | Below::Beneath(file) => name.as_ref() == Some(&file.name),
    };
    if !fits {
        return Err(DiskError::Refused {
            image: layer.to_owned(),
            reason: "it is a layer of a chain in a store, whose manifest says what is below it: nothing else can be \
                     given"
                .into(),
        });
    }
    let Some(name) = name else { return Ok(None) };
    let format = match given {
        Below::NamedWithFormat(format) => Some(*format),
        Below::Given(file) | Below::Beneath(file) => file.format,
        Below::Named | Below::Nothing => None,
    };
    let format = format_kept(host, &name, format)?;
    Ok(Some(BackingFile { name, format }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::create::{NewDisk, create};
    use crate::info::{InfoOptions, backing_chain_info};
    use futures_executor::block_on;
    use isobath_storage::memory::{MemoryFile, MemoryHost};
    use isobath_storage::{IoBuf, KeptLayer, OpenMode};

    /// Files in memory, of which those whose names begin with "kept-" are layers of a chain.
    #[derive(Clone, Default)]
    struct Keeper {
        files: MemoryHost,
        layers: Vec<(&'static str, KeptLayer)>,
    }

    impl Host for Keeper {
        type File = MemoryFile;

        async fn open(&self, name: &Path, mode: OpenMode) -> isobath_storage::Result<Self::File> {
            self.files.open(name, mode).await
        }

        async fn create(&self, name: &Path, mode: OpenMode) -> isobath_storage::Result<Self::File> {
            self.files.create(name, mode).await
        }

        async fn remove(&self, name: &Path) -> isobath_storage::Result<()> {
            self.files.remove(name).await
        }

        async fn remove_file(
            &self,
            name: &Path,
            file: &Self::File,
        ) -> isobath_storage::Result<bool> {
            self.files.remove_file(name, file).await
        }

        fn kept(&self, image: &Path) -> Option<KeptLayer> {
            let mut layers = self.layers.iter();
            layers.find(|(name, _)| Path::new(name) == image).map(|(_, layer)| layer.clone())
        }
    }

    const SIZE: u64 = 1 << 20;

    /// A raw image, "kept-0", with a qcow2 image above it, "kept-1", and a local one, "top". There is also an "other",
    /// which the header of "kept-1" names.
    fn keeper() -> Keeper {
        let mut keeper = Keeper::default();
        block_on(async {
            for name in ["kept-0", "other"] {
                let file = keeper.files.create(Path::new(name), OpenMode::default()).await.unwrap();
                file.set_len(SIZE).await.unwrap();
            }
            for (name, below, format) in [("kept-1", "other", "raw"), ("top", "kept-1", "qcow2")] {
                let new = NewDisk::overlay(below, format).index(false);
                create(&keeper.files, Path::new(name), &new).await.unwrap();
            }
        });
        let below = Some("kept-0".into());
        keeper.layers = vec![
            ("kept-0", KeptLayer { format: "raw", below: None }),
            ("kept-1", KeptLayer { format: "qcow2", below }),
        ];
        keeper
    }

    /// The names of the layers, from the top down, as a disk has them and as its information shows them.
    fn names(keeper: &Keeper, options: &OpenOptions) -> Result<Vec<String>> {
        let name = |name: &Path| name.to_str().unwrap().to_owned();
        let chain = block_on(open_chain(keeper, Path::new("top"), options))?;
        let (backing_files, format) = (options.backing_files.clone(), options.format);
        let shown = InfoOptions { format, backing_files, ..InfoOptions::default() };
        let shown = block_on(backing_chain_info(keeper, Path::new("top"), &shown))?;
        let opened: Vec<_> = chain.top_down().map(|(_, layer)| name(layer.name())).collect();
        assert_eq!(opened, shown.iter().map(|info| name(&info.filename)).collect::<Vec<_>>());
        Ok(opened)
    }

    #[track_caller]
    fn refused(keeper: &Keeper, options: &OpenOptions, said: &str) {
        let error = names(keeper, options).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
        let (backing_files, format) = (options.backing_files.clone(), options.format);
        let look = InfoOptions { format, backing_files, ..InfoOptions::default() };
        let error = block_on(backing_chain_info(keeper, Path::new("top"), &look)).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
    }

    #[test]
    fn what_is_below_a_kept_layer_is_what_its_host_says() {
        let mut keeper = keeper();
        let options = OpenOptions::new().index(false);
        let whole = ["top", "kept-1", "kept-0"];
        assert_eq!(names(&keeper, &options).unwrap(), whole);
        let file = |name: &str, format| BackingFile { name: name.into(), format };
        let raw = file("kept-0", Some(ImageFormat::Raw));
        for below in [Below::Beneath(raw.clone()), Below::Given(file("kept-0", None))] {
            let given = options.clone().backing_files(vec![Below::Named, below]);
            assert_eq!(names(&keeper, &given).unwrap(), whole);
        }
        let other = file("other", Some(ImageFormat::Raw));
        for below in [Below::Nothing, Below::Given(other.clone()), Below::Beneath(other)] {
            let given = options.clone().backing_files(vec![Below::Named, below]);
            refused(&keeper, &given, "nothing else can be given");
        }
        let qcow2 = file("kept-0", Some(ImageFormat::Qcow2));
        for below in [Below::Given(qcow2), Below::NamedWithFormat(ImageFormat::Qcow2)] {
            let given = options.clone().backing_files(vec![Below::Named, below]);
            refused(&keeper, &given, "the manifest of its chain says that this layer is raw");
        }
        // The header of the base names another image.
        keeper.layers[1].1.below = None;
        assert_eq!(names(&keeper, &options).unwrap(), whole[..2]);
        let nothing = options.backing_files(vec![Below::Named, Below::Nothing]);
        assert_eq!(names(&keeper, &nothing).unwrap(), whole[..2]);
    }

    #[test]
    fn the_format_of_a_kept_layer_is_what_its_host_says() {
        let mut keeper = keeper();
        let options = OpenOptions::new().index(false);
        // Its bytes would be shown as a disk.
        keeper.layers[1].1.format = "raw";
        let corrects = "'isobath rebase -u -F raw -b kept-1 top' corrects the header";
        refused(&keeper, &options, corrects);
        let given = |format| options.clone().backing_files(vec![Below::NamedWithFormat(format)]);
        refused(&keeper, &given(ImageFormat::Qcow2), "was to be opened as qcow2");
        keeper.layers[1].1.format = "qcow2";
        refused(&keeper, &given(ImageFormat::Raw), "was to be opened as raw");
        // What a guest wrote to its disk would be taken for an image.
        let image = keeper.files.contents(Path::new("kept-1")).unwrap();
        let base = block_on(
            keeper
                .files
                .open(Path::new("kept-0"), OpenMode { writable: true, ..OpenMode::default() }),
        );
        block_on(base.unwrap().write_at(0, IoBuf::from(image))).unwrap();
        let chain = block_on(open_chain(&keeper, Path::new("top"), &options)).unwrap();
        let formats: Vec<_> = chain.top_down().map(|(_, layer)| layer.format()).collect();
        assert_eq!(formats, [ImageFormat::Qcow2, ImageFormat::Qcow2, ImageFormat::Raw]);
        assert_eq!(names(&keeper, &options).unwrap(), ["top", "kept-1", "kept-0"]);
    }
}
