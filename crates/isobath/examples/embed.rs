//! Embeds a disk in a virtual machine monitor: the guest's processors hand requests to a disk thread, which reports
//! each completion; a snapshot is taken while they do.
//!
//! ```sh
//! isobath create disk.qcow2 1G
//! cargo run --release -p isobath --example embed -- disk.qcow2 overlay.qcow2
//! ```

use isobath::file::FileHost;
use isobath::ring::{Config, Worker, spawn};
use isobath::storage::IoBuf;
use isobath::{Disk, DiskError, OpenOptions, Overlay, Result};
use std::error::Error;
use std::path::PathBuf;
use std::sync::mpsc;

const BLOCK: u64 = 4096;
const QUEUE_DEPTH: u64 = 8;

/// What a guest asks of its disk.
enum Request {
    Read(IoBuf),
    Write(IoBuf),
    Flush,
}

/// The disk of a virtual machine, on a thread of its own.
struct DiskThread {
    disk: Disk<FileHost>,
    worker: Worker,
}

impl DiskThread {
    fn start(image: PathBuf) -> std::result::Result<Self, Box<dyn Error>> {
        let worker = Worker::start("disk", &Config::default())?;
        let opening = worker.handle().spawn_with(move || async move {
            let options = OpenOptions::new().writable(true);
            let disk = Disk::open(FileHost, &image, &options).await?;
            // In the background, prepares for what flushes and closing need.
            let upkeep = disk.clone();
            spawn(async move { upkeep.upkeep().await });
            Ok::<_, DiskError>(disk)
        });
        Ok(Self { disk: opening.wait()??, worker })
    }

    /// Starts a request from any thread. `complete` is called on the disk thread: it would put the request's head into
    /// the used ring, and signal the guest's interrupt.
    fn submit(
        &self,
        offset: u64,
        request: Request,
        complete: impl FnOnce(Result<Option<IoBuf>>) + Send + 'static,
    ) {
        let disk = self.disk.clone();
        // The task goes on although its handle is dropped.
        drop(self.worker.handle().spawn_with(move || async move {
            complete(match request {
                Request::Read(buf) => disk.read(offset, buf).await.map(Some),
                Request::Write(buf) => disk.write(offset, buf).await.map(Some),
                Request::Flush => disk.flush().await.map(|()| None),
            });
        }));
    }

    /// Takes a snapshot: the current image becomes the backing file of a new one. Requests go on.
    fn snapshot(&self, overlay: PathBuf) -> std::result::Result<(), Box<dyn Error>> {
        let disk = self.disk.clone();
        let snapshot = move || async move { disk.snapshot(&Overlay::Create(overlay)).await };
        Ok(self.worker.handle().spawn_with(snapshot).wait()??)
    }

    /// Closes the disk. Requests must have completed.
    fn stop(self) -> std::result::Result<(), Box<dyn Error>> {
        let disk = self.disk.clone();
        Ok(self.worker.handle().spawn_with(move || async move { disk.close().await }).wait()??)
    }
}

/// Writes blocks with several requests in flight, then flushes.
fn guest(
    disk: &DiskThread,
    blocks: std::ops::Range<u64>,
) -> std::result::Result<(), Box<dyn Error>> {
    let (completed, completions) = mpsc::channel();
    let mut flying = 0;
    for block in blocks {
        if flying == QUEUE_DEPTH {
            completions.recv()??;
            flying -= 1;
        }
        let completed = completed.clone();
        let buf = IoBuf::copy_of(&[block as u8; BLOCK as usize]);
        disk.submit(block * BLOCK, Request::Write(buf), move |done| {
            let _ = completed.send(done);
        });
        flying += 1;
    }
    for _ in 0..flying {
        completions.recv()??;
    }
    disk.submit(0, Request::Flush, move |done| {
        let _ = completed.send(done);
    });
    completions.recv()??;
    Ok(())
}

pub(crate) fn run(image: PathBuf, overlay: PathBuf) -> std::result::Result<(), Box<dyn Error>> {
    let disk = DiskThread::start(image)?;
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| guest(&disk, 0..256).map_err(|error| error.to_string()));
        disk.snapshot(overlay)?;
        writer.join().map_err(|_| "the guest's thread panicked")??;
        Ok::<_, Box<dyn Error>>(())
    })?;
    let (completed, completions) = mpsc::channel();
    disk.submit(200 * BLOCK, Request::Read(IoBuf::zeroed(BLOCK as usize)), move |done| {
        let _ = completed.send(done);
    });
    let read = completions.recv()??.ok_or("a read returned no buffer")?;
    assert!(read.iter().all(|byte| *byte == 200));
    println!("256 blocks written, {} layers", disk.disk.depth());
    disk.stop()
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let (Some(image), Some(overlay)) = (arguments.next(), arguments.next()) else {
        return Err("usage: embed IMAGE OVERLAY".into());
    };
    run(image, overlay)
}
