//! The manifest of a chain: its layers, from the base to the top.

use crate::digest::{Digest, Table};
use crate::error::{Error, Result};
use crate::heads::{Heads, MAX_LAYERS, MOST_INDEX};
use crate::trace::{LEAST_TRACE, MAX_TRACE};
use serde::{Deserialize, Serialize};

/// Most bytes of a manifest.
pub const MAX_MANIFEST: u64 = 64 << 20;

/// Most bytes of a layer: the offsets of a qcow2 image have 56 bits.
const MAX_LENGTH: u64 = 1 << 56;

/// Most bytes of all layers of a chain: sums of lengths stay far below what a number holds.
const MAX_TOTAL: u64 = 1 << 62;

const FORMAT: &str = "isobath-chain";
const VERSION: u64 = 2;
/// The version whose heads have no index.
const FIRST_VERSION: u64 = 1;

/// A chain in a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    format: String,
    version: u64,
    /// The disk's size in bytes.
    pub size: u64,
    /// Where the heads of all layers are.
    pub heads: HeadsObject,
    /// Where the index of all layers is, if there is one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub index: Option<IndexObject>,
    /// Where the trace is, which tells what to fetch ahead, if there is one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub trace: Option<TraceObject>,
    /// From the base to the top. Each is the parent of the next.
    pub layers: Vec<Layer>,
}

/// The object with the heads of all layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadsObject {
    /// Its digest.
    pub digest: Digest,
    /// Its length in bytes.
    pub length: u64,
}

/// The object with the pages of the index of all layers; its root and the checksums of its blocks are in the heads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexObject {
    /// Its digest.
    pub digest: Digest,
    /// Its length in bytes.
    pub length: u64,
}

/// The object with what was read of the chain, and in which order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceObject {
    /// Its digest.
    pub digest: Digest,
    /// Its length in bytes.
    pub length: u64,
}

/// The format of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// qcow2
    Qcow2,
    /// The guest's bytes as they are.
    Raw,
}

impl Format {
    /// QEMU's name of it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qcow2 => "qcow2",
            Self::Raw => "raw",
        }
    }
}

/// One layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// The digest of its file.
    pub digest: Digest,
    /// Bytes of its file.
    pub length: u64,
    /// Its format.
    pub format: Format,
    /// The size in bytes of the disk that it holds.
    pub size: u64,
    /// What its file was called, without a directory.
    pub file: String,
    /// The backing file's name in its header.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub backing: Option<String>,
    /// The backing file's format in its header.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub backing_format: Option<String>,
    /// The digest of the table of its blocks' checksums.
    pub table: Digest,
}

impl Manifest {
    pub(crate) fn new(
        heads: HeadsObject,
        index: Option<IndexObject>,
        trace: Option<TraceObject>,
        layers: Vec<Layer>,
    ) -> Result<Self> {
        let size = layers.last().map_or(0, |top| top.size);
        let (format, version) = (FORMAT.to_owned(), VERSION);
        let manifest = Self { format, version, size, heads, index, trace, layers };
        manifest.check().map(|()| manifest)
    }

    /// The bytes of the object.
    ///
    /// # Errors
    /// They are more than a manifest may have.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let encoded = serde_json::to_vec(self);
        let mut bytes =
            encoded.map_err(|error| Error::refused(format_args!("the manifest: {error}")))?;
        bytes.push(b'\n');
        if bytes.len() as u64 > MAX_MANIFEST {
            return Err(Error::refused(format_args!(
                "the chain's manifest would have {} bytes, more than {MAX_MANIFEST}: shorten the chain with 'isobath \
                 chain merge'",
                bytes.len()
            )));
        }
        Ok(bytes)
    }

    /// The manifest in `bytes`; `name` is for messages.
    ///
    /// # Errors
    /// It is none, or of a later version, or says what cannot be.
    pub fn decode(name: &str, bytes: &[u8]) -> Result<Self> {
        #[derive(Deserialize)]
        struct Kind {
            format: String,
            version: u64,
        }
        let wrong = |error: serde_json::Error| {
            Error::damaged(format_args!("the manifest of '{name}' is damaged: {error}"))
        };
        if bytes.len() as u64 > MAX_MANIFEST {
            return Err(Error::damaged(format_args!(
                "the manifest of '{name}' has {} bytes; at most {MAX_MANIFEST} are allowed",
                bytes.len()
            )));
        }
        let kind: Kind = serde_json::from_slice(bytes).map_err(wrong)?;
        if kind.format != FORMAT {
            let format: String = kind.format.chars().take(64).collect();
            return Err(Error::damaged(format_args!(
                "the manifest of '{name}' has the format {format:?}, and not '{FORMAT}'"
            )));
        }
        if !matches!(kind.version, FIRST_VERSION | VERSION) {
            return Err(Error::damaged(format_args!(
                "the manifest of '{name}' has version {}, and this program knows versions {FIRST_VERSION} and \
                 {VERSION}: use a newer one",
                kind.version
            )));
        }
        let mut manifest: Self = serde_json::from_slice(bytes).map_err(wrong)?;
        // One that this program cannot follow is none.
        manifest.trace.take_if(|trace| !(LEAST_TRACE..=MAX_TRACE).contains(&trace.length));
        let checked = manifest.check();
        checked
            .map_err(|error| Error::damaged(format_args!("the manifest of '{name}': {error}")))?;
        Ok(manifest)
    }

    /// The objects that it needs, besides itself: the key of each and its length in bytes.
    pub(crate) fn objects(&self) -> impl Iterator<Item = (String, u64)> {
        let layers = self.layers.iter().flat_map(|layer| {
            let table = (crate::keys::table(&layer.table), Table::length(layer.length));
            [(crate::keys::layer(&layer.digest), layer.length), table]
        });
        let index =
            self.index.iter().map(|index| (crate::keys::index(&index.digest), index.length));
        let trace =
            self.trace.iter().map(|trace| (crate::keys::trace(&trace.digest), trace.length));
        layers
            .chain(index)
            .chain(trace)
            .chain([(crate::keys::heads(&self.heads.digest), self.heads.length)])
    }

    /// Whether everything that it says can be.
    fn check(&self) -> Result<()> {
        let wrong = |number: usize, what: &dyn std::fmt::Display| {
            Err(Error::refused(format_args!("layer {number} {what}")))
        };
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            let count = self.layers.len();
            return Err(Error::refused(format_args!(
                "it has {count} layers, and must have 1 to {MAX_LAYERS}"
            )));
        }
        let most = Heads::most(self.layers.len());
        if self.heads.length > most {
            let length = self.heads.length;
            return Err(Error::refused(format_args!(
                "its heads have {length} bytes; at most {most} are allowed"
            )));
        }
        if let Some(index) = &self.index {
            if self.version == FIRST_VERSION {
                return Err(Error::refused(format_args!(
                    "it has an index, which version {FIRST_VERSION} has not"
                )));
            }
            if index.length == 0 || index.length > MOST_INDEX {
                let length = index.length;
                return Err(Error::refused(format_args!(
                    "its index has {length} bytes; 1 to {MOST_INDEX} are allowed"
                )));
            }
        }
        let mut total = 0_u64;
        let mut below = None;
        for (number, layer) in self.layers.iter().enumerate() {
            total = total.saturating_add(layer.length);
            if layer.length > MAX_LENGTH || layer.size > MAX_LENGTH {
                return wrong(
                    number,
                    &format_args!("has {} bytes, for {} of the disk", layer.length, layer.size),
                );
            }
            if !is_file(&layer.file) {
                return wrong(
                    number,
                    &format_args!(
                        "has the file {:?}, which is not a name without a directory",
                        layer.file
                    ),
                );
            }
            match &layer.backing {
                Some(name) if name.is_empty() || name.len() > 1023 || name.contains('\0') => {
                    return wrong(
                        number,
                        &format_args!("has a backing file of {} bytes", name.len()),
                    );
                }
                Some(_) if number == 0 => {
                    return wrong(number, &"is the base, and has a backing file");
                }
                None if number > 0 => {
                    return wrong(number, &"has no backing file, but layers below it");
                }
                Some(_) if layer.format == Format::Raw => {
                    return wrong(number, &"is raw, and has a backing file");
                }
                _ => {}
            }
            fits(layer.backing_format.as_deref(), below)
                .or_else(|what| wrong(number, &format_args!("{what}")))?;
            below = Some(layer.format);
        }
        if total > MAX_TOTAL {
            return Err(Error::refused(format_args!(
                "its layers have together more than {MAX_TOTAL} bytes"
            )));
        }
        if self.layers.last().is_none_or(|top| top.size != self.size) {
            return Err(Error::refused(format_args!(
                "the disk has {} bytes, its top layer another number",
                self.size
            )));
        }
        Ok(())
    }
}

/// Whether a header may give its backing file this format, above a layer of the format `below`. Where it gives none,
/// the backing file is opened as what it looks like; a raw one may look like anything, so that it must be given.
///
/// # Errors
/// What is wrong with it, as the rest of a sentence.
pub(crate) fn fits(
    backing_format: Option<&str>,
    below: Option<Format>,
) -> std::result::Result<(), String> {
    match (backing_format, below) {
        (None, None | Some(Format::Qcow2)) => Ok(()),
        (Some(format), Some(below)) if format == below.name() => Ok(()),
        (Some(_), None) => Err("has no backing file, and a format of the backing file".to_owned()),
        (None, Some(Format::Raw)) => {
            Err("does not say in its header that its backing file is raw".to_owned())
        }
        (Some(format), Some(below)) => {
            let format: String = format.chars().take(64).collect();
            let below = below.name();
            Err(format!(
                "says that its backing file has the format {format:?}, but that is {below}"
            ))
        }
    }
}

/// Whether a file in a directory can have this name.
pub(crate) fn is_file(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && name.len() <= 255 && !name.contains(['/', '\0'])
}
