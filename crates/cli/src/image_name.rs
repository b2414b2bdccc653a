//! Images as the command line names them: a path, `file:PATH`, `json:{...}`, or with `--image-opts` QEMU's options.
//!
//! A path may be the name of an NBD export. Only names that the user types are parsed like this; for names in an
//! image's header, see `isobath_image::name`.

use crate::failure::Failure;
use crate::host::{self, ImageFile, ImageHost, images};
use crate::layers::{self, Compared, Given, Layers};
use crate::null::{self, is_null};
use crate::options::NamedFormat;
use crate::program::{self, NotUnderLinks};
use crate::stored::{self, CacheOptions};
use crate::tls_objects::{self, TlsObject};
use crate::trust::Trusting;
use crate::{cores, nbd_options, options, size};
use isobath_disk::encryption::{FoundSecret, Secret, Secrets};
use isobath_disk::{
    BackingFile, Below, Disk, DiskError, ImageFormat, InfoOptions, Layer, OpenOptions, Trust, info,
};
use isobath_qcow2::{FormatError, FormatErrorKind};
use isobath_qmp::schema::{check, from_text};
use isobath_qmp::secret::{Description, Source};
use isobath_qmp::tables::SCHEMA;
use isobath_remote::Address;
use isobath_storage::window::Part;
use isobath_storage::{Host, Locking, OpenMode, Operation, Storage, StorageError};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The reason for not opening an image that lacks the requested snapshot.
pub(crate) const NO_SNAPSHOT: &str = "Can't find snapshot";

/// How a command's images are named.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct Naming {
    /// Treat image names as QEMU options, such as driver=qcow2,file.filename=FILE
    #[arg(long, alias = "source-image-opts")]
    pub(crate) image_opts: bool,
    #[command(flatten)]
    pub(crate) objects: Objects,
    #[command(flatten)]
    pub(crate) secret_file: SecretFile,
    #[command(flatten)]
    pub(crate) trusting: NotUnderLinks<Trusting>,
    #[command(flatten)]
    pub(crate) instead: NotUnderLinks<Instead>,
    #[command(flatten)]
    pub(crate) stored: NotUnderLinks<CacheOptions>,
    /// Secrets that options name need not exist: guest data is not read.
    #[arg(skip)]
    pub(crate) secrets_unneeded: bool,
}

/// What takes the place of the files that an image's header names, for commands that do not name them as QEMU does.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct Instead {
    /// The external data file of the image, instead of the one that it names
    #[arg(long, value_name = "FILE", conflicts_with = "image_opts")]
    data_file: Option<PathBuf>,
    /// The image's present backing file, instead of the one that its header names, which stays there
    #[arg(id = "present_backing_file", long = "backing-file", value_name = "FILE")]
    #[arg(conflicts_with = "image_opts")]
    backing_file: Option<String>,
    /// The format of --backing-file [default: the one that the image's header names; with --untrusted none]
    #[arg(id = "present_backing_format", long = "backing-file-format", value_name = "FMT")]
    #[arg(value_parser = options::format, requires = "present_backing_file")]
    backing_format: Option<ImageFormat>,
    /// Read the image without its backing file: what is not in it reads as zeroes
    #[arg(long, conflicts_with_all = ["image_opts", "present_backing_file"])]
    no_backing: bool,
    #[command(flatten)]
    layers: Layers,
}

impl Instead {
    /// Whether another backing file is given.
    pub(crate) fn has_backing_file(&self) -> bool {
        self.backing_file.is_some()
    }

    /// Whether any of them is given.
    fn is_any(&self) -> bool {
        self.data_file.is_some()
            || self.backing_file.is_some()
            || self.no_backing
            || self.layers.is_any()
    }

    /// Refuses a backing file, or layers, for a command that opens none.
    ///
    /// # Errors
    /// If there are such.
    pub(crate) fn check_alone(&self, command: &str) -> Result<(), Failure> {
        let option = match (&self.backing_file, self.layers.has_files()) {
            (Some(_), _) => "--backing-file",
            (None, true) => "--layers",
            (None, false) => return Ok(()),
        };
        Err(Failure::usage(format_args!("{command} opens no backing file: leave out {option}")))
    }

    /// Refuses an external data file for a command that opens none.
    ///
    /// # Errors
    /// If there is one.
    pub(crate) fn check_no_data(&self, command: &str) -> Result<(), Failure> {
        if self.data_file.is_none() {
            return Ok(());
        }
        Err(Failure::usage(format_args!(
            "'{command}' opens no external data file: leave out --data-file"
        )))
    }

    /// Puts the files in the place of those that the image names.
    fn apply(&self, image: &mut Image) -> Result<(), String> {
        if self.data_file.is_some() {
            image.data_file.clone_from(&self.data_file);
        }
        if let Some(file) = &self.backing_file {
            if !image.backing || !image.backing_files.is_empty() {
                return Err(
                    "--backing-file cannot be used with a name that says itself what is below"
                        .into(),
                );
            }
            image.backing_files = vec![backing_file(file, self.backing_format)?];
        }
        if self.no_backing {
            image.backing = false;
            image.read_only = true;
        }
        Ok(())
    }
}

/// The backing file that an option names: a path, `file:PATH` or the name of an NBD export.
pub(crate) fn backing_file(name: &str, format: Option<ImageFormat>) -> Result<Below, String> {
    let mut pairs = vec![("filename".to_owned(), name.to_owned())];
    match file(&mut pairs, "")? {
        Some(name) if !name.as_os_str().is_empty() => {
            Ok(Below::Given(BackingFile { name, format }))
        }
        _ => Err("--backing-file names no file; --no-backing opens the image without one".into()),
    }
}

/// The secret of encrypted images, for commands that do not name secrets as QEMU does.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct SecretFile {
    /// File with the secret of encrypted images: all of its bytes, including a final newline; /dev/fd/N is a descriptor
    #[arg(long, value_name = "FILE")]
    pub(crate) secret_file: Option<PathBuf>,
}

impl SecretFile {
    /// The secrets of a chain: the file's secret for each image.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn secrets(&self) -> Result<Secrets, Failure> {
        self.load().map_err(Failure::new)
    }

    fn load(&self) -> Result<Secrets, String> {
        let Some(file) = &self.secret_file else { return Ok(Secrets::default()) };
        cores::withhold();
        let source = Source::File(file.to_string_lossy().into_owned());
        let description = Description { id: String::new(), source, base64: false };
        description.load().map(Secrets::from)
    }
}

/// QEMU's objects that a command uses.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct Objects {
    /// Define an object, such as secret,id=NAME,file=FILE or tls-creds-x509,id=NAME,dir=DIR,endpoint=client; can be
    /// repeated
    #[arg(long, value_name = "OBJECT", value_parser = object)]
    pub(crate) object: Vec<String>,
}

impl Objects {
    /// The secret with this ID.
    ///
    /// # Errors
    /// If there is none, or its value is not in a file or cannot be read.
    pub(crate) fn secret(&self, id: &str) -> Result<Arc<Secret>, String> {
        self.find_secret(id).unwrap_or_else(|| Err(format!("No secret with id '{id}'")))
    }

    fn find_secret(&self, id: &str) -> Option<FoundSecret> {
        let mut described = self.object.iter().filter_map(|text| describe(text).ok());
        let found = described.rfind(|description| description.id == id)?;
        cores::withhold();
        Some(file_of(&found).and_then(|_| found.load()).map(Arc::new))
    }

    /// The objects for encrypted connections.
    pub(crate) fn tls(&self) -> Vec<TlsObject> {
        let all = self.object.iter().filter_map(|text| tls_object(text).ok());
        all.flatten().collect()
    }

    /// The texts of the others, which are created by QMP.
    pub(crate) fn for_qmp(&self) -> impl Iterator<Item = &String> {
        self.object.iter().filter(|text| matches!(tls_object(text), Ok(None)))
    }

    /// The arguments of QMP's `object-add` for the text of a secret or a throttle group.
    ///
    /// # Errors
    /// If a secret's value is not in a file, or a throttle group is not one.
    pub(crate) fn arguments(text: &str) -> Result<Map<String, Value>, String> {
        if is_throttle_group(text) {
            return throttle_group(text);
        }
        let described = describe(text)?;
        let format = if described.base64 { "base64" } else { "raw" };
        let values = [
            ("qom-type", "secret"),
            ("id", &described.id),
            ("file", file_of(&described)?),
            ("format", format),
        ];
        Ok(values.map(|(name, value)| (name.to_owned(), value.into())).into_iter().collect())
    }
}

/// The file of a secret, which must not be given on the command line.
fn file_of(description: &Description) -> Result<&str, String> {
    match &description.source {
        Source::File(file) => Ok(file),
        Source::Data(_) => Err(format!(
            "secret '{0}' is on the command line, where every user of this machine can read it; \
             use secret,id={0},file=FILE",
            options::printable(&description.id)
        )),
    }
}

/// An object's kind, and its options.
fn split(text: &str) -> (&str, Vec<(String, String)>) {
    let (kind, rest) = text.split_once(',').unwrap_or((text, ""));
    let kind = kind.strip_prefix("qom-type=").unwrap_or(kind);
    (kind, options::parse(&[rest.to_owned()]))
}

/// The secret that an object's text describes.
fn describe(text: &str) -> Result<Description, String> {
    let (kind, pairs) = split(text);
    if kind != "secret" {
        return Err(format!("Parameter 'qom-type' does not accept value '{kind}'"));
    }
    Description::of(pairs.iter().map(|(name, value)| (name.as_str(), value.as_str())))
}

/// Checks an object: a secret with an ID and one source of its value, one for encrypted connections, or a throttle
/// group.
fn object(text: &str) -> Result<String, String> {
    if is_throttle_group(text) {
        throttle_group(text)?;
    } else if tls_object(text)?.is_none() {
        describe(text)?;
    }
    Ok(text.to_owned())
}

/// The object for encrypted connections that a text describes, if it is one.
fn tls_object(text: &str) -> Result<Option<TlsObject>, String> {
    let (kind, pairs) = split(text);
    tls_objects::is_kind(kind).then(|| tls_objects::describe(kind, &pairs)).transpose()
}

fn is_throttle_group(text: &str) -> bool {
    let kind = text.split(',').next().unwrap_or_default();
    kind.strip_prefix("qom-type=").unwrap_or(kind) == "throttle-group"
}

/// The arguments of `object-add` for a throttle group.
fn throttle_group(text: &str) -> Result<Map<String, Value>, String> {
    let kind = if text.starts_with("qom-type=") { "" } else { "qom-type=" };
    let pairs = options::parse(&[format!("{kind}{text}")]);
    let command = SCHEMA.command("object-add").ok_or("objects are not supported")?;
    let arguments = from_text(command.arguments, &pairs).map_err(|error| error.to_string())?;
    check(command.arguments, &arguments).map_err(|error| error.to_string())?;
    Ok(arguments)
}

/// An image given to a command.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    /// As it was typed, for messages.
    shown: String,
    /// Its file.
    pub(crate) path: PathBuf,
    /// The format, if one was given.
    pub(crate) format: Option<ImageFormat>,
    /// The driver that is named in place of a format: that of a file, which is then the disk.
    protocol: Option<String>,
    /// The driver that its description (`json:`) says, of whatever is on top.
    described_driver: Option<String>,
    /// The driver of its file, if that is one for devices.
    device: Option<&'static str>,
    /// How a disk without contents is shown.
    shown_null: Option<String>,
    direct: Option<bool>,
    read_only: bool,
    unlocked: bool,
    backing: bool,
    /// Something else than the headers says what is below each layer.
    is_layered: bool,
    /// Writes are compressed (QEMU's filter `compress`).
    compress: bool,
    /// The external data file, and the backing files by depth, if the options name them.
    data_file: Option<PathBuf>,
    backing_files: Vec<Below>,
    /// QEMU's `l2-cache-entry-size`, which has no effect but may be wrong.
    table_pieces: Option<u64>,
    /// The names that the options give to the image and to what is below it, by option.
    node_names: Vec<(String, String)>,
    secrets: Secrets,
    /// The ID of its secret, if its options name one.
    key_secret: Option<String>,
    trust: Trust,
}

impl Naming {
    /// The image described by `name` and the option for its format, which may be in a store.
    ///
    /// # Errors
    /// If they cannot be used, in QEMU's words. If the image is in a store that cannot be read.
    pub(crate) fn image(&self, name: &Path, format: Option<NamedFormat>) -> Result<Image, Failure> {
        if let Some(address) = self.chain(name)? {
            return self.of_store(&address, format.is_some());
        }
        let failed = |reason| could_not_open(&name.to_string_lossy(), reason);
        match self.instead.layers.of(name).map_err(failed)? {
            Some(given) => self.layered(given, format).map_err(failed),
            None => self.file_image(name, format),
        }
    }

    /// Like [`image`](Self::image), but the error is only the reason.
    pub(crate) fn found(&self, name: &Path, format: Option<NamedFormat>) -> Result<Image, String> {
        match self.chain(name).map_err(|failure| failure.to_string())? {
            Some(address) => {
                let image = self.of_store(&address, format.is_some());
                image.map_err(|failure| failure.to_string())
            }
            None => match self.instead.layers.of(name)? {
                Some(given) => self.layered(given, format),
                None => self.parse(name, format),
            },
        }
    }

    /// The image that is the top of layers in an order that is given, which are only read.
    fn layered(&self, given: Given, format: Option<NamedFormat>) -> Result<Image, String> {
        if self.image_opts || self.instead.backing_file.is_some() || self.instead.no_backing {
            return Err(
                "--layers and --checkpoint say what is below the image: leave out --image-opts, --backing-file and \
                 --no-backing"
                    .into(),
            );
        }
        let qcow2 = ImageFormat::Qcow2;
        if format.is_some_and(|format| format.format != qcow2 || format.protocol.is_some()) {
            return Err("--layers and --checkpoint are for layers in the format qcow2".into());
        }
        let shown = given.top.to_string_lossy().into_owned();
        let path = given.top.to_str().map(host::path_of_file).unwrap_or(given.top);
        let plain = Image::plain(shown, path, Some(qcow2));
        self.as_told(Image {
            backing_files: given.below,
            read_only: true,
            is_layered: true,
            secrets: self.secrets()?,
            ..plain
        })
    }

    /// The chain in a store that `name` stands for: under QEMU's names for none.
    fn chain(&self, name: &Path) -> Result<Option<Address>, Failure> {
        if self.image_opts || program::is_link() { Ok(None) } else { stored::address(name) }
    }

    /// Like [`image`](Self::image), of one that is in no store.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn file_image(
        &self,
        name: &Path,
        format: Option<NamedFormat>,
    ) -> Result<Image, Failure> {
        if self.image_opts && format.is_some() {
            return Err(Failure::new("--image-opts and --format are mutually exclusive"));
        }
        let failed = |reason| could_not_open(&name.to_string_lossy(), reason);
        self.parse(name, format).map_err(failed)
    }

    /// The image that is the top of a chain in a store, which is only read.
    fn of_store(&self, address: &Address, has_format: bool) -> Result<Image, Failure> {
        if has_format {
            return Err(Failure::new(
                "the formats of a chain in a store are those of its manifest: leave out --format",
            ));
        }
        if self.instead.is_any() {
            return Err(Failure::new(
                "the layers of a chain in a store are those of its manifest: leave out --data-file, --backing-file, \
                 --no-backing, --layers and --checkpoint",
            ));
        }
        let chain = self.stored.open_now(address)?;
        let (format, backing_files) = stored::files_of(&chain);
        let name = address.to_string();
        let image = Image {
            backing_files,
            direct: Some(false),
            read_only: true,
            ..Image::plain(name.clone(), name.clone().into(), format)
        };
        self.as_told(image).map_err(|reason| could_not_open(&name, reason))
    }

    /// Like [`file_image`](Self::file_image), but the error is only the reason.
    pub(crate) fn parse(&self, name: &Path, format: Option<NamedFormat>) -> Result<Image, String> {
        let mut image = self.parse_name(name, format)?;
        if let Some(driver) = format.and_then(|format| format.protocol) {
            if image.described_driver.as_deref().is_some_and(|described| described != driver) {
                return Err(format!("the name has another driver than '{driver}'"));
            }
            if image.protocol.is_none() {
                image.is_whole_file(driver)?;
            }
        }
        self.as_told(image)
    }

    /// The same image, trusted as far as the command says, and with its other files.
    fn as_told(&self, mut image: Image) -> Result<Image, String> {
        image.trust = self.trusting.trust().map_err(|failure| failure.to_string())?;
        self.instead.apply(&mut image)?;
        Ok(image)
    }

    /// The secrets of a chain, unless its options name others.
    pub(crate) fn secrets(&self) -> Result<Secrets, String> {
        let objects = self.objects.clone();
        Ok(self.secret_file.load()?.with_ids(move |id| objects.find_secret(id)))
    }

    /// Refuses the files of one image for several images.
    ///
    /// # Errors
    /// If there is one.
    pub(crate) fn check_for_several(&self) -> Result<(), Failure> {
        let refused = |option, described| {
            Err(Failure::usage(format_args!(
                "{option} is for one image; with several, use --image-opts and {described}=FILE"
            )))
        };
        match &*self.instead {
            Instead { data_file: Some(_), .. } => refused("--data-file", "data-file.filename"),
            Instead { backing_file: Some(_), .. } => {
                refused("--backing-file", "backing.file.filename")
            }
            Instead { layers, .. } if layers.is_any() => {
                Err(Failure::usage("--layers and --checkpoint are for one image"))
            }
            _ => Ok(()),
        }
    }

    fn parse_name(&self, name: &Path, named: Option<NamedFormat>) -> Result<Image, String> {
        let format = named.map(|named| named.format);
        let shown = name.to_string_lossy().into_owned();
        let secrets = self.secrets()?;
        tls_objects::define(self.objects.tls());
        let plain = |path: PathBuf, format| Image {
            secrets: secrets.clone(),
            ..Image::plain(shown.clone(), path, format)
        };
        if self.image_opts {
            if !shown.contains('=') {
                return Err(format!("Cannot find device='{shown}' nor node-name='{shown}'"));
            }
            let mut pairs = options::parse(std::slice::from_ref(&shown));
            // A later value of an option replaces an earlier one.
            let last = |pairs: &[(String, String)], at: usize, name: &str| {
                !pairs.iter().skip(at + 1).any(|(other, _)| other == name)
            };
            let kept: Vec<bool> =
                pairs.iter().enumerate().map(|(at, (name, _))| last(&pairs, at, name)).collect();
            let mut kept = kept.into_iter();
            pairs.retain(|_| kept.next().unwrap_or(true));
            return self.described(plain(PathBuf::new(), None), pairs);
        }
        if let Some(json) = shown.strip_prefix("json:") {
            let value = crate::json::standard(json);
            let value = isobath_qmp::json::parse(value.as_bytes())
                .map_err(|error| format!("Could not parse the JSON options: {error}"))?;
            if !value.is_object() {
                return Err("Invalid JSON object given".into());
            }
            let mut pairs = Vec::new();
            flatten("", &value, &mut pairs)?;
            let driver = pairs.iter().find(|(name, _)| name == "driver");
            let described_driver = driver.map(|(_, driver)| driver.clone());
            if let (Some(named), None) = (named, &described_driver) {
                pairs.push(("driver".into(), named.name().into()));
            }
            let image = Image { described_driver, ..plain(PathBuf::new(), format) };
            return self.described(image, pairs);
        }
        if let Some(path) = shown.strip_prefix("file:") {
            // As in QEMU, its name shows that it is a file.
            let path = match protocol(path) {
                Some(_) => Path::new(".").join(path),
                None => host::path_of_file(path),
            };
            return Ok(plain(path, format));
        }
        if let Some((driver, file)) = on_device(&shown) {
            is_of_kind(driver, file)?;
            let path = host::path_of_file(file);
            return Ok(Image { device: Some(driver), ..plain(path, format) });
        }
        if host::is_export(name) {
            return Ok(plain(nbd_options::named(&shown)?, format));
        }
        if protocol(&shown).is_some_and(is_null) {
            let mut pairs = vec![("filename".to_owned(), shown.clone())];
            let path = without_contents(&mut pairs, "")?;
            return Ok(plain(path, format));
        }
        if shown.starts_with("blkdebug:") {
            let name = vec![("file.filename".to_owned(), shown.clone())];
            return self.described(plain(PathBuf::new(), format), name);
        }
        if let Some(protocol) = protocol(&shown) {
            return Err(unknown_protocol(protocol));
        }
        Ok(plain(name.to_owned(), format))
    }

    /// The image described by QEMU's options; `name` is its file, if the options do not name it.
    ///
    /// # Errors
    /// If they cannot be used, in QEMU's words.
    pub(crate) fn with_options(
        &self,
        name: Option<&str>,
        mut options: Vec<(String, String)>,
    ) -> Result<Image, String> {
        if let Some(name) = name {
            options.push(("file.filename".into(), name.to_owned()));
        }
        let shown = name.unwrap_or_default().to_owned();
        let secrets = self.secrets()?;
        tls_objects::define(self.objects.tls());
        let plain = Image { secrets, ..Image::plain(shown, PathBuf::new(), None) };
        self.as_told(self.described(plain, options)?)
    }

    /// Refuses a name under which no image is created, in QEMU's words.
    pub(crate) fn can_create(name: &Path) -> Result<(), &'static str> {
        if host::is_stored(name) && !program::is_link() {
            return Err(
                "it is the name of a chain in a store, which 'isobath push' makes; name a file by its path",
            );
        }
        let bytes = name.as_os_str().as_encoded_bytes();
        if bytes.starts_with(b"blkdebug:") {
            return Err("Protocol driver 'blkdebug' does not support image creation");
        }
        if bytes.starts_with(b"json:") {
            return Err("Unknown protocol 'json'");
        }
        if bytes.starts_with(b"null-co:") {
            return Err("Protocol driver 'null-co' does not support image creation");
        }
        if bytes.starts_with(b"null-aio:") {
            return Err("Protocol driver 'null-aio' does not support image creation");
        }
        Ok(())
    }

    /// Where to create a new image: at a path, `file:PATH`, or on the device `host_device:PATH`.
    ///
    /// # Errors
    /// If the name has another protocol's prefix.
    pub(crate) fn target(name: &Path) -> Result<NewName, String> {
        Self::can_create(name)?;
        if let Some((driver, file)) = on_device(&name.to_string_lossy()) {
            return Ok(NewName { path: host::path_of_file(file), device: Some(driver) });
        }
        Ok(NewName { path: Self::default().parse(name, None)?.path, device: None })
    }
}

/// Where to create a new image.
#[derive(Debug)]
pub(crate) struct NewName {
    pub(crate) path: PathBuf,
    /// The driver, if that only writes to a device that there is.
    pub(crate) device: Option<&'static str>,
}

impl NewName {
    /// Checks that a device's driver finds a device, which it cannot create.
    ///
    /// # Errors
    /// In QEMU's words.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Some(driver) = self.device else { return Ok(()) };
        let file = self.path.to_string_lossy();
        let found = match std::fs::metadata(&self.path) {
            Ok(_) => is_of_kind(driver, &file),
            Err(error) => {
                let shown = options::printable(&file);
                Err(format!("Could not open '{shown}': {}", isobath_storage::cause(&error)))
            }
        };
        found.map_err(|reason| {
            format!(
                "Protocol driver '{driver}' does not support image creation, and opening the image failed: {reason}"
            )
        })
    }

    /// As [`check`](Self::check), for a format whose images are regular files only.
    ///
    /// # Errors
    /// In QEMU's words, or if it is to be on a device.
    pub(crate) fn check_file(&self) -> Result<(), String> {
        self.check()?;
        match self.device {
            None => Ok(()),
            Some(_) => Err(format!(
                "'{}' is not a regular file; images in this format must be regular files",
                options::printable(&self.path.to_string_lossy())
            )),
        }
    }
}

/// The driver and the device of a name with the prefix of a driver for devices.
fn on_device(name: &str) -> Option<(&'static str, &str)> {
    let (protocol, file) = name.split_once(':')?;
    Some((device_driver(protocol)?, file))
}

/// The driver of that name, if it is one for devices.
fn device_driver(name: &str) -> Option<&'static str> {
    ["host_device", "host_cdrom"].into_iter().find(|driver| *driver == name)
}

impl Image {
    fn plain(shown: String, path: PathBuf, format: Option<ImageFormat>) -> Self {
        let (direct, read_only, unlocked, backing) = (None, false, false, true);
        let (compress, data_file, backing_files) = (false, None, Vec::new());
        let secrets = Secrets::default();
        Self {
            shown,
            path,
            format,
            protocol: None,
            described_driver: None,
            device: None,
            shown_null: None,
            direct,
            read_only,
            unlocked,
            backing,
            is_layered: false,
            compress,
            data_file,
            backing_files,
            table_pieces: None,
            node_names: Vec::new(),
            secrets,
            key_secret: None,
            trust: Trust::Full,
        }
    }

    /// Whether the options name its external data file.
    pub(crate) fn has_given_data_file(&self) -> bool {
        self.data_file.is_some()
    }

    /// The name to show, if it is not that of the file: of a part of one, or of a disk without contents.
    pub(crate) fn readable_name(&self) -> Option<&str> {
        let other = Part::of_name(&self.path).is_some() || self.is_null();
        other.then(|| self.shown_null.as_deref().unwrap_or(&self.shown))
    }

    /// The ID of its secret, if its options name one.
    pub(crate) fn key_secret(&self) -> Option<&str> {
        self.key_secret.as_deref()
    }

    /// Whether it is a disk without contents.
    pub(crate) fn is_null(&self) -> bool {
        null::is_name(&self.path)
    }

    /// The driver that is named in place of a format.
    pub(crate) fn protocol(&self) -> Option<&str> {
        self.protocol.as_deref()
    }

    /// The name that an option gives to a part of the image.
    pub(crate) fn node_name(&self, option: &str) -> Option<&str> {
        let (_, name) = self.node_names.iter().find(|(other, _)| other == option)?;
        Some(name)
    }

    /// Whether the page cache is bypassed, where `direct` says what follows from the command's cache mode.
    pub(crate) fn is_direct(&self, direct: bool) -> bool {
        self.direct.unwrap_or(direct)
    }

    /// Demands that its file is a device, if an option names such a driver.
    ///
    /// # Errors
    /// If it is none, in QEMU's words.
    pub(crate) fn must_be_on(&mut self, device: Option<&'static str>) -> Result<(), Failure> {
        let Some(driver) = device else { return Ok(()) };
        self.device = Some(driver);
        is_of_kind(driver, &self.path.to_string_lossy())
            .map_err(|reason| could_not_open(&self.shown, reason))
    }

    /// Has its file be the disk, by a driver for files or devices.
    fn is_whole_file(&mut self, driver: &'static str) -> Result<(), String> {
        if host::is_export(&self.path) || self.is_null() {
            // As in QEMU: of a file of that name.
            let shown = options::printable(&self.shown);
            return Err(format!("Could not open '{shown}': No such file or directory"));
        }
        is_of_kind(driver, &self.path.to_string_lossy())?;
        self.protocol = Some(driver.to_owned());
        self.device = device_driver(driver);
        Ok(())
    }

    /// Lets the command's cache mode decide.
    pub(crate) fn forget_direct(&mut self) {
        self.direct = None;
    }

    /// Changes what the options say of writing, except to an image without its backing file.
    pub(crate) fn set_read_only(&mut self, read_only: bool) {
        self.read_only = read_only || (self.read_only && !self.backing);
    }

    /// Whether writes are to be compressed, which is up to the caller.
    pub(crate) fn take_compress(&mut self) -> bool {
        std::mem::take(&mut self.compress)
    }

    /// How to open a temporary overlay of it, regardless of the backing file that the overlay names.
    pub(crate) fn overlay_options(
        &self,
        format: ImageFormat,
        direct: bool,
        locking: Locking,
    ) -> OpenOptions {
        let options = self.options(direct, locking).format(ImageFormat::Qcow2);
        let file = BackingFile { name: self.path.clone(), format: Some(format) };
        let mut below = vec![Below::Given(file)];
        if self.backing {
            below.extend(self.backing_files.iter().cloned());
        } else {
            below.push(Below::Nothing);
        }
        options.writable(true).backing(true).data_file(None).backing_files(below)
    }

    /// How to open it. `direct` follows from the command's cache mode, `locking` from its option for locks.
    pub(crate) fn options(&self, direct: bool, locking: Locking) -> OpenOptions {
        let locking = if self.unlocked { Locking::Present } else { locking };
        OpenOptions::new()
            .format(self.format)
            .direct(self.direct.unwrap_or(direct))
            .locking(locking)
            .backing(self.backing)
            .data_file(self.data_file.clone())
            .backing_files(self.backing_files.clone())
            .secrets(self.secrets.clone())
            .trust(self.trust.clone())
    }

    /// Whether it is opened with its backing files.
    pub(crate) const fn has_backing(&self) -> bool {
        self.backing
    }

    /// How to look at it.
    pub(crate) fn look(&self, locking: Locking) -> InfoOptions {
        let options = self.options(false, locking);
        let OpenOptions { locking, format, trust, mut backing_files, backing, .. } = options;
        if !backing {
            backing_files = vec![Below::Nothing];
        }
        InfoOptions { locking, format, trust, backing_files, ..InfoOptions::default() }
    }

    /// Sets the secret of the image, which was just created with it.
    pub(crate) fn set_secret(&mut self, secret: Arc<Secret>) {
        self.secrets.set(0, secret);
    }

    /// Like [`options`](Self::options), but for writing.
    ///
    /// # Errors
    /// If the options for the image say read-only.
    pub(crate) fn writable(&self, direct: bool) -> Result<OpenOptions, Failure> {
        if self.compress {
            return Err(could_not_open(
                &self.shown,
                "driver 'compress' is supported by qemu-nbd and qemu-io only",
            ));
        }
        if host::is_stored(&self.path) {
            return Err(could_not_open(
                &self.shown,
                "chains in stores are only read; 'isobath pull' makes files of a chain, which can be written to",
            ));
        }
        if self.read_only {
            return Err(could_not_open(
                &self.shown,
                "its options make it read-only (read-only=on, --no-backing, --layers or --checkpoint)",
            ));
        }
        Ok(self.options(direct, Locking::Exclusive).writable(true))
    }

    /// Opens it.
    ///
    /// # Errors
    /// In QEMU's words.
    pub(crate) async fn open(
        &self,
        options: &OpenOptions,
    ) -> Result<Arc<Disk<ImageHost>>, Failure> {
        match Disk::open(images().clone(), &self.path, options).await {
            Ok(disk) => {
                self.fits(&disk).map_err(|reason| self.refused(reason))?;
                Ok(Arc::new(disk))
            }
            Err(DiskError::Refused { reason, .. }) if reason == NO_SNAPSHOT => {
                Err(Failure::new(format_args!("Failed to load snapshot: {NO_SNAPSHOT}")))
            }
            Err(error) => Err(self.failed(&error)),
        }
    }

    /// Checks the external data file that its options name, for a command that reads nothing of it.
    ///
    /// # Errors
    /// If it cannot be opened, or the image has none.
    pub(crate) async fn check_data_file(&self, locking: Locking) -> Result<(), Failure> {
        let Some(file) = &self.data_file else { return Ok(()) };
        let look = self.look(locking);
        let look = InfoOptions { backing_files: vec![Below::Nothing], ..look };
        // What is wrong with the image itself, the command says.
        let Ok(info) = info(images(), &self.path, &look).await else { return Ok(()) };
        if info.qcow2.is_none_or(|qcow2| qcow2.data_file_raw.is_none()) {
            let reason = "'data-file' can only be set for images with an external data file";
            return Err(could_not_open(&self.shown, reason));
        }
        let mode = OpenMode { locking: look.locking, ..OpenMode::default() };
        let opened = images().open(file, mode).await;
        opened.map(drop).map_err(|error| self.failed(&DiskError::from(error)))
    }

    /// Checks layers in an order that the options give, from the top down.
    ///
    /// # Errors
    /// They cannot be those of one disk.
    pub(crate) fn check_layers<'l>(
        &self,
        layers: impl Iterator<Item: Into<Compared<'l>>>,
    ) -> Result<(), String> {
        if self.is_layered { layers::check(layers) } else { Ok(()) }
    }

    /// Checks the options that only an open image can be compared with.
    ///
    /// # Errors
    /// In QEMU's words, without the image's name.
    pub(crate) fn fits(&self, disk: &Disk<ImageHost>) -> Result<(), String> {
        self.check_layers(disk.layers())?;
        let is_device = |layer: &Layer<ImageFile>| layer.storage().capabilities().is_device;
        if let Some(driver) = self.device
            && !disk.layers().next().is_some_and(|layer| is_device(layer))
        {
            // /dev/null is a device that is read like a file.
            is_of_kind(driver, &self.path.to_string_lossy())?;
        }
        let header = disk.layers().next().and_then(|layer| layer.header());
        let geometry = header.and_then(|header| header.geometry().ok());
        let (Some(piece), Some(geometry)) = (self.table_pieces, geometry) else { return Ok(()) };
        let cluster = geometry.cluster_size();
        if piece.is_power_of_two() && (512..=cluster).contains(&piece) {
            return Ok(());
        }
        Err(format!(
            "L2 cache entry size must be a power of two between 512 and the cluster size ({cluster})"
        ))
    }

    /// The failure to open the image.
    pub(crate) fn failed(&self, error: &DiskError) -> Failure {
        self.refused(reason(error))
    }

    /// The failure to open the image for this reason.
    pub(crate) fn refused(&self, reason: impl std::fmt::Display) -> Failure {
        could_not_open(&self.shown, reason)
    }
}

/// A failure to open the image `name`.
pub(crate) fn could_not_open(name: &str, reason: impl std::fmt::Display) -> Failure {
    Failure::new(format_args!("Could not open '{}': {reason}", options::printable(name)))
}

/// Why an image cannot be opened, without its name.
pub(crate) fn reason(error: &DiskError) -> String {
    match error {
        DiskError::Storage(error) => storage_reason(error),
        DiskError::Format { source, .. } if is_too_big(source) => "Image is too big".into(),
        DiskError::Format { source, .. } if is_not_qcow2(source) => {
            "Image is not in qcow2 format".into()
        }
        DiskError::Format { source, .. } => source.to_string(),
        DiskError::Refused { reason, .. } => reason.clone(),
        DiskError::Memory { source, .. } => source.to_string(),
        DiskError::Backing { source, .. } => match &**source {
            DiskError::Format { .. } | DiskError::Refused { .. } | DiskError::Memory { .. } => {
                format!("Could not open backing file: {source}")
            }
            source => format!("Could not open backing file: {}", reason(source)),
        },
        error => error.to_string(),
    }
}

/// Whether a disk is too large for its image's tables.
pub(crate) fn is_too_big(error: &FormatError) -> bool {
    error.field() == "size" && error.kind() == FormatErrorKind::TooLarge
}

/// Whether a file does not begin as a qcow2 image does, although it is said to be one.
pub(crate) fn is_not_qcow2(error: &FormatError) -> bool {
    error.field() == "magic" && error.kind() == FormatErrorKind::NotQcow2
}

fn storage_reason(error: &StorageError) -> String {
    match error.operation {
        Operation::Open => {
            let cause = isobath_storage::cause(&error.source);
            if host::is_export(&error.name) {
                return cause;
            }
            format!("Could not open '{}': {cause}", isobath_storage::shown(&error.name))
        }
        Operation::Create => {
            let name = isobath_storage::shown(&error.name);
            format!("Could not create '{name}': {}", isobath_storage::cause(&error.source))
        }
        Operation::Lock => isobath_storage::cause(&error.source),
        _ => error.to_string(),
    }
}

/// The protocol of a name, as QEMU parses it: the part before a colon, if that contains no slash.
fn protocol(name: &str) -> Option<&str> {
    let (protocol, _) = name.split_once(':')?;
    (!protocol.contains('/')).then_some(protocol)
}

fn unknown_protocol(protocol: &str) -> String {
    const QEMUS: &[&str] = &[
        "blkdebug",
        "blkverify",
        "ftp",
        "ftps",
        "gluster",
        "http",
        "https",
        "iscsi",
        "nfs",
        "nvme",
        "rbd",
        "ssh",
        "vvfat",
    ];
    if QEMUS.contains(&protocol) {
        return format!("protocol '{protocol}' is not supported; use a file or a device");
    }
    format!("Unknown protocol '{protocol}'")
}

/// The options in a JSON object, by their dotted names.
fn flatten(prefix: &str, value: &Value, pairs: &mut Vec<(String, String)>) -> Result<(), String> {
    let dotted = |key: &str| {
        if prefix.is_empty() { key.to_owned() } else { format!("{prefix}.{key}") }
    };
    match value {
        Value::Object(object) => {
            object.iter().try_for_each(|(key, value)| flatten(&dotted(key), value, pairs))
        }
        Value::Array(array) => array
            .iter()
            .enumerate()
            .try_for_each(|(index, value)| flatten(&dotted(&index.to_string()), value, pairs)),
        Value::String(text) => push(prefix, text.clone(), pairs),
        Value::Bool(on) => push(prefix, if *on { "on" } else { "off" }.into(), pairs),
        Value::Number(number) => push(prefix, number.to_string(), pairs),
        // No backing file.
        Value::Null => push(prefix, String::new(), pairs),
    }
}

fn push(name: &str, value: String, pairs: &mut Vec<(String, String)>) -> Result<(), String> {
    if pairs.iter().any(|(other, _)| other == name) {
        return Err(format!("option '{name}' is given more than once"));
    }
    pairs.push((name.to_owned(), value));
    Ok(())
}

impl Naming {
    /// The image that QEMU's options describe.
    fn described(
        &self,
        mut image: Image,
        mut pairs: Vec<(String, String)>,
    ) -> Result<Image, String> {
        if pairs.iter().any(|(name, value)| name == "driver" && value == "compress") {
            pairs.retain(|(name, _)| name != "driver");
            for (name, _) in &mut pairs {
                *name = match name.strip_prefix("file.") {
                    Some(name) => name.to_owned(),
                    None => {
                        return Err(format!(
                            "Block format 'compress' does not support the option '{name}'"
                        ));
                    }
                };
            }
            image.compress = true;
        }
        if pairs.iter().any(|(name, value)| name == "driver" && value == "blkdebug") {
            without_blkdebug(&mut pairs)?;
        }
        let options = pairs.clone();
        let mut driver = take(&mut pairs, "driver");
        // With only a protocol, the disk is raw; without a driver, the format is detected.
        let mut prefix = "file.";
        if driver.as_deref().is_some_and(is_protocol) {
            prefix = "";
            image.format = Some(ImageFormat::Raw);
            image.protocol.clone_from(&driver);
            pairs.extend(driver.take().map(|driver| ("driver".to_owned(), driver)));
        } else if let Some(driver) = &driver {
            image.format =
                Some(ImageFormat::from_name(driver).ok_or_else(|| unknown_driver(driver))?);
        }
        // With a format, `filename` may stand for `file.filename`.
        let named = pairs.iter().any(|(name, _)| name == "file.filename" || name == "filename");
        if let Some(name) = take(&mut pairs, "filename") {
            pairs.push((format!("{prefix}filename"), name));
        }
        let of_file = pairs.iter().find(|(name, _)| *name == format!("{prefix}driver"));
        image.device = of_file.and_then(|(_, driver)| device_driver(driver));
        let Some(path) = file(&mut pairs, prefix)? else {
            let what = if !named && take(&mut pairs, "file").is_some() {
                "node names are not supported here; name the file with file.filename"
            } else {
                "A block device must be specified for \"file\""
            };
            return Err(what.into());
        };
        image.path = path;
        if image.is_null() {
            image.shown_null = Some(null::shown(&image.shown, &options));
        }
        if driver.as_deref() == Some("raw")
            && let Some(part) = part(&mut pairs, "", &image.path)?
        {
            image.path = part;
        }
        self.opened_as(image, pairs)
    }

    /// Applies the options that say how an image is opened.
    fn opened_as(
        &self,
        mut image: Image,
        mut pairs: Vec<(String, String)>,
    ) -> Result<Image, String> {
        image.node_names = pairs.extract_if(.., |(name, _)| is_node_name(name)).collect();
        image.data_file = data_file(&mut pairs)?;
        image.backing_files = backing_files(&mut pairs)?;
        image.table_pieces = cache_sizes(&pairs)?;
        for (option, value) in pairs {
            let of_file = option.strip_prefix("file.");
            let on = || options::on_off(&option, &value);
            match of_file.unwrap_or(&option) {
                "cache.direct" => image.direct = Some(on()?),
                "read-only" => image.read_only = on()?,
                "force-share" => image.unlocked = on()?,
                "locking" => match value.as_str() {
                    "on" | "auto" => {}
                    "off" => image.unlocked = true,
                    _ => return Err("Parameter 'locking' expects 'auto', 'on' or 'off'".into()),
                },
                // These control how QEMU works, not what the disk holds.
                "cache.no-flush" | "auto-read-only" | "lazy-refcounts" => {
                    on()?;
                }
                "aio"
                | "discard"
                | "detect-zeroes"
                | "overlap-check"
                | "overlap-check.template"
                | "overlap-check.main-header"
                | "overlap-check.active-l1"
                | "overlap-check.active-l2"
                | "overlap-check.refcount-table"
                | "overlap-check.refcount-block"
                | "overlap-check.snapshot-table"
                | "overlap-check.inactive-l1"
                | "overlap-check.inactive-l2"
                | "overlap-check.bitmap-directory"
                | "l2-cache-size"
                | "l2-cache-entry-size"
                | "cache-size"
                | "refcount-cache-size"
                | "cache-clean-interval"
                | "pass-discard-request"
                | "pass-discard-snapshot"
                | "pass-discard-other"
                | "drop-cache"
                | "x-check-cache-dropped" => {}
                "backing" if of_file.is_none() && value.is_empty() => image.backing = false,
                name if of_file.is_none() && is_encryption(name, image.format) => {
                    let depth = name.matches("backing.").count();
                    self.encryption(&mut image, depth, name, &value)?;
                }
                _ => {
                    let format = image.format.map_or("qcow2", ImageFormat::name);
                    return Err(match of_file {
                        Some(option) => {
                            let protocol =
                                if host::is_export(&image.path) { "nbd" } else { "file" };
                            format!(
                                "Block protocol '{protocol}' doesn't support the option '{option}'"
                            )
                        }
                        None => {
                            format!(
                                "Block format '{format}' does not support the option '{option}'"
                            )
                        }
                    });
                }
            }
        }
        Ok(image)
    }

    /// Applies an encryption option to the image with `depth` others above it.
    fn encryption(
        &self,
        image: &mut Image,
        depth: usize,
        name: &str,
        value: &str,
    ) -> Result<(), String> {
        match name.rsplit('.').next() {
            Some("key-secret") => {
                if depth == 0 {
                    image.key_secret = Some(value.to_owned());
                }
                if !self.secrets_unneeded {
                    image.secrets.set(depth, self.objects.secret(value)?);
                }
            }
            _ if value == "luks" => {}
            _ if value == "aes" => {
                return Err("'aes' encryption is broken and not supported".into());
            }
            _ => return Err(format!("Parameter 'format' does not accept value '{value}'")),
        }
        Ok(())
    }
}

/// Checks the sizes of QEMU's caches, which have no effect here: the size of the pieces of L2 tables, if it is given.
fn cache_sizes(pairs: &[(String, String)]) -> Result<Option<u64>, String> {
    let given = |option: &str| {
        let value = pairs.iter().rfind(|(name, _)| name == option);
        value.map(|(_, value)| size::parameter(option, value)).transpose()
    };
    let both = given("cache-size")?;
    let (tables, refcounts) = (given("l2-cache-size")?, given("refcount-cache-size")?);
    if let Some(both) = both {
        let exceeds = |size: Option<u64>| size.is_some_and(|size| size > both);
        if tables.is_some() && refcounts.is_some() {
            return Err("cache-size, l2-cache-size and refcount-cache-size may not be set at the \
                        same time"
                .into());
        }
        if exceeds(tables) {
            return Err("l2-cache-size may not exceed cache-size".into());
        }
        if exceeds(refcounts) {
            return Err("refcount-cache-size may not exceed cache-size".into());
        }
    }
    given("l2-cache-entry-size")
}

/// Takes QEMU's `blkdebug` out, where it is above the image's format: what it is above takes its place.
fn without_blkdebug(pairs: &mut Vec<(String, String)>) -> Result<(), String> {
    pairs.retain(|(name, _)| name != "driver");
    harmless_blkdebug(pairs, "")?;
    for (name, value) in pairs {
        if let Some(inner) = name.strip_prefix("image.") {
            *name = inner.to_owned();
        } else if matches!(name.as_str(), "filename" | "file.filename") {
            "file.filename".clone_into(name);
            *value = below_blkdebug(value)?.unwrap_or(value).to_owned();
        } else {
            return Err(format!("Block protocol 'blkdebug' doesn't support the option '{name}'"));
        }
    }
    Ok(())
}

/// The file in a name `blkdebug:CONFIGURATION:FILE`; `None` if it is another name.
fn below_blkdebug(name: &str) -> Result<Option<&str>, String> {
    let Some(name) = name.strip_prefix("blkdebug:") else { return Ok(None) };
    match name.split_once(':') {
        Some(("", file)) => Ok(Some(file)),
        Some(_) => Err(NO_EVENTS.into()),
        None => Err("blkdebug requires a file name".into()),
    }
}

/// The events that `blkdebug` waits for are steps of QEMU's own code.
const NO_EVENTS: &str = "driver 'blkdebug' is supported without events only";

/// Takes the options of `blkdebug` that change no result: limits for requests, and states, which only rules for errors
/// look at.
fn harmless_blkdebug(pairs: &mut Vec<(String, String)>, prefix: &str) -> Result<(), String> {
    const LIMITS: [&str; 5] =
        ["max-transfer", "opt-write-zero", "max-write-zero", "opt-discard", "max-discard"];
    if let Some(value) = take(pairs, &format!("{prefix}align"))
        && !size::parameter("align", &value)?.is_power_of_two()
    {
        return Err(format!("Cannot meet constraints with align {value}"));
    }
    for limit in LIMITS {
        if let Some(value) = take(pairs, &format!("{prefix}{limit}")) {
            size::parameter(limit, &value)?;
        }
    }
    let own = |name: &str| name.strip_prefix(prefix).unwrap_or_default().to_owned();
    let events = |name: &str| name.starts_with("inject-error.") || name == "config";
    if pairs.iter().any(|(name, _)| events(&own(name))) {
        return Err(NO_EVENTS.into());
    }
    pairs.retain(|(name, _)| !own(name).starts_with("set-state."));
    Ok(())
}

/// Takes the file of `data-file` out of the options.
fn data_file(pairs: &mut Vec<(String, String)>) -> Result<Option<PathBuf>, String> {
    file(pairs, "data-file.")
}

/// Takes the files of `backing`, `backing.backing` and so on out of the options.
fn backing_files(pairs: &mut Vec<(String, String)>) -> Result<Vec<Below>, String> {
    let mut files = Vec::new();
    let mut prefix = String::from("backing.");
    while pairs.iter().any(|(name, _)| name.starts_with(&prefix)) {
        let driver = format!("{prefix}driver");
        let of_file = pairs.iter().any(|(name, value)| *name == driver && is_protocol(value));
        let (format, inner) = if of_file {
            (Some(ImageFormat::Raw), prefix.clone())
        } else {
            let format = take(pairs, &driver).map(|driver| {
                ImageFormat::from_name(&driver).ok_or_else(|| {
                    format!("Could not open backing file: {}", unknown_driver(&driver))
                })
            });
            (format.transpose()?, format!("{prefix}file."))
        };
        let name = file(pairs, &inner)?;
        files.push(match (name, format) {
            (Some(name), format) => Below::Given(BackingFile { name, format }),
            (None, Some(format)) if !of_file => Below::NamedWithFormat(format),
            (None, Some(_)) => {
                return Err(format!("A block device must be specified for \"{prefix}file\""));
            }
            (None, None) => Below::Named,
        });
        prefix.push_str("backing.");
    }
    Ok(files)
}

/// Takes a file out of the options, whose names begin with `prefix`. Returns the name by which the host opens the file.
fn file(pairs: &mut Vec<(String, String)>, prefix: &str) -> Result<Option<PathBuf>, String> {
    let driver = take(pairs, &format!("{prefix}driver"));
    match driver.as_deref() {
        Some("nbd") => return nbd_options::described(prefix, pairs).map(Some),
        Some(driver) if is_null(driver) => return without_contents(pairs, prefix).map(Some),
        Some("blkdebug") => {
            harmless_blkdebug(pairs, prefix)?;
            if let Some(image) = file(pairs, &format!("{prefix}image."))? {
                return Ok(Some(image));
            }
        }
        // A part of another file.
        Some("raw") => {
            let Some(inner) = file(pairs, &format!("{prefix}file."))? else {
                return Err(format!("A block device must be specified for \"{prefix}file\""));
            };
            return Ok(Some(part(pairs, prefix, &inner)?.unwrap_or(inner)));
        }
        Some(driver) if !is_protocol(driver) => return Err(unknown_driver(driver)),
        _ => {}
    }
    let Some(mut name) = take(pairs, &format!("{prefix}filename")) else { return Ok(None) };
    if matches!(driver.as_deref(), None | Some("blkdebug"))
        && let Some(image) = below_blkdebug(&name)?
    {
        harmless_blkdebug(pairs, prefix)?;
        name = image.to_owned();
    }
    if let Some(driver) = &driver {
        is_of_kind(driver, &name)?;
    }
    let plain = name.strip_prefix("file:");
    if driver.is_none() && plain.is_none() && host::is_export(name.as_ref()) {
        return nbd_options::named(&name).map(Some);
    }
    Ok(Some(host::path_of_file(plain.unwrap_or(&name))))
}

/// Takes the options of a disk without contents, and returns its name.
fn without_contents(pairs: &mut Vec<(String, String)>, prefix: &str) -> Result<PathBuf, String> {
    let mut option = |name: &str| take(pairs, &format!("{prefix}{name}"));
    if let Some(name) = option("filename").filter(|name| !is_null_name(name)) {
        let (driver, _) = name.split_once(':').unwrap_or((&name, ""));
        let driver = if is_null(driver) { driver } else { "null-co" };
        return Err(format!("The only allowed filename for this driver is '{driver}://'"));
    }
    if let Some(latency) = option("latency-ns")
        && latency.parse::<u64>().is_err()
    {
        return Err("Parameter 'latency-ns' expects a number".into());
    }
    let reads_zeroes = option("read-zeroes").map(|value| options::on_off("read-zeroes", &value));
    let size = option("size");
    null::named(size.as_deref(), reads_zeroes.transpose()?.unwrap_or(false))
}

fn is_null_name(name: &str) -> bool {
    name.strip_suffix("://").is_some_and(is_null)
}

/// Checks that a file is of the kind that its driver requires, as QEMU does.
pub(crate) fn is_of_kind(driver: &str, name: &str) -> Result<(), String> {
    use std::os::unix::fs::FileTypeExt as _;
    let file = name.strip_prefix("file:").unwrap_or(name);
    // What cannot be examined cannot be opened either.
    let Ok(kind) = std::fs::metadata(file).map(|found| found.file_type()) else { return Ok(()) };
    let shown = options::printable(file);
    let device = kind.is_block_device() || kind.is_char_device();
    match driver {
        "file" if !kind.is_file() => {
            Err(format!("'file' driver requires '{shown}' to be a regular file"))
        }
        "host_device" | "host_cdrom" if !device => Err(format!(
            "'{driver}' driver requires '{shown}' to be either a character or block device"
        )),
        _ => Ok(()),
    }
}

/// Takes `offset` and `size` of a raw disk out of the options. If they are given, returns the name of that part of
/// `whole`.
fn part(
    pairs: &mut Vec<(String, String)>,
    prefix: &str,
    whole: &Path,
) -> Result<Option<PathBuf>, String> {
    let mut number = |option: &str| {
        let value = take(pairs, &format!("{prefix}{option}"));
        value.map(|value| size::parse(&value)).transpose()
    };
    let (offset, size) = (number("offset")?, number("size")?);
    if offset.is_none() && size.is_none() {
        return Ok(None);
    }
    if size.is_some_and(|size| !size.is_multiple_of(512)) {
        return Err("Specified size is not multiple of 512".into());
    }
    let part = Part { offset: offset.unwrap_or(0), size, file: whole.to_owned() };
    part.name().map(Some).ok_or_else(|| "the name of the file is not UTF-8".into())
}

/// Takes an option's value.
fn take(pairs: &mut Vec<(String, String)>, name: &str) -> Option<String> {
    let at = pairs.iter().position(|(other, _)| other == name)?;
    Some(pairs.swap_remove(at).1)
}

/// Whether an option names the image, a backing file, or the file of one.
fn is_node_name(option: &str) -> bool {
    let mut of = option;
    while let Some(inner) = of.strip_prefix("backing.") {
        of = inner;
    }
    of.strip_prefix("file.").unwrap_or(of) == "node-name"
}

/// Whether an option is about encryption: of the image, which has this format if it is named, or of one below it.
fn is_encryption(option: &str, format: Option<ImageFormat>) -> bool {
    let own = option.trim_start_matches("backing.");
    match (own, format.filter(|_| own == option)) {
        ("key-secret", format) => format.is_none_or(|format| format == ImageFormat::Luks),
        ("encrypt.key-secret" | "encrypt.format", format) => format != Some(ImageFormat::Luks),
        _ => false,
    }
}

/// Whether a driver is a protocol, for files or devices.
fn is_protocol(driver: &str) -> bool {
    matches!(driver, "file" | "host_device" | "host_cdrom" | "nbd") || is_null(driver)
}

fn unknown_driver(driver: &str) -> String {
    match ImageFormat::from_name(driver) {
        Some(_) => format!("driver '{driver}' cannot be used here"),
        None => format!("Unknown driver '{}'", options::printable(driver)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(name: &str, image_opts: bool) -> Result<Image, String> {
        let failed = |failure: Failure| failure.message.unwrap_or_default();
        Naming { image_opts, ..Naming::default() }.image(Path::new(name), None).map_err(failed)
    }

    #[test]
    fn names_mean_what_they_mean_to_qemu() {
        for (name, image_opts, path, format) in [
            ("a.qcow2", false, "a.qcow2", None),
            ("./odd:name", false, "./odd:name", None),
            ("file:b", false, "b", None),
            (
                r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"c"}}"#,
                false,
                "c",
                Some("qcow2"),
            ),
            (r#"json:{"driver":"qcow2","file.filename":"c"}"#, false, "c", Some("qcow2")),
            (r#"json:{"driver":"file","filename":"d"}"#, false, "d", Some("raw")),
            (r#"json:{"file":{"filename":"d"}}"#, false, "d", None),
            (
                "json:{'driver':'qcow2','file':{'filename':'d\"\\'e'}}",
                false,
                "d\"'e",
                Some("qcow2"),
            ),
            ("file:odd:name", false, "./odd:name", None),
            ("blkdebug::d", false, "d", None),
            ("driver=qcow2,file.align=4k,file.filename=blkdebug::d", true, "d", Some("qcow2")),
            ("driver=blkdebug,image.driver=qcow2,align=512,filename=d", true, "d", Some("qcow2")),
            (
                "driver=qcow2,file.driver=blkdebug,file.set-state.0.event=read,file.image.filename=d",
                true,
                "d",
                Some("qcow2"),
            ),
            ("file:nbd:x", false, "./nbd:x", None),
            ("nbd:unix:/x", false, "nbd+unix://?socket=/x", None),
            ("file.filename=nbd:unix:/x,driver=raw", true, "nbd+unix://?socket=/x", Some("raw")),
            ("driver=file,filename=nbd:x", true, "./nbd:x", Some("raw")),
            ("driver=nbd,host=h", true, "nbd://h:10809", Some("raw")),
            (
                "driver=qcow2,file.driver=nbd,file.server.type=unix,file.server.path=/x,file.export=e",
                true,
                "nbd+unix:///e?socket=/x",
                Some("qcow2"),
            ),
            (
                r#"json:{"driver":"raw","file":{"driver":"nbd","server":{"type":"inet","host":"::1","port":"7"}}}"#,
                false,
                "nbd://[::1]:7",
                Some("raw"),
            ),
            ("driver=raw,file.filename=e,,f", true, "e,f", Some("raw")),
            (
                "driver=raw,offset=1k,size=512,file.filename=e",
                true,
                "part\x001024:512:e",
                Some("raw"),
            ),
            (
                "driver=compress,file.driver=qcow2,file.file.driver=file,file.file.filename=e",
                true,
                "e",
                Some("qcow2"),
            ),
            (
                r#"json:{"file":{"driver":"raw","offset":512,"file":{"filename":"e"}}}"#,
                false,
                "part\x00512::e",
                None,
            ),
            ("./part:1:2:x", false, "./part:1:2:x", None),
            ("file.filename=g,file.filename=h,driver=qcow2", true, "h", Some("qcow2")),
        ] {
            let image = image(name, image_opts).unwrap();
            assert_eq!(image.path, Path::new(path), "{name}");
            assert_eq!(image.format.map(ImageFormat::name), format, "{name}");
        }
    }

    #[test]
    fn what_cannot_be_used_is_refused() {
        for (name, image_opts, text) in [
            ("foo:bar", false, "Unknown protocol 'foo'"),
            ("blkdebug:rules:bar", false, "without events only"),
            (
                "driver=qcow2,file.driver=blkdebug,file.inject-error.0.event=read,file.image.filename=d",
                true,
                "without events only",
            ),
            ("driver=qcow2,file.driver=file,file.filename=/dev/null", true, "to be a regular file"),
            ("driver=host_device,filename=/dev", true, "either a character or block device"),
            (
                "driver=qcow2,file.filename=a,cache-size=1M,l2-cache-size=2M",
                true,
                "l2-cache-size may not exceed cache-size",
            ),
            ("nbd:foo", false, "error parsing address 'foo'"),
            ("nbds://x", false, "Unknown protocol 'nbds'"),
            (r#"json:{"driver":"nbd","tls-creds":"t","path":"/x"}"#, false, "TLS"),
            (r#"json:{"driver":"nbd"}"#, false, "NBD server address missing"),
            (r#"json:{"driver":"nbd","path":"/x","bogus":1}"#, false, "option 'bogus'"),
            ("json:{x", false, "Could not parse the JSON options"),
            (r#"json:{"driver":"bogus","file.filename":"a"}"#, false, "Unknown driver 'bogus'"),
            (r#"json:{"driver":"qcow2","file":"node"}"#, false, "node names are not supported"),
            (r#"json:{"driver":"qcow2"}"#, false, "must be specified for \"file\""),
            (
                r#"json:{"driver":"qcow2","file.filename":"a","bogus":1}"#,
                false,
                "Block format 'qcow2' does not support the option 'bogus'",
            ),
            (
                r#"json:{"driver":"qcow2","file":{"filename":"a","x":1}}"#,
                false,
                "Block protocol 'file' doesn't support the option 'x'",
            ),
            ("a", true, "Cannot find device='a' nor node-name='a'"),
        ] {
            let error = image(name, image_opts).unwrap_err();
            assert!(error.contains(text), "{name}: {error}");
            assert!(error.starts_with("Could not open '"), "{error}");
        }
    }

    #[test]
    fn options_name_the_files_below_an_image() {
        let text = "driver=qcow2,file.filename=a,data-file.driver=file,data-file.filename=d,\
                    backing.driver=qcow2,backing.file.filename=b,backing.backing.driver=file,\
                    backing.backing.filename=file:c";
        let image = image(text, true).unwrap();
        let options = image.options(false, Locking::Exclusive);
        assert_eq!(options.data_file.as_deref(), Some(Path::new("d")));
        let named = |name: &str, format| Below::Given(BackingFile { name: name.into(), format });
        let below = [named("b", Some(ImageFormat::Qcow2)), named("c", Some(ImageFormat::Raw))];
        assert_eq!(options.backing_files, below);
        let overlay = image.overlay_options(ImageFormat::Qcow2, false, Locking::Exclusive);
        assert_eq!(overlay.data_file, None);
        assert_eq!(overlay.backing_files[0], named("a", Some(ImageFormat::Qcow2)));
        assert_eq!(overlay.backing_files[1..], below);
        for wrong in ["size=5", "size=5,offset=1", "offset=x"] {
            let text = format!("driver=raw,file.filename=a,{wrong}");
            assert!(
                super::Naming { image_opts: true, ..Naming::default() }
                    .parse(Path::new(&text), None)
                    .is_err()
            );
        }
    }

    #[test]
    fn options_reach_the_open() {
        let image = image("driver=qcow2,file.filename=a,cache.direct=on,force-share=on", true);
        let options = image.unwrap().options(false, Locking::Exclusive);
        assert!(options.direct);
        assert_eq!(options.locking, Locking::Present);
        let json = r#"json:{"driver":"qcow2","file.filename":"a","backing":null,"read-only":true}"#;
        let image = super::Naming::default().image(Path::new(json), None).unwrap();
        assert!(!image.options(false, Locking::Exclusive).backing);
        assert!(image.writable(false).is_err());
    }
}
