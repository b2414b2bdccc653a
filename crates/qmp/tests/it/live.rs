//! A monitor of live disks, as `isobath serve` sets it up.

use isobath_disk::{LiveDisk, OpenOptions};
use isobath_export::frontend::Settings;
use isobath_export::registry::{Frontends, Listeners};
use isobath_qmp::client::{Address, Client};
use isobath_qmp::monitor::{Drive, Monitor};
use isobath_qmp::server::{Events, Limits, Server};
use isobath_ring::net::Listener;
use isobath_ring::{Config, Executor, spawn};
use isobath_storage::window::WindowHost;
use isobath_storage_file::FileHost;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

/// The monitor on a thread; it ends by `quit`.
pub(crate) struct Live {
    pub(crate) qmp: PathBuf,
    disks: Receiver<Arc<LiveDisk<WindowHost<FileHost>>>>,
    thread: Option<JoinHandle<()>>,
}

impl Live {
    /// Serves images, each in the device of that name. The sockets are in `directory`.
    pub(crate) fn start(directory: &Path, images: &[(&str, &Path)]) -> Self {
        let (qmp, nbd) = (directory.join("qmp.sock"), directory.join("nbd.sock"));
        let listeners = (Listener::bind_unix(&qmp).unwrap(), Listener::bind_unix(&nbd).unwrap());
        let images: Vec<_> =
            images.iter().map(|(name, path)| ((*name).to_owned(), path.to_path_buf())).collect();
        let (opened, disks) = channel();
        let thread = thread::spawn(move || {
            let executor = Executor::new(&Config::default()).unwrap();
            executor.block_on(run(images, listeners, opened));
        });
        Self { qmp, disks, thread: Some(thread) }
    }

    /// The next disk that it has opened.
    pub(crate) fn disk(&self) -> Arc<LiveDisk<WindowHost<FileHost>>> {
        self.disks.recv().unwrap()
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(&Address::Unix(self.qmp.clone())).unwrap()
    }

    /// Waits for the end.
    pub(crate) fn ended(mut self) {
        self.thread.take().unwrap().join().unwrap();
    }

    /// Ends it by `quit`.
    pub(crate) fn quit(self) {
        self.client().execute("quit", serde_json::json!({})).unwrap();
        self.ended();
    }
}

async fn run(
    images: Vec<(String, PathBuf)>,
    (qmp, nbd): (Listener, Listener),
    opened: Sender<Arc<LiveDisk<WindowHost<FileHost>>>>,
) {
    let (host, options) = (WindowHost::new(FileHost), OpenOptions::new().writable(true));
    let mut drives = Vec::new();
    for (name, path) in images {
        let disk = LiveDisk::open(host.clone(), &path, &options).await.unwrap();
        opened.send(disk.clone()).unwrap();
        drives.push(Drive::new(name, disk));
    }
    let listeners = Listeners::from([("nbd", vec![nbd.into()])]);
    let frontends = Frontends::start(&[], listeners).unwrap();
    let exporting = frontends.serve();
    let disks: Vec<_> = drives.iter().map(|drive| drive.disk().clone()).collect();
    let events = Events::default();
    let monitor = Monitor::new(host, options, drives, frontends.clone(), events.clone());
    for drive in monitor.drives() {
        let nbd = frontends.of("nbd").unwrap();
        monitor.export(nbd, drive.device(), &drive, Settings::default()).unwrap();
    }
    let server = Server::new(monitor, events, Limits::default());
    let (watched, serving) = (server.clone(), server.clone());
    let watching = spawn(async move { watched.service().watch().await });
    let serving = spawn(async move { serving.serve(qmp).await });
    server.service().quit_requested().await;
    server.service().end().await;
    server.stop();
    serving.await.unwrap().unwrap();
    watching.abort();
    frontends.stop();
    for ended in exporting {
        ended.await.unwrap().unwrap();
    }
    for disk in disks {
        disk.close().await.unwrap();
    }
}
