//! A server beside a test, on a unix socket.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used)]

use super::memory_disk::MemoryDisk;
use isobath_export::frontend::{Entrance, Offered};
use isobath_export::nbd::{Export, Limits, Server};
use isobath_export::tls::Security;
use isobath_ring::net::{Address, Listener};
use isobath_ring::{Config, Executor, Worker};
use isobath_testkit::process::Finished;
use isobath_testkit::{process, tools};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use tempfile::TempDir;

/// A running server. It is stopped, and seen to have ended well, when dropped.
pub struct Served {
    pub server: Arc<Server<MemoryDisk>>,
    /// Those of the exports that it began with.
    disks: Vec<Arc<MemoryDisk>>,
    pub socket: PathBuf,
    /// The address of the TCP listener.
    pub tcp: std::net::SocketAddr,
    pub directory: TempDir,
    threads: Vec<JoinHandle<()>>,
    workers: Vec<Worker>,
}

/// An export called `name`.
pub fn export(name: &str, disk: MemoryDisk) -> Export<MemoryDisk> {
    let description = format!("the disk {name}");
    Export {
        name: name.into(),
        description,
        read_only: false,
        allocation_depth: true,
        bitmaps: Arc::default(),
        device: Arc::new(disk),
    }
}

impl Served {
    pub fn new(exports: Vec<Export<MemoryDisk>>) -> Self {
        Self::with(exports, Limits::default(), 0)
    }

    /// Serves on a unix socket and on TCP, with connections on `workers` threads of their own.
    pub fn with(exports: Vec<Export<MemoryDisk>>, limits: Limits, workers: usize) -> Self {
        Self::secured(exports, limits, workers, &Security::Plain)
    }

    /// As [`with`](Self::with), with the encryption of TLS.
    pub fn secured(
        exports: Vec<Export<MemoryDisk>>,
        limits: Limits,
        workers: usize,
        security: &Security,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("nbd.sock");
        let disks = exports.iter().map(|export| export.device.clone()).collect();
        let server = Arc::new(Server::new(exports, limits).unwrap());
        let start = |_| Worker::start("nbd", &Config::default()).unwrap();
        let workers: Vec<Worker> = (0..workers).map(start).collect();
        let unix = Listener::bind_unix(&socket).unwrap();
        let tcp = Listener::bind_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
        let Address::Tcp(address) = *tcp.address() else { panic!("not TCP") };
        let mut threads = Vec::new();
        for listener in [unix, tcp] {
            let (server, security) = (server.clone(), security.clone());
            let handles: Vec<_> = workers.iter().map(|worker| worker.handle().clone()).collect();
            threads.push(std::thread::spawn(move || {
                let executor = Executor::new(&Config::default()).unwrap();
                let entrance = Entrance { security, ..Entrance::from(listener) };
                let serving = server.serve_at(entrance, &handles);
                executor.block_on(serving).unwrap();
            }));
        }
        Self { server, disks, socket, tcp: address, directory, threads, workers }
    }

    /// Listens on another unix socket, where only the exports of these names are offered.
    pub fn offer(&mut self, names: &[&str]) -> PathBuf {
        let socket = self.directory.path().join(names.join("+"));
        let listener = Listener::bind_unix(&socket).unwrap();
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let offered = Offered::Named(names.into());
        let entrance = Entrance { offered, ..Entrance::from(listener) };
        let server = self.server.clone();
        self.threads.push(std::thread::spawn(move || {
            let executor = Executor::new(&Config::default()).unwrap();
            executor.block_on(server.serve_at(entrance, &[])).unwrap();
        }));
        socket
    }

    pub fn disk(&self, index: usize) -> &MemoryDisk {
        &self.disks[index]
    }

    /// The URI of an export.
    pub fn uri(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", self.socket.display())
    }

    /// Stops the server and waits for its threads.
    pub fn stop(&mut self) {
        self.server.stop();
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
        self.workers.clear();
        assert_eq!(self.server.connections(), 0);
        assert!(!self.socket.exists(), "the socket file is gone");
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.stop();
        }
    }
}

/// Runs a program that must be installed.
#[track_caller]
pub fn run<I>(program: &str, arguments: I) -> Finished
where
    I: IntoIterator,
    I::Item: AsRef<std::ffi::OsStr>,
{
    process::run_program(tools::require(program), arguments)
}
