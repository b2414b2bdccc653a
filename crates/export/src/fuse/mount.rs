//! A disk mounted on a file, and served there.

use super::channel::{Channel, NoMessage, clone_device};
use super::file::Inode;
use super::handshake::{TooOld, agree};
use super::options::Options;
use super::place::{self, MountError, Place};
use super::request::{Message, Request};
use super::serve::Export;
use super::turns::Turns;
use super::worker::work;
use crate::stop::Stop;
use isobath_disk::BlockDevice;
use isobath_ring::{Handle, JoinError, spawn};
use parking_lot::Mutex;
use std::convert::Infallible;
use std::fs;
use std::future::poll_fn;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::thread;
use zerocopy::IntoBytes;

/// How long to wait for the kernel's first message, in milliseconds. It is already available once the file is mounted.
const GREETING: i32 = 10_000;

/// A disk mounted on a file. Dropping it unmounts.
pub struct Mount<D> {
    export: Export<D>,
    place: Mutex<Place>,
    stop: Stop,
    /// The connection, until `serve` takes it.
    connection: Mutex<Option<OwnedFd>>,
}

impl<D: BlockDevice> Mount<D> {
    /// Mounts a disk on an existing file. Programs that open it wait for [`serve`](Self::serve).
    ///
    /// A stale mount left on the file by a server that no longer runs is removed.
    ///
    /// # Errors
    /// See [`MountError`].
    pub fn new(
        device: Arc<D>,
        mount_point: &Path,
        options: Options,
    ) -> Result<Arc<Self>, MountError> {
        let read_only = !options.writable || device.is_read_only();
        let growable = options.growable && !read_only;
        let (place, connection) = place::mount(mount_point, read_only, options.allow_other)?;
        greet(place.path(), &connection)?;
        let (inode, requests) = (Inode::new(read_only), options.requests);
        let export = Export { device, inode, read_only, growable, requests };
        let connection = Mutex::new(Some(connection));
        Ok(Arc::new(Self { export, place: Mutex::new(place), stop: Stop::default(), connection }))
    }

    /// Serves until [`stop`](Self::stop), or until the file is unmounted. Then completes the requests in flight,
    /// unmounts, and returns. Programs that still have the file open get `ENOTCONN`.
    ///
    /// Requests are spread over `workers`, or stay on this thread if there are none. Dropping the future unmounts
    /// immediately; requests in flight then get no reply.
    ///
    /// # Errors
    /// If the connection fails, or a worker ends. `EBUSY` if this was called before.
    pub async fn serve(self: &Arc<Self>, workers: &[Handle]) -> io::Result<()> {
        let Some(connection) = self.connection.lock().take() else {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        };
        let _unmounting = Unmounting(self);
        let known = self.export.device.size();
        let mut channels = Vec::new();
        for _ in 1..workers.len() {
            channels.push(Channel::new(clone_device(&connection)?));
        }
        channels.push(Channel::new(connection));
        let turns = Arc::new(Turns::new(channels.len()));
        let mut here = Vec::new();
        let mut there = Vec::new();
        for (number, channel) in channels.into_iter().enumerate() {
            let (mount, turns) = (self.clone(), turns.clone());
            let part = move || async move { mount.work(&channel, (&turns, number)).await };
            match workers.get(number) {
                Some(worker) => there.push(worker.spawn_with(part)),
                None => here.push(spawn(part())),
            }
        }
        let mut parts = pin!(async {
            let mut result = Ok(());
            for part in here {
                result = result.and(self.stop_after_failure(part.await));
            }
            for part in there {
                result = result.and(self.stop_after_failure(part.await));
            }
            result
        });
        let mut follow = pin!(self.follow(known));
        poll_fn(|cx| {
            let _: Poll<Infallible> = follow.as_mut().poll(cx);
            parts.as_mut().poll(cx)
        })
        .await
    }

    /// Notifies the kernel of every size change after `known`. The kernel queries the size when a program queries or
    /// opens the file, but truncates asynchronous direct reads to the last size that it learned.
    async fn follow(&self, mut known: u64) -> Infallible {
        let path = self.place.lock().path().to_owned();
        loop {
            self.export.device.resized(known).await;
            known = self.export.device.size();
            let path = path.clone();
            // On a separate thread, since the call waits for a reply from this one.
            let asked = thread::Builder::new().name("fuse-size".into()).spawn(move || {
                let _ = fs::metadata(path);
            });
            if let Err(error) = asked {
                tracing::warn!(%error, "cannot notify the kernel of the disk's new size");
            }
        }
    }

    /// Handles the end of a worker. If it failed, the others stop too.
    fn stop_after_failure(&self, done: Result<io::Result<()>, JoinError>) -> io::Result<()> {
        let done = done.unwrap_or_else(|error| Err(io::Error::other(error.to_string())));
        done.inspect_err(|_| self.stop.request())
    }

    /// Serves one channel, and stops the others when this one ends.
    async fn work(&self, channel: &Channel, place: (&Turns, usize)) -> io::Result<()> {
        let _ending = Ending(&self.stop);
        match work(&self.export, channel, place, &self.stop).await {
            Ok(true) => {
                tracing::debug!("the disk was unmounted");
                Ok(())
            }
            done => done.map(drop),
        }
    }

    /// Stops [`serve`](Self::serve), which then unmounts the file; if that was never called, unmounts it here. May be
    /// called from any thread, and more than once.
    pub fn stop(&self) {
        self.stop.request();
        let connection = self.connection.lock();
        if connection.is_some() {
            self.place.lock().unmount();
        }
    }
}

/// Stops all workers when dropped.
struct Ending<'a>(&'a Stop);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.request();
    }
}

/// Unmounts when dropped, even if workers are still running.
struct Unmounting<'a, D: BlockDevice>(&'a Mount<D>);

impl<D: BlockDevice> Drop for Unmounting<'_, D> {
    fn drop(&mut self) {
        self.0.stop.request();
        self.0.place.lock().unmount();
    }
}

/// Answers the kernel's first message.
fn greet(path: &Path, connection: &OwnedFd) -> Result<(), MountError> {
    let failed = |source| MountError::Io { path: path.to_owned(), source };
    let mut poll = libc::pollfd { fd: connection.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the call reads and writes one valid `pollfd`.
    if unsafe { libc::poll(&raw mut poll, 1, GREETING) } < 0 {
        return Err(failed(io::Error::last_os_error()));
    }
    let channel = Channel::new(connection.try_clone().map_err(failed)?);
    let (message, _) = channel.receive().map_err(|error| match error {
        NoMessage::Io(error) => failed(error),
        error => failed(io::Error::other(error)),
    })?;
    let Message { unique, request: Request::Init(kernel) } = message else {
        return Err(failed(io::Error::other("the kernel's first message was not INIT")));
    };
    match agree(&kernel) {
        Ok(agreed) => {
            channel.reply(unique, agreed.as_bytes(), &[]);
            Ok(())
        }
        Err(TooOld { major, minor }) => {
            channel.fail(unique, libc::EPROTO);
            Err(MountError::Kernel { path: path.to_owned(), major, minor })
        }
    }
}
