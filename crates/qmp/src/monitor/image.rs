//! Descriptions of images in QEMU's format.

use isobath_disk::{ImageFormat, Layer, encryption, full_name};
use isobath_qcow2::{AutoclearFeatures, CompatibleFeatures, Header, IncompatibleFeatures};
use isobath_storage::{Host, StorageExt};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// QEMU's `ImageInfo` of a layer, without the images below it.
pub(super) async fn image_info<H: Host>(host: &H, layer: &Layer<H::File>) -> Value {
    let mut info = Map::new();
    let mut put = |key: &str, value: Value| info.insert(key.to_owned(), value);
    put("virtual-size", layer.size().into());
    put("filename", layer.name().to_string_lossy().into());
    put("format", layer.format().name().into());
    if let Ok(bytes) = layer.storage().allocated().await {
        put("actual-size", bytes.into());
    }
    let header = layer.header();
    if layer.is_encrypted() {
        put("encrypted", true.into());
    }
    if let Some(keys) = layer.luks_header() {
        let data = crate::encryption::info_of_luks(keys);
        put("format-specific", json!({"type": "luks", "data": data}));
    }
    put("dirty-flag", header.as_ref().is_some_and(is_dirty).into());
    if let Some(header) = &header {
        if let Ok(geometry) = header.geometry() {
            put("cluster-size", geometry.cluster_size().into());
            let mut data = qcow2_data(header, geometry.refcount_bits(), geometry.extended_l2());
            let keys = encryption::read_header(&**layer.storage(), header).await;
            if let (Some(data), Ok(Some(keys))) = (data.as_object_mut(), keys) {
                data.insert("encrypt".into(), crate::encryption::info(&keys));
            }
            put("format-specific", json!({"type": "qcow2", "data": data}));
        }
        if let Some(backing) = &header.backing_file {
            put("backing-filename", backing.clone().into());
            let full = full_name(host, layer.name(), backing);
            put("full-backing-filename", full.to_string_lossy().into());
        }
        if let Some(format) = header.backing_format() {
            put("backing-filename-format", format.into());
        }
    }
    Value::Object(info)
}

fn is_dirty(header: &Header) -> bool {
    header.incompatible.contains(IncompatibleFeatures::DIRTY)
}

fn qcow2_data(header: &Header, refcount_bits: u32, extended_l2: bool) -> Value {
    let v3 = header.version >= 3;
    let has = |feature| header.incompatible.contains(feature);
    let mut data = Map::new();
    let mut put = |key: &str, value: Value| data.insert(key.to_owned(), value);
    put("compat", if v3 { "1.1" } else { "0.10" }.into());
    put("compression-type", header.compression_type.name().into());
    put("refcount-bits", refcount_bits.into());
    if v3 {
        let lazy = header.compatible.contains(CompatibleFeatures::LAZY_REFCOUNTS);
        put("lazy-refcounts", lazy.into());
        put("corrupt", has(IncompatibleFeatures::CORRUPT).into());
        put("extended-l2", extended_l2.into());
    }
    if let Some(name) = header.data_file().filter(|_| has(IncompatibleFeatures::DATA_FILE)) {
        put("data-file", name.into());
        put("data-file-raw", header.autoclear.contains(AutoclearFeatures::DATA_FILE_RAW).into());
    }
    Value::Object(data)
}

/// The data that describes a node.
pub(super) struct Node<'a, H: Host> {
    pub(super) host: &'a H,
    pub(super) name: String,
    pub(super) layers: &'a [Arc<Layer<H::File>>],
    /// The index of the node's layer; 0 is the active one.
    pub(super) depth: usize,
    pub(super) read_only: bool,
    pub(super) direct: bool,
    /// The number of images below it that are also described.
    pub(super) images: usize,
}

/// QEMU's `BlockDeviceInfo`.
pub(super) async fn device_info<H: Host>(node: Node<'_, H>) -> Value {
    let layers = node.layers.get(node.depth..).unwrap_or_default();
    let Some(layer) = layers.first() else { return Value::Null };
    let mut image = Value::Null;
    for layer in layers.iter().take(node.images.saturating_add(1)).rev() {
        let mut info = image_info(node.host, layer).await;
        if let (Some(info), Value::Object(_)) = (info.as_object_mut(), &image) {
            info.insert("backing-image".into(), image);
        }
        image = info;
    }
    let mut info = json!({
        "file": layer.name().to_string_lossy(),
        "node-name": node.name,
        "ro": node.read_only,
        "active": true,
        "drv": layer.format().name(),
        "backing_file_depth": layers.len() - 1,
        "encrypted": layer.is_encrypted(),
        "detect_zeroes": "off",
        "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0,
        "image": image,
        "cache": {"writeback": true, "direct": node.direct, "no-flush": false},
        "write_threshold": 0,
    });
    let backing = layer.header().and_then(|header| header.backing_file);
    if let (Some(info), Some(backing)) = (info.as_object_mut(), backing) {
        info.insert("backing_file".into(), backing.into());
    }
    info
}

/// The image format that a QMP driver opens, if any.
pub(super) fn format_of(driver: &str) -> Option<ImageFormat> {
    ImageFormat::from_name(driver)
}
