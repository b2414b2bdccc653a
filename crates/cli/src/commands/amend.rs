//! `isobath amend`

use crate::cache::CacheMode;
use crate::failure::{Failure, Outcome};
use crate::host::images;
use crate::image_name::{Image, Naming, Objects, reason};
use crate::options::NamedFormat;
use crate::{options, runtime, size};
use isobath_disk::encryption::SlotState;
use isobath_disk::{Amend, ImageFormat, KeyChange, Preallocation, amend, change_keys};
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

/// Change options of an existing image
///
/// Data is not moved. A downgrade to compat=0.10 writes zeroes where the backing file would otherwise show through, and
/// removes the persistent bitmaps.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Options as NAME=VALUE, separated by commas; '-o help' lists them
    #[arg(short, long, value_name = "OPTIONS", value_parser = options::list)]
    options: Vec<String>,
    /// The image's format [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::named_format)]
    format: Option<NamedFormat>,
    /// Cache mode for the image
    #[arg(short = 't', long = "cache", value_name = "MODE", default_value = "writeback")]
    #[arg(value_parser = CacheMode::parse)]
    cache: CacheMode,
    /// Allow changes that may make the data unreadable, such as erasing the last key
    #[arg(long)]
    force: bool,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    naming: Naming,
    /// The image
    image: Option<PathBuf>,
}

/// The options, as qemu-img lists them.
const HELP: &[(&str, &str)] = &[
    ("backing_file=<str>", "File name of a base image"),
    ("backing_fmt=<str>", "Image format of the base image"),
    ("compat=<str>", "Compatibility level (v2 [0.10] or v3 [1.1])"),
    ("data_file=<str>", "File name of an external data file"),
    ("data_file_raw=<bool (on/off)>", "The external data file must stay valid as a raw image"),
    ("encrypt.iter-time=<num>", "Time to spend in PBKDF in milliseconds"),
    ("encrypt.keyslot=<num>", "Select a single keyslot to modify explicitly"),
    (
        "encrypt.new-secret=<str>",
        "New secret to set in the matching keyslots. Empty string to erase",
    ),
    ("encrypt.old-secret=<str>", "Select all keyslots that match this password"),
    ("encrypt.state=<str>", "Select new state of affected keyslots (active/inactive)"),
    ("lazy_refcounts=<bool (on/off)>", "Postpone refcount updates"),
    ("refcount_bits=<num>", "Width of a reference count entry in bits"),
    ("size=<size>", "Virtual disk size"),
];

/// The requested changes.
#[derive(Default)]
struct Wanted {
    amend: Amend,
    size: Option<u64>,
    backing_file: Option<String>,
    backing_format: Option<String>,
    keys: Option<Keys>,
}

/// The encryption options.
#[derive(Default)]
struct Keys {
    state: Option<String>,
    slot: Option<i64>,
    new_secret: Option<String>,
    old_secret: Option<String>,
    iter_time: Option<Duration>,
}

impl Keys {
    fn set(&mut self, option: &str, value: &str) -> Result<(), String> {
        let number =
            || value.parse().map_err(|_| format!("Parameter 'encrypt.{option}' expects a number"));
        match option {
            "state" => self.state = Some(value.to_owned()),
            "keyslot" => self.slot = Some(number()?),
            "new-secret" => self.new_secret = Some(value.to_owned()),
            "old-secret" => self.old_secret = Some(value.to_owned()),
            "iter-time" => {
                let milliseconds = number()?;
                let milliseconds = u64::try_from(milliseconds);
                let milliseconds = milliseconds.map_err(|_| "iter-time must not be negative")?;
                self.iter_time = Some(Duration::from_millis(milliseconds));
            }
            "format" if value == "luks" => {}
            _ => return Err(format!("Invalid parameter 'encrypt.{option}'")),
        }
        Ok(())
    }

    fn change(self, objects: &Objects) -> Result<KeyChange, String> {
        let secret = |id: Option<String>| id.map(|id| objects.secret(&id)).transpose();
        let state = match self.state.as_deref() {
            Some("active") => SlotState::Active,
            Some("inactive") => SlotState::Inactive,
            Some(other) => {
                return Err(format!("Parameter 'state' does not accept value '{other}'"));
            }
            None => return Err("Parameter 'state' is missing".into()),
        };
        Ok(KeyChange {
            state,
            slot: self.slot,
            new_secret: secret(self.new_secret)?,
            old_secret: secret(self.old_secret)?,
            iter_time: self.iter_time,
        })
    }
}

impl Wanted {
    /// Parses the options for an image that is encrypted as a whole: those of its key slots.
    fn of_luks(pairs: &[(String, String)]) -> Result<Self, String> {
        const AT_CREATION: &[&str] = &[
            "cipher-alg",
            "cipher-mode",
            "hash-alg",
            "ivgen-alg",
            "ivgen-hash-alg",
            "key-secret",
            "size",
        ];
        let mut keys = Keys::default();
        for (name, value) in pairs {
            if AT_CREATION.contains(&name.as_str()) {
                return Err(at_creation(name));
            }
            let known = HELP.iter().any(|(option, _)| of_luks(option) == Some(name.as_str()));
            if !known {
                let known = HELP.iter().filter_map(|(option, _)| of_luks(option));
                return Err(options::unknown(name, known));
            }
            keys.set(name, value).map_err(|reason| reason.replace("encrypt.", ""))?;
        }
        Ok(Self { keys: Some(keys), ..Self::default() })
    }

    fn parse(pairs: &[(String, String)]) -> Result<Self, String> {
        const AT_CREATION: &[&str] =
            &["cluster_size", "compression_type", "encryption", "extended_l2", "preallocation"];
        let mut wanted = Self::default();
        for (name, value) in pairs {
            match name.as_str() {
                "compat" => {
                    wanted.amend.version = Some(match value.as_str() {
                        "0.10" | "v2" => 2,
                        "1.1" | "v3" => 3,
                        _ => return Err(format!("Unknown compatibility level {value}")),
                    });
                }
                "refcount_bits" => {
                    let bits = value.parse();
                    let bits = bits.map_err(|_| format!("Parameter '{name}' expects a number"))?;
                    wanted.amend.refcount_bits = Some(bits);
                }
                "lazy_refcounts" => {
                    wanted.amend.lazy_refcounts = Some(options::on_off(name, value)?);
                }
                "data_file" => wanted.amend.data_file = Some(value.clone()),
                "data_file_raw" => {
                    if options::on_off(name, value)? {
                        return Err("data-file-raw cannot be set on existing images".into());
                    }
                }
                "size" => wanted.size = Some(size::parse(value)?),
                "backing_file" => wanted.backing_file = Some(value.clone()),
                "backing_fmt" => wanted.backing_format = Some(value.clone()),
                _ if name.starts_with("encrypt.") => {
                    let option = name.trim_start_matches("encrypt.");
                    wanted.keys.get_or_insert_default().set(option, value)?;
                }
                _ if AT_CREATION.contains(&name.as_str()) => {
                    return Err(at_creation(name));
                }
                _ => {
                    let known = HELP.iter().filter_map(|(option, _)| option.split('=').next());
                    return Err(options::unknown(name, known));
                }
            }
        }
        Ok(wanted)
    }
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    if args.options.is_empty() {
        return Err(Failure::new("Must specify options (-o)"));
    }
    let pairs = options::parse(&args.options);
    if pairs.iter().any(|(name, _)| name == "help" || name == "?") {
        let format = args.format.map_or(ImageFormat::Qcow2, |named| named.format);
        if !matches!(format, ImageFormat::Qcow2 | ImageFormat::Luks) {
            return Err(not_supported(format));
        }
        writeln!(out, "Amend options for '{}':", format.name())?;
        for (option, meaning) in HELP {
            let option = match format {
                ImageFormat::Luks => option.strip_prefix("encrypt."),
                _ => Some(*option),
            };
            if let Some(option) = option {
                writeln!(out, "  {option:<22} - {meaning}")?;
            }
        }
        return Ok(0);
    }
    let Some(image) = &args.image else {
        return Err(Failure::new("Expecting one image file name"));
    };
    let image = args.naming.image(image, args.format)?;
    runtime::block_on(async || Box::pin(change(args, &image, &pairs)).await)?;
    if args.progress && !args.quiet {
        writeln!(out, "    (100.00/100%)")?;
    }
    Ok(0)
}

async fn change(args: &Args, image: &Image, pairs: &[(String, String)]) -> Result<(), Failure> {
    let options = image.writable(args.cache.is_direct())?;
    let failed = |error| Failure::new(reason(&error));
    let parse = |format| {
        let luks = format == ImageFormat::Luks;
        let wanted = if luks { Wanted::of_luks(pairs) } else { Wanted::parse(pairs) };
        wanted.map_err(Failure::new)
    };
    // What is wrong in any case needs no image.
    let early = image.format.map(parse).transpose()?;
    let disk = image.open(&image.options(args.cache.is_direct(), options.locking)).await?;
    // A disk has at least one layer.
    let Some(top) = disk.layers().next() else { unreachable!() };
    let format = top.format();
    let mut wanted = match early {
        Some(wanted) => wanted,
        None => parse(format)?,
    };
    let keys = wanted.keys.take().map(|keys| keys.change(&args.naming.objects));
    let keys = keys.transpose().map_err(Failure::new)?;
    if let (ImageFormat::Luks, Some(keys)) = (format, keys.clone()) {
        top.admit_writer(true).await.map_err(|error| image.failed(&error))?;
        let options = options.format(format);
        let change = change_keys(images(), &image.path, &options, keys, args.force);
        return Box::pin(change).await.map_err(failed);
    }
    let Some(header) = top.header() else { return Err(not_supported(format)) };
    {
        let wanted = (wanted.backing_file.as_deref(), wanted.backing_format.as_deref());
        // As in QEMU, an option that is not given counts as none, not as unchanged.
        let present = (header.backing_file.as_deref(), header.backing_format());
        if wanted != (None, None) && wanted != present {
            return Err(Failure::new(
                "Cannot amend the backing file\nYou can use 'qemu-img rebase' instead.",
            ));
        }
    }
    // Each step opens the image anew, and relies on the results of earlier steps, such as that there are no zero
    // clusters. So keep other programs from writing until the end.
    top.admit_writer(true).await.map_err(|error| image.failed(&error))?;
    let last =
        Amend { version: wanted.amend.version.filter(|version| *version < 3), ..Amend::default() };
    // Refuse before changing anything.
    isobath_disk::check_amend(images(), &image.path, &options, &wanted.amend)
        .await
        .map_err(failed)?;
    let first =
        Amend { version: wanted.amend.version.filter(|version| *version > 2), ..wanted.amend };
    Box::pin(amend(images(), &image.path, &options, &first)).await.map_err(failed)?;
    if let Some(keys) = keys {
        let change = change_keys(images(), &image.path, &options, keys, args.force);
        Box::pin(change).await.map_err(failed)?;
    }
    if let Some(size) = wanted.size {
        let disk = image.open(&options).await?;
        Box::pin(disk.resize(size, Preallocation::Off, true)).await.map_err(failed)?;
        disk.close().await?;
    }
    if last.version.is_some() {
        let disk = image.open(&options).await?;
        disk.expand_zeroes().await?;
        disk.close().await?;
        drop(disk);
        Box::pin(amend(images(), &image.path, &options, &last)).await.map_err(failed)?;
    }
    Ok(())
}

fn not_supported(format: ImageFormat) -> Failure {
    let format = format.name();
    Failure::new(format_args!("Format driver '{format}' does not support option amendment"))
}

/// The error of an option that is one of new images only.
fn at_creation(name: &str) -> String {
    format!("Invalid parameter '{name}'\nThis option is only supported for image creation")
}

/// The name of an encryption option for an image that is encrypted as a whole.
fn of_luks(option: &str) -> Option<&str> {
    option.split('=').next()?.strip_prefix("encrypt.")
}
