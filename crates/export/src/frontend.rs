//! The common interface of all frontends: a protocol, its parameters, and the disks exported over it.
//!
//! A frontend is started once, with the threads that serve its clients; disks are then exported over it and removed
//! again. The command line and QMP do both only through this module, guided by the description in [`Protocol`].

use crate::keeper::Keeper;
use crate::tls::Security;
use isobath_disk::memory::{OutOfMemory, Reserved};
use isobath_disk::{BlockDevice, MemoryLimit};
use isobath_ring::Handle;
use isobath_ring::net::Listener;
use isobath_storage::FileId;
use std::collections::BTreeMap;
use std::error::Error;
use std::future::{Future, ready};
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

/// Why a frontend cannot be started, or cannot export a disk: a message for users.
pub type FrontendError = Box<dyn Error + Send + Sync>;

/// A future that serves clients and completes when serving ends. It stays on its thread.
pub type Serving = Pin<Box<dyn Future<Output = io::Result<()>>>>;

/// Each export has this part of a memory limit,
const SHARE: usize = 16;
/// but for all its queues together these requests, so that one that is held does not keep all others out.
const LEAST_REQUESTS: usize = 4;

/// How many requests each queue of an export may have in flight, at most `most`, and what all of them take of a memory
/// limit. A queue with so many requests takes the bytes that `memory` says.
pub(crate) fn requests_within(
    limit: Option<&Arc<MemoryLimit>>,
    export: &str,
    queues: usize,
    most: usize,
    memory: impl Fn(usize) -> usize,
) -> Result<(usize, Option<Reserved>), OutOfMemory> {
    let Some(limit) = limit else { return Ok((most, None)) };
    let share = usize::try_from(limit.bytes()).unwrap_or(usize::MAX) / SHARE;
    let least = LEAST_REQUESTS.div_ceil(queues);
    let requests = (share / queues / memory(1)).clamp(least, most);
    Ok((requests, Some(limit.reserve(export, (queues * memory(requests)) as u64)?)))
}

/// The description of a protocol and its parameters.
#[derive(Debug)]
pub struct Protocol {
    /// Its name in QEMU (`BlockExportType`).
    pub name: &'static str,
    /// Whether all exports share one server, where clients choose among them. Otherwise each export has its own server.
    pub shared: bool,
    /// Whether clients continue after this process is killed and another replaces it.
    pub clients_outlive: Outlive,
    /// Whether an export that is removed ends only once nobody uses it. A server waits for that before it ends anything
    /// else.
    pub ends_unused: bool,
    /// Where clients find it: the server's addresses if it is [shared](Self::shared), otherwise the location of an
    /// export.
    pub location: Parameter,
    /// The other parameters of an export.
    pub parameters: &'static [Parameter],
}

/// Whether clients continue after this process is killed and another replaces it. Completed writes must then survive a
/// kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outlive {
    /// They do not.
    Never,
    /// They do. Of a disk whose writes do not survive, the server says so.
    Always,
    /// Those of an export with this parameter do. A disk whose writes do not survive is not exported.
    With(&'static str),
}

/// A parameter of an export.
#[derive(Debug)]
pub struct Parameter {
    /// Its name in [`Settings`], and in `block-export-add`.
    pub name: &'static str,
    /// The kind of value that it takes.
    pub takes: Takes,
    /// Whether `block-export-add` takes it.
    pub qmp: Presence,
    /// Its option on the command line, if it has one.
    pub option: Option<CommandLineOption>,
}

/// The kind of value that a [`Parameter`] takes.
#[derive(Clone, Copy, Debug)]
pub enum Takes {
    /// Text.
    Text,
    /// Yes or no; no by default.
    Flag,
    /// A number from 0 to `most`.
    Number {
        /// The maximum.
        most: u64,
    },
    /// A number of bytes from 0 to `most`.
    Bytes {
        /// The maximum.
        most: u64,
    },
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A file.
    Path,
    /// A socket file, to listen on.
    UnixSocket,
    /// A socket file or a TCP port, to listen on.
    Socket,
    /// The number of a ublk device, or any that is free; given with the program that adds it.
    UblkDevice,
}

/// Whether `block-export-add` takes a [`Parameter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// It does not.
    Absent,
    /// It does.
    Optional,
    /// It does, and requires it.
    Required,
}

/// How a [`Parameter`] is given on the command line.
#[derive(Debug)]
pub struct CommandLineOption {
    /// The option's name after `--`.
    pub flag: &'static str,
    /// The placeholder for its value in the help; empty for a flag.
    pub value_name: &'static str,
    /// The help text.
    pub help: &'static str,
    /// Its default value.
    pub default: Option<&'static str>,
}

/// The value of a [`Parameter`].
#[derive(Debug)]
pub enum Setting {
    /// For [`Takes::Text`] and [`Takes::Choice`].
    Text(String),
    /// For [`Takes::Flag`].
    Flag(bool),
    /// For [`Takes::Number`] and [`Takes::Bytes`].
    Number(u64),
    /// For [`Takes::Path`].
    Path(PathBuf),
    /// For [`Takes::UnixSocket`] and [`Takes::Socket`].
    Listener(Listener),
    /// For [`Takes::UblkDevice`].
    Keeper(Keeper),
}

/// A required parameter is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is missing")]
pub struct Missing(&'static str);

/// The settings of an export: the values of its [parameters](Protocol::parameters), by name.
#[derive(Debug, Default)]
pub struct Settings(BTreeMap<&'static str, Setting>);

impl Settings {
    /// Sets a parameter's value.
    pub fn set(&mut self, parameter: &Parameter, value: Setting) {
        self.0.insert(parameter.name, value);
    }

    /// The value of a text or choice parameter, if it was given.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        match self.0.get(name) {
            Some(Setting::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// Whether a flag is set.
    pub(crate) fn flag(&self, name: &str) -> bool {
        matches!(self.0.get(name), Some(Setting::Flag(true)))
    }

    /// The value of a number parameter, if it was given.
    pub(crate) fn number(&self, name: &str) -> Option<u64> {
        match self.0.get(name) {
            Some(Setting::Number(number)) => Some(*number),
            _ => None,
        }
    }

    /// Takes a file's path.
    pub(crate) fn take_path(&mut self, name: &'static str) -> Result<PathBuf, Missing> {
        match self.0.remove(name) {
            Some(Setting::Path(path)) => Ok(path),
            _ => Err(Missing(name)),
        }
    }

    /// Takes the keeper of a device.
    pub(crate) fn take_keeper(&mut self, name: &'static str) -> Result<Keeper, Missing> {
        match self.0.remove(name) {
            Some(Setting::Keeper(keeper)) => Ok(keeper),
            _ => Err(Missing(name)),
        }
    }

    /// Takes a listening socket.
    pub(crate) fn take_listener(&mut self, name: &'static str) -> Result<Listener, Missing> {
        match self.0.remove(name) {
            Some(Setting::Listener(listener)) => Ok(listener),
            _ => Err(Missing(name)),
        }
    }
}

/// A disk to export.
#[derive(Debug)]
pub struct ExportedDisk<D> {
    /// The disk.
    pub device: Arc<D>,
    /// Its name: that of its device, or of its active layer's node if it belongs to no device.
    pub name: String,
    /// The name by which it was selected for export.
    pub chosen_by: String,
    /// Whether clients may write, provided that the disk is writable.
    pub writable: bool,
    /// Its image files, which cannot be used as mount points; the active one is first.
    pub images: Vec<PathBuf>,
    /// The files that it is written to: that of the active image, and its data file if it has one.
    pub files: Vec<DiskFile>,
    /// What identifies all other files, from the top, as far as it is known.
    pub below: Vec<FileId>,
}

/// A file of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskFile {
    /// The name by which it was opened.
    pub name: PathBuf,
    /// What identifies it.
    pub id: FileId,
}

/// The arguments for starting a frontend.
#[derive(Default)]
pub struct Start {
    /// The threads that serve clients; if there are none, the calling thread serves them.
    pub workers: Vec<Handle>,
    /// Where clients of all exports connect. A [shared](Protocol::shared) server without listeners accepts no exports;
    /// a server that is not shared has no listeners.
    pub listeners: Vec<Entrance>,
    /// What the frontend may take for requests is reserved here, and what does not fit is refused. `None` for each
    /// frontend's own limits.
    pub memory: Option<Arc<MemoryLimit>>,
}

/// Where clients of a [shared](Protocol::shared) server connect.
#[derive(Debug)]
pub struct Entrance {
    /// The socket.
    pub listener: Listener,
    /// Whether they encrypt.
    pub security: Security,
    /// What they can choose.
    pub offered: Offered,
}

impl From<Listener> for Entrance {
    /// To all exports, without encryption.
    fn from(listener: Listener) -> Self {
        Self { listener, security: Security::Plain, offered: Offered::All }
    }
}

/// The exports of a [shared](Protocol::shared) server that clients of an [`Entrance`] can choose.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Offered {
    /// All that the server has.
    #[default]
    All,
    /// Those that the server has of these names, in this order. Of the others clients learn nothing.
    Named(Arc<[String]>),
}

impl Offered {
    /// Whether clients can choose an export of this name, if the server has one.
    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::All => true,
            Self::Named(names) => names.iter().any(|other| other == name),
        }
    }
}

/// A started frontend.
///
/// Protocols differ in how they make a client wait. Each frontend therefore sets its own limits on concurrent clients,
/// requests and bytes, and on how long it waits for clients when it shuts down. All of these must be bounded.
pub trait Frontend<D: BlockDevice> {
    /// Starts a frontend, which can then export disks.
    ///
    /// # Errors
    /// `start` is invalid.
    fn start(start: Start) -> Result<Self, FrontendError>
    where
        Self: Sized;

    /// Its protocol.
    fn protocol(&self) -> &'static Protocol;

    /// Fails if the frontend cannot export any disk.
    ///
    /// # Errors
    /// A [shared](Protocol::shared) server has no listeners.
    fn ready(&self) -> Result<(), FrontendError> {
        Ok(())
    }

    /// Exports a disk. Clients can connect as soon as [`Export::serving`] is polled.
    ///
    /// # Errors
    /// A setting is missing or out of range, or the location cannot be used.
    fn export(&self, disk: ExportedDisk<D>, settings: Settings) -> Result<Export, FrontendError>;

    /// All exports of the command line were accepted.
    fn exported(&self) {}

    /// Serves clients of a [shared](Protocol::shared) server until [`stop`](Self::stop). Returns one future per
    /// listener; each completes once all connections have ended. Call this only once.
    fn serve(&self) -> Vec<Serving> {
        Vec::new()
    }

    /// Stops a [shared](Protocol::shared) server and its exports. Requests in flight are completed and answered.
    fn stop(&self) {}
}

/// An exported disk.
pub struct Export {
    /// Queries and removes it.
    pub control: Box<dyn ExportControl>,
    /// Serves it. Completes once it has been removed and its last client has left; nothing then holds the disk.
    /// Stopping a [shared](Protocol::shared) server does not count as removing its exports.
    pub serving: Serving,
}

/// Queries and removes an [`Export`].
pub trait ExportControl {
    /// The name by which clients choose it; `None` if they need no name.
    fn name(&self) -> Option<&str> {
        None
    }

    /// The number of clients that use it; `None` if that is unknown, or if it was removed.
    fn clients(&self) -> Option<usize>;

    /// Waits until clients can use it, for one that takes longer than [`Frontend::export`]. [`Export::serving`] must be
    /// polled meanwhile. Its error is why they never can.
    fn started(&self) -> Serving {
        Box::pin(ready(Ok(())))
    }

    /// Removes it: accepts no further requests, and completes those in flight. Removing it again has no effect.
    ///
    /// # Errors
    /// It has clients, and the mode is [`RemoveMode::Safe`].
    fn remove(&self, mode: RemoveMode) -> Result<(), RemoveError>;

    /// Its locations, each with what clients need to use it.
    fn places(&self, shown: Shown) -> Vec<Place>;
}

/// How an export is removed; QEMU's `BlockExportRemoveMode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RemoveMode {
    /// Only if no client has chosen it.
    #[default]
    Safe,
    /// No further requests are accepted, those in flight are completed, and the clients are disconnected.
    Hard,
}

/// Why an export is not removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoveError {
    /// Clients use it.
    #[error("it is in use by {0} client(s)")]
    InUse(usize),
    /// The server no longer has it.
    #[error(transparent)]
    Gone(FrontendError),
}

/// How a disk appears in generated command lines.
#[derive(Clone, Copy, Debug)]
pub struct Shown {
    /// The disk's number, which makes generated names unique.
    pub number: usize,
    /// Whether it is read-only.
    pub read_only: bool,
}

/// The location of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its address, as shown to users.
    pub name: String,
    /// QEMU options or commands that use it, quoted for a shell.
    pub uses: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_of_their_type() {
        const COUNT: Parameter = Parameter {
            name: "count",
            takes: Takes::Number { most: 9 },
            qmp: Presence::Optional,
            option: None,
        };
        let mut settings = Settings::default();
        assert_eq!(settings.number("count"), None);
        settings.set(&COUNT, Setting::Number(3));
        assert_eq!((settings.number("count"), settings.text("count")), (Some(3), None));
        assert!(!settings.flag("count"));
        assert_eq!(settings.take_path("count").unwrap_err(), Missing("count"));
    }
}
