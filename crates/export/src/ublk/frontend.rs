//! ublk as a [`Frontend`]: a device for each export.

use super::Served;
use super::geometry::{Geometry, MAX_BYTES};
use super::queue::{POOL_BYTES, Queue};
use crate::command_line::quoted;
use crate::frontend::{
    CommandLineOption, DiskFile, Export, ExportControl, ExportedDisk, Frontend, FrontendError,
    Outlive, Parameter, Place, Presence, Protocol, RemoveError, RemoveMode, Serving, Settings,
    Shown, Start, Takes, requests_within,
};
use crate::keeper::{self, Device, Image, ImageFile, Keeper, Waiting, digest};
use crate::stop::Stop;
use isobath_disk::memory::{OutOfMemory, Reserved};
use isobath_disk::{BlockDevice, MemoryLimit};
use isobath_ring::{CommandRing, Handle, JoinError, spawn, unblock};
use parking_lot::Mutex;
use std::fs::File;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

/// The ublk protocol and its parameters.
pub const PROTOCOL: Protocol = Protocol {
    name: "ublk",
    shared: false,
    clients_outlive: Outlive::With(RECOVERY.name),
    ends_unused: true,
    location: Parameter {
        name: "device",
        takes: Takes::UblkDevice,
        qmp: Presence::Absent,
        option: Some(CommandLineOption {
            flag: "ublk",
            value_name: "auto|N",
            help: "Export the image as a block device: /dev/ublkbN of this number, or of the next free one. \
                   With several images, repeat the option, one per image in order",
            default: None,
        }),
    },
    parameters: &[RECOVERY],
};

/// How long a device waits for another server if its own is killed.
const RECOVERY: Parameter = Parameter {
    name: "recovery",
    takes: Takes::Number { most: MOST_SECONDS },
    qmp: Presence::Absent,
    option: Some(CommandLineOption {
        flag: "ublk-recovery",
        value_name: "SECONDS",
        help: "If the server is killed, keep the devices so long for another one that is started with the same image \
               and number: programs that use them see a pause. What was written survives, flushed or not; an image \
               that cannot promise that is refused. Needs numbers for --ublk, and excludes --qmp and --snapshot",
        default: None,
    }),
};
/// A day.
const MOST_SECONDS: u64 = 24 * 60 * 60;

/// The most requests in flight of each queue.
const MOST_REQUESTS: usize = 64;
/// The most queues that a device can have.
const MOST_QUEUES: usize = 4096;

/// What takes of a memory limit.
const EXPORT: &str = "a ublk export";

/// Exports disks as block devices.
pub struct UblkFrontend {
    workers: Vec<Handle>,
    memory: Option<Arc<MemoryLimit>>,
    /// The turn of the export that takes its device over last, so far.
    last_turn: Mutex<Option<Arc<Stop>>>,
    taking_over: Arc<TakingOver>,
}

/// The devices that are taken over: all, or those that can be once one was.
#[derive(Default)]
struct TakingOver {
    /// Requested once all exports were accepted.
    may_begin: Stop,
    so_far: Mutex<SoFar>,
}

/// What became of those whose turn was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum SoFar {
    #[default]
    Nothing,
    /// One was taken over: this server does not end because of another one.
    Taken,
    /// The first could not be: this server ends, and takes none over.
    Failed,
}

impl TakingOver {
    /// One was taken over, or could not be. Returns whether the server goes on.
    fn note(&self, is_taken: bool) -> bool {
        let so_far = &mut *self.so_far.lock();
        if *so_far == SoFar::Nothing {
            *so_far = if is_taken { SoFar::Taken } else { SoFar::Failed };
        }
        *so_far == SoFar::Taken
    }

    fn has_failed(&self) -> bool {
        *self.so_far.lock() == SoFar::Failed
    }
}

/// Bytes that a queue with so many requests takes: a buffer for each, and free buffers.
const fn memory(requests: usize) -> usize {
    let buffers = requests * MAX_BYTES as usize;
    buffers + if buffers < POOL_BYTES { buffers } else { POOL_BYTES }
}

impl UblkFrontend {
    fn new(workers: Vec<Handle>, memory: Option<Arc<MemoryLimit>>) -> Self {
        let (last_turn, taking_over) = (Mutex::default(), Arc::default());
        Self { workers, memory, last_turn, taking_over }
    }

    /// How many requests each of `queues` may have in flight, and what they take of a memory limit.
    fn requests(&self, queues: usize) -> Result<(usize, Option<Reserved>), OutOfMemory> {
        requests_within(self.memory.as_ref(), EXPORT, queues, MOST_REQUESTS, memory)
    }

    /// What so many queues with so many requests each take of a memory limit.
    fn reserve(&self, queues: u16, depth: u16) -> Result<Option<Reserved>, OutOfMemory> {
        let bytes = usize::from(queues) * memory(depth.into());
        self.memory.as_ref().map(|limit| limit.reserve(EXPORT, bytes as u64)).transpose()
    }

    /// Adds a device, with a queue for each thread.
    fn add(&self, keeper: &Keeper) -> Result<(Begun, u32), FrontendError> {
        let queues = self.workers.len().clamp(1, MOST_QUEUES);
        let (requests, reserved) = self.requests(queues)?;
        let depth = requests as u16;
        let device = keeper.add(queues as u16, depth, MAX_BYTES)?;
        let (number, rings) = (device.number, rings(device.queues, depth)?);
        Ok((Begun::Added(Opened::new(device, depth, rings)?, reserved), number))
    }

    /// Prepares to take over the device that waits, with the queues that it has.
    fn prepare(&self, Waiting { queues, depth }: Waiting) -> Result<Begun, FrontendError> {
        let reserved = self.reserve(queues, depth)?;
        let rings = rings(queues, depth)?;
        let own = Arc::new(Stop::default());
        let before = self.last_turn.lock().replace(own.clone());
        Ok(Begun::Waits { depth, rings, reserved, turn: Turn { before, own } })
    }
}

/// A device that is to be served.
enum Begun {
    /// It was added, and is no disk yet.
    Added(Opened, Option<Reserved>),
    /// It is a disk already, which waits to be taken over.
    Waits {
        /// How many requests a queue may have in flight.
        depth: u16,
        /// A ring for each queue.
        rings: Vec<CommandRing>,
        reserved: Option<Reserved>,
        turn: Turn,
    },
}

/// Devices are taken over one after the other: of one that waits for another one some queues may be served already.
/// The next one's turn is when this is dropped.
struct Turn {
    /// Requested once the export before has taken its device over, or has failed to.
    before: Option<Arc<Stop>>,
    own: Arc<Stop>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.own.request();
    }
}

/// A device that is open, with its queues.
struct Opened {
    /// The character device.
    file: Arc<File>,
    queues: Vec<Queue>,
}

impl Opened {
    fn new(device: Device, depth: u16, rings: Vec<CommandRing>) -> io::Result<Self> {
        let file = Arc::new(File::from(device.file));
        let queues = (0..).zip(rings).map(|(queue, ring)| Queue::new(&file, queue, depth, ring));
        Ok(Self { queues: queues.collect::<io::Result<_>>()?, file })
    }
}

/// A ring for each of so many queues.
fn rings(queues: u16, depth: u16) -> io::Result<Vec<CommandRing>> {
    (0..queues).map(|_| CommandRing::new(depth.into())).collect()
}

/// The image that a disk is of.
fn image_of<D>(disk: &ExportedDisk<D>) -> io::Result<Image> {
    let files = disk.files.iter().map(|DiskFile { name, id }| {
        let name = std::path::absolute(name)?;
        Ok(ImageFile { name, id: *id, seen: None })
    });
    let below = digest(disk.below.iter().copied());
    Ok(Image { files: files.collect::<io::Result<_>>()?, below })
}

impl<D: BlockDevice> Frontend<D> for UblkFrontend {
    fn start(start: Start) -> Result<Self, FrontendError> {
        Ok(Self::new(start.workers, start.memory))
    }

    fn exported(&self) {
        self.taking_over.may_begin.request();
    }

    fn protocol(&self) -> &'static Protocol {
        &PROTOCOL
    }

    fn export(
        &self,
        disk: ExportedDisk<D>,
        mut settings: Settings,
    ) -> Result<Export, FrontendError> {
        let keeper = settings.take_keeper("device")?;
        let read_only = !disk.writable || disk.device.is_read_only();
        let geometry = Geometry::new(disk.device.size(), disk.device.preferred_block(), read_only)?;
        let waiting = match settings.number(RECOVERY.name) {
            Some(_) => keeper.look(geometry.parameters(), image_of(&disk)?)?,
            None => None,
        };
        let (begun, number) = match (waiting, keeper.number()) {
            (Some(waiting), Some(number)) => (self.prepare(waiting)?, number),
            _ => self.add(&keeper)?,
        };
        let is_adopted = matches!(begun, Begun::Waits { .. });
        let served = Arc::new(Served {
            device: disk.device,
            geometry,
            number,
            is_adopted,
            removed: Stop::default(),
            begun: Stop::default(),
            failure: Mutex::default(),
            ending: Stop::default(),
            abandoned: Stop::default(),
        });
        let control = Control(served.clone());
        let workers = self.workers.clone();
        let taking_over = Arc::clone(&self.taking_over);
        let serving = async move {
            let _abandoning = Abandoning(&served);
            let keeper = Arc::new(keeper);
            match begun {
                Begun::Added(opened, _reserved) => {
                    serve(&served, keeper, opened, &workers, None).await
                }
                Begun::Waits { depth, rings, reserved: _reserved, turn } => {
                    if !may_adopt(&served, &taking_over, &turn).await {
                        return Ok(());
                    }
                    let adopted = adopt(&served, &keeper, depth, rings).await;
                    let goes_on = taking_over.note(adopted.is_ok());
                    let opened = match adopted {
                        Ok(opened) => opened,
                        Err(error) => {
                            // Those who use another device that was taken over need the server.
                            if !goes_on {
                                *served.failure.lock() = Some(error.to_string());
                            }
                            served.begun.request();
                            return Err(error);
                        }
                    };
                    serve(&served, keeper, opened, &workers, Some(turn)).await
                }
            }
        };
        Ok(Export { control: Box::new(control), serving: Box::pin(serving) })
    }
}

struct Control<D>(Arc<Served<D>>);

impl<D: BlockDevice> ExportControl for Control<D> {
    fn clients(&self) -> Option<usize> {
        None
    }

    fn started(&self) -> Serving {
        let served = self.0.clone();
        Box::pin(async move {
            served.begun.requested().await;
            let failure = served.failure.lock();
            failure.as_ref().map_or(Ok(()), |failure| Err(io::Error::other(failure.clone())))
        })
    }

    /// In either mode, removes the device once nobody uses it: whoever has it mounted would lose data.
    fn remove(&self, _: RemoveMode) -> Result<(), RemoveError> {
        self.0.removed.request();
        Ok(())
    }

    fn places(&self, shown: Shown) -> Vec<Place> {
        let device = format!("/dev/ublkb{}", self.0.number);
        let read_only = if shown.read_only { ",readonly=on" } else { "" };
        let drive = format!("file={device},format=raw,if=virtio,cache=none{read_only}");
        let uses = vec![format!("-drive {}", quoted(&drive))];
        vec![Place { name: device, uses }]
    }
}

/// A queue's task, wherever it runs.
type Part = Pin<Box<dyn Future<Output = Result<io::Result<()>, JoinError>>>>;

/// Waits until a device may be taken over: all exports were accepted, and those before have been taken over. It goes on
/// waiting for a server if this returns `false`: the export is removed before, or the server ends.
async fn may_adopt<D>(served: &Served<D>, taking_over: &TakingOver, turn: &Turn) -> bool {
    let mut waits = pin!(async {
        taking_over.may_begin.requested().await;
        if let Some(before) = &turn.before {
            before.requested().await;
        }
    });
    let mut removed = pin!(served.removed.requested());
    let may = poll_fn(|cx| match removed.as_mut().poll(cx) {
        Poll::Ready(()) => Poll::Ready(false),
        Poll::Pending => waits.as_mut().poll(cx).map(|()| true),
    });
    may.await && !taking_over.has_failed()
}

/// Takes over the device that waits.
async fn adopt<D: BlockDevice>(
    served: &Served<D>,
    keeper: &Arc<Keeper>,
    depth: u16,
    rings: Vec<CommandRing>,
) -> io::Result<Opened> {
    tracing::info!("taking over /dev/ublkb{}", served.number);
    let adopting = keeper.clone();
    let device = unblock(move || adopting.adopt()).await?;
    // What fails until here leaves the device to another server. The driver lets only one process map queues until they
    // were served.
    let beginning = keeper.clone();
    unblock(move || beginning.begin_serving()).await?;
    Ok(Opened::new(device, depth, rings)?)
}

/// Serves a device until its export is removed and nobody uses it, or until it is stopped. The `turn` of one that was
/// taken over ends when it goes on.
async fn serve<D: BlockDevice>(
    served: &Arc<Served<D>>,
    keeper: Arc<Keeper>,
    Opened { file, queues }: Opened,
    workers: &[Handle],
    turn: Option<Turn>,
) -> io::Result<()> {
    let mut keeper_ended = pin!(keeper.ended()?);
    let mut parts = pin!(all(served, queues, workers));
    let mut drained = None;
    let mut end_waits = || {
        served.ending.request();
        drained.get_or_insert_with(|| served.device.drain());
    };

    let starter = keeper.clone();
    let parameters = served.geometry.parameters();
    let mut starting = pin!(unblock(move || starter.start_disk(parameters)));
    let mut removed = pin!(served.removed.requested());
    let started = poll_fn(|cx| {
        // The kernel waits for the requests by which it reads the partition table.
        if removed.as_mut().poll(cx).is_ready() {
            end_waits();
        }
        match parts.as_mut().poll(cx) {
            // It would wait forever for all queues to fetch.
            Poll::Ready(ended) => Poll::Ready(Err(ended)),
            Poll::Pending => starting.as_mut().poll(cx).map(Ok),
        }
    });
    let started = match started.await {
        Ok(started) => started,
        Err(ended) => {
            let ended =
                ended.and_then(|()| Err(io::Error::other("the kernel refuses its requests")));
            *served.failure.lock() = ended.as_ref().err().map(ToString::to_string);
            return ended;
        }
    };
    if let Err(error) = &started {
        *served.failure.lock() = Some(error.to_string());
    }
    served.begun.request();
    drop(turn);
    if served.is_adopted && started.is_err() {
        // Whoever uses it can still be helped: it waits for another server.
        served.abandoned.request();
        let _ = parts.await;
        return started;
    }

    // Who waits for the start is told if it has failed.
    let is_disk = started.is_ok();
    let ended = if is_disk {
        let mut is_watched = true;
        poll_fn(|cx| {
            if let Poll::Ready(ended) = parts.as_mut().poll(cx) {
                return Poll::Ready(Some(ended));
            }
            if is_watched && let Poll::Ready(ended) = keeper_ended.as_mut().poll(cx) {
                is_watched = false;
                match ended {
                    Ok(()) => is_without_keeper(served.number, &keeper::ended()),
                    Err(error) => tracing::warn!(%error, "cannot watch the device's keeper"),
                }
            }
            removed.as_mut().poll(cx).map(|()| None)
        })
        .await
    } else {
        None
    };
    let mut written = Ok(());
    let ended = if let Some(ended) = ended {
        tracing::warn!(
            device = served.number,
            "the ublk device was stopped, but not by its server"
        );
        ended
    } else {
        let mut stopping = pin!(stop(served, &keeper, end_waits));
        let mut ended = None;
        let stopped = poll_fn(|cx| {
            if ended.is_none()
                && let Poll::Ready(all) = parts.as_mut().poll(cx)
            {
                ended = Some(all);
            }
            stopping.as_mut().poll(cx)
        })
        .await;
        match &stopped {
            // Somebody may have it mounted.
            Err(Unstopped::Alone(why)) if is_disk => is_without_keeper(served.number, why),
            Err(_) => served.abandoned.request(),
            Ok(_) => {}
        }
        let all = match ended {
            Some(ended) => ended,
            None => parts.await,
        };
        written = stopped.map_err(Unstopped::into).and_then(|written| written);
        all
    };
    // While it is open no other device can have its number.
    let closer = keeper.clone();
    let deleted = if ended.is_ok() && unblock(move || closer.delete_open()).await.is_ok() {
        Ok(())
    } else {
        drop(file);
        unblock(move || keeper.delete()).await
    };
    written.and(ended).and(deleted)
}

/// Serves all queues. If one fails, none is served any longer.
async fn all<D: BlockDevice>(
    served: &Arc<Served<D>>,
    queues: Vec<Queue>,
    workers: &[Handle],
) -> io::Result<()> {
    let part = |(number, queue): (usize, Queue)| -> Part {
        let served = served.clone();
        let part = move || async move { queue.serve(&served).await };
        match workers.get(number % workers.len().max(1)) {
            Some(worker) => Box::pin(worker.spawn_with(part)),
            None => Box::pin(spawn(part())),
        }
    };
    let mut parts: Vec<_> = queues.into_iter().enumerate().map(part).collect();
    let mut result = Ok(());
    poll_fn(|cx| {
        parts.retain_mut(|part| {
            let Poll::Ready(ended) = part.as_mut().poll(cx) else { return true };
            let ended = ended.unwrap_or_else(|error| Err(io::Error::other(error.to_string())));
            if let Err(error) = ended {
                served.abandoned.request();
                if result.is_ok() {
                    result = Err(error);
                }
            }
            false
        });
        if parts.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    result
}

/// Why a disk was not stopped.
enum Unstopped {
    /// The keeper does not say whether it is used: it has ended, mostly.
    Alone(io::Error),
    /// Nobody uses the disk.
    Failed(io::Error),
}

impl From<Unstopped> for io::Error {
    fn from(why: Unstopped) -> Self {
        match why {
            Unstopped::Alone(error) | Unstopped::Failed(error) => error,
        }
    }
}

/// Stops a disk once nobody uses it. Returns whether everything that was written to it has reached the image.
async fn stop<D: BlockDevice>(
    served: &Served<D>,
    keeper: &Arc<Keeper>,
    mut end_waits: impl FnMut(),
) -> Result<io::Result<()>, Unstopped> {
    let (number, releasing) = (served.number, keeper.clone());
    let released = unblock(move || {
        releasing.release(|users| {
            tracing::warn!("waiting until /dev/ublkb{number} is no longer used: {users}");
        })
    });
    released.await.map_err(Unstopped::Alone)?;
    end_waits();
    let stopping = keeper.clone();
    let stopped = unblock(move || {
        let written = stopping.write_back();
        stopping.stop().map(|()| written)
    });
    stopped.await.map_err(Unstopped::Failed)
}

/// Nobody can tell any more whether a device is used, or remove it.
fn is_without_keeper(number: u32, why: &io::Error) {
    tracing::error!(
        "nobody can tell any more who uses /dev/ublkb{number}, or remove it ({why}): it is served on; when nobody uses \
         it, kill this server (SIGKILL)"
    );
}

/// Gives up the queues when dropped, and lets nobody wait for the start.
struct Abandoning<'a, D>(&'a Served<D>);

impl<D> Drop for Abandoning<'_, D> {
    fn drop(&mut self) {
        self.0.abandoned.request();
        if !self.0.begun.is_requested() {
            self.0.failure.lock().get_or_insert_with(|| "the server has ended".into());
            self.0.begun.request();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::{Context, Waker};

    #[test]
    fn exports_have_their_part_of_a_memory_limit() {
        let frontend = |memory| UblkFrontend::new(Vec::new(), memory);
        assert_eq!(frontend(None).requests(1).unwrap().0, MOST_REQUESTS);
        let limit = MemoryLimit::new(256 << 20);
        let frontend = frontend(Some(Arc::clone(&limit)));
        for (queues, each) in [(1, 8), (2, 4), (3, 2), (8, 1)] {
            let (requests, _reserved) = frontend.requests(queues).unwrap();
            assert_eq!(requests, each, "{queues} queues");
            assert_eq!(limit.reserved(), (queues * memory(each)) as u64);
        }
        let exports: Vec<_> = std::iter::from_fn(|| frontend.requests(1).ok()).collect();
        assert_eq!(exports.len(), 16);
        let refused = frontend.requests(1).unwrap_err().to_string();
        assert!(refused.contains("a ublk export may take"), "{refused}");
    }

    #[test]
    fn a_device_is_taken_over_once_those_before_were_or_could_not_be() {
        let frontend = UblkFrontend::new(Vec::new(), None);
        let turns = || match frontend.prepare(Waiting { queues: 0, depth: 1 }) {
            Ok(Begun::Waits { turn, .. }) => turn,
            _ => panic!("nothing was reserved"),
        };
        let (first, second, third) = (turns(), turns(), turns());
        assert!(first.before.is_none());
        let is_on = |turn: &Turn| {
            let mut cx = Context::from_waker(Waker::noop());
            turn.before
                .as_ref()
                .is_some_and(|before| pin!(before.requested()).as_mut().poll(&mut cx).is_ready())
        };
        assert!(!is_on(&second) && !is_on(&third));
        drop(first);
        assert!(is_on(&second) && !is_on(&third));
        drop(second);
        assert!(is_on(&third));
    }

    #[test]
    fn none_is_taken_over_after_the_first_could_not_be_and_none_ends_a_server_that_has_one() {
        let failing = TakingOver::default();
        assert!(!failing.has_failed() && !failing.note(false) && failing.has_failed());
        let taking = TakingOver::default();
        assert!(taking.note(true) && taking.note(false) && !taking.has_failed());
    }
}
