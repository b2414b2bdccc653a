//! Adding and removing nodes, and resizing a disk.

use super::arguments::{Arguments, flag, integer, optional_text, text};
use super::image::format_of;
use super::names::duplicate;
use super::{Drive, FileNode, Monitor, Result};
use crate::error::QmpError;
use isobath_disk::{BackingFile, Below, ImageFormat, LiveDisk, NewSize, Preallocation};
use isobath_storage::{Host, Locking, StorageExt};
use serde_json::Value;
use std::collections::HashSet;
use std::path::PathBuf;
use std::rc::Rc;

/// The storage of an added node.
struct Protocol {
    path: PathBuf,
    /// The options of the node that it refers to.
    options: Arguments,
    /// That node's name, if it was added before.
    node: Option<String>,
}

/// What a node's options put below it, from the top down.
#[derive(Default)]
struct Described {
    files: Vec<Below>,
    /// The names of those that are described, if they have any.
    names: Vec<Option<String>>,
    /// The names of the nodes, added before, that they take.
    nodes: Vec<String>,
}

impl<H: Host + Clone> Monitor<H> {
    pub(super) async fn blockdev_add(&self, arguments: Arguments) -> Result<()> {
        self.prune_names();
        let Some(name) = optional_text(&arguments, "node-name") else {
            return Err(QmpError::new("'node-name' must be specified for the root node"));
        };
        let name = name.to_owned();
        self.check_new_name(&name)?;
        check_detect_zeroes(&arguments)?;
        if text(&arguments, "driver") == "throttle" {
            return self.add_filter(&name, &arguments).await;
        }
        let Some(format) = format_of(text(&arguments, "driver")) else {
            let path = self.path_of_file(text(&arguments, "filename"));
            self.host.canonical(&path).map_err(|error| {
                let cause = isobath_storage::cause(&error.source);
                QmpError::new(format_args!("Could not open '{}': {cause}", path.display()))
            })?;
            self.files.borrow_mut().push(FileNode { name, path, options: arguments });
            return Ok(());
        };
        let protocol = self.protocol(arguments.get("file"))?;
        let mut below = Described::default();
        let alone = arguments.get("backing") == Some(&Value::Null);
        if !alone {
            self.describe_below(&arguments, &mut below)?;
        }
        let mut names = HashSet::from([name.as_str()]);
        for inner in below.names.iter().flatten() {
            self.check_new_name(inner)?;
            if !names.insert(inner) {
                return Err(duplicate(inner));
            }
        }
        let said = |key: &str| flag(&arguments, key).or_else(|| flag(&protocol.options, key));
        let cache = |options: &Arguments| {
            let cache = options.get("cache").and_then(Value::as_object);
            cache.and_then(|cache| flag(cache, "direct"))
        };
        let usual = &self.opening.options;
        let trust = (self.opening.trust)().map_err(QmpError::new)?;
        let options = usual
            .clone()
            .trust(trust)
            .writable(!said("read-only").unwrap_or(false))
            .direct(cache(&protocol.options).or_else(|| cache(&arguments)).unwrap_or(usual.direct))
            .locking(if said("force-share").unwrap_or(false) {
                Locking::Present
            } else {
                usual.locking
            })
            .format(format)
            .backing(!alone)
            .backing_files(below.files)
            .secrets(self.secrets_for(&arguments)?);
        // A file that its header names may be an export of a server that never answers.
        let opening = LiveDisk::open(self.host.clone(), &protocol.path, &options);
        let opening = async { opening.await.map_err(QmpError::new) };
        let drive = Rc::new(Drive::added(self.unless_ending(opening).await?));
        if let Some(file) = drive.root() {
            self.names.borrow_mut().give(file, &name);
        }
        for (layer, name) in drive.layers().iter().skip(1).zip(below.names) {
            if let Some(name) = name {
                self.names.borrow_mut().give_below(&drive, layer.storage().id(), name);
            }
        }
        below.nodes.extend(protocol.node);
        self.files.borrow_mut().retain(|file| !below.nodes.contains(&file.name));
        self.attend(&drive);
        self.drives.borrow_mut().push(drive);
        Ok(())
    }

    /// Adds what a node's `backing` describes, and what is below that.
    fn describe_below(&self, node: &Arguments, below: &mut Described) -> Result<()> {
        let options = match node.get("backing") {
            None => return Ok(()),
            Some(Value::Null) => {
                below.files.push(Below::Nothing);
                return Ok(());
            }
            Some(Value::Object(options)) => options,
            Some(reference) => {
                let name = reference.as_str().unwrap_or_default();
                let _ = self.look_up(name, name)?;
                return Err(QmpError::new(
                    "'backing' must describe a node, or be null, or omitted to open the chain that \
                     the image names",
                ));
            }
        };
        // It is opened as the node above it, with the secrets that the images themselves name.
        for option in ["cache", "force-share", "encrypt", "key-secret"] {
            if options.contains_key(option) {
                return Err(QmpError::new(format_args!(
                    "'{option}' is not supported in 'backing'"
                )));
            }
        }
        check_detect_zeroes(options)?;
        let driver = text(options, "driver");
        if driver == "throttle" {
            return Err(QmpError::new("driver 'throttle' is not supported in 'backing'"));
        }
        let (name, format) = match format_of(driver) {
            Some(format) => {
                let protocol = self.protocol(options.get("file"))?;
                below.nodes.extend(protocol.node);
                (protocol.path, format)
            }
            None => (self.path_of_file(text(options, "filename")), ImageFormat::Raw),
        };
        let file = BackingFile { name, format: Some(format) };
        below.files.push(Below::Given(file));
        below.names.push(optional_text(options, "node-name").map(str::to_owned));
        self.describe_below(options, below)
    }

    /// The path that the driver `file` opens for this name, even if the name looks like that of something else.
    pub(super) fn path_of_file(&self, name: &str) -> PathBuf {
        isobath_storage::window::path_of_file(name, |name| self.host.is_no_path(name))
    }

    /// The node that `file` refers to: one that was added, or one described inline.
    fn protocol(&self, file: Option<&Value>) -> Result<Protocol> {
        match file {
            Some(Value::Object(options)) => {
                let driver = text(options, "driver");
                if format_of(driver).is_some() {
                    return Err(QmpError::new(format_args!(
                        "driver '{driver}' cannot hold an image; use 'file'"
                    )));
                }
                let path = self.path_of_file(text(options, "filename"));
                Ok(Protocol { path, options: options.clone(), node: None })
            }
            Some(Value::String(name)) => {
                let files = self.files.borrow();
                let found = files.iter().find(|file| file.name == *name);
                let file = found.ok_or_else(|| {
                    QmpError::new(format_args!(
                        "Cannot find device='{name}' nor node-name='{name}'"
                    ))
                })?;
                Ok(Protocol {
                    path: file.path.clone(),
                    options: file.options.clone(),
                    node: Some(name.clone()),
                })
            }
            _ => Err(QmpError::new("Parameter 'file' is missing")),
        }
    }

    pub(super) async fn blockdev_del(&self, arguments: &Arguments) -> Result<()> {
        let name = text(arguments, "node-name");
        let files = self.files.borrow().len();
        self.files.borrow_mut().retain(|file| file.name != name);
        if self.files.borrow().len() < files {
            return Ok(());
        }
        if let Some(drive) = self.limited_by(name) {
            return self.remove_filter(name, &drive).await;
        }
        let Some(found) = self.find_node(name) else {
            return Err(QmpError::new(format_args!("Failed to find node with node-name='{name}'")));
        };
        let in_use = |by: &str| Err(QmpError::new(format_args!("Node {name} is in use: {by}")));
        if found.depth > 0 {
            return in_use("it is part of a backing chain");
        }
        if !found.drive.device().is_empty() {
            return in_use(&format!("it is used by device '{}'", found.drive.device()));
        }
        if let Some(export) = self.export_of(&found.drive) {
            return in_use(&format!("it is exported as '{export}'"));
        }
        if let Some(filter) = self.filter_above(&found.drive) {
            return in_use(&format!("its requests are limited by node '{filter}'"));
        }
        self.remove_disk(&found.drive).await
    }

    /// Closes a disk that was added, unless a job uses it.
    pub(super) async fn remove_disk(&self, drive: &Rc<Drive<H>>) -> Result<()> {
        self.check_no_job(drive)?;
        // Jobs that have concluded let go of it.
        self.pass_on();
        self.drives.borrow_mut().retain(|other| !Rc::ptr_eq(other, drive));
        drive.disk().throttle().set_group(None);
        self.forget_filters(drive);
        let closed = self.closing.close(drive).await.map_err(QmpError::new);
        self.prune_names();
        closed
    }

    pub(super) async fn block_resize(&self, arguments: &Arguments) -> Result<()> {
        let device = text(arguments, "device");
        let found = self.look_up(device, text(arguments, "node-name"))?;
        let size = integer(arguments, "size").unwrap_or(-1);
        let new = if flag(arguments, "relative").unwrap_or(false) {
            NewSize::By(size)
        } else if let Ok(size) = u64::try_from(size) {
            NewSize::To(size)
        } else {
            return Err(QmpError::new("Parameter 'size' expects a >0 size"));
        };
        if found.depth > 0 {
            return Err(QmpError::new("Need a root block node"));
        }
        let disk = found.drive.disk();
        let shrink = flag(arguments, "shrink").unwrap_or(false);
        let Some(size) = new.of(disk.size()) else {
            return Err(QmpError::new("New image size must be positive"));
        };
        if size < disk.size() && !shrink {
            return Err(QmpError::new(format_args!(
                "The new size of {size} bytes is smaller than the disk's {}, so data past the new \
                 end would be lost; use 'shrink': true (--shrink) to allow it",
                disk.size()
            )));
        }
        disk.resize(new, Preallocation::Off, shrink).await.map_err(QmpError::new)
    }

    /// Forgets the names of files that are no longer part of their disks, since other files may reuse their IDs.
    pub(super) fn prune_names(&self) {
        self.names.borrow_mut().keep(&self.drives());
    }
}

fn check_detect_zeroes(node: &Arguments) -> Result<()> {
    match optional_text(node, "detect-zeroes") {
        None | Some("off") => Ok(()),
        Some(detect) => {
            Err(QmpError::new(format_args!("detect-zeroes '{detect}' is not supported")))
        }
    }
}
