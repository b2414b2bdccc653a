//! NBD as a [`Frontend`]: one server for all exports.

use super::exports::{self, ExportError};
use super::places;
use super::server::{Limits, Server};
use crate::frontend::{
    CommandLineOption, Entrance, Export, ExportControl, ExportedDisk, Frontend, FrontendError,
    Offered, Outlive, Parameter, Place, Presence, Protocol, RemoveError, RemoveMode, Serving,
    Settings, Shown, Start, Takes,
};
use crate::stop::Stop;
use isobath_disk::BlockDevice;
use isobath_disk::memory::Reserved;
use isobath_ring::Handle;
use isobath_ring::net::Address;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// The server takes this part of a memory limit.
const SHARE: usize = 4;

/// The NBD protocol and its parameters.
pub const PROTOCOL: Protocol = Protocol {
    name: "nbd",
    shared: true,
    clients_outlive: Outlive::Never,
    ends_unused: false,
    location: Parameter {
        name: "addr",
        takes: Takes::Socket,
        qmp: Presence::Absent,
        option: Some(CommandLineOption {
            flag: "nbd",
            value_name: "unix:PATH|[HOST:]PORT|fd:NAME[,export=NAME...]",
            help: "Listen for NBD clients on a socket file, or on a TCP port (of the loopback \
                   interface unless HOST is given), where every user of this machine can connect; \
                   or on a socket that was handed in listening, by the name that the service manager \
                   gives it (LISTEN_FDNAMES) or its number; may be given several times. With \
                   ',export=NAME' behind it, which may be \
                   repeated, clients can choose only the exports of these names there, and the \
                   empty name selects the first of them [default, unless another frontend is given: a socket \
                   file of its own in $XDG_RUNTIME_DIR/isobath or, for root, /run/isobath]",
            default: None,
        }),
    },
    parameters: &[
        Parameter { name: "name", takes: Takes::Text, qmp: Presence::Optional, option: None },
        Parameter {
            name: "description",
            takes: Takes::Text,
            qmp: Presence::Optional,
            option: None,
        },
        Parameter {
            name: "allocation-depth",
            takes: Takes::Flag,
            qmp: Presence::Optional,
            option: None,
        },
    ],
};

/// An NBD server at the addresses of its listeners.
pub struct NbdFrontend<D> {
    server: Arc<Server<D>>,
    workers: Vec<Handle>,
    /// Listeners that are not served yet.
    listeners: RefCell<Vec<Entrance>>,
    addresses: Rc<[At]>,
    /// What the server takes of a memory limit.
    _memory: Option<Reserved>,
}

/// An address, and what clients need there.
struct At {
    address: Address,
    encrypted: bool,
    offered: Offered,
}

impl From<&Entrance> for At {
    fn from(entrance: &Entrance) -> Self {
        Self {
            address: entrance.listener.address().clone(),
            encrypted: entrance.security.credentials().is_some(),
            offered: entrance.offered.clone(),
        }
    }
}

impl<D: BlockDevice> Frontend<D> for NbdFrontend<D> {
    fn start(start: Start) -> Result<Self, FrontendError> {
        let Start { workers, listeners, memory } = start;
        let addresses = listeners.iter().map(At::from).collect();
        // A server without listeners has no clients.
        let memory = memory.filter(|_| !listeners.is_empty());
        let (limits, reserved) = match memory {
            Some(memory) => {
                let share = usize::try_from(memory.bytes()).unwrap_or(usize::MAX) / SHARE;
                let (limits, most) = Limits::within(share, workers.len());
                (limits, Some(memory.reserve("the NBD server", most)?))
            }
            None => (Limits::default(), None),
        };
        let server = Arc::new(Server::new(Vec::new(), limits)?);
        let listeners = RefCell::new(listeners);
        Ok(Self { server, workers, listeners, addresses, _memory: reserved })
    }

    fn protocol(&self) -> &'static Protocol {
        &PROTOCOL
    }

    fn ready(&self) -> Result<(), FrontendError> {
        if self.addresses.is_empty() { Err("NBD server not running".into()) } else { Ok(()) }
    }

    fn export(&self, disk: ExportedDisk<D>, settings: Settings) -> Result<Export, FrontendError> {
        self.ready()?;
        let name = settings.text("name").unwrap_or(&disk.chosen_by).to_owned();
        let gone = self.server.add(exports::Export {
            name: name.clone(),
            description: settings.text("description").unwrap_or_default().to_owned(),
            read_only: !disk.writable,
            allocation_depth: settings.flag("allocation-depth"),
            bitmaps: Arc::default(),
            device: disk.device,
        });
        let gone = gone.map_err(|error| match error {
            ExportError::DuplicateName(name) => {
                FrontendError::from(format!("NBD server already has export named '{name}'"))
            }
            error => error.into(),
        })?;
        let removed = Rc::<Stop>::default();
        let control = Control {
            name,
            server: Arc::clone(&self.server),
            addresses: Rc::clone(&self.addresses),
            removed: Rc::clone(&removed),
        };
        let serving = async move {
            removed.requested().await;
            gone.await;
            Ok(())
        };
        Ok(Export { control: Box::new(control), serving: Box::pin(serving) })
    }

    fn serve(&self) -> Vec<Serving> {
        let serve = |entrance| -> Serving {
            let (server, workers) = (Arc::clone(&self.server), self.workers.clone());
            Box::pin(async move {
                let result = server.serve_at(entrance, &workers).await;
                if result.is_err() {
                    server.stop();
                }
                result
            })
        };
        self.listeners.take().into_iter().map(serve).collect()
    }

    fn stop(&self) {
        self.server.stop();
    }
}

struct Control<D> {
    name: String,
    server: Arc<Server<D>>,
    addresses: Rc<[At]>,
    removed: Rc<Stop>,
}

impl<D: BlockDevice> ExportControl for Control<D> {
    fn name(&self) -> Option<&str> {
        Some(&self.name)
    }

    fn clients(&self) -> Option<usize> {
        // Another export may have taken the name of a removed one.
        if self.removed.is_requested() { None } else { self.server.clients(&self.name) }
    }

    fn remove(&self, mode: RemoveMode) -> Result<(), RemoveError> {
        if self.removed.is_requested() {
            return Ok(());
        }
        self.server.remove(&self.name, mode).map_err(|error| match error {
            exports::RemoveError::InUse { clients, .. } => RemoveError::InUse(clients),
            error @ exports::RemoveError::NotFound(_) => RemoveError::Gone(error.into()),
        })?;
        self.removed.request();
        Ok(())
    }

    fn places(&self, shown: Shown) -> Vec<Place> {
        let offering = self.addresses.iter().filter(|at| at.offered.has(&self.name));
        offering.map(|at| places::place(&at.address, at.encrypted, &self.name, shown)).collect()
    }
}
