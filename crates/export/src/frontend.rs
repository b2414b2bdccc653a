//! The interface of frontends: a protocol and its parameters, and disks exported by it.
//!
//! A frontend is started once, with the threads that serve its clients; then disks are exported by it and removed
//! again. The command line and QMP do both through this module alone, using the description in [`Protocol`].

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

/// Why a frontend cannot be started, or cannot export a disk: a message for users.
pub type FrontendError = Box<dyn Error + Send + Sync>;

/// A future that serves until its end; it stays on its thread.
pub type Serving = Pin<Box<dyn Future<Output = io::Result<()>>>>;

/// A protocol's description, for starting it.
#[derive(Debug)]
pub struct Protocol {
    /// QEMU's name (`BlockExportType`).
    pub name: &'static str,
    /// All its exports share one server, at whose addresses clients choose among them. Otherwise each export has its
    /// own server.
    pub shared: bool,
    /// A client continues when this process is killed and another replaces it, so completed writes must survive the
    /// process.
    pub clients_outlive: bool,
    /// Where clients find it: addresses of the server if it is [shared](Self::shared), otherwise of an export.
    pub location: Parameter,
    /// The other parameters of an export.
    pub parameters: &'static [Parameter],
}

/// A parameter of an export.
#[derive(Debug)]
pub struct Parameter {
    /// Its name in [`Settings`], and in `block-export-add`.
    pub name: &'static str,
    /// The kind of its values.
    pub takes: Takes,
    /// Whether `block-export-add` takes it.
    pub qmp: Presence,
    /// Its option on the command line, if it has one.
    pub option: Option<CommandLineOption>,
}

/// The values of a [`Parameter`].
#[derive(Clone, Copy, Debug)]
pub enum Takes {
    /// Text.
    Text,
    /// Yes or no; no by default.
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
}

/// A required parameter is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is missing")]
pub struct Missing(&'static str);

/// The settings of an export: values of the [parameters](Protocol::parameters), by name.
#[derive(Debug, Default)]
pub struct Settings(BTreeMap<&'static str, Setting>);

impl Settings {
    /// Sets a parameter's value.
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

    /// A listening socket.
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
    /// Its name: the device, or the node of its active layer if it belongs to no device.
    pub name: String,
    /// The name by which it was chosen for the export.
    pub chosen_by: String,
    /// Whether clients may write, if the disk can be written.
    pub writable: bool,
    /// Its images' files, which cannot be mount points.
    pub images: Vec<PathBuf>,
}

/// The arguments for starting a frontend.
#[derive(Default)]
pub struct Start {
    /// The threads that serve clients; if there are none, the calling thread serves them.
    pub workers: Vec<Handle>,
    /// Where clients of all exports connect. A [shared](Protocol::shared) server without listeners accepts no exports;
    /// a server that is not shared has no listeners.
    pub listeners: Vec<Listener>,
}

/// A frontend that was started.
///
/// Each frontend decides how many clients, requests and bytes it accepts at a time, and how long it waits for clients
/// at its end, since protocols differ in how they make a client wait. Both must be bounded.
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

    /// Fails if no disk at all can be exported.
    ///
    /// # Errors
    /// A [shared](Protocol::shared) server does not listen anywhere.
    fn ready(&self) -> Result<(), FrontendError> {
        Ok(())
    }

    /// Exports a disk. Clients can connect from then on, once [`Export::serving`] is polled.
    ///
    /// # Errors
    /// A setting is missing or out of range, or the location cannot be used.
    fn export(&self, disk: ExportedDisk<D>, settings: Settings) -> Result<Export, FrontendError>;

    /// Serves clients of a [shared](Protocol::shared) server, until [`stop`](Self::stop); one future for each listener.
    /// Each ends when every connection has ended. Call it once.
    fn serve(&self) -> Vec<Serving> {
        Vec::new()
    }

    /// Ends a [shared](Protocol::shared) server and its exports: requests in flight are completed and answered.
    fn stop(&self) {}
}

/// A disk behind a frontend.
pub struct Export {
    /// Queries and ends it.
    pub control: Box<dyn ExportControl>,
    /// Serves it, and completes once it is removed and its last client has left: then nothing holds the disk. An export
    /// of a [shared](Protocol::shared) server that ends with its server is not removed.
    pub serving: Serving,
}

/// Queries and ends an [`Export`].
pub trait ExportControl {
    /// The name by which clients choose it; `None` if they need none.
    fn name(&self) -> Option<&str> {
        None
    }

    /// How many clients use it. `None` if that cannot be known, or if it was removed.
    fn clients(&self) -> Option<usize>;

    /// Accepts no further requests, completes those in flight, and ends. Removing it again has no effect.
    ///
    /// # Errors
    /// It has clients, and the mode is [`RemoveMode::Safe`].
    fn remove(&self, mode: RemoveMode) -> Result<(), RemoveError>;

    /// What clients need to use it, for each of its locations.
    fn places(&self, shown: Shown) -> Vec<Place>;
}

/// How an export is removed; QEMU's `BlockExportRemoveMode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RemoveMode {
    /// Only if no client has chosen it.
    #[default]
    Safe,
    /// No further requests of clients are accepted, those in flight are completed, and the clients are disconnected.
    Hard,
}

/// Why an export is not removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoveError {
    /// Clients use it.
    #[error("it is in use by {0} clients")]
    InUse(usize),
    /// The server no longer has it.
    #[error(transparent)]
    Gone(FrontendError),
}

/// How a disk is shown in command lines.
#[derive(Clone, Copy, Debug)]
pub struct Shown {
    /// The disk's number, which makes names generated for command lines unique.
    pub number: usize,
    /// It is read-only.
    pub read_only: bool,
}

/// The location of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its address, for users.
    pub name: String,
    /// Options of QEMU, or commands, that use it, quoted for a shell.
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
