//! Opening a chain: from the active layer down, by the names in the headers.

use crate::chain::{Chain, MAX_LAYERS};
use crate::index::{self, Ahead};
use futures_util::stream::{self, StreamExt};
use isobath_image::encryption::Key;
use isobath_image::index_area::read_root;
use isobath_image::layer::{ImageFormat, Layer, ShownLog};
use isobath_image::name::{backing_format, backing_secret, check_backing_kind};
use isobath_image::offline::bring_in;
use isobath_image::open::{
    Known, Opening, is_as_its_file, open_known_layer, open_layer, referenced_file,
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
    if !options.backing || !options.may_use_index() {
        return open_layers(host, name, options).await;
    }
    let mut heads = Heads { allowed: true, described: 0 };
    let mut active = None;
    match walk(host, name, options, None, &mut heads).await {
        Ok(chain) => {
            let index = index::find(&chain).await;
            // Heads are as good as the index that they came with.
            let covers = index.as_ref().map_or(0, |index| index.covers());
            if covers >= heads.described || are_as_their_files(&chain, covers).await {
                chain.set_index(index);
                return Ok(chain);
            }
            active = Some(Arc::clone(chain.active()));
        }
        // What the files say may be another thing.
        Err(_) if heads.described > 0 => {}
        Err(error) => return Err(error),
    }
    let chain = walk(host, name, options, active, &mut Heads::default()).await?;
    chain.set_index(index::find(&chain).await);
    Ok(chain)
}

/// Opens `name` and everything below it, concurrently if an index lists the layers.
pub async fn open_layers<H: Host>(
    host: &H,
    name: &Path,
    options: &OpenOptions,
) -> Result<Chain<H::File>> {
    walk(host, name, options, None, &mut Heads::default()).await
}

/// Whether what is known of the layers from `first` up to the active one is what their files say.
async fn are_as_their_files<S: Storage>(chain: &Chain<S>, first: usize) -> bool {
    let below = chain.layers().take(chain.depth() - 1).skip(first);
    let same = below.map(|(_, layer)| is_as_its_file(layer));
    let mut same = stream::iter(same).buffered(OPENED_AT_ONCE);
    while let Some(same) = same.next().await {
        if !same.is_ok_and(|same| same) {
            return false;
        }
    }
    true
}

/// The heads by which layers are opened without being read.
#[derive(Default)]
struct Heads {
    /// Whether they are used at all.
    allowed: bool,
    /// The most layers, from the base, that an index describes whose heads were used.
    described: usize,
}

impl Heads {
    /// What an index says of a layer, if it is used.
    fn of<'a>(&mut self, ahead: &'a Ahead, layer: usize) -> Option<Known<'a>> {
        let known = ahead.known(layer).filter(|_| self.allowed)?;
        self.described = self.described.max(ahead.root.covers as usize);
        Some(known)
    }
}

/// Opens `name`, if it is not open as `active` already, and everything below it.
async fn walk<H: Host>(
    host: &H,
    name: &Path,
    options: &OpenOptions,
    mut active: Option<Arc<Layer<H::File>>>,
    heads: &mut Heads,
) -> Result<Chain<H::File>> {
    let mut layers: Vec<Arc<Layer<H::File>>> = Vec::new();
    let mut seen: HashSet<FileId> = HashSet::new();
    let mut next = Some(Next { name: name.to_owned(), format: options.format, description: None });
    let mut visible = u64::MAX;
    let mut ahead = OpenedAhead::default();
    let below = options.clone().snapshot(None).data_file(None).named(true);
    let as_given = below.clone().named(false);
    let own = |depth: usize| match depth.checked_sub(1) {
        None => options,
        Some(above) if matches!(options.below(above), Below::Given(_)) => &as_given,
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
                    (None, Some(layer)) => Ok(Arc::new(layer)),
                    (None, None) => open_layer(host, &name, opening).await.map(Arc::new),
                };
                match opened {
                    Ok(layer) if !writable && (options.writable || options.bring_in) => {
                        Box::pin(durable(host, layer, opening)).await
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
                Below::Named => backing_of(host, &layer, None, &options.trust)?,
                Below::NamedWithFormat(format) => {
                    backing_of(host, &layer, Some(*format), &options.trust)?
                }
                Below::Nothing => None,
                Below::Given(file) => Some(given(&layer, file)?),
            };
            if next.is_some() && ahead.is_empty() && options.may_use_index() {
                ahead = open_ahead(host, &layer, layers.len(), &below, heads).await;
            }
        }
        layers.push(layer);
    }
    layers.reverse();
    Ok(Chain::of(layers))
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

/// Layers opened because an index names them, the next one of the chain last. Each is used only
/// where the header above it names the very same file.
struct OpenedAhead<S> {
    layers: Vec<Layer<S>>,
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
    fn take(&mut self, name: &Path, format: Option<ImageFormat>) -> Option<Layer<S>> {
        let layer = self.layers.pop()?;
        // If the format is not named it is probed, which detects qcow2.
        let expected = format.unwrap_or(ImageFormat::Qcow2);
        if layer.name() != name || layer.format() != expected {
            self.layers.clear();
            return None;
        }
        Some(layer)
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
    let mut opened = OpenedAhead::default();
    let Some(root) = read_root(holder).await else { return opened };
    if root.covers != root.position {
        return opened;
    }
    let (position, covers) = (root.position as usize, root.covers as usize);
    let mut ahead = Ahead::new(root);
    let mut referrer = holder.name().to_owned();
    // From the top down, in the order in which the names become known.
    let mut layers: Vec<Layer<H::File>> = Vec::with_capacity(covers);
    while ahead.next_chapter().is_some_and(|chapter| chapter.layer as usize == position) {
        if !ahead.read_chapter_and_heads(holder).await {
            return opened;
        }
    }
    loop {
        let mut wanted = Vec::new();
        let mut depth = above + layers.len();
        for number in (ahead.lowest()..covers - layers.len()).rev() {
            let Some(record) = ahead.record(number) else { break };
            let path = referenced_file(host, &referrer, "backing file", &record.name, &below.trust);
            let Ok(path) = path else { break };
            referrer.clone_from(&path);
            depth += 1;
            let Ok(key) = key_of(&path, Some(&record.name), below, depth) else { break };
            let (format, known) = (record.format.into(), heads.of(&ahead, number));
            wanted.push(Wanted { path, format, key, known });
        }
        open_wanted(host, &wanted, below, &mut layers).await;
        if covers - layers.len() != ahead.lowest() {
            break;
        }
        let Some(chapter) = ahead.next_chapter().map(|chapter| chapter.layer as usize) else {
            break;
        };
        let Some(layer) = layers.get((covers - 1).wrapping_sub(chapter)) else { break };
        if !ahead.read_chapter_and_heads(layer).await {
            break;
        }
    }
    layers.reverse();
    opened.layers = layers;
    opened
}

/// A layer that an index names.
struct Wanted<'a> {
    path: PathBuf,
    format: ImageFormat,
    key: Key,
    known: Option<Known<'a>>,
}

/// Opens layers, up to the first that cannot be opened: opening it again by the header's name reports the error.
async fn open_wanted<H: Host>(
    host: &H,
    wanted: &[Wanted<'_>],
    options: &OpenOptions,
    layers: &mut Vec<Layer<H::File>>,
) {
    let opening = wanted.iter().map(|Wanted { path, format, key, known }| async move {
        let opening = Opening { format: Some(*format), writable: false, options, key };
        match known {
            Some(known) => open_known_layer(host, path, opening, *known).await,
            None => open_layer(host, path, opening).await,
        }
    });
    let mut opening = stream::iter(opening).buffered(OPENED_AT_ONCE);
    while let Some(Ok(layer)) = opening.next().await {
        layers.push(layer);
    }
}

/// The name and format of a backing file that was given for a layer, whose header must name another: what is written to
/// an image without a backing file relies on that.
fn given<S: Storage>(layer: &Layer<S>, file: &BackingFile) -> Result<Next> {
    if layer.header().is_none_or(|header| header.backing_file.is_none()) {
        return Err(DiskError::Refused {
            image: layer.name().to_owned(),
            reason:
                "it has no backing file, so none can be given for it; add one with 'isobath rebase'"
                    .into(),
        });
    }
    Ok(Next { name: file.name.clone(), format: file.format, description: None })
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
            Some(ImageFormat::of_backing(&format).ok_or_else(|| DiskError::Refused {
                image: layer.name().to_owned(),
                reason: format!(
                    "Could not open backing file: Unknown driver '{}'",
                    format.escape_debug()
                ),
            })?)
        }
        None if *trust != Trust::Full => {
            return Err(unnamed_format(layer.name().to_owned()));
        }
        None => None,
    };
    let description = name.starts_with("json:").then(|| name.clone());
    Ok(Some(Next { name: path, format, description }))
}
