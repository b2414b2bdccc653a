//! Opening exports by their names.

use crate::connection::Connection;
use crate::encryption::{Encryption, OtherEncryption};
use crate::file::NbdFile;
use crate::name::{ExportName, Server, is_name};
use isobath_storage::{FileId, Host, OpenMode, Operation, Result, Storage, StorageError, ZeroMode};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How long connecting and negotiating may take.
const PATIENCE: Duration = Duration::from_mins(1);

/// Bytes that [`Host::create`] clears, so that old data is not taken for an image's header.
const CLEARED: u64 = 512;

/// Stands for the device number in a [`FileId`].
const DEVICE: u64 = u64::from_be_bytes(*b"\0\0\0\0\0nbd");

type Connections = HashMap<(Server, String), Weak<Connection>>;

/// A host whose files are exports of NBD servers, opened by [name](crate::name).
///
/// Files of one export that are open at once share a connection: many servers admit one client at a time, and a write
/// through one file must be visible through the others. A file has a fixed length. It takes no locks: the server
/// decides who else may use the export. [`create`](Host::create) opens an export that exists, and clears its first
/// sector; [`remove`](Host::remove) fails.
///
/// Clones share the connections.
#[derive(Clone)]
pub struct NbdHost {
    connections: Arc<Mutex<Connections>>,
    encrypted: Arc<Mutex<HashMap<(Server, String), Encryption>>>,
    patience: Duration,
}

impl Default for NbdHost {
    fn default() -> Self {
        Self { connections: Arc::default(), encrypted: Arc::default(), patience: PATIENCE }
    }
}

impl fmt::Debug for NbdHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NbdHost").field("patience", &self.patience).finish_non_exhaustive()
    }
}

impl NbdHost {
    /// A host that gives a server this long, instead of a minute, from the first attempt to connect to the end of the
    /// negotiation. Requests have no time limit.
    pub fn with_patience(patience: Duration) -> Self {
        Self { patience, ..Self::default() }
    }

    /// Encrypts all later connections to an export, by whichever of its names it is opened.
    ///
    /// # Errors
    /// They are encrypted with other credentials, or for another host name. All files of an export share a connection,
    /// so one of the two would be ignored.
    pub fn encrypt(
        &self,
        name: &ExportName,
        encryption: Encryption,
    ) -> std::result::Result<(), OtherEncryption> {
        let key = key(name);
        let mut connections = self.connections.lock();
        let mut encrypted = self.encrypted.lock();
        match encrypted.get(&key) {
            Some(other) if other.is_like(&encryption) => Ok(()),
            Some(other) => Err(OtherEncryption {
                export: name.clone(),
                directory: other.credentials.directory().to_owned(),
                host: other.host.clone(),
            }),
            None => {
                // One that is not encrypted is not shared any more.
                connections.remove(&key);
                encrypted.insert(key, encryption);
                Ok(())
            }
        }
    }

    /// Forgets how exports are encrypted, so that they can be opened with other credentials. No file of this host is
    /// open.
    pub fn forget_encryption(&self) {
        self.connections.lock().clear();
        self.encrypted.lock().clear();
    }

    fn connection(&self, name: &ExportName) -> io::Result<Arc<Connection>> {
        let key = key(name);
        let mut connections = self.connections.lock();
        let there = connections.get(&key).and_then(Weak::upgrade);
        if let Some(connection) = there.filter(|connection| connection.is_alive()) {
            return Ok(connection);
        }
        let encryption = self.encrypted.lock().get(&key).cloned();
        connections.retain(|_, connection| connection.strong_count() > 0);
        let connection = Arc::new(Connection::start(name.clone(), encryption, self.patience)?);
        connections.insert(key, Arc::downgrade(&connection));
        Ok(connection)
    }
}

/// What tells exports apart.
fn key(name: &ExportName) -> (Server, String) {
    (name.server().clone(), name.export().to_owned())
}

/// The export of this name.
fn parse(operation: Operation, name: &Path) -> Result<ExportName> {
    let refuse = |text: String| {
        let cause = io::Error::new(ErrorKind::InvalidInput, text);
        StorageError::new(operation, name, cause)
    };
    let text = name.to_str().ok_or_else(|| refuse("the name is not UTF-8".into()))?;
    ExportName::parse(text).map_err(|error| refuse(error.to_string()))
}

/// A number for an export: the same for the same server and name. Links to a socket are followed.
fn id(name: &ExportName) -> FileId {
    let place = match name.server() {
        Server::Unix(path) => {
            let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.into());
            real.to_string_lossy().into_owned()
        }
        server @ Server::Tcp { .. } => server.to_string(),
    };
    // FNV-1a. The two texts have no NUL bytes.
    let bytes = place.bytes().chain([0]).chain(name.export().bytes());
    let inode = bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    FileId { device: DEVICE, inode }
}

/// The identity that the open file of an export has, without contacting the server.
///
/// # Errors
/// It is not the name of an export.
pub fn identity(name: &Path) -> Result<FileId> {
    parse(Operation::Query, name).map(|name| id(&name))
}

impl Host for NbdHost {
    type File = NbdFile;

    /// # Errors
    /// The name cannot be parsed; the server cannot be reached, refuses, breaks the protocol or takes too long; or the
    /// export is read-only and the mode is writable (`EACCES`).
    async fn open(&self, name: &Path, mode: OpenMode) -> Result<NbdFile> {
        mode.check(name)?;
        let export = parse(Operation::Open, name)?;
        let failed = |error| StorageError::new(Operation::Open, name, error);
        let connection = self.connection(&export).map_err(failed)?;
        let agreed = connection.connected().await.map_err(failed)?;
        if mode.writable && agreed.is_read_only() {
            return Err(failed(io::Error::from_raw_os_error(libc::EACCES)));
        }
        Ok(NbdFile::new(name.to_owned(), id(&export), connection, agreed, mode.writable))
    }

    /// Opens an export for writing, and clears its first sector.
    ///
    /// # Errors
    /// As [`open`](Host::open); or the sector cannot be written.
    async fn create(&self, name: &Path, mode: OpenMode) -> Result<NbdFile> {
        let file = self.open(name, OpenMode { writable: true, ..mode }).await?;
        let length = CLEARED.min(file.len().await?);
        file.write_zeroes(0, length, ZeroMode { may_unmap: true, only_fast: false }).await?;
        Ok(file)
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        let cause = io::Error::new(ErrorKind::Unsupported, "an NBD export cannot be removed");
        Err(StorageError::new(Operation::Remove, name, cause))
    }

    async fn remove_file(&self, name: &Path, _file: &NbdFile) -> Result<bool> {
        self.remove(name).await.map(|()| true)
    }

    /// The name as QEMU shows it.
    fn canonical(&self, name: &Path) -> Result<PathBuf> {
        parse(Operation::Query, name).map(|name| name.to_string().into())
    }

    /// The name as QEMU shows it, if it names an export. Any other name is returned unchanged, and cannot be opened: an
    /// export has no directory.
    fn resolve(&self, _referrer: &Path, name: &str) -> PathBuf {
        self.canonical(Path::new(name)).unwrap_or_else(|_| name.into())
    }

    fn protocol_name(&self, name: &str) -> bool {
        is_name(name)
    }
}
