//! `isobath info`

pub(crate) mod text;

use crate::failure::{Failure, Outcome};
use crate::host::images;
use crate::image_name::{Image, Naming};
use crate::options::{self, NamedFormat, OutputFormat};
use crate::{json, program, runtime};
use isobath_disk::{
    ImageFormat, ImageInfo, IndexInfo, IndexState, Qcow2Info, backing_chain_info, info,
};
use isobath_formats::VmdkInfo;
use isobath_qcow2::Snapshot;
use isobath_qmp::encryption;
use isobath_storage::Locking;
use serde_json::{Map, Value, json};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

pub(crate) use text::snapshot_list;

/// Show image information
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The image's format [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::named_format)]
    format: Option<NamedFormat>,
    /// Output format
    #[arg(long, value_name = "FMT", default_value = "human")]
    output: OutputFormat,
    /// Show all images of the backing chain
    #[arg(short, long)]
    backing_chain: bool,
    /// Read the image even while another program writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    naming: Naming,
    /// The image
    image: PathBuf,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    if !args.backing_chain {
        args.naming.instead.check_alone("without --backing-chain 'info'")?;
    }
    args.naming.instead.check_no_data("info")?;
    let naming = Naming { secrets_unneeded: true, ..args.naming.clone() };
    let image = naming.image(&args.image, args.format)?;
    let mut chain = read(&image, options::locking(args.force_share), args.backing_chain)?;
    if program::is_link() {
        // As QEMU shows images: to it an index is an extension that it does not know.
        let all = chain.iter_mut().filter_map(|info| info.qcow2.as_mut());
        all.for_each(|qcow2| qcow2.index = None);
    }
    // The name of the first may say more than its format.
    let format = |number: usize, info: &ImageInfo| match image.protocol() {
        Some(driver) if number == 0 => driver.to_owned(),
        _ => info.format.name().to_owned(),
    };
    match args.output {
        OutputFormat::Human => {
            for (number, info) in chain.iter().enumerate() {
                if number > 0 {
                    writeln!(out)?;
                }
                text::print(out, info, &format(number, info))?;
            }
        }
        OutputFormat::Json => {
            let values = chain.iter().enumerate().map(|(number, info)| {
                let mut value = to_json(info, &format(number, info));
                // QEMU reports nothing that a disk without contents has not.
                if let (0, true, Some(object)) = (number, image.is_null(), value.as_object_mut()) {
                    object.remove("dirty-flag");
                }
                value
            });
            let values: Vec<Value> = values.collect();
            if args.backing_chain {
                json::print(out, &values)?;
            } else {
                values.iter().try_for_each(|value| json::print(out, value))?;
            }
        }
    }
    Ok(0)
}

/// Reads the information of an image, or of each image of its chain.
pub(crate) fn read(
    image: &Image,
    locking: Locking,
    whole_chain: bool,
) -> Result<Vec<ImageInfo>, Failure> {
    let look = image.look(locking);
    runtime::block_on(async || {
        let images = if whole_chain && image.has_backing() {
            backing_chain_info(images(), &image.path, &look).await
        } else {
            info(images(), &image.path, &look).await.map(|info| vec![info])
        };
        let mut images = images.map_err(|error| image.failed(&error))?;
        if whole_chain {
            let checked = image.check_layers(images.iter());
            checked.map_err(|reason| image.refused(reason))?;
        }
        if let Some(first) = images.first_mut() {
            if let Some(name) = image.readable_name() {
                first.filename = name.into();
            } else if let Some(secret) = image.key_secret() {
                first.filename = with_secret(&image.path, first.format, secret).into();
            }
            if image.is_null() {
                first.actual_size = Some(0);
            }
        }
        Ok(images)
    })
}

/// The name by which QEMU shows an image whose options name a secret.
fn with_secret(path: &Path, format: ImageFormat, secret: &str) -> String {
    let driver = match fs::metadata(path) {
        Ok(found) if !found.is_file() => "host_device",
        _ => "file",
    };
    let file = json!({"driver": driver, "filename": path.to_string_lossy()});
    let all = if format == ImageFormat::Luks {
        json!({"driver": format.name(), "file": file, "key-secret": secret})
    } else {
        json!({"encrypt.key-secret": secret, "driver": format.name(), "file": file})
    };
    let line = isobath_qmp::json::to_line(&all);
    format!("json:{}", String::from_utf8_lossy(line.trim_ascii_end()))
}

/// An object of the keys that have a value, in QEMU's order.
fn object<const N: usize>(pairs: [(&str, Option<Value>); N]) -> Value {
    let pairs = pairs.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
    Value::Object(pairs.collect::<Map<_, _>>())
}

/// The object that `qemu-img info --output=json` prints.
fn to_json(info: &ImageInfo, format: &str) -> Value {
    let snapshots: Vec<Value> = info.snapshots.iter().map(snapshot_to_json).collect();
    let (qcow2, foreign) = (info.qcow2.as_ref(), info.foreign.as_ref());
    let cluster_size = match (qcow2, foreign) {
        (Some(qcow2), _) => Some(qcow2.cluster_size),
        (None, foreign) => foreign.and_then(|foreign| foreign.cluster_size),
    };
    let luks = info.luks.as_ref();
    let specific = match (qcow2, foreign.and_then(|foreign| foreign.vmdk.as_ref())) {
        _ if luks.is_some() => {
            luks.map(|keys| json!({"type": "luks", "data": encryption::info_of_luks(keys)}))
        }
        (Some(qcow2), _) => Some(json!({"type": "qcow2", "data": data(qcow2)})),
        (None, Some(vmdk)) => Some(json!({"type": "vmdk", "data": vmdk_to_json(vmdk)})),
        (None, None) => None,
    };
    let encrypted = luks.is_some() || qcow2.is_some_and(|qcow2| qcow2.encrypted);
    let dirty = qcow2.is_some_and(|qcow2| qcow2.dirty) || foreign.is_some_and(|it| it.dirty);
    object([
        ("backing-filename-format", info.backing_format.as_ref().map(|format| json!(format))),
        ("snapshots", (!snapshots.is_empty()).then_some(Value::Array(snapshots))),
        ("virtual-size", Some(json!(info.virtual_size))),
        ("filename", Some(json!(info.filename.display().to_string()))),
        ("cluster-size", cluster_size.map(|size| json!(size))),
        ("format", Some(json!(format))),
        ("actual-size", info.actual_size.map(|size| json!(size))),
        ("format-specific", specific),
        (
            "full-backing-filename",
            info.full_backing_filename.as_ref().map(|name| json!(name.display().to_string())),
        ),
        ("backing-filename", info.backing_filename.as_ref().map(|name| json!(name))),
        ("encrypted", encrypted.then(|| json!(true))),
        // QEMU reports nothing about a raw export of an NBD server.
        ("dirty-flag", info.actual_size.or(qcow2.map(|_| 0)).map(|_| json!(dirty))),
    ])
}

fn vmdk_to_json(vmdk: &VmdkInfo) -> Value {
    let extents = vmdk.extents.iter().map(|extent| {
        object([
            ("compressed", extent.compressed.then(|| json!(true))),
            ("virtual-size", Some(json!(extent.virtual_size))),
            ("filename", Some(json!(extent.filename.display().to_string()))),
            ("cluster-size", extent.cluster_size.map(|size| json!(size))),
            ("format", Some(json!(extent.format))),
        ])
    });
    object([
        ("cid", Some(json!(vmdk.content_id))),
        ("parent-cid", Some(json!(vmdk.parent_id))),
        ("create-type", Some(json!(vmdk.create_type))),
        ("extents", Some(Value::Array(extents.collect()))),
    ])
}

fn data(qcow2: &Qcow2Info) -> Value {
    let v3 = qcow2.version >= 3;
    let bitmaps: Vec<Value> = (qcow2.bitmaps.iter())
        .map(|bitmap| {
            let flags = [("in-use", bitmap.in_use), ("auto", bitmap.auto)];
            let flags: Vec<&str> =
                flags.into_iter().filter(|(_, set)| *set).map(|(flag, _)| flag).collect();
            json!({"flags": flags, "name": bitmap.name, "granularity": bitmap.granularity})
        })
        .collect();
    object([
        ("compat", Some(json!(if v3 { "1.1" } else { "0.10" }))),
        ("compression-type", Some(json!(qcow2.compression_type.name()))),
        ("lazy-refcounts", v3.then(|| json!(qcow2.lazy_refcounts))),
        ("bitmaps", (!bitmaps.is_empty()).then_some(Value::Array(bitmaps))),
        ("refcount-bits", Some(json!(qcow2.refcount_bits))),
        ("encrypt", qcow2.encryption.as_ref().map(encryption::info)),
        ("data-file", qcow2.data_file.as_ref().map(|name| json!(name))),
        ("data-file-raw", qcow2.data_file_raw.map(|raw| json!(raw))),
        ("corrupt", v3.then(|| json!(qcow2.corrupt))),
        ("extended-l2", v3.then(|| json!(qcow2.extended_l2))),
        ("journal", qcow2.journal.then(|| json!("in use"))),
        ("direct-access-index", qcow2.index.as_ref().map(index_to_json)),
    ])
}

fn index_to_json(index: &IndexInfo) -> Value {
    object([
        (
            "valid",
            match &index.state {
                IndexState::Valid => Some(json!(true)),
                IndexState::Invalid(_) => Some(json!(false)),
                IndexState::Unchecked => None,
            },
        ),
        (
            "reason",
            match &index.state {
                IndexState::Invalid(reason) => Some(json!(reason)),
                _ => None,
            },
        ),
        ("layers", (index.layers > 0).then(|| json!(index.layers))),
        ("layers-without-digest", (index.undigested > 0).then(|| json!(index.undigested))),
        ("bytes", Some(json!(index.bytes))),
        ("granularity", (index.granularity > 0).then(|| json!(index.granularity))),
    ])
}

fn snapshot_to_json(snapshot: &Snapshot) -> Value {
    let icount = snapshot.icount.filter(|count| *count != u64::MAX);
    object([
        ("icount", icount.map(|count| json!(count))),
        ("vm-clock-nsec", Some(json!(snapshot.vm_clock_nsec % 1_000_000_000))),
        ("name", Some(json!(snapshot.name_text()))),
        ("date-sec", Some(json!(snapshot.date_sec))),
        ("date-nsec", Some(json!(snapshot.date_nsec))),
        ("vm-clock-sec", Some(json!(snapshot.vm_clock_nsec / 1_000_000_000))),
        ("id", Some(json!(snapshot.id_text()))),
        ("vm-state-size", Some(json!(snapshot.vm_state_size))),
    ])
}
