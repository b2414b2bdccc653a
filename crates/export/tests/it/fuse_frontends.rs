//! The file beside another frontend to the same disk: each sees at once what the other did.

use crate::fuse_mount::{FIXED, Image};
use isobath_disk::{LiveDisk, OpenOptions, Preallocation};
use isobath_export::nbd::wire::{command, option};
use isobath_export::nbd::{Export, Limits, Server};
use isobath_ring::block_on;
use isobath_ring::net::Listener;
use isobath_ring::{Config, Executor};
use isobath_storage_file::FileHost;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

const MIB: u64 = 1 << 20;

/// An NBD server of the disk on a thread of its own.
struct Nbd {
    server: Arc<Server<LiveDisk<FileHost>>>,
    socket: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl Nbd {
    fn new(device: Arc<LiveDisk<FileHost>>, directory: &Path) -> Self {
        let export = Export {
            name: String::new(),
            description: String::new(),
            read_only: false,
            allocation_depth: true,
            bitmaps: Arc::default(),
            device,
        };
        let server = Arc::new(Server::new(vec![export], Limits::default()).unwrap());
        let socket = directory.join("nbd.sock");
        let listener = Listener::bind_unix(&socket).unwrap();
        let serving = server.clone();
        let thread = std::thread::spawn(move || {
            let executor = Executor::new(&Config::default()).unwrap();
            executor.block_on(serving.serve(listener, &[])).unwrap();
        });
        Self { server, socket, thread: Some(thread) }
    }

    fn connect(&self) -> Client {
        let mut client = Client(UnixStream::connect(&self.socket).unwrap());
        let hello = crate::script::option(option::EXPORT_NAME, b"");
        client.0.write_all(&[crate::script::flags(), hello].concat()).unwrap();
        client.take(28);
        client
    }
}

impl Drop for Nbd {
    fn drop(&mut self) {
        self.server.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

struct Client(UnixStream);

impl Client {
    fn take(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn request(&mut self, command: u16, range: (u64, u32), data: &[u8], answer: usize) -> Vec<u8> {
        let request = crate::script::request(command, 0, 1, range, data);
        self.0.write_all(&request).unwrap();
        assert_eq!(self.take(16)[4..8], [0; 4], "command {command} of {range:?}");
        self.take(answer)
    }
}

#[test]
fn two_doors_show_one_disk() {
    for workers in [0, 2] {
        let image = Image::new(4 * MIB, &OpenOptions::default(), FIXED, workers);
        let nbd = Nbd::new(image.device.clone(), image.directory.path());
        let mut client = nbd.connect();
        let files = [image.open(0), image.open(libc::O_DIRECT)];
        for round in 0..400_u32 {
            let file = &files[round as usize % 2];
            let offset = u64::from(round.wrapping_mul(2_654_435_761) % (4 * MIB as u32 - 9000));
            let length = 1 + round * 37 % 9000;
            let (one, other) =
                (vec![round as u8; length as usize], vec![!round as u8; length as usize]);
            client.request(command::WRITE, (offset, length), &one, 0);
            assert!(file.read(offset, length as usize).unwrap() == one, "round {round}");
            assert_eq!(file.write(offset, &other), Ok(u64::from(length)));
            let seen = client.request(command::READ, (offset, length), &[], length as usize);
            assert!(seen == other, "round {round}");
            if round % 16 == 0 {
                client.request(command::WRITE_ZEROES, (offset, length), &[], 0);
                let seen = file.read(offset, length as usize).unwrap();
                assert!(seen.iter().all(|byte| *byte == 0), "round {round}");
                let start = offset / 4096 * 4096;
                let mapped = file.mapped(start, 9000);
                assert!(mapped == file.read(start, 9000).unwrap(), "round {round}");
            }
        }
        block_on(image.device.resize(5 * MIB, Preallocation::Off, false)).unwrap();
        assert_eq!(files[0].size(), 5 * MIB);
        files[1].write(5 * MIB - 4, b"last").unwrap();
        drop((client, files));
        let mut client = nbd.connect();
        assert_eq!(client.request(command::READ, (5 * MIB - 4, 4), &[], 4), b"last");
        drop((client, nbd));
        assert_eq!(image.finish().len() as u64, 5 * MIB);
    }
}
