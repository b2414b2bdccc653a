//! A vhost-user-blk server beside a test.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used)]

use isobath_disk::BlockDevice;
use isobath_export::vhost_user::{Options, Server};
use isobath_ring::{Config, Executor, Worker, block_on, yield_now};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A running server. It is stopped, and seen to have ended well, when dropped.
pub struct VhostServed<D: BlockDevice> {
    pub server: Arc<Server<D>>,
    pub device: Arc<D>,
    pub socket: PathBuf,
    thread: Option<JoinHandle<()>>,
    workers: Vec<Worker>,
    _directory: TempDir,
}

impl<D: BlockDevice> VhostServed<D> {
    /// Serves on a socket of its own, with queues on `workers` threads.
    pub fn new(device: Arc<D>, options: Options, workers: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("vhost.sock");
        let server = Server::new(device.clone(), options).unwrap();
        let start = |_| Worker::start("vring", &Config::default()).unwrap();
        let workers: Vec<Worker> = (0..workers).map(start).collect();
        let thread = Some(serve(server.clone(), &socket, &workers));
        Self { server, device, socket, thread, workers, _directory: directory }
    }

    /// Stops the server and waits for its threads.
    pub fn stop(&mut self) {
        self.server.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
        assert!(!self.server.connected());
    }

    /// Stops the server and starts another one in its place.
    pub fn restart(&mut self, options: Options) {
        self.stop();
        self.server = Server::new(self.device.clone(), options).unwrap();
        self.thread = Some(serve(self.server.clone(), &self.socket, &self.workers));
    }

    /// Waits until every queue without requests waits for its kick in the kernel, if all queues run.
    pub fn wait_idle(&self) {
        for worker in &self.workers {
            // A queue tries to read its kick's count in one turn of the thread and asks to be told of it in the next;
            // a turn's end gives the kernel what was asked for.
            let turns = worker.handle().spawn_with(|| async {
                for _ in 0..3 {
                    yield_now().await;
                }
            });
            block_on(turns).unwrap();
        }
    }

    /// Waits until a client is connected, or none is.
    pub fn wait_connected(&self, connected: bool) {
        let deadline = Instant::now() + Duration::from_mins(1);
        while self.server.connected() != connected {
            assert!(Instant::now() < deadline, "a client should be connected: {connected}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn serve<D: BlockDevice>(
    server: Arc<Server<D>>,
    socket: &Path,
    workers: &[Worker],
) -> JoinHandle<()> {
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket).unwrap();
    let handles: Vec<_> = workers.iter().map(|worker| worker.handle().clone()).collect();
    std::thread::spawn(move || {
        let executor = Executor::new(&Config::default()).unwrap();
        executor.block_on(server.serve(listener, &handles)).unwrap();
    })
}

impl<D: BlockDevice> Drop for VhostServed<D> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The queues' threads end before the directory goes, whatever has become of the server's.
            self.server.stop();
            let _ = self.thread.take().map(JoinHandle::join);
        } else {
            self.stop();
        }
    }
}
