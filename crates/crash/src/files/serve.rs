//! A server like `isobath serve`, whose changes of files are recorded.

use isobath_disk::{Disk, OpenOptions};
use isobath_export::nbd::{Export, Limits, Server};
use isobath_ring::net::Listener;
use isobath_ring::{Config, Executor, Worker, spawn};
use isobath_storage_file::FileHost;
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_storage_test::recorder::{Entry, Record, RecorderHost};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;

/// Threads that serve clients, besides the one that accepts them.
const WORKERS: usize = 2;

/// The address of a server, and the changes that it has made so far.
pub struct Frontend {
    /// The unix socket.
    pub socket: PathBuf,
    /// The changes of files.
    pub record: Record,
}

/// Serves `image` while `work` runs, and closes it. Returns all changes of files, and the result of `work`.
pub fn record<T>(
    image: &Path,
    options: &OpenOptions,
    work: impl FnOnce(&Frontend) -> Result<T, String>,
) -> Result<(Vec<Entry>, T), String> {
    let directory = tempfile::tempdir().map_err(|error| format!("no directory: {error}"))?;
    // States are torn into the smallest pieces, whatever this machine's disk guarantees.
    let host = RecorderHost::new(FileHost).promising(512);
    let frontend = Frontend { socket: directory.path().join("nbd.sock"), record: host.record() };
    let (ready, started) = mpsc::channel();
    let done = thread::scope(|scope| {
        let serving = scope.spawn(|| serve(host.any(), image, options, &frontend.socket, ready));
        let server = started.recv();
        let done = server.map_or_else(
            |_| Err("the server did not start".into()),
            |server| {
                let _stops = Stops(server);
                work(&frontend)
            },
        );
        match serving.join() {
            Ok(served) => served.and(done),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })?;
    Ok((frontend.record.entries(), done))
}

/// A server that ends with this value, also where `work` panics: its thread is waited for.
struct Stops(Arc<Server<Disk<AnyHost>>>);

impl Drop for Stops {
    fn drop(&mut self) {
        self.0.stop();
    }
}

fn told(error: impl Display) -> String {
    error.to_string()
}

fn serve(
    host: AnyHost,
    image: &Path,
    options: &OpenOptions,
    socket: &Path,
    ready: Sender<Arc<Server<Disk<AnyHost>>>>,
) -> Result<(), String> {
    Executor::new(&Config::default()).map_err(told)?.block_on(async {
        let disk = Arc::new(Disk::open(host, image, options).await.map_err(told)?);
        let export = Export {
            name: "disk".into(),
            description: String::new(),
            read_only: false,
            allocation_depth: true,
            bitmaps: Arc::default(),
            device: disk.clone(),
        };
        let server = Arc::new(Server::new(vec![export], Limits::default()).map_err(told)?);
        let listener = Listener::bind_unix(socket).map_err(told)?;
        let start = |number| Worker::start(&format!("nbd-{number}"), &Config::default());
        let workers: Vec<Worker> =
            (0..WORKERS).map(start).collect::<Result<_, _>>().map_err(told)?;
        let handles: Vec<_> = workers.iter().map(|worker| worker.handle().clone()).collect();
        let attended = disk.clone();
        let upkeep = spawn(async move { attended.upkeep().await });
        // If the receiver is gone, nobody waits for it any more.
        let _ = ready.send(server.clone());
        drop(ready);
        server.serve(listener, &handles).await.map_err(told)?;
        drop(workers);
        disk.close().await.map_err(told)?;
        upkeep.await.map_err(told)?.map_err(told)
    })
}
