//! The keeper of a ublk device: a program beside the server, with the rights that only adding and removing one needs.
//!
//! The server gives up its rights, and confines itself, before it serves. And who waits in the kernel for a disk to be
//! written, or for others to close it, must not be the one that serves it. The keeper outlives a server that is killed,
//! and deletes its device then.

mod control;
mod image;
mod message;
mod moments;
mod outliving;
mod record;
mod rights;
mod task;
mod users;
pub(crate) mod wire;

pub(crate) use image::{Image, ImageFile, digest};
pub use rights::give_up_admin;

use control::{Added, Control, open_device, outlives};
use isobath_ring::net::Stream;
use isobath_storage::FileId;
use message::{Order, Report};
use moments::{Events, Server};
use outliving::{Outliving, Successor};
use parking_lot::Mutex;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;
use task::Task;
use users::{Claim, Claimed, Disk};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wire::{ANY_DEVICE, Parameters, QUIESCED};

/// How long the keeper waits, at first and at most, before it looks again whether a disk is still in use.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(4);
/// How often the driver is asked again which device it has if it does not say.
const ATTEMPTS: u32 = 50;
/// How long a look takes at most unless something does not answer.
const LOOK: Duration = Duration::from_secs(2);

/// A device that a keeper has added.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) number: u32,
    pub(crate) queues: u16,
    /// Its character device.
    pub(crate) file: OwnedFd,
}

/// A device that waits for a server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub(crate) queues: u16,
    pub(crate) depth: u16,
}

/// The keeper of a device that is to be added or taken over, from the server's side. When this is dropped, the keeper
/// deletes the device, whoever uses it, and ends. A device that outlives its server first waits for another one.
pub struct Keeper {
    number: Option<u32>,
    waits: bool,
    stream: Arc<Mutex<UnixStream>>,
}

/// The opening of the image of a device that waits.
pub struct Opening {
    stream: Arc<Mutex<UnixStream>>,
    is_known: bool,
}

impl fmt::Debug for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opening").field("is_known", &self.is_known).finish_non_exhaustive()
    }
}

impl Opening {
    /// Whether it is known how the last server has left the image: if not, only the image can show that nobody has
    /// written to it since.
    pub fn is_known(&self) -> bool {
        self.is_known
    }

    /// This file is open and locked, and about to be changed.
    ///
    /// # Errors
    /// It is one of the image, and was changed since the last server has left it, or the keeper has ended: for users.
    pub fn locked(&self, id: FileId) -> Result<(), String> {
        let mut stream = self.stream.lock();
        let told = tell(&mut stream, &Order::Locked { id });
        match told.and_then(|()| next(&mut stream)).map_err(|error| error.to_string())? {
            Report::Done => Ok(()),
            Report::Failed(error) => Err(error),
            _ => Err(unexpected().to_string()),
        }
    }
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper").field("number", &self.number).finish_non_exhaustive()
    }
}

impl Keeper {
    /// Starts the keeper of a device with this number, or with any that is free. `program` is one whose `main` calls
    /// [`keep`]; it is given its arguments and standard streams here. With `outlives` the device waits for another
    /// server for so many seconds if this one is killed. Such a device needs a number, and a server that [gives up a
    /// right](give_up_admin).
    ///
    /// # Errors
    /// The program cannot be started; it lacks the driver or a right; another server has a device with this number that
    /// outlives it; one waits that cannot be taken over: for users.
    pub fn start(
        mut program: Command,
        number: Option<u32>,
        outlives: Option<u32>,
    ) -> Result<Self, String> {
        let task = Task::new(number, outlives)?;
        let (ours, theirs) = UnixStream::pair().map_err(|error| error.to_string())?;
        // Not by its orders: images may have taken over who gives them.
        program
            .args(task.arguments())
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // Nobody waits for it: it ends after the server, or has answered before.
        let started = program.spawn();
        started.map_err(|error| format!("cannot start the keeper of the device: {error}"))?;
        drop(program);
        let mut keeper = Self { number, waits: false, stream: Arc::new(Mutex::new(ours)) };
        let begun = keeper.waiting().map_err(|error| error.to_string())?;
        keeper.waits = begun.is_some();
        Ok(keeper)
    }

    /// The number of its device; `None` if that is to be any that is free.
    pub fn number(&self) -> Option<u32> {
        self.number
    }

    /// Whether a device waits for this server, or will once the one before has ended. What those who use it were told
    /// had completed must be in the image, and the keeper be told before that is [opened](Self::open).
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// The image of the device that waits is about to be opened, by this name, an absolute path.
    ///
    /// # Errors
    /// The device is of another image, or the keeper has ended: for users.
    pub fn open(&self, name: &Path) -> io::Result<Opening> {
        let mut stream = self.stream.lock();
        tell(&mut stream, &Order::Open { name: name.to_owned() })?;
        let is_known = match next(&mut stream)? {
            Report::Done => true,
            Report::Unknown => false,
            Report::Failed(error) => return Err(io::Error::other(error)),
            _ => return Err(unexpected()),
        };
        Ok(Opening { stream: self.stream.clone(), is_known })
    }

    /// Looks whether a device waits for a server of this image. Blocks while the server before is still ending.
    ///
    /// # Errors
    /// One does that cannot be the disk with these parameters, or there is another device with this number.
    pub(crate) fn look(&self, parameters: Parameters, image: Image) -> io::Result<Option<Waiting>> {
        tell(&mut self.stream.lock(), &Order::Look { parameters, image })?;
        self.waiting()
    }

    /// The device that waits, as the keeper answers.
    fn waiting(&self) -> io::Result<Option<Waiting>> {
        match next(&mut self.stream.lock())? {
            Report::Waits { queues, depth } => Ok(Some(Waiting { queues, depth })),
            Report::Done => Ok(None),
            Report::Failed(error) => Err(io::Error::other(error)),
            _ => Err(unexpected()),
        }
    }

    /// Has the device taken over that waits. It is served after [`begin_serving`](Self::begin_serving), and goes on
    /// with [`start_disk`](Self::start_disk).
    pub(crate) fn adopt(&self) -> io::Result<Device> {
        self.device(&Order::Adopt)
    }

    /// All queues of the device that was taken over are to be mapped and served from now on: if some are, and others
    /// not, no other server can take it over.
    pub(crate) fn begin_serving(&self) -> io::Result<()> {
        tell(&mut self.stream.lock(), &Order::Serve)?;
        self.done()
    }

    /// Has the device added.
    pub(crate) fn add(&self, queues: u16, depth: u16, max_bytes: u32) -> io::Result<Device> {
        self.device(&Order::Add { queues, depth, max_bytes })
    }

    /// The device that comes of an order.
    fn device(&self, order: &Order) -> io::Result<Device> {
        let mut stream = self.stream.lock();
        tell(&mut stream, order)?;
        match next(&mut stream)? {
            Report::Added { number, queues } => {
                let (_, file) = stream.recv_with_fd(&mut [0; 1]).map_err(io::Error::from)?;
                let file = OwnedFd::from(file.ok_or_else(ended)?);
                // SAFETY: a plain system call on an open descriptor.
                if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
                    return Err(io::Error::last_os_error());
                }
                Ok(Device { number, queues, file })
            }
            Report::Failed(error) => Err(io::Error::other(error)),
            _ => Err(unexpected()),
        }
    }

    /// Has the device made a disk, which blocks until the kernel has read its partition table, or lets one go on that
    /// was taken over. All queues must be served meanwhile.
    pub(crate) fn start_disk(&self, parameters: Parameters) -> io::Result<()> {
        tell(&mut self.stream.lock(), &Order::Start { parameters })?;
        self.done()
    }

    /// Waits until the keeper has ended.
    ///
    /// # Errors
    /// This cannot be waited for.
    pub(crate) fn ended(&self) -> io::Result<impl Future<Output = io::Result<()>> + use<>> {
        let stream = Stream::from(OwnedFd::from(self.stream.lock().try_clone()?));
        Ok(async move { stream.hung_up().await })
    }

    /// Blocks until nobody uses the disk; from then on nothing can be mounted from it. Meanwhile tells `waits` who
    /// does, whenever that changes.
    pub(crate) fn release(&self, mut waits: impl FnMut(&str)) -> io::Result<()> {
        let mut stream = self.stream.lock();
        tell(&mut stream, &Order::Release)?;
        loop {
            match next(&mut stream)? {
                Report::InUse(users) => waits(&users),
                Report::Done => return Ok(()),
                Report::Failed(error) => return Err(io::Error::other(error)),
                Report::Waits { .. } | Report::Unknown | Report::Added { .. } => {
                    return Err(unexpected());
                }
            }
        }
    }

    /// Blocks until what the kernel has of the disk is written. Somebody must serve it meanwhile.
    ///
    /// # Errors
    /// Something was not written. The kernel tells nobody of that when it writes at the end of a disk.
    pub(crate) fn write_back(&self) -> io::Result<()> {
        tell(&mut self.stream.lock(), &Order::WriteBack)?;
        self.done()
    }

    /// Removes the disk. Somebody must serve it meanwhile.
    pub(crate) fn stop(&self) -> io::Result<()> {
        tell(&mut self.stream.lock(), &Order::Stop)?;
        self.done()
    }

    /// Has the device deleted while it is open here, so that it is no other one of this number. Older kernels cannot.
    pub(crate) fn delete_open(&self) -> io::Result<()> {
        tell(&mut self.stream.lock(), &Order::DeleteOpen)?;
        self.done()
    }

    /// Has the device deleted, once it is closed here.
    pub(crate) fn delete(&self) -> io::Result<()> {
        tell(&mut self.stream.lock(), &Order::Delete)?;
        self.done()
    }

    fn done(&self) -> io::Result<()> {
        match next(&mut self.stream.lock())? {
            Report::Done => Ok(()),
            Report::Failed(error) => Err(io::Error::other(error)),
            _ => Err(unexpected()),
        }
    }
}

fn tell(stream: &mut UnixStream, order: &Order) -> io::Result<()> {
    order.send(stream).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => ended(),
        _ => error,
    })
}

fn next(stream: &mut UnixStream) -> io::Result<Report> {
    Report::receive(stream)?.ok_or_else(ended)
}

/// What is said of a keeper that has ended.
pub(crate) fn ended() -> io::Error {
    io::Error::other("the keeper of the device has ended, which alone can remove it")
}

fn unexpected() -> io::Error {
    io::Error::other("the keeper of the device has answered something else")
}

/// The keeper's program: carries out the orders of the server that has started it with these arguments, and ends after
/// it.
pub fn keep(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let server = std::os::unix::process::parent_id();
    // What ends the server must not end the keeper: a terminal and a service manager signal both.
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGPIPE] {
        // SAFETY: no handler is installed.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    // SAFETY: no memory is involved. If it leads a group already, it stays in that.
    unsafe { libc::setsid() };
    let _ = std::env::set_current_dir("/");
    // SAFETY: the server has given the socket as standard input, which nothing else here uses.
    let stream = UnixStream::from(unsafe { OwnedFd::from_raw_fd(libc::STDIN_FILENO) });
    let begun = Task::parse(arguments).and_then(|task| {
        let server = Server::parent(server);
        let server = server.map_err(|error| format!("cannot watch the server: {error}"))?;
        let control = Control::open()?;
        rights::give_up()?;
        Keeping::begin(
            control,
            stream.try_clone().map_err(|error| error.to_string())?,
            server,
            task,
        )
    });
    let done = match begun {
        Ok(keeping) => keeping.run().is_ok(),
        Err(error) => {
            let _ = Report::Failed(error).send(&mut &stream);
            false
        }
    };
    if done { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What the keeper has.
struct Keeping {
    control: Control,
    stream: UnixStream,
    events: Events,
    server: Server,
    /// The number of the device that it is to add; `None` for any that is free.
    number: Option<u32>,
    /// It has added a device; it never adds another one.
    has_added: bool,
    /// The number of the device that it has to delete.
    device: Option<u32>,
    /// A file of the device in sysfs, which cannot be read any more when the device is deleted.
    seen: Option<File>,
    /// Its character device, until that is sent: only one process can have it open.
    file: Option<OwnedFd>,
    /// What there is of a device that outlives its server.
    outliving: Option<Outliving>,
    /// Held from [`Order::Release`] to the end of the disk.
    claim: Option<Claim>,
}

impl Keeping {
    /// # Errors
    /// The device cannot outlive its server, or one that waits cannot be taken over: for users.
    fn begin(
        control: Control,
        stream: UnixStream,
        server: Server,
        task: Task,
    ) -> Result<Self, String> {
        let number = task.number;
        let events = Events::new(stream.as_fd()).map_err(|error| error.to_string())?;
        let outliving = match (number, task.outlives) {
            (None, _) => None,
            (Some(number), None) => {
                // The server does not touch the image of a device that waits for another one, or will.
                let device = control.device(number).map_err(|error| error.to_string())?;
                if device.is_some_and(|info| info.state == QUIESCED || outlives(&info)) {
                    return Err(taken(number));
                }
                None
            }
            (Some(number), Some(seconds)) => {
                control.check_recovery()?;
                let wait = |moment| events.wait(moment);
                let outliving = Outliving::begin(&control, number, seconds, wait)?;
                events.set(outliving.until()).map_err(|error| error.to_string())?;
                Some(outliving)
            }
        };
        let (has_added, device, seen, file, claim) = (false, None, None, None, None);
        Ok(Self {
            control,
            stream,
            events,
            server,
            number,
            has_added,
            device,
            seen,
            file,
            outliving,
            claim,
        })
    }

    /// Until the server has ended.
    fn run(mut self) -> io::Result<()> {
        let served = self.serve();
        // What is left of a server that was killed. A device whose removal had begun is read-only, and used by nobody.
        let is_being_removed = self.claim.is_some();
        (self.claim, self.file) = (None, None);
        let device = self.device.take().filter(|_| self.is_there());
        if device.is_some()
            && !is_being_removed
            && let Some(mut outliving) = self.outliving.take()
        {
            let waits = outliving.may_wait(&self.control);
            let came = waits && outliving.wait(&self.server, || self.is_there()) == Successor::Came;
            self.outliving = Some(outliving);
            if came {
                return served;
            }
        }
        let deleted = match device {
            Some(number) if self.is_there() => self.delete_own(number),
            Some(_) => Ok(()),
            None if self.events.is_over() => {
                self.outliving.as_mut().map_or(Ok(()), |outliving| outliving.expire(&self.control))
            }
            None => Ok(()),
        };
        if let (Some(outliving), Ok(())) = (&self.outliving, &deleted) {
            outliving.end(&self.server);
        }
        served.and(deleted)
    }

    /// Deletes the device with this number unless it is another one now. As long as the driver does not say which it is,
    /// it is left alone, and looked at again.
    fn delete_own(&self, number: u32) -> io::Result<()> {
        let mut attempts = 0;
        loop {
            let own = self.outliving.as_ref().map_or(Ok(true), |one| one.find_own(&self.control));
            match own {
                Ok(true) => break,
                Ok(false) => return Ok(()),
                Err(error) if attempts == ATTEMPTS => return Err(error),
                Err(_) => {
                    attempts += 1;
                    thread::sleep(FIRST_PAUSE);
                }
            }
        }
        // Others wait for a deletion, and not for this, if the server cannot end.
        let _ = self.control.stop(number);
        if self.is_own() { self.control.delete(number) } else { Ok(()) }
    }

    /// Whether the device with the number of this keeper's is the one that it has added or taken over, as far as its
    /// number in the driver says.
    fn is_own(&self) -> bool {
        self.outliving.as_ref().is_none_or(|outliving| outliving.is_own(&self.control))
    }

    /// Whether the device has not been deleted, as an administrator can: another one may have its number then.
    fn is_there(&self) -> bool {
        self.seen.as_ref().is_none_or(|file| file.read_at(&mut [0; 1], 0).is_ok())
    }

    fn serve(&mut self) -> io::Result<()> {
        let waits = self.outliving.as_ref().is_some_and(Outliving::waits);
        let begun = if waits { Report::Waits { queues: 0, depth: 0 } } else { Report::Done };
        begun.send(&mut self.stream)?;
        loop {
            self.events.next();
            if self.events.is_over() {
                let over = "the time is over for which the device waits for another server";
                let _ = Report::Failed(over.into()).send(&mut self.stream);
                return Err(io::Error::from(io::ErrorKind::TimedOut));
            }
            let Some(order) = Order::receive(&mut self.stream)? else { return Ok(()) };
            match self.carry_out(order) {
                Ok(report) => report.send(&mut self.stream)?,
                Err(error) => Report::Failed(error).send(&mut self.stream)?,
            }
            if let Some(file) = self.file.take() {
                let sent = self.stream.send_with_fd(&[0_u8; 1][..], file.as_raw_fd());
                sent.map_err(io::Error::from)?;
            }
        }
    }

    fn carry_out(&mut self, order: Order) -> Result<Report, String> {
        match order {
            Order::Open { name } => {
                let is_known = self.outliving()?.open(&name)?;
                return Ok(if is_known { Report::Done } else { Report::Unknown });
            }
            Order::Locked { id } => return self.outliving()?.lock(id).map(|()| Report::Done),
            Order::Look { parameters, image } => return self.look_for(&parameters, image),
            Order::Adopt => return self.adopt(),
            Order::Add { queues, depth, max_bytes } => return self.add(queues, depth, max_bytes),
            _ => {}
        }
        let number = self.device.ok_or("there is no device")?;
        match order {
            Order::Open { .. }
            | Order::Locked { .. }
            | Order::Look { .. }
            | Order::Adopt
            | Order::Add { .. } => {}
            Order::Serve => self.outliving()?.begin_serving()?,
            Order::Start { parameters } => self.start(number, &parameters)?,
            Order::Release => self.release(number)?,
            Order::WriteBack => {
                // Where the driver can keep a disk without a server, its removal does not write.
                let write_back = match self.outliving {
                    Some(_) => Claim::write_back_last,
                    None => Claim::write_back,
                };
                let written = self.claim.as_ref().map_or(Ok(()), write_back);
                written.map_err(|error| {
                    format!(
                        "what was written to /dev/ublkb{number} last has not all reached the image: {error}"
                    )
                })?;
            }
            Order::Stop | Order::DeleteOpen if !self.is_own() => {
                return Err(format!("the ublk device {number} was removed meanwhile"));
            }
            Order::Stop => {
                let stopped = self.control.stop(number);
                stopped.map_err(|error| format!("cannot remove /dev/ublkb{number}: {error}"))?;
                self.claim = None;
            }
            Order::DeleteOpen => {
                let deleted = self.control.delete_open(number);
                deleted.map_err(|error| error.to_string())?;
                self.device = None;
            }
            Order::Delete if !self.is_there() => self.device = None,
            Order::Delete => {
                let deleted = self.delete_own(number);
                deleted.map_err(|error| format!("cannot delete ublk device {number}: {error}"))?;
                self.device = None;
            }
        }
        Ok(Report::Done)
    }

    fn outliving(&mut self) -> Result<&mut Outliving, String> {
        self.outliving.as_mut().ok_or_else(|| "the device does not outlive its server".into())
    }

    /// Makes the device a disk, or lets one go on that was taken over.
    fn start(&mut self, number: u32, parameters: &Parameters) -> Result<(), String> {
        if !self.is_own() {
            return Err(format!("the ublk device {number} was removed meanwhile"));
        }
        let server = self.events.as_fd();
        let started = match &mut self.outliving {
            Some(outliving) if outliving.is_recovering() => {
                let ended = outliving.end_recovery(&self.control, number, &self.events);
                ended.and_then(|()| self.events.set(None))
            }
            Some(_) => match rights::is_admin(self.server.number) {
                Ok(false) => self.control.start(number, parameters, server),
                // Nothing could remove the device if the server were killed while the kernel reads its partition table.
                Ok(true) => Err(io::Error::other("the server has kept CAP_SYS_ADMIN")),
                Err(error) => Err(error),
            },
            None => self.control.start(number, parameters, server),
        };
        started.map_err(|error| format!("the kernel refuses the disk: {error}"))
    }

    /// Looks for a device that waits.
    fn look_for(&mut self, parameters: &Parameters, image: Image) -> Result<Report, String> {
        let wait = |moment| self.events.wait(moment);
        let outliving = self.outliving.as_mut().ok_or("the device does not outlive its server")?;
        let waiting = outliving.look(&self.control, parameters, image, wait)?;
        Ok(waiting
            .map_or(Report::Done, |Waiting { queues, depth }| Report::Waits { queues, depth }))
    }

    /// Takes over the device that was found, and opens it.
    fn adopt(&mut self) -> Result<Report, String> {
        self.begin_device()?;
        let wait = |moment| self.events.wait(moment);
        let outliving = self.outliving.as_mut().ok_or("the device does not outlive its server")?;
        let queues = outliving.adopt(&self.control, &mut self.device, wait)?;
        let number = self.device.ok_or("there is no device")?;
        self.opened(number)?;
        Ok(Report::Added { number, queues })
    }

    /// There is to be a device, the only one.
    fn begin_device(&mut self) -> Result<(), String> {
        if self.has_added {
            return Err("there was a device already".into());
        }
        self.has_added = true;
        // Who uses the device is looked for there.
        for directory in ["/sys/class/block", "/proc/self/fd"] {
            if !Path::new(directory).is_dir() {
                return Err(format!("there is no {directory}: mount the host's /sys and /proc"));
            }
        }
        Ok(())
    }

    /// Opens the device, which is there.
    fn opened(&mut self, number: u32) -> Result<(), String> {
        self.device = Some(number);
        self.seen = File::open(format!("/sys/class/ublk-char/ublkc{number}/uevent")).ok();
        self.file = Some(open_device(number).map_err(|error| error.to_string())?);
        Ok(())
    }

    /// Adds a device and opens it.
    fn add(&mut self, queues: u16, depth: u16, max_bytes: u32) -> Result<Report, String> {
        self.begin_device()?;
        let number = self.number.unwrap_or(ANY_DEVICE);
        let nonce = self.outliving.as_mut().map(Outliving::begin_new).transpose()?;
        let added = self.control.add(number, queues, depth, max_bytes, nonce);
        let Added { number, queues } = added.map_err(|error| match error.raw_os_error() {
            Some(libc::EEXIST) => taken(number),
            Some(libc::EPERM) => {
                "adding a ublk device needs CAP_SYS_ADMIN: start the server as root \
                                  (see --user)"
                    .into()
            }
            _ => format!("cannot add a ublk device: {error}"),
        })?;
        self.opened(number)?;
        Ok(Report::Added { number, queues })
    }

    /// Waits until nobody uses the disk, or the server has ended, and claims it.
    fn release(&mut self, number: u32) -> Result<(), String> {
        let disk = Arc::new(Disk::new(number));
        let (mut told, mut pause) = (String::new(), FIRST_PAUSE);
        loop {
            // In doubt it is used.
            let users = match self.look(&disk, &mut told)? {
                Ok(Claimed::Free(claim)) => {
                    self.claim = Some(claim);
                    return Ok(());
                }
                Ok(Claimed::Gone) => match self.control.is_live(number) {
                    Ok(false) => return Ok(()),
                    Ok(true) => "it is not in /sys/class/block, and cannot be looked at".into(),
                    Err(error) => unknown(&error),
                },
                Ok(Claimed::InUse(users)) => users,
                Err(error) => unknown(&error),
            };
            self.tell_users(users, &mut told)?;
            if self.events.wait(pause) {
                return Err("the server has ended".into());
            }
            pause = LONGEST_PAUSE.min(pause * 2);
        }
    }

    /// Attempts to claim a disk. Tells the server if something does not answer, and waits until it does.
    fn look(&mut self, disk: &Arc<Disk>, told: &mut String) -> Result<io::Result<Claimed>, String> {
        let (result, answer) = mpsc::sync_channel(1);
        let looking = disk.clone();
        let looked = thread::Builder::new().spawn(move || result.send(looking.claim()));
        if let Err(error) = looked {
            return Ok(Err(error));
        }
        loop {
            match answer.recv_timeout(LOOK) {
                Ok(claimed) => return Ok(claimed),
                Err(RecvTimeoutError::Disconnected) => {
                    return Ok(Err(io::Error::other("a thread has ended")));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.tell_users(format!("{} does not answer", disk.looks_at()), told)?;
            if self.events.wait(Duration::ZERO) {
                return Err("the server has ended".into());
            }
        }
    }

    /// Tells the server who uses the disk, unless it knows.
    fn tell_users(&mut self, users: String, told: &mut String) -> Result<(), String> {
        if users != *told {
            let sent = Report::InUse(users.clone()).send(&mut self.stream);
            sent.map_err(|error| error.to_string())?;
            *told = users;
        }
        Ok(())
    }
}

fn taken(number: u32) -> String {
    format!(
        "there is a ublk device {number} already: choose another number, or 'auto' for one that is free; 'ublk del -n \
         {number}' removes one that nobody serves, and --ublk-recovery serves one that waits for another server"
    )
}

fn unknown(error: &io::Error) -> String {
    format!("it cannot be told who uses it: {error}")
}
