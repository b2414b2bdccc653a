//! What frontends have in common: a protocol and its parameters, and disks that are exported by it.
//!
//! A frontend is started once, with the threads that serve its clients; then disks are exported by it and removed
//! again. The command line and QMP do both by this module alone, from what [`Protocol`] says.

use isobath_disk::BlockDevice;
use isobath_ring::Handle;
use isobath_ring::net::Listener;
use std::collections::BTreeMap;
use std::error::Error;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

/// Why a frontend cannot be started, or a disk not be exported by it: a message for people.
pub type FrontendError = Box<dyn Error + Send + Sync>;

/// What serves until its end; it stays on its thread.
pub type Serving = Pin<Box<dyn Future<Output = io::Result<()>>>>;

/// A protocol as those see it who start it.
#[derive(Debug)]
pub struct Protocol {
    /// QEMU's name (`BlockExportType`).
    pub name: &'static str,
    /// All its exports share one server, at whose addresses clients choose among them. Else each export has
    /// a server to itself.
    pub shared: bool,
    /// A client goes on when this process is killed and another takes its place, so what it was answered must
    /// outlive the process.
    pub clients_outlive: bool,
    /// Where clients find it: addresses of the server if that is [shared](Self::shared), else of an export.
    pub location: Parameter,
    /// What else can be said of an export.
    pub parameters: &'static [Parameter],
}

/// One thing that can be said of an export.
#[derive(Debug)]
pub struct Parameter {
    /// Its name in [`Settings`], and in `block-export-add`.
    pub name: &'static str,
    /// What values it has.
    pub takes: Takes,
    /// Whether `block-export-add` takes it.
    pub qmp: Presence,
    /// How it is given on the command line, if it can be.
    pub option: Option<CommandLineOption>,
}

/// The values of a [`Parameter`].
#[derive(Clone, Copy, Debug)]
pub enum Takes {
    /// Text.
    Text,
    /// Yes or no; no unless it is given.
    Flag,
    /// A number from 0 to `most`.
    Number {
        /// The largest.
        most: u64,
    },
    /// A number of bytes from 0 to `most`.
    Bytes {
        /// The largest.
        most: u64,
    },
    /// One of some words.
    Choice(&'static [&'static str]),
    /// A file.
    Path,
    /// A socket file, to listen on.
    UnixSocket,
    /// A socket file or a TCP port, to listen on.
    Socket,
}

/// Whether `block-export-add` takes a [`Parameter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// No.
    Absent,
    /// Yes.
    Optional,
    /// Yes, and it must be given.
    Required,
}

/// A [`Parameter`] on the command line.
#[derive(Debug)]
pub struct CommandLineOption {
    /// What is behind `--`.
    pub flag: &'static str,
    /// What stands for its value in the help; empty for a flag.
    pub value_name: &'static str,
    /// What the help says.
    pub help: &'static str,
    /// Its value unless it is given.
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
}

/// A parameter without which a disk cannot be exported is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is missing")]
pub struct Missing(&'static str);

/// What is said of an export: values of the [parameters](Protocol::parameters), by their names.
#[derive(Debug, Default)]
pub struct Settings(BTreeMap<&'static str, Setting>);

impl Settings {
    /// Gives a parameter its value.
    pub fn set(&mut self, parameter: &Parameter, value: Setting) {
        self.0.insert(parameter.name, value);
    }

    /// A text or a choice, if it was given.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        match self.0.get(name) {
            Some(Setting::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// A flag.
    pub(crate) fn flag(&self, name: &str) -> bool {
        matches!(self.0.get(name), Some(Setting::Flag(true)))
    }

    /// A number, if it was given.
    pub(crate) fn number(&self, name: &str) -> Option<u64> {
        match self.0.get(name) {
            Some(Setting::Number(number)) => Some(*number),
            _ => None,
        }
    }

    /// A file.
    pub(crate) fn take_path(&mut self, name: &'static str) -> Result<PathBuf, Missing> {
        match self.0.remove(name) {
            Some(Setting::Path(path)) => Ok(path),
            _ => Err(Missing(name)),
        }
    }

    /// A socket that listens.
    pub(crate) fn take_listener(&mut self, name: &'static str) -> Result<Listener, Missing> {
        match self.0.remove(name) {
            Some(Setting::Listener(listener)) => Ok(listener),
            _ => Err(Missing(name)),
        }
    }
}

/// A disk that is to be exported.
#[derive(Debug)]
pub struct ExportedDisk<D> {
    /// The disk.
    pub device: Arc<D>,
    /// What it is called: its device, or the node of its active layer where it is in none.
    pub name: String,
    /// The name by which it was chosen to be exported.
    pub chosen_by: String,
    /// Whether clients may write, if the disk can be written.
    pub writable: bool,
    /// Its images' files, none of which can be a mount point.
    pub images: Vec<PathBuf>,
}

/// What a frontend is started with.
#[derive(Default)]
pub struct Start {
    /// The threads that serve clients; the one that calls where there are none.
    pub workers: Vec<Handle>,
    /// Where clients of all exports connect. A [shared](Protocol::shared) server without any takes no exports;
    /// one that is not shared has none.
    pub listeners: Vec<Listener>,
}

/// A frontend that was started.
///
/// How many clients, requests and bytes it takes at a time is its own business, and so is how long it waits for clients
/// at its end, since each protocol has other means to make a client wait; but both have bounds.
pub trait Frontend<D: BlockDevice> {
    /// Ready to export disks.
    ///
    /// # Errors
    /// What is wrong with `start`.
    fn start(start: Start) -> Result<Self, FrontendError>
    where
        Self: Sized;

    /// Its protocol.
    fn protocol(&self) -> &'static Protocol;

    /// Fails if no disk can be exported, whichever.
    ///
    /// # Errors
    /// A [shared](Protocol::shared) server does not listen anywhere.
    fn ready(&self) -> Result<(), FrontendError> {
        Ok(())
    }

    /// Exports a disk, to clients that can connect from then on, once [`Export::serving`] is polled.
    ///
    /// # Errors
    /// A setting is missing or out of range, or the place cannot be used.
    fn export(&self, disk: ExportedDisk<D>, settings: Settings) -> Result<Export, FrontendError>;

    /// Serves clients of a [shared](Protocol::shared) server, until [`stop`](Self::stop); one future for each
    /// listener. Each ends when every connection has. To be called once.
    fn serve(&self) -> Vec<Serving> {
        Vec::new()
    }

    /// Ends a [shared](Protocol::shared) server and its exports: requests under way are finished and answered.
    fn stop(&self) {}
}

/// A disk behind a frontend.
pub struct Export {
    /// To look at it and to end it.
    pub control: Box<dyn ExportControl>,
    /// Serves it, and is ready once it is removed and its last client has left: nothing then holds the disk.
    /// An export of a [shared](Protocol::shared) server that ends with its server is not removed.
    pub serving: Serving,
}

/// To look at an [`Export`] and to end it.
pub trait ExportControl {
    /// The name by which clients choose it; none if they need none.
    fn name(&self) -> Option<&str> {
        None
    }

    /// How many clients use it. None if that is not to be known, or it is removed.
    fn clients(&self) -> Option<usize>;

    /// Takes no further request, finishes and answers what was begun, and ends. To remove it again does
    /// nothing.
    ///
    /// # Errors
    /// It has clients, and the mode is [`RemoveMode::Safe`].
    fn remove(&self, mode: RemoveMode) -> Result<(), RemoveError>;

    /// What clients need to use it, for each place where they find it.
    fn places(&self, shown: Shown) -> Vec<Place>;
}

/// How an export is removed; QEMU's `BlockExportRemoveMode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RemoveMode {
    /// Only if no client has chosen it.
    #[default]
    Safe,
    /// Clients take no further request, are answered what they have begun, and are disconnected.
    Hard,
}

/// Why an export is not removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoveError {
    /// Clients use it.
    #[error("it is in use by {0} clients")]
    InUse(usize),
    /// The server does not know it any more.
    #[error(transparent)]
    Gone(FrontendError),
}

/// How a disk is shown in command lines.
#[derive(Clone, Copy, Debug)]
pub struct Shown {
    /// The disk's number, by which names that a command line makes up are told apart.
    pub number: usize,
    /// It cannot be written.
    pub read_only: bool,
}

/// Where an export is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its address, for people.
    pub name: String,
    /// Options of QEMU that use it, or commands that do, as a shell takes them.
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
