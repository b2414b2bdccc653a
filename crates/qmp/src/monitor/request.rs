//! A job's request, stored beside the image while the job runs.
//!
//! A server that ends, or is killed, leaves the file there. The next one finds it, lists the job
//! (`x-isobath-query-jobs`), and can restart it: data already copied is not copied again.

use super::arguments::{Arguments, text};
use super::job_layers::JobLayers;
use super::{Drive, Monitor, Result};
use crate::error::QmpError;
use crate::json;
use crate::tables::SCHEMA;
use isobath_disk::{Layer, Trust};
use isobath_ring::place::{self, Identity, Place};
use isobath_storage::{Host, Storage, StorageExt, is_descriptor_set};
use rustix::fs::OFlags;
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read, Write};
use std::iter;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// The suffix that the file's name adds to the image's.
const SUFFIX: &str = ".isobath-job.json";
/// The maximum length of such a file, in bytes.
const LONGEST: u64 = 64 << 10;

/// A job's request.
#[derive(Clone, Debug)]
pub(super) struct JobRequest {
    command: &'static str,
    id: String,
    device: String,
    /// Paths of layers, instead of the names of their nodes.
    top: Option<PathBuf>,
    base: Option<PathBuf>,
    /// The command's other arguments.
    arguments: Map<String, Value>,
    /// The file that it is saved in; `None`: it is not saved.
    file: Option<PathBuf>,
    /// The file that was written or read, and where.
    saved: RefCell<Option<(Place, Identity)>>,
}

impl JobRequest {
    pub(super) fn new<H: Host>(
        command: &'static str,
        id: &str,
        drive: &Drive<H>,
        layers: &JobLayers<H::File>,
        arguments: &Arguments,
    ) -> Self {
        let path = |layer: &Option<Arc<Layer<H::File>>>| {
            layer.as_ref().map(|layer| layer.name().to_owned())
        };
        let mut rest = arguments.clone();
        for name in ["job-id", "device", "base", "base-node", "bottom", "top", "top-node"] {
            rest.shift_remove(name);
        }
        // A mirror's target is a node that does not outlive the server; nor does a disk without a device.
        let lasts = command != "blockdev-mirror" && !drive.device().is_empty();
        let image = drive.active_image().filter(|image| lasts && !is_descriptor_set(image));
        Self {
            command,
            id: id.to_owned(),
            device: drive.device().to_owned(),
            // Use its path even if it is the active layer: there may be a snapshot before the job is restarted.
            top: path(&layers.top).or_else(|| drive.active_image()),
            base: path(&layers.base),
            arguments: rest,
            file: image.map(|image| beside(&image)),
            saved: RefCell::default(),
        }
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// Writes the file, replacing an existing one.
    pub(super) fn keep(&self) {
        let Some(file) = &self.file else { return };
        let content = json!({
            "command": self.command,
            "id": self.id,
            "device": self.device,
            "top": self.top,
            "base": self.base,
            "arguments": self.arguments,
        });
        match write(file, &json::to_line(&content)) {
            Ok(saved) => *self.saved.borrow_mut() = Some(saved),
            Err(error) => {
                let file = file.display();
                tracing::warn!(%file, %error, "cannot save a job's request");
            }
        }
    }

    /// Removes the file, if it is still the one that was saved.
    pub(super) fn remove(&self) {
        let Some((place, id)) = self.saved.borrow_mut().take() else { return };
        if let Err(error) = place.remove(id) {
            let file = place.path().display();
            tracing::warn!(%file, %error, "cannot remove a job's saved request");
        }
    }

    /// The entry in the reply of `x-isobath-query-jobs`.
    pub(super) fn to_json(&self, interrupted: bool) -> Value {
        let mut arguments = self.arguments.clone();
        for (name, path) in [("top", &self.top), ("base", &self.base)] {
            if let Some(path) = path {
                arguments.insert(name.into(), path.to_string_lossy().into());
            }
        }
        json!({
            "id": self.id,
            "device": self.device,
            "interrupted": interrupted,
            "command": self.command,
            "arguments": arguments,
        })
    }

    /// Reads the saved request of a device's job, if it belongs to one of these users.
    fn read(place: Place, device: &str, users: &[u32]) -> std::result::Result<Self, String> {
        let mut content = Vec::new();
        let opened = place.open(OFlags::RDONLY).map_err(|error| error.to_string())?;
        let found = opened.metadata().map_err(|error| error.to_string())?;
        // Who may write to the directory cannot always write to the image.
        let user = found.uid();
        if !users.contains(&user) {
            return Err(format!(
                "it belongs to the user {user}, not to the image's owner or the user of this server"
            ));
        }
        opened.take(LONGEST + 1).read_to_end(&mut content).map_err(|error| error.to_string())?;
        if content.len() as u64 > LONGEST {
            return Err(format!("the file is longer than {LONGEST} bytes"));
        }
        let content = json::parse(&content)?;
        let content = content.as_object().ok_or("the file is not a JSON object")?;
        let command = match text(content, "command") {
            "block-stream" => "block-stream",
            "block-commit" => "block-commit",
            other => {
                return Err(format!("the command '{}' does not start a job", other.escape_debug()));
            }
        };
        let path = |name: &str| content.get(name).and_then(Value::as_str).map(PathBuf::from);
        let mut arguments = content.get("arguments").and_then(Value::as_object).cloned();
        // It would be written into a header as it is.
        if let Some(arguments) = &mut arguments {
            arguments.shift_remove("backing-file");
        }
        Ok(Self {
            command,
            id: text(content, "id").to_owned(),
            device: device.to_owned(),
            top: path("top"),
            base: path("base"),
            arguments: arguments.unwrap_or_default(),
            file: Some(place.path().to_owned()),
            saved: RefCell::new(Some((place, (found.dev(), found.ino())))),
        })
    }

    /// The arguments with which the command restarts the job, except its layers.
    fn to_arguments(&self) -> Arguments {
        let mut arguments = self.arguments.clone();
        arguments.insert("job-id".into(), self.id.clone().into());
        arguments.insert("device".into(), self.device.clone().into());
        arguments
    }
}

/// The file beside an image.
fn beside(image: &Path) -> PathBuf {
    let mut name: OsString = image.as_os_str().to_owned();
    name.push(SUFFIX);
    name.into()
}

/// Writes a file, which replaces an existing one. Returns where it is, and which one it is.
fn write(path: &Path, line: &[u8]) -> io::Result<(Place, Identity)> {
    let place = Place::of(path)?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let unfinished = place.beside(&name);
    // A killed server has left it, or somebody has put it there.
    if let Ok(found) = unfinished.stat() {
        unfinished.remove(place::identity(&found))?;
    }
    let mut file = unfinished.create_new(0o600)?;
    file.write_all(line)?;
    unfinished.replace(&place)?;
    let id = place::identity_of(&file)?;
    Ok((place, id))
}

/// The user to whom a layer's image belongs. `None` if the image is no longer under its name.
fn owner<F: Storage>(layer: &Layer<F>) -> Option<u32> {
    let found = fs::metadata(layer.name()).ok()?;
    (found.ino() == layer.storage().id().inode).then(|| found.uid())
}

/// The jobs that an earlier server was running on a disk. Untrusted images are not examined.
pub(super) fn interrupted<H: Host>(drive: &Drive<H>) -> Vec<JobRequest> {
    if drive.disk().options().trust != Trust::Full {
        return Vec::new();
    }
    let mut found = Vec::new();
    for layer in drive.layers() {
        let file = beside(layer.name());
        let Ok(place) = Place::of(&file) else { continue };
        if !place.stat().is_ok_and(|found| place::is_regular(&found)) {
            continue;
        }
        let server = rustix::process::geteuid().as_raw();
        let users: Vec<u32> = iter::once(server).chain(owner(&layer)).collect();
        match JobRequest::read(place, drive.device(), &users) {
            Ok(request) => {
                tracing::info!(job = request.id, "a job was interrupted; it can be resumed");
                found.push(request);
            }
            Err(error) => {
                let file = file.display();
                tracing::warn!(%file, error, "cannot use a job's saved request");
            }
        }
    }
    found
}

impl<H: Host + Clone> Monitor<H> {
    fn find_interrupted(&self, arguments: &Arguments) -> Result<JobRequest> {
        let id = text(arguments, "id");
        let interrupted = self.interrupted.borrow();
        let found = interrupted.iter().find(|request| request.id == id);
        found.cloned().ok_or_else(|| QmpError::new(format_args!("No interrupted job '{id}'")))
    }

    pub(super) fn restart_job(&self, arguments: &Arguments) -> Result<()> {
        let request = self.find_interrupted(arguments)?;
        let arguments = request.to_arguments();
        if let Some(command) = SCHEMA.command(request.command) {
            crate::schema::check(command.arguments, &arguments)?;
        }
        let found = self.look_up(&request.device, "")?;
        let layer = |path: &Option<PathBuf>| {
            let named = path.as_deref().map(|path| {
                found.drive.layers().into_iter().find(|layer| layer.name() == path).ok_or_else(|| {
                    QmpError::new(format_args!(
                        "'{}', which the job '{}' needs, is no longer part of the chain; dismiss \
                         the job and start a new one",
                        path.display(),
                        request.id
                    ))
                })
            });
            named.transpose()
        };
        let root = found.drive.root();
        let top = layer(&request.top)?.filter(|layer| Some(layer.storage().id()) != root);
        let layers = JobLayers { top, base: layer(&request.base)? };
        let drive = Rc::clone(&found.drive);
        self.start(&drive, request.command, &layers, None, &arguments)
    }

    pub(super) fn forget_job(&self, arguments: &Arguments) -> Result<()> {
        let request = self.find_interrupted(arguments)?;
        request.remove();
        self.interrupted.borrow_mut().retain(|other| other.id != request.id);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn request() -> JobRequest {
        JobRequest {
            command: "block-commit",
            id: "j".into(),
            device: "d".into(),
            top: None,
            base: None,
            arguments: Map::new(),
            file: None,
            saved: RefCell::default(),
        }
    }

    #[test]
    fn a_saved_request_goes_neither_into_nor_over_what_is_planted_in_its_way() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for planted in ["top.isobath-job.json.new", "top.isobath-job.json"] {
            fs::write(at("victim"), "precious").unwrap();
            symlink("victim", at(planted)).unwrap();
            let request = JobRequest { file: Some(beside(&at("top"))), ..request() };
            request.keep();
            assert_eq!(fs::read(at("victim")).unwrap(), b"precious", "{planted}");
            let saved = fs::symlink_metadata(at("top.isobath-job.json")).unwrap();
            assert!(saved.is_file() && saved.permissions().mode() & 0o777 == 0o600);
            assert!(fs::symlink_metadata(at("top.isobath-job.json.new")).is_err());
            // What has replaced it since stays.
            fs::rename(at("top.isobath-job.json"), at("elsewhere")).unwrap();
            fs::write(at("top.isobath-job.json"), "another's").unwrap();
            request.remove();
            assert!(at("top.isobath-job.json").exists());
            fs::remove_file(at("top.isobath-job.json")).unwrap();
        }
    }

    #[test]
    fn a_saved_request_of_another_user_is_not_used() {
        let directory = tempfile::tempdir().unwrap();
        let file = beside(&directory.path().join("top"));
        let mut request = JobRequest { file: Some(file.clone()), ..request() };
        request.arguments.insert("backing-file".into(), "/etc/shadow".into());
        request.arguments.insert("speed".into(), 7.into());
        request.keep();
        let place = || Place::of(&file).unwrap();
        let user = fs::metadata(&file).unwrap().uid();
        let error = JobRequest::read(place(), "d", &[user + 1]).unwrap_err();
        assert!(error.contains(&format!("the user {user}")), "{error}");
        let read = JobRequest::read(place(), "d", &[user + 1, user]).unwrap();
        let kept: Vec<_> = read.arguments.keys().collect();
        assert_eq!(kept, ["speed"], "a name for a header is not taken from the file");
        read.remove();
        assert!(!file.exists());
    }
}
