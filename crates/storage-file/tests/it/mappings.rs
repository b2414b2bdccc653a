//! Files that are read through mappings show what system calls show.

use isobath_ring::{Config, Executor, Worker, block_on};
use isobath_storage::{Host, IoBuf, Locking, OpenMode, Storage, StorageExt, ZeroMode};
use isobath_storage_file::{FileHost, FileStorage, LimitedHost, WriteAtOnce};
use std::fs::{self, OpenOptions};
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

const WRITABLE: OpenMode = OpenMode { writable: true, direct: false, locking: Locking::Exclusive };
const READ: OpenMode = OpenMode { writable: false, ..WRITABLE };

fn directory() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn host() -> LimitedHost {
    let host = FileHost::with_descriptors(10);
    host.map_reads(64 << 30);
    // Writes by system calls go to what is mapped.
    host.write_at_once(WriteAtOnce::Anywhere);
    host
}

/// Whether this process has mapped the file.
fn is_mapped(path: &Path) -> bool {
    let path = fs::canonicalize(path).unwrap();
    fs::read_to_string("/proc/self/maps").unwrap().contains(path.to_str().unwrap())
}

/// Numbers that look random.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// Changes a file of up to `most` bytes and reads it, and compares with what it should be. Returns in how many of 40
/// looks the file was mapped: each time that it becomes shorter, this begins anew.
async fn change_and_read(
    path: &Path,
    file: &FileStorage,
    most: usize,
    numbers: &mut Numbers,
) -> usize {
    let (mut model, mut mapped) = (Vec::new(), 0);
    for step in 0..4000_usize {
        mapped += usize::from(step % 100 == 99 && is_mapped(path));
        let offset = numbers.below(most);
        let length = 1 + numbers.below(if step % 8 == 0 { 200_000 } else { 5000 });
        let length = length.min(most - offset);
        let end = offset + length;
        match numbers.below(16) {
            0 | 1 => {
                model.resize(model.len().max(end), 0);
                model[offset..end].fill(step as u8);
                let bytes = IoBuf::copy_of(&vec![step as u8; length]);
                file.write_at(offset as u64, bytes).await.unwrap();
            }
            2 => {
                model.resize(model.len().max(end), 0);
                model[offset..end].fill(0);
                let mode = ZeroMode { may_unmap: step.is_multiple_of(2), only_fast: false };
                file.write_zeroes(offset as u64, length as u64, mode).await.unwrap();
            }
            3 if step.is_multiple_of(20) => {
                model.resize(offset, 0);
                file.set_len(offset as u64).await.unwrap();
            }
            _ => {
                let found = file.read_at(offset as u64, IoBuf::zeroed(length)).await.unwrap();
                let known = &model[offset.min(model.len())..end.min(model.len())];
                let (have, rest) = found.split_at(known.len());
                assert!(have == known && rest.iter().all(|byte| *byte == 0), "step {step}");
            }
        }
    }
    mapped
}

#[test]
fn a_file_that_is_changed_in_every_way_reads_as_it_should() {
    let directory = directory();
    let path = directory.path().join("file");
    let executor = Executor::new(&Config::default()).unwrap();
    for seed in 0..4 {
        let file = block_on(host().create(&path, WRITABLE)).unwrap();
        let numbers = &mut Numbers(seed);
        let mapped = executor.block_on(change_and_read(&path, &file, 1 << 20, numbers));
        assert!(mapped >= 10, "mapped {mapped} of 40 times");
        drop(file);
        assert!(!is_mapped(&path));
    }
}

#[test]
fn threads_that_read_a_file_while_it_is_cut_short_all_go_on() {
    const PAGES: usize = 256;
    let directory = directory();
    let path = directory.path().join("file");
    let content: Vec<u8> = (0..PAGES).flat_map(|page| [page as u8 | 1; 4096]).collect();
    fs::write(&path, &content).unwrap();
    let file = Arc::new(block_on(host().open(&path, READ)).unwrap());
    let content = Arc::new(content);
    let workers = [0; 3].map(|_| Worker::start("reader", &Config::default()).unwrap());
    let read_all = || {
        workers.each_ref().map(|worker| {
            let (file, content) = (file.clone(), content.clone());
            worker.handle().spawn_with(move || async move {
                for page in (0..8 * PAGES).map(|step| step * 7 % PAGES) {
                    let at = page * 4096;
                    let found = file.read_at(at as u64, IoBuf::zeroed(4096)).await.unwrap();
                    let is_whole = *found == content[at..at + 4096];
                    assert!(is_whole || page >= 100 && found.iter().all(|byte| *byte == 0));
                }
            })
        })
    };
    for reading in read_all() {
        reading.wait().unwrap();
    }
    assert!(is_mapped(&path));
    let readings = read_all();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(100 * 4096).unwrap();
    for reading in readings.into_iter().chain(read_all()) {
        reading.wait().unwrap();
    }
    assert!(!is_mapped(&path), "what has lost a part is not mapped any more");
}
