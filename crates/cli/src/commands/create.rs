//! `isobath create`

use crate::commands::foreign;
use crate::failure::{Failure, Outcome};
use crate::host::images;
use crate::image_name::{Naming, Objects, is_not_qcow2, is_of_kind, is_too_big, reason};
use crate::{messages, options, runtime, size};
use isobath_disk::encryption::{CreateOptions, IvGenerator};
use isobath_disk::{DiskError, ImageFormat, NewDisk, NewEncryption, Preallocation, create_held};
use isobath_formats::Format;
use isobath_qcow2::CompressionType;
use isobath_storage::Host;
use std::fmt::Write as _;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Create an image
///
/// The size is in bytes; the suffixes k, M, G, T, P and E are powers of 1024. Without a size the disk is as large as
/// its backing file. An existing image is overwritten unless it is in use.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The new image's format [default: raw]
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    /// The backing file, as stored in the image: relative to the image's directory
    #[arg(short, long = "backing", alias = "backing-file", value_name = "FILE")]
    backing_file: Option<String>,
    /// The backing file's format
    #[arg(short = 'F', long, value_name = "FMT")]
    backing_format: Option<String>,
    /// Do not open the backing file; requires a size
    #[arg(short, long = "backing-unsafe", alias = "unsafe")]
    unchecked: bool,
    /// Options as NAME=VALUE, separated by commas (',,' is a literal comma); '-o help' lists them
    #[arg(short, long, value_name = "OPTIONS", value_parser = options::list)]
    options: Vec<String>,
    #[command(flatten)]
    objects: Objects,
    /// Do not write a direct-access index of the layers below
    #[arg(long)]
    no_index: bool,
    /// Do not print the image's parameters
    #[arg(short, long)]
    quiet: bool,
    /// The new image
    image: Option<PathBuf>,
    /// The disk's size
    size: Option<String>,
}

/// The options of `-o`, as qemu-img lists them.
const HELP: &[(&str, &str)] = &[
    ("backing_file=<str>", "File name of a base image"),
    ("backing_fmt=<str>", "Image format of the base image"),
    ("cluster_size=<size>", "qcow2 cluster size"),
    ("compat=<str>", "Compatibility level (v2 [0.10] or v3 [1.1])"),
    ("compression_type=<str>", "Compression method used for image cluster compression"),
    ("data_file=<str>", "File name of an external data file"),
    ("data_file_raw=<bool (on/off)>", "The external data file must stay valid as a raw image"),
    ("encrypt.cipher-alg=<str>", "Name of encryption cipher algorithm"),
    ("encrypt.cipher-mode=<str>", "Name of encryption cipher mode"),
    ("encrypt.format=<str>", "Encrypt the image, format choices: 'luks'"),
    ("encrypt.hash-alg=<str>", "Name of encryption hash algorithm"),
    ("encrypt.iter-time=<num>", "Time to spend in PBKDF in milliseconds"),
    ("encrypt.ivgen-alg=<str>", "Name of IV generator algorithm"),
    ("encrypt.ivgen-hash-alg=<str>", "Name of IV generator hash algorithm"),
    ("encrypt.key-secret=<str>", "ID of secret providing the LUKS passphrase"),
    ("extended_l2=<bool (on/off)>", "Extended L2 tables"),
    ("extent_size_hint=<size>", "Extent size hint for the image file, 0 to disable"),
    ("lazy_refcounts=<bool (on/off)>", "Postpone refcount updates"),
    ("nocow=<bool (on/off)>", "Turn off copy-on-write (valid only on btrfs)"),
    ("preallocation=<str>", "Preallocation mode (allowed values: off, metadata, falloc, full)"),
    ("refcount_bits=<num>", "Width of a reference count entry in bits"),
    ("size=<size>", "Virtual disk size"),
];

const FORMAT: &str = "encrypt.format";

/// The encryption options, in QEMU's order.
const ENCRYPTION: &[&str] = &[
    FORMAT,
    "encrypt.key-secret",
    "encrypt.cipher-alg",
    "encrypt.cipher-mode",
    "encrypt.ivgen-alg",
    "encrypt.ivgen-hash-alg",
    "encrypt.hash-alg",
    "encrypt.iter-time",
];

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let given = options::parse(&args.options);
    let format = options::named_format(args.format.as_deref().unwrap_or("raw"));
    let named = match (&args.image, format) {
        (Some(image), Err(message)) => return Err(Failure::new(message).context(image.display())),
        (_, format) => format.map_err(Failure::new)?,
    };
    let format = named.format;
    if given.iter().any(|(name, _)| name == "help" || name == "?") {
        return match format {
            ImageFormat::Foreign(format) => foreign::help(format, args.image.is_some(), out),
            format => help(format, args.image.is_some(), out),
        };
    }
    let Some(image) = &args.image else { return Err(Failure::usage("Expecting image file name")) };
    let failure = |message: &dyn std::fmt::Display| Failure::new(message).context(image.display());
    if let ImageFormat::Foreign(format) = format {
        return create_foreign(args, format, &given, image, out);
    }
    let mut new =
        NewDisk::default().format(format).open_backing(!args.unchecked).index(!args.no_index);
    let refused = apply_each(&mut new, &given).map_err(|error| failure(&error))?;
    new.backing_file = args.backing_file.clone().or(new.backing_file);
    new.backing_format = args.backing_format.clone().or(new.backing_format);
    if new.backing_file.as_deref() == Some("") {
        return Err(failure(&"Expected backing file name, got empty string"));
    }
    if format != ImageFormat::Qcow2 && new.backing_file.is_none() && new.backing_format.is_some() {
        let reason =
            format!("Backing file format not supported for file format '{}'", named.name());
        return Err(failure(&reason));
    }
    if let Some(text) = &args.size {
        if new.size.is_some() {
            return Err(failure(&"The image size must be specified only once"));
        }
        new.size = Some(size::parse(text).map_err(|error| Failure::new(too_large(error)))?);
    }
    let mut target = Naming::target(image).map_err(|error| failure(&error))?;
    target.device = named.device().or(target.device);
    new.on_device = target.device.is_some();
    if args.format.is_none() && !args.quiet {
        messages::note_raw(image, "-f");
    }
    let name = options::printable(&image.display().to_string());
    let mut announce = |size: u64| {
        if args.quiet {
            return Ok(());
        }
        writeln!(out, "Formatting '{name}', {}", describe(&new, named.name(), size, &given))
    };
    if let (Some(name), Some(driver), true) =
        (&new.backing_file, &new.backing_format, new.open_backing)
    {
        let below = images().resolve(&target.path, name);
        is_of_kind(driver, &below.to_string_lossy())
            .map_err(|error| failure(&format_args!("{error}\nCould not open backing image.")))?;
    }
    let keys = encryption(&new, &given, &args.objects);
    // As in QEMU, which prints the line once it knows the size, and then creates the image.
    let early = new.size.filter(|_| new.backing_file.is_none());
    if let Some(size) = early {
        announce(size)?;
    }
    if let Some(refused) = refused {
        let is_unsized = new.size.is_none() && (new.backing_file.is_none() || !new.open_backing);
        let needs_size: &dyn std::fmt::Display = &"Image creation needs a size parameter";
        return Err(failure(if is_unsized { needs_size } else { &refused }));
    }
    target.check().map_err(|error| failure(&error))?;
    if let Some(driver) = named.protocol {
        is_of_kind(driver, &target.path.to_string_lossy()).map_err(|error| failure(&error))?;
    }
    let path = &target.path;
    let new = new.clone().encryption(keys.map_err(|error| failure(&error))?);
    let (made, index_left) = runtime::block_on(async || {
        let made = create_held(images(), path, &new).await;
        let made = made.map(|created| (created.size(), created.is_index_left()));
        made.map_err(|error| {
            let text = match &error {
                DiskError::Backing { source, .. } => {
                    let cause = match &**source {
                        DiskError::Format { image, source: format } if is_not_qcow2(format) => {
                            format!("'{}': {}", isobath_storage::shown(image), reason(source))
                        }
                        // These errors name the image themselves.
                        source @ (DiskError::Format { .. } | DiskError::Refused { .. }) => {
                            source.to_string()
                        }
                        source => reason(source),
                    };
                    format!("{cause}\nCould not open backing image.")
                }
                DiskError::Format { source, .. } if is_too_big(source) => format!(
                    "The image size is too large for file format '{}' (try using a larger cluster size)",
                    new.format.name()
                ),
                DiskError::Format { .. } => {
                    contradiction(&new).map_or_else(|| reason(&error), str::to_owned)
                }
                error => reason(error),
            };
            Failure::new(text).context(image.display())
        })
    })?;
    if early.is_none() {
        announce(new.size.unwrap_or(made))?;
    }
    if index_left && !args.quiet {
        messages::note_index_left(image);
    }
    Ok(0)
}

/// Creates an image in another program's format.
fn create_foreign(
    args: &Args,
    format: Format,
    given: &[(String, String)],
    image: &Path,
    out: &mut dyn Write,
) -> Outcome {
    let failure = |message: String| Failure::new(message).context(image.display());
    let mut options = foreign::Options::parse(format, given).map_err(failure)?;
    if args.backing_file.is_some() {
        return Err(failure(foreign::no_backing(format)));
    }
    if let Some(name) = &args.backing_format {
        options.set_backing_format(name).map_err(failure)?;
    }
    let size = match (&args.size, options.size()) {
        (Some(_), Some(_)) => {
            return Err(failure("The image size must be specified only once".into()));
        }
        (Some(text), None) => size::parse(text).map_err(Failure::new)?,
        (None, Some(size)) => size,
        (None, None) => return Err(failure("Image creation needs a size parameter".into())),
    };
    let target = Naming::target(image).map_err(failure)?;
    if !args.quiet {
        let name = options::printable(&image.display().to_string());
        writeln!(out, "Formatting '{name}', {}", options.describe(size))?;
    }
    target.check_file().map_err(failure)?;
    runtime::block_on(async || {
        let new = options.image().map_err(failure)?;
        let size = size.next_multiple_of(512);
        let (layout, path) = (options.layout(), &target.path);
        let created = new.create(path, size, false, layout, &[]).await;
        let (writer, files) = created.map_err(failure)?;
        if let Err(error) = writer.finish().await {
            files.remove(true).await;
            return Err(Failure::new(error));
        }
        Ok(0)
    })
}

/// Lists the options of a format; with a file, also those of files.
pub(crate) fn help(format: ImageFormat, with_file: bool, out: &mut dyn Write) -> Outcome {
    let whose = if with_file { String::new() } else { format!("{} ", format.name()) };
    writeln!(out, "Supported {whose}options:")?;
    let plain = format != ImageFormat::Qcow2;
    let mut listed = Vec::new();
    for (option, meaning) in HELP {
        let name = option.split('=').next().unwrap_or(option);
        let own = match name {
            "size" => true,
            "extent_size_hint" | "nocow" => with_file,
            // The preallocation of an image without tables is that of its file.
            "preallocation" => with_file || !plain,
            _ => !plain,
        };
        // Such an image has no metadata.
        let meaning = meaning.replace(if plain { ", metadata" } else { "\n" }, "");
        if own {
            listed.push(((*option).to_owned(), meaning));
        } else if let Some(option) = luks_option(format, option).filter(|_| name != FORMAT) {
            let meaning = meaning.replace(
                "ID of secret providing the LUKS passphrase",
                "ID of the secret that provides the keyslot passphrase",
            );
            listed.push((option.to_owned(), meaning));
        }
    }
    listed.sort();
    for (option, meaning) in listed {
        writeln!(out, "  {option:<22} - {meaning}")?;
    }
    if !with_file {
        let hint = "The protocol level may support further options.\n\
                    Specify the target filename to include those options.";
        writeln!(out, "\n{hint}")?;
    }
    Ok(0)
}

/// Applies the options of `-o`, except for those of [encryption](encryption).
pub(crate) fn apply_all(new: &mut NewDisk, given: &[(String, String)]) -> Result<(), String> {
    apply_each(new, given)?.map_or(Ok(()), Err)
}

/// Like [`apply_all`], but returns the first error of a value that QEMU refuses only when it creates the image, so
/// after it has announced that.
fn apply_each(new: &mut NewDisk, given: &[(String, String)]) -> Result<Option<String>, String> {
    let others = given.iter().filter(|(name, _)| !is_encryption(new, name));
    let others: Vec<_> = others.collect();
    let mut refused = None;
    for (name, value) in others {
        match apply(new, name, value) {
            Err(error) if is_of_creation(new.format, name) => {
                refused.get_or_insert(error);
            }
            result => result?,
        }
    }
    Ok(refused)
}

/// Whether QEMU examines the value of an option only when it creates the image.
fn is_of_creation(format: ImageFormat, name: &str) -> bool {
    match name {
        "preallocation" => true,
        "compat" | "compression_type" => format == ImageFormat::Qcow2,
        _ => false,
    }
}

/// QEMU's words for a size beyond what a disk may have.
fn too_large(error: String) -> String {
    if error.starts_with("Image size") {
        return format!("Invalid image size specified. Must be between 0 and {}.", i64::MAX);
    }
    error
}

/// QEMU's words for options that contradict each other, if these do, in its order.
pub(crate) fn contradiction(new: &NewDisk) -> Option<&'static str> {
    let old = new.version < 3;
    if new.extended_l2 && old {
        return Some(
            "Extended L2 entries are only supported with compatibility level 1.1 and above (use version=v3 or greater)",
        );
    }
    if new.extended_l2 && new.cluster_size < 16384 {
        return Some(
            "Extended L2 entries are only supported with cluster sizes of at least 16384 bytes",
        );
    }
    let hides = new.preallocation != Preallocation::Off && !new.extended_l2;
    if hides && new.backing_file.is_some() {
        return Some(
            "Backing file and preallocation can only be used at the same time if extended_l2 is on",
        );
    }
    if new.backing_format.is_some() && new.backing_file.is_none() {
        return Some("Backing format cannot be used without backing file");
    }
    if old && new.lazy_refcounts {
        return Some(
            "Lazy refcounts only supported with compatibility level 1.1 and above (use version=v3 or greater)",
        );
    }
    if old && new.refcount_bits != 16 {
        return Some(
            "Different refcount widths than 16 bits require compatibility level 1.1 or above (use version=v3 or \
             greater)",
        );
    }
    if new.data_file_raw && new.data_file.is_none() {
        return Some("data-file-raw requires data-file");
    }
    if new.data_file_raw && new.backing_file.is_some() {
        return Some("Backing file and data-file-raw cannot be used at the same time");
    }
    if old && new.data_file.is_some() {
        return Some(
            "External data files are only supported with compatibility level 1.1 and above (use version=v3 or greater)",
        );
    }
    if old && new.compression_type == CompressionType::Zstd {
        return Some(
            "Non-zlib compression type is only supported with compatibility level 1.1 and above (use version=v3 or \
             greater)",
        );
    }
    None
}

/// Whether an option is about encryption.
pub(crate) fn is_encryption(new: &NewDisk, name: &str) -> bool {
    match new.format {
        ImageFormat::Qcow2 => name.starts_with("encrypt."),
        format => ENCRYPTION
            .iter()
            .any(|option| *option != FORMAT && luks_option(format, option) == Some(name)),
    }
}

/// What an encryption option of qcow2 images is called for images that are encrypted as a whole, if `format` is theirs.
fn luks_option(format: ImageFormat, option: &str) -> Option<&str> {
    option.strip_prefix("encrypt.").filter(|_| format == ImageFormat::Luks)
}

/// The encryption that the options of `-o` request, if any.
///
/// # Errors
/// If they cannot be used, in QEMU's words.
pub(crate) fn encryption(
    new: &NewDisk,
    given: &[(String, String)],
    objects: &Objects,
) -> Result<Option<NewEncryption>, String> {
    let (mut secret, mut iv, mut iv_hash) = (None, None, None);
    let mut options = CreateOptions::default();
    let whole = new.format == ImageFormat::Luks;
    let mut format = whole.then_some("luks");
    let mut any = whole;
    for (name, value) in given.iter().filter(|(name, _)| is_encryption(new, name)) {
        any = true;
        let unsupported = |error: &dyn std::fmt::Display| error.to_string();
        match name.trim_start_matches("encrypt.") {
            "format" => format = Some(value.as_str()),
            "key-secret" => secret = Some(value.as_str()),
            "cipher-alg" => options.algorithm = value.parse().map_err(|e| unsupported(&e))?,
            "cipher-mode" => options.mode = value.parse().map_err(|e| unsupported(&e))?,
            "hash-alg" => options.hash = value.parse().map_err(|e| unsupported(&e))?,
            "ivgen-alg" => iv = Some(value.as_str()),
            "ivgen-hash-alg" => iv_hash = Some(value.as_str()),
            "iter-time" => {
                let milliseconds = value.parse();
                let milliseconds =
                    milliseconds.map_err(|_| format!("Parameter '{name}' expects a number"))?;
                options.iter_time = Duration::from_millis(milliseconds);
            }
            _ => return Err(options::unknown(name, known(new.format))),
        }
    }
    if let Some(generator) = iv {
        let generator = IvGenerator::from_options(generator, iv_hash);
        options.iv_generator = generator.map_err(|error| error.to_string())?;
    }
    if !any {
        return Ok(None);
    }
    match format {
        Some("luks") => {}
        Some("aes") => {
            return Err(
                "Parameter 'encrypt.format': 'aes' is broken and not supported; use luks".into()
            );
        }
        Some(other) => return Err(format!("Parameter 'format' does not accept value '{other}'")),
        None => return Err("Parameter 'encrypt.format' is missing".into()),
    }
    let secret = secret.ok_or_else(|| {
        let prefix = if whole { "" } else { "encrypt." };
        format!("Parameter '{prefix}key-secret' is required for cipher")
    })?;
    Ok(Some(NewEncryption { options, secret: objects.secret(secret)? }))
}

/// The names of a format's options.
fn known(format: ImageFormat) -> impl Iterator<Item = &'static str> {
    let names = HELP.iter().filter_map(|(option, _)| option.split('=').next());
    names.filter_map(move |name| match name {
        _ if format == ImageFormat::Qcow2 => Some(name),
        "size" | "preallocation" | "nocow" | "extent_size_hint" => Some(name),
        FORMAT => None,
        _ => luks_option(format, name),
    })
}

/// Applies an option of `-o`.
fn apply(new: &mut NewDisk, name: &str, value: &str) -> Result<(), String> {
    let of_files = ["size", "preallocation", "nocow", "extent_size_hint"];
    if new.format == ImageFormat::Luks && !of_files.contains(&name) {
        return Err(match name {
            "header" | "detached-header" => {
                format!("Parameter '{name}': a LUKS header in a file of its own is not supported")
            }
            _ => options::unknown(name, known(new.format)),
        });
    }
    if new.format == ImageFormat::Raw && !of_files.contains(&name) {
        return Err(options::unknown(name, known(new.format)));
    }
    let refuse =
        || format!("Parameter '{}' does not accept value '{value}'", name.replace('_', "-"));
    match name {
        "size" => new.size = Some(size::parameter(name, value)?),
        "backing_file" => new.backing_file = Some(value.to_owned()),
        "backing_fmt" => new.backing_format = Some(value.to_owned()),
        "cluster_size" => new.cluster_size = size::parameter(name, value)?,
        "compat" => {
            new.version = match value {
                "0.10" | "v2" => 2,
                "1.1" | "v3" => 3,
                _ => return Err(format!("Parameter 'version' does not accept value '{value}'")),
            }
        }
        "compression_type" => {
            new.compression_type = [CompressionType::Zlib, CompressionType::Zstd]
                .into_iter()
                .find(|kind| kind.name() == value)
                .ok_or_else(refuse)?;
        }
        "data_file" => new.data_file = Some(value.to_owned()),
        "data_file_raw" => new.data_file_raw = options::on_off(name, value)?,
        "extended_l2" => new.extended_l2 = options::on_off(name, value)?,
        "lazy_refcounts" => new.lazy_refcounts = options::on_off(name, value)?,
        "preallocation" => {
            new.preallocation = Preallocation::from_name(value).ok_or_else(refuse)?;
        }
        "nocow" => new.layout.no_copy_on_write = options::on_off(name, value)?,
        "extent_size_hint" => {
            let size = u32::try_from(size::parameter(name, value)?);
            let size = size.map_err(|_| format!("Extent size hint is too large: {value}"))?;
            new.layout.extent_size = Some(size);
        }
        "refcount_bits" => {
            new.refcount_bits =
                value.parse().map_err(|_| format!("Parameter '{name}' expects a number"))?;
        }
        "encryption" if !options::on_off(name, value)? => {}
        "encryption" => {
            return Err(format!(
                "Parameter '{name}': 'aes' encryption is broken and not supported; use \
                 encrypt.format=luks"
            ));
        }
        _ => return Err(options::unknown(name, known(new.format))),
    }
    Ok(())
}

/// The options of a new disk, as qemu-img prints them.
fn describe(new: &NewDisk, format: &str, size: u64, given: &[(String, String)]) -> String {
    let mut text = format!("fmt={format}");
    // Writing to a string cannot fail.
    let mut put = |name: &str, value: &str| {
        let value = value.replace(',', ",,");
        let _ = write!(text, " {name}={value}");
    };
    let typed = |name: &str| typed(given, name);
    if new.format == ImageFormat::Qcow2 {
        describe_qcow2(new, size, given, &mut put);
    } else {
        put("size", &size.to_string());
        for option in ENCRYPTION.iter().filter_map(|option| luks_option(new.format, option)) {
            if let Some(value) = typed(option) {
                put(option, &options::printable(value));
            }
        }
    }
    if let Some(nocow) = typed("nocow") {
        put("nocow", nocow);
    }
    // That of an image without tables is its file's.
    if new.format != ImageFormat::Qcow2
        && let Some(preallocation) = typed("preallocation")
    {
        put("preallocation", &options::printable(preallocation));
    }
    if let Some(size) = new.layout.extent_size {
        put("extent_size_hint", &size.to_string());
    }
    text
}

/// An option's value as it was typed.
fn typed<'a>(given: &'a [(String, String)], option: &str) -> Option<&'a str> {
    given.iter().rfind(|(name, _)| name == option).map(|(_, value)| value.as_str())
}

fn describe_qcow2(
    new: &NewDisk,
    size: u64,
    given: &[(String, String)],
    put: &mut impl FnMut(&str, &str),
) {
    let typed = |name: &str| typed(given, name);
    for option in ENCRYPTION {
        if let Some(value) = typed(option) {
            put(option, &options::printable(value));
        }
    }
    put("cluster_size", &new.cluster_size.to_string());
    put("extended_l2", typed("extended_l2").unwrap_or("off"));
    if let Some(preallocation) = typed("preallocation") {
        put("preallocation", &options::printable(preallocation));
    }
    let compression = typed("compression_type").unwrap_or(new.compression_type.name());
    put("compression_type", &options::printable(compression));
    put("size", &size.to_string());
    if let Some(compat) = typed("compat") {
        put("compat", &options::printable(compat));
    }
    let names = [
        ("backing_file", &new.backing_file),
        ("backing_fmt", &new.backing_format),
        ("data_file", &new.data_file),
    ];
    for (option, name) in names {
        if let Some(name) = name {
            put(option, &options::printable(name));
        }
    }
    if let Some(raw) = typed("data_file_raw") {
        put("data_file_raw", raw);
    }
    put("lazy_refcounts", typed("lazy_refcounts").unwrap_or("off"));
    put("refcount_bits", &new.refcount_bits.to_string());
}
