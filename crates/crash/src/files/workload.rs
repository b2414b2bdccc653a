//! The clients' workloads while changes are recorded.

use super::client::Client;
use super::oracle::{BEFORE, Clock, Completed, SECTOR, Sectors, What, fill};
use super::serve::Frontend;
use isobath_export::nbd::wire::command;
use isobath_testkit::qemu;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// Bytes of a small request.
const BLOCK: usize = 4096;
/// Bytes of a large one.
const PIECE: usize = 64 << 10;

/// A workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Workload {
    /// 64 KiB after the last, and a flush, repeatedly (the paper's "append").
    Append,
    /// The same, and each piece is overwritten, with a flush of its own (its "append + overwrite").
    Overwrite,
    /// 4 KiB anywhere on an overlay of a full disk, and a flush.
    Random,
    /// Eight concurrent clients: some blocks of 4 KiB anywhere, sometimes zeroes or a discard, and usually a flush.
    Writers,
    /// A Linux guest makes a file system, writes files, and is killed.
    Guest,
}

impl Workload {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Append, Self::Overwrite, Self::Random, Self::Writers, Self::Guest];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Append => "append",
            Self::Overwrite => "overwrite",
            Self::Random => "random",
            Self::Writers => "writers",
            Self::Guest => "guest",
        }
    }

    /// The workload of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|workload| workload.name() == name)
    }

    /// The size of its disk in bytes.
    pub const fn disk_size(self) -> u64 {
        match self {
            Self::Append | Self::Overwrite | Self::Random | Self::Writers => 4 << 20,
            Self::Guest => 64 << 20,
        }
    }

    /// Creates its initial image.
    pub fn make_image(self, image: &Path) -> Result<(), String> {
        if self != Self::Random {
            let options = if self == Self::Writers { "cluster_size=16k" } else { "" };
            qemu::create(image, "qcow2", self.disk_size(), options);
            return Ok(());
        }
        let base = image.with_extension("base");
        let mut bytes = vec![0; self.disk_size() as usize];
        fill(&mut bytes, BEFORE, 0);
        fs::write(&base, bytes).map_err(|error| format!("{}: {error}", base.display()))?;
        qemu::create_overlay(image, &base, "raw", "");
        Ok(())
    }

    /// Runs it against a server; not for [`Guest`](Self::Guest).
    pub fn run(self, frontend: &Frontend, seed: u64) -> Result<Sectors, String> {
        let clock = Clock::new(frontend.record.clone());
        let next = AtomicU64::new(BEFORE + 1);
        let clients = if self == Self::Writers { 8 } else { 1 };
        let work = |number: u64| {
            let mut writer = Writer {
                client: Client::connect(&frontend.socket)?,
                clock: &clock,
                next: &next,
                rng: SmallRng::seed_from_u64(seed ^ number << 32),
                requests: Vec::new(),
            };
            match self {
                Self::Append => writer.append(60, false)?,
                Self::Overwrite => writer.append(40, true)?,
                Self::Random => writer.one_block_at_a_time(self.disk_size(), 150)?,
                Self::Writers | Self::Guest => writer.beside_others(self.disk_size(), 40)?,
            }
            Ok::<_, io::Error>(writer.requests)
        };
        let requests = thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> =
                (0..clients).map(|number| scope.spawn(move || work(number))).collect();
            let mut requests = Vec::new();
            for thread in threads {
                match thread.join() {
                    Ok(done) => requests.extend(done?),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            Ok(requests)
        });
        let requests = requests.map_err(|error: io::Error| format!("a client: {error}"))?;
        let sectors = self.disk_size() as usize / SECTOR;
        Ok(Sectors::new(requests, sectors, self == Self::Random))
    }
}

/// A client at work.
struct Writer<'a> {
    client: Client,
    clock: &'a Clock,
    /// The next write's number.
    next: &'a AtomicU64,
    rng: SmallRng,
    requests: Vec<Completed>,
}

impl Writer<'_> {
    fn ask(&mut self, what: What, offset: usize, length: usize) -> io::Result<()> {
        let mut data = Vec::new();
        let sector = offset / SECTOR;
        let command = match what {
            What::Write(number) => {
                data.resize(length, 0);
                fill(&mut data, number, sector);
                command::WRITE
            }
            What::Zero => command::WRITE_ZEROES,
            What::Discard => command::TRIM,
            What::Flush => command::FLUSH,
        };
        let sent = self.clock.now();
        self.client.ask(command, offset as u64, length as u32, &data)?;
        let answered = self.clock.now();
        self.requests.push(Completed { what, sector, count: length / SECTOR, sent, answered });
        Ok(())
    }

    fn write(&mut self, offset: usize, length: usize) -> io::Result<()> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.ask(What::Write(number), offset, length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.ask(What::Flush, 0, 0)
    }

    fn append(&mut self, pieces: usize, overwrite: bool) -> io::Result<()> {
        for piece in 0..pieces {
            for _ in 0..=usize::from(overwrite) {
                self.write(piece * PIECE, PIECE)?;
                self.flush()?;
            }
        }
        Ok(())
    }

    fn somewhere(&mut self, disk: u64) -> usize {
        self.rng.random_range(0..disk as usize / BLOCK) * BLOCK
    }

    fn one_block_at_a_time(&mut self, disk: u64, blocks: usize) -> io::Result<()> {
        for _ in 0..blocks {
            let offset = self.somewhere(disk);
            self.write(offset, BLOCK)?;
            self.flush()?;
        }
        Ok(())
    }

    fn beside_others(&mut self, disk: u64, rounds: usize) -> io::Result<()> {
        for _ in 0..rounds {
            for _ in 0..self.rng.random_range(1..=3) {
                let offset = self.somewhere(disk);
                let length = (self.rng.random_range(1..=16) * BLOCK).min(disk as usize - offset);
                match self.rng.random_range(0..20) {
                    0 => self.ask(What::Zero, offset, length)?,
                    1 => self.ask(What::Discard, offset, length)?,
                    _ => self.write(offset, BLOCK)?,
                }
            }
            if self.rng.random_bool(0.7) {
                self.flush()?;
            }
        }
        Ok(())
    }
}
