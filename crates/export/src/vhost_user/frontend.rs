//! vhost-user-blk as a [`Frontend`]: a server for each export, on a socket file of its own.

use super::bounce::{Bounces, FREE, MEMORY};
use super::options::Options;
use super::server::Server;
use crate::budget::Budget;
use crate::command_line::{option_value, quoted};
use crate::frontend::{
    CommandLineOption, Export, ExportControl, ExportedDisk, Frontend, FrontendError, Outlive,
    Parameter, Place, Presence, Protocol, RemoveError, RemoveMode, Settings, Shown, Start, Takes,
};
use isobath_disk::memory::{OutOfMemory, Reserved};
use isobath_disk::{BlockDevice, MemoryLimit};
use isobath_ring::Handle;
use isobath_ring::net::Address;
use std::cell::OnceCell;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// The vhost-user-blk protocol and its parameters.
pub const PROTOCOL: Protocol = Protocol {
    name: "vhost-user-blk",
    shared: false,
    clients_outlive: Outlive::Always,
    ends_unused: false,
    location: Parameter {
        name: "addr",
        takes: Takes::UnixSocket,
        qmp: Presence::Required,
        option: Some(CommandLineOption {
            flag: "vhost-user-blk",
            value_name: "unix:PATH|fd:NAME",
            help: "Export the image over vhost-user-blk on this socket file, or on a socket that was \
                   handed in; the virtual machine must share its memory. With several images, repeat \
                   the option, one per image \
                   in order",
            default: None,
        }),
    },
    parameters: &[
        Parameter {
            name: "logical-block-size",
            takes: Takes::Bytes { most: u32::MAX as u64 },
            qmp: Presence::Optional,
            option: None,
        },
        Parameter {
            name: "num-queues",
            takes: Takes::Number { most: u16::MAX as u64 },
            qmp: Presence::Optional,
            option: Some(CommandLineOption {
                flag: "queues",
                value_name: "N",
                help: "With --vhost-user-blk: maximum number of queues",
                // Virtual machines use one queue per processor, and a queue is started only when it is used.
                default: Some("64"),
            }),
        },
        Parameter {
            name: "poll",
            takes: Takes::Number { most: u64::MAX },
            qmp: Presence::Absent,
            option: Some(CommandLineOption {
                flag: "poll",
                value_name: "MICROSECONDS",
                help: "With --vhost-user-blk: after a request, poll for more for up to this many \
                   microseconds before sleeping; the time adapts to the load. 0 disables polling",
                default: None,
            }),
        },
    ],
};

/// All devices together have this part of a memory limit, and half of it again in free buffers.
const SHARE: usize = 16;
/// Bytes of bounce buffers that each device is assured of, if there is a memory limit: one of the largest.
const DEVICE: usize = 1 << 20;

/// Exports disks over vhost-user-blk.
pub struct VhostUserFrontend {
    workers: Vec<Handle>,
    exports: AtomicUsize,
    memory: Option<Arc<MemoryLimit>>,
    /// What all devices share of it, from the first one on.
    shared: OnceCell<Shared>,
}

/// What all devices share.
struct Shared {
    budget: &'static Budget,
    /// Bytes of free buffers that each thread keeps.
    free: usize,
    _reserved: Reserved,
}

impl VhostUserFrontend {
    /// A device's share of a memory limit, and what it takes besides.
    fn bounces(&self, memory: &Arc<MemoryLimit>) -> Result<(Bounces, Reserved), OutOfMemory> {
        // Before what all share, which stays.
        let reserved = memory.reserve("a vhost-user-blk export", DEVICE as u64)?;
        let shared = if let Some(shared) = self.shared.get() {
            shared
        } else {
            let shared = Shared::of(memory, self.workers.len().max(1))?;
            self.shared.get_or_init(|| shared)
        };
        Ok((Bounces::of(shared.budget).keeping(shared.free), reserved))
    }
}

impl Shared {
    fn of(memory: &Arc<MemoryLimit>, threads: usize) -> Result<Self, OutOfMemory> {
        let share = usize::try_from(memory.bytes()).unwrap_or(usize::MAX) / SHARE;
        let limit = share.min(MEMORY);
        let free = (share / 2 / threads).min(FREE);
        let most = (limit + free * threads) as u64;
        let reserved = memory.reserve("the vhost-user-blk exports together", most)?;
        // It lives as long as the devices, whose sessions are on any thread; there is one for each frontend.
        let budget = Box::leak(Box::new(Budget::new(limit, DEVICE)));
        Ok(Self { budget, free, _reserved: reserved })
    }
}

impl<D: BlockDevice> Frontend<D> for VhostUserFrontend {
    fn start(start: Start) -> Result<Self, FrontendError> {
        Ok(Self {
            workers: start.workers,
            exports: AtomicUsize::new(0),
            memory: start.memory,
            shared: OnceCell::new(),
        })
    }

    fn protocol(&self) -> &'static Protocol {
        &PROTOCOL
    }

    fn export(
        &self,
        disk: ExportedDisk<D>,
        mut settings: Settings,
    ) -> Result<Export, FrontendError> {
        let listener = settings.take_listener("addr")?;
        let Address::Unix(path) = listener.address().clone() else {
            return Err(
                "vhost-user-blk requires a Unix socket, since it passes file descriptors".into()
            );
        };
        let mut options =
            Options { serial: serial(&disk.name), writable: disk.writable, ..Options::default() };
        if let Some(queues) = settings.number("num-queues") {
            options.queues = u16::try_from(queues)?;
        }
        if let Some(bytes) = settings.number("logical-block-size") {
            options.logical_block_size = u32::try_from(bytes)?;
        }
        if let Some(microseconds) = settings.number("poll") {
            options.poll = Duration::from_micros(microseconds);
        }
        options.check()?;
        let accepting = listener.as_fd().try_clone_to_owned()?;
        let (server, reserved) = match &self.memory {
            // What all devices share is reserved for good: from here on nothing else fails.
            Some(memory) => {
                let (bounces, reserved) = self.bounces(memory)?;
                (Server::bouncing(disk.device, options, bounces)?, Some(reserved))
            }
            None => (Server::new(disk.device, options)?, None),
        };
        let control = Control { server: Arc::clone(&server), path };
        let mut workers = self.workers.clone();
        // Many machines have a single queue: let those of different disks be on different threads.
        if !workers.is_empty() {
            let first = self.exports.fetch_add(1, Ordering::Relaxed) % workers.len();
            workers.rotate_left(first);
        }
        let serving = async move {
            let result = server.serve(UnixListener::from(accepting), &workers).await;
            // This also removes the socket file.
            drop(listener);
            drop(reserved);
            result
        };
        Ok(Export { control: Box::new(control), serving: Box::pin(serving) })
    }
}

/// The part of a name that can be a serial number.
fn serial(name: &str) -> String {
    name.chars().filter(char::is_ascii_graphic).take(20).collect()
}

struct Control<D> {
    server: Arc<Server<D>>,
    path: PathBuf,
}

impl<D: BlockDevice> ExportControl for Control<D> {
    fn clients(&self) -> Option<usize> {
        Some(usize::from(self.server.connected()))
    }

    fn remove(&self, mode: RemoveMode) -> Result<(), RemoveError> {
        if mode == RemoveMode::Safe && self.server.connected() {
            return Err(RemoveError::InUse(1));
        }
        self.server.stop();
        Ok(())
    }

    fn places(&self, Shown { number, .. }: Shown) -> Vec<Place> {
        let path = option_value(&self.path);
        let chardev = format!("socket,id=char{number},path={path},reconnect=1");
        let machine = format!(
            "-m 1G -object memory-backend-memfd,id=mem,size=1G,share=on -machine memory-backend=mem -chardev \
             {} -device vhost-user-blk-pci,chardev=char{number}",
            quoted(&chardev)
        );
        vec![Place { name: format!("vhost-user-blk {}", quoted(&path)), uses: vec![machine] }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_that_does_not_fit_keeps_nothing_of_a_memory_limit() {
        let frontend = VhostUserFrontend {
            workers: Vec::new(),
            exports: AtomicUsize::new(0),
            memory: None,
            shared: OnceCell::new(),
        };
        let memory = MemoryLimit::new(256 << 20);
        let shared = 24 << 20;
        let rest = |left: u64| memory.reserve("the rest", memory.bytes() - left).unwrap();
        for left in [0, DEVICE as u64, shared, shared + DEVICE as u64 - 1] {
            let rest = rest(left);
            assert!(frontend.bounces(&memory).is_err());
            assert_eq!(memory.reserved(), rest.bytes(), "{left}");
            assert!(frontend.shared.get().is_none());
        }
        let rest = rest(shared + DEVICE as u64);
        let (bounces, reserved) = frontend.bounces(&memory).unwrap();
        assert!(frontend.bounces(&memory).is_err());
        drop((bounces, reserved, rest));
        assert_eq!(memory.reserved(), shared, "what all share stays");
    }

    #[test]
    fn any_name_gives_a_serial_number() {
        assert_eq!(serial("disk-1"), "disk-1");
        assert_eq!(serial("é a disk of many words, and more"), "adiskofmanywords,and");
    }
}
