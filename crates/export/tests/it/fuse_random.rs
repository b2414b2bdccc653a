//! Random use of the file against a model, as fsx does it.

use crate::fuse_mount::{FULL, Image};
use isobath_disk::OpenOptions;
use isobath_testkit::model::Model;
use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};

const OPERATIONS: usize = 2000;
const LEAST: u64 = 1 << 20;
const MOST: u64 = 8 << 20;
const KEEP: i32 = libc::FALLOC_FL_KEEP_SIZE;

struct Random(TestRng);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0.next_u64() % limit
    }

    /// A range within the disk, often at odd places, sometimes past the end.
    fn range(&mut self, size: u64, past: bool) -> (u64, u64) {
        let align = [1, 1, 512, 4096, 65_536][self.below(5) as usize];
        let length = match self.below(8) {
            0 => self.below(1 << 20),
            1..3 => self.below(1 << 17),
            _ => self.below(1 << 14),
        };
        let offset = self.below(size) / align * align;
        let length = (length / align * align).max(1);
        let length = if past && self.below(20) == 0 { length } else { length.min(size - offset) };
        (offset, length)
    }
}

fn run(seed: u8, open: &OpenOptions, workers: usize) {
    let mut random = Random(TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]));
    let image = Image::new(LEAST, open, FULL, workers);
    let mut model = Model::new(LEAST);
    let files = [image.open(0), image.open(libc::O_DIRECT), image.open(libc::O_DSYNC)];
    for number in 0..OPERATIONS {
        let file = &files[random.below(3) as usize];
        let kind = random.below(100);
        let (offset, length) = random.range(model.size(), kind < 35 && model.size() < MOST);
        let end = offset + length;
        let grown = end.max(model.size()).next_multiple_of(512);
        let told = match kind {
            0..30 => {
                let mut bytes = vec![0; length as usize];
                random.0.fill_bytes(&mut bytes);
                model.resize(grown);
                model.write(offset, &bytes);
                file.write(offset, &bytes).map(|written| assert_eq!(written, length))
            }
            30..35 => {
                model.resize(grown);
                model.fill(offset, length, 0);
                file.fallocate(libc::FALLOC_FL_ZERO_RANGE, offset, length).map(drop)
            }
            35..45 => {
                model.fill(offset, length, 0);
                file.fallocate(libc::FALLOC_FL_PUNCH_HOLE | KEEP, offset, length).map(drop)
            }
            45..50 => {
                model.fill(offset, length, 0);
                file.fallocate(libc::FALLOC_FL_ZERO_RANGE | KEEP, offset, length).map(drop)
            }
            50..52 if model.size() < MOST => {
                let size = model.size() + random.below(1 << 18);
                model.resize(size.next_multiple_of(512));
                file.truncate(size).map(drop)
            }
            52..55 => file.sync().map(drop),
            55..65 => {
                let start = offset / 4096 * 4096;
                let bytes = file.mapped(start, (end - start) as usize);
                model.check_range(start, &bytes).unwrap_or_else(|it| panic!("{number}: {it}"));
                Ok(())
            }
            65..70 => {
                // Whatever lies between here and the data found must be zero.
                let data = file.seek(offset, libc::SEEK_DATA);
                let until = data.unwrap_or(model.size());
                assert!(until >= offset && data.is_ok_and(|at| at < model.size()) != data.is_err());
                let hole = model.read(offset, (until - offset) as usize);
                assert!(hole.iter().all(|byte| *byte == 0), "{number}: data in a hole");
                Ok(())
            }
            _ => file.read(offset, length as usize).map(|bytes| {
                assert_eq!(bytes.len() as u64, length);
                model.check_range(offset, &bytes).unwrap_or_else(|it| panic!("{number}: {it}"));
            }),
        };
        assert_eq!(told, Ok(()), "operation {number}, kind {kind}, {length} bytes at {offset}");
        assert_eq!(file.size(), model.size(), "operation {number}, kind {kind}");
    }
    let whole = files[0].read(0, model.size() as usize).unwrap();
    model.check(&whole).unwrap();
    drop(files);
    model.check(&image.finish()).unwrap();
}

#[test]
fn random_use_agrees_with_a_model() {
    run(1, &OpenOptions::default(), 0);
    run(2, &OpenOptions::default(), 2);
}

#[test]
fn random_use_past_the_page_cache_agrees_with_a_model() {
    run(3, &OpenOptions::new().direct(true), 1);
}
